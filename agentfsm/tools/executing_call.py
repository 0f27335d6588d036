"""The tool call whose function is executing in a task or thread, for the runs that the function starts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from itertools import count
from typing import TYPE_CHECKING, Any, Final, TypeVar

import attrs

from agentfsm._lib.concurrency import drive
from agentfsm.core.errors import MisuseError
from agentfsm.core.header import WHAT_IF
from agentfsm.core.labels import EFFECT_LABELS, Label, LabelSource, join_labels
from agentfsm.core.run_facts import list_brought_labels
from agentfsm.core.run_ids import build_inner_id

if TYPE_CHECKING:
    from agentfsm.core.header import Header
    from agentfsm.core.messages import ToolCall
    from agentfsm.core.run import Run
    from agentfsm.ports.store import Store

T = TypeVar("T")


@attrs.define(eq=False, repr=False, kw_only=True)
class ExecutingCall:
    """An attempt at a call of a run, as the runs see it that the function of the tool starts."""

    run: Run[Any]
    """The run, as it was when the attempt began."""

    call: ToolCall
    """The call."""

    takeover: bool = False
    """Whether the run was taken over from another worker, so that the runs of its calls are, too."""

    own_labels: Callable[[], tuple[Label, ...]]
    """Function that returns the labels that the call has brought in so far."""

    on_labels: Callable[[tuple[Label, ...]], None]
    """Callback for labels of runs that the function has read; called from any thread."""

    store: Store | None = None
    """Store of the run, for records beside it; None if the call has none."""

    is_over: bool = False
    """Whether the function has ended. Tasks that it left behind are then outside of the call."""

    _numbers: Iterator[int] = attrs.field(factory=lambda: count(1), init=False)
    """Numbers of the runs that the attempt starts."""

    @property
    def caller(self) -> str:
        """The run and the call, as `Header.caller` has them."""
        return f"{self.run.id}/{self.call.id}"

    @property
    def labels(self) -> Mapping[Label, LabelSource]:
        """Labels of the data that the function may have: those of the run, and those that the call has brought in."""
        added = {
            label: LabelSource(label=label, run_id=self.run.id, call_id=self.call.id, name=self.call.name)
            for label in self.own_labels()
        }
        return {**added, **self.run.labels}

    def next_run_id(self) -> str:
        """Return the id of the next run that the attempt starts; equal in each attempt. May be called in any thread."""
        return build_inner_id(self.run.id, self.call, next(self._numbers))

    def add_run_labels(self, run: Run[Any]) -> None:
        """Add the labels of a run that the function has read to those of the call."""
        if added := list_brought_labels(run, self.run.labels):
            self.on_labels(added)


# The call whose function runs in this context; None outside of calls, and while a run is executed within one.
executing_call: Final[ContextVar[ExecutingCall | None]] = ContextVar("executing_call", default=None)

# The header of the run that withholds calls and for which this context executes; None outside of such runs. Validators,
# guards, instructions and other functions of an agent are no calls, and runs that they start withhold theirs as well.
withholding_run: Final[ContextVar[Header | None]] = ContextVar("withholding_run", default=None)


@contextmanager
def reach_nothing(header: Header) -> Iterator[None]:
    """Refuse the runs that functions of an agent start meanwhile, because they are called to try the agent.

    Args:
        header: Header of the run with which it is tried.
    """
    token = withholding_run.set(attrs.evolve(header, purpose=WHAT_IF, withhold=True))
    try:
        yield
    finally:
        withholding_run.reset(token)


def check_withheld(header: Header, *, is_recorded: bool = False) -> None:
    """Check that a run may be executed or created here, which withholds no calls.

    Args:
        header: Header of the run.
        is_recorded: Whether the run is in a recorded world.

    Raises:
        MisuseError: if this context executes for a run without effects, and that run would have some.
    """
    own = withholding_run.get()
    if own is None:
        return
    if own.purpose == WHAT_IF and not is_recorded:
        raise MisuseError(
            "what-if runs and upgrade checks reach nothing outside: "
            "no function of the agent can start or execute a run here"
        )
    if not header.withhold:
        raise MisuseError(
            f"run {own.id!r} withholds calls, and run {header.id!r} would make them: no function of the agent can "
            "execute or fork it here"
        )


def current_call() -> ExecutingCall | None:
    """Return the call whose function is executing in this task or thread; None if there is none."""
    call = executing_call.get()
    return None if call is None or call.is_over else call


def list_passed_labels() -> tuple[Label, ...]:
    """Return the labels of a text that the function of a call gives to another run; empty outside of calls.

    They are those of the data that the function may have, and `user_data`, since the text is not in the user's own
    words. Tasks that the function left behind have them, too.
    """
    call = executing_call.get()
    return () if call is None else join_labels(call.labels.keys() - EFFECT_LABELS, (Label.USER_DATA,))


def outside_calls(work: Awaitable[T], header: Header) -> Awaitable[T]:
    """Return an awaitable for work of the engine: no run that starts in it is one of the function of a call.

    Args:
        work: The work.
        header: Header of the run that it is for.
    """
    if executing_call.get() is None and not header.withhold:
        return work
    context = copy_context()
    context.run(executing_call.set, None)
    if header.withhold:
        context.run(withholding_run.set, header)
    return drive(work, context=context)


def report_read_run(run: Run[Any]) -> None:
    """Add the labels of a run to those of the executing call, because the function of its tool can read the run.

    The run of a sub-agent reports its labels in the result of its call.
    """
    call = current_call()
    if call is not None and run.header.parent != call.run.id:
        call.add_run_labels(run)
