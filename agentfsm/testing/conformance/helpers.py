"""Helpers of the conformance tests: runs that are created, executed and released as the engine does."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Final

import anyio
import attrs
import pytest

from agentfsm.core.errors import LeaseHeldError, StoreError
from agentfsm.core.events import (
    Accepted,
    Action,
    AnswerDrafted,
    AnswerGiven,
    ApprovalAsked,
    ApprovalGiven,
    AttemptFailed,
    ChildReported,
    Compacted,
    Continued,
    Event,
    Failed,
    Guarded,
    GuardVerdict,
    InputGiven,
    Judged,
    LimitReached,
    ModelFaltered,
    Observed,
    Paused,
    PlanDropped,
    Planned,
    Recalled,
    Reminded,
    Resumed,
    Score,
    StepsReady,
    ToolCutOff,
    ToolFinished,
    ToolLost,
    ToolPaused,
    ToolsChosen,
    ToolsOffered,
    ToolsReturned,
    ToolStarted,
    Verdict,
)
from agentfsm.core.header import Fingerprint, Header
from agentfsm.core.history import Removed, Span, Summarised
from agentfsm.core.inbox import Input, InputKind
from agentfsm.core.labels import Label, LabelSource
from agentfsm.core.limits import StopReason
from agentfsm.core.messages import AssistantMessage, ErrorType, ImagePart, Outcome, TextPart, ToolCall, ToolResult
from agentfsm.core.pending import Pending, PendingKind, Question
from agentfsm.core.recalled_items import RecalledItem
from agentfsm.core.run import Run, begin_run
from agentfsm.core.usage import AgentCost, Purpose, Usage
from agentfsm.core.window_layers import WindowLayers

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from agentfsm.ports.store import Lease, PendingWrite, RunSummary, Store

# Text that is hard to store, and must be read back unchanged.
HOSTILE_TEXT: Final = (
    "NUL \x00, escape \x1b[31m, bidi \u202e, zero width \u200b, tag \U000e0041, emoji 👩‍👩‍👧, quotes '\"`;--, \\ \n\r\t"
)
# Seconds since 1970: a time in the year 2255.
FAR_FUTURE: Final = 9e9
# Seconds without a new event after which competing callers are considered blocked.
STALL_TIMEOUT_S: Final = 60.0
FINAL_ANSWER: Final = AnswerGiven(message=AssistantMessage(text="done"), usage=Usage(input_tokens=7, output_tokens=3))


def make_header(run_id: str = "r1", prompt: str = "Sort the notes", **fields: object) -> Header:
    """Return the header of a run to create."""
    values: dict[str, object] = {"created_at": 1_800_000_000.0, **fields}
    return Header(id=run_id, prompt=(TextPart(text=prompt),), **values)  # type: ignore[arg-type]


def make_input(text: str, due_at: float | None = None) -> Input:
    """Return an input of the user."""
    return Input(parts=(TextPart(text=text),), due_at=due_at)


async def wait_until(store: Store, at: float) -> None:
    """Wait until the store's clock has reached a time, in seconds since 1970."""
    while await store.now() < at:  # noqa: ASYNC110  a clock has no event to wait for
        await anyio.sleep(0.01)


def list_ids(lines: Sequence[RunSummary]) -> list[str]:
    """Return the ids of run summaries."""
    return [line.id for line in lines]


def build_turn(run: Run) -> tuple[Event, ...]:
    """Return the events of the run's next turn, with one call."""
    call = ToolCall(id=f"t{run.turn + 1}.0", name="look", arguments='{"at":"x"}', key=f"k{run.turn}")
    result = ToolResult(call_id=call.id, tool="look", outcome=Outcome.DONE, content="seen")
    return (
        ToolsChosen(at=5.0, message=AssistantMessage(calls=(call,)), usage=Usage(input_tokens=5, output_tokens=2)),
        ToolFinished(at=6.0, took_s=0.5, result=result),
        ToolsReturned(at=6.0),
        Continued(at=6.0),
        Observed(at=7.0),
    )


