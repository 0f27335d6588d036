"""A tool whose service is down: after five failures in a row its calls fail at once, until one gets through."""

from __future__ import annotations

from collections import Counter
from typing import Any

import anyio
import pytest

from agentfsm import (
    Agent,
    ErrorType,
    Limits,
    ModelRetry,
    Outcome,
    Permissions,
    Rule,
    RunContext,
    Tool,
    ToolCall,
    ToolQueue,
    ToolRegistry,
    ToolResult,
    TransientError,
    tool,
)
from agentfsm.core.events import ApprovalGiven
from agentfsm.testing import ScriptedModel, VirtualClock, call, say
from agentfsm.tools.breaker import FAILURE_THRESHOLD, OPEN_S, BreakerState
from tests.support.checks import names, results_of, sound, sound_run, virtually

OPEN = ErrorType.CIRCUIT_OPEN


class Service:
    """A service that is down until it is told to be up."""

    def __init__(self, *, takes_s: float = 0.0, **options: Any) -> None:
        """Take how long an answer takes, and the tool's options."""
        self.is_up = False
        self.asked = 0
        self.takes_s = takes_s

        async def ask(ctx: RunContext[Any], at: int = 0) -> str:
            self.asked += 1
            await anyio.sleep(self.takes_s)
            if not self.is_up:
                raise TransientError("down")
            return "an answer"

        self.tool: Tool[..., Any] = tool(**options)(ask)


def queue_of(*tools: Tool[..., Any], **options: Any) -> ToolQueue:
    """A queue by itself, in virtual time."""
    return ToolQueue(ToolRegistry.of(tools), clock=VirtualClock(), **options)


async def ask(queue: ToolQueue, times: int = 1, **arguments: str) -> list[ToolResult]:
    """Call the tool so many times in one batch."""
    (name,) = queue.registry.names
    text = arguments.get("text", "{}")
    return await queue.execute_all([ToolCall(id=f"c{n}", name=name, arguments=text) for n in range(times)])


def kinds(results: list[ToolResult]) -> Counter[ErrorType | None]:
    """How many results of each kind."""
    return Counter(result.error_type for result in results)


def test_after_five_failures_in_a_row_it_is_called_no_more():
    """The sixth call is answered without calling the tool: with when to try again, and with nothing journalled."""

    async def play(store, clock):
        service = Service()
        model = ScriptedModel(say("", *[call("ask", at=n) for n in range(7)]), "done")
        agent = Agent(model, tools=[service.tool], store=store, clock=clock)
        run = await agent.run("go")
        assert service.asked == FAILURE_THRESHOLD == 5
        *before, sixth, last = results_of(run.messages)
        assert {each.error_type for each in before} == {ErrorType.UNAVAILABLE}
        assert (sixth.outcome, sixth.error_type, sixth.retryable) == (Outcome.FAILED, OPEN, True)
        assert "60 s" in sixth.content
        assert "not called" in sixth.content
        assert last.content == sixth.content
        assert names(await agent.history(run.id)).count("ToolStarted") == 5
        await sound(agent, run)

    virtually(play)


@pytest.mark.parametrize("plan", ["turns", "runs", "agents"])
def test_all_calls_of_the_process_count_together(plan):
    """Failures in different turns, runs and agents open it, and it is open for all of them."""

    async def play(store, clock):
        service = Service()
        options = {"tools": [service.tool], "store": store, "clock": clock, "limits": Limits(errors=99, turns=99)}
        if plan == "turns":
            model = ScriptedModel(*[say("", call("ask", at=n)) for n in range(6)], "done")
            run = await Agent(model, **options).run("go")
            assert [each.error_type for each in results_of(run.messages)][-1] is OPEN
        else:
            agent = Agent(ScriptedModel(*[say("", call("ask")), "done"] * 6), **options)
            runs = []
            for _ in range(6):
                by = agent if plan == "runs" else agent.with_(name="another")
                runs.append(await by.run("go"))
            assert [results_of(run.messages)[0].error_type for run in runs][-1] is OPEN
        assert service.asked == 5

    virtually(play)


def test_a_filtered_registry_has_the_same_breaker():
    """It holds the same tools."""

    async def play(_store, _clock):
        service = Service()
        registry = ToolRegistry.of([service.tool])
        await ask(ToolQueue(registry, clock=VirtualClock()), 5)
        assert kinds(await ask(ToolQueue(registry.filter(["ask"]), clock=VirtualClock()))) == {OPEN: 1}

    virtually(play)


def test_another_tool_of_the_same_function_has_its_own():
    """What stands behind a tool is known to nobody but its author."""

    async def play(_store, _clock):
        service = Service()
        await ask(queue_of(service.tool), 5)
        assert kinds(await ask(queue_of(tool(service.tool.function)))) == {ErrorType.UNAVAILABLE: 1}

    virtually(play)


