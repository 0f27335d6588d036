"""A limiter: never too many at once or in a minute, first come, first served, and no waiter is forgotten."""

import asyncio
import random
import threading

import anyio
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from agentfsm import Limiter, MisuseError
from agentfsm._lib.limiter import MINUTE_S
from agentfsm.testing import run_virtual

# A guard against hanging, never a bound that a test relies on.
HANG_S = 20.0


class Guest:
    """Somebody who waits, and notes how often he was woken."""

    def __init__(self):
        self.woken = 0

    def wake(self):
        self.woken += 1


def full(limit=1):
    """Make a limiter with all places taken."""
    limiter = Limiter(limit)
    for _ in range(limit):
        assert limiter.try_acquire(Guest().wake)
    return limiter


@pytest.mark.parametrize("limit", [0, -1])
def test_no_place_at_all_is_misuse(limit):
    """A limit below 1 would let no call go, and says so."""
    with pytest.raises(MisuseError, match=rf"Limiter\(concurrency={limit}\): give a whole number, 1 or more"):
        Limiter(limit)


def test_only_so_many_enter():
    """As many enter as there are places, and one more for each that leaves."""
    limiter = full(2)
    assert not limiter.try_acquire(Guest().wake)
    assert limiter.in_use == 2
    limiter.release()
    assert limiter.in_use == 1
    assert limiter.try_acquire(Guest().wake)


def test_leaving_twice_is_misuse():
    """A place that is given back twice would let one too many in, so it is refused."""
    limiter = full()
    limiter.release()
    with pytest.raises(MisuseError, match="given back twice"):
        limiter.release()


def test_each_place_wakes_one_in_order():
    """Each freed place wakes one, once, in the order of their coming."""
    limiter, guests = full(2), [Guest() for _ in range(3)]
    for guest in guests:
        limiter.notify_when_free(guest.wake)
    assert limiter.waiting == 3
    limiter.release()
    assert [guest.woken for guest in guests] == [1, 0, 0]
    limiter.release()
    assert [guest.woken for guest in guests] == [1, 1, 0]
    assert limiter.try_acquire(guests[0].wake)
    limiter.release()
    assert [guest.woken for guest in guests] == [1, 1, 1]
    assert (limiter.in_use, limiter.waiting) == (0, 2)


def test_nobody_slips_in_before_who_was_woken():
    """A place is kept for who was woken until he comes, so a busy run cannot take it from him again and again."""
    limiter, waiting, busy = full(), Guest(), Guest()
    limiter.notify_when_free(waiting.wake)
    limiter.release()
    assert not limiter.try_acquire(busy.wake)
    assert limiter.try_acquire(waiting.wake)


def test_who_gives_up_before_being_woken_is_passed_over():
    """Who took back his wish is not woken, and the next one is."""
    limiter, gone, next_one = full(), Guest(), Guest()
    limiter.notify_when_free(gone.wake)
    limiter.notify_when_free(next_one.wake)
    limiter.cancel_wait(gone.wake)
    limiter.release()
    assert (gone.woken, next_one.woken) == (0, 1)


def test_who_gives_up_after_being_woken_wakes_the_next():
    """Who was woken and does not come (his run was cancelled) hands the place on."""
    limiter, gone, next_one = full(), Guest(), Guest()
    limiter.notify_when_free(gone.wake)
    limiter.notify_when_free(next_one.wake)
    limiter.release()
    limiter.cancel_wait(gone.wake)
    assert (gone.woken, next_one.woken) == (1, 1)
    assert limiter.try_acquire(next_one.wake)


def test_taking_back_what_was_never_asked_changes_nothing():
    """A clean-up may say `off` for whatever it has, also after it has entered."""
    limiter, guest = Limiter(1), Guest()
    limiter.cancel_wait(guest.wake)
    assert limiter.try_acquire(guest.wake)
    limiter.cancel_wait(guest.wake)
    assert (limiter.in_use, limiter.waiting) == (1, 0)


