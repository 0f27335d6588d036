"""Structured log of runs: the stdlib logger `agentfsm`, written with structlog.

The library logs nothing until the application configures logging. Until then, the notice of a record is written to
stderr: that a model cannot be reached, and mistakes that change what an agent does. Prompts, arguments, results and
keys are left out, unless an agent is made with `log_prompts=True`; then likely secrets and personal data are masked. A
line may be followed by the traceback of a tool's exception, whose last line is the tool's text.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

import attrs

from agentfsm.core import events as e
from agentfsm.core.errors import ensure_printable
from agentfsm.core.machine import State
from agentfsm.core.messages import ErrorType
from agentfsm.core.pending import PendingKind
from agentfsm.core.value import Value

if TYPE_CHECKING:
    from agentfsm.core.header import Header
    from agentfsm.core.run import Run

LOGGER: Final = logging.getLogger("agentfsm")


class _NoticeHandler(logging.Handler):
    """Writes the `notice` of a record, which loggers below `agentfsm` pass in `extra`."""

    def emit(self, record: logging.LogRecord) -> None:
        if notice := getattr(record, "notice", ""):
            _write_notice(notice)


_NOTICES: Final = _NoticeHandler()
LOGGER.addHandler(_NOTICES)

# Maximum of characters of a prompt in the log: enough to recognise it.
MAX_PROMPT_CHARS: Final = 2_000
# Events whose lines are warnings or errors. Each is the last of its append.
WARNED_EVENTS: Final = frozenset({e.Failed, e.LimitReached, e.Paused})
# Name of the line about the end of a run.
RUN_ENDED: Final = "run_ended"


def _render_facts(logger: Any, method: str, facts: dict[str, Any]) -> str:
    """Return the facts of a line as text, the name of the event first."""
    render = import_module("structlog").processors.LogfmtRenderer(key_order=["event"])
    return str(render(logger, method, facts))


@cache
def _load_structlog() -> Any:
    """Return structlog over the stdlib logger. It is imported on first use, which takes 0.05 to 0.2 s."""
    structlog = import_module("structlog")

    def arguments(logger: Any, method: str, facts: dict[str, Any]) -> tuple[tuple[str], dict[str, Any]]:
        """Return the arguments for the stdlib logger: the line, and the facts in `extra` for other formatters."""
        error = facts.pop("exc_info", None)
        traced = None if error is None else ensure_printable(error)
        return (_render_facts(logger, method, dict(facts)),), {"exc_info": traced, "extra": {"facts": facts}}

    return structlog.wrap_logger(LOGGER, processors=[arguments], wrapper_class=structlog.stdlib.BoundLogger)


def is_logged(level: int) -> bool:
    """Return whether a handler of the application receives lines of this level.

    Ignores the handler of this module.
    """
    if not LOGGER.isEnabledFor(level):
        return False
    handlers = LOGGER.handlers + logging.root.handlers if LOGGER.propagate else LOGGER.handlers
    return any(handler is not _NOTICES for handler in handlers)


def _write_notice(text: str) -> None:
    """Write a warning to stderr if the application has not configured logging.

    It takes `logging.lastResort`, as the stdlib does for a logger without handlers.
    """
    if LOGGER.isEnabledFor(logging.WARNING) and not is_logged(logging.WARNING) and logging.lastResort is not None:
        logging.lastResort.handle(LOGGER.makeRecord(LOGGER.name, logging.WARNING, "", 0, text, (), None))


def preload() -> None:
    """Import structlog if every turn will be logged. A later import would block the event loop."""
    if is_logged(logging.INFO):
        _load_structlog()


@attrs.frozen(kw_only=True)
class LogLine(Value):
    """A line of the log that was made of an event of a journal."""

    at: float
    """Time of the event, seconds since 1970."""

    level: int
    """Level, as the module `logging` numbers it."""

    event: str
    """Name of the line, such as "turn"."""

    facts: Mapping[str, object]
    """Facts of the line, by name."""

    def format(self, header: Header) -> str:
        """Return the line as it stands in the log of a run that is not traced."""
        return _render_facts(None, "", {"event": self.event, "run": header.id, "agent": header.agent, **self.facts})


def describe_events(run: Run[Any], events: Sequence[e.Event]) -> Iterator[LogLine]:
    """Yield the lines of the log that are about events: turns, calls, verdicts, pauses, limits, and the end.

    The engine logs them as it writes the journal, and `agentfsm logs` reads them from it.

    Args:
        run: The run after the events.
        events: Events of one append.
    """
    for event in events:
        match event:
            case e.ToolsChosen(usage=usage) | e.AnswerGiven(usage=usage) | e.AnswerDrafted(usage=usage):
                if getattr(event, "answered_from", None) is None:
                    calls = len(event.message.calls)
                    tokens = {"input": usage.input_tokens, "output": usage.output_tokens}
                    yield _build_line(event, logging.INFO, "turn", turn=run.turn, calls=calls, **tokens)
            case e.ToolFinished(result=result):
                # A name invented by the model is not logged.
                tool = "(unknown)" if result.error_type is ErrorType.UNKNOWN_TOOL else result.tool
                facts = {"tool": tool, "outcome": result.outcome.value, "wall_s": result.duration_s}
                yield _build_line(event, logging.INFO, "call", call=result.call_id, **facts)
            case e.Judged(verdict=verdict):
                yield _build_line(event, logging.INFO, "judged", turn=run.turn, action=verdict.action.value)
            case e.LimitReached(reason=reason):
                yield _build_line(event, logging.WARNING, "limit_reached", reason=reason.value, turn=run.turn)
            case e.Paused(kind=PendingKind.CRASH, message=message):
                yield _build_line(event, logging.ERROR, "run_paused", reason=message)
    if run.is_over and events:
        level = logging.INFO if run.state is State.DONE else logging.ERROR
        yield _build_line(events[-1], level, RUN_ENDED, **_add_up(run))


def _build_line(event: e.Event, level: int, name: str, **facts: object) -> LogLine:
    return LogLine(at=event.at, level=level, event=name, facts=facts)


def _add_up(run: Run[Any]) -> dict[str, object]:
    """Return the totals of a run that is over, those of its sub-agents included."""
    header, usage = run.header, run.usage
    wall_s = run.updated_at - header.created_at
    outcomes = Counter(each.outcome.value for each in run.calls)
    return {
        "reason": str(run.stop_reason),
        "turns": run.turn,
        "input": usage.input_tokens,
        "output": usage.output_tokens,
        "cached": usage.cached_tokens,
        "cost_usd": usage.cost_usd,
        "estimated": usage.estimated,
        "unpriced": usage.unpriced,
        "wall_s": round(wall_s, 3),
        "waited_s": round(max(0.0, wall_s - run.duration_s), 3),
        **{f"calls_{outcome}": number for outcome, number in sorted(outcomes.items())},
        "version": header.agent_version,
        "release": header.release,
        "purpose": header.purpose or "production",
        **({"parent": header.parent} if header.parent is not None else {}),
    }


@attrs.frozen
class RunLogger(Value):
    """Logger of one run; each line has the run's id and agent, and the trace's id if the run is traced."""

    run_id: str
    """Id of the run, logged as `run`."""

    agent: str
    """Name of the agent, logged as `agent`."""

    trace_id: str = ""
    """Id of the trace that the run belongs to, logged as `trace_id`; empty if it is not traced."""

    is_info_enabled: bool = attrs.field(init=False, factory=lambda: is_logged(logging.INFO))
    """Whether turns and calls are logged; checked once, before their facts are collected."""

    def debug(self, event: str, **facts: object) -> None:
        """Log details for debugging."""
        self._write(logging.DEBUG, event, facts)

    def info(self, event: str, **facts: object) -> None:
        """Log a turn, a call or an end."""
        self._write(logging.INFO, event, facts)

    def warning(self, event: str, *, notice: str = "", **facts: object) -> None:
        """Log a retry, a downgrade or an unusual event.

        With an exception as `exc_info`, its traceback follows the line.

        Args:
            event: Name of the event.
            notice: Sentence that goes to stderr if the application has not configured logging; empty for none.
            facts: Facts of the event.
        """
        self._write(logging.WARNING, event, facts)
        if notice:
            _write_notice(notice)

    def error(self, event: str, **facts: object) -> None:
        """Log a failure."""
        self._write(logging.ERROR, event, facts)

    def write(self, line: LogLine) -> None:
        """Log a line that was made of an event."""
        self._write(line.level, line.event, {**line.facts})

    def _write(self, level: int, event: str, facts: dict[str, object]) -> None:
        if is_logged(level):
            traced = {"trace_id": self.trace_id} if self.trace_id else {}
            _load_structlog().log(level, event, run=self.run_id, agent=self.agent, **traced, **facts)


def redact(text: str) -> str:
    """Return the beginning of the text, with personal data and likely secrets masked."""
    # Masked before it is cut, because half of a number has no check digit.
    from agentfsm.core.sensitive_text import mask_sensitive  # noqa: PLC0415  few runs log prompts

    return mask_sensitive(text[: 2 * MAX_PROMPT_CHARS])[:MAX_PROMPT_CHARS]