async def list_claimable(store: Store, agent: str, limit: int = 100) -> tuple[str, ...]:
    """Claim runs, release them, and return their ids in the order of the claim."""
    claim = await store.claim(agent, limit=limit)
    for lease in claim.leases:
        await store.release(lease).wait()
    return tuple([lease.run_id for lease in claim.leases])


@attrs.define(eq=False, repr=False)
class LeasedRun:
    """Run under a lease."""

    store: Store
    lease: Lease
    run: Run

    @classmethod
    async def create(cls, store: Store, head: Header | None = None) -> LeasedRun:
        """Create a run, or take the lease of an existing one."""
        head, lease = await store.create(head or make_header())
        stored = await store.read(head.id)
        return cls(store, lease, begin_run(head).fold(stored.events))

    @classmethod
    async def resume(cls, store: Store, run_id: str = "r1") -> LeasedRun:
        """Take the lease of an existing run."""
        lease = await store.lease(run_id)
        stored = await store.read(run_id)
        return cls(store, lease, begin_run(stored.header).fold(stored.events))

    def append(self, *events: Event, taken: Sequence[int] = (), final: bool = False) -> PendingWrite:
        """Apply and append events."""
        self.run = self.run.fold(events)
        return self.store.append(self.lease, self.run, events, taken=taken, final=final)

    def build_turn(self) -> tuple[Event, ...]:
        """Return the events of a turn with one call."""
        return build_turn(self.run)

    async def request_approval(self, expires_at: float = FAR_FUTURE, at: float = 0.0) -> None:
        """Append events after which the run waits for an approval: in ACT, at version 3."""
        chosen, *_rest = self.build_turn()
        asked = ApprovalAsked(at=at, call_id=f"t{self.run.turn + 1}.0", expires_at=expires_at)
        await self.append(Observed(), chosen, asked).wait()

    async def release(self, inbox_read: int = 0, timers_read_at: float = 0.0) -> None:
        """Release the lease; the inbox was read up to that number, and its timers at that time."""
        self.lease.inbox_read, self.lease.timers_read_at = inbox_read, timers_read_at
        await self.store.release(self.lease).wait()


async def create_finished_run(store: Store, head: Header | None = None, at: float = 0.0) -> Run:
    """Create a run, append its events up to DONE, and release the lease."""
    driver = await LeasedRun.create(store, head)
    await driver.append(Observed(at=at), attrs.evolve(FINAL_ANSWER, at=at)).wait()
    await driver.release()
    return driver.run


def build_answer(cost_usd: float | None, took_s: float) -> AnswerGiven:
    """Return a final answer that took a while, with its price."""
    return attrs.evolve(FINAL_ANSWER, usage=attrs.evolve(FINAL_ANSWER.usage, cost_usd=cost_usd), took_s=took_s)


async def create_waiting_run(store: Store, head: Header | None = None, expires_at: float = FAR_FUTURE) -> None:
    """Create a run that waits for an approval, and release the lease."""
    driver = await LeasedRun.create(store, head)
    await driver.request_approval(expires_at)
    await driver.release()


