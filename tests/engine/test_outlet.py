"""A listener may raise, be slow, hang or be async: the run does not notice, and what it missed is counted."""

import functools
import gc
import logging
import os
import subprocess
import sys
import threading
import weakref

import anyio
import pytest

from agentfsm import MisuseError
from agentfsm.streaming import callbacks as module
from agentfsm.streaming.callbacks import MAX_BUFFERED_EVENTS, CallbackDispatcher
from agentfsm.streaming.log import LOGGER
from agentfsm.testing import run_virtual
from tests.support.checks import HANG_S, settled


class Listener:
    """Notes what it is told, and holds its thread while its gate is shut."""

    def __init__(self, *, shut=False):
        self.seen = []
        self.entered, self.gate = threading.Event(), threading.Event()
        if not shut:
            self.gate.set()

    def __call__(self, event):
        self.entered.set()
        assert self.gate.wait(HANG_S)
        self.seen.append(event)


@pytest.fixture
def held():
    """A listener that hangs until the test is over."""
    listener = Listener(shut=True)
    yield listener
    listener.gate.set()


@pytest.fixture
def patient(monkeypatch):
    """`drain` gives up only when something is wrong."""
    monkeypatch.setattr(module, "DRAIN_TIMEOUT_S", HANG_S)


@pytest.fixture(autouse=True)
def _no_thread_left(monkeypatch):
    """Threads end as soon as they have nothing to do, and none is left."""
    monkeypatch.setattr(module, "IDLE_TIMEOUT_S", 0.0)
    yield
    settled(lambda: not listening())


def listening():
    """The threads that listeners are called in."""
    return [thread for thread in threading.enumerate() if thread.name == "agentfsm-listener"]


@pytest.mark.usefixtures("patient")
async def test_all_events_in_order():
    """Everything put is handed over, in order, in another thread, and `drain` returns when it was."""
    threads = set()
    listener = Listener()

    def listen(event):
        threads.add(threading.current_thread().name)
        listener(event)

    outlet = CallbackDispatcher(listen)
    for number in range(MAX_BUFFERED_EVENTS):
        outlet.put(number)
    await outlet.drain()
    assert listener.seen == list(range(MAX_BUFFERED_EVENTS))
    assert threads == {"agentfsm-listener"}
    assert outlet.missed == 0


@pytest.mark.usefixtures("patient")
async def test_an_idle_thread_ends_and_another_begins():
    """A thread that has waited in vain ends; the next event starts another, and none is lost."""
    listener = Listener()
    outlet = CallbackDispatcher(listener)
    for number in range(20):
        outlet.put(number)
        if number % 2:
            settled(lambda: not listening())
    await outlet.drain()
    assert listener.seen == list(range(20))


def test_one_thread_serves_many_events(monkeypatch):
    """While events come, they are told by one thread and not by one each."""
    monkeypatch.setattr(module, "IDLE_TIMEOUT_S", HANG_S)
    threads = []
    outlet = CallbackDispatcher(lambda _event: threads.append(threading.get_ident()))
    for number in range(1, 6):
        outlet.put(number)
        settled(lambda number=number: len(threads) == number)
    monkeypatch.setattr(module, "IDLE_TIMEOUT_S", 0.0)
    outlet.put(6)
    assert len(set(threads)) == 1


def test_a_hanging_listener_blocks_nobody(held):
    """When its buffer is full, new events are dropped and counted; those that were taken come in order."""
    outlet = CallbackDispatcher(held)
    outlet.put(-1)
    assert held.entered.wait(HANG_S)
    for number in range(MAX_BUFFERED_EVENTS + 7):
        outlet.put(number)
    assert outlet.missed == 7
    held.gate.set()
    settled(lambda: len(held.seen) == MAX_BUFFERED_EVENTS + 1)
    assert held.seen == list(range(-1, MAX_BUFFERED_EVENTS))
    assert outlet.missed == 7


async def test_drain_gives_up_on_a_hanging_listener(monkeypatch, held):
    """The end of a run waits for a listener that hangs, but not for ever, and again not the next time."""
    monkeypatch.setattr(module, "DRAIN_TIMEOUT_S", 0.01)
    outlet = CallbackDispatcher(held)
    outlet.put(1)
    await outlet.drain()
    await outlet.drain()
    assert held.seen == []
    assert outlet._drain_waiters == []


@pytest.mark.usefixtures("patient")
async def test_drain_waits_for_what_came_before_it_only():
    """A drain ends when the events before it are told, though later ones hang."""
    gate = threading.Event()
    second = threading.Event()

    def listen(event):
        if event == "later":
            second.set()
            assert gate.wait(HANG_S)

    outlet = CallbackDispatcher(listen)
    first = Listener(shut=True)
    outlet.callback = lambda event: first(event) if event == "before" else listen(event)
    outlet.put("before")
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(outlet.drain)
            await anyio.wait_all_tasks_blocked()
            outlet.put("later")
            first.gate.set()
        assert first.seen == ["before"]
        assert second.wait(HANG_S)
    finally:
        gate.set()


