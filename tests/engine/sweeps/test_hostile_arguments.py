"""Whatever a model writes as a call, and whatever a tool makes of it: no crash, a helpful result, a valid history."""

from __future__ import annotations

import json
from typing import Any

import anyio
import attrs
import pytest

from agentfsm import (
    Agent,
    ErrorType,
    Limits,
    MisuseError,
    Outcome,
    Run,
    RunContext,
    Settings,
    State,
    Tool,
    ToolCall,
    ToolResult,
    tool,
)
from agentfsm.core.encoding import MAX_RECORD_CHARS
from agentfsm.ports import FinishReason, ProposedCall, Reply, Request
from agentfsm.ports.model import MAX_REPLY_CALLS
from agentfsm.stores import MemoryStore, SQLiteStore
from agentfsm.testing import FunctionModel, ScriptedModel, call, raw_call, say
from tests.support.checks import HANG_S, calls_of, results_of, sound, valid_history

DEEP = 200_000
STREAMED = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


class World:
    """A tool that takes all kinds of arguments, and notes what it got."""

    def __init__(self, **options: Any) -> None:
        """Take the tool's options."""
        self.got: list[dict[str, Any]] = []

        async def act(text: str = "", count: int = 0, ratio: float = 0.0, items: list[Any] | None = None) -> str:
            self.got.append({"text": text, "count": count, "ratio": ratio, "items": items})
            return "did it"

        self.tool: Tool[..., Any] = tool(name="act", **options)(act)


async def proposed(
    store: Any, arguments: str, world: World, *, stream: bool = False
) -> tuple[Run, ToolCall, ToolResult, ScriptedModel]:
    """Let a model propose a call with these arguments, and return what came of it."""
    model = ScriptedModel(say("", raw_call("act", arguments)), "done")
    agent = Agent(model, tools=[world.tool], store=store, settings=Settings(stream=stream))
    with anyio.fail_after(HANG_S):
        run = await agent.run("go")
    assert run.output == "done"
    await sound(agent, run)
    (made,), (result,) = calls_of(run.messages), results_of(run.messages)
    assert isinstance(json.loads(made.arguments), dict)
    made.arguments.encode()
    return run, made, result, model


NO_OBJECT = {
    "truncated": ('{"text": "Ann', "EOF"),
    "truncated in a key": ('{"text": "Ann", "cou', "EOF"),
    "truncated behind a comma": ('{"text": "Ann",', "EOF"),
    "array": ("[]", "an array"),
    "array of the object": ('[{"text": "Ann"}]', "an array"),
    "string": ('"{}"', "{}"),
    "number": ("5", "5"),
    "true": ("true", "true"),
    "prose": ("I would call act with Ann", "expected"),
    "markup": ("<arguments><text>Ann</text></arguments>", "expected"),
    "brackets": ("[" * DEEP, "nested more than 200 deep"),
    "braces": ('{"items":' * DEEP, "nested more than 200 deep"),
    "brackets inside": ('{"items": ' + "[" * DEEP + "]" * DEEP + "}", "nested more than 200 deep"),
    "duplicate key": ('{"text": "a", "text": "b"}', "uplicate"),
    "duplicate key, escaped": (r'{"text": "a", "\u0074ext": "b"}', "uplicate"),
    "NaN": ('{"ratio": NaN}', "NaN"),
    "Infinity": ('{"ratio": Infinity}', "Infinity"),
    "-Infinity": ('{"ratio": -Infinity}', "Infinity"),
    "5,000 digits": (f'{{"count": {"9" * 5_000}}}', "digits"),
    "half a pair": ('{"text": "\ud83d"}', "half of a surrogate pair"),
    "half a pair, escaped": (r'{"text": "\ud83d"}', "half of a surrogate pair"),
    "half a pair in a key": (r'{"\udc00": 1}', "surrogate pair"),
    "NUL": (r'{"text": "a\u0000b"}', r"\u0000"),
    "NUL, raw": ('{"text": "a\0b"}', "control character"),
    "NUL in a key": (r'{"te\u0000xt": "a"}', r"\u0000"),
    "two objects": ('{"text": "a"}{"text": "b"}', "trailing"),
    "two BOMs between": ('{"text": "a"}\ufeff{"text": "b"}', "trailing"),
}