def build_every_event() -> tuple[Event, ...]:
    """Return an event of each type, with all fields set. The sequence is not a valid run, which stores do not check."""
    call = ToolCall(
        id="t1.0", name="n", arguments='{"a":[1,2.5,null]}', key="k", provider_id="p", malformed="{", repaired="{,"
    )
    usage = Usage(input_tokens=1, output_tokens=2, cached_tokens=1, cost_usd=0.125, estimated=True)
    below = AgentCost(agent="b", run_id="r1.t1.0.t1.0", usage=usage, usd=None, turns=1)
    child = AgentCost(
        agent="a",
        run_id="r1.t1.0",
        usage=usage,
        usd=0.5,
        turns=2,
        tool_calls=("n",),
        duration_s=1.5,
        children=(below,),
        counted=("n",),
    )
    result = ToolResult(
        call_id="t1.0",
        tool="n",
        outcome=Outcome.TIMED_OUT,
        content=HOSTILE_TEXT,
        index=3,
        started_at=1.5,
        duration_s=0.25,
        attempts=2,
        error_type=ErrorType.TIMEOUT,
        retryable=True,
        shown_chars=9,
        child=child,
        parts=(ImagePart(url="data:image/png;base64,AA=="),),
    )
    waits = Pending(
        kind=PendingKind.APPROVAL,
        run_id="r1.t1.0",
        call_id="t1.0",
        tool="n",
        arguments={"a": [1, 2.5, None]},
        description=HOSTILE_TEXT,
        reason=HOSTILE_TEXT,
        expires_at=9.5,
        digest="d",
    )
    asks = Pending(
        kind=PendingKind.QUESTION,
        run_id="r1",
        call_id="t1.0",
        questions=(
            Question(key="who", message=HOSTILE_TEXT, schema={"properties": {"a": {"type": "integer"}}}),
            Question(key="pay", message="x", url="https://example.org/pay"),
        ),
    )
    said = AssistantMessage(text=HOSTILE_TEXT, calls=(call,))
    parts = (TextPart(text="x"), ImagePart(url="https://example.org/x.png", detail="low"))
    return (
        Observed(at=1.5, took_s=0.5, inputs=(Input(kind=InputKind.TIMER, parts=parts),)),
        ToolsChosen(at=2.0, message=said, usage=usage, request="q"),
        AnswerGiven(at=2.0, message=said, usage=usage, request="q"),
        AnswerDrafted(at=2.0, message=said, usage=usage, request="q", filtered=(HOSTILE_TEXT,)),
        ModelFaltered(at=2.0, error=HOSTILE_TEXT, usage=usage, request="q"),
        AttemptFailed(at=2.0, error=HOSTILE_TEXT, usage=usage, request="q", purpose=Purpose.SUMMARY),
        Compacted(
            at=2.0,
            start=3,
            head=(Span(start=0, end=1), Summarised(count=2, text=HOSTILE_TEXT), Removed(count=1)),
            tokens_before=9,
            tokens_after=4,
            why="window",
            policies=("Summarise",),
        ),
        ToolsOffered(at=2.0, tools=("n",), how="similarity", usage=usage),
        Reminded(at=2.0, text=HOSTILE_TEXT, prompts=("n@1.0#0",)),
        Planned(at=2.0, call=call, reason=HOSTILE_TEXT, usage=usage),
        Recalled(
            at=2.0,
            query=HOSTILE_TEXT,
            items=(
                RecalledItem(
                    id="m", kind="fact", text=HOSTILE_TEXT, score=0.5, valid_from=1.0, labels=(Label.PRIVATE,)
                ),
            ),
            fault=HOSTILE_TEXT,
            usage=usage,
            layers=WindowLayers(memory=2_400),
            left_out=1,
            profile=(RecalledItem(id="p", kind="fact", text=HOSTILE_TEXT, score=0.5, valid_from=1.0),),
        ),
        PlanDropped(at=2.0, reason=HOSTILE_TEXT, usage=usage),
        StepsReady(at=2.0, calls=(call,), usage=usage),
        Guarded(
            at=2.0,
            call_id="t1.0",
            verdict=GuardVerdict.ASK,
            rule="no(untrusted, irreversible)",
            reason=HOSTILE_TEXT,
            labels=(LabelSource(label=Label.UNTRUSTED, run_id="r0", version=4, call_id="t1.0", name="n"),),
            digest="d",
            counts=True,
        ),
        ToolStarted(at=2.0, call_id="t1.0", repeatable=True),
        ToolStarted(at=2.0, call_id="t1.0", repeatable=True, read_only=True, since=1.5, attempts=2),
        ToolCutOff(at=2.0, call_id="t1.0", started_at=1.5, duration_s=0.5, undone=True),
        ToolFinished(at=2.0, result=result, by="ann"),
        ToolLost(at=2.0, call_id="t1.0"),
        ToolPaused(at=2.0, call_id="t1.0", pending=(waits,)),
        ToolPaused(at=2.0, call_id="t1.0", pending=(asks,), state='{"a": [1, null]}'),
        InputGiven(at=2.0, call_id="t1.0", by="ann", answers={"who": {"a": 1, "b": [HOSTILE_TEXT]}, "pay": None}),
        InputGiven(at=2.0, call_id="t1.0", by="ann", answers={}, questions=asks.questions, state="null"),
        ApprovalAsked(at=2.0, call_id="t1.0", expires_at=9.5, description=HOSTILE_TEXT, digest="d"),
        ApprovalGiven(at=2.0, call_id="t1.0", by="ann", arguments='{"a":1}'),
        ToolsReturned(at=2.0),
        ChildReported(at=2.0, call_id="t1.0"),
        ChildReported(at=2.0, call_id="t1.0", pending=(waits,)),
        ChildReported(at=2.0, call_id="t1.0", result=result),
        Judged(
            at=2.0, verdict=Verdict(action=Action.REPLAN, scores=(Score(criterion="x", score=2),), note=HOSTILE_TEXT)
        ),
        Continued(at=2.0, note=HOSTILE_TEXT, loop=True, disabled=("n",), refused=True, is_last=True, asks=HOSTILE_TEXT),
        Accepted(at=2.0),
        Paused(at=2.0, by="ann", message=HOSTILE_TEXT),
        Resumed(
            at=2.0, fingerprint=Fingerprint(instructions="i", model="m", tools={"n": "h"}), changes=(HOSTILE_TEXT,)
        ),
        LimitReached(at=2.0, reason=StopReason.TIMEOUT, message=HOSTILE_TEXT, note=HOSTILE_TEXT),
        Failed(at=2.0, reason=StopReason.CANCELLED, message=HOSTILE_TEXT),
    )


