"""A budget is exceeded by one answer at most, whatever the models do: eight agents at once, off their journals.

The models here keep to nothing: they answer longer than they may, bill less or more than was counted, say nothing of
what they used, falter, and are cut off or killed at any moment, after which the run goes on in a new process.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import anyio
import attrs
from hypothesis import given
from hypothesis import strategies as st

from agentfsm import Agent, Limits, ModelReplyError, Outcome, Run, Settings, Usage, tool
from agentfsm.core import events as e
from agentfsm.engine.execution.config import MAX_ANSWER_TOKENS
from agentfsm.ports import Emit, Model, ProposedCall, Reply, Request
from tests.support.checks import fresh, results_of, valid_history, virtually

if TYPE_CHECKING:
    from agentfsm.testing import VirtualClock

CHILDREN = 8
# Per token, asked or answered.
USD = 0.001


@attrs.frozen
class Reckless:
    """What a reply is, however much was granted."""

    answer: int = 5
    # Tokens.
    asked: int = 5
    delay_s: float = 0.0
    silent: bool = False
    # Whether nothing is said of what it used: the answer is written out instead.
    falters: bool = False
    looks: int = 1
    # Calls of a tool, 0 for an answer.


class Spendthrift(Model):
    """Answers as it was told to, and hears of no cap."""

    name = "spendthrift"

    def __init__(self, *script: Reckless, first: tuple[str, ...] = ()) -> None:
        """Take the replies in order; `first` are the agents that it calls before."""
        self.script = [*script]
        self.first = first

    async def reply(self, request: Request, emit: Emit | None = None) -> Reply:
        """Answer."""
        if self.first:
            names, self.first = self.first, ()
            calls = [ProposedCall(id=name, name=name, arguments='{"query": "go on"}') for name in names]
            return Reply(calls=tuple(calls), usage=Usage(input_tokens=5, output_tokens=5))
        line = self.script.pop(0) if self.script else Reckless(looks=0)
        await anyio.sleep(line.delay_s)
        usage = None if line.silent else Usage(input_tokens=line.asked, output_tokens=line.answer)
        if line.falters:
            raise ModelReplyError("no JSON", usage)
        calls = [ProposedCall(id=str(n), name="look", arguments=f'{{"at": {n}}}') for n in range(line.looks)]
        text = "four" * min(line.answer, 300) if line.silent else "fine"  # it is asked again with each later turn
        return Reply(text=text, calls=tuple(calls), usage=usage)

    def cost_usd(self, usage: Usage) -> float:
        """US dollars for this usage."""
        return usage.tokens * USD


@tool(read_only=True)
async def look(at: int) -> str:
    """Look."""
    return f"seen {at}"


# Tokens of an answer here; with what is asked, no more than what is held back for one.
LONGEST = 14_000
LINES = st.lists(
    st.builds(
        Reckless,
        answer=st.integers(1, LONGEST),
        asked=st.integers(1, 2_000),
        delay_s=st.sampled_from([0.0, 0.1, 0.5]),
        silent=st.sampled_from([False, False, True]),
        falters=st.sampled_from([False, False, False, True]),
        looks=st.integers(0, 2),
    ),
    max_size=3,
)
FAMILY = st.lists(LINES, min_size=CHILDREN, max_size=CHILDREN)
# Seconds after which the process ends, one after the other.
CUTS = st.lists(st.sampled_from([0.05, 0.1, 0.3, 0.6, 1.2]), max_size=3)


def family(shape: list[list[Reckless]], limits: Limits) -> Agent:
    """A coordinator that calls eight agents at once, every second of them by way of another."""
    quick = Limits(tokens=10**9, retry_wait_s=0.1, retry_wait_max_s=0.1)
    tools = []
    for index, lines in enumerate(shape):
        child = Agent(Spendthrift(*lines), tools=[look], name=f"child{index}", limits=quick)
        if index % 2:
            child = Agent(Spendthrift(first=(child.name,)), tools=[child.as_tool()], name=f"over{index}", limits=quick)
        tools.append(child.as_tool(timeout_s=600.0))
    names = tuple(made.name for made in tools)
    return Agent(Spendthrift(first=names), tools=tools, limits=limits)


async def play(shape: list, limits: Limits, cuts: list[float], store, clock: VirtualClock) -> tuple[Run, list[Usage]]:
    """Let the family work, in one process after the other, and return the run with every bill in the journals."""
    with anyio.fail_after(36_000):
        for number, seconds in enumerate(cuts):
            agent = family(shape, limits).with_(store=store, clock=clock)
            with anyio.move_on_after(seconds):
                await (agent.resume("mine") if number else agent.run("go", id="mine"))
        agent = family(shape, limits).with_(store=store, clock=clock)
        run = await (agent.resume("mine") if cuts else agent.run("go", id="mine"))
    valid_history(run.messages)
    assert run.is_over
    assert Outcome.TIMED_OUT not in {result.outcome for result in results_of(run.messages)}, "somebody waited for ever"
    return run, await bills(store)


async def bills(store) -> list[Usage]:
    """Return what each request of each run has cost, off the journals."""
    found = []
    for summary in await store.runs():
        events = (await store.read(summary.id)).events
        found += [event.usage for event in events if isinstance(event, e.Answered | e.AttemptFailed | e.ToolsOffered)]
    return found


def total(found: list[Usage]) -> int:
    """Return the tokens of bills."""
    return sum(usage.tokens for usage in found)


# Tokens of one request and its answer here; attempts that falter are in the bill of the turn.
ANSWER = LONGEST + 2_000 + 100


@given(FAMILY, st.integers(300, 150_000), CUTS)
def test_eight_agents_exceed_their_tokens_by_one_answer_at_most(shape, tokens, cuts):
    """Whatever the models do with their caps, and wherever processes end: N tokens and one answer."""
    limits = Limits(tokens=tokens, retry_wait_s=0.1, retry_wait_max_s=0.1)
    run, found = virtually(partial(play, shape, limits, cuts))
    assert total(found) <= tokens + ANSWER
    assert run.usage.tokens == total(found), "each token is counted once, in the journal of the one that paid"


@given(FAMILY, st.floats(0.3, 150.0), CUTS)
def test_eight_agents_exceed_their_money_by_one_answer_at_most(shape, usd, cuts):
    """The same for US dollars."""
    limits = Limits(tokens=10**9, usd=usd, retry_wait_s=0.1, retry_wait_max_s=0.1)
    run, found = virtually(partial(play, shape, limits, cuts))
    spent = sum(usage.cost_usd or 0.0 for usage in found)
    assert spent <= usd + ANSWER * USD
    assert (run.usage.cost_usd or 0.0) - spent < 1e-6


def test_eight_agents_with_room_for_all_work_at_once():
    """What is held back for each does not hold up a family that has enough: eight answers take the time of one."""
    shape = [[Reckless(answer=2_000, delay_s=1.0, looks=0)] for _ in range(CHILDREN)]
    run, _ = virtually(partial(play, shape, Limits(), []))
    assert run.duration_s == 1.0


def test_a_model_that_answers_too_long_is_found_out():
    """The first answer beyond all that was held back teaches the family: of the next ones, fewer are under way."""
    long = Reckless(answer=60_000, delay_s=1.0)
    first, *others = [[long, long]] + [[Reckless(delay_s=2.0), long]] * 7
    _, found = virtually(partial(play, [first, *others], Limits(tokens=200_000), []))
    assert total(found) <= 200_000 + 60_005


async def test_a_cancelled_wait_holds_nothing():
    """Whoever gives up waiting for room leaves the budget as it was, and wakes nobody wrongly."""
    root = fresh(Limits(tokens=1_000))
    first, second, third = (fresh(Limits(), f"root.t1.{n}", root) for n in range(3))
    _, held = await first.reserve(10, 900, 900, lambda _: None)
    with anyio.move_on_after(0) as scope:
        await second.reserve(10, 900, 900, lambda _: None)
    assert scope.cancelled_caught
    first.settle(held, Usage())
    granted, held = await third.reserve(10, 900, 900, lambda _: None)
    assert granted == 900
    third.settle(held, Usage())
    assert root._reserved == (0, 0.0)
    assert root._in_flight == 0


async def test_an_answer_without_a_cap_is_held_back_in_full():
    """It may take all that the budget has: nobody asks beside it, though a usual one would fit twice."""
    root = fresh(Limits(tokens=20_000))
    first, second = (fresh(Limits(), f"root.t1.{n}", root) for n in range(2))
    granted, held = await first.reserve(10, 4_096, MAX_ANSWER_TOKENS, lambda _: None)
    assert granted == 4_096
    with anyio.move_on_after(0) as scope:
        await second.reserve(10, 4_096, MAX_ANSWER_TOKENS, lambda _: None)
    assert scope.cancelled_caught
    first.settle(held, Usage(input_tokens=10, output_tokens=100))
    assert (await second.reserve(10, 4_096, MAX_ANSWER_TOKENS, lambda _: None))[0] == 4_096


def test_eight_small_caps_work_at_once_in_a_small_budget():
    """With `max_tokens` no more than that is held back, so a small budget does for all at once."""

    async def story(store, clock) -> Run:
        line = Reckless(answer=100, delay_s=1.0, looks=0)
        children = [Agent(Spendthrift(line), name=f"c{n}", settings=Settings(max_tokens=200)) for n in range(CHILDREN)]
        first = tuple(child.name for child in children)
        tools = [child.as_tool() for child in children]
        agent = Agent(Spendthrift(first=first), tools=tools, limits=Limits(tokens=4_000), store=store, clock=clock)
        return await agent.run("go")

    run = virtually(story)
    assert run.duration_s == 1.0
    assert [result.outcome for result in results_of(run.messages)] == [Outcome.DONE] * CHILDREN
