"""Worker threads: what they keep in memory. Cancel scopes."""

import asyncio
import weakref
from contextlib import nullcontext

import anyio
import pytest
import trio

from agentfsm._lib.concurrency import make_scope, start_in_thread


class Lamp:
    """It can be dropped."""

    def light(self):
        """Give light."""
        return "light"

    def fail(self):
        """Give none."""
        raise ValueError("dark")


@pytest.mark.parametrize(("method", "is_kept"), [("light", False), ("fail", True)])
async def test_what_a_finished_function_belongs_to_is_dropped(method, is_kept):
    """Before its result is handed over. An error keeps it: a traceback has the frame in which it was raised."""
    lamp = Lamp()
    there = weakref.ref(lamp)
    kept = []
    job = getattr(lamp, method)
    future = start_in_thread(job, on_done=lambda: kept.append(there() is not None))
    del lamp, job
    with pytest.raises(ValueError, match="dark") if is_kept else nullcontext():
        await future.wait()
    assert kept == [is_kept]


async def test_a_scope_is_that_of_the_event_loop():
    """The short way to a cancel scope makes the same object as anyio's."""
    assert type(make_scope()) is type(anyio.CancelScope())
    with make_scope(anyio.current_time() - 1.0) as scope:
        await anyio.sleep_forever()
    assert scope.cancelled_caught


async def _find_scope() -> type:
    return type(make_scope())


def test_a_guest_of_asyncio_has_scopes_of_trio():
    """Where a loop of trio runs in one of asyncio, each has its own."""

    async def host():
        ended = asyncio.get_running_loop().create_future()
        own = type(make_scope())
        trio.lowlevel.start_guest_run(
            _find_scope,
            run_sync_soon_threadsafe=asyncio.get_running_loop().call_soon_threadsafe,
            done_callback=ended.set_result,
        )
        return own, (await ended).unwrap()

    own, found = asyncio.run(host())
    assert own.__module__.endswith("_asyncio")
    assert found.__module__.endswith("_trio")
