"""Adapter for OpenAI's embeddings and compatible servers."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from agentfsm.core.errors import ContextTooLongError, MisuseError, ModelError
from agentfsm.core.messages import replace_surrogates
from agentfsm.core.usage import Usage
from agentfsm.core.validation import COUNT, POSITIVE
from agentfsm.models.openai.chat import OpenAIChat
from agentfsm.models.openai.providers import PROVIDERS, find_base_url, find_key
from agentfsm.models.wire import WireFormatError, encode_json, parse_reply, read_field, read_token_count
from agentfsm.ports.embedder import Embedder, Embeddings
from agentfsm.tokens.billing import find_failed_usage
from agentfsm.tokens.ledger import BYTE_COUNTER, estimate_tokens

if TYPE_CHECKING:
    from collections.abc import Awaitable

    import httpx
    import httpx2

    from agentfsm.models.prices import Prices

T = TypeVar("T")

# Texts of one request: OpenAI takes 2,048, some servers 128 or less.
BATCH_TEXTS: Final = 128
# Estimated tokens of one request: OpenAI takes 300,000, and the estimate may be too low by half.
BATCH_TOKENS: Final = 100_000
# Tokens of one text that a model reads, if nothing else is given: the limit of OpenAI's models.
MAX_TOKENS: Final = 8_191
# A text is cut to so many UTF-8 bytes for each token: texts in any script have more.
MIN_BYTES_PER_TOKEN: Final = 2
# A text that the server still finds too long is halved, down to this number of characters.
MIN_CHARS: Final = 64
# Seconds that a server may stay silent, so that a search by words does not wait for long.
TIMEOUT_S: Final = 20.0

# Dimensions of the vectors by the beginning of the model's name, without the name of a vendor before it.
_DIMS: Final[Mapping[str, int]] = {
    "all-minilm": 384,
    "bge-m3": 1_024,
    "gemini-embedding-001": 3_072,
    "mistral-embed": 1_024,
    "mxbai-embed-large": 1_024,
    "nomic-embed-text": 768,
    "text-embedding-3-large": 3_072,
    "text-embedding-3-small": 1_536,
    "text-embedding-ada-002": 1_536,
}
# Models whose vectors the server shortens to the number of dimensions that a request asks for.
_SHORTENED: Final = ("text-embedding-3-", "gemini-embedding-001")


class JSONEndpoint(OpenAIChat, Generic[T]):
    """A resource of a server, with the connections, keys and errors that it shares with its chat completions."""

    async def ask(self, body: bytes, timeout_s: float, decode: Callable[[bytes], T]) -> T:
        """Send a request once and return the decoded reply.

        Raises:
            ModelError: as `Model.reply` does.
        """
        connection = await self._get_client()
        data = await self._read_body(await self._send(connection.client, body, timeout_s))
        try:
            return decode(data)
        except Exception as error:  # noqa: BLE001  translated
            raise self._translate_error(error) from None


class _EmbeddingsEndpoint(JSONEndpoint[Embeddings]):
    """The `/embeddings` of a server."""

    resource = "embeddings"
    path = "/embeddings"
    expected_reply = "a list of embeddings"


_EmbeddingsEndpoint.__name__ = "OpenAIEmbedder"  # errors name the class that their reader has called


class OpenAIEmbedder(Embedder):
    """Embedder of OpenAI or a server with its `/embeddings`, for example `OpenAIEmbedder("text-embedding-3-small")`.

    Texts are sent in batches, one after the other. A text that is longer than the model reads is cut at its end.

    Args:
        name: Name of the model at the server.
        dims: Dimensions of the vectors, 1 or more. None: those of the model, if it is a well-known one. OpenAI's and
            Gemini's models shorten their vectors to fewer dimensions; of other models, give the number that they have.
        base_url: Address of the server, usually ending in /v1. Default: OPENAI_BASE_URL, then OpenAI itself.
        api_key: API key, or a function, plain or async, that returns the current one. Default: OPENAI_API_KEY. A server
            of your own may need none.
        headers: Headers of each request.
        http_client: HTTP client of your own for one event loop; you close it.
        max_tokens: Tokens of a text that the model reads, 1 or more. Default 8,191.
        batch_texts: Texts of one request, 1 or more. Default 128.
        timeout_s: Seconds that the server may stay silent, above 0. Default 20.
        price: Price of the model, or a table of prices by prefixes of models' names. Default: the public list of
            genai-prices, if that package is installed.

    Raises:
        MisuseError: if there is no key for OpenAI, the dimensions of the model are unknown, or an argument is invalid.
    """

    def __init__(
        self,
        name: str,
        *,
        dims: int | None = None,
        base_url: str | None = None,
        api_key: str | Callable[[], str] | Callable[[], Awaitable[str]] | None = None,
        headers: Mapping[str, str] | None = None,
        http_client: httpx.AsyncClient | httpx2.AsyncClient | None = None,
        max_tokens: int = MAX_TOKENS,
        batch_texts: int = BATCH_TEXTS,
        timeout_s: float = TIMEOUT_S,
        price: Prices | None = None,
    ) -> None:
        COUNT.or_none().check("OpenAIEmbedder", "dims", dims)
        COUNT.check("OpenAIEmbedder", "max_tokens", max_tokens)
        COUNT.check("OpenAIEmbedder", "batch_texts", batch_texts)
        POSITIVE.check("OpenAIEmbedder", "timeout_s", timeout_s)
        self._endpoint = _EmbeddingsEndpoint(
            name, base_url=base_url, api_key=api_key, headers=headers, http_client=http_client, price=price
        )
        self.name = name
        base = _base_name(name)
        own_dims = next((length for beginning, length in _DIMS.items() if base.startswith(beginning)), None)
        if dims is None and own_dims is None:
            raise MisuseError(
                f"the number of dimensions of {name!r} is not known: give OpenAIEmbedder({name!r}, dims=...), the "
                "length of its vectors"
            )
        self.dims: int = dims or own_dims or 0
        self.max_tokens = max_tokens
        self.batch_texts = batch_texts
        self.timeout_s = timeout_s
        shortens = own_dims not in {None, self.dims} and base.startswith(_SHORTENED)
        self._fields: Mapping[str, Any] = {"dimensions": self.dims} if shortens else {}

    async def embed(self, texts: Sequence[str]) -> Embeddings:
        """Return a vector for each text, and the usage of all requests, with its cost if the price is known.

        Raises:
            ModelError: if the server cannot be reached, refuses a request, or answers with something else. Nothing is
                retried: `ModelUnavailableError` says that it may help. Its usage is that of all requests, estimated
                for one that broke off.
        """
        cut = [_cut(replace_surrogates(text), self.max_tokens) for text in texts]
        vectors, usage = list[tuple[float, ...]](), Usage()
        for batch in self._split(cut):
            try:
                found = await self._embed_batch(batch)
            except ModelError as error:
                lost = find_failed_usage(error, sum(map(estimate_tokens, batch)), 0)
                error.usage = usage + lost.with_price(self._endpoint.cost_usd)
                raise
            vectors += found.vectors
            usage += found.usage
        return Embeddings(vectors=tuple(vectors), usage=usage)

    async def aclose(self) -> None:
        """Close the connections of the running event loop. A later call opens new ones."""
        await self._endpoint.aclose()

    def _split(self, texts: Sequence[str]) -> Iterator[list[str]]:
        """Yield the texts in batches, bounded by their number and their tokens."""
        batch, tokens = list[str](), 0
        for text in texts:
            size = estimate_tokens(text)
            if batch and (len(batch) >= self.batch_texts or tokens + size > BATCH_TOKENS):
                yield batch
                batch, tokens = [], 0
            batch.append(text)
            tokens += size
        if batch:
            yield batch

    async def _embed_batch(self, texts: list[str]) -> Embeddings:
        """Embed texts in one request. If it is too long for the server, divide it, and in the end the text."""
        body = encode_json({"model": self.name, "input": texts, **self._fields})
        try:
            return await self._endpoint.ask(body, self.timeout_s, lambda data: self._decode(data, texts))
        except ContextTooLongError:
            if len(texts) > 1:
                middle = len(texts) // 2
                first, second = await self._embed_batch(texts[:middle]), await self._embed_batch(texts[middle:])
                return Embeddings(vectors=first.vectors + second.vectors, usage=first.usage + second.usage)
            if len(texts[0]) < 2 * MIN_CHARS:
                raise
            return await self._embed_batch([texts[0][: len(texts[0]) // 2]])

    def _decode(self, data: bytes, texts: Sequence[str]) -> Embeddings:
        answer = parse_reply(data)
        entries = read_field(answer, "data", list, [])
        found = {read_field(entry, "index", int, place): entry for place, entry in enumerate(entries)}
        if sorted(found) != list(range(len(texts))):
            raise WireFormatError(f"{len(entries)} vectors for {len(texts)} texts")
        vectors = tuple([self._read_vector(found[place]) for place in range(len(texts))])
        told = read_field(answer, "usage", dict, {})
        tokens = read_token_count(told, "prompt_tokens") or read_token_count(told, "total_tokens")
        usage = Usage(input_tokens=tokens or sum(map(estimate_tokens, texts)), estimated=not tokens)
        return Embeddings(vectors=vectors, usage=usage.with_price(self._endpoint.cost_usd))

    def _read_vector(self, entry: object) -> tuple[float, ...]:
        numbers = read_field(entry, "embedding", list, [])
        try:
            vector = tuple(array("d", numbers))
        except (TypeError, OverflowError):
            raise WireFormatError("a vector that has something else than numbers") from None
        if not all(map(math.isfinite, vector)):
            raise WireFormatError("a vector with a number that is not finite")
        if len(vector) != self.dims:
            raise MisuseError(
                f"{self.name!r} returned a vector of {len(vector)} dimensions in place of {self.dims}: give "
                f"OpenAIEmbedder({self.name!r}, dims={len(vector)})"
            )
        return vector


def create_embedder(name: str) -> OpenAIEmbedder:
    """Create the embedder for a name such as "openai:text-embedding-3-small".

    Args:
        name: A prefix, a colon, and the model's name as the provider knows it. The prefix is `openai`, or that of a
            provider with OpenAI's API (`PROVIDERS`), such as `ollama`. The address and the key are taken from the
            environment, as for models.

    Raises:
        MisuseError: if the name has another form or the prefix is unknown, there is no key, or the dimensions of the
            model are not known.
    """
    prefix, _, model = name.partition(":")
    if model and prefix == "openai":
        return OpenAIEmbedder(model)
    if not model or prefix not in PROVIDERS:
        known = ", ".join(f"'{each}:'" for each in sorted({"openai", *PROVIDERS}))
        raise MisuseError(
            f"{name!r} does not name an embedder: give the provider, a colon and the model's name, such as "
            f"'openai:text-embedding-3-small'. Known providers: {known}. For another server that speaks OpenAI's API, "
            "give OpenAIEmbedder('its-model', dims=..., base_url='https://its.host/v1')"
        )
    provider = PROVIDERS[prefix]
    return OpenAIEmbedder(model, base_url=find_base_url(provider), api_key=find_key(provider))


def _base_name(name: str) -> str:
    """Return the name of a model without the vendor before it: "openai/text-embedding-3-small"."""
    return name.rpartition("/")[2].casefold()


def _cut(text: str, tokens: int) -> str:
    """Return the beginning of a text that the model reads whole."""
    limit = tokens * MIN_BYTES_PER_TOKEN
    if BYTE_COUNTER.count(text) <= limit:
        return text
    return text.encode()[:limit].decode(errors="ignore")
