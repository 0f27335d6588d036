"""The clock of a store, the creation of runs, and durability."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import anyio
import pytest

from agentfsm.core.errors import ConflictError, LeaseHeldError, MisuseError
from agentfsm.core.events import Event, Observed
from agentfsm.core.header import Fingerprint, Header
from agentfsm.core.inbox import Wake
from agentfsm.core.limits import StopReason
from agentfsm.core.machine import State
from agentfsm.core.messages import (
    AssistantMessage,
    ImagePart,
    Outcome,
    SystemMessage,
    TextPart,
    ToolCall,
    ToolResult,
    UserMessage,
)
from agentfsm.core.run import begin_run
from agentfsm.ports.store import Filter
from agentfsm.testing.conformance.helpers import (
    FINAL_ANSWER,
    HOSTILE_TEXT,
    LeasedRun,
    build_turn,
    create_finished_run,
    list_ids,
    make_header,
    make_input,
    race_for_lease,
)

if TYPE_CHECKING:
    from agentfsm.ports.store import Durability, Lease, Store


class CreationConformance:
    """The clock of a store, the creation of runs, and durability."""

    # The clock.

    async def test_the_clock_tells_the_date(self, store: Store) -> None:
        """The clock returns seconds since 1970, within a day of this machine's clock."""
        assert abs(await store.now() - time.time()) < 86_400

    async def test_the_clock_moves_on(self, store: Store) -> None:
        """The clock advances and does not go back."""
        first = now = await store.now()
        with anyio.fail_after(10):
            while now == first:
                now = await store.now()
        assert now > first

    # Create.

    async def test_a_new_run_is_at_version_0(self, store: Store) -> None:
        """A new run has its header and no events."""
        stored, lease = await store.create(make_header())
        assert (stored, lease.run_id, lease.version) == (make_header(), "r1", 0)
        assert (await store.read("r1")).events == ()

    async def test_an_id_may_be_long(self, store: Store) -> None:
        """A child run's id is its parent's, of up to 200 characters, plus a call id for each level."""
        caller = "r" * 200
        run_id = f"{caller}.t10.10.t10.10.t10.10"
        await (await LeasedRun.create(store, make_header(caller))).release()
        await (await LeasedRun.create(store, make_header(run_id, parent=caller))).release()
        await store.post(caller, f"wake:{run_id}:cancel", Wake(run_id=run_id))
        assert [row.item for row in await store.inbox(caller)] == [Wake(run_id=run_id)]
        assert [line.id for line in await store.runs(Filter(parent=caller))] == [run_id]

    async def test_a_header_comes_back_as_it_was(self, store: Store) -> None:
        """All fields of the header are stored, including control characters."""
        await create_finished_run(store, make_header("r0"))
        call = ToolCall(id="t1.0", name="n", arguments="{}", key="k")
        result = ToolResult(call_id="t1.0", tool="n", outcome=Outcome.DONE, content="x")
        whole = Header(
            id="r1",
            prompt=(TextPart(text=HOSTILE_TEXT), ImagePart(url="data:image/png;base64,AA==")),
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
        """A repeated request does not create a second run: it finds the first one."""
        await create_finished_run(store)
        stored, lease = await store.create(make_header(created_at=1_900_000_000.0))
        assert stored == make_header()
        assert lease.version == 2

    async def test_the_same_id_with_another_prompt_is_refused(self, store: Store) -> None:
        """A create with the id of a run with another prompt is refused, and that run is unchanged."""
        await create_finished_run(store)
        with pytest.raises(ConflictError, match="another prompt"):
            await store.create(make_header(prompt="Burn the notes"))
        assert (await store.read("r1")).header == make_header()

    async def test_a_driven_run_cannot_be_created_again(self, store: Store) -> None:
        """A repeated request is refused while the run's lease is held."""
        driver = await LeasedRun.create(store)
        with pytest.raises(LeaseHeldError):
            await store.create(make_header())
        assert not driver.lease.lost

    async def test_of_many_that_create_one_id_one_wins(self, store: Store) -> None:
        """Of many concurrent creates of one id, exactly one gets the lease."""

        async def create() -> Lease:
            return (await store.create(make_header()))[1]

        assert len(await race_for_lease(create)) == 1

    async def test_a_journal_may_begin_with_events(self, store: Store) -> None:
        """A run may be created with events: they are read and listed, and appends continue after them."""
        first = Observed(at=1.0)
        events = (first, *build_turn(begin_run(make_header()).apply(first)))
        head, lease = await store.create(make_header(), events=events)
        assert (lease.version, (await store.read("r1")).events) == (6, events)
        (line,) = await store.runs()
        assert (line.state, line.turn, line.version, line.tokens, line.updated_at) == (State.THINK, 1, 6, 7, 7.0)
        assert await LeasedRun(store, lease, begin_run(head).fold(events)).append(FINAL_ANSWER).wait()
        assert (await store.read("r1")).events == (*events, FINAL_ANSWER)

    async def test_a_journal_begins_once(self, store: Store) -> None:
        """A second create finds the run as it is and does not write its events."""
        _head, lease = await store.create(make_header(), events=(Observed(at=1.0),))
        await store.release(lease).wait()
        _head, lease = await store.create(make_header(), events=(Observed(at=2.0), FINAL_ANSWER))
        assert (lease.version, (await store.read("r1")).events) == (1, (Observed(at=1.0),))

    async def test_a_run_may_begin_with_its_end(self, store: Store) -> None:
        """A run created with its final event is over: it refuses posts, and its session continues from it."""
        _head, lease = await store.create(make_header(session="s"), events=(Observed(), FINAL_ANSWER))
        await store.release(lease).wait()
        assert [(line.state, line.stop_reason) for line in await store.runs()] == [(State.DONE, StopReason.COMPLETED)]
        with pytest.raises(ConflictError, match="over"):
            await store.post("r1", "k", make_input("x"))
        stored, _lease = await store.create(make_header("r2", session="s"))
        assert stored.after == "r1"

    async def test_a_journal_may_begin_with_many_events(self, store: Store) -> None:
        """A run may be created with 501 events."""
        events: tuple[Event, ...] = (Observed(at=1.0),)
        run = begin_run(make_header()).fold(events)
        for _ in range(100):
            more = build_turn(run)
            run = run.fold(more)
            events = (*events, *more)
        _head, lease = await store.create(make_header(), events=events)
        assert (lease.version, (await store.read("r1")).events) == (501, events)

    async def test_a_run_goes_on_from_a_run_that_is_there(self, store: Store) -> None:
        """A run whose predecessor is missing is refused at its creation, since it could not be loaded later."""
        await create_finished_run(store, make_header("first"), at=1.0)
        await create_finished_run(store, make_header("second", after="first"), at=2.0)
        await store.delete("second")
        assert await store.prune(5.0) == 1
        for fields in ({"after": "first"}, {"after": "first", "session": "s"}, {"after": "r1"}):
            with pytest.raises(ConflictError, match=r"messages=first\.messages"):
                await store.create(make_header(**fields))
        assert await store.runs() == ()
        await create_finished_run(store, make_header("first"))
        assert await create_finished_run(store, make_header(after="first"))

    async def test_a_session_may_begin_after_another_run(self, store: Store) -> None:
        """A new session branches off after the run that its first header names; one with runs goes on from its last."""
        await create_finished_run(store, make_header("r0", session="s"))
        stored, lease = await store.create(make_header("r1", session="t", after="r0"))
        assert (stored.after, (await store.read("r1")).header.after) == ("r0", "r0")
        await store.release(lease).wait()
        with pytest.raises(ConflictError, match="another session"):
            await store.create(make_header("r2", session="s", after="r1"))

    async def test_a_run_that_is_there_goes_on_without_its_history(self, store: Store) -> None:
        """A repeated request finds its run, even with another predecessor."""
        await create_finished_run(store)
        stored, lease = await store.create(make_header(after="nowhere"))
        assert (stored.after, lease.version) == (None, 2)

    # Durability.

    async def test_a_lease_says_what_its_appends_survive(self, store: Store) -> None:
        """A lease has the durability passed with it: "full" or "normal", by default "full"."""
        choices: tuple[Durability, ...] = ("full", "normal")
        for number, durability in enumerate(choices):
            _head, lease = await store.create(make_header(f"r{number}"), durability=durability)
            assert lease.durability == durability
            run = begin_run(make_header(f"r{number}")).apply(Observed())
            assert await store.append(lease, run, (Observed(),)).wait()
            await store.release(lease).wait()
            lease = await store.lease(f"r{number}", durability=durability)
            assert lease.durability == durability
            await store.release(lease).wait()
        assert (await store.create(make_header()))[1].durability == "full"
        assert (await store.lease("r0")).durability == "full"

    async def test_another_durability_is_refused(self, store: Store) -> None:
        """Another durability is refused: no run is created and no lease is taken."""
        await create_finished_run(store)
        with pytest.raises(MisuseError):
            await store.create(make_header("r2"), durability="ful")  # type: ignore[arg-type]
        with pytest.raises(MisuseError):
            await store.lease("r1", durability="FULL")  # type: ignore[arg-type]
        assert list_ids(await store.runs()) == ["r1"]
        assert await store.lease("r1")
