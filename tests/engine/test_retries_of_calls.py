"""Calls that are tried again: which, why, after what wait, and how often. All in virtual time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from email.utils import format_datetime
from types import SimpleNamespace
from typing import Any

import anyio
import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentfsm import (
    Agent,
    ErrorType,
    Limits,
    ModelRetry,
    ModelUnavailableError,
    Outcome,
    RefusedError,
    RunContext,
    Settings,
    State,
    ToolCall,
    ToolQueue,
    ToolRegistry,
    ToolResult,
    TransientError,
    tool,
)
from agentfsm.stores import MemoryStore
from agentfsm.testing import ScriptedModel, VirtualClock, call, say
from tests.support.checks import keys_of, names, results_of, sound, sound_run, starts_of, virtually

# Seconds since 1970: what a service's clock says in these tests.
TODAY = 1_790_000_000


class Service:
    """A service behind a tool: it fails in these ways, one after the other, and then answers."""

    def __init__(self, *failures: Exception, name: str = "ask", at_once: bool = False, **options: Any) -> None:
        """Take the failures, and whether they come before anything is waited for; the options are the tool's."""
        self.failures = list(failures)
        self.times: list[float] = []
        self.contexts: list[RunContext[Any]] = []

        async def ask(ctx: RunContext[Any]) -> str:
            self.times.append(anyio.current_time())
            self.contexts.append(ctx)
            if not at_once:
                await anyio.lowlevel.checkpoint()
            if self.failures:
                raise self.failures.pop(0)
            return "an answer"

        self.tool = tool(name=name, **options)(ask)

    @property
    def waits(self) -> list[float]:
        """Seconds between two attempts."""
        return [later - earlier for earlier, later in zip(self.times, self.times[1:], strict=False)]


def http(status: int, **headers: str) -> httpx.HTTPStatusError:
    """What httpx raises for a status."""
    request = httpx.Request("GET", "https://example.org/")
    response = httpx.Response(status, headers={k.replace("_", "-"): v for k, v in headers.items()}, request=request)
    return httpx.HTTPStatusError(f"{status}", request=request, response=response)


def down(count: int = 9) -> list[Exception]:
    """A service that is down, and for as many calls does not say how long."""
    return [TransientError("down") for _ in range(count)]


def agent_of(services: Iterable[Service], *replies: object, **options: Any) -> Agent:
    """An agent with these services."""
    return Agent(ScriptedModel(*replies), tools=[each.tool for each in services], **options)


def once(service: Service, **options: Any) -> ToolResult:
    """Let a run call the service once, and return the result."""

    async def play(store: MemoryStore, clock: VirtualClock) -> ToolResult:
        agent = agent_of([service], say("", call(service.tool.name)), "done", store=store, clock=clock, **options)
        run = await agent.run("go")
        assert run.output == "done"
        await sound(agent, run)
        (result,) = results_of(run.messages)
        assert run.retries == ({service.tool.name: result.attempts - 1} if result.attempts > 1 else {})
        return result

    return virtually(play)


SAFE = [{"read_only": True}, {"idempotent": True}, {"read_only": True, "concurrency_safe": False}]
UNSAFE = [{}, {"concurrency_safe": True}, {"locks": lambda _a: ["x"]}]


@pytest.mark.parametrize("options", SAFE, ids=str)
def test_a_call_that_may_be_repeated_is(options):
    """A passing failure of a read-only or idempotent tool is tried again, and the result says how often."""
    service = Service(*down(2), **options)
    result = once(service)
    assert (result.outcome, result.content, result.attempts) == (Outcome.DONE, "an answer", 3)
    assert result.error_type is None
    assert result.duration_s == pytest.approx(3)


@pytest.mark.parametrize("options", UNSAFE, ids=["undeclared", "concurrency_safe", "locks"])
@pytest.mark.parametrize(
    "error",
    [TransientError("down", 0), http(503, Retry_After="1"), http(429, Retry_After="1"), ConnectionResetError("reset")],
    ids=["own", "503", "429", "reset"],
)
def test_a_call_that_may_not_be_repeated_is_not(options, error):
    """Whatever its service asks for: nobody knows what the first attempt has done."""
    service = Service(error, **options)
    result = once(service)
    assert len(service.times) == result.attempts == 1
    assert (result.outcome, result.retryable) == (Outcome.FAILED, False)
    assert "may have happened" in result.content


