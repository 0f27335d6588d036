"""What must hold whatever happened: checkers that the tests share."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, TypeVar

import attrs
import pytest
from anyio.lowlevel import checkpoint

from agentfsm import Agent, AssistantMessage, Limits, Run, RunError, State, StopReason, ToolCall, ToolResult
from agentfsm._lib import concurrency as pool
from agentfsm.core.effects import Wait
from agentfsm.core.events import Event, ToolStarted
from agentfsm.core.header import Header
from agentfsm.core.messages import Message
from agentfsm.core.run import begin_run
from agentfsm.engine.execution.budget import Budget
from agentfsm.ports import Request
from agentfsm.stores import MemoryStore
from agentfsm.testing import VirtualClock, run_virtual
from agentfsm.tools.queue.dispatch import QueueHost

T = TypeVar("T")

# A guard against hanging, never a bound that a test relies on.
HANG_S = 20.0


def valid_history(messages: Sequence[Message]) -> None:
    """Fail unless each call has exactly one result, in call order, right behind the message that asked for it."""
    owed: list[ToolCall] = []
    seen: set[str] = set()
    for message in messages:
        if isinstance(message, ToolResult):
            assert owed, f"a result of {message.call_id} that no call asked for"
            call = owed.pop(0)
            assert (message.call_id, message.tool) == (call.id, call.name)
            message.text.encode()
            continue
        assert not owed, f"{[call.id for call in owed]} have no result before {message!r}"
        if isinstance(message, AssistantMessage):
            owed = list(message.calls)
            for call in owed:
                assert call.id not in seen, f"{call.id} twice in one history"
                assert isinstance(json.loads(call.arguments), dict)
                seen.add(call.id)
    assert not owed, f"{[call.id for call in owed]} have no result"


def sound_run(run: Run) -> None:
    """Fail unless the run is in itself what a run promises to be."""
    valid_history(run.messages)
    if run.is_over:
        assert run.effect is None
        assert not run.open
        assert not run.pending
        assert (run.stop_reason is StopReason.COMPLETED) == (run.state is State.DONE)
    else:
        assert run.stop_reason is None
        assert run.effect is not None
        assert run.is_waiting == isinstance(run.effect, Wait)
    if run.state is not State.DONE:
        with pytest.raises(RunError) as caught:
            _ = run.output
        assert caught.value.run == run


async def sound(agent: Agent, run: Run) -> None:
    """Fail unless the run is sound, and its journal tells the same."""
    sound_run(run)
    assert await agent.load(run.id) == run
    events = await agent.history(run.id)
    assert len(events) == run.version
    keys = [message.key for message in calls_of(run.messages)]
    assert len(keys) == len(set(keys))


def calls_of(messages: Iterable[Message]) -> list[ToolCall]:
    """All calls of a history, in order."""
    return [call for message in messages if isinstance(message, AssistantMessage) for call in message.calls]


def keys_of(run: Run) -> dict[str, str]:
    """The idempotency keys of all calls of a run, open ones too, by call id."""
    calls = [*calls_of(run.messages), *[entry.call for entry in run.open]]
    return {call.id: call.key for call in calls}


def results_of(messages: Iterable[Message]) -> list[ToolResult]:
    """All results of a history, in order."""
    return [message for message in messages if isinstance(message, ToolResult)]


def names(events: Iterable[Event]) -> list[str]:
    """The events by name."""
    return [type(event).__name__ for event in events]


def starts_of(events: Iterable[Event], call_id: str) -> int:
    """How many times the journal says that a call was started."""
    return sum(isinstance(event, ToolStarted) and event.call_id == call_id for event in events)


def newest(request: Request) -> str:
    """The text of the newest message that a model was shown."""
    message = request.messages[-1]
    return message.text


def texts(request: Request) -> str:
    """All that a model was shown, as one text."""
    return "\n".join(message.text for message in request.messages)


@attrs.define
class Trap:
    """Cancels at its n-th visit."""

    at: int = 10**9
    cancel: Callable[[], object] = lambda: None
    visits: int = 0

    @property
    def sprung(self) -> bool:
        """Whether it has cancelled."""
        return self.visits >= self.at

    async def visit(self) -> None:
        """Be at a place where the run may wait."""
        self.visits += 1
        if self.visits == self.at:
            self.cancel()
        await checkpoint()


async def no_leases(store: Any) -> None:
    """Fail when the store says that somebody drives a run."""
    driven = [run.id for run in await store.runs(limit=10_000) if run.driven]
    assert not driven, f"still leased: {driven}"


async def reach(agent: Agent, run: Run, state: State, **options: Any) -> Run:
    """Step until the run is in a state."""
    while run.state is not state:
        after = await agent.step(run, **options)
        assert after is not run, f"it stays in {run.state}"
        run = after
    return run


class Wrapped:
    """A store that passes everything on to a real one; those made of it break what they are there to break."""

    inner: Any

    def __getattr__(self, name: str) -> Any:
        """Pass on."""
        return getattr(self.inner, name)


@attrs.define(eq=False)
class Keeping(QueueHost):
    """Keeps the results that it is handed, as they come."""

    kept: list[ToolResult] = attrs.field(factory=list)

    def on_result(self, result: ToolResult) -> None:
        """Keep it."""
        self.kept.append(result)


def virtually(play: Callable[[MemoryStore, VirtualClock], Awaitable[T]]) -> T:
    """Play a story in virtual time, with a store and a clock of its own, and leave nothing behind."""
    clock = VirtualClock()
    store = MemoryStore(clock=clock)

    async def played() -> T:
        value = await play(store, clock)
        await no_leases(store)
        return value

    return run_virtual(played)


@attrs.frozen
class Still:
    """Stands for the journal of a run that does nothing."""

    run: Run


def fresh(limits: Limits, run_id: str = "root", above: Budget | None = None) -> Budget:
    """Return the budget of a run that has done nothing."""
    return Budget(limits, Still(begin_run(Header(id=run_id, prompt=(), created_at=0.0))), above)


def settled(condition: Callable[[], bool]) -> None:
    """Wait, from a thread that may block, until other threads have made the condition true."""
    give_up = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < give_up, "the other threads did not come to an end"
        os.sched_yield()


def busy_threads() -> int:
    """How many threads of plain tools are at work."""
    tools = sum(thread.name == "agentfsm-tool" for thread in threading.enumerate())
    return tools - len(pool._idle_threads)