def test_time_outs_count():
    """A service that hangs is as down as one that refuses."""

    async def play(_store, clock):
        service = Service(takes_s=99, timeout_s=2)
        results = await ask(queue_of(service.tool), 6)
        assert kinds(results) == {ErrorType.TIMEOUT: 5, OPEN: 1}
        assert clock.monotonic() == pytest.approx(10)

    virtually(play)


def test_a_call_counts_once_whatever_its_attempts():
    """Retries of one call are not yet an outage."""

    async def play(_store, _clock):
        service = Service(read_only=True, concurrency_safe=False, timeout_s=99)
        queue = queue_of(service.tool, retries_per_tool=9, retries_per_run=9)
        results = await ask(queue, 1)
        assert (results[0].attempts, service.tool.breaker.state) == (10, BreakerState.CLOSED)
        assert kinds(await ask(queue, 5)) == {ErrorType.UNAVAILABLE: 4, OPEN: 1}

    virtually(play)


async def broken(at: int = 0) -> str:
    """Fail at every call."""
    raise [ValueError("a bug"), ModelRetry("not so"), PermissionError("no")][at % 3]


@pytest.mark.parametrize(
    ("options", "text", "error"),
    [
        ({}, '{"at": 0}', ErrorType.TOOL),
        ({}, '{"at": 1}', ErrorType.RETRY),
        ({}, '{"at": 2}', ErrorType.TOOL),
        ({}, '{"at": "x"}', ErrorType.ARGUMENTS),
        ({}, "[]", ErrorType.ARGUMENTS),
        ({"validate": lambda _a: "never"}, "{}", ErrorType.ARGUMENTS),
    ],
    ids=["bug", "model retry", "permission", "schema", "json", "rule"],
)
def test_what_says_nothing_of_the_service_does_not_open_it(options, text, error):
    """Wrong arguments and the tool's own bugs may come in any number."""

    async def play(_store, _clock):
        broken_tool = tool(**options)(broken)
        results = await ask(queue_of(broken_tool), 12, text=text)
        assert kinds(results) == {error: 12}
        assert broken_tool.breaker.state is BreakerState.CLOSED

    virtually(play)


@pytest.mark.parametrize("way", ["permission", "enabled"])
def test_calls_that_were_not_let_through_do_not_open_it(way):
    """What is not permitted, or not there, was never called."""

    async def play(store, clock):
        service = Service(**({"enabled": lambda _ctx: False} if way == "enabled" else {}))
        permissions = Permissions(deny=(Rule("ask", when=lambda a: a.at >= 0),)) if way == "permission" else None
        model = ScriptedModel(say("", *[call("ask", at=n) for n in range(12)]), "done")
        agent = Agent(model, tools=[service.tool], permissions=permissions, store=store, clock=clock)
        await agent.run("go")
        assert (service.asked, service.tool.breaker.state) == (0, BreakerState.CLOSED)

    virtually(play)


def test_an_answer_between_starts_the_count_anew():
    """Four failures, an answer, four failures: that is no outage."""

    async def play(_store, _clock):
        service = Service()
        queue = queue_of(service.tool)
        await ask(queue, 4)
        service.is_up = True
        await ask(queue)
        service.is_up = False
        assert kinds(await ask(queue, 5)) == {ErrorType.UNAVAILABLE: 5}
        assert kinds(await ask(queue)) == {OPEN: 1}

    virtually(play)


def test_the_text_counts_down_to_the_probe():
    """It names the seconds that are left, and never none."""

    async def play(_store, _clock):
        service = Service()
        queue = queue_of(service.tool)
        await ask(queue, 5)
        for passed_s, left in ((0, "60 s"), (20, "40 s"), (59.9, "1 s")):
            await anyio.sleep(passed_s - anyio.current_time())
            (result,) = await ask(queue)
            assert f" {left}" in result.content
        assert service.asked == 5

    virtually(play)


@pytest.mark.parametrize("is_up", [True, False])
def test_one_probe_decides(is_up):
    """After 60 s one call of a batch goes; whether it is answered decides for those behind it."""

    async def play(_store, _clock):
        service = Service(takes_s=1, concurrency_safe=True)
        queue = queue_of(service.tool)
        await ask(queue, 5)
        await anyio.sleep(OPEN_S)
        service.is_up = is_up
        results = await ask(queue, 8)
        assert service.asked == 6
        assert kinds(results) == {None if is_up else ErrorType.UNAVAILABLE: 1, OPEN: 7}
        after = kinds(await ask(queue, 3))
        assert after == ({None: 3} if is_up else {OPEN: 3})

    virtually(play)


