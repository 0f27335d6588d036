"""Settings of OAuth for one remote server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, TypeVar, get_args
from urllib.parse import urlsplit

import attrs

from agentfsm.core.errors import MisuseError
from agentfsm.core.validation import NAME, ValueRule, require_choice, shorten_repr
from agentfsm.core.value import Value
from agentfsm.logins.token_store import TokenStore

T = TypeVar("T")

Grant = Literal["authorization_code", "client_credentials"]

_MAX_PORT: Final = 65_535
_PORT: Final = ValueRule(
    fits=lambda value: type(value) is int and 0 <= value <= _MAX_PORT, wanted=f"a port from 1 to {_MAX_PORT}, or 0"
)
_METADATA_URL: Final = ValueRule(
    fits=lambda value: (
        isinstance(value, str) and value.startswith("https://") and urlsplit(value).path not in {"", "/"}
    ),
    wanted="an https:// URL with a path",
)
_URL: Final = ValueRule(
    fits=lambda value: isinstance(value, str) and value.startswith(("https://", "http://")), wanted="a URL"
)
_SCOPES: Final = ValueRule(
    fits=lambda value: isinstance(value, tuple) and all(isinstance(each, str) and each for each in value),
    wanted="a list of scopes",
)


def _freeze(scopes: Sequence[str]) -> Sequence[str]:
    return scopes if isinstance(scopes, str) else tuple(scopes)


@attrs.frozen(kw_only=True)
class OAuth(Value):
    """OAuth settings for one server: `MCPServer.http(url, auth=OAuth(scopes=["read"]))`.

    As `auth=` it is the login of the program: `auth="oauth"` means the defaults, a person logs in with a browser, and
    this program registers itself. As `login=` each user of a run has a login of their own.
    """

    grant: Grant = attrs.field(default="authorization_code", validator=require_choice(*get_args(Grant)))
    """Method of getting a token. "authorization_code": a person logs in with a browser, once; "client_credentials":
    this program has credentials of its own, and needs no person.
    """

    client_id: str | None = attrs.field(default=None, validator=NAME.or_none())
    """Id of a client that is registered at the authorization server. None: the program registers itself."""

    client_secret: str | None = attrs.field(default=None, validator=NAME.or_none(), repr=False)
    """Secret of the registered client. None: it has none. It needs `issuer`."""

    private_key: str | None = attrs.field(default=None, validator=NAME.or_none(), repr=False)
    """Private key in PEM format, with which "client_credentials" signs instead of sending a secret."""

    key_algorithm: str = attrs.field(default="RS256", validator=NAME)
    """Algorithm of `private_key`, as in JSON Web Algorithms: "RS256", "ES256"."""

    issuer: str | None = attrs.field(default=None, validator=NAME.or_none())
    """Issuer URL of the authorization server that knows the client. A secret goes only there: otherwise the MCP server
    would decide who gets it.
    """

    scopes: Sequence[str] = attrs.field(default=(), validator=_SCOPES, converter=_freeze)
    """Scopes to request. Empty: those that the server asks for."""

    callback_port: int = attrs.field(default=0, validator=_PORT)
    """Port of this machine to which the browser returns: http://127.0.0.1:PORT/callback. 0: any free port; a registered
    client may need the one that was registered.
    """

    client_metadata_url: str | None = attrs.field(default=None, validator=_METADATA_URL.or_none())
    """URL of a document that describes this client, used as its id where the server supports it. None: there is none.
    """

    authorization_url: str | None = attrs.field(default=None, validator=_URL.or_none())
    """For `login=`: page of the authorization server where the user agrees, if the server does not describe itself.
    It comes with `token_url` and `client_id`. None: the endpoints are found by RFC 9728 and RFC 8414.
    """

    token_url: str | None = attrs.field(default=None, validator=_URL.or_none())
    """For `login=`: endpoint that gives tokens for codes. It comes with `authorization_url`."""

    revocation_url: str | None = attrs.field(default=None, validator=_URL.or_none())
    """For `login=`: endpoint that revokes tokens (RFC 7009). It comes with `authorization_url`."""

    redirect_url: str | None = attrs.field(default=None, validator=_URL.or_none())
    """For `login=`: URL of the gateway to which the browser returns, "https://agents.example.org/v1/logins/callback".
    The waits of runs then have a link. None: a link is made when the user asks for one.
    """

    tokens: TokenStore | None = attrs.field(default=None, repr=False)
    """Storage for the tokens. None: the keyring if the package `keyring` is installed, or else
    ~/.agentfsm/mcp-tokens.json.
    """

    def __attrs_post_init__(self) -> None:
        has_secret = self.client_secret is not None or self.private_key is not None
        if (self.authorization_url is None) != (self.token_url is None):
            raise MisuseError("OAuth(authorization_url=...) needs token_url=, and the other way round")
        if self.authorization_url is None and self.revocation_url is not None:
            raise MisuseError("OAuth(revocation_url=...) needs authorization_url= and token_url=")
        if self.authorization_url is not None and self.client_id is None:
            raise MisuseError("OAuth(authorization_url=...) needs client_id=, the client that is registered there")
        is_known = self.issuer is not None or self.token_url is not None
        if has_secret and (self.client_id is None or not is_known):
            raise MisuseError(
                "OAuth(client_secret=...) needs client_id= and issuer=, the authorization server that knows the client"
            )
        if self.grant == "client_credentials" and (self.client_secret is None) == (self.private_key is None):
            raise MisuseError('OAuth(grant="client_credentials") needs either client_secret= or private_key=')
        if self.grant == "authorization_code" and self.private_key is not None:
            raise MisuseError('OAuth(private_key=...) needs grant="client_credentials"')

    def storage_key(self, url: str) -> str:
        """Return the key of the tokens for a server's URL."""
        return url if self.client_id is None else f"{url}#{self.client_id}"


def parse_auth(auth: T | OAuth | str) -> T | OAuth:
    """Return the settings that "oauth" stands for; anything else is returned unchanged.

    Raises:
        MisuseError: when it is another text.
    """
    if auth == "oauth":
        return OAuth()
    if isinstance(auth, str):
        raise MisuseError(f'auth={shorten_repr(auth)}: give "oauth", an OAuth(...), or an httpx2.Auth')
    return auth
