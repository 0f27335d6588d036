"""Rules over time against an oracle: formulas over finite traces (LTLf, with the past), decided by brute force.

The oracle shares nothing with the rules: it knows letters and formulas, and asks at each position by their definition.
A trace is the history of a session, with several runs and calls that are open; the rules get it call by call.
"""

from __future__ import annotations

import json
import random
from types import SimpleNamespace

import attrs
import pytest

from agentfsm import Outcome
from agentfsm.core.call_facts import CallFact
from agentfsm.core.header import Header
from agentfsm.guards import Calls, DutyRule, at_most, before, eventually, never, only_if, within
from agentfsm.ports.call_history import CallHistory, CallLog, Moment
from agentfsm.ports.guards import GuardedCall, ToolTraits

HEADER = Header(id="r", prompt=(), created_at=0.0)
TOOLS, VALUES, DAY = ("a", "b", "c"), ("x", "y"), 86_400.0


@attrs.frozen
class Letter:
    """A call in a trace: what happened, and whether it is known."""

    tool: str
    value: str
    state: str  # done, failed (it did nothing), unknown (it may have done something), open
    good: bool  # whether the result is as a rule wants it
    day: float


# The oracle: a formula is a function of a trace and a position.


def atom(tool, value, states, *, good=None):
    def holds(trace, at):
        letter = trace[at]
        same = value is None or letter.value == value
        return letter.tool == tool and same and letter.state in states and (good is None or letter.good == good)

    return holds


def no(formula):
    return lambda trace, at: not formula(trace, at)


def either(first, second):
    return lambda trace, at: first(trace, at) or second(trace, at)


def once(formula):
    return lambda trace, at: any(formula(trace, place) for place in range(at + 1))


def since(first, second):
    return lambda trace, at: any(
        second(trace, place) and all(first(trace, after) for after in range(place + 1, at + 1))
        for place in range(at + 1)
    )


def globally(formula):
    return lambda trace, at: all(formula(trace, place) for place in range(at, len(trace)))


def finally_(formula):
    return lambda trace, at: any(formula(trace, place) for place in range(at, len(trace)))


DONE, MAYBE = {"done"}, {"done", "unknown", "open"}


def wants(kind, trace, value, bound):
    """Return whether a call of `a` with that value obeys the rule, by its formula at the end of the trace."""
    at, of = len(trace), value if bound else None
    whole = [*trace, Letter("now", value, "now", good=True, day=trace[-1].day if trace else 0.0)]
    if kind == "before":
        formula = once(atom("b", of, DONE))
    elif kind == "never":
        formula = no(once(atom("b", of, MAYBE)))
    elif kind == "until":
        formula = no(since(no(atom("c", of, DONE)), atom("b", of, MAYBE)))
    elif kind == "within":
        formula = lambda trace, at: any(  # noqa: E731  a bounded once
            atom("b", of, DONE)(trace, place) and trace[at].day - trace[place].day <= 2 for place in range(at)
        )
    elif kind == "only_if":
        paid, bad = atom("b", of, DONE, good=True), either(atom("b", of, DONE, good=False), atom("b", of, MAYBE - DONE))
        formula = since(no(bad), paid)
    else:
        formula = lambda trace, _at: sum(atom("a", of, MAYBE)(trace, place) for place in range(len(trace))) < 2  # noqa: E731
    return formula(whole, at)


def is_due(trace, bound):
    """Return whether a `b` has not been followed by a done `c`, by the future: G(b -> X F c)."""
    for value in VALUES if bound else (None,):
        trigger, answer = atom("b", value, MAYBE), atom("c", value, DONE)
        later = lambda trace, at, answer=answer: at + 1 < len(trace) and finally_(answer)(trace, at + 1)  # noqa: E731
        if not globally(either(no(trigger), later))(trace, 0):
            return True
    return False


def build(kind, bound):
    same = "v" if bound else None
    return {
        "before": lambda: before("a", "b", same=same),
        "never": lambda: never("a", after="b", same=same),
        "until": lambda: never("a", after="b", until="c", same=same),
        "within": lambda: within("a", of="b", days=2, same=same),
        "only_if": lambda: only_if("a", outcome=Calls("b", result=lambda good: good), same=same),
        "at_most": lambda: at_most(2, "a", same=same),
        "eventually": lambda: eventually("c", after="b", same=same),
    }[kind]()


KINDS = ("before", "never", "until", "within", "only_if", "at_most", "eventually")
OUTCOMES = {"done": Outcome.DONE, "failed": Outcome.FAILED, "unknown": Outcome.UNKNOWN, "open": None}


def as_fact(letter, place):
    return CallFact(
        run_id="r",
        call_id=f"t{place + 1}.0",
        tool=letter.tool,
        arguments={"v": letter.value},
        outcome=OUTCOMES[letter.state],
        is_started=letter.state != "failed",
        may_have_happened=letter.state in ("unknown", "open"),
        result="true" if letter.good else "false",
        ended_at=0.0 if letter.state == "open" else letter.day * DAY,
    )


def decides(rule, trace, value, log, chance):
    """Return whether the rule permits the call; the log has the closed calls so far, some of them in another order."""
    facts = [(as_fact(letter, place), place) for place, letter in enumerate(trace)]
    known = len(log.facts)
    ended = [(fact, place) for fact, place in facts if fact.outcome is not None]
    news = ended[known:]
    chance.shuffle(news)
    for fact, place in news:
        log.add(fact, Moment(fact.ended_at, "r", place))
    beside = tuple([fact for fact, _ in facts if fact.outcome is None])
    now = (trace[-1].day if trace else 0.0) * DAY
    history = CallHistory(log=log, beside=beside, now=now, run_id="r")
    if isinstance(rule, DutyRule):
        return not rule.list_due(history)
    call = GuardedCall(
        tool=ToolTraits(name="a"),
        arguments=SimpleNamespace(v=value),
        written=json.dumps({"v": value}),
        labels={},
        counted={},
        header=HEADER,
        history=history,
    )
    return rule.decide(call) is None


def make_trace(chance):
    """Return a random trace; an open call stands at its end, since no later call is known to be later."""
    day, letters = 0.0, []
    for _ in range(chance.randrange(8)):
        day += chance.choice((0, 0, 0.5, 1, 3))
        state = chance.choices(("done", "failed", "unknown"), (6, 2, 2))[0]
        letters.append(Letter(chance.choice(TOOLS), chance.choice(VALUES), state, chance.random() < 0.6, day))
    if chance.random() < 0.3:
        letters.append(Letter(chance.choice(TOOLS), chance.choice(VALUES), "open", good=True, day=day))
    return letters


@pytest.mark.parametrize("count", [3_000, pytest.param(100_000, marks=pytest.mark.soak)])
def test_rules_decide_as_their_formulas(count):
    """Random traces, rules and orders in which the calls become known: no difference."""
    chance, permitted = random.Random(57), dict.fromkeys(KINDS, 0)
    for _ in range(count):
        kind, bound, trace = chance.choice(KINDS), chance.random() < 0.6, make_trace(chance)
        rule, log, value = build(kind, bound), CallLog(), chance.choice(VALUES)
        for end in sorted({chance.randrange(len(trace) + 1), len(trace)}):  # the second decision goes on from the first
            given = trace[:end]
            wanted = not is_due(given, bound) if kind == "eventually" else wants(kind, given, value, bound)
            assert decides(rule, given, value, log, chance) is wanted, (str(rule), value, given)
            permitted[kind] += wanted
    assert all(permitted.values())
