"""The base of an adapter: clients of event loops, errors as ours, bounds of replies, prices.

It knows no vendor and no transport, so that a package of any shape can stand behind it. `models/sdk.py` builds on it
for the packages of OpenAI and Anthropic.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from types import AsyncGeneratorType, MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, TypeAlias, TypeVar, cast

import anyio
import attrs
from anyio.lowlevel import current_token

from agentfsm._concurrency import start_in_thread
from agentfsm.core.errors import AgentError, MisuseError, ModelError
from agentfsm.core.usage import Usage
from agentfsm.core.validation import COUNT, NAME, STRING
from agentfsm.core.value import Value
from agentfsm.models import provider_errors as t
from agentfsm.models.context_windows import find_window_tokens
from agentfsm.models.prices import find_list_cost_usd, find_price, load_list_prices
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

    from agentfsm.models.prices import Prices
    from agentfsm.ports.model import Chunk, Emit, Reply, Request

# Shorter words of a key or a header are not taken out of the server's words, characters.
_MIN_SECRET_CHARS: Final = 8
MODEL_NAME: Final = attrs.evolve(NAME, wanted="the name of the model as the provider knows it, such as 'gpt-4o'")

# What is looked at of what a server said, characters. What is shown of it is far less.
_MAX_RAW_DETAIL_CHARS: Final = 64 * 2**10

# Seconds that closing a client may take, and cannot be cancelled: long enough to say goodbye to a server that answers.
_MAX_CLOSE_S: Final = 1.0

ClientT = TypeVar("ClientT")
_Keeper: TypeAlias = AsyncGeneratorType[None, None]


class AdapterModel(Model, ABC, Generic[ClientT]):
    """A model behind a vendor's package. Subclass it to adapt one.

    A subclass has `translations` and three methods: `_open_client`, `_close_client` and `_ask`. Most also have
    `_describe_error`. The base keeps one client per event loop: it is opened at the first reply, and closed by
    `aclose()`, at the latest when its event loop ends. Errors that `translations` knows become `ModelError`s whose text
    holds no secret. Replies are held to the bounds of `agentfsm.ports.model`, streams while they come.

    Args:
        name: The model, as the provider knows it.
        base_url: The address of the service, without a password: errors name it, and the public list of prices knows
            the provider by it. Empty where the package has no address: errors name the model alone, and the list is
            not asked.
        secrets: Keys and tokens to take out of what errors quote. Of each, words of fewer than 8 characters are left
            in, since they would blot out plain words.
        window_tokens: The context window, input and output together. None: that of the model's family.
        price: What the model costs, or a table that says it by the beginnings of models' names. None, or a table that
            does not name it: by the public list of genai-prices, where that package is installed.

    Raises:
        MisuseError: when an argument cannot be right.
    """

    translations: ClassVar[Mapping[type[Exception], t.Translate]] = MappingProxyType({})
    """The package's errors, each with a function of `agentfsm.models.provider_errors`. A class that is not listed goes
    by its nearest ancestor; an error without a listed ancestor is raised as it is.
    """

    api_key_env: ClassVar[str] = ""
    """The environment variable that holds the key, for the text of errors; empty where there is none. The base does not
    read it: that is for the subclass, which hands the key to the package and to `secrets`.
    """

    expected_reply: ClassVar[str] = "a reply"
    """What a reply is called, for the text of errors: "a chat completion"."""

    _is_client_shared: bool = False
    """Whether one client serves all event loops, and is not the model's to close."""

    def __init__(
        self,
        name: str,
        *,
        base_url: str = "",
        secrets: Iterable[str] = (),
        window_tokens: int | None = None,
        price: Prices | None = None,
    ) -> None:
        adapter = type(self).__name__
        MODEL_NAME.check(adapter, "name", name)
        COUNT.or_none().check(adapter, "window_tokens", window_tokens)
        STRING.check(adapter, "base_url", base_url)
        self.name = name
        self.window_tokens = find_window_tokens(name) if window_tokens is None else window_tokens
        self._base_url = base_url
        self._price = find_price(name, price)
        self._secrets = _find_secrets(secrets)
        self._clients: dict[object, _OpenClient[ClientT]] = {}
        # By the event loop.
        self._error_types: tuple[type[Exception], ...] = (SizeLimitError, *_check_translations(self))

    # What each adapter has of its own.

    @abstractmethod
    def _open_client(self) -> ClientT:
        """Make the package's client. The running event loop is the one that it will be used on.

        Raises:
            MisuseError: when it cannot be made; it says what to change.
        """

    @staticmethod
    @abstractmethod
    async def _close_client(client: ClientT) -> None:
        """Close a client, within a second; harmless where it is closed already.

        Static, so that an open client does not keep a model in memory that is no longer used.
        """

    def _is_client_closed(self, client: ClientT) -> bool:  # noqa: ARG002  a default
        """Whether the client was closed by others, so that the next reply needs a new one. The default says no."""
        return False

    @abstractmethod
    async def _ask(self, client: ClientT, request: Request, emit: Emit | None) -> Reply:
        """Ask once, without retries, and return the reply.

        A package that blocks is called in a thread, as by `anyio.to_thread.run_sync(..., abandon_on_cancel=True)`.

        Args:
            client: That of the running event loop.
            request: The whole question. Give up after `request.timeout_s` of silence.
            emit: None for a reply that comes whole. Else stream: call it with each chunk as it comes. What it raises
                shall end the reply; close the stream on that way, too.

        Raises:
            Exception: what the package raises; the base translates it by `translations`.
            ModelError: for failures that the package does not raise as errors. It is passed on as it is.
        """

    def _describe_error(self, error: Exception) -> t.ProviderFailure:
        """Return what is known of a failure; make it with `_build_failure`. The default knows type and text."""
        return self._build_failure(f"{type(error).__name__}: {error}")

    # The port.

    async def reply(self, request: Request, emit: Emit | None = None) -> Reply:
        """Ask once, without retries; see `Model.reply`."""
        client = await self._get_client()
        watcher = None if emit is None else _BoundedEmit(emit)
        method = f"{type(self).__name__}._ask"
        try:
            asked: object = self._ask(client, request, None if watcher is None else watcher.emit_chunk)
            reply = await _check_awaitable(asked, method)
        except AgentError:
            raise
        except self._error_types as error:
            if watcher is not None and watcher.error is error:  # what the caller's `emit` raised
                raise
            raise self._translate_error(error) from None
        check_reply(method, reply)
        for call in reply.calls:
            check_call(method, call)
        return self._check_size(reply)

    def prepare(self) -> None:
        """Load the public price list, unless the model has a price of its own. Takes 0.4 s once in a process."""
        if self._price is None:
            load_list_prices(self.name, self._base_url)

    def cost_usd(self, usage: Usage) -> float | None:
        """US dollars for the usage of one reply, or None where no price is known."""
        if self._price is not None:
            return self._price.cost_usd(usage)
        return find_list_cost_usd(self.name, self._base_url, usage)

    async def aclose(self) -> None:
        """Close the client of the running event loop, but never one of the caller's. A later reply opens a new one."""
        kept = self._clients.pop(self._loop_key(), None)
        if kept is not None and kept.keeper is not None:
            await kept.keeper.aclose()

    # Clients

    async def _get_client(self) -> ClientT:
        """Return the client of the running event loop; open it where there is none, or it was closed."""
        loop = self._loop_key()
        if not self._is_open(loop):
            if self._price is None:
                await start_in_thread(self.prepare).wait()
            if not self._is_open(loop):  # of replies that begin at once, the first behind the wait opens for all
                await self._replace(loop)
        return self._clients[loop].client

    def _loop_key(self) -> object:
        return None if self._is_client_shared else current_token().native_token

    def _is_open(self, loop: object) -> bool:
        kept = self._clients.get(loop)
        return kept is not None and not kept.has_ended and not self._is_client_closed(kept.client)

    async def _replace(self, loop: object) -> None:
        """Open a client, and only then wait for the end of what it replaces."""
        for other in [each for each, kept in self._clients.items() if kept.has_ended]:
            self._clients.pop(other, None)
        client, closed = self._open_client(), self._clients.get(loop)
        if inspect.iscoroutine(client):
            client.close()
            method = f"{type(self).__name__}._open_client"
            raise MisuseError(f"{method} is async: write a plain `def`, and connect in `_ask` where that has to wait")
        keeper = None
        if not self._is_client_shared:
            method = f"{type(self).__name__}._close_client"
            keeper = cast("_Keeper", _close_with_loop(client, self._close_client, method))
        self._clients[loop] = _OpenClient(client=client, keeper=keeper)
        if keeper is not None:
            await anext(keeper)  # to its `yield`, without a wait
        if closed is not None and closed.keeper is not None:
            await closed.keeper.aclose()

    # Errors

    def _translate_error(self, error: Exception) -> ModelError:
        """Return the error as ours. Raise it `from None`: the errors that it comes from may quote the key."""
        if isinstance(error, SizeLimitError):
            return self._build_size_error(str(error), None)
        kind = next(kind for kind in type(error).__mro__ if kind in self.translations)
        translated: object = self.translations[kind](self._describe_error(error))
        if not isinstance(translated, ModelError):
            raise MisuseError(
                f"{type(self).__name__}.translations[{kind.__name__}] returned {type(translated).__name__}: return a "
                "ModelError, as the functions of agentfsm.models.provider_errors do"
            )
        return translated

    def _check_size(self, reply: Reply) -> Reply:
        """Return a reply that is within the bounds.

        Raises:
            ModelReplyError: when it is not.
        """
        if (over := find_reply_excess(reply)) is not None:
            raise self._build_size_error(over, reply.usage)
        return reply

    def _build_size_error(self, over: str, usage: Usage | None) -> ModelError:
        error = t.reply_size_error(self._build_failure(over))
        error.usage = usage
        return error

    def _build_failure(self, detail: str, **facts: Any) -> t.ProviderFailure:
        """Return a failure for `translations`, without secrets.

        Args:
            detail: What the provider or the package said, of any length.
            facts: More fields of `ProviderFailure`: status, code, request_id, retry_after_s.
        """
        detail = detail[:_MAX_RAW_DETAIL_CHARS]
        for secret in self._secrets:
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
    """Runs until the client is closed; None where that is not for the model to do."""

    @property
    def has_ended(self) -> bool:
        """Whether its event loop has ended, and closed it."""
        return self.keeper is not None and self.keeper.ag_frame is None


