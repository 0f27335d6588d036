"""`AdapterModel`, the base of adapters, on a package with `generate()`, objects for answers and errors of its own."""

import gc
import sys
import traceback
import weakref
from functools import partial
from typing import ClassVar

import anyio
import anyio.to_thread
import attrs
import pytest

from agentfsm import (
    Agent,
    MisuseError,
    ModelError,
    ModelReplyError,
    ModelUnavailableError,
    TextPart,
    Usage,
    UserMessage,
)
from agentfsm._lib.plugins import find_plugins
from agentfsm.models import AdapterModel, Price, provider_errors
from agentfsm.ports import CallChunk, FinishReason, ProposedCall, Reply, Request, TextChunk
from agentfsm.ports.model import MAX_REPLY_CALLS, MAX_REPLY_CHARS

KEY = "lantern-key-1234"
REQUEST = Request(instructions="Be brief.", messages=(UserMessage(parts=(TextPart(text="hello"),)),))


# The vendor's package


class LanternError(Exception):
    """The root of its errors."""


class DimmedError(LanternError):
    """The service asks to wait."""

    def __init__(self, seconds):
        super().__init__("the lantern is dim")
        self.seconds = seconds


class WrongKeyError(LanternError):
    """The key is unknown."""


class StuckError(Exception):
    """It is no LanternError, though the package raises it."""


@attrs.frozen
class Answer:
    """A reply as the package has it."""

    words: str
    tokens: tuple[int, int] = (3, 2)


class LanternClient:
    """A client for one event loop."""

    def __init__(self, key, script):
        self.key = key
        self.script = script
        self.is_closed = False
        self.streams = 0
        # That are open.
        self.asked = []

    def _next(self, model, prompt):
        assert not self.is_closed
        self.asked.append((model, prompt))
        step = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if isinstance(step, Exception):
            raise step
        return step

    async def generate(self, model, prompt):
        """Return an answer."""
        await anyio.lowlevel.checkpoint()
        return Answer(self._next(model, prompt))

    async def generate_stream(self, model, prompt):
        """Yield words."""
        words = self._next(model, prompt)
        self.streams += 1
        try:
            for word in words:
                await anyio.lowlevel.checkpoint()
                yield word
        finally:
            self.streams -= 1

    def generate_blocking(self, model, prompt):
        """Return an answer; the thread waits for it."""
        return Answer(self._next(model, prompt))

    async def shut(self):
        """Close it."""
        await anyio.lowlevel.checkpoint()
        self.is_closed = True


# The adapter


class Lantern(AdapterModel[LanternClient]):
    """A model behind that package."""

    translations: ClassVar = {
        LanternError: provider_errors.sdk_error,
        DimmedError: provider_errors.unavailable_error,
        WrongKeyError: provider_errors.api_key_error,
        TimeoutError: provider_errors.timeout_error,
    }

    def __init__(self, name, *script, price=None):
        super().__init__(name, base_url="https://lantern.example", secrets=[f"Bearer {KEY}"], price=price)
        self.script = list(script) or ["Light."]
        self.opened = []

    def _open_client(self):
        self.opened.append(LanternClient(KEY, self.script))
        return self.opened[-1]

    @staticmethod
    async def _close_client(client):
        await client.shut()

    def _is_client_closed(self, client):
        return client.is_closed

    async def _ask(self, client, request, emit):
        prompt = request.messages[-1].text
        with anyio.fail_after(request.timeout_s):
            if emit is None:
                answer = await client.generate(self.name, prompt)
                tokens_in, tokens_out = answer.tokens
                return Reply(text=answer.words, usage=Usage(input_tokens=tokens_in, output_tokens=tokens_out))
            stream = client.generate_stream(self.name, prompt)
            words = []
            try:
                async for word in stream:
                    emit(word if isinstance(word, CallChunk) else TextChunk(word))
                    words.append(word)
            finally:
                await stream.aclose()
            return Reply(text="".join(words))

    def _describe_error(self, error):
        return self._build_failure(str(error), retry_after_s=getattr(error, "seconds", None))


