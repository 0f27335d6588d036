"""The machine: six states, one table, one lookup.

An agent is a loop that can be stopped at any arrow. OBSERVE reads the inbox. THINK asks the model. ACT runs the calls
that the model chose. REFLECT decides whether to continue, accept or stop. DONE and ERROR are final. The loop is Boyd's
observe-orient-decide-act, plus the reflection that a language model needs, because it does not see the effects of its
actions by itself.

The table has all arrows, and no guards, callbacks or wildcards: if an outcome can differ, there are two events, and the
code that saw the outcome chose one. A missing pair is an illegal transition, and the error names the events that the
state accepts. Self-arrows record facts that do not change the state: a retry, the start of a call, an approval. A wait
is not a state but an effect (see `effects`), so a run can wait in any state and the table stays small.

`next_state` is the only function that returns the next State.
"""

from __future__ import annotations

from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING

from agentfsm.core import events as e
from agentfsm.core.errors import IllegalTransitionError

if TYPE_CHECKING:
    from collections.abc import Mapping


class State(StrEnum):
    """State of a run."""

    OBSERVE = "observe"
    THINK = "think"
    ACT = "act"
    REFLECT = "reflect"
    DONE = "done"
    ERROR = "error"


# fmt: off
TABLE: Mapping[State, Mapping[type[e.Event], State]] = MappingProxyType({
    State.OBSERVE: MappingProxyType({
        e.Observed:      State.THINK,
        e.ChildReported: State.OBSERVE,
        e.Paused:        State.OBSERVE,
        e.Resumed:       State.OBSERVE,
        e.LimitReached:  State.THINK,
        e.Failed:        State.ERROR,
    }),
    State.THINK: MappingProxyType({
        e.ToolsChosen:   State.ACT,
        e.AnswerGiven:   State.DONE,
        e.AnswerDrafted: State.REFLECT,
        e.ModelFaltered: State.THINK,
        e.AttemptFailed: State.THINK,
        e.Compacted:     State.THINK,
        e.ToolsOffered:  State.THINK,
        e.Reminded:      State.THINK,
        e.Recalled:      State.THINK,
        e.Planned:       State.ACT,
        e.StepsReady:    State.ACT,
        e.PlanDropped:   State.THINK,
        e.ChildReported: State.THINK,
        e.Paused:        State.THINK,
        e.Resumed:       State.THINK,
        e.LimitReached:  State.THINK,
        e.Failed:        State.ERROR,
    }),
    State.ACT: MappingProxyType({
        e.Guarded:       State.ACT,
        e.ToolStarted:   State.ACT,
        e.ToolCutOff:    State.ACT,
        e.ToolFinished:  State.ACT,
        e.ToolLost:      State.ACT,
        e.ToolPaused:    State.ACT,
        e.InputGiven:    State.ACT,
        e.ApprovalAsked: State.ACT,
        e.ApprovalGiven: State.ACT,
        e.StepsReady:    State.ACT,
        e.AttemptFailed: State.ACT,
        e.ToolsReturned: State.REFLECT,
        e.ChildReported: State.ACT,
        e.Paused:        State.ACT,
        e.Resumed:       State.ACT,
        e.LimitReached:  State.THINK,
        e.Failed:        State.ERROR,
    }),
    State.REFLECT: MappingProxyType({
        e.Judged:        State.REFLECT,
        e.AttemptFailed: State.REFLECT,
        e.Continued:     State.OBSERVE,
        e.Accepted:      State.DONE,
        e.ChildReported: State.REFLECT,
        e.Paused:        State.REFLECT,
        e.Resumed:       State.REFLECT,
        e.LimitReached:  State.THINK,
        e.Failed:        State.ERROR,
    }),
    State.DONE: MappingProxyType({}),
    State.ERROR: MappingProxyType({}),
})
"""Transition table: for each state, the events that are valid in it, with the next state."""
# fmt: on

START = State.OBSERVE


def next_state(state: State, event: e.Event) -> State:
    """Return the state after the event, from the table.

    Raises:
        IllegalTransitionError: if the state does not accept the event.
    """
    row = TABLE[state]
    try:
        return row[type(event)]
    except KeyError:
        takes = tuple(kind.__name__ for kind in row)
        raise IllegalTransitionError(state, type(event).__name__, takes) from None


def _arrows() -> list[tuple[State, State, list[str]]]:
    """Return (from, to, events) for each arrow, in the order of the table."""
    arrows: dict[tuple[State, State], list[str]] = {}
    for state, row in TABLE.items():
        for event, target in row.items():
            arrows.setdefault((state, target), []).append(event.__name__)
    return [(source, target, events) for (source, target), events in arrows.items()]


def mermaid() -> str:
    """Return the table as a Mermaid state diagram."""
    lines = ["stateDiagram-v2", f"    [*] --> {START.upper()}"]
    lines += [f"    {s.upper()} --> {t.upper()}: {', '.join(events)}" for s, t, events in _arrows()]
    lines += [f"    {state.upper()} --> [*]" for state, row in TABLE.items() if not row]
    return "\n".join(lines)


def dot() -> str:
    """Return the table in the DOT language of Graphviz."""
    lines = ["digraph agentfsm {", "    rankdir=LR"]
    lines += [f"    {state.upper()} [shape={'box' if row else 'doublecircle'}]" for state, row in TABLE.items()]
    lines += [f'    {s.upper()} -> {t.upper()} [label="{", ".join(events)}"]' for s, t, events in _arrows()]
    return "\n".join([*lines, "}"])


def text() -> str:
    """Return the table as aligned text, one line for each arrow."""
    rows = [(s.upper(), t.upper(), ", ".join(events)) for s, t, events in _arrows()]
    lines = [f"{source:<8} -> {target:<8} {events}" for source, target, events in rows]
    return "\n".join([*lines, *(f"{state.upper():<8}    (final)" for state, row in TABLE.items() if not row)])