@STREAMED
@pytest.mark.parametrize(("arguments", "reason"), NO_OBJECT.values(), ids=list(NO_OBJECT))
async def test_what_is_no_json_object(store, arguments, reason, stream):
    """The call goes back as {}, the model reads why and how it began, and nothing was run."""
    world = World(read_only=True)
    _, made, result, model = await proposed(store, arguments, world, stream=stream)
    assert (world.got, made.arguments, made.repaired) == ([], "{}", None)
    assert made.malformed is not None
    assert (result.outcome, result.error_type, result.retryable) == (Outcome.FAILED, ErrorType.ARGUMENTS, True)
    assert reason in result.content
    assert "call again with valid JSON" in result.content
    assert len(result.content) < 3_000
    valid_history(model.requests[1].messages)


MENDED = {
    "fenced": ('```json\n{"text": "Ann"}\n```', {"text": "Ann"}),
    "fenced, plain": ('```\n{"text": "Ann"}\n```', {"text": "Ann"}),
    "trailing comma": ('{"text": "Ann",}', {"text": "Ann"}),
    "single quotes": ("{'text': 'Ann'}", {"text": "Ann"}),
    "bare keys": ('{text: "Ann", count: 3}', {"text": "Ann", "count": 3}),
    "Python's words": ('{"items": [True, False, None]}', {"items": [True, False, None]}),
    "prose behind": ('{"text": "Ann"} I hope that helps.', {"text": "Ann"}),
}


@STREAMED
@pytest.mark.parametrize(("arguments", "meant"), MENDED.values(), ids=list(MENDED))
async def test_a_way_of_writing_is_mended(store, arguments, meant, stream):
    """The tool runs with what was meant, the history has it as JSON, and the call is marked with how it began."""
    world = World(read_only=True)
    _, made, result, _ = await proposed(store, arguments, world, stream=stream)
    assert result.outcome is Outcome.DONE
    assert [{key: got[key] for key in meant} for got in world.got] == [meant]
    assert json.loads(made.arguments) == meant
    assert (made.repaired, made.malformed) == (arguments, None)


async def test_a_mended_call_that_needs_a_yes_shows_what_would_run(store):
    """The person sees the arguments as they were understood; the mark tells that they were mended."""
    world = World(requires_approval=True)
    agent = Agent(ScriptedModel(say("", raw_call("act", "{'text': 'Ann',}")), "done"), tools=[world.tool], store=store)
    run = await agent.run("go")
    assert run.pending[0].arguments == {"text": "Ann"}
    assert run.open_call("t1.0").call.repaired is not None
    await agent.approve(run.id, "t1.0")
    assert (await agent.resume(run.id)).output == "done"
    assert world.got[0]["text"] == "Ann"


async def test_what_is_mended_must_still_fit(store):
    """A mended text goes through the same schema as any other."""
    world = World()
    _, made, result, _ = await proposed(store, "{'count': 'many'}", world)
    assert (world.got, result.error_type) == ([], ErrorType.ARGUMENTS)
    assert json.loads(made.arguments) == {"count": "many"}
    assert "count" in result.content


TAKEN = {
    "nothing": ("", {}),
    "white space": (" \n\t", {}),
    "BOM": ('\ufeff{"text": "Ann"}', {"text": "Ann"}),
    "a text for a number": ('{"count": "5"}', {"count": 5}),
    "a float for a number": ('{"count": 5.0}', {"count": 5}),
    "a number for a float": ('{"ratio": 5}', {"ratio": 5.0}),
    "a whole pair": (r'{"text": "\ud83d\ude00"}', {"text": "\N{GRINNING FACE}"}),
    "six harmless characters": (r'{"text": "\\u0000"}', {"text": r"\u0000"}),
    "4,000 digits": (f'{{"count": {"9" * 4_000}}}', {"count": int("9" * 4_000)}),
    "100 deep": ('{"items": ' + "[" * 100 + "]" * 100 + "}", {}),
    "bidi and tags": ('{"text": "\u202e\u200b\U000e0041"}', {"text": "\u202e\u200b\U000e0041"}),
}


@STREAMED
@pytest.mark.parametrize(("arguments", "got"), TAKEN.values(), ids=list(TAKEN))
async def test_what_is_odd_and_right(store, arguments, got, stream):
    """Strict is not narrow: what has one meaning is taken, unmarked."""
    world = World(read_only=True)
    _, made, result, _ = await proposed(store, arguments, world, stream=stream)
    assert (result.outcome, made.malformed, made.repaired) == (Outcome.DONE, None, None)
    assert {key: world.got[0][key] for key in got} == got