@pytest.mark.parametrize("options", [*SAFE, *UNSAFE[:2]], ids=str)
def test_a_call_that_was_refused_is_repeated_whatever_the_tool(options):
    """Who refused it before doing anything has done nothing."""
    service = Service(RefusedError("busy", 4), RefusedError("busy"), **options)
    assert once(service).outcome is Outcome.DONE
    assert service.waits == [4, 2]


def test_what_was_refused_to_the_end_was_not_done():
    """The model may call it again later, also where the tool is not repeatable."""
    result = once(Service(*[RefusedError("busy", 2)] * 9))
    assert (result.attempts, result.error_type, result.retryable) == (3, ErrorType.UNAVAILABLE, True)
    assert "Nothing was done" in result.content
    assert "2 s" in result.content
    assert "may have happened" not in result.content


def test_a_refusal_does_not_make_the_next_failure_repeatable():
    """An unsafe call that was refused, tried again, and then broke off is not tried a third time."""
    service = Service(RefusedError("busy"), TransientError("broke off"))
    result = once(service)
    assert (result.attempts, result.retryable) == (2, False)
    assert "may have happened" in result.content


@pytest.mark.parametrize(
    "error",
    [
        ValueError("a bug"),
        ModelRetry("use an ISO date"),
        PermissionError("no"),
        FileNotFoundError("no such file"),
        http(400),
        http(401, Retry_After="1"),
        http(404),
        ExceptionGroup("mixed", [TransientError("down"), ValueError("a bug")]),
    ],
    ids=repr,
)
def test_what_calling_again_would_not_mend_is_not_tried_again(error):
    """A bug, a wrong argument, a missing right: the model is told, and decides."""
    service = Service(error, read_only=True)
    assert once(service).outcome is Outcome.FAILED
    assert len(service.times) == 1


@pytest.mark.parametrize(
    "error",
    [
        ConnectionResetError("reset"),
        TimeoutError("slow"),
        httpx.ConnectTimeout("slow"),
        ModelUnavailableError("overloaded"),
        *(http(status) for status in (408, 500, 502, 503, 504, 529)),
        ExceptionGroup("both", [TransientError("down"), TimeoutError("slow")]),
    ],
    ids=repr,
)
def test_passing_failures_are_known_by_what_was_raised(error):
    """A connection that broke, a status that says so, and a group of nothing else."""
    assert once(Service(error, read_only=True)).attempts == 2


@pytest.mark.parametrize(
    ("failures", "waits"),
    [
        (down(2), [1, 2]),
        ([TransientError("down", 7.5), TransientError("down", 0)], [7.5, 0]),
        ([TransientError("down"), TransientError("down", 0.5)], [1, 0.5]),
        ([TransientError("down", -3)], [0]),
        ([TransientError("down", float("nan"))], [1]),
        ([http(503, Retry_After="12")], [12]),
        ([http(503, Retry_After="soon")], [1]),
        ([http(503), http(503, Retry_After="3")], [1, 3]),
        ([ModelUnavailableError("overloaded", 6)], [6]),
        ([ExceptionGroup("both", [TransientError("a", 2), TransientError("b", 5)])], [5]),
    ],
    ids=str,
)
def test_the_wait_is_what_the_service_asks_for(failures, waits):
    """Else a second before the first retry, and two before the next."""
    service = Service(*failures, read_only=True)
    assert once(service).outcome is Outcome.DONE
    assert service.waits == pytest.approx(waits)


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize(("ahead_s", "wait_s"), [(20, 20), (-20, 0)])
def test_a_date_is_waited_for(monkeypatch, status, ahead_s, wait_s):
    """Retry-After may be a date; one that has passed asks for no wait."""
    monkeypatch.setattr("agentfsm.tools.queue.transient.time", SimpleNamespace(time=lambda: TODAY))
    date = format_datetime(datetime.fromtimestamp(TODAY + ahead_s, UTC), usegmt=True)
    service = Service(http(status, Retry_After=date), read_only=True)
    assert once(service).outcome is Outcome.DONE
    assert service.waits == pytest.approx([wait_s])


@pytest.mark.parametrize(("headers", "wait_s"), [({}, 1), ({"Retry_After": "9"}, 9)], ids=str)
def test_too_many_requests_are_tried_again_once(headers, wait_s):
    """A second time would only be one request more."""
    service = Service(*[http(429, **headers) for _ in range(9)], read_only=True)
    result = once(service)
    assert service.waits == [wait_s]
    assert (result.error_type, result.retryable, result.attempts) == (ErrorType.RATE_LIMITED, True, 2)
    assert ("9 s" in result.content) == bool(headers)


