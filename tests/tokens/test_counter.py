"""Counting tokens: with the true vocabulary, without one, and while it is on its way."""

import argparse
import inspect
import json
import logging
import os
import random
import socket
import subprocess
import sys
import threading

import anyio
import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st

from agentfsm.tokens import load_counter, tiktoken_counter
from agentfsm.tokens.estimate import EstimatedCounter
from agentfsm.tokens.tiktoken_counter import PIECE_CHARS, TiktokenCounter, Vocabularies
from tests.support.vocabulary import vocabulary_dir

DICE = random.Random(7)
RECORDS = [{"id": n, "user_id": DICE.randrange(10**6), "price": round(DICE.random(), 4)} for n in range(400)]
ENGLISH = (
    "The control loop observes, thinks, acts and reflects until the task is done. Each turn adds to the history, and "
    "the model reads all of it again, so the cost grows with the square of the turns. When the context window is full, "
    "the oldest messages are removed; a call and its results are never torn apart, or the provider refuses them. "
) * 30
CHINESE = (
    "大模型的输入不是当前轮次的消息,而是从任务开始到现在的完整上下文。上下文窗口有上限,而每一轮循环都会增加消息历史。"
    "如果不加控制,几轮之后就会超限。滑动窗口只保留最近的对话,丢弃更早的历史,简单粗暴但有效。"
) * 60
TEXTS = {
    "English": ENGLISH,
    "Chinese": CHINESE,
    "code": inspect.getsource(argparse),
    "JSON": json.dumps(RECORDS),
    "minified JSON": json.dumps(RECORDS, separators=(",", ":")),
    "escaped JSON": json.dumps({"text": CHINESE}),
    "log": "\n".join(f"2026-11-20 10:{n % 60:02}:07,{n:03} INFO GET /users/{n * 37} 200 {n}ms" for n in range(300)),
    "numbers": "\n".join(str(DICE.random()) for _ in range(300)),
    "emoji": "Shipped 🚀 at last 🎉 and 👍 from all 🙏🔥 " * 200,
}


@pytest.fixture(scope="module")
def o200k():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_CACHE_DIR", str(vocabulary_dir()))
        return TiktokenCounter(encoding="o200k_base", exact=True, vocabulary=tiktoken.get_encoding("o200k_base"))


class Fetch:
    """Stands in for tiktoken's download: notes what is asked, waits at a gate, then delivers or raises."""

    def __init__(self, error=None):
        self.asked = []
        self.gate = threading.Event()
        self.error = error

    def __call__(self, encoding):
        self.asked.append(encoding)
        self.gate.wait()
        if self.error is not None:
            raise self.error
        letters = {bytes([n]): n for n in range(256)}
        return tiktoken.Encoding(encoding, pat_str=".", mergeable_ranks=letters, special_tokens={})


# -- the vocabulary -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "encoding", "exact", "tokens"),
    [
        ("gpt-4o-2024-08-06", "o200k_base", True, 8),
        ("gpt-4", "cl100k_base", True, 11),
        ("a-model-of-my-own", "o200k_base", False, 8),
    ],
)
async def test_each_model_is_counted_with_its_vocabulary(monkeypatch, model, encoding, exact, tokens):
    """A model that tiktoken does not know gets the stated encoding, and is not called exact."""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(vocabulary_dir()))
    monkeypatch.setattr(tiktoken_counter, "_VOCABULARIES", Vocabularies())
    counter = await load_counter(model)
    assert (counter.encoding, counter.exact) == (encoding, exact)
    assert counter.count("Hello, world! 你好,世界") == tokens
    assert counter.count("") == 0


def test_special_tokens_count_as_the_text_they_are_written_in(o200k):
    """What a user writes can neither raise nor pose as a control token."""
    assert o200k.count("<|endoftext|>") == 7