MISFITS = {
    "an extra field": ('{"text": "a", "why": 1}', "why"),
    "a near miss": ('{"txet": "a"}', 'did you mean "text"'),
    "a word for a number": ('{"count": "five"}', "count"),
    "a fraction for a number": ('{"count": 5.5}', "count"),
    "a huge float": ('{"ratio": 1e999}', "ratio"),
    "null": ('{"text": null}', "text"),
    "an object for a text": ('{"text": {"text": "a"}}', "text"),
    "10,000 extra fields": (json.dumps({f"x{n}": n for n in range(10_000)}), "more"),
    "a key of a megabyte": (json.dumps({"x" * 1_000_000: 1}), "unknown"),
    "a value of a megabyte": (json.dumps({"count": "x" * 1_000_000}), "count"),
}


@pytest.mark.parametrize(("arguments", "names"), MISFITS.values(), ids=list(MISFITS))
async def test_what_does_not_fit_the_schema(store, arguments, names):
    """The model reads what does not fit and what would, in a few lines; the history keeps what it wrote."""
    world = World()
    _, made, result, _ = await proposed(store, arguments, world)
    assert (world.got, made.arguments) == ([], arguments)
    assert (result.error_type, result.retryable) == (ErrorType.ARGUMENTS, True)
    assert names in result.content
    assert len(result.content) < 8_000


# Names and ids


NAMES = {
    "near miss": "atc",
    "upper case": "ACT",
    "empty": "",
    "prefix": "functions.act",
    "Chinese": "查询天气",
    "half a pair": "act\ud83d",
    "NUL": "act\0",
    "line break": "act\nact",
    "megabyte": "act" * 300_000,
    "escape": "\x1b[31mact",
}


@STREAMED
@pytest.mark.parametrize("name", NAMES.values(), ids=list(NAMES))
async def test_a_tool_that_does_not_exist(store, name, stream):
    """The model reads what there is, and the name goes back in letters that a provider takes."""
    world = World(read_only=True)
    model = ScriptedModel(say("", call(name, text="a")), "done")
    agent = Agent(model, tools=[world.tool], store=store, settings=Settings(stream=stream))
    with anyio.fail_after(HANG_S):
        run = await agent.run("go")
    (made,), (result,) = calls_of(run.messages), results_of(run.messages)
    assert (run.output, world.got, made.invented) == ("done", [], True)
    assert (result.error_type, result.tool) == (ErrorType.UNKNOWN_TOOL, made.name)
    assert "Tools: act" in result.content
    assert len(result.content) < 1_000
    assert made.name.isascii()
    assert 1 <= len(made.name) <= 64
    assert made.name.replace("_", "").replace("-", "").isalnum() or set(made.name) <= {"_", "-"}
    await sound(agent, run)


async def test_a_name_that_becomes_a_tools_name_when_it_is_cleaned_is_no_call_of_it(store):
    """The model wrote something else: the cleaned name goes back on the wire, and nothing is run under it."""
    world = World()
    other = tool(name="act_")(world.tool.function)
    agent = Agent(ScriptedModel(say("", call("act!")), "done"), tools=[world.tool, other], store=store)
    run = await agent.run("go")
    assert calls_of(run.messages)[0].name == "act_"
    assert world.got == []
    assert results_of(run.messages)[0].error_type is ErrorType.UNKNOWN_TOOL


def answering(*calls: ProposedCall) -> FunctionModel:
    """A model that proposes these calls once, and then is done."""

    def answer(request: Request) -> Reply:
        first = not calls_of(request.messages)
        return Reply(
            text="" if first else "done",
            calls=calls if first else (),
            finish_reason=FinishReason.TOOL_CALLS if first else FinishReason.STOP,
        )

    return FunctionModel(answer)


@pytest.mark.parametrize(
    "given", ["", "same", "x" * 10_000, "half \ud83d", "t1.0", "nul \0"], ids=lambda g: repr(g[:9])
)
async def test_ids_of_the_provider_decide_nothing(store, given):
    """Empty, equal, huge or torn: our own tell the calls apart."""
    world = World(idempotent=True)
    calls = [ProposedCall(id=given, name="act", arguments=f'{{"count": {n}}}') for n in range(3)]
    agent = Agent(answering(*calls), tools=[world.tool], store=store)
    run = await agent.run("go")
    assert [made.id for made in calls_of(run.messages)] == ["t1.0", "t1.1", "t1.2"]
    assert len({made.key for made in calls_of(run.messages)}) == 3
    assert [got["count"] for got in world.got] == [0, 1, 2]
    await sound(agent, run)