def test_a_probe_that_fails_costs_another_60_seconds():
    """And no more: the next probe may go then."""

    async def play(_store, _clock):
        service = Service()
        queue = queue_of(service.tool)
        await ask(queue, 5)
        for asked in (6, 7):
            await anyio.sleep(OPEN_S - 1)
            assert kinds(await ask(queue)) == {OPEN: 1}
            await anyio.sleep(1)
            assert kinds(await ask(queue)) == {ErrorType.UNAVAILABLE: 1}
            assert service.asked == asked
        service.is_up = True
        await anyio.sleep(OPEN_S)
        assert kinds(await ask(queue, 4)) == {None: 4}

    virtually(play)


def test_a_probe_that_is_cancelled_leaves_its_place_to_the_next():
    """It has said nothing of the service."""

    async def play(_store, _clock):
        service = Service(takes_s=5)
        queue = queue_of(service.tool)
        await ask(queue, 5)
        await anyio.sleep(OPEN_S)
        with anyio.move_on_after(1):
            await ask(queue)
        assert service.tool.breaker.state is BreakerState.HALF_OPEN
        service.is_up = True
        assert kinds(await ask(queue)) == {None: 1}
        assert service.tool.breaker.state is BreakerState.CLOSED

    virtually(play)


def test_a_probe_whose_arguments_do_not_fit_takes_no_place():
    """It is refused before anybody looks at the circuit."""

    async def play(_store, _clock):
        service = Service()
        queue = queue_of(service.tool)
        await ask(queue, 5)
        await anyio.sleep(OPEN_S)
        service.is_up = True
        assert kinds(await ask(queue, text='{"at": "x"}')) == {ErrorType.ARGUMENTS: 1}
        assert kinds(await ask(queue)) == {None: 1}

    virtually(play)


def test_a_probe_that_meets_a_bug_closes_it():
    """The service was reached, so it is up, whatever the tool made of its answer."""

    async def play(_store, _clock):
        fails = [TransientError("down")] * 5 + [ValueError("a bug")]

        @tool
        async def act() -> str:
            raise fails.pop(0)

        queue = queue_of(act)
        await ask(queue, 5)
        await anyio.sleep(OPEN_S)
        assert kinds(await ask(queue)) == {ErrorType.TOOL: 1}
        assert act.breaker.state is BreakerState.CLOSED

    virtually(play)


@pytest.mark.parametrize("options", [{"concurrency_safe": True}, {"read_only": True}], ids=str)
def test_twenty_parallel_failures_open_it_once(options):
    """Those that were on their way fail by themselves, and the next call is not made."""

    async def play(_store, clock):
        service = Service(takes_s=1, **options)
        queue = queue_of(service.tool)
        assert kinds(await ask(queue, 20)) == {ErrorType.UNAVAILABLE: 20}
        assert service.asked == (22 if service.tool.read_only else 20)
        assert kinds(await ask(queue)) == {OPEN: 1}
        await anyio.sleep(OPEN_S)
        service.is_up = True
        assert kinds(await ask(queue)) == {None: 1}
        assert kinds(await ask(queue, 20)) == {None: 20}

    virtually(play)


def test_calls_that_hang_through_an_outage_do_not_open_it_again():
    """Twenty that time out when the service is long up again say nothing of it."""

    async def play(_store, _clock):
        service = Service(takes_s=100, concurrency_safe=True, timeout_s=90)
        hanging = queue_of(service.tool)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, hanging, 20)
            await anyio.sleep(1)
            service.takes_s = 0
            await ask(queue_of(service.tool), 5)
            await anyio.sleep(OPEN_S)
            service.is_up = True
            assert kinds(await ask(queue_of(service.tool))) == {None: 1}
        assert kinds(await ask(queue_of(service.tool), 5)) == {None: 5}

    virtually(play)


def test_an_open_circuit_stops_no_run():
    """The model is told, and answers with what it has."""

    async def play(store, clock):
        service = Service(read_only=True)
        await ask(queue_of(service.tool, retries_per_tool=0), 5)
        model = ScriptedModel(say("", call("ask")), say("it is down", expect="go on without it"))
        run = await Agent(model, tools=[service.tool], store=store, clock=clock).run("go")
        assert run.output == "it is down"
        sound_run(run)

    virtually(play)


def test_a_yes_to_a_call_that_the_circuit_stops_is_still_on_record():
    """The journal says who allowed it, and that it was not run."""

    async def play(store, clock):
        service = Service(requires_approval=True)
        model = ScriptedModel(say("", call("ask")), "done")
        agent = Agent(model, tools=[service.tool], store=store, clock=clock)
        run = await agent.run("go")
        await agent.approve(run.id, "t1.0", by="bob")
        await ask(queue_of(service.tool), 5)
        done = await agent.resume(run.id)
        assert (done.output, results_of(done.messages)[0].error_type) == ("done", OPEN)
        given = [event.by for event in await agent.history(run.id) if isinstance(event, ApprovalGiven)]
        assert given == ["bob"]
        await sound(agent, done)

    virtually(play)