async def _close_with_loop(
    client: ClientT, close: Callable[[ClientT], Awaitable[None]], method: str
) -> AsyncGenerator[None]:
    # asyncio and trio both close the generators that are left when an event loop ends, and nothing else. So a client is
    # closed also where `aclose()` was not called.
    try:
        yield
    finally:
        # trio closes them in a scope that is cancelled, in which a client that waits would not be closed at all.
        with anyio.move_on_after(_MAX_CLOSE_S, shield=True):
            await _check_awaitable(close(client), method)


@attrs.define(eq=False)
class _BoundedEmit:
    """Hands chunks to the caller's `emit`, and ends a stream that is over the bounds of a reply."""

    emit: Emit
    error: Exception | None = attrs.field(default=None, init=False)
    """That `emit` raised."""

    chars: int = attrs.field(default=0, init=False)
    """Of text, thinking and arguments so far."""

    def emit_chunk(self, chunk: Chunk) -> None:
        """Hand over a chunk.

        Raises:
            SizeLimitError: when the reply is too large.
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


def _find_secrets(values: object) -> list[str]:
    # Neither error shows what was given: it may be the key.
    if isinstance(values, str):
        msg = "secrets is one text, whose letters would be taken for secrets: write secrets=[...]"
        raise MisuseError(msg)
    if not isinstance(values, Iterable):
        msg = f"secrets is of the type {type(values).__name__}: give a list of texts"
        raise MisuseError(msg)
    words = set()
    for value in values:
        if not isinstance(value, str):
            msg = f"secrets holds {type(value).__name__}: give a list of texts, and leave out a key that is not set"
            raise MisuseError(msg)
        # Words, because "Bearer sk-..." is a value, and a server repeats the key. A short one would blot out plain
        # words.
        words |= {word for word in value.split() if len(word) >= _MIN_SECRET_CHARS}
    return sorted(words, key=len, reverse=True)


def _check_translations(model: AdapterModel[Any]) -> Iterable[type[Exception]]:
    """Return the errors that a model translates.

    Raises:
        MisuseError: when `translations` is no table of errors and functions.
    """
    table: object = model.translations
    what, give = f"{type(model).__name__}.translations", "such as {LampError: provider_errors.sdk_error}"
    if not isinstance(table, Mapping):
        raise MisuseError(f"{what} is of the type {type(table).__name__}: give a dict {give}")
    for kind, translate in table.items():
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            raise MisuseError(f"{what} has the key {kind!r:.100}, which is no class of errors: give a dict {give}")
        if isinstance(translate, type) or not callable(translate):
            raise MisuseError(
                f"{what}[{kind.__name__}] is {translate!r:.100}: give a function of agentfsm.models.provider_errors, "
                f"{give}"
            )
    return table


def _check_awaitable(returned: Any, method: str) -> Awaitable[Any]:
    if inspect.isawaitable(returned):
        return returned
    name = method.rpartition(".")[2]
    raise MisuseError(f"{method} returned {type(returned).__name__} where it was not awaited: write `async def {name}`")
