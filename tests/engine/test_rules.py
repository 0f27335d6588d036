"""What an author declares about a tool's calls: when it is there, which arguments it takes, what it waits for."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from agentfsm import (
    Agent,
    ErrorType,
    Limits,
    MisuseError,
    ModelRetry,
    Outcome,
    RunContext,
    Settings,
    ToolCall,
    ToolQueue,
    ToolRegistry,
    ToolResult,
    tool,
)
from agentfsm.stores import MemoryStore
from agentfsm.testing import ScriptedModel, call, raw_call, say
from agentfsm.tools.breaker import BreakerState
from tests.support.checks import calls_of, no_leases, results_of, sound, virtually


@pytest.fixture
async def store():
    """A store in memory: what is shown here does not depend on it."""
    made = MemoryStore()
    yield made
    await no_leases(made)


def told(agent: Agent) -> list[list[str]]:
    """The names of the tools of each request."""
    assert isinstance(agent.model, ScriptedModel)
    return [[each.name for each in request.tools] for request in agent.model.requests]


async def act(cents: int = 0) -> str:
    """Act."""
    return f"did {cents}"


look = tool(read_only=True, name="look")(act)


# enabled=


async def test_a_tool_that_is_not_there_is_neither_offered_nor_run(store):
    """Switched off for good: the model is not told of it, and a call of it is skipped."""
    agent = Agent(ScriptedModel(say("", call("act")), "done"), tools=[tool(enabled=False)(act), look], store=store)
    run = await agent.run("go")
    assert told(agent) == [["look"], ["look"]]
    (result,) = results_of(run.messages)
    assert (result.outcome, result.error_type, result.retryable) == (Outcome.SKIPPED, ErrorType.WITHDRAWN, False)
    assert run.consecutive_errors == 0
    await sound(agent, run)


async def test_a_function_decides_for_each_turn_and_each_call(store):
    """It is given what a tool may know of the run, without any call; the turn is the same when it is called."""
    seen: list[RunContext[Any]] = []

    def on_even_turns(ctx: RunContext[Any]) -> bool:
        seen.append(ctx)
        return ctx.turn % 2 == 0

    calls = [say("", call("act", cents=n), call("look", cents=n)) for n in range(3)]
    agent = Agent(ScriptedModel(*calls, "done"), tools=[tool(enabled=on_even_turns)(act), look], store=store)
    run = await agent.run("go", deps={"db": 1}, user="ann", roles=["clerk"], metadata={"tenant": 7})
    assert told(agent) == [["look"], ["act", "look"], ["look"], ["act", "look"]]
    outcomes = [each.outcome for each in results_of(run.messages) if each.tool == "act"]
    assert outcomes == [Outcome.SKIPPED, Outcome.DONE, Outcome.SKIPPED]
    assert {1, 2, 3, 4} <= {ctx.turn for ctx in seen}
    ctx = seen[-1]
    assert (ctx.deps, ctx.user, ctx.roles, dict(ctx.metadata)) == ({"db": 1}, "ann", ("clerk",), {"tenant": 7})
    assert (ctx.run_id, ctx.call_id, ctx.idempotency_key) == (run.id, "", "")


async def test_a_tool_that_is_not_there_now_is_not_said_to_be_gone(store):
    """The model may call it in a later turn, so it is not told that it never can."""
    there = iter([True, False])

    agent = Agent(
        ScriptedModel(say("", call("act")), "done"),
        tools=[tool(enabled=lambda ctx: ctx.turn != 1 or next(there, True))(act)],
        store=store,
    )
    run = await agent.run("go")
    skipped = [each.content for each in results_of(run.messages) if each.outcome is Outcome.SKIPPED]
    assert not any("for the rest of this run" in content for content in skipped)


def breaks(_ctx: object) -> bool:
    """Raise in place of an answer."""
    raise LookupError("no settings")


class Unsayable:
    """Neither yes nor no."""

    def __bool__(self) -> bool:
        raise ValueError("ambiguous")


@pytest.mark.parametrize(
    "enabled", [breaks, lambda ctx: ctx.no_such_field, lambda _c: Unsayable()], ids=["1", "2", "3"]
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_function_that_breaks_has_not_said_that_it_is_there(store, enabled, stream):
    """The run goes on without the tool."""
    broken = tool(enabled=enabled, read_only=True)(act)
    agent = Agent(
        ScriptedModel(say("", call("act")), "done"), tools=[broken, look], store=store, settings=Settings(stream=stream)
    )
    run = await agent.run("go")
    assert told(agent) == [["look"], ["look"]]
    assert results_of(run.messages)[0].outcome is Outcome.SKIPPED


async def later(_given: object) -> bool:
    """Answer too late: what is declared may not wait."""
    return False


@pytest.mark.parametrize(
    "options",
    [
        {"enabled": later},
        {"validate": later},
        {"requires_approval": later},
        {"describe": later},
        {"concurrency_safe": later},
        {"locks": later},
    ],
    ids=lambda options: next(iter(options)),
)
def test_an_async_declaration_is_misuse(options):
    """Its coroutine would read as a yes; nobody awaits it."""
    with pytest.raises(MisuseError, match=next(iter(options))):
        tool(**options)(act)


@pytest.mark.parametrize(
    "options",
    [
        {"timeout_s": 0},
        {"timeout_s": -1},
        {"timeout_s": float("nan")},
        {"approval_expires_s": -1},
        {"shown_tokens": 0},
        {"shown_bytes": -5},
        {"after": "look"},
        {"tags": "db"},
        {"enabled": "no"},
        {"validate": "no"},
        {"requires_approval": "no"},
        {"locks": "a"},
        {"read_only": "no"},
    ],
    ids=str,
)
def test_a_declaration_that_makes_no_sense_is_misuse(options):
    """It is told when the tool is made, and not by what it does to a run."""
    with pytest.raises(MisuseError, match=next(iter(options))):
        tool(**options)(act)


# validate=


class MuteError(ValueError):
    """An error without words."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


