"""Functions that declare something of a tool, and fail: the safe side counts, and the log says whose fault it was."""

from __future__ import annotations

import logging
import traceback
from typing import Any

import pytest

from agentfsm import Agent, InputRequired, Outcome, PendingKind, Permissions, Question, Rule, Run, ToolResult, tool
from agentfsm.testing import ScriptedModel, call, say


def broken(_given: Any) -> Any:
    """Fail, as a name that is misspelled does."""
    return {}["a name"]


async def ran(options: dict[str, Any], permissions: Permissions | None = None) -> Run:
    """Return a run that has called a tool of these options, as far as it gets."""

    @tool(**options)
    async def pay(cents: int) -> str:
        """Pay."""
        return f"paid {cents}"

    return await Agent(ScriptedModel(say("", call("pay", cents=1)), "done"), tools=[pay], permissions=permissions).run(
        "go"
    )


def the_result(run: Run) -> ToolResult:
    (result,) = [message for message in run.messages if isinstance(message, ToolResult)]
    return result


def told(caplog: pytest.LogCaptureFixture) -> set[str]:
    """Return the lines of the log; each has its traceback, down to the function."""
    for record in caplog.records:
        assert traceback.extract_tb(record.exc_info[2])[-1].name == "broken"
    return {record.getMessage() for record in caplog.records if record.levelno == logging.WARNING}


async def test_who_cannot_say_that_nobody_need_be_asked_asks(caplog):
    """A person is asked, and sees the arguments where they cannot be described."""
    run = await ran({"requires_approval": broken, "describe": broken})
    (item,) = run.pending
    assert item.kind is PendingKind.APPROVAL
    assert "KeyError" in item.description
    assert told(caplog) == {
        "requires_approval of the tool 'pay' has failed, so a person is asked",
        "describe of the tool 'pay' has failed, so only the arguments are shown",
    }


async def test_who_cannot_say_how_long_it_waits_waits_as_long_as_others(caplog):
    """A question is put all the same."""

    @tool(answer_expires_s=broken)
    async def book(city: str) -> str:
        """Book."""
        raise InputRequired(Question(key="class", message="Which class?"))

    run = await Agent(ScriptedModel(say("", call("book", city="Rome"))), tools=[book]).run("go")
    assert [item.kind for item in run.pending] == [PendingKind.QUESTION]
    (line,) = told(caplog)
    assert line.startswith("answer_expires_s of the tool 'book' has failed, so an answer counts for ")


@pytest.mark.parametrize("option", ["locks", "concurrency_safe"])
async def test_a_call_whose_locks_are_not_known_is_alone(caplog, option):
    """It runs, beside no other."""
    run = await ran({option: broken})
    assert the_result(run).outcome is Outcome.DONE
    assert told(caplog) == {"locks or concurrency_safe of the tool 'pay' has failed, so the call is alone"}


async def test_a_rule_that_fails_lets_nothing_run(caplog):
    """Neither a rule of the tool's nor one of the agent's permissions says yes by failing."""
    run = await ran({"validate": broken})
    assert the_result(run).outcome is Outcome.FAILED
    assert told(caplog) == {"validate of the tool 'pay' has failed, so the call is refused"}
    caplog.clear()
    run = await ran({}, Permissions(allow=[Rule("pay", when=broken)]))
    assert the_result(run).outcome is Outcome.FAILED
    assert told(caplog) == {"a rule's `when` of the tool 'pay' has failed, so it counts against the call"}


async def test_a_tool_that_cannot_say_that_it_is_there_is_not(caplog):
    """The model is not told of it."""
    run = await ran({"enabled": broken})
    assert the_result(run).outcome is Outcome.SKIPPED
    assert told(caplog) == {f"event=tool_enabled_failed run={run.id} agent=agent tool=pay"}
