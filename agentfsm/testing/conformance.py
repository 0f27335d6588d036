"""The checks that every store has to pass, for users who write one of their own.

    from agentfsm.testing.conformance import StoreConformance

    class TestMyStore(StoreConformance):
        @pytest.fixture
        async def store(self):
            store = MyStore(...)  # new and empty for each test
            yield store
            await store.aclose()

        @pytest.fixture
        async def other(self, store):
            other = MyStore(...)  # on the same data, as another process would have it
            yield other
            await other.aclose()

Inherit, override the fixtures, and run pytest: each `test_` method is one promise, told in its docstring. They need
anyio's pytest plugin and its fixture `anyio_backend`, which decides whether they run on asyncio, on trio, or on both.
Without the fixture `other` what takes two store objects is skipped.
"""

# ruff: noqa: S101, PLR2004  a test kit asserts, and its numbers speak for themselves

from __future__ import annotations

import gc
import time
from itertools import groupby
from typing import TYPE_CHECKING, Final

import anyio
import attrs
import pytest

from agentfsm.core.effects import Pending, PendingKind, Question
from agentfsm.core.errors import (
    ConflictError,
    LeaseHeldError,
    LeaseLostError,
    MisuseError,
    RunNotFoundError,
    StoreError,
)
from agentfsm.core.events import (
    EVENTS,
    Accepted,
    AnswerDrafted,
    AnswerGiven,
    ApprovalAsked,
    ApprovalGiven,
    Compacted,
    Continued,
    Event,
    Failed,
    InputGiven,
    Judged,
    ModelFaltered,
    Observed,
    Paused,
    Resumed,
    ToolFinished,
    ToolLost,
    ToolPaused,
    ToolsChosen,
    ToolsOffered,
    ToolsReturned,
    ToolStarted,
)
from agentfsm.core.fingerprint import Fingerprint
from agentfsm.core.inbox import (
    Approve,
    Cancel,
    GiveInput,
    Input,
    InputKind,
    Pause,
    Priority,
    Reject,
    Rerun,
    Settle,
    Wake,
)
from agentfsm.core.limits import StopReason
from agentfsm.core.machine import State
from agentfsm.core.messages import (
    AgentCost,
    AssistantMessage,
    ErrorType,
    ImagePart,
    Outcome,
    SystemMessage,
    TextPart,
    ToolCall,
    ToolResult,
    Usage,
    UserMessage,
)
from agentfsm.core.run import Header, Run, begin
from agentfsm.core.verdict import Action, Score, Verdict
from agentfsm.core.view import Removed, Span, Summarised
from agentfsm.ports import Filter
from agentfsm.threads import waker

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agentfsm.core.inbox import InboxItem
    from agentfsm.ports import Commit, Durability, Lease, Store, Summary

HOSTILE: Final = (
    "NUL \x00, escape \x1b[31m, bidi \u202e, zero width \u200b, tag \U000e0041, emoji 👩‍👩‍👧, quotes '\"`;--, \\ \n\r\t"
)
# Text that is awkward to store, and has to come back as it was.
FAR: Final = 9e9
# Seconds since 1970: a moment that no test lives to see, in the year 2255.
DONE: Final = AnswerGiven(message=AssistantMessage(text="done"), usage=Usage(input_tokens=7, output_tokens=3))


def header(run_id: str = "r1", prompt: str = "Sort the notes", **fields: object) -> Header:
    """Return the header of a run to create."""
    values: dict[str, object] = {"created_at": 1_800_000_000.0, **fields}
    return Header(id=run_id, prompt=(TextPart(text=prompt),), **values)  # type: ignore[arg-type]


def words(text: str, due_at: float | None = None) -> Input:
    """Return an input of the user's."""
    return Input(parts=(TextPart(text=text),), due_at=due_at)


async def until(store: Store, at: float) -> None:
    """Return once the store's clock has come to that moment, seconds since 1970."""
    while await store.now() < at:  # noqa: ASYNC110  a clock has no event to wait for
        await anyio.sleep(0.01)


def ids(lines: Sequence[Summary]) -> list[str]:
    """Return the ids of a list's lines."""
    return [line.id for line in lines]


def turn_of(run: Run) -> tuple[Event, ...]:
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


@attrs.define(eq=False, repr=False)
class Driver:
    """A run that is being driven, as the engine does it."""

    store: Store
    lease: Lease
    run: Run

    @classmethod
    async def of(cls, store: Store, head: Header | None = None) -> Driver:
        """Create a run, or take up one that exists."""
        head, lease = await store.create(head or header())
        stored = await store.read(head.id)
        return cls(store, lease, begin(head).fold(stored.events))

    @classmethod
    async def again(cls, store: Store, run_id: str = "r1") -> Driver:
        """Take up a run that exists."""
        lease = await store.lease(run_id)
        stored = await store.read(run_id)
        return cls(store, lease, begin(stored.header).fold(stored.events))

    def append(self, *events: Event, taken: Sequence[int] = (), final: bool = False) -> Commit:
        """Apply and append events; the run moves on."""
        self.run = self.run.fold(events)
        return self.store.append(self.lease, self.run, events, taken=taken, final=final)

    def turn(self) -> tuple[Event, ...]:
        """Return the events of a whole turn with one call."""
        return turn_of(self.run)

    async def ask(self, expires_at: float = FAR, at: float = 0.0) -> None:
        """Let the run wait for a person: it is then in ACT, at version 3."""
        chosen, *_rest = self.turn()
        asked = ApprovalAsked(at=at, call_id=f"t{self.run.turn + 1}.0", expires_at=expires_at)
        await self.append(Observed(), chosen, asked).wait()

    async def release(self, seen: int = 0, seen_at: float = 0.0) -> None:
        """Give the lease back, having looked at the inbox up to that number, and for timers at that moment."""
        self.lease.seen, self.lease.seen_at = seen, seen_at
        await self.store.release(self.lease).wait()


async def finished(store: Store, head: Header | None = None, at: float = 0.0) -> Run:
    """Drive a run to DONE, and give its lease back."""
    driver = await Driver.of(store, head)
    await driver.append(Observed(at=at), attrs.evolve(DONE, at=at)).wait()
    await driver.release()
    return driver.run


async def rests(store: Store, head: Header | None = None, expires_at: float = FAR) -> None:
    """Drive a run until it waits for a person, and give its lease back."""
    driver = await Driver.of(store, head)
    await driver.ask(expires_at)
    await driver.release()


def every_event() -> tuple[Event, ...]:
    """Return one event of each type, with all fields set. They make no run: a journal does not look at that."""
    call = ToolCall(
        id="t1.0", name="n", arguments='{"a":[1,2.5,null]}', key="k", provider_id="p", malformed="{", repaired="{,"
    )
    usage = Usage(input_tokens=1, output_tokens=2, cached_tokens=1, cost_usd=0.125, estimated=True)
    below = AgentCost(agent="b", run_id="r1.t1.0.t1.0", usage=usage, usd=None, turns=1)
    child = AgentCost(
        agent="a", run_id="r1.t1.0", usage=usage, usd=0.5, turns=2, tool_calls=("n",), duration_s=1.5, children=(below,)
    )
    result = ToolResult(
        call_id="t1.0",
        tool="n",
        outcome=Outcome.TIMED_OUT,
        content=HOSTILE,
        index=3,
        started_at=1.5,
        duration_s=0.25,
        attempts=2,
        error_type=ErrorType.TIMEOUT,
        retryable=True,
        shown_chars=9,
        child=child,
    )
    waits = Pending(
        kind=PendingKind.APPROVAL,
        run_id="r1.t1.0",
        call_id="t1.0",
        tool="n",
        arguments={"a": [1, 2.5, None]},
        description=HOSTILE,
        expires_at=9.5,
        digest="d",
    )
    asks = Pending(
        kind=PendingKind.QUESTION,
        run_id="r1",
        call_id="t1.0",
        questions=(
            Question(key="who", message=HOSTILE, schema={"properties": {"a": {"type": "integer"}}}),
            Question(key="pay", message="x", url="https://example.org/pay"),
        ),
    )
    said = AssistantMessage(text=HOSTILE, calls=(call,))
    parts = (TextPart(text="x"), ImagePart(url="https://example.org/x.png", detail="low"))
    return (
        Observed(at=1.5, took_s=0.5, inputs=(Input(kind=InputKind.TIMER, parts=parts),)),
        ToolsChosen(at=2.0, message=said, usage=usage, request="q"),
        AnswerGiven(at=2.0, message=said, usage=usage, request="q"),
        AnswerDrafted(at=2.0, message=said, usage=usage, request="q"),
        ModelFaltered(at=2.0, error=HOSTILE, usage=usage, request="q"),
        Compacted(
            at=2.0,
            start=3,
            head=(Span(start=0, end=1), Summarised(count=2, text=HOSTILE), Removed(count=1)),
            tokens_before=9,
            tokens_after=4,
            why="window",
            policies=("Summarise",),
        ),
        ToolsOffered(at=2.0, tools=("n",), how="similarity", usage=usage),
        ToolStarted(at=2.0, call_id="t1.0", repeatable=True),
        ToolFinished(at=2.0, result=result, by="ann"),
        ToolLost(at=2.0, call_id="t1.0"),
        ToolPaused(at=2.0, call_id="t1.0", pending=(waits,)),
        ToolPaused(at=2.0, call_id="t1.0", pending=(asks,), state='{"a": [1, null]}'),
        InputGiven(at=2.0, call_id="t1.0", by="ann", answers={"who": {"a": 1, "b": [HOSTILE]}, "pay": None}),
        ApprovalAsked(at=2.0, call_id="t1.0", expires_at=9.5, description=HOSTILE, digest="d"),
        ApprovalGiven(at=2.0, call_id="t1.0", by="ann", arguments='{"a":1}'),
        ToolsReturned(at=2.0),
        Judged(at=2.0, verdict=Verdict(action=Action.REPLAN, scores=(Score(criterion="x", score=2),), note=HOSTILE)),
        Continued(at=2.0, note=HOSTILE, loop=True, disabled=("n",), refused=True, is_last=True, asks=HOSTILE),
        Accepted(at=2.0),
        Paused(at=2.0, by="ann", message=HOSTILE),
        Resumed(at=2.0, fingerprint=Fingerprint(instructions="i", model="m", tools={"n": "h"}), changes=(HOSTILE,)),
        Failed(at=2.0, reason=StopReason.CANCELLED, message=HOSTILE),
    )