def raises(error: Exception) -> Any:
    """A rule that raises this."""

    def rule(_arguments: object) -> str | None:
        raise error

    return rule


RULES = {
    "says": (lambda a: f"{a.cents} is too much", "0 is too much"),
    "value error": (raises(ValueError("too much")), "too much"),
    "model retry": (raises(ModelRetry("ask for less")), "ask for less"),
    "without a word": (raises(ValueError()), "they are not allowed"),
    "broken": (raises(LookupError("sk-secret")), "could not be applied (LookupError)"),
    "unsayable": (raises(MuteError()), "act"),
    "surrogate": (lambda _a: "half \ud83d", "half \ufffd"),
}


@pytest.mark.parametrize("plan", [{}, {"locks": lambda a: [a.cents]}, {"requires_approval": True}], ids=str)
@pytest.mark.parametrize(("rule", "says"), RULES.values(), ids=list(RULES))
async def test_a_rule_tells_the_model_what_is_wrong(store, rule, says, plan):
    """By its text, or by raising it; a rule that breaks has not said yes. Nothing was run, and nobody was asked."""
    ran: list[int] = []

    @tool(validate=rule, **plan)
    async def act(cents: int = 0) -> str:
        ran.append(cents)
        return "did"

    agent = Agent(ScriptedModel(say("", call("act")), "done"), tools=[act], store=store)
    run = await agent.run("go")
    (result,) = results_of(run.messages)
    assert (run.output, ran) == ("done", [])
    assert (result.error_type, result.retryable) == (ErrorType.ARGUMENTS, True)
    assert says in result.content
    assert "sk-secret" not in result.content
    assert act.breaker.state is BreakerState.CLOSED
    await sound(agent, run)


@pytest.mark.parametrize("answer", [True, False, 0, 5, ["x"], Unsayable()], ids=repr)
async def test_a_rule_that_answers_neither_text_nor_nothing_has_not_said_yes(store, answer):
    """`lambda a: a.cents < 500` reads as the opposite of what it does: its answer counts for nothing either way."""
    ran: list[int] = []

    @tool(validate=lambda _a: answer)
    async def act(cents: int = 0) -> str:
        ran.append(cents)
        return "did"

    agent = Agent(ScriptedModel(say("", call("act")), "done"), tools=[act], store=store)
    run = await agent.run("go")
    (result,) = results_of(run.messages)
    assert (run.output, ran, result.error_type) == ("done", [], ErrorType.ARGUMENTS)
    assert "could not be applied" in result.content


async def test_a_rule_sees_validated_arguments_with_defaults(store):
    """Numbers are numbers, and what was left out is there; it is not asked where the schema is not met."""
    seen: list[tuple[object, object]] = []

    @tool(validate=lambda a: seen.append((a.cents, a.to)))
    async def pay(cents: int, to: str = "Ann") -> str:
        return "paid"

    replies = say("", raw_call("pay", '{"cents": "5"}'), call("pay"), call("pay", cents="x")), "done"
    agent = Agent(ScriptedModel(*replies), tools=[pay], store=store)
    run = await agent.run("go")
    assert seen == [(5, "Ann")]
    assert [each.outcome for each in results_of(run.messages)] == [Outcome.DONE, Outcome.FAILED, Outcome.FAILED]