async def test_a_cancelled_drain_leaves_nothing(monkeypatch, held):
    """A cancelled drain ends at once, and leaves neither a timer nor an entry."""
    monkeypatch.setattr(module, "DRAIN_TIMEOUT_S", 10 * HANG_S)
    before = threading.active_count()
    outlet = CallbackDispatcher(held)
    outlet.put(1)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(outlet.drain)
        await anyio.wait_all_tasks_blocked()
        assert any(isinstance(thread, threading.Timer) for thread in threading.enumerate())
        tasks.cancel_scope.cancel()
    settled(lambda: not any(isinstance(thread, threading.Timer) for thread in threading.enumerate()))
    assert outlet._drain_waiters == []
    held.gate.set()
    settled(lambda: threading.active_count() <= before)


async def test_drain_without_events_costs_nothing(monkeypatch):
    """When everything is told already, no timer is made and nothing waited for."""
    listener = Listener()
    outlet = CallbackDispatcher(listener)
    await outlet.drain()
    outlet.put(1)
    settled(lambda: outlet._delivered == 1)
    monkeypatch.setattr(threading, "Timer", None)
    await outlet.drain()
    assert listener.seen == [1]


@pytest.mark.usefixtures("patient")
def test_drain_does_not_give_up_when_virtual_time_flies(held):
    """Hours of virtual time pass while a listener works, and `drain` waits for it all the same."""

    async def play():
        outlet = CallbackDispatcher(held)
        outlet.put(1)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(outlet.drain)
            await anyio.sleep(7_200)
            assert held.seen == []
            held.gate.set()
        assert held.seen == [1]

    run_virtual(play)


def test_drain_gives_up_when_virtual_time_stands(monkeypatch, held):
    """Where nothing moves the virtual clock, the real one still ends the wait."""
    monkeypatch.setattr(module, "DRAIN_TIMEOUT_S", 0.01)

    async def play():
        outlet = CallbackDispatcher(held)
        outlet.put(1)
        begin = anyio.current_time()
        await outlet.drain()
        assert anyio.current_time() == begin
        assert held.seen == []

    run_virtual(play)


@pytest.mark.usefixtures("patient")
async def test_a_raising_listener_is_counted_and_logged_once_per_type(caplog):
    """Each error is counted, the first of its type is logged, and the listener is told the next event."""
    seen = []

    def listen(event):
        seen.append(event)
        raise (ValueError if event % 2 else KeyError)(event)

    outlet = CallbackDispatcher(listen)
    with caplog.at_level(logging.ERROR, LOGGER.name):
        for number in range(10):
            outlet.put(number)
        await outlet.drain()
    assert seen == list(range(10))
    assert outlet.missed == 10
    assert [record.exc_info[0] for record in caplog.records] == [KeyError, ValueError]


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, GeneratorExit])
async def test_a_listener_cannot_end_its_thread(error):
    """Also after `sys.exit()` in a listener the next event is told."""
    seen = []

    def listen(event):
        seen.append(event)
        raise error

    outlet = CallbackDispatcher(listen)
    outlet.put(1)
    outlet.put(2)
    await outlet.drain()
    assert (seen, outlet.missed) == ([1, 2], 2)


@pytest.mark.usefixtures("patient")
async def test_a_log_that_raises_does_no_harm():
    """When the application's own log handler raises too, the next event is told all the same."""

    class Broken(logging.Handler):
        def emit(self, record):
            raise OSError("the disk is full")

    def listen(_event):
        raise ValueError

    handler = Broken()
    LOGGER.addHandler(handler)
    try:
        outlet = CallbackDispatcher(listen)
        outlet.put(1)
        outlet.put(2)
        await outlet.drain()
        assert outlet.missed == 2
    finally:
        LOGGER.removeHandler(handler)


async def coroutine(_event):
    """Be awaited by nobody."""


class Async:
    """Its instances are async functions in all but name."""

    async def __call__(self, _event):
        """Be awaited by nobody."""


async def generator(_event):
    """Be iterated by nobody."""
    yield


@pytest.mark.parametrize("callback", [coroutine, Async(), functools.partial(coroutine, 1), generator, Async().__call__])
def test_an_async_listener_is_misuse(callback):
    """Nobody would await it, so it is refused, with a word on the stream."""
    with pytest.raises(MisuseError, match=r"async with agent\.stream"):
        CallbackDispatcher(callback)


def test_what_cannot_be_called_is_misuse():
    """A listener that is no function is refused by name."""
    with pytest.raises(MisuseError, match="'print' cannot be called"):
        CallbackDispatcher("print")