class BlockingLantern(Lantern):
    """The same with calls that block, and one client for all event loops."""

    _is_client_shared = True

    async def _ask(self, client, request, emit):
        ask = partial(client.generate_blocking, self.name, request.messages[-1].text)
        answer = await anyio.to_thread.run_sync(ask, abandon_on_cancel=True)
        return Reply(text=answer.words)


class LyingLantern(Lantern):
    """Returns what it was given as a reply."""

    async def _ask(self, client, request, emit):
        return self.script[0]


# Replies


@pytest.mark.parametrize("kind", [Lantern, BlockingLantern])
async def test_a_whole_reply(kind):
    """The answer's object becomes a reply."""
    model = kind("dim", "Light.")
    reply = await model.reply(REQUEST)
    await model.aclose()
    assert reply.text == "Light."
    assert model.opened[0].asked == [("dim", "hello")]


async def test_a_streamed_reply():
    """Each piece is handed over as it comes."""
    model = Lantern("dim", ["Li", "ght."])
    chunks = []
    reply = await model.reply(REQUEST, chunks.append)
    await model.aclose()
    assert reply.text == "Light."
    assert chunks == [TextChunk("Li"), TextChunk("ght.")]


def test_what_it_costs():
    """By the user's price; the public list does not know the address."""
    price = Price(input_usd_per_million=1, output_usd_per_million=10)
    usage = Usage(input_tokens=3, output_tokens=2)
    assert Lantern("dim", price=price).cost_usd(usage) == pytest.approx(23e-6)
    assert Lantern("gpt-4o").cost_usd(usage) is None


def test_arguments_that_cannot_be_right():
    """A model has a name and a window; the window of a known family is known."""
    with pytest.raises(MisuseError, match=r"Lantern\(name=' '\): give the name of the model"):
        Lantern(" ")
    with pytest.raises(MisuseError, match=r"window_tokens=0\): give a whole number"):
        AdapterModel.__init__(object.__new__(Lantern), "dim", base_url="", window_tokens=0)
    assert Lantern("gpt-4o").window_tokens == 128_000


def build(base=Lantern, **members):
    """Return a subclass of the adapter with these members, whose arguments are those of the base."""
    return type("Lamp", (base,), {"__init__": AdapterModel.__init__, "script": ["Light."], "opened": [], **members})


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"name": None}, r"Lamp\(name=None\): give the name of the model"),
        ({"base_url": 5}, r"base_url=5\): give a string"),
        ({"window_tokens": "x"}, r"window_tokens='x'\): give a whole number"),
        ({"price": 5}, r"price=5: give a Price\("),
        ({"price": "cheap"}, r"price='cheap': give a Price\("),
        ({"price": {5: Price(input_usd_per_million=1, output_usd_per_million=1)}}, "table of prices has the key 5"),
        ({"price": {"dim": 5}}, "the price of 'dim' is 5"),
        ({"secrets": KEY}, r"secrets is a string, whose letters .* give a list, secrets=\[\.\.\.\]"),
        ({"secrets": None}, "secrets is of the type NoneType: give a list of strings"),
        ({"secrets": [None]}, "secrets contains NoneType: give a list of strings, and leave out a key that is not set"),
        ({"secrets": KEY.encode()}, "secrets contains int"),
    ],
    ids=repr,
)
def test_an_argument_of_another_type_is_refused(options, match):
    """The error names it and shows no key."""
    with pytest.raises(MisuseError, match=match) as caught:
        build()(**{"name": "dim", **options})
    assert KEY not in str(caught.value)


@pytest.mark.parametrize("value", ["1", None, 1j], ids=repr)
def test_a_price_is_a_number(value):
    """What is none is refused where it is given."""
    with pytest.raises(MisuseError, match=r"Price\(input_usd_per_million=.*\): give US dollars, 0 or more"):
        Price(input_usd_per_million=value, output_usd_per_million=1)


