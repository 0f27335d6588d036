"""A run with an agent and a function in the background is killed at each commit: each of them pays once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from agentfsm import Agent, AssistantMessage, Limits, RunContext, State, SystemMessage, tool
from agentfsm.core.events import ChildReported
from agentfsm.ports import Emit, Model, ProposedCall, Reply, Request, Store
from agentfsm.testing.crash import crash_point
from tests.support.crash_story import count_statements
from tests.support.effect_book import EffectBook
from tests.support.killed_runs import drive, kill_at_each

WAIT = ProposedCall(id="w", name="wait", arguments='{"seconds": 3600, "reason": "they pay"}')


class Speaker(Model):
    """Makes its calls, waits until as many results have come from the background, and answers; in any process."""

    def __init__(self, *calls: ProposedCall, notes: int = 0) -> None:
        """Set the calls, and how many results to wait for."""
        self.name, self.calls, self.notes = "speaker", calls, notes

    async def reply(self, request: Request, emit: Emit | None = None) -> Reply:
        """Return the next reply."""
        if not any(isinstance(message, AssistantMessage) for message in request.messages):
            return Reply(calls=self.calls)
        told = [message for message in request.messages if isinstance(message, SystemMessage)]
        here = sum(message.text.count("[Background run ") for message in told)
        return Reply(text="paid") if here >= self.notes else Reply(calls=(WAIT,))


def boss_on(store: Store, book: EffectBook) -> Agent:
    """Return an agent that has its agent and its function pay in the background."""

    def write(ctx: RunContext[None]) -> str:
        crash_point("effect")
        with book.path.open("a") as file:
            file.write(f'["{ctx.idempotency_key}", "pay"]\n')
        crash_point("effect")
        return ctx.idempotency_key

    @tool(on_unknown=book.look_up)
    async def pay(ctx: RunContext[None]) -> str:
        """Pay."""
        return write(ctx)

    @tool(background=True, on_unknown=book.look_up)
    async def transfer(ctx: RunContext[None]) -> str:
        """Pay in the background."""
        return write(ctx)

    limits = Limits(crashes=1_000_000, loop_turns=1_000)
    payer = Agent(Speaker(ProposedCall(id="a", name="pay", arguments="{}")), name="payer", tools=[pay], limits=limits)
    calls = (
        ProposedCall(id="a", name="payer", arguments='{"query": "Pay."}'),
        ProposedCall(id="b", name="transfer", arguments="{}"),
    )
    tools = [payer.as_tool(background=True), transfer]
    return Agent(Speaker(*calls, notes=2), name="boss", tools=tools, store=store, limits=limits)


async def work(store_of: Callable[[], Store], place: Path) -> None:
    """Drive the run to its end, or until this process is killed."""
    count_statements()
    await drive(boss_on(store_of(), EffectBook(str(place))), place.name)


async def check(store_of: Callable[[], Store], place: Path) -> None:
    """Check that both have paid once, that the run was told so once, and that it counts what they have spent."""
    run_id, book = place.name, EffectBook(str(place))
    boss = boss_on(store_of(), book)
    run = await boss.load(run_id)
    assert (run.state, run.output) == (State.DONE, "paid")
    assert len(book.read()) == 2
    children = [await boss.load(f"{run_id}.{call_id}") for call_id in ("t1.0", "t1.1")]
    assert [child.state for child in children] == [State.DONE, State.DONE]
    reports = [event for event in await boss.history(run_id) if isinstance(event, ChildReported) and event.result]
    assert sorted(report.call_id for report in reports) == ["t1.0", "t1.1"]
    told = [message.text for message in run.messages if isinstance(message, SystemMessage)]
    assert sum(text.count("[Background run ") for text in told) == 2
    costs = {cost.run_id: cost for cost in boss.cost(run).children}
    assert {child.id: child.usage.tokens for child in children} == {
        key: each.usage.tokens for key, each in costs.items()
    }
    await boss.aclose()


@pytest.mark.parametrize("backend", ["asyncio", pytest.param("trio", marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    ("store_of", "kind", "apart"),
    [
        ("sqlite", "commit", 9),
        pytest.param("sqlite", "commit", 1, marks=pytest.mark.soak),
        pytest.param("sqlite", "effect", 1, marks=pytest.mark.soak),
        pytest.param("postgres", "commit", 1, marks=pytest.mark.soak),
    ],
    indirect=["store_of"],
)
def test_a_run_with_background_runs_may_be_killed(  # noqa: PLR0917  fixtures
    fork_server, folder, store_of, kind, apart, backend
):
    """Before and after each commit, of the run as well as of those in the background, and each effect."""
    works, checks = partial(work, store_of), partial(check, store_of)
    at = kill_at_each(fork_server, folder, works, checks, kind, apart=apart, backend=backend)
    assert at == 5 if kind == "effect" else at > 20, at