async def race_for_lease(acquire: Callable[[], Awaitable[Lease]]) -> list[Lease]:
    """Request a lease in 30 tasks at once, and return the leases that were granted."""
    leases: list[Lease] = []

    async def race() -> None:
        try:
            leases.append(await acquire())
        except LeaseHeldError:
            return

    async with anyio.create_task_group() as group:
        for _ in range(30):
            group.start_soon(race)
    return leases


def with_version(run: Run, version: int) -> Run:
    """Return the run with another version, for events that are not a valid run."""
    return attrs.evolve(run, version=version)


async def drive_in_turns(store: Store, times: int) -> None:
    """Lease the run that many times, in competition with other callers, and append two events each time."""
    done, version, since = 0, -1, anyio.current_time()
    while done < times:
        try:
            lease = await store.lease("r1")
        except LeaseHeldError:
            await anyio.sleep(0.001)
            if anyio.current_time() - since > STALL_TIMEOUT_S:
                before, version = version, len((await store.read("r1")).events)
                assert version > before, (
                    f"{STALL_TIMEOUT_S} s without an event while the run is held: a lease was not released"
                )
                since = anyio.current_time()
            continue
        run = with_version(begin_run(make_header()), lease.version)
        for _ in range(2):
            run = with_version(run, run.version + 1)
            assert await store.append(lease, run, (Observed(at=float(lease.token)),)).wait()
            await anyio.lowlevel.checkpoint()
        await store.release(lease).wait()
        done += 1


async def check_turns(store: Store, times: int) -> None:
    """Check that the leases of `drive_in_turns` followed each other, without interleaved appends."""
    events = (await store.read("r1")).events
    drives = [(token, len(list(group))) for token, group in groupby(events, key=lambda event: event.at)]
    assert [count for _token, count in drives] == [2] * times
    assert drives == sorted(drives)


async def check_refused(commit: PendingWrite, kind: type[StoreError]) -> None:
    """Check that waiting for the append raises that error."""
    with pytest.raises(kind):
        await commit.wait()