@pytest.mark.parametrize(
    ("table", "match"),
    [
        (
            [LanternError],
            "translations is of the type list: give a dict such as {LampError: provider_errors",
        ),
        ({"LanternError": provider_errors.sdk_error}, "has the key 'LanternError', which is not an exception class"),
        ({KeyboardInterrupt: provider_errors.sdk_error}, "has the key <class 'KeyboardInterrupt'>"),
        ({LanternError: "unavailable"}, r"translations\[LanternError\] is 'unavailable': give a function of agentfsm"),
        (
            {LanternError: ModelUnavailableError},
            r"translations\[LanternError\] is <class .*: give a function of agentfsm",
        ),
    ],
    ids=repr,
)
def test_a_table_of_errors_of_another_form_is_refused(table, match):
    """It is refused when the model is made, and not at its first error."""
    with pytest.raises(MisuseError, match=match):
        build(translations=table)("dim")


async def test_an_adapter_without_translations():
    """Each error of the package ends the request, with its type, text and place."""
    model = build(AdapterModel, **{name: vars(Lantern)[name] for name in ("_open_client", "_close_client", "_ask")})(
        "dim"
    )
    model.script = [LanternError("out of oil"), "Light."]
    with pytest.raises(ModelError, match=r"\(LanternError: out of oil; in test_adapter_model\.py, line"):
        await model.reply(REQUEST)
    assert (await model.reply(REQUEST)).text == "Light."
    await model.aclose()


async def test_a_translation_that_is_no_error_of_a_model():
    """The error names the row of the table."""
    model = build(translations={LanternError: lambda _failure: None}, script=[LanternError("out of oil")])("dim")
    with pytest.raises(MisuseError, match=r"Lamp\.translations\[LanternError\] returned NoneType: return a ModelError"):
        await model.reply(REQUEST)
    await model.aclose()


@pytest.mark.parametrize(
    ("translate", "text"),
    [
        (provider_errors.unavailable_error, "'gpt-4o' is unavailable (no oil). Retry later."),
        (provider_errors.not_found_error, "There is no model 'gpt-4o' (no oil). Check the model's name."),
    ],
)
async def test_a_package_without_an_address(translate, text):
    """Errors name the model alone, and no price of the public list is taken for it."""
    model = build(translations={LanternError: translate}, script=[LanternError("no oil")])("gpt-4o")
    with pytest.raises(ModelError) as caught:
        await model.reply(REQUEST)
    await model.aclose()
    assert str(caught.value) == text
    assert model.cost_usd(Usage(input_tokens=3, output_tokens=2)) is None


def plain_ask(self, client, request, emit):
    """Return a reply without waiting."""
    return Reply(text="Light.")


async def generating_ask(self, client, request, emit):
    """Yield where a reply is returned."""
    yield "Light."


async def async_open(self):
    """Open a client where nobody waits for it."""
    return LanternClient(KEY, ["Light."])


@pytest.mark.parametrize(
    ("members", "match"),
    [
        ({"_ask": plain_ask}, r"Lamp\._ask returned Reply, not an awaitable: write `async def _ask`"),
        ({"_ask": generating_ask}, r"Lamp\._ask returned async_generator, not"),
        ({"_open_client": async_open}, r"Lamp\._open_client is async: write a plain `def`"),
    ],
    ids=["plain _ask", "generating _ask", "async _open_client"],
)
async def test_a_method_that_is_async_or_not(members, match):
    """The error names the method, and how to write it."""
    model = build(**members)("dim")
    with pytest.raises(MisuseError, match=match):
        await model.reply(REQUEST)
    await model.aclose()


