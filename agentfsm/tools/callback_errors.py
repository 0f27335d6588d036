"""Faults in the functions with which a user declares something of a tool: what counts instead, and a word in the log.

Such a function is called in the middle of a run, which goes on without it. What counts then is the safe side: a person
is asked, the call is refused or runs alone. Its author learns of it from the log, with the traceback.
"""

from __future__ import annotations

import logging

from agentfsm.core.errors import ensure_printable

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