@pytest.mark.usefixtures("patient")
async def test_a_function_that_returns_a_coroutine(caplog):
    """Where only the call shows that a listener is async, it counts as one that raised, and leaves nothing."""
    outlet = CallbackDispatcher(lambda event: coroutine(event))  # noqa: PLW0108  a lambda is the case at hand
    with caplog.at_level(logging.ERROR, LOGGER.name):
        outlet.put(1)
        await outlet.drain()
    gc.collect()
    assert outlet.missed == 1
    assert caplog.records[0].exc_info[0] is MisuseError


@pytest.mark.usefixtures("patient")
async def test_many_threads_put_at_once(monkeypatch):
    """Thousands of events from several threads: each is told or counted, in the order of its thread."""
    monkeypatch.setattr(module, "MAX_BUFFERED_EVENTS", 100)
    seen = []
    outlet = CallbackDispatcher(seen.append)

    def put(thread):
        for number in range(1_000):
            outlet.put((thread, number))

    threads = [threading.Thread(target=put, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
    await outlet.drain()
    assert len(seen) + outlet.missed == 6_000
    for number in range(6):
        own = [event for event in seen if event[0] == number]
        assert own == sorted(own)


@pytest.mark.usefixtures("patient")
async def test_a_listener_may_put_events_itself():
    """A listener that puts an event does not wait for itself."""
    seen = []

    def listen(event):
        seen.append(event)
        if event < 3:
            outlet.put(event + 1)

    outlet = CallbackDispatcher(listen)
    outlet.put(1)
    settled(lambda: len(seen) == 3)
    await outlet.drain()
    assert seen == [1, 2, 3]


def test_an_outlet_and_its_events_are_let_go():
    """When its thread has ended, nothing keeps an outlet nor an event alive."""

    class Event:
        pass

    outlet, event = CallbackDispatcher(lambda _event: None), Event()
    refs = weakref.ref(outlet), weakref.ref(event)
    outlet.put(event)
    del outlet, event
    settled(lambda: gc.collect() >= 0 and all(ref() is None for ref in refs))


def test_an_event_is_let_go_while_the_thread_idles(monkeypatch):
    """A thread that waits for the next event does not keep the last one alive."""
    monkeypatch.setattr(module, "IDLE_TIMEOUT_S", HANG_S)

    class Event:
        pass

    outlet, event = CallbackDispatcher(lambda _event: None), Event()
    ref = weakref.ref(event)
    outlet.put(event)
    del event
    settled(lambda: ref() is None)
    assert listening()
    monkeypatch.setattr(module, "IDLE_TIMEOUT_S", 0.0)
    outlet.put(None)


async def test_no_thread_to_be_had(monkeypatch, held):
    """Where the system gives no more threads, events are dropped and counted, and `drain` does not wait."""
    outlet = CallbackDispatcher(held)
    outlet.put(1)
    assert held.entered.wait(HANG_S)
    other = CallbackDispatcher(held)

    def refuse(_thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        other.put(2)
        other.put(3)
        await outlet.drain()
    assert other.missed == 2
    assert held.seen == []
    other.put(4)
    held.gate.set()
    settled(lambda: sorted(held.seen) == [1, 4])


def ran(program):
    """What a program of its own printed; it must come to its end by itself."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_hanging_listener_does_not_hold_the_process():
    """A process ends though its listener hangs and an idle thread waits."""
    program = """
import threading
from agentfsm.streaming.callbacks import CallbackDispatcher
entered = threading.Event()
def hang(event):
    entered.set()
    threading.Event().wait()
quick, hanging = CallbackDispatcher(print), CallbackDispatcher(hang)
quick.put("told")
hanging.put(1)
assert entered.wait(20)
"""
    assert ran(program).strip() in {"told", ""}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_after_a_fork_nothing_hangs():
    """In the child of a fork the thread is missing and the lock may be held: it begins anew, without old events."""
    program = """
import os, threading, warnings, anyio
from agentfsm.streaming import callbacks as module
from agentfsm.streaming.callbacks import CallbackDispatcher
module.DRAIN_TIMEOUT_S = 1_000
warnings.simplefilter("ignore")
entered, gate, seen = threading.Event(), threading.Event(), []
def listen(event):
    seen.append(event)
    if event == "first":
        entered.set()
        gate.wait(20)
outlet = CallbackDispatcher(listen)
outlet.put("first")
outlet.put("old")
assert entered.wait(20)
holding, held = threading.Event(), threading.Event()
def hold():
    with outlet._changed:
        holding.set()
        held.wait(20)
threading.Thread(target=hold, daemon=True).start()
assert holding.wait(20)
if (child := os.fork()) == 0:
    seen.clear()
    outlet.put("new")
    anyio.run(outlet.drain)
    print(seen, flush=True)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
held.set()
gate.set()
anyio.run(outlet.drain)
print(seen)
"""
    assert ran(program).splitlines() == ["['new']", "['first', 'old']"]
