"""Limits of a user or a tenant, as values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import attrs

from agentfsm.core.validation import COUNT
from agentfsm.core.value import Value


@attrs.frozen(kw_only=True)
class RateLimits(Value):
    """Limits of a user, or of all users of a tenant together. A field that is None limits nothing.

    Raises:
        MisuseError: when a limit is not a whole number of 1 or more.
    """

    requests: int | None = attrs.field(default=None, validator=COUNT.or_none())
    """Requests in 60 s, of every operation; an open event stream counts once."""

    open_requests: int | None = attrs.field(default=None, validator=COUNT.or_none())
    """Requests that one process answers at once: event streams, requests that wait for a run, and all others. None:
    128 of a user, and any number of a tenant.
    """

    tokens: int | None = attrs.field(default=None, validator=COUNT.or_none())
    """Tokens in 60 s. Those of a run count when it ends or waits; from the limit on, no run is started."""

    runs: int | None = attrs.field(default=None, validator=COUNT.or_none())
    """Runs at once that are not over, runs of sub-agents included. A run keeps its place while it waits for a person or
    is paused, so that no start exceeds the limit, in whichever process, and no decision has to.
    """

    def or_else(self, other: RateLimits) -> RateLimits:
        """Return these limits, and those of the other where one is None."""
        others = attrs.asdict(other)
        own = {name: others[name] if value is None else value for name, value in attrs.asdict(self).items()}
        return RateLimits(**own)

    def and_also(self, other: RateLimits) -> RateLimits:
        """Return the smaller of each of these limits and the other's."""
        own, others = attrs.asdict(self), attrs.asdict(other)
        given = {name: [each for each in (own[name], others[name]) if each is not None] for name in own}
        return RateLimits(**{name: min(each, default=None) for name, each in given.items()})


NO_LIMITS: Final = RateLimits()


def read_limits(limits: RateLimits | Mapping[str, Any]) -> RateLimits:
    """Return limits from their form in a file of keys."""
    return RateLimits(**limits) if isinstance(limits, Mapping) else limits
