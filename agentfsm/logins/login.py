"""Logins of the users of runs at one server: a missing login is a wait of the call, which survives the process."""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from typing import Any, Final, NoReturn

import anyio
import attrs
import httpx2

from agentfsm._lib.newest import Newest
from agentfsm._lib.public_network import check_url
from agentfsm.core.errors import MisuseError, StoreError
from agentfsm.core.header import short_hash
from agentfsm.core.validation import STRING
from agentfsm.core.value import Value
from agentfsm.logins.errors import LoginError, TokenStoreError
from agentfsm.logins.login_record import Attempt, LoginRecord
from agentfsm.logins.oauth_client import (
    AuthorizationClient,
    Client,
    Endpoints,
    RefusedTokensError,
    is_header_text,
    new_secret,
)
from agentfsm.logins.oauth_settings import OAuth
from agentfsm.logins.token_store import TokenStore, default_tokens
from agentfsm.ports.tool_login import LoginLink
from agentfsm.tools.question_validation import MAX_KEY_CHARS
from agentfsm.tools.run_context import LoginRequired, RunContext
from agentfsm.tools.tool import ANSWER_EXPIRES_S

# Seconds before the end of a token at which it is renewed: a request takes a moment to arrive.
_EARLY_S: Final = 30.0
# Links of one user and server that are kept: each waiting call has its own.
_MAX_ATTEMPTS: Final = 100
_KEY_CHARS: Final = 40
_KEY_PREFIX: Final = "user-login-"
_CLIENT_PREFIX: Final = "login-client-"
UNAUTHORIZED: Final = 401
MAX_API_KEY_CHARS: Final = 10_000
_DENIED: Final = "access_denied"
# A secret, and the key of the login: whoever makes up another asks the token store for no key.
_STATE: Final = re.compile(rf"[\w-]+\.[0-9a-f]{{{_KEY_CHARS}}}", re.ASCII)
# Tokens of one user that were sent and may be repeated by the server: renewed ones are kept for a while.
_REMEMBERED_TOKENS: Final = 8


@attrs.frozen(kw_only=True)
class APIKey(Value):
    """Each user enters a key of their own: `build_http_tool(hosts, login=APIKey(header="X-API-Key", prefix=""))`."""

    header: str = attrs.field(default="Authorization", validator=STRING)
    """Header with the key."""

    prefix: str = attrs.field(default="Bearer ", validator=STRING)
    """Text before the key."""

    hint: str = attrs.field(default="", validator=STRING)
    """Sentence that tells the user where to find the key."""

    tokens: TokenStore | None = attrs.field(default=None, repr=False)
    """Storage for the keys. None: as for `OAuth`."""