@pytest.mark.parametrize("name", ["act", "no_such_tool"])
async def test_as_many_calls_as_a_reply_may_have(name):
    """Each has an id and a result of its own, and the run comes to its end."""
    world = World(read_only=True)
    calls = [ProposedCall(id="", name=name, arguments="{}") for _ in range(MAX_REPLY_CALLS)]
    limits = Limits(tokens=10**9, tool_calls=20_000)
    agent = Agent(answering(*calls), tools=[world.tool], store=MemoryStore(), limits=limits)
    run = await agent.run("go")
    assert run.output == "done"
    assert len({result.call_id for result in results_of(run.messages)}) == MAX_REPLY_CALLS
    assert len(world.got) == (MAX_REPLY_CALLS if name == "act" else 0)


# Tools that are gone


async def test_a_tool_that_was_removed_since_the_checkpoint(store):
    """An open call that needs it is not answered behind anybody's back; who has the tool goes on."""
    world = World()
    first = Agent(ScriptedModel(say("", call("act", text="Ann"))), tools=[world.tool], store=store)
    run = first.start("go")
    while run.state is not State.ACT:
        run = await first.step(run)
    with pytest.raises(MisuseError, match="act"):
        await Agent(ScriptedModel(), store=store).resume(run.id)
    assert await first.load(run.id) == run
    done = await Agent(ScriptedModel("done"), tools=[world.tool], store=store).resume(run.id)
    assert (done.output, len(world.got)) == ("done", 1)


async def test_a_tool_that_is_unregistered_while_the_run_goes_on(store):
    """Its later calls are calls of an unknown tool; those of the history stay as they are."""
    world = World()
    model = ScriptedModel(say("", call("act", text="a")), say("", call("act", text="b")), "done")
    agent = Agent(model, tools=[world.tool], store=store)
    run = agent.start("go")
    while run.turn < 1 or run.state is not State.REFLECT:
        run = await agent.step(run)
    agent.tools.unregister("act")
    done = await agent.finish(run)
    assert [each.error_type for each in results_of(done.messages)] == [None, ErrorType.UNKNOWN_TOOL]
    assert len(world.got) == 1
    await sound(agent, done)


# What a tool makes of it


@attrs.define
class Knot:
    """Something that holds itself."""

    inner: Any = None

    @classmethod
    def tied(cls) -> Knot:
        """Return one."""
        knot = cls()
        knot.inner = [knot]
        return knot


class Mute:
    """Something without words."""

    def __str__(self) -> str:
        raise RuntimeError("no words")

    __repr__ = __str__


class Text(str):
    """A text with ideas of its own."""

    __slots__ = ()

    def isascii(self) -> bool:
        """Fail."""
        raise RuntimeError("not telling")

    def __radd__(self, other: object) -> str:
        return "hijacked"


def nested(depth: int) -> list[Any]:
    """Return so many lists inside one another."""
    outer: list[Any] = []
    for _ in range(depth):
        outer = [outer]
    return outer


VALUES = {
    "cyclic": (Knot.tied, "cannot be written as JSON"),
    "cyclic list": (lambda: (cycle := [], cycle.append(cycle))[0], "cannot be written as JSON"),
    "mute": (Mute, "cannot be written as JSON"),
    "deep": (lambda: nested(100_000), "cannot be written as JSON"),
    "not UTF-8": (lambda: b"\xff\xfe", "cannot be written as JSON"),
    "mixed keys": (lambda: {("a", 1): 2, None: 3}, ""),
    "half a pair": (lambda: "half \ud83d", "half \ufffd"),
    "half a pair inside": (lambda: {"text": ["half \ud83d"]}, "half \ufffd"),
    "half a pair in a key": (lambda: {"half \ud83d": 1}, ""),
    "NaN": (lambda: [float("nan"), float("inf")], ""),
    "a text of its own kind": (lambda: Text("é hello"), "é hello"),
    "a lambda": (lambda: lambda: 1, "lambda"),
    "a generator": (lambda: (n for n in range(3)), ""),
}