def test_asking_when_there_is_room_wakes_at_once():
    """A place that became free between `try_acquire` and `notify_when_free` is not overlooked."""
    limiter, guest = full(), Guest()
    assert not limiter.try_acquire(guest.wake)
    limiter.release()
    limiter.notify_when_free(guest.wake)
    assert guest.woken == 1
    assert limiter.try_acquire(guest.wake)


def test_asking_again_keeps_the_rank():
    """Who asks again neither waits twice nor loses his rank, nor is woken twice."""
    limiter, first, second = full(), Guest(), Guest()
    for guest in (first, second, first):
        limiter.notify_when_free(guest.wake)
    assert limiter.waiting == 2
    limiter.release()
    limiter.notify_when_free(first.wake)
    assert (first.woken, second.woken, limiter.waiting) == (1, 0, 2)


def test_who_is_woken_may_enter_within_the_call():
    """The callback is called outside the lock: it may enter, leave and ask by itself."""
    limiter, seen = full(), []

    def wake():
        seen.append(limiter.try_acquire(wake) is not None)
        limiter.release()

    limiter.notify_when_free(wake)
    limiter.release()
    assert seen == [True]
    assert (limiter.in_use, limiter.waiting) == (0, 0)


def test_many_threads_all_come_through():
    """Threads that enter, wait, are woken and give up: never more than the limit, and each comes to its end."""
    limiter, inside, most, lock = Limiter(3), 0, 0, threading.Lock()

    def work(seed):
        nonlocal inside, most
        dice, room = random.Random(seed), threading.Event()

        def wake():
            room.set()

        for _ in range(150):
            while not limiter.try_acquire(wake):
                room.clear()
                limiter.notify_when_free(wake)
                if dice.random() < 0.2:
                    limiter.cancel_wait(wake)
                elif not room.wait(HANG_S):
                    return
            with lock:
                inside += 1
                most = max(most, inside)
            with lock:
                inside -= 1
            limiter.release()
            if dice.random() < 0.2:
                limiter.notify_when_free(wake)
                limiter.cancel_wait(wake)
        ended.append(seed)

    ended = []
    threads = [threading.Thread(target=work, args=(seed,), daemon=True) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * HANG_S)
    assert sorted(ended) == list(range(8))
    assert most <= 3
    assert (limiter.in_use, limiter.waiting) == (0, 0)


GUESTS = st.integers(0, 4)


class Crowd(RuleBasedStateMachine):
    """Five guests do whatever they may; a queue on paper says who must have been woken."""

    def __init__(self):
        super().__init__()
        self.limit = 2
        self.limiter, self.guests = Limiter(self.limit), [Guest() for _ in range(5)]
        self.inside, self.queue, self.kept, self.calls = 0, [], set(), [0] * 5

    def give_out(self):
        """Keep what is free for whoever is first."""
        while self.queue and self.inside + len(self.kept) < self.limit:
            guest = self.queue.pop(0)
            self.kept.add(guest)
            self.calls[guest] += 1

    @rule(guest=GUESTS)
    def enter(self, guest):
        expected = guest in self.kept or self.inside + len(self.kept) < self.limit
        assert (self.limiter.try_acquire(self.guests[guest].wake) is not None) == expected
        if expected:
            self.kept.discard(guest)
            self.inside += 1

    @precondition(lambda self: self.inside)
    @rule()
    def leave(self):
        self.limiter.release()
        self.inside -= 1
        self.give_out()

    @rule(guest=GUESTS)
    def ask(self, guest):
        self.limiter.notify_when_free(self.guests[guest].wake)
        if guest not in self.kept and guest not in self.queue:
            self.queue.append(guest)
        self.give_out()

    @rule(guest=GUESTS)
    def give_up(self, guest):
        self.limiter.cancel_wait(self.guests[guest].wake)
        self.kept.discard(guest)
        if guest in self.queue:
            self.queue.remove(guest)
        self.give_out()

    @invariant()
    def agrees(self):
        assert [guest.woken for guest in self.guests] == self.calls
        assert self.limiter.in_use == self.inside <= self.limit
        assert self.limiter.waiting == len(self.queue) + len(self.kept)
        assert not self.queue or self.inside + len(self.kept) == self.limit, "a place is free and somebody waits"


