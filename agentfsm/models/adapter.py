"""Base class of model adapters: a client per event loop, translated errors, bounded replies, prices.

It depends on no provider or transport, so that it fits any package. `models/sdk.py` builds on it for the SDKs of OpenAI
and Anthropic.
"""

from __future__ import annotations

import inspect
import re
import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import PurePath
from types import AsyncGeneratorType, MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, TypeAlias, TypeVar, cast

import anyio
import attrs
from anyio.lowlevel import current_token

from agentfsm._lib.concurrency import start_in_thread
from agentfsm.core.errors import AgentError, MisuseError, ModelError
from agentfsm.core.messages import AssistantMessage
from agentfsm.core.usage import Usage
from agentfsm.core.validation import COUNT, NAME, STRING, require_type
from agentfsm.core.value import Value
from agentfsm.models import provider_errors as t
from agentfsm.models.prices import find_list_cost_usd, find_price, load_list_prices
from agentfsm.models.profiles import ModelProfile, find_profile, strip_name_prefix
from agentfsm.models.wire import SizeLimitError
from agentfsm.ports.model import (
    MAX_REPLY_CALLS,
    MAX_REPLY_CHARS,
    TOO_MANY_CALLS,
    TOO_MANY_CHARS,
    CallChunk,
    FinishChunk,
    Model,
    check_call,
    check_reply,
    find_reply_excess,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from agentfsm.core.settings import Settings
    from agentfsm.models.prices import Prices
    from agentfsm.ports.model import Chunk, Emit, Reply, Request

# Date of a snapshot, as OpenAI ("gpt-5-2025-08-07"), Anthropic ("claude-opus-4-1-20250805") and Google write it.
_DATE: Final = re.compile(r"-(20\d\d-\d\d-\d\d|20\d{6}|latest|preview(-\d\d-\d\d(\d\d)?|-\d\d-20\d\d)?)$")

# Characters of the shortest word of a key or a header that is masked in a server's message.
_MIN_SECRET_CHARS: Final = 8
MODEL_NAME: Final = attrs.evolve(NAME, wanted="the name of the model as the provider knows it, such as 'gpt-5.4-mini'")

_PROFILE: Final = require_type(ModelProfile, wanted="a ModelProfile, such as find_profile('gpt-5')").or_none()

# Characters of a server's message in which secrets are masked, before it is cut for an error.
_MAX_RAW_DETAIL_CHARS: Final = 64 * 2**10

# Seconds that closing a client may take, shielded from cancellation: enough to close connections to a live server.
_MAX_CLOSE_S: Final = 1.0

ClientT = TypeVar("ClientT")
_Keeper: TypeAlias = AsyncGeneratorType[None, None]


class AdapterModel(Model, ABC, Generic[ClientT]):
    """Model behind a provider's package. Subclass it to write an adapter.

    A subclass has `translations` and three methods: `_open_client`, `_close_client` and `_ask`. Most also have
    `_describe_error`. The base keeps one client per event loop: the first reply opens it; `aclose()` or the end of the
    event loop closes it. Errors of the package become `ModelError`s without secrets in their text. Replies, and
    streams while they arrive, are limited as in `agentfsm.ports.model`.

    Args:
        name: Name of the model at the provider.
        base_url: Address of the service, without a password. Errors name it, and the public price list identifies the
            provider by it. Empty if the package has no address: errors then name only the model, and the list is not
            used.
        secrets: Keys and tokens to mask in errors. Words of fewer than 8 characters in them are not masked, since that
            would hide ordinary words.
        window_tokens: Context window in tokens, input and output together. None: that of the model's family.
        price: Price of the model, or a table of prices by prefixes of models' names. None, or a table without the
            model: the public list of genai-prices, if that package is installed.
        profile: Abilities of the model. None: those of its family.

    Raises:
        MisuseError: if an argument is invalid.
    """

    translations: ClassVar[Mapping[type[Exception], t.Translate]] = MappingProxyType({})
    """Functions of `agentfsm.models.provider_errors` by the package's error classes. An error is translated by its
    nearest listed class; one without a listed class ends the run, by `unexpected_error`.
    """

    api_key_env: ClassVar[str] = ""
    """Environment variable of the API key, for the text of errors; empty if there is none. The base does not read it:
    the subclass does, and passes the key to the package and to `secrets`.
    """

    expected_reply: ClassVar[str] = "a reply"
    """Description of a valid reply, for the text of errors: "a chat completion"."""

    _is_client_shared: bool = False
    """Whether one client of the caller serves all event loops; the model does not close it."""

    def __init__(
        self,
        name: str,
        *,
        base_url: str = "",
        secrets: Iterable[str] = (),
        window_tokens: int | None = None,
        price: Prices | None = None,
        profile: ModelProfile | None = None,
    ) -> None:
        adapter = type(self).__name__
        MODEL_NAME.check(adapter, "name", name)
        COUNT.or_none().check(adapter, "window_tokens", window_tokens)
        STRING.check(adapter, "base_url", base_url)
        self.name = name
        _PROFILE.check(adapter, "profile", profile)
        self.profile: ModelProfile = profile or find_profile(name)
        self.window_tokens: int = self.profile.window_tokens if window_tokens is None else window_tokens
        self._base_url = base_url
        self._price = find_price(name, price)
        self._secrets = _find_secrets(secrets)
        self._tokens: tuple[str, ...] = ()
        self._clients: dict[object, _OpenClient[ClientT]] = {}  # by event loop
        _check_translations(self)

    def unsupported_settings(self, settings: Settings) -> str | None:
        """Return the setting that the model does not have, and a remedy; None if it has all."""
        return self.profile.explain_settings(self.name, settings)

    @property
    def base_url(self) -> str:
        """Address of the service; empty if the package has none."""
        return self._base_url

    # Methods of each adapter

    @abstractmethod
    def _open_client(self) -> ClientT:
        """Create the package's client, for use on the running event loop.

        Raises:
            MisuseError: if it cannot be created; the error states the correction.
        """

    @staticmethod
    @abstractmethod
    async def _close_client(client: ClientT) -> None:
        """Close a client within a second. Closing it again must have no effect.

        It is static, so that an open client does not keep an unused model in memory.
        """

    def _is_client_closed(self, client: ClientT) -> bool:  # noqa: ARG002  a default
        """Return whether other code has closed the client, so that the next reply needs a new one. Default: False."""
        return False

    @abstractmethod
    async def _ask(self, client: ClientT, request: Request, emit: Emit | None) -> Reply:
        """Send the request once, without retries, and return the reply.

        Call a blocking package in a thread, for example with `anyio.to_thread.run_sync(..., abandon_on_cancel=True)`.

        Args:
            client: The client of the running event loop.
            request: The request. Give up when the server sends nothing for `request.timeout_s`.
            emit: None to receive the whole reply at once. Otherwise stream: call it with each chunk as it arrives. If
                it raises, close the stream and let its error pass.

        Raises:
            Exception: errors of the package; the base translates them by `translations`.
            ModelError: for failures that the package does not raise as errors. It is passed on unchanged.
        """

    def _describe_error(self, error: Exception) -> t.ProviderFailure:
        """Return the facts of a failure, built with `_build_failure`. Default: the type and text of the error."""
        return self._build_failure(f"{type(error).__name__}: {error}")

    async def reply(self, request: Request, emit: Emit | None = None) -> Reply:
        """Send the request once, without retries; see `Model.reply`."""
        client, request = await self._get_client(), self._prepare_request(request)
        watcher = None if emit is None else _BoundedEmit(emit)
        method = f"{type(self).__name__}._ask"
        try:
            asked: object = self._ask(client, request, None if watcher is None else watcher.emit_chunk)
            reply = await _check_awaitable(asked, method)
        except AgentError:
            raise
        except Exception as error:
            if watcher is not None and watcher.error is error:  # raised by the caller's `emit`
                raise
            raise self._translate_error(error) from None
        check_reply(method, reply)
        for call in reply.calls:
            check_call(method, call)
        return self._check_size(self._mark_native(reply))

    def prepare(self) -> None:
        """Load the public price list, unless the model has a price of its own. Takes 0.4 s once in a process."""
        if self._price is None:
            load_list_prices(self.name, self._base_url)

    def cost_usd(self, usage: Usage) -> float | None:
        """Return the cost of one reply in US dollars, or None if no price is known."""
        if self._price is not None:
            return self._price.cost_usd(usage)
        return find_list_cost_usd(self.name, self._base_url, usage)

    async def aclose(self) -> None:
        """Close the client of the running event loop, unless it is the caller's. A later reply opens a new one."""
        kept = self._clients.pop(self._loop_key(), None)
        if kept is not None and kept.keeper is not None:
            await kept.keeper.aclose()

    # Clients

    async def _get_client(self) -> ClientT:
        """Return the client of the running event loop; open one if there is none or it was closed."""
        loop = self._loop_key()
        if not self._is_open(loop):
            if self._price is None:
                await start_in_thread(self.prepare).wait()
            if not self._is_open(loop):  # of concurrent replies, the first after the wait opens the client for all
                await self._replace(loop)
        return self._clients[loop].client

    def _loop_key(self) -> object:
        return None if self._is_client_shared else current_token().native_token

    def _is_open(self, loop: object) -> bool:
        kept = self._clients.get(loop)
        return kept is not None and not kept.has_ended and not self._is_client_closed(kept.client)

    async def _replace(self, loop: object) -> None:
        """Open a client, and then close the one that it replaces."""
        for other in [each for each, kept in self._clients.items() if kept.has_ended]:
            self._clients.pop(other, None)
        client, closed = self._open_client(), self._clients.get(loop)
        if inspect.iscoroutine(client):
            client.close()
            method = f"{type(self).__name__}._open_client"
            raise MisuseError(f"{method} is async: write a plain `def`, and connect in `_ask` if that has to wait")
        keeper = None
        if not self._is_client_shared:
            method = f"{type(self).__name__}._close_client"
            keeper = cast("_Keeper", _close_with_loop(client, self._close_client, method))
        self._clients[loop] = _OpenClient(client=client, keeper=keeper)
        if keeper is not None:
            await anext(keeper)  # up to its `yield`, without waiting
        if closed is not None and closed.keeper is not None:
            await closed.keeper.aclose()

    # Replies in the provider's own form, which are sent back

    def _can_read(self, model: str) -> bool:
        """Return whether the provider accepts reasoning of another model back: of the same name, or of its family.

        Other replies are sent as texts and calls. The names are compared without the prefix of a router and without
        a date at the end.
        """
        family = self.profile.reads_family
        return _strip_date(model) == _strip_date(self.name) or family == find_profile(model).reads_family != ""

    def _prepare_request(self, request: Request) -> Request:
        """Return the request without the native replies of models whose reasoning this one cannot read.

        Raises:
            ModelError: if the model does not have one of the settings.
        """
        if (why := self.unsupported_settings(request.settings)) is not None:
            raise ModelError(why)
        natives = {each.native.model for each in request.messages if isinstance(each, AssistantMessage) and each.native}
        foreign = {name for name in natives if request.is_plain or (name and not self._can_read(name))}
        if not foreign:
            return request
        messages = [
            attrs.evolve(each, native=None)
            if isinstance(each, AssistantMessage) and each.native is not None and each.native.model in foreign
            else each
            for each in request.messages
        ]
        return attrs.evolve(request, messages=messages)

    def _mark_native(self, reply: Reply) -> Reply:
        """Return the reply with the name of this model in its native form."""
        if reply.native is None:
            return reply
        return attrs.evolve(reply, native=attrs.evolve(reply.native, model=self.name))

    # Errors

    def _translate_error(self, error: Exception) -> AgentError:
        """Translate an error of the package. Raise the result `from None`: the original may quote the key."""
        if isinstance(error, AgentError):
            return error
        if isinstance(error, SizeLimitError):
            return self._build_size_error(str(error), None)
        kind = next((kind for kind in type(error).__mro__ if kind in self.translations), None)
        if kind is None:
            return t.unexpected_error(self._build_failure(_describe_unexpected(error)))
        translated: object = self.translations[kind](self._describe_error(error))
        if not isinstance(translated, ModelError):
            raise MisuseError(
                f"{type(self).__name__}.translations[{kind.__name__}] returned {type(translated).__name__}: return a "
                "ModelError, as the functions of agentfsm.models.provider_errors do"
            )
        return translated

    def _check_size(self, reply: Reply) -> Reply:
        """Return the reply if it is within the limits.

        Raises:
            ModelReplyError: if it is not.
        """
        if (excess := find_reply_excess(reply)) is not None:
            raise self._build_size_error(excess, reply.usage)
        return reply

    def _build_size_error(self, excess: str, usage: Usage | None) -> ModelError:
        error = t.reply_size_error(self._build_failure(excess))
        error.usage = usage
        return error

    def _mask(self, secret: str) -> None:
        """Mask a token that replaces an earlier one, in errors from here on. The newest four are masked."""
        if secret not in self._tokens:
            self._tokens = (secret, *self._tokens[:3])

    def _build_failure(self, detail: str, **facts: Any) -> t.ProviderFailure:
        """Return a failure for `translations`, without secrets.

        Args:
            detail: Message of the provider or the package, of any length.
            facts: Further fields of `ProviderFailure`: status, code, request_id, retry_after_s, is_unreachable.
        """
        detail = detail[:_MAX_RAW_DETAIL_CHARS]
        for secret in (*self._tokens, *self._secrets):
            detail = detail.replace(secret, "***")
        return t.ProviderFailure(
            adapter=type(self).__name__,
            api_key_env=self.api_key_env,
            expected_reply=self.expected_reply,
            model=self.name,
            base_url=self._base_url,
            detail=" ".join(detail.split())[: t.MAX_DETAIL_CHARS],
            **facts,
        )


@attrs.frozen(kw_only=True)
class _OpenClient(Value, Generic[ClientT]):
    client: ClientT
    keeper: _Keeper | None = None
    """Generator that closes the client at its end; None if the model must not close it."""

    @property
    def has_ended(self) -> bool:
        """Whether the event loop has ended and closed the client."""
        return self.keeper is not None and self.keeper.ag_frame is None


async def _close_with_loop(
    client: ClientT, close: Callable[[ClientT], Awaitable[None]], method: str
) -> AsyncGenerator[None]:
    # At the end of an event loop, asyncio and trio close open generators and nothing else. A generator therefore closes
    # the client if `aclose()` was not called.
    try:
        yield
    finally:
        # trio closes generators in a cancelled scope, in which the client could not wait for its connections.
        with anyio.move_on_after(_MAX_CLOSE_S, shield=True):
            await _check_awaitable(close(client), method)


@attrs.define(eq=False)
class _BoundedEmit:
    """Passes chunks to the caller's `emit`, and ends a stream that exceeds the limits of a reply."""

    emit: Emit
    error: Exception | None = attrs.field(default=None, init=False)
    """The error that `emit` raised."""

    chars: int = attrs.field(default=0, init=False)
    """Characters of text, thinking and arguments so far."""

    def emit_chunk(self, chunk: Chunk) -> None:
        """Pass on a chunk.

        Raises:
            SizeLimitError: if the reply is too large.
        """
        try:
            self.emit(chunk)
        except Exception as error:
            self.error = error
            raise
        match chunk:
            case FinishChunk():
                return
            case CallChunk():
                if chunk.index >= MAX_REPLY_CALLS:
                    raise SizeLimitError(TOO_MANY_CALLS)
                self.chars += len(chunk.arguments)
            case _:
                self.chars += len(chunk.text)
        if self.chars > MAX_REPLY_CHARS:
            raise SizeLimitError(TOO_MANY_CHARS)


# Arguments


def _strip_date(name: str) -> str:
    """Return the name of a model without the prefix of a router and the date of a snapshot."""
    return _DATE.sub("", strip_name_prefix(name))


def _find_secrets(values: object) -> list[str]:
    # The errors do not show the value, which may be a key.
    if isinstance(values, str):
        msg = "secrets is a string, whose letters would be masked one by one: give a list, secrets=[...]"
        raise MisuseError(msg)
    if not isinstance(values, Iterable):
        msg = f"secrets is of the type {type(values).__name__}: give a list of strings"
        raise MisuseError(msg)
    words = set()
    for value in values:
        if not isinstance(value, str):
            msg = (
                f"secrets contains {type(value).__name__}: give a list of strings, and leave out a key that is not set"
            )
            raise MisuseError(msg)
        # The value of a header is "Bearer sk-...", but a server repeats only the key, so each word is masked.
        words |= {word for word in value.split() if len(word) >= _MIN_SECRET_CHARS}
    return sorted(words, key=len, reverse=True)


def _describe_unexpected(error: Exception) -> str:
    """Return the type, the text and the place of an error, since the error that replaces it has no traceback of it."""
    places = [
        f"; in {PurePath(at.filename).name}, line {at.lineno}" for at in traceback.extract_tb(error.__traceback__)
    ]
    return f"{type(error).__name__}: {error}{''.join(places[-1:])}"


def _check_translations(model: AdapterModel[Any]) -> None:
    """Check the table of errors.

    Raises:
        MisuseError: if `translations` is not a mapping from error classes to functions.
    """
    table: object = model.translations
    label, give = f"{type(model).__name__}.translations", "such as {LampError: provider_errors.sdk_error}"
    if not isinstance(table, Mapping):
        raise MisuseError(f"{label} is of the type {type(table).__name__}: give a dict {give}")
    for kind, translate in table.items():
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            raise MisuseError(f"{label} has the key {kind!r:.100}, which is not an exception class: give a dict {give}")
        if isinstance(translate, type) or not callable(translate):
            raise MisuseError(
                f"{label}[{kind.__name__}] is {translate!r:.100}: give a function of agentfsm.models.provider_errors, "
                f"{give}"
            )


def _check_awaitable(returned: Any, method: str) -> Awaitable[Any]:
    if inspect.isawaitable(returned):
        return returned
    name = method.rpartition(".")[2]
    raise MisuseError(f"{method} returned {type(returned).__name__}, not an awaitable: write `async def {name}`")
