"""Log failures of the functions in tool options, such as `validate` or `requires_approval`.

These functions are called in the middle of a run, which continues without them. The engine then takes the safe choice:
it asks a person, refuses the call or runs it alone. The log has the traceback for the author.
"""

from __future__ import annotations

import logging

from agentfsm.core.errors import ensure_printable

_log = logging.getLogger("agentfsm.tools")


def log_callback_error(callback_name: str, tool: str, consequence: str, error: BaseException) -> None:
    """Log that a function has failed.

    Args:
        callback_name: The name of the option, for example "requires_approval".
        tool: The name of the tool.
        consequence: The consequence, for example "a person is asked".
        error: The exception raised by the function.
    """
    _log.warning(
        "%s of the tool %r has failed, so %s", callback_name, tool, consequence, exc_info=ensure_printable(error)
    )
