"""Faults in the functions with which a user declares something of a tool: what counts instead, and a word in the log.

Such a function is called in the middle of a run, which goes on without it. What counts then is the safe side: a person
is asked, the call is refused or runs alone. Its author learns of it from the log, with the traceback.
"""

from __future__ import annotations

import logging
import traceback

_log = logging.getLogger("agentfsm.tools")


def log_callback_error(callback_name: str, tool: str, consequence: str, error: BaseException) -> None:
    """Tell the log that a function has failed.

    Args:
        callback_name: Its place, for example "requires_approval".
        tool: The name of its tool.
        consequence: What happens now, for example "a person is asked".
        error: What it has raised.
    """
    _log.warning(
        "%s of the tool %r has failed, so %s", callback_name, tool, consequence, exc_info=ensure_printable(error)
    )


def ensure_printable(error: BaseException) -> BaseException:
    """Return the error, or what stands for it where its traceback cannot be written: a handler would raise at it."""
    try:
        traceback.format_exception(error)
    except BaseException:  # noqa: BLE001  an attribute of it, or of what it comes from, can raise anything
        told = f"{type(error).__name__}, which cannot be written"
        return RuntimeError(told).with_traceback(error.__traceback__)
    return error
