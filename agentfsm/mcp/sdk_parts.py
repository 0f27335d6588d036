"""Private parts of the SDK that this package needs. A version without one of them is refused with a clear error."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from agentfsm.core.errors import MisuseError


def find_part(owner: Any, name: str) -> Any:
    """Return a private part of an object or a class of the SDK.

    Raises:
        MisuseError: when this version of the SDK does not have it.
    """
    try:
        return getattr(owner, name)
    except AttributeError:
        kind = owner.__name__ if isinstance(owner, type) else type(owner).__name__
        raise MisuseError(
            f"the installed mcp {version('mcp')} has no {kind}.{name}, which this agentfsm needs: install a newer "
            "agentfsm, or mcp 2.3"
        ) from None