async def test_a_rule_looks_at_the_world_when_the_call_comes_to_it(store):
    """An earlier call of the same reply may have made right what was wrong, whatever else the tool declares."""
    made: list[str] = []

    @tool
    async def create(name: str) -> str:
        made.append(name)
        return "created"

    def known(a: Any) -> str | None:
        return None if a.name in made else f"there is no {a.name}"

    plain = tool(name="plain", validate=known)(create.function)
    locking = tool(name="locking", validate=known, locks=lambda a: [a.name])(create.function)
    calls = [call(name, name="x") for name in ("create", "plain", "locking")]
    agent = Agent(ScriptedModel(say("", *calls), "done"), tools=[create, plain, locking], store=store)
    run = await agent.run("go")
    assert [each.outcome for each in results_of(run.messages)] == [Outcome.DONE] * 3


# after=


def order_of(after: tuple[str, ...]) -> list[str]:
    """What happens when two calls overlap unless `after` keeps them apart."""

    async def play(_store, clock) -> list[str]:
        log: list[str] = []

        def logging(name: str) -> Any:
            async def step(ctx: RunContext[Any]) -> str:
                log.append(f"{ctx.call_id} {name}")
                await anyio.sleep(1)
                log.append(f"{ctx.call_id} {name} done")
                return name

            return step

        first = tool(name="first", read_only=True)(logging("first"))
        second = tool(name="second", read_only=True, after=after)(logging("second"))
        calls = [ToolCall(id=str(n), name=name, arguments="{}") for n, name in enumerate(["first", "second", "first"])]
        await ToolQueue(ToolRegistry.of([first, second]), clock=clock).execute_all(calls)
        return log

    return virtually(play)


def test_a_call_waits_for_earlier_calls_of_the_tools_it_names():
    """And for no later one; without a word they overlap."""
    waits = order_of(("first",))
    assert waits.index("1 second") > waits.index("0 first done")
    assert waits.index("2 first") < waits.index("0 first done")
    assert order_of(()).index("1 second") < order_of(()).index("0 first done")
    assert order_of(("nobody", "second")).index("1 second") < order_of(()).index("0 first done")


@pytest.mark.parametrize("failure", ["fails", "misfits", "is unknown"])
async def test_a_call_runs_behind_one_that_failed(store, failure):
    """It waits for the end of the other, whatever that is."""

    @tool(read_only=True)
    async def first(at: int) -> str:
        raise ValueError(at)

    second = tool(name="second", read_only=True, after=("first",))(act)
    proposed = {
        "fails": call("first", at=1),
        "misfits": call("first"),
        "is unknown": call("frist", at=1),
    }[failure]
    agent = Agent(ScriptedModel(say("", proposed, call("second")), "done"), tools=[first, second], store=store)
    run = await agent.run("go")
    assert [each.outcome for each in results_of(run.messages)] == [Outcome.FAILED, Outcome.DONE]
    await sound(agent, run)


def shown(result: ToolResult) -> int:
    """Characters of the result that the model is shown."""
    return len(result.content) if result.shown_chars is None else result.shown_chars


@pytest.mark.parametrize("shown_bytes", [1, 2, 3, 5])
async def test_a_result_may_be_shown_almost_not_at_all(store, shown_bytes):
    """The least that a tool may show is shown, and the journal has the whole."""
    small = tool(read_only=True, shown_bytes=shown_bytes)(act)
    agent = Agent(ScriptedModel(say("", call("act", cents=10**9)), "done"), tools=[small], store=store)
    run = await agent.run("go")
    (result,) = results_of(run.messages)
    assert shown(result) <= shown_bytes
    assert result.content == "did 1000000000"
    await sound(agent, run)


async def test_calls_of_a_withdrawn_tool_are_no_errors(store):
    """Three turns of nothing else do not stop the run as errors would."""
    gone = tool(enabled=False)(act)
    replies = [say("", call("act", cents=n)) for n in range(4)]
    agent = Agent(ScriptedModel(*replies, "done"), tools=[gone], store=store, limits=Limits(errors=2))
    run = await agent.run("go")
    assert run.output == "done"
    assert len(calls_of(run.messages)) == 4