@pytest.mark.parametrize("retries", [0, 1, 2, 5])
def test_a_tool_has_a_budget_of_retries(retries):
    """`Limits.retries_per_tool` attempts after the first; the last failure is told."""
    service = Service(*down(), read_only=True)
    result = once(service, limits=Limits(retries_per_tool=retries, retries_per_run=9))
    assert len(service.times) == result.attempts == 1 + retries
    assert (result.error_type, result.retryable) == (ErrorType.UNAVAILABLE, True)
    assert (f"after {retries + 1} attempts" in result.content) == (retries > 0)


def attempts_of(services: Iterable[Service]) -> list[int]:
    """How often each was asked."""
    return [len(each.times) for each in services]


def test_the_budgets_by_default():
    """Two per tool and three per run, whatever the calls, the turns, and the order."""

    async def play(store, clock):
        services = [Service(*down(), name=name, read_only=True) for name in "abc"]
        replies = [say("", call("a")), say("", call("b"), call("c")), say("", call("a"), call("b")), "done"]
        agent = agent_of(services, *replies, store=store, clock=clock, limits=Limits(errors=9))
        run = await agent.run("go")
        assert [each.attempts for each in results_of(run.messages)] == [3, 2, 1, 1, 1]
        assert attempts_of(services) == [4, 3, 1]
        assert run.retries == {"a": 2, "b": 1}
        await sound(agent, run)

    virtually(play)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_calls_beside_each_other_share_the_budget(stream):
    """Ten at once that all fail make two retries together, also where they start while the reply streams."""

    async def play(store, clock):
        service = Service(*down(99), read_only=True)
        settings = Settings(stream=stream)
        calls = say("", *[call("ask")] * 10)
        agent = agent_of([service], calls, "done", store=store, clock=clock, settings=settings)
        run = await agent.run("go")
        assert len(service.times) == 12
        assert run.retries == {"ask": 2}
        assert Counter(each.attempts for each in results_of(run.messages)) == {2: 2, 1: 8}
        await sound(agent, run)

    virtually(play)


def test_the_budget_is_the_runs_and_not_the_driving_calls():
    """Stepped through, or resumed by another agent on the same store: what was spent is spent."""

    async def play(store, clock):
        service = Service(*down(99), read_only=True)
        replies = [say("", call("ask")), say("", call("ask"))]
        agent = agent_of([service], *replies, store=store, clock=clock)
        run = agent.start("go")
        while run.turn < 2:
            run = await agent.step(run)
        assert run.retries == {"ask": 2}
        other = agent_of([service], "done", store=store, clock=clock)
        done = await other.resume(run.id)
        assert (done.output, len(service.times)) == ("done", 4)
        assert (await other.load(run.id)).retries == {"ask": 2}

    virtually(play)


def test_a_wait_for_a_person_does_not_renew_the_budget():
    """Two attempts before the approval and one more behind it."""

    async def play(store, clock):
        service, other = Service(*down(99), name="a", read_only=True), Service(*down(99), name="b", read_only=True)
        pay = tool(requires_approval=True, name="pay")(Service().tool.function)
        model = ScriptedModel(say("", call("a"), call("pay"), call("b"), call("a")), "done")
        agent = Agent(model, tools=[service.tool, other.tool, pay], store=store, clock=clock)
        run = await agent.run("go")
        assert attempts_of([service, other]) == [3, 0]
        await agent.approve(run.id, "t1.1")
        run = await agent.resume(run.id)
        assert attempts_of([service, other]) == [4, 2]
        assert run.retries == {"a": 2, "b": 1}
        await sound(agent, run)

    virtually(play)


def test_two_runs_have_a_budget_each():
    """What one run spent does not bind the other, though the tool is the same."""
    service = Service(*down(2), read_only=True)
    assert once(service).attempts == 3
    service.failures = down(2)
    assert once(service).attempts == 3


def test_a_queue_by_itself_has_a_budget_for_its_life():
    """Its results say the attempts, and `retries` what was spent."""

    async def play(_store, clock):
        service = Service(*down(99), read_only=True)
        queue = ToolQueue(ToolRegistry.of([service.tool]), clock=clock)
        first, second = [ToolCall(id=each, name="ask", arguments="{}") for each in "ab"]
        assert [each.attempts for each in await queue.execute_all([first])] == [3]
        assert [each.attempts for each in await queue.execute_all([second])] == [1]
        assert queue.retries == {"ask": 2}
        async with queue.stream([second]) as events:
            _ = [event async for event in events]
        assert [each.attempts for each in events.results] == [1]

    virtually(play)


