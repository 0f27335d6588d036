"""The machine: six states, one table, one lookup.

An agent is a loop that can be stopped at any arrow. OBSERVE takes in what arrived. THINK asks the model. ACT runs the
calls that it chose. REFLECT judges: go on, accept, stop. DONE and ERROR are final. The theory is the control loop of
Boyd's observe-orient-decide-act with the reflection that a language model needs, since it does not see the effect of
its acts by itself.

The table holds every arrow there is. It has no guards, no callbacks and no wildcards: where an outcome can differ,
there are two events, and the code that saw the outcome chose one. A pair that is missing is an illegal move, and the
error names what the state does take. Self-arrows are facts that are worth a record and change no state: a retry, a
call that began, an approval. A wait is not a state: it is an effect (see `effects`), so a run can wait wherever a
person is needed and the table stays as small as the loop.

`next_state` is the only function that yields a State.
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
    """Where a run stands."""

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
        e.Compacted:     State.THINK,
        e.ToolsOffered:  State.THINK,
        e.Paused:        State.THINK,
        e.Resumed:       State.THINK,
        e.LimitReached:  State.THINK,
        e.Failed:        State.ERROR,
    }),
    State.ACT: MappingProxyType({
        e.ToolStarted:   State.ACT,
        e.ToolCutOff:    State.ACT,
        e.ToolFinished:  State.ACT,
        e.ToolLost:      State.ACT,
        e.ToolPaused:    State.ACT,
        e.InputGiven:    State.ACT,
        e.ApprovalAsked: State.ACT,
        e.ApprovalGiven: State.ACT,
        e.ToolsReturned: State.REFLECT,
        e.Paused:        State.ACT,
        e.Resumed:       State.ACT,
        e.LimitReached:  State.THINK,
        e.Failed:        State.ERROR,
    }),
    State.REFLECT: MappingProxyType({
        e.Judged:        State.REFLECT,
        e.Continued:     State.OBSERVE,
        e.Accepted:      State.DONE,
        e.Paused:        State.REFLECT,
        e.Resumed:       State.REFLECT,
        e.LimitReached:  State.THINK,
        e.Failed:        State.ERROR,
    }),
    State.DONE: MappingProxyType({}),
    State.ERROR: MappingProxyType({}),
})
# fmt: on

START = State.OBSERVE


def next_state(state: State, event: e.Event) -> State:
    """Follow the one arrow from the state that the event names.

    Raises:
        IllegalTransitionError: when there is none.
    """
    row = TABLE[state]
    try:
        return row[type(event)]
    except KeyError:
        takes = tuple(kind.__name__ for kind in row)
        raise IllegalTransitionError(state, type(event).__name__, takes) from None