@pytest.mark.parametrize("plain", [False, True], ids=["async", "plain"])
@pytest.mark.parametrize(("make", "says"), VALUES.values(), ids=list(VALUES))
async def test_a_result_that_is_hard_to_write(store, make, says, plain):
    """The call is done, for its effect stands; the model reads what can be written of it."""

    async def act() -> Any:
        return make()

    acting = tool(name="act")((lambda: make()) if plain else act)  # noqa: PLW0108  the schema is that of no parameters
    model = ScriptedModel(say("", call("act")), "done")
    agent = Agent(model, tools=[acting], store=store)
    run = await agent.run("go")
    (result,) = results_of(run.messages)
    assert (run.output, result.outcome) == ("done", Outcome.DONE)
    assert says in result.content
    assert type(result.content) is str
    assert model.requests[1].messages[-1].text.startswith("[act: done]\n")
    result.text.encode()
    await sound(agent, run)


@pytest.mark.parametrize("char", ["x", "\0"], ids=["plain", "escaped"])
async def test_a_result_larger_than_a_record(tmp_path, char):
    """The run goes on: a result that no journal takes is cut, and says so. Unsafe calls are not run again for it."""
    ran: list[int] = []

    @tool
    async def act() -> str:
        ran.append(1)
        return char * (MAX_RECORD_CHARS + 1)

    store = SQLiteStore(tmp_path / "runs.db")
    agent = Agent(ScriptedModel(say("", call("act")), "done"), tools=[act], store=store)
    try:
        run = await agent.run("go")
        (result,) = results_of(run.messages)
        assert (run.output, result.outcome, ran) == ("done", Outcome.DONE, [1])
        assert len(result.content) < MAX_RECORD_CHARS
        assert "characters were dropped" in result.content
        assert await agent.load(run.id) == run
    finally:
        await store.aclose()


class MuteError(Exception):
    """An error without words."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


class TrapError(Exception):
    """An error whose every attribute is a trap."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


class PanicError(BaseException):
    """What extensions written in Rust raise when they break: no Exception."""


ERRORS = {
    "mute": (MuteError, "MuteError"),
    "mute group": (lambda: ExceptionGroup("g", [MuteError(), ValueError("plain")]), "plain"),
    "trap": (lambda: TrapError("the words"), "the words"),
    "panic": (lambda: PanicError("the words"), "the words"),
    "panic group": (lambda: BaseExceptionGroup("g", [PanicError("the words")]), "the words"),
    "exit": (lambda: SystemExit("the words"), "the words"),
    "not a text": (lambda: ValueError(b"the words"), "the words"),
    "escape": (lambda: ValueError("\x1b]0;the words\x07"), "the words"),
}


@pytest.mark.parametrize("plain", [False, True], ids=["async", "plain"])
@pytest.mark.parametrize("options", [{}, {"read_only": True}], ids=str)
@pytest.mark.parametrize(("make", "says"), ERRORS.values(), ids=list(ERRORS))
async def test_an_error_that_is_hard_to_tell(store, make, says, options, plain):
    """It is the result of its call, whatever it is; only the user's own wish to stop ends the run."""

    async def act() -> None:
        raise make()

    def plain_act() -> None:
        raise make()

    acting = tool(name="act", **options)(plain_act if plain else act)
    beside = tool(read_only=True, name="beside")(World().tool.function)
    model = ScriptedModel(say("", call("act"), call("beside")), "done")
    agent = Agent(model, tools=[acting, beside], store=store)
    run = await agent.run("go")
    failure, result = results_of(run.messages)
    assert (run.output, failure.outcome, failure.error_type) == ("done", Outcome.FAILED, ErrorType.TOOL)
    assert says in failure.content
    assert result.outcome is Outcome.DONE
    await sound(agent, run)


@pytest.mark.parametrize("plain", [False, True], ids=["async", "plain"])
async def test_the_users_wish_to_stop_is_no_result(store, plain):
    """Ctrl-C inside a tool ends the driving call; the journal keeps the run, which can be resumed."""

    async def act(ctx: RunContext[Any]) -> str:
        if ctx.attempt == 1:
            raise KeyboardInterrupt
        return "did it"

    def plain_act(ctx: RunContext[Any]) -> str:
        if ctx.attempt == 1:
            raise KeyboardInterrupt
        return "did it"

    acting = tool(name="act", idempotent=True)(plain_act if plain else act)
    agent = Agent(ScriptedModel(say("", call("act")), "done"), tools=[acting], store=store)
    run = agent.start("go")
    stopped = False
    try:
        await agent.finish(run)
    except KeyboardInterrupt:
        stopped = True
    assert stopped
    done = await agent.resume(run.id)
    assert done.output == "done"
    await sound(agent, done)