@given(text=st.text(st.characters(exclude_categories=())))
def test_no_text_raises_and_no_count_exceeds_the_bytes(o200k, text):
    """The window relies on a token being at least one byte; lone surrogates are texts, too."""
    size = len(text.encode("utf-8", "surrogatepass"))
    for counter in (o200k, EstimatedCounter()):
        assert 0 <= counter.count(text) <= size


UNITS = (" ", "\n", "a", "^", "中", "😀", " \n", "\t")


@pytest.mark.parametrize(
    ("unit", "end"),
    [
        pytest.param(unit, end, marks=[pytest.mark.soak] if end and unit != " " else [])
        for unit in UNITS
        for end in ("", "x", "\ud800")
    ],
)
def test_a_million_of_one_character_is_counted(o200k, unit, end):
    """Tiktoken itself panics on a million spaces, with a BaseException."""
    text = unit * 1_000_000 + end
    assert 1_000_000 / 128 <= o200k.count(text) <= len(text.encode("utf-8", "surrogatepass"))
    assert EstimatedCounter().count(text) >= 1_000_000 / 128


@pytest.mark.parametrize("name", ["English", "code", "JSON", "log"])
def test_cutting_a_long_text_with_spaces_is_exact(o200k, name):
    """A long text is counted in pieces that end where no token reaches across."""
    text = TEXTS[name]
    assert len(text) > 2 * PIECE_CHARS
    assert o200k.count(text) == len(tiktoken.get_encoding("o200k_base").encode_ordinary(text))


@pytest.mark.parametrize("name", ["Chinese", "minified JSON", "escaped JSON"])
def test_cutting_a_long_text_without_spaces_adds_a_token_a_piece_at_most(o200k, name):
    """There is no good place to cut, so a word may be cut in two."""
    text = TEXTS[name]
    assert len(text) > 2 * PIECE_CHARS
    more = o200k.count(text) - len(tiktoken.get_encoding("o200k_base").encode_ordinary(text))
    assert 0 <= more <= len(text) // PIECE_CHARS


# -- the estimate -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TEXTS)
def test_the_estimate_is_never_far_below_the_truth(o200k, name):
    """Too high compacts early, too low overflows the model's window."""
    assert 0.95 <= EstimatedCounter().count(TEXTS[name]) / o200k.count(TEXTS[name]) <= 1.5


def test_the_estimate_says_what_it_is():
    """A figure that was guessed must not pass for a count."""
    counter = EstimatedCounter()
    assert not counter.exact
    assert counter.encoding.startswith("estimate: ")


# -- the fetch ----------------------------------------------------------------------------------------------------


async def test_concurrent_callers_share_one_fetch():
    """A crowd of runs that starts together downloads the vocabulary once."""
    fetch = Fetch()
    vocabularies = Vocabularies(fetch=fetch)
    counters = []

    async def ask():
        counters.append(await vocabularies.load_counter("gpt-4o"))

    async with anyio.create_task_group() as group:
        for _ in range(100):
            group.start_soon(ask)
        await anyio.wait_all_tasks_blocked()
        assert not counters
        fetch.gate.set()
    assert fetch.asked == ["o200k_base"]
    assert [counter.count("four") for counter in counters] == [4] * 100


def test_one_fetch_serves_event_loops_one_after_the_other():
    """A loop that ended while the fetch was under way is forgotten, not an error."""
    fetch = Fetch()
    vocabularies = Vocabularies(fetch=fetch)

    async def give_up():
        async with anyio.create_task_group() as group:
            group.start_soon(vocabularies.load_counter, "gpt-4o")
            await anyio.wait_all_tasks_blocked()
            group.cancel_scope.cancel()

    async def ask():
        async with anyio.create_task_group() as group:
            group.start_soon(vocabularies.load_counter, "gpt-4o")
            await anyio.wait_all_tasks_blocked()
            fetch.gate.set()
        return await vocabularies.load_counter("gpt-4")

    for backend in ("asyncio", "trio"):
        anyio.run(give_up, backend=backend)
    for backend in ("asyncio", "trio"):
        assert anyio.run(ask, backend=backend).encoding == "cl100k_base"
    assert fetch.asked == ["o200k_base", "cl100k_base"]