@attrs.define(eq=False, repr=False)
class Login:
    """Logins at one server, one for each user: `@tool(login=Login("https://api.example.org", OAuth(...)))`.

    The tokens go to the origin of the server only, and stand in the token store only.
    """

    server: str
    """URL of the server: the resource of the tokens, and the name of the login in waits."""

    settings: OAuth | APIKey
    """The way in which users log in."""

    allow_private: bool = False
    """Whether the server and its authorization server may have private addresses, and use plain HTTP."""

    store: TokenStore = attrs.field(
        default=attrs.Factory(lambda self: self.settings.tokens or default_tokens(), takes_self=True), init=False
    )
    """Storage for the tokens: that of the settings, or the keyring, or ~/.agentfsm/mcp-tokens.json."""

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.settings, OAuth | APIKey):
            raise MisuseError(f"a login needs OAuth(...) or APIKey(...), not {self.settings!r}")
        if isinstance(self.settings, OAuth) and self.settings.grant != "authorization_code":
            raise MisuseError('a login of each user needs OAuth(grant="authorization_code")')
        check_url(self.server, allow_private=self.allow_private, role="a server with logins")
        if len(self.server) > MAX_KEY_CHARS:
            raise MisuseError(f"the URL of a server with logins has {MAX_KEY_CHARS} characters at most")

    def __repr__(self) -> str:
        return f"<Login {self.server}>"

    # What tools use

    async def require(self, ctx: RunContext[Any], /) -> None:
        """Check that the user of a run has a login, and renew its token if it ends.

        Raises:
            LoginRequired: when the user has to log in.
            LoginError: when the user declined, or the token cannot be renewed now.
        """
        if await self.find_token(tenant=ctx.tenant, user=ctx.user) is None:
            await self.ask(ctx)

    async def is_ready(self, *, tenant: str | None, user: str | None) -> bool:
        """Return whether the user has a login, which may have to be renewed."""
        record = await self._read(self.find_key(tenant, user))
        return record is not None and (_is_valid(record, refused="") or bool(record.refresh_token))

    def auth(self, ctx: RunContext[Any]) -> UserAuth:
        """Return the authentication of the requests of a call, for a client of httpx2."""
        return UserAuth(self, ctx)

    async def find_token(self, *, tenant: str | None, user: str | None, refused: str = "") -> str | None:
        """Return the token or key of a user, renewed if it ends; None if the user has to log in.

        Args:
            tenant: Tenant of the user.
            user: The user.
            refused: A token that the server has refused, which is then replaced.

        Raises:
            LoginUnavailableError: when the authorization server has trouble; the login is kept.
        """
        key = self.find_key(tenant, user)
        record = await self._read(key)
        if record is not None and record.access_token and not _is_valid(record, refused):
            with anyio.CancelScope(shield=True):  # a refresh token that was used must not be lost
                async with self._hold(key):
                    record = await self._read(key)
                    if record is not None and record.access_token and not _is_valid(record, refused):
                        record = await self._renew(record)
                        await self._write(key, record)
        return None if record is None else record.access_token or None

    def authorize(self, request: httpx2.Request, token: str) -> None:
        """Add a token or key to a request.

        Raises:
            LoginError: when the request goes to another server.
        """
        server = httpx2.URL(self.server)
        if (request.url.scheme, request.url.host, request.url.port) != (server.scheme, server.host, server.port):
            raise LoginError(f"the login is for {server.host}, and is not sent to {request.url.host}")
        if isinstance(self.settings, APIKey):
            request.headers[self.settings.header] = self.settings.prefix + token
        else:
            request.headers["Authorization"] = f"Bearer {token}"

    async def _renew(self, record: LoginRecord) -> LoginRecord:
        """Return the login with new tokens, or without any if the authorization server gives none any more."""
        ended = attrs.evolve(record, access_token="", refresh_token="", expires_at=None)
        if not record.refresh_token:
            return ended
        client = self._client_of(record)
        try:
            tokens = await self._authorization().refresh(record.token_url, client, record.refresh_token)
        except RefusedTokensError:
            return ended
        return attrs.evolve(
            record,
            access_token=tokens.access_token,
            refresh_token=tokens.refresh_token or record.refresh_token,
            expires_at=tokens.expires_at,
            scope=tokens.scope or record.scope,
        )

    async def ask(self, ctx: RunContext[Any]) -> NoReturn:
        """Let a call wait for the login of its user, with a link if the settings name where the browser returns.

        Raises:
            LoginRequired: always, unless the user has declined.
            LoginError: when the user has declined.
        """
        if self.server in ctx.answers and ctx.answers[self.server] is None:
            raise LoginError(f"not run: the user declined to log in to {self.server}")
        settings, url = self.settings, ""
        if isinstance(settings, APIKey):
            text = f"Enter your key for {self.server}. {settings.hint}".rstrip()
            raise LoginRequired(self.server, text, takes_key=True, state=ctx.state)
        if settings.redirect_url is not None:
            with suppress(LoginError):  # the wait needs no link now: another one is made when the user asks for it
                url = await self.begin(
                    tenant=ctx.tenant,
                    user=ctx.user,
                    run_id=ctx.run_id,
                    call_id=ctx.call_id,
                    redirect_url=settings.redirect_url,
                )
        raise LoginRequired(self.server, f"Log in to {self.server}", url=url, state=ctx.state)

    # What users do

    async def begin(
        self,
        *,
        tenant: str | None,
        user: str | None,
        run_id: str,
        call_id: str,
        redirect_url: str,
        lasts_s: float = ANSWER_EXPIRES_S,
    ) -> str:
        """Return a link with which the user logs in. It is valid once, and for this call of this run only.

        Args:
            tenant: Tenant of the user.
            user: User of the run.
            run_id: Id of the run.
            call_id: Id of the call that waits.
            redirect_url: URL to which the browser returns; it gets the answer that `complete` takes.
            lasts_s: Seconds after which the link has expired. Default: 7 days, as long as calls wait.

        Raises:
            LoginError: when the authorization server cannot be used.
        """
        client = self._authorization()
        endpoints = await client.find_endpoints()
        known = client.find_client(endpoints)
        registered = known is None
        if known is None:
            known = await self._register(client, endpoints, redirect_url)
        key = self.find_key(tenant, user)
        state, verifier = f"{new_secret()}.{key.removeprefix(_KEY_PREFIX)}", new_secret()
        attempt = Attempt(
            state_hash=_hash(state),
            verifier=verifier,
            redirect_url=redirect_url,
            run_id=run_id,
            call_id=call_id,
            expires_at=time.time() + lasts_s,
            token_url=endpoints.token_url,
            revocation_url=endpoints.revocation_url,
            issuer=endpoints.issuer,
            names_issuer=endpoints.names_issuer,
            client_id=known.client_id,
            client_secret=known.client_secret if registered else "",
            sends_form=known.sends_form,
        )
        async with self._hold(key):
            record = await self._read(key) or LoginRecord(server=self.server, tenant=tenant, user=user)
            kept = [each for each in record.attempts if each.expires_at > time.time()]
            await self._write(key, attrs.evolve(record, attempts=(*kept[-_MAX_ATTEMPTS + 1 :], attempt)))
        return client.build_authorization_url(
            endpoints, known, redirect_url=redirect_url, state=state, verifier=verifier
        )

    async def find_link(self, query: Mapping[str, str], /) -> LoginLink | None:
        """Return the link that a browser has returned from; None if it is not one of this server's."""
        found = await self._find_attempt(query.get("state", ""))
        return None if found is None else _describe(*found)

    async def complete(self, query: Mapping[str, str], /) -> LoginLink | None:
        """Complete a login with what the browser has brought back, and store the tokens.

        The same answer may be given again, as by a page that is loaded twice: its code is used once.

        Args:
            query: Parameters of the URL that the browser was sent to.

        Returns:
            The link with its outcome; None if it is not one of this server's.

        Raises:
            LoginError: when the link has expired, or the answer is not valid.
        """
        state, completed = query.get("state", ""), None
        if not _STATE.fullmatch(state):
            return None
        with anyio.CancelScope(shield=True):  # a code is good for one use
            async with self._hold(_key_of(state)):
                found = await self._find_attempt(state)
                if found is not None:
                    completed = await self._complete(_key_of(state), *found, query)
        return completed

    async def _find_attempt(self, state: str) -> tuple[LoginRecord, Attempt] | None:
        if not _STATE.fullmatch(state):
            return None
        record = await self._read(_key_of(state))
        if record is None or _key_of(state) != self.find_key(record.tenant, record.user):
            return None  # of another server, or of another client at this one
        return next(((record, each) for each in record.attempts if _matches(each, state)), None)

    async def _complete(self, key: str, record: LoginRecord, attempt: Attempt, query: Mapping[str, str]) -> LoginLink:
        if attempt.outcome:
            return _describe(record, attempt)
        if time.time() >= attempt.expires_at:
            raise LoginError("the link has expired: ask for a new one")
        issuer = query.get("iss")
        if (attempt.names_issuer and issuer is None) or (attempt.issuer and issuer not in {None, attempt.issuer}):
            raise LoginError("the answer comes from another authorization server, so it is not used")
        if "code" not in query:
            if query.get("error") != _DENIED:
                raise LoginError("the authorization server did not complete the login: try the link again")
            attempt = attrs.evolve(attempt, outcome="declined")
            others = tuple([each for each in record.attempts if each.state_hash != attempt.state_hash])
            await self._write(key, attrs.evolve(record, attempts=(*others, attempt)))
            return _describe(record, attempt)
        tokens = await self._authorization().exchange(
            attempt.token_url,
            self._client_of(attempt),
            code=query["code"],
            verifier=attempt.verifier,
            redirect_url=attempt.redirect_url,
        )
        attempt = attrs.evolve(attempt, outcome="granted", verifier="")
        granted = attrs.evolve(
            record,
            access_token=tokens.access_token,
            refresh_token=tokens.refresh_token,
            expires_at=tokens.expires_at,
            scope=tokens.scope,
            token_url=attempt.token_url,
            revocation_url=attempt.revocation_url,
            client_id=attempt.client_id,
            client_secret=attempt.client_secret,
            sends_form=attempt.sends_form,
            attempts=(attempt,),  # the other links are of no use now
        )
        await self._write(key, granted)
        return _describe(record, attempt)

    async def store_key(self, api_key: str, *, tenant: str | None, user: str | None) -> None:
        """Store the key that a user has entered.

        Raises:
            LoginError: when the server takes no keys, or this cannot be one.
        """
        if not isinstance(self.settings, APIKey):
            raise LoginError(f"{self.server} takes no key: log in with the link")
        if not is_header_text(api_key) or len(api_key) > MAX_API_KEY_CHARS:
            raise LoginError("this is not a key: it has spaces or other characters that no key has")
        key = self.find_key(tenant, user)
        async with self._hold(key):
            record = LoginRecord(server=self.server, tenant=tenant, user=user, access_token=api_key)
            await self._write(key, record)

    async def forget(self, *, tenant: str | None, user: str | None) -> bool:
        """Revoke the tokens of a user (RFC 7009) if the server can do it, and delete them; links end as well.

        Returns:
            Whether there was a login.

        Raises:
            LoginError: when the authorization server did not revoke them; they are deleted nevertheless.
            StoreError: when they were not deleted.
        """
        key, record = self.find_key(tenant, user), None
        with anyio.CancelScope(shield=True):
            async with self._hold(key):
                try:
                    with suppress(TokenStoreError):  # it cannot be parsed; or it cannot be deleted either
                        record = await self._read(key)
                    await self._write(key, None)
                except TokenStoreError as error:
                    raise StoreError(str(error)) from error
                if record is None or not record.access_token:
                    return False
                if record.revocation_url:
                    client, hint = self._client_of(record), "refresh_token" if record.refresh_token else "access_token"
                    token = record.refresh_token or record.access_token
                    await self._authorization().revoke(record.revocation_url, client, token, hint)
        return True

    def find_key(self, tenant: str | None, user: str | None) -> str:
        """Return the key of a user's login in the token store."""
        client = self.settings.client_id if isinstance(self.settings, OAuth) else ""
        return _KEY_PREFIX + short_hash(json.dumps([self.server, client, tenant, user]), _KEY_CHARS)

    def _authorization(self) -> AuthorizationClient:
        if not isinstance(self.settings, OAuth):
            raise LoginError(f"{self.server} takes a key: there is no link")
        return AuthorizationClient(server=self.server, oauth=self.settings, allow_private=self.allow_private)

    def _client_of(self, stored: LoginRecord | Attempt) -> Client:
        settings = self.settings
        is_own = isinstance(settings, OAuth) and settings.client_id == stored.client_id
        secret = settings.client_secret if is_own and isinstance(settings, OAuth) else stored.client_secret
        return Client(client_id=stored.client_id, client_secret=secret or "", sends_form=stored.sends_form)

    async def _register(self, client: AuthorizationClient, endpoints: Endpoints, redirect_url: str) -> Client:
        """Return the client that this program has registered for a redirect URL, registering it once."""
        key = _CLIENT_PREFIX + short_hash(
            json.dumps([endpoints.issuer, redirect_url, client.find_scope(endpoints)]), _KEY_CHARS
        )
        async with self._hold(key):
            with _translate_errors():
                text = await anyio.to_thread.run_sync(self.store.read, key)
            if text is not None:
                return Client(**json.loads(text))
            fresh = await client.register(endpoints, redirect_url)
            with _translate_errors():
                await anyio.to_thread.run_sync(self.store.write, key, json.dumps(attrs.asdict(fresh)))
            return fresh

    async def _read(self, key: str) -> LoginRecord | None:
        with _translate_errors():
            text = await anyio.to_thread.run_sync(self.store.read, key)
        return None if text is None else LoginRecord.from_json(text)

    async def _write(self, key: str, record: LoginRecord | None) -> None:
        with _translate_errors():
            await anyio.to_thread.run_sync(self.store.write, key, None if record is None else record.to_json())

    @asynccontextmanager
    async def _hold(self, key: str) -> AsyncGenerator[None]:
        """Hold the lock of a login between processes."""
        async with AsyncExitStack() as stack:
            with _translate_errors():
                await stack.enter_async_context(self.store.renewal(key))
            yield