def test_all_attempts_are_one_call():
    """The same call, key and deadline; only `attempt` counts."""

    async def play(store, clock):
        service = Service(*down(2), idempotent=True)
        agent = agent_of([service], say("", call("ask")), "done", store=store, clock=clock)
        run = await agent.run("go")
        assert [ctx.attempt for ctx in service.contexts] == [1, 2, 3]
        assert {ctx.idempotency_key for ctx in service.contexts} == {keys_of(run)["t1.0"]}
        assert {ctx.call_id for ctx in service.contexts} == {"t1.0"}
        (deadline,) = {ctx.deadline for ctx in service.contexts}
        assert deadline == pytest.approx(run.created_at + 30)
        assert starts_of(await agent.history(run.id), "t1.0") == 3

    virtually(play)


@pytest.mark.parametrize("at_once", [False, True])
def test_a_retry_that_does_not_fit_into_the_calls_time_is_not_made(at_once):
    """A service that asks for longer than there is time is told of at once."""
    service = Service(TransientError("down", 30), read_only=True, at_once=at_once)
    result = once(service)
    assert (result.attempts, result.duration_s) == (1, 0)
    assert (result.outcome, result.error_type) == (Outcome.FAILED, ErrorType.UNAVAILABLE)
    assert "30 s" in result.content


def test_waits_and_attempts_together_keep_the_calls_time():
    """A call is cut off at its time-out whatever attempt it is in, and says in which."""

    async def play(store, clock):
        begun: list[float] = []

        @tool(read_only=True, timeout_s=10)
        async def ask() -> str:
            begun.append(anyio.current_time())
            await anyio.sleep(4)
            raise TransientError("down")

        agent = Agent(ScriptedModel(say("", call("ask")), "done"), tools=[ask], store=store, clock=clock)
        run = await agent.run("go")
        (result,) = results_of(run.messages)
        assert begun == [0, 5]
        assert (result.outcome, result.attempts, result.duration_s) == (Outcome.FAILED, 2, pytest.approx(9))

    virtually(play)


def test_the_time_is_up_in_a_later_attempt():
    """The result is a time-out, and the retry that led there counts."""

    async def play(store, clock):
        begun: list[float] = []

        @tool(idempotent=True, timeout_s=10)
        async def ask() -> str:
            begun.append(anyio.current_time())
            await anyio.sleep(4 * len(begun))
            raise TransientError("down")

        agent = Agent(ScriptedModel(say("", call("ask")), "done"), tools=[ask], store=store, clock=clock)
        run = await agent.run("go")
        (result,) = results_of(run.messages)
        assert begun == [0, 5]
        assert (result.outcome, result.error_type) == (Outcome.TIMED_OUT, ErrorType.TIMEOUT)
        assert (result.attempts, result.duration_s, result.retryable) == (2, pytest.approx(10), False)
        assert run.retries == {"ask": 1}

    virtually(play)


def test_a_run_that_is_cancelled_in_a_wait_ends_then():
    """No attempt follows, the call is closed, and nothing is left behind."""

    async def play(store, clock):
        service = Service(TransientError("down", 20), idempotent=True)
        agent = agent_of([service], say("", call("ask")), store=store, clock=clock)
        run = agent.start("go")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(agent.finish, run)
            await anyio.sleep(5)
            await agent.cancel(run.id)
        run = await agent.load(run.id)
        assert (run.state, run.duration_s, len(service.times)) == (State.ERROR, pytest.approx(5), 1)
        (result,) = results_of(run.messages)
        assert result.outcome is Outcome.UNKNOWN
        sound_run(run)

    virtually(play)


@pytest.mark.parametrize(
    ("options", "after"), [({"idempotent": True}, ["answered"]), ({}, ["lost"])], ids=["safe", "not"]
)
def test_a_worker_that_dies_in_a_wait(options, after):
    """The call is in flight all the same: it runs again under its key if it may, else a person is asked."""

    async def play(store, clock):
        service = Service(RefusedError("busy", 20), **options)
        agent = agent_of([service], say("", call("ask")), store=store, clock=clock)
        run = agent.start("go")
        with anyio.move_on_after(5):
            await agent.finish(run)
        other = agent_of([service], "done", store=store, clock=clock)
        done = await other.resume(run.id)
        assert ["lost" if done.is_waiting else "answered"] == after
        if not done.is_waiting:
            assert [ctx.attempt for ctx in service.contexts] == [1, 2]
            assert len({ctx.idempotency_key for ctx in service.contexts}) == 1

    virtually(play)


