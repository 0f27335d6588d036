"""Facts about runs for the application's log: the stdlib logger `agentfsm`, written through structlog.

The library is silent until the application configures logging. Nothing secret is a fact: prompts, arguments, results
and keys stay out, unless an agent is made with `log_prompts=True`, and then what looks like a secret is masked. Below
a line may stand the traceback of what a tool has raised, whose last line is in that tool's own words.
"""

from __future__ import annotations

import logging
import re
from functools import cache
from importlib import import_module
from typing import Any, Final

import attrs

from agentfsm.core.errors import ensure_printable
from agentfsm.core.value import Value

LOGGER: Final = logging.getLogger("agentfsm")
_NULL_HANDLER: Final = logging.NullHandler()
LOGGER.addHandler(_NULL_HANDLER)

_SECRET_PATTERN: Final = re.compile(
    r"(?i)\b(?:sk|pk|rk|ghp|gho|xox[abp])[-_][\w-]{8,}|\bbearer\s+\S+|[\w-]*(?:key|password|secret|token)\W{1,4}\S+",
)
# Characters of a prompt in the log: enough to recognise it.
MAX_PROMPT_CHARS: Final = 2_000


@cache
def _load_structlog() -> Any:
    """Return structlog over the stdlib logger; loaded when it is needed, since its import takes 0.05 to 0.2 s."""
    structlog = import_module("structlog")
    logfmt = structlog.processors.LogfmtRenderer(key_order=["event"])

    def arguments(logger: Any, method: str, facts: dict[str, Any]) -> tuple[tuple[str], dict[str, Any]]:
        """Return what the stdlib's logger is called with: a line, and for formatters of another mind the facts."""
        error = facts.pop("exc_info", None)
        traced = None if error is None else ensure_printable(error)
        return (logfmt(logger, method, dict(facts)),), {"exc_info": traced, "extra": {"facts": facts}}

    return structlog.wrap_logger(LOGGER, processors=[arguments], wrapper_class=structlog.stdlib.BoundLogger)


def _is_enabled(level: int) -> bool:
    """Whether a line reaches a handler of the application's; the one here only keeps the stdlib from complaining."""
    if not LOGGER.isEnabledFor(level):
        return False
    handlers = LOGGER.handlers + logging.root.handlers if LOGGER.propagate else LOGGER.handlers
    return any(handler is not _NULL_HANDLER for handler in handlers)


def preload() -> None:
    """Load what writes lines, if every turn will write one: later its import would hold up the event loop."""
    if _is_enabled(logging.INFO):
        _load_structlog()


@attrs.frozen
class RunLogger(Value):
    """A log whose lines all say which run they speak of."""

    run_id: str
    agent: str
    is_info_enabled: bool = attrs.field(init=False, factory=lambda: _is_enabled(logging.INFO))
    """Whether anybody wants to know of turns and calls; asked once, before their facts are put together."""

    def debug(self, event: str, **facts: object) -> None:
        """Log what only somebody looking for a fault wants."""
        self._write(logging.DEBUG, event, facts)

    def info(self, event: str, **facts: object) -> None:
        """Log a turn, a call, an end."""
        self._write(logging.INFO, event, facts)

    def warning(self, event: str, **facts: object) -> None:
        """Log a retry, a downgrade, something unusual; with an exception as `exc_info`, its traceback stands below."""
        self._write(logging.WARNING, event, facts)

    def error(self, event: str, **facts: object) -> None:
        """Log a failure."""
        self._write(logging.ERROR, event, facts)

    def _write(self, level: int, event: str, facts: dict[str, object]) -> None:
        if _is_enabled(level):
            _load_structlog().log(level, event, run=self.run_id, agent=self.agent, **facts)


def redact(text: str) -> str:
    """Return the beginning of the text, with what looks like a secret masked."""
    return _SECRET_PATTERN.sub("[redacted]", text[:MAX_PROMPT_CHARS])
