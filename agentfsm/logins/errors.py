"""Errors of logins."""

from __future__ import annotations

from agentfsm.core.errors import RefusedError, ToolError


class TokenStoreError(ToolError):
    """The stored tokens cannot be read or written."""


class LoginError(ToolError):
    """A login cannot be made or used; the message has no secrets."""


class LoginUnavailableError(RefusedError, LoginError):
    """An authorization server cannot be reached or has trouble, so no request was sent with its token."""
