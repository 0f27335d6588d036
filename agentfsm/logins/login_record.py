"""Everything that is stored of one user's login at one server, as JSON in a `TokenStore`."""

from __future__ import annotations

import json
from typing import Any

import attrs

from agentfsm.core.value import Value
from agentfsm.logins.errors import TokenStoreError


@attrs.frozen(kw_only=True)
class Attempt(Value):
    """A link that was given to a user, and what is needed when the browser returns."""

    state_hash: str
    """SHA-256 of the state, which is only in the link."""

    verifier: str = attrs.field(repr=False)
    """Secret of PKCE, which is never in a link."""

    redirect_url: str
    run_id: str
    call_id: str
    expires_at: float
    token_url: str
    revocation_url: str
    issuer: str
    names_issuer: bool
    client_id: str
    client_secret: str = attrs.field(repr=False)
    """Secret of a client that has registered itself; that of the settings is not stored."""

    sends_form: bool = False
    outcome: str = ""
    """"granted" or "declined" once the browser has returned, so that the page can be loaded again; else empty."""


@attrs.frozen(kw_only=True)
class LoginRecord(Value):
    """Login of one user at one server."""

    server: str
    tenant: str | None = None
    user: str | None = None
    access_token: str = attrs.field(default="", repr=False)
    """Access token, or API key. Empty: there is no login."""

    refresh_token: str = attrs.field(default="", repr=False)
    expires_at: float | None = None
    """Unix time at which the access token expires. None: unknown."""

    scope: str = ""
    token_url: str = ""
    revocation_url: str = ""
    client_id: str = ""
    client_secret: str = attrs.field(default="", repr=False)
    sends_form: bool = False
    """Whether the secret of the client is sent in the form, and not by HTTP Basic."""

    attempts: tuple[Attempt, ...] = ()
    """Links that have not expired, oldest first."""

    def to_json(self) -> str:
        """Return the record as text."""
        return json.dumps(attrs.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> LoginRecord:
        """Return the record of a text.

        Raises:
            TokenStoreError: when it is not a record.
        """
        try:
            found: dict[str, Any] = json.loads(text)
            attempts = tuple([Attempt(**each) for each in found.pop("attempts")])
            return cls(**found, attempts=attempts)
        except (ValueError, TypeError, KeyError, AttributeError):
            raise TokenStoreError("a stored login cannot be parsed: remove it, and log in again") from None
