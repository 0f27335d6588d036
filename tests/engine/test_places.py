"""A thread that outlived its call keeps its place, until it ends."""

import threading

import anyio
import pytest

from agentfsm.tools.queue.call_order import NO_ACCESS
from agentfsm.tools.queue.dispatch import CallThread, find_abandoned


@pytest.fixture
def owner():
    return object()


def place(name="save"):
    return CallThread(name, NO_ACCESS)


def test_a_place_is_kept_until_its_thread_ends(owner):
    """Each for itself, and each owner's for itself: one that ends leaves the others where they are."""
    first, second, other = place("first"), place("second"), place("other")
    first.mark_abandoned(owner)
    second.mark_abandoned(owner)
    other.mark_abandoned(other_owner := object())
    assert find_abandoned(owner) == (first, second)
    first.mark_ended()
    assert find_abandoned(owner) == (second,)
    second.mark_ended()
    assert find_abandoned(owner) == ()
    assert find_abandoned(other_owner) == (other,)
    other.mark_ended()
    assert find_abandoned(other_owner) == ()


def test_a_thread_that_ended_first_leaves_nothing_behind(owner):
    """It may end between the cancellation of its call and the word of it."""
    ended = place()
    ended.mark_ended()
    assert ended.has_ended
    ended.mark_abandoned(owner)
    assert find_abandoned(owner) == ()


def test_who_waits_is_woken_once():
    """When the thread ends, or at once where it has."""
    taken, woken = place(), []
    taken.on_end(lambda: woken.append("early"))
    assert woken == []
    taken.mark_ended()
    assert woken == ["early"]
    taken.on_end(lambda: woken.append("late"))
    assert woken == ["early", "late"]


@pytest.mark.parametrize("ended", [True, False])
async def test_a_coroutine_waits_for_the_thread(ended):
    """Also where the thread has ended before it asks."""
    taken = place()
    thread = threading.Timer(0 if ended else 0.01, taken.mark_ended)
    thread.start()
    if ended:
        await anyio.to_thread.run_sync(thread.join)
    with anyio.fail_after(60):
        await taken.wait_ended()
    assert taken.has_ended