async def test_plain_functions_are_tried_again_too(store):
    """In a thread, with the attempt in their context; their failures count like those of async ones."""
    seen: list[tuple[int, str, float]] = []

    @tool(read_only=True)
    def ask(ctx: RunContext[Any]) -> str:
        seen.append((ctx.attempt, ctx.idempotency_key, ctx.deadline))
        if ctx.attempt < 3:
            raise TransientError("down", 0)
        return "an answer"

    agent = Agent(ScriptedModel(say("", call("ask")), "done"), tools=[ask], store=store)
    run = await agent.run("go")
    (result,) = results_of(run.messages)
    assert (result.content, result.attempts, [each[0] for each in seen]) == ("an answer", 3, [1, 2, 3])
    assert len({each[1:] for each in seen}) == 1
    await sound(agent, run)


async def test_each_attempt_is_journalled_before_it_is_made(store):
    """A start for each, so that who lost the run meanwhile makes no other; one finish, which tells the same retries."""
    service = Service(TransientError("down", 0), idempotent=True)
    agent = agent_of([service], say("", call("ask")), "done", store=store)
    run = await agent.run("go")
    assert names(await agent.history(run.id))[2:5] == ["ToolStarted", "ToolStarted", "ToolFinished"]
    await sound(agent, run)


FAULTS: dict[str, Callable[[], Exception]] = {
    "passing": lambda: TransientError("down"),
    "refused": lambda: RefusedError("busy"),
    "limited": lambda: http(429),
    "bug": lambda: ValueError("a bug"),
}
KINDS = {"read": {"read_only": True}, "put": {"idempotent": True}, "pay": {}}


@given(
    st.lists(
        st.lists(
            st.tuples(st.sampled_from(sorted(KINDS)), st.lists(st.sampled_from(sorted(FAULTS)), max_size=5)),
            min_size=1,
            max_size=4,
        ),
        max_size=4,
    )
)
def test_whatever_fails_the_budgets_hold(turns):
    """No tool is tried more than two times again, nothing more than three times, and an unsafe one only if refused."""

    async def play(store, clock):
        faults: dict[str, list[str]] = {}
        tried: list[tuple[str, str, str]] = []

        def acting(name: str, options: dict[str, bool]) -> Any:
            async def act(ctx: RunContext[Any]) -> str:
                fault = faults[ctx.call_id].pop(0) if faults[ctx.call_id] else ""
                tried.append((name, ctx.call_id, fault))
                await anyio.sleep(0.1)
                if fault:
                    raise FAULTS[fault]()  # noqa: RSE102  it makes the exception
                return "done"

            return tool(name=name, **options)(act)

        for turn, calls in enumerate(turns, 1):
            for index, (_, wanted) in enumerate(calls):
                faults[f"t{turn}.{index}"] = list(wanted)
        model = ScriptedModel(*[say("", *[call(name) for name, _ in calls]) for calls in turns], "done")
        tools = [acting(name, options) for name, options in KINDS.items()]
        agent = Agent(model, tools=tools, store=store, clock=clock, limits=Limits(errors=9, turns=9))
        run = await agent.run("go")
        await sound(agent, run)
        attempts = Counter(call_id for _, call_id, _ in tried)
        results = {each.call_id: each for each in results_of(run.messages)}
        open_circuit = {c for c, r in results.items() if r.error_type in (ErrorType.CIRCUIT_OPEN, ErrorType.WITHDRAWN)}
        assert {c: r.attempts for c, r in results.items() if c not in open_circuit} == dict(attempts)
        again = Counter(name for name, call_id in {(n, c) for n, c, _ in tried} for _ in range(attempts[call_id] - 1))
        assert again.total() <= 3
        assert all(count <= 2 for count in again.values())
        assert run.retries == again
        for name, call_id in {(n, c) for n, c, _ in tried}:
            seen = [fault for _, c, fault in tried if c == call_id]
            assert all(fault == "refused" if name == "pay" else fault != "bug" for fault in seen[:-1])
            assert (results[call_id].outcome is Outcome.DONE) == (seen[-1] == "")

    virtually(play)