async def test_a_client_is_closed_by_an_async_method():
    """A plain one has closed it, and the error says how to write it."""
    closed = []
    model = build(_close_client=staticmethod(closed.append))("dim")
    await model.reply(REQUEST)
    with pytest.raises(MisuseError, match=r"Lamp\._close_client returned NoneType, .*write `async def _close_client`"):
        await model.aclose()
    assert closed == model.opened[-1:]


@pytest.mark.parametrize(
    ("reply", "match"),
    [
        (None, r"LyingLantern\._ask returned NoneType: return a Reply, for example Reply\(text='...'\)"),
        ("hello", r"LyingLantern\._ask returned str: return a Reply"),
        ({"text": "x"}, r"LyingLantern\._ask returned dict: return a Reply"),
        (Reply(text=5), r"LyingLantern\._ask returned a Reply whose text is of the type int"),
        (Reply(calls=None), r"a Reply whose calls is of the type NoneType"),
        (Reply(calls=({"name": "look"},)), "calls that are dict: give a tuple of ProposedCall"),
        (Reply(calls=(ProposedCall(id="1", name="look", arguments={}),)), "arguments is of the type dict"),
        (Reply(native="{}"), "native is of the type str"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("emit", [None, print], ids=["whole", "streamed"])
async def test_what_is_no_reply_is_refused(reply, match, emit):
    """Its type is looked at before its size."""
    model = LyingLantern("dim", reply)
    with pytest.raises(MisuseError, match=match):
        await model.reply(REQUEST, emit)
    await model.aclose()


# Errors


@pytest.mark.parametrize("emit", [None, print], ids=["whole", "streamed"])
async def test_an_error_is_translated(emit):
    """By its own row, with what the package knows of it."""
    model = Lantern("dim", DimmedError(7.0))
    with pytest.raises(ModelUnavailableError, match=r"'dim' at https://lantern\.example is unavailable") as caught:
        await model.reply(REQUEST, emit)
    await model.aclose()
    assert caught.value.retry_after_s == 7.0
    assert caught.value.__suppress_context__


async def test_an_error_goes_by_its_nearest_ancestor():
    """A class that is newer than the table is translated, too."""

    class NewError(WrongKeyError):
        pass

    model = Lantern("dim", NewError(f"who is {KEY}?"))
    with pytest.raises(ModelError, match=r"the API key \(who is \*\*\*\?\). Check the api_key given to Lantern"):
        await model.reply(REQUEST)
    await model.aclose()


async def test_errors_that_are_not_in_the_table():
    """One of the package becomes a ModelError without secrets; one of agentfsm is raised as it is."""
    model = Lantern("dim", StuckError(f"stuck at {KEY}"), ModelReplyError("half a reply"))
    with pytest.raises(ModelError, match=r"\(StuckError: stuck at \*\*\*; in ") as caught:
        await model.reply(REQUEST)
    assert type(caught.value) is ModelError
    assert KEY not in "".join(traceback.format_exception(caught.value))
    with pytest.raises(ModelReplyError, match="half a reply"):
        await model.reply(REQUEST)
    await model.aclose()


async def test_an_error_of_emit_is_not_the_providers():
    """It is raised as it is, though the table knows its class, and the stream is closed."""

    def emit(_chunk):
        raise DimmedError(1.0)

    model = Lantern("dim", ["Li", "ght."])
    with pytest.raises(DimmedError):
        await model.reply(REQUEST, emit)
    assert model.opened[0].streams == 0
    await model.aclose()


# Bounds


async def test_a_whole_reply_is_bounded():
    """What is too large is refused, and its bill is kept."""
    model = Lantern("dim", "x" * (MAX_REPLY_CHARS + 1))
    with pytest.raises(ModelReplyError, match=r"too large \(more than 8,388,608 characters") as caught:
        await model.reply(REQUEST)
    await model.aclose()
    assert caught.value.usage == Usage(input_tokens=3, output_tokens=2)
    calls = tuple(ProposedCall(id=str(n), name="look", arguments="{}") for n in range(MAX_REPLY_CALLS + 1))
    model = LyingLantern("dim", Reply(calls=calls, finish_reason=FinishReason.TOOL_CALLS))
    with pytest.raises(ModelReplyError, match="more than 512 calls"):
        await model.reply(REQUEST)
    await model.aclose()


@pytest.mark.parametrize(
    ("piece", "words"),
    [
        ("x" * 2**20, "more than 8,388,608 characters"),
        (CallChunk(index=1, arguments="x" * 2**20), "more than 8,388,608 characters"),
        (CallChunk(index=MAX_REPLY_CALLS), "more than 512 calls"),
    ],
    ids=["text", "arguments", "calls"],
)
async def test_a_stream_without_end_is_broken_off(piece, words):
    """It is counted while it comes, and closed."""

    class Endless:
        def __iter__(self):
            while True:
                yield piece

    model = Lantern("dim", Endless())
    count = []
    with pytest.raises(ModelReplyError, match=words):
        await model.reply(REQUEST, count.append)
    assert len(count) < 20
    assert model.opened[0].streams == 0
    await model.aclose()


# Clients


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_one_event_loop_after_the_other(backend):
    """Each has a client of its own, closed when it ends; none is kept but the last."""
    model = Lantern("dim")
    for _ in range(3):
        anyio.run(model.reply, REQUEST, backend=backend)
        gc.collect()  # generators left open would be warned of here
    assert [client.is_closed for client in model.opened] == [True, True, True]
    assert len(model._clients) == 1


def test_a_shared_client_serves_all_event_loops():
    """One is opened, and it is not the model's to close."""
    model = BlockingLantern("dim")

    async def ask():
        await model.reply(REQUEST)
        await model.aclose()
        await model.reply(REQUEST)

    anyio.run(model.reply, REQUEST)
    anyio.run(model.reply, REQUEST, backend="trio")
    assert len(model.opened) == 1
    anyio.run(ask)
    assert [client.is_closed for client in model.opened] == [False, False]


async def test_replies_that_begin_at_once_share_a_client():
    """One is opened."""
    model = Lantern("dim")
    async with anyio.create_task_group() as tasks:
        for _ in range(5):
            tasks.start_soon(model.reply, REQUEST)
    await model.aclose()
    assert [client.is_closed for client in model.opened] == [True]


async def test_a_closed_client_is_opened_again():
    """After `aclose`, which may come at any time, and after others have closed it."""
    model = Lantern("dim")
    await model.aclose()
    await model.reply(REQUEST)
    await model.aclose()
    await model.aclose()
    await model.reply(REQUEST)
    await model.opened[1].shut()
    await model.reply(REQUEST)
    await model.aclose()
    assert len(model.opened) == 3
    assert model.opened[2].is_closed


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_dropped_model_is_freed_and_its_client_closed():
    """Its clients do not keep it."""
    model = Lantern("dim")
    await model.reply(REQUEST)
    client, there = model.opened[0], weakref.ref(model)
    gc.disable()
    try:
        del model
        assert there() is None
    finally:
        gc.enable()
    for _ in range(5):
        await anyio.lowlevel.checkpoint()
    assert client.is_closed


async def test_a_package_provides_it(tmp_path, monkeypatch):
    """Its prefix is an entry point of the group `agentfsm.models`."""
    info = tmp_path / "lantern_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lantern-package\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text("[agentfsm.models]\nlantern = lantern_package:Lantern\n", encoding="utf-8")
    monkeypatch.setitem(sys.modules, "lantern_package", sys.modules[__name__])
    monkeypatch.syspath_prepend(tmp_path)
    find_plugins.cache_clear()
    try:
        async with Agent("lantern:dim") as agent:
            run = await agent.run("hello")
    finally:
        find_plugins.cache_clear()
    assert run.output == "Light."
    assert agent.model.opened[0].is_closed
