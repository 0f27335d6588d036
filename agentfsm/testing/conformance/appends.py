"""The journal: what is written is there, whole and once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from agentfsm.core.errors import ConflictError, LeaseLostError
from agentfsm.core.events import EVENTS, AnswerGiven, Observed
from agentfsm.core.machine import State
from agentfsm.core.messages import AssistantMessage
from agentfsm.core.run import begin_run
from agentfsm.core.usage import Usage
from agentfsm.testing.conformance.helpers import (
    FINAL_ANSWER,
    LeasedRun,
    build_every_event,
    check_refused,
    make_header,
    make_input,
    with_version,
)

if TYPE_CHECKING:
    from agentfsm.ports.store import Store


class AppendConformance:
    """The journal: what is written is there, whole and once."""

    # Appends.

    async def test_events_are_read_in_order(self, store: Store) -> None:
        """What was appended is what is read."""
        driver = await LeasedRun.create(store)
        events = (Observed(at=1.0), *driver.build_turn())
        for event in events:
            assert await driver.append(event).wait()
        assert (await store.read("r1")).events == events

    async def test_one_append_takes_several_events(self, store: Store) -> None:
        """Events appended together are versions of their own."""
        driver = await LeasedRun.create(store)
        events = (Observed(), *driver.build_turn())
        assert await driver.append(*events).wait()
        assert (await store.read("r1")).events == events
        await driver.release()
        assert (await store.lease("r1")).version == 6

    async def test_every_event_comes_back_as_it_was(self, store: Store) -> None:
        """No field of any event is lost, awkward text included."""
        events = build_every_event()
        assert {type(event) for event in events} == set(EVENTS)
        driver = await LeasedRun.create(store)
        assert await store.append(driver.lease, with_version(driver.run, len(events)), events).wait()
        assert (await store.read("r1")).events == events

    async def test_appends_that_nobody_waits_for_are_written_in_order(self, store: Store) -> None:
        """An append may be left to itself: the last one's wait covers all before it."""
        driver = await LeasedRun.create(store)
        events = [Observed(at=1.0)]
        driver.append(*events)
        for _ in range(20):
            for event in driver.build_turn():
                driver.append(event)
                events.append(event)  # type: ignore[arg-type]
        assert await driver.append(FINAL_ANSWER).wait()
        assert (await store.read("r1")).events == (*events, FINAL_ANSWER)

    async def test_a_read_sees_an_append_before_it(self, store: Store) -> None:
        """A read that is asked for after an append sees it, waited for or not."""
        driver = await LeasedRun.create(store)
        driver.append(Observed())
        assert len((await store.read("r1")).events) == 1

    async def test_a_commit_can_be_waited_for_again(self, store: Store) -> None:
        """Every wait gives the same answer, by whomever and whenever."""
        driver = await LeasedRun.create(store)
        commit = driver.append(Observed())
        answers = []

        async def wait() -> None:
            answers.append(await commit.wait())

        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            group.start_soon(wait)
        assert [*answers, await commit.wait(), commit.is_done] == [True, True, True, True]

    async def test_a_cancelled_wait_does_not_undo_the_append(self, store: Store) -> None:
        """Who stops waiting does not take back what was asked for."""
        driver = await LeasedRun.create(store)
        commit = driver.append(Observed())
        with anyio.CancelScope() as scope:
            scope.cancel()
            await commit.wait()
        assert await commit.wait()
        assert len((await store.read("r1")).events) == 1

    async def test_a_wrong_version_is_refused(self, store: Store) -> None:
        """An append that does not follow on what is stored writes nothing."""
        driver = await LeasedRun.create(store)
        await driver.append(Observed()).wait()
        stale = begin_run(make_header()).apply(Observed(at=9.0))
        await check_refused(store.append(driver.lease, stale, (Observed(at=9.0),)), ConflictError)
        ahead = with_version(driver.run, 7)
        await check_refused(store.append(driver.lease, ahead, (FINAL_ANSWER,)), ConflictError)
        assert (await store.read("r1")).events == (Observed(),)

    async def test_after_a_refusal_there_is_no_gap(self, store: Store) -> None:
        """When an append is refused, so are those that were queued behind it."""
        driver = await LeasedRun.create(store)
        commits = [store.append(driver.lease, with_version(driver.run, n), (Observed(),)) for n in (2, 3, 4)]
        for commit in commits:
            await check_refused(commit, ConflictError)
        assert (await store.read("r1")).events == ()

    async def test_a_late_owner_writes_nothing(self, store: Store) -> None:
        """An owner that was replaced is told so at its next append, and the new owner does not notice."""
        late = await LeasedRun.create(store)
        await late.release()
        now = await LeasedRun.resume(store)
        await check_refused(late.append(Observed(at=9.0)), LeaseLostError)
        assert await now.append(Observed(at=1.0)).wait()
        assert (await store.read("r1")).events == (Observed(at=1.0),)

    async def test_a_stalled_owner_writes_nothing(self, store: Store) -> None:
        """An owner of long ago is refused, also when the run is free again and at the version that it knows."""
        late = await LeasedRun.create(store)
        await late.release()
        for _ in range(2):
            await (await LeasedRun.resume(store)).release()
        await check_refused(late.append(Observed()), LeaseLostError)
        assert (await store.read("r1")).events == ()

    async def test_a_lease_that_was_given_back_writes_nothing(self, store: Store) -> None:
        """The right to append ends with the release, though nobody has taken the run since."""
        driver = await LeasedRun.create(store)
        await driver.release()
        await check_refused(driver.append(Observed()), LeaseLostError)
        assert (await store.read("r1")).events == ()

    async def test_a_late_owner_takes_nothing(self, store: Store) -> None:
        """A refused append strikes no inbox rows either."""
        late = await LeasedRun.create(store)
        row = await store.post("r1", "k", make_input("x"))
        await late.release()
        _now = await LeasedRun.resume(store)
        await check_refused(late.append(Observed(), taken=[row.number]), LeaseLostError)
        assert await store.inbox("r1") == (row,)

    async def test_errors_come_from_the_wait(self, store: Store) -> None:
        """Append itself returns at once, whatever becomes of it."""
        driver = await LeasedRun.create(store)
        commit = store.append(driver.lease, with_version(driver.run, 5), (Observed(),))
        await check_refused(commit, ConflictError)
        await check_refused(commit, ConflictError)

    async def test_a_refused_append_leaves_its_neighbours_alone(self, store: Store) -> None:
        """Appends of other runs that are written together with a refused one are written."""
        drivers = [await LeasedRun.create(store, make_header(f"r{n}")) for n in range(10)]
        bad = store.append(drivers[0].lease, with_version(drivers[0].run, 9), (Observed(),))
        good = [driver.append(Observed()) for driver in drivers[1:]]
        await check_refused(bad, ConflictError)
        assert [await commit.wait() for commit in good] == [True] * 9

    async def test_runs_do_not_mix(self, store: Store) -> None:
        """Many runs at once keep their own events in their own order."""

        async def drive(number: int) -> None:
            driver = await LeasedRun.create(store, make_header(f"r{number}"))
            await driver.append(Observed(at=float(number))).wait()
            for _ in range(3):
                for event in driver.build_turn():
                    driver.append(event)
            await driver.append(FINAL_ANSWER, final=True).wait()
            await driver.release()

        async with anyio.create_task_group() as group:
            for number in range(40):
                group.start_soon(drive, number)
        for number in range(40):
            stored = await store.read(f"r{number}")
            run = begin_run(stored.header).fold(stored.events)
            assert (run.state, run.turn, stored.events[0].at) == (State.DONE, 4, float(number))

    async def test_a_read_can_start_in_the_middle(self, store: Store) -> None:
        """Only the events after a version are read, with the header."""
        driver = await LeasedRun.create(store)
        events = (Observed(), *driver.build_turn())
        await driver.append(*events).wait()
        for after in range(len(events) + 1):
            stored = await store.read("r1", after)
            assert (stored.header, stored.events) == (make_header(), events[after:])
        assert (await store.read("r1", 99)).events == ()

    async def test_a_long_journal_is_read_whole(self, store: Store) -> None:
        """A thousand events in one append are a thousand versions."""
        driver = await LeasedRun.create(store)
        events = tuple([Observed(at=float(n)) for n in range(1000)])
        await store.append(driver.lease, with_version(driver.run, 1000), events).wait()
        assert (await store.read("r1")).events == events

    async def test_a_large_record_comes_back_whole(self, store: Store) -> None:
        """A record of five megabytes is a record like others."""
        driver = await LeasedRun.create(store)
        text = "wörd " * 850_000
        await driver.append(Observed(), AnswerGiven(message=AssistantMessage(text=text))).wait()
        answer = (await store.read("r1")).events[1]
        assert isinstance(answer, AnswerGiven)
        assert answer.message.text == text

    async def test_lone_surrogates_do_no_harm(self, store: Store) -> None:
        """Text that is no text (half a UTF-16 pair) is stored, at worst with a replacement."""
        driver = await LeasedRun.create(store, make_header(prompt="half \ud83d pair", metadata={"k\udc00": "v\udc00"}))
        await store.post("r1", "k", make_input("x\udfff"))
        await driver.append(Observed(), AnswerGiven(message=AssistantMessage(text="a\ud800b"))).wait()
        answer = (await store.read("r1")).events[1]
        assert isinstance(answer, AnswerGiven)
        assert answer.message.text[0] + answer.message.text[-1] == "ab"
        assert len(await store.runs()) == 1

    async def test_the_same_surrogates_are_the_same_prompt(self, store: Store) -> None:
        """A request with such text that arrives twice is still one run."""
        driver = await LeasedRun.create(store, make_header(prompt="half \ud83d pair"))
        await driver.release()
        _head, lease = await store.create(make_header(prompt="half \ud83d pair"))
        assert lease.version == 0

    async def test_huge_numbers_do_no_harm(self, store: Store) -> None:
        """A model that claims to have used 10**30 tokens does not break the store."""
        driver = await LeasedRun.create(store)
        await driver.append(
            Observed(), AnswerGiven(message=AssistantMessage(), usage=Usage(input_tokens=10**30))
        ).wait()
        (summary,) = await store.runs()
        assert summary.tokens >= 2**31

    # The end.

    async def test_a_release_comes_after_the_appends_before_it(self, store: Store) -> None:
        """Who ends need not wait: what was appended is written, and then the lease is given back."""
        driver = await LeasedRun.create(store)
        commit = driver.append(Observed(), FINAL_ANSWER, final=True)
        store.release(driver.lease)
        assert await commit.wait()
        assert (await store.lease("r1")).version == 2

    async def test_a_store_can_be_closed_twice(self, store: Store) -> None:
        """Closing what is closed is harmless; so is giving a lease back to a closed store."""
        driver = await LeasedRun.create(store)
        driver.append(Observed())
        await store.aclose()
        await store.aclose()
        await driver.release()