def at_version(run: Run, version: int) -> Run:
    """Return the run as if it were at another version, for events that make no run."""
    return attrs.evolve(run, version=version)


async def refused(commit: Commit, kind: type[StoreError]) -> None:
    """Check that the append is refused, by its wait."""
    with pytest.raises(kind):
        await commit.wait()


@pytest.mark.anyio
class StoreConformance:
    """What a store promises. Override `store` with a fixture that yields a new and empty one."""

    @pytest.fixture
    async def store(self) -> Store:
        """Return the store to check."""
        raise NotImplementedError("override the fixture `store` with one that yields your store, new and empty")

    @pytest.fixture
    async def other(self) -> Store:
        """Return a second store object on the data of the first, as another process would have it."""
        pytest.skip("this store has one object for its data; else override the fixture `other`")

    # The clock.

    async def test_the_clock_tells_the_date(self, store: Store) -> None:
        """Dates are seconds since 1970, and those of a server are about those of this machine."""
        assert abs(await store.now() - time.time()) < 86_400

    async def test_the_clock_moves_on(self, store: Store) -> None:
        """Time passes, and does not go back."""
        first = now = await store.now()
        with anyio.fail_after(10):
            while now == first:
                now = await store.now()
        assert now > first

    # Create.

    async def test_a_new_run_is_at_version_0(self, store: Store) -> None:
        """A run that is created has a header and no events."""
        stored, lease = await store.create(header())
        assert (stored, lease.run_id, lease.version) == (header(), "r1", 0)
        assert (await store.read("r1")).events == ()

    async def test_a_header_comes_back_as_it_was(self, store: Store) -> None:
        """Every field of the header is kept, awkward text included."""
        call = ToolCall(id="t1.0", name="n", arguments="{}", key="k")
        result = ToolResult(call_id="t1.0", tool="n", outcome=Outcome.DONE, content="x")
        whole = Header(
            id="r1",
            prompt=(TextPart(text=HOSTILE), ImagePart(url="data:image/png;base64,AA==")),
            created_at=1_800_000_000.25,
            session="s1",
            after="r0",
            history=(
                SystemMessage(text="note"),
                UserMessage(parts=(TextPart(text="hi"),)),
                AssistantMessage(calls=(call,)),
                result,
            ),
            agent="sorter",
            agent_version="2",
            fingerprint=Fingerprint(instructions="i", model="m", tools={"n": "h"}),
            target="module:agent",
            user="ann",
            roles=("admin", "ops"),
            parent="r0",
            depth=1,
            forked_from="r0",
            forked_at=3,
            metadata={"ticket": 7, "deep": {"list": [1, None, True, "x"]}},
        )
        stored, _lease = await store.create(whole)
        assert stored == whole
        assert (await store.read("r1")).header == whole

    async def test_the_same_id_and_prompt_is_the_same_run(self, store: Store) -> None:
        """A request that arrives twice does not start two runs: the second finds the first."""
        await finished(store)
        stored, lease = await store.create(header(created_at=1_900_000_000.0))
        assert stored == header()
        assert lease.version == 2

    async def test_the_same_id_with_another_prompt_is_refused(self, store: Store) -> None:
        """An id stands for one prompt, and the run that has it is not touched."""
        await finished(store)
        with pytest.raises(ConflictError, match="another prompt"):
            await store.create(header(prompt="Burn the notes"))
        assert (await store.read("r1")).header == header()

    async def test_a_driven_run_cannot_be_created_again(self, store: Store) -> None:
        """The same request at the same time is refused while the first is at work."""
        driver = await Driver.of(store)
        with pytest.raises(LeaseHeldError):
            await store.create(header())
        assert not driver.lease.lost

    async def test_of_many_that_create_one_id_one_wins(self, store: Store) -> None:
        """However many race for one id, one drives it."""
        leases: list[Lease] = []

        async def race() -> None:
            try:
                leases.append((await store.create(header()))[1])
            except LeaseHeldError:
                return

        async with anyio.create_task_group() as group:
            for _ in range(30):
                group.start_soon(race)
        assert len(leases) == 1

    async def test_a_journal_may_begin_with_events(self, store: Store) -> None:
        """A run may be created with its first events: they are read, they count in the list, and appends go on."""
        first = Observed(at=1.0)
        events = (first, *turn_of(begin(header()).apply(first)))
        head, lease = await store.create(header(), events=events)
        assert (lease.version, (await store.read("r1")).events) == (6, events)
        (line,) = await store.runs()
        assert (line.state, line.turn, line.version, line.tokens, line.updated_at) == (State.THINK, 1, 6, 7, 7.0)
        assert await Driver(store, lease, begin(head).fold(events)).append(DONE).wait()
        assert (await store.read("r1")).events == (*events, DONE)

    async def test_a_journal_begins_once(self, store: Store) -> None:
        """The same id again finds the run as it is: what it was to begin with is not written twice."""
        _head, lease = await store.create(header(), events=(Observed(at=1.0),))
        await store.release(lease).wait()
        _head, lease = await store.create(header(), events=(Observed(at=2.0), DONE))
        assert (lease.version, (await store.read("r1")).events) == (1, (Observed(at=1.0),))

    async def test_a_run_may_begin_with_its_end(self, store: Store) -> None:
        """A copy of a whole run is over: it takes no posts, and its session goes on from it."""
        _head, lease = await store.create(header(session="s"), events=(Observed(), DONE))
        await store.release(lease).wait()
        assert [(line.state, line.stop_reason) for line in await store.runs()] == [(State.DONE, StopReason.COMPLETED)]
        with pytest.raises(ConflictError, match="over"):
            await store.post("r1", "k", words("x"))
        stored, _lease = await store.create(header("r2", session="s"))
        assert stored.after == "r1"

    async def test_a_journal_may_begin_with_many_events(self, store: Store) -> None:
        """Five hundred events are one beginning."""
        events: tuple[Event, ...] = (Observed(at=1.0),)
        run = begin(header()).fold(events)
        for _ in range(100):
            more = turn_of(run)
            run = run.fold(more)
            events = (*events, *more)
        _head, lease = await store.create(header(), events=events)
        assert (lease.version, (await store.read("r1")).events) == (501, events)

    # Durability.

    async def test_a_lease_says_what_its_appends_survive(self, store: Store) -> None:
        """Whoever takes a lease chooses: "full" or "normal", and "full" where nothing was said."""
        choices: tuple[Durability, ...] = ("full", "normal")
        for number, durability in enumerate(choices):
            _head, lease = await store.create(header(f"r{number}"), durability=durability)
            assert lease.durability == durability
            run = begin(header(f"r{number}")).apply(Observed())
            assert await store.append(lease, run, (Observed(),)).wait()
            await store.release(lease).wait()
            lease = await store.lease(f"r{number}", durability=durability)
            assert lease.durability == durability
            await store.release(lease).wait()
        assert (await store.create(header()))[1].durability == "full"
        assert (await store.lease("r0")).durability == "full"

    async def test_another_durability_is_refused(self, store: Store) -> None:
        """Any other word is a slip of the pen, and neither creates a run nor takes a lease."""
        await finished(store)
        with pytest.raises(MisuseError):
            await store.create(header("r2"), durability="ful")  # type: ignore[arg-type]
        with pytest.raises(MisuseError):
            await store.lease("r1", durability="FULL")  # type: ignore[arg-type]
        assert ids(await store.runs()) == ["r1"]
        assert await store.lease("r1")

    # Leases.

    async def test_a_run_that_nobody_created_cannot_be_leased(self, store: Store) -> None:
        """There is no lease of an unknown run."""
        with pytest.raises(RunNotFoundError, match="nowhere"):
            await store.lease("nowhere")

    async def test_a_lease_is_exclusive(self, store: Store) -> None:
        """While one drives nobody else can, and the error says which run."""
        driver = await Driver.of(store)
        with pytest.raises(LeaseHeldError, match="r1"):
            await store.lease("r1")
        assert await driver.append(Observed()).wait()

    async def test_a_lease_given_back_can_be_taken(self, store: Store) -> None:
        """The next owner starts at the version that the last one left."""
        driver = await Driver.of(store)
        await driver.append(Observed()).wait()
        await driver.release()
        assert (await store.lease("r1")).version == 1

    async def test_the_fencing_token_grows(self, store: Store) -> None:
        """Each owner has a higher token than the one before it."""
        tokens = []
        for _ in range(3):
            _head, lease = await store.create(header())
            tokens.append(lease.token)
            await store.release(lease).wait()
        assert tokens == sorted(set(tokens))

    async def test_of_many_that_want_the_lease_one_gets_it(self, store: Store) -> None:
        """However many race for the lease, one holds it."""
        await finished(store)
        leases: list[Lease] = []

        async def race() -> None:
            try:
                leases.append(await store.lease("r1"))
            except LeaseHeldError:
                return

        async with anyio.create_task_group() as group:
            for _ in range(30):
                group.start_soon(race)
        assert len(leases) == 1

    async def test_of_many_one_drives_at_a_time(self, store: Store) -> None:
        """Tasks that all want a run get it in turn: each finds what the one before it left, and nobody cuts in."""
        await finished(store, header("r0"))
        await (await Driver.of(store)).release()

        async def drive() -> None:
            while True:
                try:
                    lease = await store.lease("r1")
                    break
                except LeaseHeldError:
                    await anyio.lowlevel.checkpoint()
            run = at_version(begin(header()), lease.version)
            for _ in range(2):
                run = at_version(run, run.version + 1)
                assert await store.append(lease, run, (Observed(at=float(lease.token)),)).wait()
                await anyio.lowlevel.checkpoint()
            await store.release(lease).wait()

        async with anyio.create_task_group() as group:
            for _ in range(20):
                group.start_soon(drive)
        events = (await store.read("r1")).events
        drives = [(token, len(list(group))) for token, group in groupby(events, key=lambda event: event.at)]
        assert [count for _token, count in drives] == [2] * 20
        assert drives == sorted(drives)

    async def test_an_orderly_owner_is_no_crash(self, store: Store) -> None:
        """Who gives a run back has not crashed, nor has it who created it."""
        _head, lease = await store.create(header())
        assert lease.crashes == 0
        for _ in range(2):
            await store.release(lease).wait()
            lease = await store.lease("r1")
            assert lease.crashes == 0
        await store.release(lease).wait()
        assert (await store.create(header()))[1].crashes == 0

    async def test_a_lease_can_be_given_back_twice(self, store: Store) -> None:
        """Giving back what is not held is harmless."""
        driver = await Driver.of(store)
        await driver.release()
        await driver.release()
        await store.lease("r1")

    async def test_a_late_release_leaves_the_new_owner_alone(self, store: Store) -> None:
        """Only the owner's own release ends its lease."""
        late = await Driver.of(store)
        await late.release()
        now = await Driver.again(store)
        await late.release()
        with pytest.raises(LeaseHeldError):
            await store.lease("r1")
        assert await now.append(Observed()).wait()

    async def test_a_lease_that_was_dropped_is_free(self, store: Store) -> None:
        """An owner that was thrown away without a release does not block its own process."""
        driver = await Driver.of(store)
        await driver.append(Observed()).wait()
        del driver
        gc.collect()
        assert (await store.lease("r1")).version == 1

    # Appends.

    async def test_events_are_read_in_order(self, store: Store) -> None:
        """What was appended is what is read."""
        driver = await Driver.of(store)
        events = (Observed(at=1.0), *driver.turn())
        for event in events:
            assert await driver.append(event).wait()
        assert (await store.read("r1")).events == events

    async def test_one_append_takes_several_events(self, store: Store) -> None:
        """Events appended together are versions of their own."""
        driver = await Driver.of(store)
        events = (Observed(), *driver.turn())
        assert await driver.append(*events).wait()
        assert (await store.read("r1")).events == events
        await driver.release()
        assert (await store.lease("r1")).version == 6

    async def test_every_event_comes_back_as_it_was(self, store: Store) -> None:
        """No field of any event is lost, awkward text included."""
        events = every_event()
        assert {type(event) for event in events} == set(EVENTS)
        driver = await Driver.of(store)
        assert await store.append(driver.lease, at_version(driver.run, len(events)), events).wait()
        assert (await store.read("r1")).events == events

    async def test_appends_that_nobody_waits_for_are_written_in_order(self, store: Store) -> None:
        """An append may be left to itself: the last one's wait covers all before it."""
        driver = await Driver.of(store)
        events = [Observed(at=1.0)]
        driver.append(*events)
        for _ in range(20):
            for event in driver.turn():
                driver.append(event)
                events.append(event)  # type: ignore[arg-type]
        assert await driver.append(DONE).wait()
        assert (await store.read("r1")).events == (*events, DONE)

    async def test_a_read_sees_an_append_before_it(self, store: Store) -> None:
        """A read that is asked for after an append sees it, waited for or not."""
        driver = await Driver.of(store)
        driver.append(Observed())
        assert len((await store.read("r1")).events) == 1

    async def test_a_commit_can_be_waited_for_again(self, store: Store) -> None:
        """Every wait gives the same answer, by whomever and whenever."""
        driver = await Driver.of(store)
        commit = driver.append(Observed())
        answers = []

        async def wait() -> None:
            answers.append(await commit.wait())

        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            group.start_soon(wait)
        assert [*answers, await commit.wait(), commit.is_settled] == [True, True, True, True]

    async def test_a_cancelled_wait_does_not_undo_the_append(self, store: Store) -> None:
        """Who stops waiting does not take back what was asked for."""
        driver = await Driver.of(store)
        commit = driver.append(Observed())
        with anyio.CancelScope() as scope:
            scope.cancel()
            await commit.wait()
        assert await commit.wait()
        assert len((await store.read("r1")).events) == 1

    async def test_a_wrong_version_is_refused(self, store: Store) -> None:
        """An append that does not follow on what is stored writes nothing."""
        driver = await Driver.of(store)
        await driver.append(Observed()).wait()
        stale = begin(header()).apply(Observed(at=9.0))
        await refused(store.append(driver.lease, stale, (Observed(at=9.0),)), ConflictError)
        ahead = at_version(driver.run, 7)
        await refused(store.append(driver.lease, ahead, (DONE,)), ConflictError)
        assert (await store.read("r1")).events == (Observed(),)

    async def test_after_a_refusal_there_is_no_gap(self, store: Store) -> None:
        """When an append is refused, so are those that were queued behind it."""
        driver = await Driver.of(store)
        commits = [store.append(driver.lease, at_version(driver.run, n), (Observed(),)) for n in (2, 3, 4)]
        for commit in commits:
            await refused(commit, ConflictError)
        assert (await store.read("r1")).events == ()

    async def test_a_late_owner_writes_nothing(self, store: Store) -> None:
        """An owner that was replaced is told so at its next append, and the new owner does not notice."""
        late = await Driver.of(store)
        await late.release()
        now = await Driver.again(store)
        await refused(late.append(Observed(at=9.0)), LeaseLostError)
        assert await now.append(Observed(at=1.0)).wait()
        assert (await store.read("r1")).events == (Observed(at=1.0),)

    async def test_a_stalled_owner_writes_nothing(self, store: Store) -> None:
        """An owner of long ago is refused, also when the run is free again and at the version that it knows."""
        late = await Driver.of(store)
        await late.release()
        for _ in range(2):
            await (await Driver.again(store)).release()
        await refused(late.append(Observed()), LeaseLostError)
        assert (await store.read("r1")).events == ()

    async def test_a_lease_that_was_given_back_writes_nothing(self, store: Store) -> None:
        """The right to append ends with the release, though nobody has taken the run since."""
        driver = await Driver.of(store)
        await driver.release()
        await refused(driver.append(Observed()), LeaseLostError)
        assert (await store.read("r1")).events == ()

    async def test_a_late_owner_takes_nothing(self, store: Store) -> None:
        """A refused append strikes no inbox rows either."""
        late = await Driver.of(store)
        row = await store.post("r1", "k", words("x"))
        await late.release()
        _now = await Driver.again(store)
        await refused(late.append(Observed(), taken=[row.number]), LeaseLostError)
        assert await store.inbox("r1") == (row,)

    async def test_errors_come_from_the_wait(self, store: Store) -> None:
        """Append itself returns at once, whatever becomes of it."""
        driver = await Driver.of(store)
        commit = store.append(driver.lease, at_version(driver.run, 5), (Observed(),))
        await refused(commit, ConflictError)
        await refused(commit, ConflictError)

    async def test_a_refused_append_leaves_its_neighbours_alone(self, store: Store) -> None:
        """Appends of other runs that are written together with a refused one are written."""
        drivers = [await Driver.of(store, header(f"r{n}")) for n in range(10)]
        bad = store.append(drivers[0].lease, at_version(drivers[0].run, 9), (Observed(),))
        good = [driver.append(Observed()) for driver in drivers[1:]]
        await refused(bad, ConflictError)
        assert [await commit.wait() for commit in good] == [True] * 9

    async def test_runs_do_not_mix(self, store: Store) -> None:
        """Many runs at once keep their own events in their own order."""

        async def drive(number: int) -> None:
            driver = await Driver.of(store, header(f"r{number}"))
            await driver.append(Observed(at=float(number))).wait()
            for _ in range(3):
                for event in driver.turn():
                    driver.append(event)
            await driver.append(DONE, final=True).wait()
            await driver.release()

        async with anyio.create_task_group() as group:
            for number in range(40):
                group.start_soon(drive, number)
        for number in range(40):
            stored = await store.read(f"r{number}")
            run = begin(stored.header).fold(stored.events)
            assert (run.state, run.turn, stored.events[0].at) == (State.DONE, 4, float(number))

    async def test_a_read_can_start_in_the_middle(self, store: Store) -> None:
        """Only the events after a version are read, with the header."""
        driver = await Driver.of(store)
        events = (Observed(), *driver.turn())
        await driver.append(*events).wait()
        for after in range(len(events) + 1):
            stored = await store.read("r1", after)
            assert (stored.header, stored.events) == (header(), events[after:])
        assert (await store.read("r1", 99)).events == ()

    async def test_a_long_journal_is_read_whole(self, store: Store) -> None:
        """A thousand events in one append are a thousand versions."""
        driver = await Driver.of(store)
        events = tuple([Observed(at=float(n)) for n in range(1000)])
        await store.append(driver.lease, at_version(driver.run, 1000), events).wait()
        assert (await store.read("r1")).events == events

    async def test_a_large_record_comes_back_whole(self, store: Store) -> None:
        """A record of five megabytes is a record like others."""
        driver = await Driver.of(store)
        text = "wörd " * 850_000
        await driver.append(Observed(), AnswerGiven(message=AssistantMessage(text=text))).wait()
        answer = (await store.read("r1")).events[1]
        assert isinstance(answer, AnswerGiven)
        assert answer.message.text == text

    async def test_lone_surrogates_do_no_harm(self, store: Store) -> None:
        """Text that is no text (half a UTF-16 pair) is stored, at worst with a replacement."""
        driver = await Driver.of(store, header(prompt="half \ud83d pair", metadata={"k\udc00": "v\udc00"}))
        await store.post("r1", "k", words("x\udfff"))
        await driver.append(Observed(), AnswerGiven(message=AssistantMessage(text="a\ud800b"))).wait()
        answer = (await store.read("r1")).events[1]
        assert isinstance(answer, AnswerGiven)
        assert answer.message.text[0] + answer.message.text[-1] == "ab"
        assert len(await store.runs()) == 1

    async def test_the_same_surrogates_are_the_same_prompt(self, store: Store) -> None:
        """A request with such text that arrives twice is still one run."""
        driver = await Driver.of(store, header(prompt="half \ud83d pair"))
        await driver.release()
        _head, lease = await store.create(header(prompt="half \ud83d pair"))
        assert lease.version == 0

    async def test_huge_numbers_do_no_harm(self, store: Store) -> None:
        """A model that claims to have used 10**30 tokens does not break the store."""
        driver = await Driver.of(store)
        await driver.append(
            Observed(), AnswerGiven(message=AssistantMessage(), usage=Usage(input_tokens=10**30))
        ).wait()
        (summary,) = await store.runs()
        assert summary.tokens >= 2**31

    # The inbox.

    async def test_a_post_waits_in_the_inbox(self, store: Store) -> None:
        """Rows are read oldest first, with the numbers that their posts returned."""
        await Driver.of(store)
        rows = [await store.post("r1", f"k{n}", words(str(n))) for n in range(5)]
        assert await store.inbox("r1") == tuple(rows)
        numbers = [row.number for row in rows]
        assert numbers == sorted(set(numbers))
        assert numbers[0] > 0

    async def test_every_item_comes_back_as_it_was(self, store: Store) -> None:
        """No field of any item is lost."""
        items: list[InboxItem] = [
            Input(kind=InputKind.WEBHOOK, parts=(TextPart(text=HOSTILE), ImagePart(url="https://example.org/x"))),
            Input(parts=(TextPart(text="later"),), priority=Priority.LOW, due_at=FAR + 0.25),
            Approve(call_id="t1.0", by="ann", arguments='{"a":1}', digest="d"),
            Reject(call_id="t1.0", by="ann", message=HOSTILE),
            Settle(call_id="t1.0", by="ann", outcome=Outcome.FAILED, content=HOSTILE),
            GiveInput(call_id="t1.0", by="ann", answers={"who": {"a": HOSTILE}, "pay": None}, digest="d"),
            Rerun(call_id="t1.0", by="ann"),
            Cancel(by="ann", message=HOSTILE),
            Pause(by="ann", message=HOSTILE),
            Wake(run_id="r1.t1.0"),
        ]
        await Driver.of(store)
        for number, item in enumerate(items):
            await store.post("r1", f"k{number}", item)
        assert [row.item for row in await store.inbox("r1")] == items

    async def test_the_first_post_of_a_key_wins(self, store: Store) -> None:
        """A second post of the kind is shown the winner, and adds nothing."""
        await Driver.of(store)
        first = await store.post("r1", "approval:t1.0", Approve(call_id="t1.0", by="ann"))
        second = await store.post("r1", "approval:t1.0", Approve(call_id="t1.0", by="bob"))
        assert second == first
        assert await store.inbox("r1") == (first,)

    async def test_the_opposite_decision_is_refused(self, store: Store) -> None:
        """A second post that says something else is an error that names the winner."""
        await Driver.of(store)
        await store.post("r1", "approval:t1.0", Approve(call_id="t1.0", by="ann"))
        with pytest.raises(ConflictError, match="ann"):
            await store.post("r1", "approval:t1.0", Reject(call_id="t1.0", by="bob"))

    async def test_a_decision_is_what_it_comes_down_to(self, store: Store) -> None:
        """Who says the same in other words agrees; another outcome, or other arguments, are another decision."""
        await Driver.of(store)
        sent = Settle(call_id="t1.0", by="ann", outcome=Outcome.DONE, content="sent")
        edited = Approve(call_id="t1.1", by="ann", arguments='{"a":1}')
        first = {"k0": await store.post("r1", "k0", sent), "k1": await store.post("r1", "k1", edited)}
        assert await store.post("r1", "k0", attrs.evolve(sent, by="bob")) == first["k0"]
        assert await store.post("r1", "k1", attrs.evolve(edited, by="bob")) == first["k1"]
        others: tuple[tuple[str, InboxItem], ...] = (
            ("k0", attrs.evolve(sent, outcome=Outcome.FAILED)),
            ("k0", attrs.evolve(sent, content="lost")),
            ("k0", Rerun(call_id="t1.0")),
            ("k1", attrs.evolve(edited, arguments=None)),
        )
        for key, item in others:
            with pytest.raises(ConflictError, match="ann"):
                await store.post("r1", key, item)
        assert await store.inbox("r1") == tuple(first.values())

    async def test_of_many_posts_of_a_key_one_wins(self, store: Store) -> None:
        """However many race for a key, all are shown the same winner."""
        await Driver.of(store)
        winners = []

        async def race(number: int) -> None:
            winners.append(await store.post("r1", "k", words(str(number))))

        async with anyio.create_task_group() as group:
            for number in range(30):
                group.start_soon(race, number)
        assert len(winners) == 30
        assert winners == [winners[0]] * 30

    async def test_keys_are_of_one_run(self, store: Store) -> None:
        """The same key in another run is another key."""
        await Driver.of(store, header("r1"))
        await Driver.of(store, header("r2"))
        await store.post("r1", "k", words("one"))
        await store.post("r2", "k", words("two"))
        assert [row.item for row in await store.inbox("r2")] == [words("two")]

    async def test_awkward_keys_are_keys(self, store: Store) -> None:
        """Keys may hold any text."""
        await Driver.of(store)
        row = await store.post("r1", HOSTILE, words("x"))
        assert (row.key, await store.inbox("r1")) == (HOSTILE, (row,))

    async def test_taken_rows_are_struck(self, store: Store) -> None:
        """An append strikes the rows that its events took in, and no others."""
        driver = await Driver.of(store)
        rows = [await store.post("r1", f"k{n}", words(str(n))) for n in range(4)]
        await driver.append(Observed(), taken=[rows[0].number, rows[2].number]).wait()
        assert await store.inbox("r1") == (rows[1], rows[3])

    async def test_a_key_stays_taken(self, store: Store) -> None:
        """A post that arrives again after it was taken in is not taken in twice."""
        driver = await Driver.of(store)
        row = await store.post("r1", "k", words("x"))
        await driver.append(Observed(), taken=[row.number]).wait()
        assert await store.post("r1", "k", words("x")) == row
        assert await store.inbox("r1") == ()

    async def test_numbers_grow_after_rows_were_taken(self, store: Store) -> None:
        """No number is given twice, taken or not."""
        driver = await Driver.of(store)
        first = await store.post("r1", "k1", words("x"))
        await driver.append(Observed(), taken=[first.number]).wait()
        assert (await store.post("r1", "k2", words("y"))).number > first.number

    async def test_unknown_runs_are_said_to_be_unknown(self, store: Store) -> None:
        """No operation invents a run."""
        for operation in (
            store.post("nowhere", "k", words("x")),
            store.inbox("nowhere"),
            store.read("nowhere"),
            store.delete("nowhere"),
        ):
            with pytest.raises(RunNotFoundError, match="nowhere"):
                await operation
        assert await store.runs() == ()

    async def test_a_finished_run_takes_no_posts(self, store: Store) -> None:
        """Input for a run that is over is refused, whether it is done or failed."""
        await finished(store)
        with pytest.raises(ConflictError, match="over"):
            await store.post("r1", "k", words("x"))
        failed = await Driver.of(store, header("r2"))
        await failed.append(Failed(reason=StopReason.CANCELLED, message="")).wait()
        with pytest.raises(ConflictError, match="cancelled"):
            await store.post("r2", "k", words("x"))

    async def test_a_finished_run_still_shows_winners(self, store: Store) -> None:
        """Who decided is shown also when the run is over: a late click is not an error."""
        driver = await Driver.of(store)
        row = await store.post("r1", "k", Approve(call_id="t1.0", by="ann"))
        await driver.append(Observed(), DONE, taken=[row.number]).wait()
        assert await store.post("r1", "k", Approve(call_id="t1.0", by="bob")) == row

    async def test_a_run_does_not_end_over_its_inbox(self, store: Store) -> None:
        """A final append to an inbox that holds something writes nothing, and says so."""
        driver = await Driver.of(store)
        await driver.append(Observed()).wait()
        row = await store.post("r1", "k", words("wait!"))
        before = driver.run
        assert await driver.append(DONE, final=True).wait() is False
        assert ((await store.read("r1")).events, await store.inbox("r1")) == ((Observed(),), (row,))
        driver.run = before
        drafted = AnswerDrafted(message=AssistantMessage(text="done"))
        assert await driver.append(drafted, taken=[row.number]).wait()

    async def test_a_final_append_may_take_what_is_left(self, store: Store) -> None:
        """What the append itself takes does not stand in its way; anything else does."""
        driver = await Driver.of(store)
        rows = [await store.post("r1", f"k{n}", words(str(n))) for n in range(2)]
        before = driver.run
        assert await driver.append(Observed(), DONE, taken=[rows[0].number], final=True).wait() is False
        assert len(await store.inbox("r1")) == 2
        driver.run = before
        taken = [row.number for row in rows]
        assert await driver.append(Observed(), DONE, taken=taken, final=True).wait() is True

    async def test_an_empty_inbox_lets_a_run_end(self, store: Store) -> None:
        """A final append to an empty inbox is written; rows that were taken before do not count."""
        driver = await Driver.of(store)
        row = await store.post("r1", "k", words("x"))
        await driver.append(Observed(), taken=[row.number]).wait()
        assert await driver.append(DONE, final=True).wait() is True

    async def test_input_at_the_last_moment_is_not_lost(self, store: Store) -> None:
        """Of a post and the end of the run that race, one is refused: no post is accepted and never read."""
        for number in range(20):
            driver = await Driver.of(store, header(f"r{number}"))
            await driver.append(Observed()).wait()
            posted, ended = await self._raced(driver, post_first=bool(number % 2))
            assert posted is not ended

    async def _raced(self, driver: Driver, *, post_first: bool) -> tuple[bool, bool]:
        outcome = {}

        async def post() -> None:
            try:
                await driver.store.post(driver.run.id, "k", words("x"))
            except ConflictError:
                outcome["posted"] = False
            else:
                outcome["posted"] = True

        async def end() -> None:
            outcome["ended"] = await driver.append(DONE, final=True).wait()

        async with anyio.create_task_group() as group:
            for racer in (post, end) if post_first else (end, post):
                group.start_soon(racer)
        return outcome["posted"], outcome["ended"]

    # Time and the inbox.

    async def test_a_post_that_comes_too_late_is_refused(self, store: Store) -> None:
        """A decision after its time is none: it is refused, is not in the inbox, and does not take the key."""
        await Driver.of(store)
        now = await store.now()
        with pytest.raises(ConflictError, match="time"):
            await store.post("r1", "k", Approve(call_id="t1.0", by="ann"), before=now - 1.0)
        assert await store.inbox("r1") == ()
        row = await store.post("r1", "k", Reject(call_id="t1.0", by="bob"))
        assert await store.inbox("r1") == (row,)

    async def test_a_post_in_time_is_accepted(self, store: Store) -> None:
        """As long as the moment has not come, it is in time."""
        await Driver.of(store)
        row = await store.post("r1", "k", Approve(call_id="t1.0"), before=await store.now() + 3600.0)
        assert await store.inbox("r1") == (row,)

    async def test_who_comes_too_late_is_shown_the_winner(self, store: Store) -> None:
        """What was decided in time is shown also when the time is up: a second click is not an error."""
        await Driver.of(store)
        row = await store.post("r1", "k", Approve(call_id="t1.0", by="ann"))
        assert await store.post("r1", "k", Approve(call_id="t1.0", by="bob"), before=1.0) == row
        with pytest.raises(ConflictError, match="ann"):
            await store.post("r1", "k", Reject(call_id="t1.0", by="bob"), before=1.0)

    async def test_a_timer_does_not_hold_up_the_end(self, store: Store) -> None:
        """A row that is not due yet is in the inbox, its number is told, and a final append is written over it."""
        driver = await Driver.of(store)
        row = await store.post("r1", "k", words("later", FAR))
        assert (await store.inbox("r1"), driver.lease.newest) == ((row,), row.number)
        assert await driver.append(Observed(), DONE, final=True).wait() is True

    async def test_a_timer_that_is_due_holds_up_the_end(self, store: Store) -> None:
        """A row whose time has come is a row like others, whatever waits beside it, until it is taken."""
        driver = await Driver.of(store)
        for number in range(3):
            await store.post("r1", f"later{number}", words("later", FAR))
        row = await store.post("r1", "k", words("now", await store.now() - 1.0))
        before = driver.run
        assert await driver.append(Observed(), DONE, final=True).wait() is False
        driver.run = before
        assert await driver.append(Observed(), DONE, taken=[row.number], final=True).wait() is True

    async def test_a_timer_may_be_taken_before_its_time(self, store: Store) -> None:
        """What an append takes it takes, and that does not count for what is left."""
        driver = await Driver.of(store)
        later = await store.post("r1", "later", words("later", FAR))
        row = await store.post("r1", "k", words("now"))
        before = driver.run
        assert await driver.append(Observed(), DONE, taken=[later.number], final=True).wait() is False
        driver.run = before
        assert await driver.append(Observed(), taken=[later.number]).wait()
        assert await store.inbox("r1") == (row,)

    # What a lease is told.

    async def test_a_lease_is_told_of_posts(self, store: Store) -> None:
        """The owner learns the newest number without asking."""
        driver = await Driver.of(store)
        row = await store.post("r1", "k", words("x"))
        assert driver.lease.newest == row.number
        assert not driver.lease.cancelled

    async def test_a_lease_knows_what_was_posted_before(self, store: Store) -> None:
        """Posts to a run that nobody drives are known to its next owner."""
        driver = await Driver.of(store)
        await driver.release()
        row = await store.post("r1", "k", words("x"))
        await store.post("r1", "cancel", Cancel())
        lease = await store.lease("r1")
        assert lease.newest > row.number
        assert lease.cancelled

    async def test_cancel_reaches_the_owner(self, store: Store) -> None:
        """A request to stop marks the lease, and wakes who drives."""
        driver = await Driver.of(store)
        woken = anyio.Event()
        driver.lease.wake = waker(woken.set)
        await store.post("r1", "cancel", Cancel(by="ann"))
        with anyio.fail_after(10):
            await woken.wait()
        assert driver.lease.cancelled

    async def test_input_wakes_nobody(self, store: Store) -> None:
        """Input is for the next look at the inbox; it interrupts nothing."""
        driver = await Driver.of(store)
        woken: list[bool] = []
        driver.lease.wake = lambda: woken.append(True)
        await store.post("r1", "k", words("x"))
        await driver.append(Observed()).wait()
        assert woken == []

    async def test_a_new_run_has_nothing_to_tell(self, store: Store) -> None:
        """A fresh lease knows of no posts and no cancel."""
        driver = await Driver.of(store)
        assert (driver.lease.newest, driver.lease.cancelled, driver.lease.lost) == (0, False, False)

    # Lists.

    async def test_an_empty_store_lists_nothing(self, store: Store) -> None:
        """There is nothing before the first run."""
        assert await store.runs() == ()

    async def test_the_list_is_newest_first(self, store: Store) -> None:
        """Runs are listed by the time of their creation; of equal times the one created last comes first."""
        for run_id, at in (("a", 5.0), ("b", 9.0), ("c", 7.0), ("d", 7.0)):
            await Driver.of(store, header(run_id, created_at=at))
        assert [summary.id for summary in await store.runs()] == ["b", "d", "c", "a"]

    async def test_the_list_can_be_cut(self, store: Store) -> None:
        """At most as many as asked for, the newest."""
        for number in range(5):
            await Driver.of(store, header(f"r{number}", created_at=float(number)))
        assert [summary.id for summary in await store.runs(limit=2)] == ["r4", "r3"]
        assert await store.runs(limit=0) == ()

    async def test_the_list_of_a_session(self, store: Store) -> None:
        """Only the session's runs, newest first."""
        for number in range(4):
            await finished(store, header(f"r{number}", created_at=float(number), session="ab"[number % 2]))
        await finished(store, header("r9"))
        assert [summary.id for summary in await store.runs(Filter(session="a"))] == ["r2", "r0"]
        assert await store.runs(Filter(session="nowhere")) == ()

    async def test_a_line_of_the_list_says_how_the_run_is(self, store: Store) -> None:
        """State, turn, version, tokens and times are those of the newest event; the prompt is cut."""
        driver = await Driver.of(store, header(prompt="p" * 500, agent="sorter", session="s"))
        await driver.append(Observed(at=3.0), *driver.turn()).wait()
        (line,) = await store.runs()
        assert (line.id, line.agent, line.session, line.prompt) == ("r1", "sorter", "s", "p" * 200)
        assert (line.state, line.stop_reason, line.waiting, line.driven) == (State.THINK, None, False, True)
        assert (line.turn, line.version, line.tokens) == (1, 6, 7)
        assert (line.created_at, line.updated_at) == (1_800_000_000.0, 7.0)
        await driver.append(attrs.evolve(DONE, at=8.0)).wait()
        await driver.release()
        (line,) = await store.runs()
        assert (line.state, line.stop_reason, line.driven) == (State.DONE, StopReason.COMPLETED, False)
        assert (line.turn, line.version, line.tokens, line.updated_at) == (2, 7, 17, 8.0)

    async def test_the_list_shows_who_waits(self, store: Store) -> None:
        """A run that needs a person is marked, until the person has decided."""
        driver = await Driver.of(store)
        chosen, *_rest = driver.turn()
        await driver.append(Observed(), chosen, ApprovalAsked(call_id="t1.0", expires_at=9.0)).wait()
        assert [summary.waiting for summary in await store.runs()] == [True]
        await driver.append(ApprovalGiven(call_id="t1.0")).wait()
        assert [summary.waiting for summary in await store.runs()] == [False]

    async def test_a_line_of_the_list_says_whose_the_run_is(self, store: Store) -> None:
        """User and caller are in the line, or None."""
        await finished(store, header("r1", user="ann", parent="r0"))
        await finished(store, header("r2"))
        lines = {line.id: line for line in await store.runs()}
        assert (lines["r1"].user, lines["r1"].parent) == ("ann", "r0")
        assert (lines["r2"].user, lines["r2"].parent, lines["r2"].session) == (None, None, None)

    async def test_a_list_can_be_of_one_kind(self, store: Store) -> None:
        """Each field of a filter lets those through that have its value, and None lets all through."""
        await finished(store, header("done", created_at=5.0, agent="a", session="s"))
        await rests(store, header("waits", created_at=4.0, agent="a", user="ann"))
        await (await Driver.of(store, header("fresh", created_at=3.0, agent="b", user="ann"))).release()
        await finished(store, header("below", created_at=2.0, agent="b", user="bob", parent="waits"))
        for where, expected in (
            (Filter(), ["done", "waits", "fresh", "below"]),
            (Filter(session="s"), ["done"]),
            (Filter(agent="a"), ["done", "waits"]),
            (Filter(user="ann"), ["waits", "fresh"]),
            (Filter(state=State.DONE), ["done", "below"]),
            (Filter(state=State.ACT), ["waits"]),
            (Filter(state=State.ERROR), []),
            (Filter(waiting=True), ["waits"]),
            (Filter(waiting=False), ["done", "fresh", "below"]),
            (Filter(parent="waits"), ["below"]),
            (Filter(before=4.0), ["fresh", "below"]),
            (Filter(user="' OR 1=1 --"), []),
        ):
            assert ids(await store.runs(where)) == expected, where

    async def test_a_filter_wants_all_that_it_says(self, store: Store) -> None:
        """Of several fields each has to fit; the limit counts those that do."""
        for number in range(8):
            head = header(f"r{number}", created_at=float(number), agent="ab"[number % 2], user="xy"[number // 4])
            await finished(store, head)
        assert ids(await store.runs(Filter(agent="a", user="x"))) == ["r2", "r0"]
        assert ids(await store.runs(Filter(agent="b", user="y", before=7.0, state=State.DONE))) == ["r5"]
        assert ids(await store.runs(Filter(agent="a", user="x", waiting=True))) == []
        assert ids(await store.runs(Filter(agent="a"), limit=3)) == ["r6", "r4", "r2"]

    async def test_a_thousand_runs_can_be_listed(self, store: Store) -> None:
        """All at once, or page by page: the next page begins where the last line ended, with no run twice or missed."""

        async def create(number: int) -> None:
            _head, lease = await store.create(header(f"r{number}", created_at=float(number)), durability="normal")
            await store.release(lease).wait()

        async with anyio.create_task_group() as group:
            for number in range(1000):
                group.start_soon(create, number)
        expected = [f"r{number}" for number in reversed(range(1000))]
        assert ids(await store.runs(limit=2000)) == expected
        paged, page = [], await store.runs()
        while page:
            assert len(page) == 100
            paged += ids(page)
            page = await store.runs(Filter(before=page[-1].created_at))
        assert paged == expected

    # What a worker can move on.

    async def test_a_run_that_nobody_drives_is_due(self, store: Store) -> None:
        """A run that was left in the middle is due, until somebody drives it."""
        driver = await Driver.of(store, header(agent="a"))
        await driver.append(Observed()).wait()
        assert await store.due("a") == ()
        await driver.release()
        assert await store.due("a") == ("r1",)
        driver = await Driver.again(store)
        assert await store.due("a") == ()

    async def test_what_is_over_is_not_due(self, store: Store) -> None:
        """Neither a run that is done nor one that failed."""
        await finished(store, header("r1", agent="a"))
        failed = await Driver.of(store, header("r2", agent="a"))
        await store.post("r2", "k", words("x"))
        await failed.append(Failed(reason=StopReason.CANCELLED, message="")).wait()
        await failed.release()
        assert await store.due("a") == ()

    async def test_what_other_agents_drive_is_not_due(self, store: Store) -> None:
        """A worker is told of its own agent's runs alone, of those without a name too."""
        for run_id, agent in (("r1", "a"), ("r2", "b"), ("r3", "")):
            await (await Driver.of(store, header(run_id, agent=agent))).release()
        assert (await store.due("a"), await store.due("")) == (("r1",), ("r3",))
        assert await store.due("nobody") == ()

    async def test_what_a_run_calls_is_not_due(self, store: Store) -> None:
        """A sub-agent's run is moved on by its caller."""
        await (await Driver.of(store, header("r1.t1.0", agent="a", parent="r1"))).release()
        assert await store.due("a") == ()

    async def test_a_run_that_waits_is_not_due(self, store: Store) -> None:
        """Nothing can be done for it before something comes."""
        await rests(store, header(agent="a"))
        assert await store.due("a") == ()

    async def test_news_make_a_waiting_run_due(self, store: Store) -> None:
        """A post that its last owner has not seen is news; other waiting runs are left alone."""
        await rests(store, header("r1", agent="a"))
        await rests(store, header("r2", agent="a"))
        await store.post("r2", "k", Approve(call_id="t1.0"))
        assert await store.due("a") == ("r2",)

    async def test_what_was_seen_is_no_news(self, store: Store) -> None:
        """A row that the last owner looked at and left makes nothing due again; one that came behind it does."""
        driver = await Driver.of(store, header(agent="a"))
        await driver.ask()
        row = await store.post("r1", "k1", words("x"))
        await driver.release(seen=row.number)
        assert await store.due("a") == ()
        await store.post("r1", "k2", words("y"))
        assert await store.due("a") == ("r1",)

    async def test_what_came_behind_the_last_look_is_news(self, store: Store) -> None:
        """A row that was posted while the run was driven, and that its owner did not see, makes it due at once."""
        driver = await Driver.of(store, header(agent="a"))
        await driver.ask()
        row = await store.post("r1", "k1", words("x"))
        await store.post("r1", "k2", Approve(call_id="t1.0"))
        await driver.release(seen=row.number)
        assert await store.due("a") == ("r1",)

    async def test_who_does_not_look_changes_nothing(self, store: Store) -> None:
        """An owner that gives the run back without a look at its inbox neither takes news nor makes them."""
        driver = await Driver.of(store, header("r1", agent="a"))
        await driver.ask()
        row = await store.post("r1", "k", words("x"))
        await driver.release(seen=row.number)
        await rests(store, header("r2", agent="a"))
        await store.post("r2", "k", words("x"))
        for run_id in ("r1", "r2"):
            await (await Driver.again(store, run_id)).release()
        assert await store.due("a") == ("r2",)

    async def test_what_was_taken_is_no_news(self, store: Store) -> None:
        """A row that was taken in has done its work."""
        driver = await Driver.of(store, header(agent="a"))
        row = await store.post("r1", "k", words("x"))
        chosen, *_rest = driver.turn()
        asked = ApprovalAsked(call_id="t1.0", expires_at=FAR)
        await driver.append(Observed(), chosen, asked, taken=[row.number]).wait()
        await driver.release()
        assert await store.due("a") == ()

    async def test_a_timer_is_news_when_it_is_due(self, store: Store) -> None:
        """A row that is not due yet makes nothing due; one whose time has come does."""
        for run_id in ("r1", "r2"):
            await rests(store, header(run_id, agent="a"))
        await store.post("r1", "k", words("later", FAR))
        await store.post("r2", "k", words("now", await store.now() - 1.0))
        assert await store.due("a") == ("r2",)

    async def test_a_timer_that_was_seen_before_its_time_is_news_then(self, store: Store) -> None:
        """Who looked before a timer was due has not seen what it will say."""
        run_id, at = await self._seen_too_early(store, delay_s=0.2)
        await until(store, at)
        assert run_id in await store.due("a")
        await (await Driver.again(store, run_id)).release()  # without a look: it is news as before
        assert run_id in await store.due("a")

    async def _seen_too_early(self, store: Store, delay_s: float) -> tuple[str, float]:
        driver = await Driver.of(store, header(f"after-{delay_s}", agent="a"))
        await driver.ask()
        at = await store.now() + delay_s
        row = await store.post(driver.run.id, "k", words("later", at))
        seen_at = await store.now()
        await driver.release(row.number, seen_at)
        if seen_at < at:
            return driver.run.id, at
        return await self._seen_too_early(store, delay_s * 10)  # the machine was too busy to be early

    async def test_a_timer_that_falls_due_behind_the_last_look_is_news(self, store: Store) -> None:
        """What counts is when the owner looked for timers, not when it gave the run back."""
        driver = await Driver.of(store, header(agent="a"))
        await driver.ask()
        seen_at = await store.now()
        row = await store.post("r1", "k", words("later", seen_at + 0.01))
        await until(store, seen_at + 0.01)
        await driver.release(row.number, seen_at)
        assert await store.due("a") == ("r1",)

    async def test_a_timer_that_was_seen_when_it_was_due_is_no_news(self, store: Store) -> None:
        """An owner that looked at it then and left it makes nothing due again."""
        driver = await Driver.of(store, header(agent="a"))
        await driver.ask()
        at = await store.now() - 1.0
        row = await store.post("r1", "k", words("now", at))
        await driver.release(row.number, at + 0.5)
        assert await store.due("a") == ()
        await (await Driver.again(store)).release()  # without a look: it is none as before
        assert await store.due("a") == ()

    async def test_an_expired_question_makes_a_run_due(self, store: Store) -> None:
        """No answer in time is an answer: somebody has to take it in."""
        now = await store.now()
        await rests(store, header("r1", agent="a"), expires_at=now - 1.0)
        await rests(store, header("r2", agent="a"), expires_at=now + 3600.0)
        assert await store.due("a") == ("r1",)

    async def test_the_first_of_several_expiries_makes_a_run_due(self, store: Store) -> None:
        """A run that waits for several things is due when the time of one of them is up."""
        driver = await Driver.of(store, header(agent="a"))
        calls = tuple([ToolCall(id=f"t1.{n}", name="look", arguments="{}", key=f"k{n}") for n in range(2)])
        await driver.append(
            Observed(),
            ToolsChosen(message=AssistantMessage(calls=calls)),
            ApprovalAsked(call_id="t1.0", expires_at=FAR),
            ApprovalAsked(call_id="t1.1", expires_at=await store.now() - 1.0),
        ).wait()
        await driver.release()
        assert await store.due("a") == ("r1",)

    async def test_a_paused_run_is_due_for_news_alone(self, store: Store) -> None:
        """A pause stops the clock of what the run waits for, too; what somebody posts is looked at."""
        driver = await Driver.of(store, header(agent="a"))
        await driver.ask(expires_at=await store.now() - 1.0)
        await driver.append(Paused(by="ann")).wait()
        await driver.release()
        assert [line.waiting for line in await store.runs()] == [True]
        assert await store.due("a") == ()
        await store.post("r1", "k", Cancel())
        assert await store.due("a") == ("r1",)

    async def test_a_run_that_was_paused_in_between_is_not_due(self, store: Store) -> None:
        """A pause may come in any state, and ends with a Resumed."""
        driver = await Driver.of(store, header(agent="a"))
        await driver.append(Observed(), Paused()).wait()
        await driver.release()
        assert await store.due("a") == ()
        driver = await Driver.again(store)
        await driver.append(Resumed()).wait()
        await driver.release()
        assert await store.due("a") == ("r1",)

    async def test_what_rests_longest_is_due_first(self, store: Store) -> None:
        """The order is that of the newest events, and the limit cuts off those that rest shortest."""
        for run_id, at in (("r1", 5.0), ("r2", 3.0), ("r3", 9.0), ("r4", 4.0)):
            driver = await Driver.of(store, header(run_id, agent="a"))
            await driver.append(Observed(at=at)).wait()
            await driver.release()
        assert await store.due("a") == ("r2", "r4", "r1", "r3")
        assert await store.due("a", limit=2) == ("r2", "r4")
        assert await store.due("a", limit=0) == ()

    async def test_driven_runs_do_not_use_up_the_limit(self, store: Store) -> None:
        """However many runs are at work, those that rest are found."""
        drivers = []
        for number in range(5):
            drivers.append(await Driver.of(store, header(f"r{number}", agent="a")))
            await drivers[-1].append(Observed(at=float(number))).wait()
        await drivers[-1].release()
        assert await store.due("a", limit=1) == ("r4",)

    # Sessions.

    async def test_the_first_run_of_a_session_goes_on_from_nothing(self, store: Store) -> None:
        """There is no run before the first."""
        stored, _lease = await store.create(header(session="s"))
        assert stored.after is None

    async def test_the_next_run_goes_on_from_the_last(self, store: Store) -> None:
        """The header names the session's last run, as returned and as stored; other sessions do not count."""
        for number in range(3):
            await finished(store, header(f"r{number}", session="s"))
        await finished(store, header("other", session="t"))
        stored, _lease = await store.create(header("r3", session="s"))
        assert stored.after == "r2"
        assert (await store.read("r3")).header == stored

    async def test_a_session_has_one_run_at_a_time(self, store: Store) -> None:
        """A second run is refused while the first is not over, driven or not, and the error names it."""
        driver = await Driver.of(store, header("first", session="s"))
        with pytest.raises(ConflictError, match="first"):
            await store.create(header("second", session="s"))
        await driver.release()
        with pytest.raises(ConflictError, match="first"):
            await store.create(header("second", session="s"))
        with pytest.raises(RunNotFoundError):
            await store.read("second")

    async def test_a_session_goes_on_after_an_error(self, store: Store) -> None:
        """A run that failed is over: the next one goes on from it."""
        driver = await Driver.of(store, header("first", session="s"))
        await driver.append(Failed(reason=StopReason.CANCELLED, message="")).wait()
        await driver.release()
        stored, _lease = await store.create(header("second", session="s"))
        assert stored.after == "first"

    async def test_of_many_that_start_in_a_session_one_wins(self, store: Store) -> None:
        """However many race, the session has one run that is not over."""
        started = []

        async def race(number: int) -> None:
            try:
                started.append(await store.create(header(f"r{number}", session="s")))
            except ConflictError:
                return

        async with anyio.create_task_group() as group:
            for number in range(20):
                group.start_soon(race, number)
        assert len(started) == 1
        assert len(await store.runs(Filter(session="s"))) == 1

    # Deletion.

    async def test_a_deleted_run_is_gone(self, store: Store) -> None:
        """Header, events and inbox are removed, and other runs are not."""
        driver = await Driver.of(store, header("r1"))
        await store.post("r1", "k", words("x"))
        await driver.append(Observed()).wait()
        await driver.release()
        kept = await finished(store, header("r2"))
        await store.delete("r1")
        for operation in (store.read("r1"), store.inbox("r1"), store.lease("r1"), store.delete("r1")):
            with pytest.raises(RunNotFoundError):
                await operation
        assert [summary.id for summary in await store.runs()] == ["r2"]
        assert len((await store.read("r2")).events) == kept.version

    async def test_a_driven_run_is_not_deleted(self, store: Store) -> None:
        """Who drives is not pulled the ground from under the feet."""
        driver = await Driver.of(store)
        with pytest.raises(LeaseHeldError):
            await store.delete("r1")
        assert await driver.append(Observed()).wait()

    async def test_the_id_of_a_deleted_run_is_free(self, store: Store) -> None:
        """A new run of the id has nothing of the old one: no events, no posts, no keys, no prompt."""
        driver = await Driver.of(store)
        await store.post("r1", "k", words("old"))
        await driver.append(Observed()).wait()
        await driver.release()
        await store.delete("r1")
        _head, lease = await store.create(header(prompt="Something else"))
        assert (lease.version, lease.newest, await store.inbox("r1")) == (0, 0, ())
        assert (await store.post("r1", "k", words("new"))).item == words("new")

    async def test_an_owner_of_a_deleted_run_cannot_write_to_its_successor(self, store: Store) -> None:
        """A lease is of one run, not of an id."""
        late = await Driver.of(store)
        await late.release()
        await store.delete("r1")
        _now = await Driver.of(store)
        await refused(late.append(Observed()), LeaseLostError)
        assert (await store.read("r1")).events == ()

    async def test_a_late_release_leaves_a_successor_alone(self, store: Store) -> None:
        """Nor does it let go of the lease of the run that has the id now."""
        late = await Driver.of(store)
        await late.release()
        await store.delete("r1")
        now = await Driver.of(store)
        await late.release()
        assert await now.append(Observed()).wait()

    async def test_a_run_that_another_goes_on_from_is_not_deleted(self, store: Store) -> None:
        """A history that is needed stays, and the error says by whom; from the end a chain can be taken off."""
        await finished(store, header("first"))
        await finished(store, header("second", after="first"))
        with pytest.raises(ConflictError, match="second"):
            await store.delete("first")
        assert len((await store.read("first")).events) == 2
        await store.delete("second")
        await store.delete("first")
        assert await store.runs() == ()

    async def test_the_runs_below_are_deleted_too(self, store: Store) -> None:
        """With a run go the runs of its agents, and those of theirs; with one of those its callers do not."""
        await finished(store, header("r1"))
        for run_id, parent in (("r1.a", "r1"), ("r1.b", "r1"), ("r1.a.c", "r1.a"), ("r2.a", "r2")):
            await finished(store, header(run_id, parent=parent))
        await store.delete("r1.b")
        assert set(ids(await store.runs())) == {"r1", "r1.a", "r1.a.c", "r2.a"}
        await store.delete("r1")
        assert ids(await store.runs()) == ["r2.a"]

    async def test_a_run_above_one_that_is_driven_is_not_deleted(self, store: Store) -> None:
        """While an agent below is at work nothing is removed."""
        await finished(store, header("r1"))
        await finished(store, header("r1.a", parent="r1"))
        driver = await Driver.of(store, header("r1.a.b", parent="r1.a"))
        with pytest.raises(LeaseHeldError, match=r"r1\.a\.b"):
            await store.delete("r1")
        assert await driver.append(Observed()).wait()
        assert len(await store.runs()) == 3

    async def test_a_run_above_one_that_another_goes_on_from_is_not_deleted(self, store: Store) -> None:
        """A history is needed as well where it is an agent's below; one that goes too needs nothing."""
        await finished(store, header("r1"))
        await finished(store, header("r1.a", parent="r1"))
        await finished(store, header("r1.b", parent="r1", after="r1.a"))
        await finished(store, header("r2", after="r1.a"))
        with pytest.raises(ConflictError, match="r2"):
            await store.delete("r1")
        assert len(await store.runs()) == 4
        await store.delete("r2")
        await store.delete("r1")
        assert await store.runs() == ()

    async def test_a_session_is_deleted_whole(self, store: Store) -> None:
        """Its runs go with those below them, and are counted; then the session begins anew."""
        for run_id, fields in (
            ("r1", {"session": "s"}),
            ("r1.a", {"parent": "r1"}),
            ("r2", {"session": "s"}),
            ("r3", {"session": "t"}),
            ("r4", {}),
        ):
            await finished(store, header(run_id, **fields))
        assert await store.delete_session("s") == 2
        assert set(ids(await store.runs())) == {"r3", "r4"}
        assert await store.delete_session("s") == 0
        stored, _lease = await store.create(header("r5", session="s"))
        assert stored.after is None

    @pytest.mark.parametrize("driven", ["r2", "r1.a"])
    async def test_a_session_that_is_driven_is_not_deleted(self, store: Store, driven: str) -> None:
        """While one of its runs is at work, or one below, none is removed."""
        for run_id, fields in (("r1", {"session": "s"}), ("r1.a", {"parent": "r1"}), ("r2", {"session": "s"})):
            await finished(store, header(run_id, **fields))
        lease = await store.lease(driven)
        with pytest.raises(ConflictError, match=driven):
            await store.delete_session("s")
        assert len(await store.runs()) == 3
        await store.release(lease).wait()
        assert await store.delete_session("s") == 2

    async def test_a_session_that_a_run_outside_goes_on_from_is_not_deleted(self, store: Store) -> None:
        """A history that is needed stays, also where runs of the session go on from it, too."""
        for number in range(3):
            await finished(store, header(f"r{number}", session="s"))
        await finished(store, header("outside", after="r1"))
        with pytest.raises(ConflictError, match="outside"):
            await store.delete_session("s")
        assert len(await store.runs()) == 4
        await store.delete("outside")
        assert await store.delete_session("s") == 3

    # What is old.

    async def test_what_is_over_and_old_is_pruned(self, store: Store) -> None:
        """Runs that ended before a moment go and are counted; those that ended then or later stay."""
        await finished(store, header("old"), at=4.0)
        failed = await Driver.of(store, header("failed"))
        await failed.append(Failed(at=4.5, reason=StopReason.CANCELLED, message="")).wait()
        await failed.release()
        await finished(store, header("then"), at=5.0)
        await finished(store, header("later"), at=6.0)
        assert await store.prune(5.0) == 2
        assert set(ids(await store.runs())) == {"then", "later"}
        with pytest.raises(RunNotFoundError):
            await store.read("old")
        assert await store.prune(5.0) == 0

    async def test_what_is_not_over_is_not_pruned(self, store: Store) -> None:
        """However long it rests, a run that can go on stays, with its inbox."""
        await rests(store)
        row = await store.post("r1", "k", words("x"))
        assert await store.prune(FAR) == 0
        assert await store.inbox("r1") == (row,)

    async def test_the_id_of_a_pruned_run_is_free(self, store: Store) -> None:
        """Nothing of it is left: no events, no posts, no keys."""
        driver = await Driver.of(store)
        row = await store.post("r1", "k", words("old"))
        await driver.append(Observed(), DONE, taken=[row.number]).wait()
        await driver.release()
        assert await store.prune(FAR) == 1
        driver = await Driver.of(store, header(prompt="Something else"))
        assert (driver.run.version, driver.lease.newest) == (0, 0)
        assert (await store.post("r1", "k", words("new"))).item == words("new")

    async def test_a_history_that_is_needed_is_not_pruned(self, store: Store) -> None:
        """What a run goes on from stays as long as that run, however many lie between."""
        await finished(store, header("r1"), at=1.0)
        await finished(store, header("r2", after="r1"), at=2.0)
        await finished(store, header("r3", after="r2"), at=9.0)
        await finished(store, header("r4", after="r1"), at=3.0)
        assert await store.prune(5.0) == 1
        assert set(ids(await store.runs())) == {"r1", "r2", "r3"}
        assert await store.prune(10.0) == 3

    async def test_a_session_is_pruned_whole(self, store: Store) -> None:
        """While one of its runs is fresh all of them stay; once all are old all go."""
        for number in range(3):
            await finished(store, header(f"r{number}", session="s"), at=float(number))
        await finished(store, header("t0", session="t"), at=0.0)
        assert await store.prune(1.5) == 1
        assert set(ids(await store.runs())) == {"r0", "r1", "r2"}
        assert await store.prune(2.5) == 3

    async def test_a_session_stays_whole_where_a_part_is_needed(self, store: Store) -> None:
        """A session of which a run is needed outside keeps its other runs, too: its last one stays its last."""
        for number in range(3):
            await finished(store, header(f"r{number}", session="s"))
        await finished(store, header("outside", after="r1"), at=9.0)
        assert await store.prune(5.0) == 0
        stored, _lease = await store.create(header("r3", session="s"))
        assert stored.after == "r2"

    async def test_runs_below_are_pruned_with_their_callers(self, store: Store) -> None:
        """A run of an agent goes when its caller goes, and stays when that stays."""
        await finished(store, header("r1"), at=1.0)
        await finished(store, header("r1.a", parent="r1"), at=1.0)
        await finished(store, header("r1.a.b", parent="r1.a"), at=1.0)
        await (await Driver.of(store, header("r2"))).release()
        await finished(store, header("r2.a", parent="r2"), at=1.0)
        await finished(store, header("r3"), at=1.0)
        await finished(store, header("r3.a", parent="r3"), at=9.0)
        assert await store.prune(5.0) == 3
        assert set(ids(await store.runs())) == {"r2", "r2.a", "r3", "r3.a"}

    async def test_pruning_takes_no_offence_at_owners(self, store: Store) -> None:
        """Who has an old run open that is over does not keep others from being pruned."""
        for number in range(3):
            await finished(store, header(f"r{number}"), at=1.0)
        _lease = await store.lease("r1")
        await store.prune(5.0)
        assert set(ids(await store.runs())) <= {"r1"}

    # Two workers.

    async def test_two_workers_share_their_runs(self, store: Store, other: Store) -> None:
        """What one has written the other reads and lists, and goes on with."""
        driver = await Driver.of(store)
        await driver.append(Observed()).wait()
        assert (await other.read("r1")).events == (Observed(),)
        assert [(line.id, line.driven) for line in await other.runs()] == [("r1", True)]
        await driver.release()
        assert [line.driven for line in await other.runs()] == [False]
        driver = await Driver.again(other)
        assert await driver.append(DONE, final=True).wait()
        assert len((await store.read("r1")).events) == 2

    async def test_of_two_workers_one_drives(self, store: Store, other: Store) -> None:
        """A lease holds against the other worker: it cannot take or delete the run, and is not told that it is due."""
        driver = await Driver.of(store, header(agent="a"))
        for operation in (other.lease("r1"), other.create(header(agent="a")), other.delete("r1")):
            with pytest.raises(LeaseHeldError):
                await operation
        assert await other.due("a") == ()
        token = driver.lease.token
        await driver.release()
        assert await other.due("a") == ("r1",)
        assert (await other.lease("r1")).token > token

    async def test_of_two_workers_that_create_a_run_one_wins(self, store: Store, other: Store) -> None:
        """A request that reaches both is driven once, and both see one run."""
        leases: list[Lease] = []

        async def race(worker: Store) -> None:
            try:
                leases.append((await worker.create(header()))[1])
            except LeaseHeldError:
                return

        async with anyio.create_task_group() as group:
            for _ in range(10):
                group.start_soon(race, store)
                group.start_soon(race, other)
        assert len(leases) == 1
        assert ids(await store.runs()) == ids(await other.runs()) == ["r1"]

    async def test_of_two_workers_that_start_in_a_session_one_wins(self, store: Store, other: Store) -> None:
        """A session has one run that is not over, whoever starts it."""
        started = []

        async def race(worker: Store, number: int) -> None:
            try:
                started.append(await worker.create(header(f"r{number}", session="s")))
            except ConflictError:
                return

        async with anyio.create_task_group() as group:
            for number in range(20):
                group.start_soon(race, (store, other)[number % 2], number)
        assert len(started) == 1
        assert len(await store.runs()) == 1

    async def test_two_workers_that_want_a_run_drive_in_turn(self, store: Store, other: Store) -> None:
        """Each finds what the other left; an append of one is never between two of the other."""
        await (await Driver.of(store)).release()

        async def drive(worker: Store) -> None:
            done = 0
            while done < 10:
                try:
                    lease = await worker.lease("r1")
                except LeaseHeldError:
                    continue
                run = at_version(begin(header()), lease.version)
                for _ in range(2):
                    run = at_version(run, run.version + 1)
                    assert await worker.append(lease, run, (Observed(at=float(lease.token)),)).wait()
                await worker.release(lease).wait()
                done += 1

        async with anyio.create_task_group() as group:
            group.start_soon(drive, store)
            group.start_soon(drive, other)
        events = (await store.read("r1")).events
        drives = [(token, len(list(group))) for token, group in groupby(events, key=lambda event: event.at)]
        assert [count for _token, count in drives] == [2] * 20
        assert drives == sorted(drives)

    async def test_an_owner_learns_what_another_worker_posts(self, store: Store, other: Store) -> None:
        """With its next append at the latest the owner knows of posts and of a cancel, which wakes it."""
        driver = await Driver.of(store)
        woken = anyio.Event()
        driver.lease.wake = waker(woken.set)
        row = await other.post("r1", "k", words("x"))
        await driver.append(Observed()).wait()
        assert (driver.lease.newest, driver.lease.cancelled) == (row.number, False)
        await other.post("r1", "cancel", Cancel())
        assert await driver.append(DONE, final=True).wait() is False
        with anyio.fail_after(10):
            await woken.wait()
        assert (driver.lease.cancelled, len(await store.inbox("r1"))) == (True, 2)

    async def test_of_two_workers_that_post_a_key_one_wins(self, store: Store, other: Store) -> None:
        """All are shown the same winner, and the inbox holds one row."""
        await Driver.of(store)
        winners = []

        async def race(worker: Store) -> None:
            winners.append(await worker.post("r1", "k", words("x")))

        async with anyio.create_task_group() as group:
            for _ in range(10):
                group.start_soon(race, store)
                group.start_soon(race, other)
        assert winners == [winners[0]] * 20
        assert await other.inbox("r1") == (winners[0],)

    async def test_a_stalled_owner_writes_nothing_over_another_worker(self, store: Store, other: Store) -> None:
        """An owner that was replaced by another worker is refused, whatever it has queued."""
        late = await Driver.of(store)
        await late.release()
        now = await Driver.again(other)
        commits = [late.append(Observed()), late.append(DONE, final=True)]
        for commit in commits:
            await refused(commit, LeaseLostError)
        assert await now.append(Observed(at=1.0)).wait()
        assert (await store.read("r1")).events == (Observed(at=1.0),)

    async def test_who_stops_waiting_for_a_lease_holds_none(self, store: Store, other: Store) -> None:
        """A run whose creation or taking was cancelled in the middle is free for the others, at once."""
        taken: list[Lease] = []  # by a store that has done it before anybody had to wait
        with anyio.CancelScope() as scope:
            scope.cancel()
            taken.append((await store.create(header()))[1])
        for each in taken:
            store.release(each)
        taken.clear()
        assert (await store.read("r1")).events == ()  # what was asked for is done before what is asked for later
        lease = await other.lease("r1")
        await other.release(lease).wait()
        with anyio.CancelScope() as scope:
            scope.cancel()
            taken.append(await store.lease("r1"))
        for each in taken:
            store.release(each)
        assert (await store.read("r1")).events == ()
        assert (await other.lease("r1")).crashes == 0

    async def test_a_worker_that_leaves_gives_its_runs_back(self, store: Store, other: Store) -> None:
        """What a store that is closed drove is free for the others, at once and without a crash."""
        driver = await Driver.of(store)
        await driver.append(Observed()).wait()
        await store.aclose()
        lease = await other.lease("r1")
        assert (lease.version, lease.crashes) == (1, 0)

    # The end.

    async def test_a_release_comes_after_the_appends_before_it(self, store: Store) -> None:
        """Who ends need not wait: what was appended is written, and then the lease is given back."""
        driver = await Driver.of(store)
        commit = driver.append(Observed(), DONE, final=True)
        store.release(driver.lease)
        assert await commit.wait()
        assert (await store.lease("r1")).version == 2

    async def test_a_store_can_be_closed_twice(self, store: Store) -> None:
        """Closing what is closed is harmless; so is giving a lease back to a closed store."""
        driver = await Driver.of(store)
        driver.append(Observed())
        await store.aclose()
        await store.aclose()
        await driver.release()
