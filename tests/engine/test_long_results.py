"""Results of millions of characters: the event loop does not wait for their conversion, and they are kept unchanged."""

import threading
from json.encoder import encode_basestring

import pytest

from agentfsm import Agent, ToolResult, tool
from agentfsm.core import codec
from agentfsm.core.messages import CHUNK_CHARS, iter_chunks
from agentfsm.stores import SQLiteStore
from agentfsm.testing import ScriptedModel, call, say
from agentfsm.tools.queue import result_text
from tests.support.sample_runs import finished, header

LONG = 'naïve "text"\n' * 200_000
PAIR = "\ud83d\ude00"


@pytest.fixture
def long_work(monkeypatch):
    """Return the steps and threads that have converted more than a chunk of text in total."""
    threads: list[tuple[str, int]] = []
    seen = {}

    def count(name, text):
        me = threading.get_ident()
        seen[name, me] = seen.get((name, me), 0) + len(text)
        if seen[name, me] > CHUNK_CHARS:
            threads.append((name, me))

    def watched(name, convert):
        def convert_counted(text):
            count(name, text)
            return convert(text)

        return convert_counted

    monkeypatch.setattr(codec, "encode_basestring", watched("encode", encode_basestring))
    monkeypatch.setattr(codec, "encode_event", lambda *given, real=codec.encode_event: _counted(count, real(*given)))
    for name in ("replace_surrogates", "truncate_for_journal"):
        monkeypatch.setattr(result_text, name, watched(name, getattr(result_text, name)))
    return threads


def _counted(count, text):
    count("encode_event", text)
    return text


@tool
async def read_log() -> str:
    """Read the log."""
    return LONG


async def test_the_loop_converts_no_long_result(tmp_path, long_work):
    """The text of a long result is measured, cleaned and encoded in other threads than that of the event loop."""
    store = SQLiteStore(tmp_path / "runs.db")
    run = await Agent(ScriptedModel(say("", call("read_log")), "done"), tools=[read_log], store=store).run("go")
    assert {name for name, _ in long_work} == {"encode", "replace_surrogates", "truncate_for_journal"}
    assert threading.get_ident() not in {thread for _, thread in long_work}
    stored = await Agent(ScriptedModel("done"), tools=[read_log], store=store).load(run.id)
    (result,) = [each for each in stored.messages if isinstance(each, ToolResult)]
    assert result.content == LONG
    await store.aclose()


def test_chunks_keep_pairs_of_surrogates_together():
    """A pair at the end of a chunk stays whole, so that it becomes its character; the chunks make up the text."""
    text = "x" * (CHUNK_CHARS - 1) + PAIR + "y" * CHUNK_CHARS
    assert "".join(iter_chunks(text)) == text
    assert result_text.clean_long_text(text) == text.replace(PAIR, "\U0001f600")


def test_a_long_record_is_the_record():
    """The thread writes the same JSON as the codec at once; other results are encoded at once."""
    long, short = finished(content=LONG), finished()
    record = codec.begin_encoding(long, header())
    assert isinstance(record, codec.LongRecord)
    assert record.encode() == codec.encode_event(long, header())
    assert codec.begin_encoding(short, header()) == codec.encode_event(short, header())
