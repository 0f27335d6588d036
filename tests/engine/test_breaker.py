"""The breaker of a tool: closed, open, half open, and results that come too late to count."""

import threading

import attrs
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from agentfsm.tools.breaker import FAILURE_THRESHOLD, OPEN_S, Breaker, BreakerState, Ticket

# A guard against hanging, never a bound that a test relies on.
HANG_S = 20.0


def let_go(breaker, now):
    """Ask for a ticket and get one."""
    ticket = breaker.admit(now)
    assert isinstance(ticket, Ticket)
    return ticket


def opened(now=0.0):
    """Make a breaker that opened at a time."""
    breaker = Breaker()
    for _ in range(FAILURE_THRESHOLD):
        breaker.record_failure(let_go(breaker, now), now)
    return breaker


def test_failures_in_a_row_open_it():
    """The fifth failure in a row opens it, and then it says how long to wait."""
    breaker = Breaker()
    for _ in range(FAILURE_THRESHOLD):
        assert breaker.state is BreakerState.CLOSED
        breaker.record_failure(let_go(breaker, 7.0), 7.0)
    assert breaker.state == "open"
    assert breaker.admit(7.0) == OPEN_S
    assert breaker.admit(17.0) == OPEN_S - 10


def test_an_answer_between_starts_the_count_anew():
    """Four failures, an answer and four failures are no outage."""
    breaker = Breaker()
    for _ in range(2):
        for _ in range(FAILURE_THRESHOLD - 1):
            breaker.record_failure(let_go(breaker, 0.0), 0.0)
        breaker.record_success(let_go(breaker, 0.0))
    assert breaker.state is BreakerState.CLOSED


def test_a_withdrawn_call_says_nothing():
    """A cancelled call neither counts as a failure nor breaks a row of them."""
    breaker = Breaker()
    for _ in range(FAILURE_THRESHOLD - 1):
        breaker.record_failure(let_go(breaker, 0.0), 0.0)
        breaker.discard(let_go(breaker, 0.0))
    assert breaker.state is BreakerState.CLOSED
    breaker.record_failure(let_go(breaker, 0.0), 0.0)
    assert breaker.state is BreakerState.OPEN


def test_one_probe_goes_when_the_time_has_come():
    """After its time one call goes, and all others are told to wait for its end."""
    breaker = opened()
    let_go(breaker, OPEN_S)
    assert breaker.state == "half_open"
    assert breaker.admit(OPEN_S) == OPEN_S
    assert breaker.admit(OPEN_S + 20) == OPEN_S - 20


def test_the_probe_decides():
    """A probe that is answered closes the breaker for all; one that fails opens it for another while."""
    breaker = opened()
    breaker.record_failure(let_go(breaker, OPEN_S), OPEN_S + 5)
    assert breaker.state is BreakerState.OPEN
    assert breaker.admit(OPEN_S + 5) == OPEN_S
    breaker.record_success(let_go(breaker, 2 * OPEN_S + 5))
    assert breaker.state == "closed"
    for _ in range(FAILURE_THRESHOLD - 1):
        breaker.record_failure(let_go(breaker, 0.0), 0.0)
    assert breaker.state is BreakerState.CLOSED


def test_a_withdrawn_probe_gives_its_right_back():
    """When the probe was cancelled, the next call is the probe, at once, and only one."""
    breaker = opened()
    breaker.discard(let_go(breaker, OPEN_S))
    assert breaker.state is BreakerState.HALF_OPEN
    probe = let_go(breaker, OPEN_S)
    assert breaker.admit(OPEN_S) == OPEN_S
    breaker.record_success(probe)
    assert breaker.state is BreakerState.CLOSED


def test_calls_from_before_the_opening_do_not_touch_it():
    """Whatever becomes of calls that went before it opened, it stays open, no longer and no shorter."""
    breaker = Breaker()
    answered, failing, cancelled = (let_go(breaker, 0.0) for _ in range(3))
    for _ in range(FAILURE_THRESHOLD):
        breaker.record_failure(let_go(breaker, 0.0), 0.0)
    breaker.record_success(answered)
    breaker.record_failure(failing, 30.0)
    breaker.discard(cancelled)
    assert breaker.admit(30.0) == OPEN_S - 30


def test_calls_from_before_the_opening_do_not_speak_for_the_probe():
    """While a probe is under way, the ends of older calls neither close nor open it, nor give its right away."""
    breaker = Breaker()
    answered, failing, cancelled = (let_go(breaker, 0.0) for _ in range(3))
    for _ in range(FAILURE_THRESHOLD):
        breaker.record_failure(let_go(breaker, 0.0), 0.0)
    let_go(breaker, OPEN_S)
    breaker.record_success(answered)
    breaker.record_failure(failing, OPEN_S)
    breaker.discard(cancelled)
    assert breaker.state is BreakerState.HALF_OPEN
    assert breaker.admit(OPEN_S) == OPEN_S