@contextmanager
def _translate_errors() -> Iterator[None]:
    """Raise the errors of a user's store as those that a model reads, without their texts."""
    try:
        yield
    except TokenStoreError:
        raise
    except Exception as error:
        raise TokenStoreError(f"the token store failed ({type(error).__name__})") from error


def to_login(settings: OAuth | APIKey | Login, server: str, *, allow_private: bool = False) -> Login:
    """Return the logins at a server for the value of a `login=`."""
    return settings if isinstance(settings, Login) else Login(server, settings, allow_private)


class TokenAuth(httpx2.Auth):
    """Authentication of requests by the login of one user. A token that is refused is renewed once."""

    def __init__(self, login: Login, *, tenant: str | None, user: str | None) -> None:
        self._login = login
        self._tenant = tenant
        self._user = user
        self._used: Newest[str, None] = Newest(_REMEMBERED_TOKENS)

    async def async_auth_flow(self, request: httpx2.Request) -> AsyncGenerator[httpx2.Request, httpx2.Response]:
        """Send a request with the token of the user."""
        token = await self._add_token(request, refused="")
        response = yield request
        if response.status_code == UNAUTHORIZED:  # it was refused, so it has done nothing
            await self._add_token(request, refused=token)
            yield request

    async def _add_token(self, request: httpx2.Request, refused: str) -> str:
        token = await self._login.find_token(tenant=self._tenant, user=self._user, refused=refused)
        if token is None:
            await self._report_missing()
        self._login.authorize(request, token)
        self._used[token] = None
        return token

    async def _report_missing(self) -> NoReturn:
        """Raise the error of a user without a login."""
        raise NotImplementedError

    def mask(self, value: Any) -> Any:
        """Return a JSON value without the tokens that were sent, for a server that repeats what it gets."""
        if isinstance(value, str):
            for token in [*self._used]:
                value = value.replace(token, "***")
            return value
        if isinstance(value, list):
            return [self.mask(each) for each in value]
        return {self.mask(name): self.mask(each) for name, each in value.items()} if isinstance(value, dict) else value


class UserAuth(TokenAuth):
    """Authentication of the requests of one call. If its user has to log in, the call waits: `LoginRequired`."""

    def __init__(self, login: Login, ctx: RunContext[Any]) -> None:
        super().__init__(login, tenant=ctx.tenant, user=ctx.user)
        self._ctx = ctx

    async def _report_missing(self) -> NoReturn:
        await self._login.ask(self._ctx)


def _describe(record: LoginRecord, attempt: Attempt) -> LoginLink:
    return LoginLink(
        tenant=record.tenant,
        user=record.user,
        run_id=attempt.run_id,
        call_id=attempt.call_id,
        outcome=attempt.outcome,
    )


def _key_of(state: str) -> str:
    """Return the key of the login that a state belongs to."""
    return _KEY_PREFIX + state.rpartition(".")[2]


def _is_valid(record: LoginRecord, refused: str) -> bool:
    lasts = record.expires_at is None or time.time() < record.expires_at - _EARLY_S
    return bool(record.access_token) and record.access_token != refused and lasts


def _hash(state: str) -> str:
    return hashlib.sha256(state.encode()).hexdigest()


def _matches(attempt: Attempt, state: str) -> bool:
    return hmac.compare_digest(attempt.state_hash, _hash(state))
