"""A thread that outlived its call keeps its place, until it ends."""

import threading

import anyio
import pytest

from agentfsm.engine.queue.places import Place, left_behind
from agentfsm.engine.queue.plan import NOTHING


@pytest.fixture
def owner():
    return object()


def place(name="save"):
    return Place(name, NOTHING)


def test_a_place_is_kept_until_its_thread_ends(owner):
    """Each for itself, and each owner's for itself: one that ends leaves the others where they are."""
    first, second, other = place("first"), place("second"), place("other")
    first.keep_for(owner)
    second.keep_for(owner)
    other.keep_for(other_owner := object())
    assert left_behind(owner) == (first, second)
    first.give_up()
    assert left_behind(owner) == (second,)
    second.give_up()
    assert left_behind(owner) == ()
    assert left_behind(other_owner) == (other,)
    other.give_up()
    assert left_behind(other_owner) == ()


def test_a_thread_that_ended_first_leaves_nothing_behind(owner):
    """It may end between the cancellation of its call and the word of it."""
    ended = place()
    ended.give_up()
    assert ended.is_free
    ended.keep_for(owner)
    assert left_behind(owner) == ()


def test_who_waits_is_woken_once():
    """When the thread ends, or at once where it has."""
    taken, woken = place(), []
    taken.when_free(lambda: woken.append("early"))
    assert woken == []
    taken.give_up()
    assert woken == ["early"]
    taken.when_free(lambda: woken.append("late"))
    assert woken == ["early", "late"]


@pytest.mark.parametrize("ended", [True, False])
async def test_a_coroutine_waits_for_the_thread(ended):
    """Also where the thread has ended before it asks."""
    taken = place()
    thread = threading.Timer(0 if ended else 0.01, taken.give_up)
    thread.start()
    if ended:
        await anyio.to_thread.run_sync(thread.join)
    with anyio.fail_after(60):
        await taken.given_up()
    assert taken.is_free