TestCrowd = Crowd.TestCase


# A block behind it


async def test_a_block_is_passed_one_at_a_time_and_in_order():
    """Who comes later waits; who gives up, waiting or inside, leaves the place to the next."""
    limiter, inside, seen = Limiter(1), [], []

    async def enter(name, scope):
        with scope:
            async with limiter.hold():
                inside.append(name)
                assert len(inside) == 1
                seen.append(name)
                try:
                    await anyio.sleep_forever()
                finally:
                    inside.remove(name)

    scopes = {name: anyio.CancelScope() for name in "abcd"}
    async with anyio.create_task_group() as tasks:
        for name, scope in scopes.items():
            tasks.start_soon(enter, name, scope)
            await anyio.wait_all_tasks_blocked()
        for name, then in (("b", ["a"]), ("a", ["c"]), ("c", ["d"]), ("d", [])):
            scopes[name].cancel()
            while inside != then:  # noqa: ASYNC110  it comes by way of the loop's own door
                await anyio.sleep(0.001)
    assert seen == ["a", "c", "d"]
    assert (limiter.in_use, limiter.waiting) == (0, 0)


# Rates


class Clock:
    """A clock that is moved by hand."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_a_minute_has_so_many_starts():
    """A start counts for a minute, also when its permit was given back."""
    clock, guest = Clock(), Guest()
    limiter = Limiter(per_minute=2, monotonic=clock)
    for _ in range(2):
        assert limiter.try_acquire(guest.wake)
        limiter.release()
        clock.now += 10
    assert not limiter.try_acquire(guest.wake)
    limiter.notify_when_free(guest.wake)
    assert guest.woken == 1, "the first in line is told that it has to look at the time"
    assert limiter.next_check_s(guest.wake) == MINUTE_S - 20
    clock.now = 100.0 + MINUTE_S
    assert limiter.try_acquire(guest.wake)
    assert (limiter.statistics().recent, limiter.in_use, limiter.waiting) == (2, 1, 0)


def test_only_the_first_in_line_looks_at_the_time():
    """When it gives up, the next one is told to look."""
    clock, guests = Clock(), [Guest(), Guest()]
    limiter = Limiter(per_minute=1, monotonic=clock)
    assert limiter.try_acquire(Guest().wake)
    limiter.release()
    for guest in guests:
        limiter.notify_when_free(guest.wake)
    assert [guest.woken for guest in guests] == [1, 0]
    assert limiter.next_check_s(guests[1].wake) == float("inf")
    limiter.cancel_wait(guests[0].wake)
    assert [guest.woken for guest in guests] == [1, 1]
    assert limiter.next_check_s(guests[1].wake) == MINUTE_S


def test_a_waiter_that_comes_back_is_told_again():
    """A `wake` that was the first in line before is woken when it is that again."""
    clock, guest, other = Clock(), Guest(), Guest()
    limiter = Limiter(1, per_minute=1, monotonic=clock)
    assert limiter.try_acquire(other.wake)
    limiter.release()
    limiter.notify_when_free(guest.wake)
    clock.now += MINUTE_S
    assert limiter.try_acquire(guest.wake)
    limiter.notify_when_free(other.wake)  # waits for the permit, and for the minute
    limiter.notify_when_free(guest.wake)
    limiter.release()
    limiter.cancel_wait(other.wake)
    assert guest.woken == 3, "told to look at the time, woken for its slot, told to look again"


def test_a_slot_that_was_reserved_and_not_taken_counts_for_no_rate():
    """A waiter that is cancelled after it was woken leaves the minute as it was."""
    clock, guest = Clock(), Guest()
    limiter = Limiter(1, per_minute=2, cost_per_minute=10, monotonic=clock)
    assert limiter.try_acquire(Guest().wake, 3)
    limiter.notify_when_free(guest.wake, 4)
    limiter.release()
    limiter.cancel_wait(guest.wake)
    statistics = limiter.statistics()
    assert (statistics.in_use, statistics.recent, statistics.recent_cost) == (0, 1, 3)


def test_a_permit_that_has_not_begun_counts_in_every_minute():
    """Its minute begins when its use does; one whose use never begins is taken back."""
    clock, guest = Clock(), Guest()
    limiter = Limiter(per_minute=2, cost_per_minute=100, monotonic=clock)
    used, unused = (limiter.try_acquire(guest.wake, 10, start=False) for _ in range(2))
    clock.now += 5 * MINUTE_S
    assert not limiter.try_acquire(guest.wake)
    assert limiter.statistics().recent == 2
    limiter.start(used)
    clock.now += 10
    assert not limiter.try_acquire(guest.wake)
    limiter.cancel(unused)
    assert (limiter.statistics().recent, limiter.statistics().recent_cost, limiter.in_use) == (1, 10, 1)
    assert limiter.try_acquire(guest.wake)
    assert not limiter.try_acquire(guest.wake)
    clock.now += MINUTE_S - 10
    assert limiter.try_acquire(guest.wake)


def test_a_waiter_may_look_again_when_what_has_not_begun_could_be_over():
    """As long as its use does not begin, the wait is a minute each time."""
    clock, guest = Clock(), Guest()
    limiter = Limiter(per_minute=1, monotonic=clock)
    permit = limiter.try_acquire(Guest().wake, start=False)
    limiter.notify_when_free(guest.wake)
    clock.now += 40
    assert limiter.next_check_s(guest.wake) == MINUTE_S
    limiter.start(permit)
    clock.now += 10
    assert limiter.next_check_s(guest.wake) == MINUTE_S - 10


def test_a_reserved_slot_counts_from_when_its_waiter_comes():
    """And not from the moment in which it was woken."""
    clock, guest = Clock(), Guest()
    limiter = Limiter(1, per_minute=1, monotonic=clock)
    assert limiter.try_acquire(Guest().wake)
    limiter.notify_when_free(guest.wake)
    clock.now += MINUTE_S
    limiter.release()
    clock.now += 30
    assert limiter.try_acquire(guest.wake)
    limiter.release()
    clock.now += 59
    assert not limiter.try_acquire(guest.wake)


def test_each_run_in_virtual_time_has_minutes_of_its_own():
    """A rate goes by virtual time there; before and after, it knows nothing of the starts in it."""
    limiter = Limiter(per_minute=2)

    async def play():
        starts = []
        for _ in range(5):
            async with limiter.hold():
                starts.append(anyio.current_time())
        return starts

    for _ in range(2):
        assert run_virtual(play) == pytest.approx([0, 0, 60, 60, 120])
        assert limiter.statistics().recent == 0
        for _ in range(2):
            assert limiter.try_acquire(Guest().wake)
            limiter.release()
        assert not limiter.try_acquire(Guest().wake)


# Closed event loops


@pytest.mark.parametrize("closed", ["while it waits", "once it is woken"])
@pytest.mark.parametrize("behind", [False, True])
def test_a_waiter_whose_loop_was_closed_keeps_no_slot(closed, behind):
    """The slot goes to those who can come, also as long as the waiter's task is referenced."""
    limiter = full()
    loop = asyncio.new_event_loop()
    waiting = loop.create_task(limiter.acquire())
    loop.run_until_complete(asyncio.sleep(0.01))
    second = Guest()
    if behind:
        limiter.notify_when_free(second.wake)
    if closed == "while it waits":
        loop.close()
    limiter.release()
    loop.close()
    limiter.notify_when_free(second.wake)
    assert limiter.try_acquire(second.wake)
    assert (limiter.in_use, limiter.waiting) == (1, 0)
    assert not waiting.done()


async def test_a_wait_has_its_end():
    """`acquire` gives up after `max_wait_s`, and leaves the line."""
    limiter = Limiter(1)
    assert await limiter.acquire()
    assert await limiter.acquire(max_wait_s=0.01) is None
    assert (limiter.in_use, limiter.waiting) == (1, 0)
    limiter.release()
    assert await limiter.acquire(max_wait_s=20.0)
