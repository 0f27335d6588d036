"""Every policy, alone and after others, over histories by chance: what is shown is whole, fits, and is told as data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentfsm import Agent, Limits, ModelUnavailableError, Outcome, Run, Settings, ToolResult, tool
from agentfsm.context import (
    Cut,
    DropAcknowledgements,
    DropRepeatedErrors,
    PriorityRetention,
    SlidingWindow,
    Summarise,
    TrimResults,
)
from agentfsm.core.codec import decode_event, encode_event
from agentfsm.core.events import Compacted
from agentfsm.core.history import Removed, Span, build_note
from agentfsm.ports import ContextPolicy, Emit, Model, ProposedCall, Reply, Request
from agentfsm.testing import FunctionModel
from agentfsm.tokens.ledger import count_message
from agentfsm.tokens.tool_prompts import count_tools
from tests.support.checks import sound, valid_history
from tests.support.histories import GROUPS, TURNS, content_of, history_of, newest_group
from tests.support.wire_rules import check_wires
from tests.support.word_counter import WordCounter

ANSWER_TOKENS = 50
# What saves less than the note on it takes is not left out.
A_NOTE = count_message(build_note(Removed(count=99)), WordCounter())
WIDE = Limits(turns=1_000, tokens=10**9, errors=1_000)


def brief(request: Request) -> str:
    """Summarise in a few words."""
    return "in short: " + str(len(request.messages[0].text))


def endless(request: Request) -> str:
    """Summarise in more words than were allowed."""
    return "and " * 5_000


def blank(request: Request) -> str:
    """Say nothing."""
    return " \n"


def down(request: Request) -> str:
    """Fail."""
    raise ModelUnavailableError("503 overloaded")


ONE_BY_ONE: dict[str, tuple[ContextPolicy, ...]] = {
    "none": (),
    "default": (TrimResults(), SlidingWindow()),
    "window": (SlidingWindow(),),
    "trim": (TrimResults(chars=20, items=2, keep=0),),
    "cut": (Cut(5),),
    "one message": (Cut(1),),
    "summary": (Summarise(model=FunctionModel(brief), least=0.0),),
    "endless summary": (Summarise(model=FunctionModel(endless), least=0.0, keep=1), SlidingWindow()),
    "failing summary": (Summarise(model=FunctionModel(down), least=0.0), PriorityRetention()),
    "blank summary": (Summarise(model=FunctionModel(blank), least=0.0),),
    "all by rules": (DropRepeatedErrors(), DropAcknowledgements(), TrimResults(), PriorityRetention()),
    "all": (DropRepeatedErrors(), TrimResults(chars=100), Summarise(model=FunctionModel(brief)), SlidingWindow()),
    "upside down": (PriorityRetention({"user": 1, "system": 0}), TrimResults(chars=30)),
}


class Working(Model):
    """Calls a tool for each size of each turn, then answers; keeps what it was asked."""

    name = "working"

    def __init__(self, turns: Sequence[Any], window_tokens: int) -> None:
        """Take the turns as `histories.TURNS` draws them."""
        self.turns = turns
        self.window_tokens = window_tokens
        self.requests: list[Request] = []

    async def reply(self, request: Request, emit: Emit | None = None) -> Reply:
        """Call, or be done."""
        at = len(self.requests)
        self.requests.append(request)
        if at >= len(self.turns):
            return Reply(text="done")
        sizes, outcome, kind = self.turns[at]
        fails = outcome is not Outcome.DONE
        told = [{"name": f"{at}.{n}", "size": size, "kind": kind, "fails": fails} for n, size in enumerate(sizes)]
        return Reply(calls=tuple([ProposedCall(id="x", name="look", arguments=json.dumps(each)) for each in told]))


@tool(read_only=True)
async def look(name: str, size: int, kind: str, fails: bool) -> str:
    """Look."""
    if fails:
        raise ValueError(content_of(name, size, kind))
    return content_of(name, size, kind)


@pytest.fixture(autouse=True)
def words(monkeypatch):
    """Vocabularies are words here."""
    counter = WordCounter()

    async def load(_model_name: str) -> WordCounter:
        return counter

    monkeypatch.setattr("agentfsm.tokens.load_counter", load)
    return counter


def assert_shown(request: Request, run: Run) -> None:
    """Each request is one that providers take, with the task and the newest group; and the run says the same."""
    shown = tuple(request.messages)
    assert shown == run.shown
    valid_history(shown)
    check_wires(shown, "Be brief.")
    assert run.messages[run.own_start] in shown
    newest = newest_group(run.messages)
    assert [type(m) for m in shown[-len(newest) :]] == [type(m) for m in newest]
    assert shown[-len(newest)] is newest[0]


def assert_told(run: Run) -> None:
    """The layout accounts for each message before the window once, in order."""
    at = told = 0
    for entry in run.segments:
        if isinstance(entry, Span):
            assert at <= entry.start < entry.end <= run.cutoff
            at, told = entry.end, told + entry.end - entry.start
        else:
            told += entry.count
    assert told == run.cutoff
    assert sum(isinstance(entry, Removed) for entry in run.segments) <= 1


def fits(request: Request, model: Model) -> bool:
    """Whether the request stays within three quarters of the room."""
    counter = WordCounter()
    overhead = counter.count(request.instructions) + count_tools(request.tools, counter)
    room = model.window_tokens - ANSWER_TOKENS - overhead
    return sum(count_message(message, counter) for message in request.messages) <= 0.75 * room


def spare(request: Request, run: Run) -> int:
    """Return the tokens of what could still have gone: all but the task, the newest group and the notes."""
    older = request.messages[: -len(newest_group(run.messages))]
    own = {id(message) for message in run.messages} - {id(run.messages[run.own_start])}
    return sum(count_message(m, WordCounter()) for m in older if id(m) in own or isinstance(m, ToolResult))


async def played(
    policies: Sequence[ContextPolicy],
    groups: Any,
    turns: Any,
    window: int,
) -> tuple[Agent, Working, list[Run]]:
    """Run an agent over a history, and return the run at each request."""
    model = Working(turns, window)
    agent = Agent(
        model,
        tools=[look],
        instructions="Be brief.",
        settings=Settings(max_tokens=ANSWER_TOKENS),
        limits=WIDE,
        context=policies,
    )
    seen: list[Run] = []
    run = agent.start("the task itself", messages=history_of(groups))
    while not run.is_over:
        asked = len(model.requests)
        before, run = run, await agent.step(run)
        if len(model.requests) > asked:
            seen.append(before)
    await sound(agent, run)
    assert (await agent.replay(run.id)).is_faithful
    seen.append(run)
    return agent, model, seen


async def check(policies: Sequence[ContextPolicy], groups: Any, turns: Any, window: int) -> None:
    """Run it, and look at every request."""
    agent, model, seen = await played(policies, groups, turns, window)
    for request, run in zip(model.requests, seen, strict=False):
        assert_shown(request, run)
        assert_told(run)
        if any(isinstance(each, SlidingWindow | PriorityRetention) for each in policies) and not fits(request, model):
            assert spare(request, run) <= A_NOTE
    final = seen[-1]
    for event in await agent.history(final.id):
        if isinstance(event, Compacted):
            assert event.tokens_after < event.tokens_before or event.usage.tokens
            assert decode_event(encode_event(event, final.header), final.header) == event


@pytest.mark.parametrize("name", ONE_BY_ONE)
@settings(
    max_examples=settings.default.max_examples // 4,  # an example is several runs
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(groups=GROUPS, turns=st.lists(TURNS, min_size=3, max_size=10), window=st.integers(400, 2_000))
def test_whatever_the_policies_do_a_request_is_whole(name, groups, turns, window):
    """Alone or one after the other, once or twice in a run: valid for both vendors, with the task and what is new."""
    anyio.run(check, ONE_BY_ONE[name], groups, turns, window)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    policies=st.lists(st.sampled_from([each for line in ONE_BY_ONE.values() for each in line]), max_size=5),
    groups=GROUPS,
    turns=st.lists(TURNS, min_size=3, max_size=8),
    window=st.integers(400, 2_000),
)
def test_policies_compose_in_any_order(policies, groups, turns, window):
    """Twice the same, or one that undoes what another has prepared: what is shown is whole all the same."""
    anyio.run(check, policies, groups, turns, window)
