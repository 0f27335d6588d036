"""Runs that break the provider's prompt cache: found in the journal, with the cause, and logged once."""

import attrs
import pytest

from agentfsm import Agent, AssistantMessage, Limits, StopReason, Usage, tool
from agentfsm.cli.render.text import format_run
from agentfsm.core.events import AnswerGiven, Compacted, LimitReached, Resumed, ToolsChosen, ToolsOffered
from agentfsm.core.usage import CacheReport
from agentfsm.journal.cache_losses import list_cache_losses
from agentfsm.telemetry import read_costs
from agentfsm.testing import ScriptedModel, call, say

READ = Usage(input_tokens=12_000, cached_tokens=11_000, output_tokens=1)
ANEW = Usage(input_tokens=12_500, cached_tokens=2_000, output_tokens=1)


def replied(usage, at=1_000.0, request="aa-bb", **fields):
    return ToolsChosen(message=AssistantMessage(text="so"), usage=usage, at=at, request=request, **fields)


@pytest.mark.parametrize(
    ("between", "after", "cause"),
    [
        ([Compacted(start=4, tokens_before=9, tokens_after=5, why="full")], {}, "the history was compacted"),
        ([ToolsOffered(tools=("a",), how="words")], {}, "other tools were offered"),
        ([Resumed(changes=("instructions",))], {}, "the agent was changed: instructions"),
        (
            [LimitReached(reason=StopReason.MAX_TURNS, message="", note="")],
            {},
            "the last answer was asked for without tools",
        ),
        ([], {"model": "small"}, "another model replied: small"),
        ([], {"at": 1_900.0}, "15 minutes had passed"),
        ([], {"request": "ab-bb"}, "the tools, the instructions or the settings were changed"),
        ([], {}, ""),
    ],
)
def test_the_cause_of_a_loss_is_in_the_journal(between, after, cause):
    """It is what came since the request before. A loss by the provider itself is none of the run's."""
    losses = list(list_cache_losses([replied(READ), *between, replied(ANEW, **after)]))
    assert [(loss.turn, loss.cause, loss.tokens) for loss in losses] == ([(2, cause, 10_000)] if cause else [])


@pytest.mark.parametrize(
    ("between", "reported", "reason"),
    [
        ([], "tools_changed", "the provider says tools_changed"),
        ([], "context_compacted", "the provider says context_compacted"),
        ([], "unavailable", None),
        (
            [Compacted(start=4, tokens_before=9, tokens_after=5, why="full")],
            "input_changed",
            "the history was compacted; the provider says input_changed",
        ),
        (
            [Compacted(start=4, tokens_before=9, tokens_after=5, why="full")],
            "previous_message_not_found",
            "the history was compacted; the provider says previous_message_not_found",
        ),
        ([Compacted(start=4, tokens_before=9, tokens_after=5, why="full")], "", "the history was compacted"),
    ],
)
def test_the_reason_of_the_provider_stands_beside_the_cause(between, reported, reason):
    """It is a cause of its own if none is found here, unless the provider does not know one either."""
    report = CacheReport(provider="anthropic", response_id="msg_2", reason=reported)
    after = ToolsChosen(
        message=AssistantMessage(text="so", cache_report=report), usage=ANEW, at=1_000.0, request="aa-b"
    )
    losses = list(list_cache_losses([replied(READ), *between, after]))
    assert [(loss.reason, loss.reported) for loss in losses] == ([(reason, reported)] if reason else [])


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (READ, READ),
        (attrs.evolve(READ, cached_tokens=0), attrs.evolve(ANEW, cached_tokens=0)),  # it tells nothing of a cache
        (READ, attrs.evolve(ANEW, estimated=True)),
    ],
)
def test_what_the_provider_does_not_report_is_no_loss(first, second):
    """Also if the history was compacted."""
    cut = Compacted(start=4, tokens_before=9, tokens_after=5, why="full")
    assert list(list_cache_losses([replied(first), cut, replied(second)])) == []
    given = AnswerGiven(message=AssistantMessage(text="so"), usage=ANEW)
    assert [loss.turn for loss in list_cache_losses([replied(READ), replied(READ), cut, given])] == [3]


@tool(read_only=True)
async def look(number: int) -> str:
    """Look."""
    return "words " * 20_000


async def test_a_tool_that_comes_later_is_named(store, caplog):
    """A result that was cut brings `read_result`, and tools stand before all else. It is logged once."""
    replies = [say("", call("look", number=n), usage=ANEW if n else READ) for n in range(4)]
    model = ScriptedModel(*replies, say("done", usage=READ))
    agent = Agent(model, tools=[look], instructions="Be brief.", store=store, limits=Limits(tokens=10**8))
    run = await agent.run("go")
    events = await agent.history(run.id)
    report = await read_costs(store)
    logged = [record.getMessage() for record in caplog.records if "prompt_cache_lost" in record.getMessage()]
    assert [text.partition("turn=")[2] for text in logged] == ["2 changed=tools tokens=10000"]
    [loss] = list_cache_losses(events)
    assert (loss.turn, loss.tokens) == (2, 10_000)
    assert report.lost_tokens == 10_000
    shown = format_run(run, events)
    assert "cache    turn 2: 10,000 tokens that the provider had in its prompt cache were read anew, because" in shown
    assert "of them from the provider's cache" in shown
