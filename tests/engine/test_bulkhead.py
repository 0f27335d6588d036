"""A bulkhead: never too many at once, nobody is forgotten, nobody is passed by."""

import random
import threading

import anyio
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from agentfsm.core.errors import MisuseError
from agentfsm.tools.concurrency_limits import Bulkhead, hold_slot

# A guard against hanging, never a bound that a test relies on.
HANG_S = 20.0


class Guest:
    """Somebody who waits, and notes how often he was woken."""

    def __init__(self):
        self.woken = 0

    def wake(self):
        self.woken += 1


def full(limit=1):
    """Make a bulkhead with all places taken."""
    bulkhead = Bulkhead(limit)
    for _ in range(limit):
        assert bulkhead.try_acquire(Guest().wake)
    return bulkhead


@pytest.mark.parametrize("limit", [0, -1])
def test_no_place_at_all_is_misuse(limit):
    """A limit below 1 would let no call go, and says so."""
    with pytest.raises(MisuseError, match=rf"{limit} would let no call go: give 1 or more"):
        Bulkhead(limit)


def test_only_so_many_enter():
    """As many enter as there are places, and one more for each that leaves."""
    bulkhead = full(2)
    assert not bulkhead.try_acquire(Guest().wake)
    assert bulkhead.in_use == 2
    bulkhead.release()
    assert bulkhead.in_use == 1
    assert bulkhead.try_acquire(Guest().wake)


def test_leaving_twice_is_misuse():
    """A place that is given back twice would let one too many in, so it is refused."""
    bulkhead = full()
    bulkhead.release()
    with pytest.raises(MisuseError, match="given back twice"):
        bulkhead.release()


def test_each_place_wakes_one_in_order():
    """Each freed place wakes one, once, in the order of their coming."""
    bulkhead, guests = full(2), [Guest() for _ in range(3)]
    for guest in guests:
        bulkhead.notify_when_free(guest.wake)
    assert bulkhead.waiting == 3
    bulkhead.release()
    assert [guest.woken for guest in guests] == [1, 0, 0]
    bulkhead.release()
    assert [guest.woken for guest in guests] == [1, 1, 0]
    assert bulkhead.try_acquire(guests[0].wake)
    bulkhead.release()
    assert [guest.woken for guest in guests] == [1, 1, 1]
    assert (bulkhead.in_use, bulkhead.waiting) == (0, 2)


def test_nobody_slips_in_before_who_was_woken():
    """A place is kept for who was woken until he comes, so a busy run cannot take it from him again and again."""
    bulkhead, waiting, busy = full(), Guest(), Guest()
    bulkhead.notify_when_free(waiting.wake)
    bulkhead.release()
    assert not bulkhead.try_acquire(busy.wake)
    assert bulkhead.try_acquire(waiting.wake)


def test_who_gives_up_before_being_woken_is_passed_over():
    """Who took back his wish is not woken, and the next one is."""
    bulkhead, gone, next_one = full(), Guest(), Guest()
    bulkhead.notify_when_free(gone.wake)
    bulkhead.notify_when_free(next_one.wake)
    bulkhead.cancel_wait(gone.wake)
    bulkhead.release()
    assert (gone.woken, next_one.woken) == (0, 1)


def test_who_gives_up_after_being_woken_wakes_the_next():
    """Who was woken and does not come (his run was cancelled) hands the place on."""
    bulkhead, gone, next_one = full(), Guest(), Guest()
    bulkhead.notify_when_free(gone.wake)
    bulkhead.notify_when_free(next_one.wake)
    bulkhead.release()
    bulkhead.cancel_wait(gone.wake)
    assert (gone.woken, next_one.woken) == (1, 1)
    assert bulkhead.try_acquire(next_one.wake)


def test_taking_back_what_was_never_asked_changes_nothing():
    """A clean-up may say `off` for whatever it has, also after it has entered."""
    bulkhead, guest = Bulkhead(1), Guest()
    bulkhead.cancel_wait(guest.wake)
    assert bulkhead.try_acquire(guest.wake)
    bulkhead.cancel_wait(guest.wake)
    assert (bulkhead.in_use, bulkhead.waiting) == (1, 0)


