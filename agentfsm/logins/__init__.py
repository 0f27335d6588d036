"""Logins of each user of a run at the servers of tools: OAuth and API keys, and the storage of their tokens."""

from agentfsm.logins.errors import LoginError, LoginUnavailableError, TokenStoreError
from agentfsm.logins.login import APIKey, Login, UserAuth
from agentfsm.logins.oauth_settings import OAuth
from agentfsm.logins.token_store import KeyringTokens, MemoryTokens, TokenFile, TokenStore
from agentfsm.ports.tool_login import LoginLink
from agentfsm.tools.run_context import LoginRequired

__all__ = [
    "APIKey",
    "KeyringTokens",
    "Login",
    "LoginError",
    "LoginLink",
    "LoginRequired",
    "LoginUnavailableError",
    "MemoryTokens",
    "OAuth",
    "TokenFile",
    "TokenStore",
    "TokenStoreError",
    "UserAuth",
]