def test_calls_that_hung_through_an_outage_do_not_open_it_again():
    """Twenty calls that time out after the service has come back say nothing of the service as it is."""
    breaker = Breaker()
    hung = [let_go(breaker, 0.0) for _ in range(20)]
    for _ in range(FAILURE_THRESHOLD):
        breaker.record_failure(let_go(breaker, 0.0), 0.0)
    breaker.record_success(let_go(breaker, OPEN_S))
    for ticket in hung:
        breaker.record_failure(ticket, 2 * OPEN_S)
    assert breaker.state is BreakerState.CLOSED
    breaker.record_failure(let_go(breaker, 2 * OPEN_S), 2 * OPEN_S)
    assert breaker.state is BreakerState.CLOSED


def test_a_lost_probe_holds_up_nobody_for_ever():
    """A probe that does not come back in its time is joined by another one."""
    breaker = opened()
    let_go(breaker, OPEN_S)
    breaker.record_success(let_go(breaker, 2 * OPEN_S))
    assert breaker.state is BreakerState.CLOSED


def test_a_slow_probe_still_counts():
    """A tool whose calls last longer than that closes its breaker all the same, though another probe has gone since."""
    breaker = opened()
    slow = let_go(breaker, OPEN_S)
    let_go(breaker, 2 * OPEN_S)
    breaker.record_success(slow)
    assert breaker.state is BreakerState.CLOSED


def test_a_probe_from_before_another_opening_does_not_touch_it():
    """Of two probes the first result decides: what becomes of the other neither closes it nor lets a call go."""
    for late in (Breaker.record_success, Breaker.discard):
        breaker = opened()
        slow = let_go(breaker, OPEN_S)
        breaker.record_failure(let_go(breaker, 2 * OPEN_S), 2 * OPEN_S)
        late(breaker, slow)
        assert breaker.admit(2 * OPEN_S) == OPEN_S


def test_time_of_another_clock():
    """A clock that is far behind, as in a test with virtual time, does not keep it open; threads that race do not."""
    assert isinstance(opened(1e6).admit(0.0), Ticket)
    assert opened(1e6).admit(1e6 - 0.001) == OPEN_S


def test_threads_get_one_probe():
    """Of many threads that ask at the same time one becomes the probe."""
    breaker = opened()
    gate, said = threading.Barrier(8), []

    def ask():
        gate.wait(HANG_S)
        said.append(breaker.admit(OPEN_S))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
    assert len(said) == 8
    assert sum(isinstance(each, Ticket) for each in said) == 1


def test_who_waited_for_the_lock_finds_it_closed():
    """A call that finds it half open, and closed when its turn has come, goes as any other."""
    breaker = opened()
    probe = let_go(breaker, OPEN_S)

    class Closing:
        """A lock behind which the probe's answer arrives first."""

        def __enter__(self):
            breaker._lock = threading.Lock()
            breaker.record_success(probe)

        def __exit__(self, *_):
            pass

    breaker._lock = Closing()
    assert let_go(breaker, OPEN_S).state is BreakerState.CLOSED


@attrs.define(eq=False)
class Call:
    """A call that was let go, as the model sees it."""

    ticket: Ticket
    period: int
    # Which one it went in; the model numbers them.


class Model(RuleBasedStateMachine):
    """Calls begin and end in any order; the breaker does what a few plain sentences say."""

    calls = Bundle("calls")

    def __init__(self):
        super().__init__()
        self.breaker, self.now = Breaker(), 1_000.0
        self.state, self.period, self.failures, self.probe_at = "closed", 0, 0, 0.0

    def move(self, state):
        """A new period begins."""
        self.state, self.period, self.failures = state, self.period + 1, 0

    @rule(seconds=st.sampled_from([0.0, 1.0, 29.5, 59.0, 60.0, 61.0]))
    def wait(self, seconds):
        self.now += seconds

    @rule(target=calls)
    def begin(self):
        said = self.breaker.admit(self.now)
        if self.state != "closed":
            if self.now < self.probe_at:
                assert said == self.probe_at - self.now
                return multiple()
            if self.state == "open":
                self.move("half_open")
            self.probe_at = self.now + 60
        assert isinstance(said, Ticket)
        return Call(said, self.period)

    @rule(call=consumes(calls))
    def succeed(self, call):
        self.breaker.record_success(call.ticket)
        if call.period == self.period:
            if self.state == "half_open":
                self.move("closed")
            self.failures = 0

    @rule(call=consumes(calls))
    def fail(self, call):
        self.breaker.record_failure(call.ticket, self.now)
        if call.period == self.period:
            self.failures += 1
            if self.state == "half_open" or self.failures == 5:
                self.move("open")
                self.probe_at = self.now + 60

    @rule(call=consumes(calls))
    def withdraw(self, call):
        self.breaker.discard(call.ticket)
        if call.period == self.period and self.state == "half_open":
            self.probe_at = self.now

    @invariant()
    def agrees(self):
        assert self.breaker.state == self.state


TestModel = Model.TestCase