def test_asking_when_there_is_room_wakes_at_once():
    """A place that became free between `try_acquire` and `notify_when_free` is not overlooked."""
    bulkhead, guest = full(), Guest()
    assert not bulkhead.try_acquire(guest.wake)
    bulkhead.release()
    bulkhead.notify_when_free(guest.wake)
    assert guest.woken == 1
    assert bulkhead.try_acquire(guest.wake)


def test_asking_again_keeps_the_rank():
    """Who asks again neither waits twice nor loses his rank, nor is woken twice."""
    bulkhead, first, second = full(), Guest(), Guest()
    for guest in (first, second, first):
        bulkhead.notify_when_free(guest.wake)
    assert bulkhead.waiting == 2
    bulkhead.release()
    bulkhead.notify_when_free(first.wake)
    assert (first.woken, second.woken, bulkhead.waiting) == (1, 0, 2)


def test_who_is_woken_may_enter_within_the_call():
    """The callback is called outside the lock: it may enter, leave and ask by itself."""
    bulkhead, seen = full(), []

    def wake():
        seen.append(bulkhead.try_acquire(wake))
        bulkhead.release()

    bulkhead.notify_when_free(wake)
    bulkhead.release()
    assert seen == [True]
    assert (bulkhead.in_use, bulkhead.waiting) == (0, 0)


def test_many_threads_all_come_through():
    """Threads that enter, wait, are woken and give up: never more than the limit, and each comes to its end."""
    bulkhead, inside, most, lock = Bulkhead(3), 0, 0, threading.Lock()

    def work(seed):
        nonlocal inside, most
        dice, room = random.Random(seed), threading.Event()

        def wake():
            room.set()

        for _ in range(150):
            while not bulkhead.try_acquire(wake):
                room.clear()
                bulkhead.notify_when_free(wake)
                if dice.random() < 0.2:
                    bulkhead.cancel_wait(wake)
                elif not room.wait(HANG_S):
                    return
            with lock:
                inside += 1
                most = max(most, inside)
            with lock:
                inside -= 1
            bulkhead.release()
            if dice.random() < 0.2:
                bulkhead.notify_when_free(wake)
                bulkhead.cancel_wait(wake)
        ended.append(seed)

    ended = []
    threads = [threading.Thread(target=work, args=(seed,), daemon=True) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * HANG_S)
    assert sorted(ended) == list(range(8))
    assert most <= 3
    assert (bulkhead.in_use, bulkhead.waiting) == (0, 0)


GUESTS = st.integers(0, 4)


class Crowd(RuleBasedStateMachine):
    """Five guests do whatever they may; a queue on paper says who must have been woken."""

    def __init__(self):
        super().__init__()
        self.limit = 2
        self.bulkhead, self.guests = Bulkhead(self.limit), [Guest() for _ in range(5)]
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
        assert self.bulkhead.try_acquire(self.guests[guest].wake) == expected
        if expected:
            self.kept.discard(guest)
            self.inside += 1

    @precondition(lambda self: self.inside)
    @rule()
    def leave(self):
        self.bulkhead.release()
        self.inside -= 1
        self.give_out()

    @rule(guest=GUESTS)
    def ask(self, guest):
        self.bulkhead.notify_when_free(self.guests[guest].wake)
        if guest not in self.kept and guest not in self.queue:
            self.queue.append(guest)
        self.give_out()

    @rule(guest=GUESTS)
    def give_up(self, guest):
        self.bulkhead.cancel_wait(self.guests[guest].wake)
        self.kept.discard(guest)
        if guest in self.queue:
            self.queue.remove(guest)
        self.give_out()

    @invariant()
    def agrees(self):
        assert [guest.woken for guest in self.guests] == self.calls
        assert self.bulkhead.in_use == self.inside <= self.limit
        assert self.bulkhead.waiting == len(self.queue) + len(self.kept)
        assert not self.queue or self.inside + len(self.kept) == self.limit, "a place is free and somebody waits"


TestCrowd = Crowd.TestCase


# A block behind it


async def test_a_block_is_passed_one_at_a_time_and_in_order():
    """Who comes later waits; who gives up, waiting or inside, leaves the place to the next."""
    bulkhead, inside, seen = Bulkhead(1), [], []

    async def enter(name, scope):
        with scope:
            async with hold_slot(bulkhead):
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
    assert (bulkhead.in_use, bulkhead.waiting) == (0, 0)