@pytest.mark.parametrize("error", [OSError("no network"), ValueError("hash mismatch"), BaseException("panic")])
async def test_a_fetch_that_fails_gives_the_estimate_and_one_warning(caplog, error):
    """The run goes on; the warning says what happened and what to do, once in a process."""
    fetch = Fetch(error)
    fetch.gate.set()
    vocabularies = Vocabularies(fetch=fetch)
    counters = [await vocabularies.load_counter(model) for model in ("gpt-4o", "gpt-4", "gpt-4o")]
    assert not any(counter.exact for counter in counters)
    assert fetch.asked == ["o200k_base", "cl100k_base"]
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("agentfsm", logging.WARNING)
    assert f"o200k_base could not be loaded ({type(error).__name__})" in record.getMessage()
    assert "TIKTOKEN_CACHE_DIR" in record.getMessage()
    assert str(error) not in record.getMessage()


async def test_a_fetch_that_hangs_gives_the_estimate_until_it_arrives(caplog):
    """A network that swallows packets costs a bounded wait, and only the first caller pays it."""
    fetch = Fetch()
    vocabularies = Vocabularies(fetch=fetch, wait_s=0.01)
    counters = [await vocabularies.load_counter("gpt-4o") for _ in range(3)]
    assert not any(counter.exact for counter in counters)
    (record,) = caplog.records
    assert "(no answer in time)" in record.getMessage()
    fetch.gate.set()
    arrived = threading.Event()
    vocabularies._fetches["o200k_base"].result.add_done_callback(lambda _: arrived.set())
    await anyio.to_thread.run_sync(arrived.wait)
    assert (await vocabularies.load_counter("gpt-4o")).exact
    assert len(fetch.asked) == 1


# -- whole processes ----------------------------------------------------------------------------------------------

ASK = """
import anyio, logging, sys
from agentfsm.tokens.tiktoken_counter import Vocabularies
logging.basicConfig(format="%(name)s %(levelname)s %(message)s")
counter = anyio.run(Vocabularies(wait_s=float(sys.argv[1])).load_counter, "gpt-4o", backend=sys.argv[2])
print(counter.exact, counter.count("four words of text"))
"""


def ask_behind_proxy(address, wait_s, backend, cache_dir):
    environment = os.environ | {"HTTPS_PROXY": f"http://user:secret@{address}", "TIKTOKEN_CACHE_DIR": str(cache_dir)}
    command = [sys.executable, "-c", ASK, str(wait_s), backend]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)


def test_a_process_without_network_estimates_and_says_so(tmp_path, anyio_backend):
    """The real download, refused: no failure, one warning, and no password of a proxy in it."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    done = ask_behind_proxy(f"127.0.0.1:{port}", 60, anyio_backend, tmp_path)
    assert done.stdout == "False 4\n"
    assert done.stderr.startswith("agentfsm WARNING The vocabulary o200k_base could not be loaded (ProxyError)")
    assert "secret" not in done.stderr


def test_a_process_in_a_black_hole_neither_hangs_nor_lingers(tmp_path, anyio_backend):
    """The real download, never answered: the estimate comes in time, and the thread does not hold the exit."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        done = ask_behind_proxy(f"127.0.0.1:{silent.getsockname()[1]}", 0.1, anyio_backend, tmp_path)
    assert done.stdout == "False 4\n"
    assert "(no answer in time)" in done.stderr


def test_the_package_and_the_estimate_load_no_tiktoken():
    """Who does not count pays nothing for it."""
    code = "import sys, agentfsm.tokens, agentfsm.tokens.estimate; sys.exit('tiktoken' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
