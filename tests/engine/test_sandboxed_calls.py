"""Calls of tools with a sandbox: what each end of the function becomes, and that the sandbox is recorded.

The sandbox stands in for one that starts processes; those are in tests/sandbox.
"""

import anyio
import pytest

from agentfsm import Agent, ErrorType, Outcome, tool
from agentfsm.ports import SandboxEnd, SandboxOutcome
from agentfsm.testing import ScriptedModel, call, say
from agentfsm.tools.breaker import FAILURE_THRESHOLD, BreakerState


def work(n: int) -> int:
    """Work on a number."""
    return n


class Elsewhere:
    """A sandbox whose calls end as they are told."""

    seconds = 5.0

    def __init__(self, end, **fields):
        self.outcome = SandboxOutcome(end=end, level="" if end is SandboxEnd.NOT_STARTED else "elsewhere", **fields)

    def check_function(self, function):
        assert function is work

    async def run(self, function, args, kwargs):
        await anyio.lowlevel.checkpoint()
        assert (function, [*args], kwargs) == (work, [], {"n": 3})
        return self.outcome


async def ended(sandbox, calls=1, **options):
    """Have a model call the tool; return it, its last result and the last record of the audit."""
    working = tool(sandbox=sandbox, **options)(work)
    model = ScriptedModel(*[say("", call("work", n=3)) for _ in range(calls)], say("done"))
    async with Agent(model, tools=[working]) as agent:
        run = await agent.run("go")
        results = [each for each in run.messages if hasattr(each, "outcome")]
        return working, results[-1], (await agent.audit(run.id))[-1]


@pytest.mark.parametrize(
    ("end", "fields", "outcome", "error_type", "text"),
    [
        (SandboxEnd.DONE, {"value": {"a": "ä"}}, Outcome.DONE, None, '{"a":"ä"}'),
        (
            SandboxEnd.FAILED,
            {"error": "ValueError: \ud800"},
            Outcome.FAILED,
            ErrorType.TOOL,
            "ValueError: \ufffd. Its effect",
        ),
        (SandboxEnd.TIMED_OUT, {"error": "no result"}, Outcome.TIMED_OUT, ErrorType.TIMEOUT, "no result. Its effect"),
        (SandboxEnd.RETRY, {"error": "use a date"}, Outcome.FAILED, ErrorType.RETRY, "use a date"),
        (
            SandboxEnd.NOT_STARTED,
            {"error": "none here"},
            Outcome.FAILED,
            ErrorType.UNAVAILABLE,
            "none here. Nothing was",
        ),
    ],
)
async def test_the_ends_of_a_function(end, fields, outcome, error_type, text):
    """Each becomes a result that the model can work with; result and audit name the sandbox."""
    working, result, record = await ended(Elsewhere(end, **fields))
    assert (result.outcome, result.error_type) == (outcome, error_type)
    assert result.content.startswith(text)
    assert result.sandbox == record.sandbox == ("" if end is SandboxEnd.NOT_STARTED else "elsewhere")
    assert working.timeout_s == 5.0  # the sandbox's
    assert working(3) == 3  # the function itself


async def test_a_lost_process_follows_the_tools_policy():
    """Its result names the sandbox, and the text has the reason."""
    _, result, record = await ended(Elsewhere(SandboxEnd.LOST, error="killed by \ud800"), on_unknown="fail")
    assert (result.outcome, result.error_type) == (Outcome.UNKNOWN, ErrorType.UNAVAILABLE)
    assert result.content.startswith("outcome unknown: killed by \ufffd. Its effect may have happened")
    assert result.sandbox == record.sandbox == "elsewhere"


async def test_lost_processes_open_the_breaker():
    """Unlike calls that take long: what kills the processes of one call may kill those of the next."""
    working = tool(sandbox=Elsewhere(SandboxEnd.LOST, error="killed"), on_unknown="fail")(work)
    model = ScriptedModel(say("", *[call("work", n=3) for _ in range(FAILURE_THRESHOLD)]), say("done"))
    async with Agent(model, tools=[working]) as agent:
        await agent.run("go")
    assert working.breaker.state is BreakerState.OPEN


async def test_slow_calls_do_not_open_the_breaker():
    """The time of one call in a sandbox says nothing of the next, so the tool stays available."""
    sandbox = Elsewhere(SandboxEnd.TIMED_OUT, error="no result")
    working, result, _ = await ended(sandbox, calls=FAILURE_THRESHOLD + 1)
    assert result.outcome is Outcome.TIMED_OUT
    assert working.breaker.state is BreakerState.CLOSED


async def test_a_sandbox_with_the_calls_own_time():
    """A tool may have a shorter time than its sandbox."""
    assert tool(sandbox=Elsewhere(SandboxEnd.DONE), timeout_s=1.0)(work).timeout_s == 1.0
