"""Adapter for servers with a `/rerank`, as Cohere's, Jina's and vLLM's."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from agentfsm.core.messages import replace_surrogates
from agentfsm.core.usage import Usage
from agentfsm.core.validation import POSITIVE, is_number
from agentfsm.models.openai.embeddings import JSONEndpoint
from agentfsm.models.wire import WireFormatError, encode_json, parse_reply, read_field, read_token_count
from agentfsm.ports.reranker import Reranker, Reranking
from agentfsm.tokens.ledger import estimate_tokens

if TYPE_CHECKING:
    from collections.abc import Awaitable

    import httpx
    import httpx2

    from agentfsm.models.prices import Prices

# Seconds that a server may stay silent: the request of the agent waits for it.
TIMEOUT_S: Final = 10.0


class _RerankEndpoint(JSONEndpoint[Reranking]):
    """The `/rerank` of a server."""

    resource = "rerank"
    path = "/rerank"
    expected_reply = "a list of scores"


_RerankEndpoint.__name__ = "HTTPReranker"  # errors name the class that their reader has called


class HTTPReranker(Reranker):
    """Reranker of a server with a `/rerank`: Cohere, Jina, Voyage-like gateways, vLLM, TEI behind a proxy, and others.

    A request has `model`, `query` and `documents`, and its answer `results` with `index` and `relevance_score` (Source:
    docs.cohere.com/reference/rerank and jina.ai/reranker, November 2026). The texts of the items leave the machine.

    Args:
        name: Name of the model at the server, such as "rerank-v3.5" or "jina-reranker-v2-base-multilingual".
        base_url: Address before `/rerank`: "https://api.cohere.com/v2", "https://api.jina.ai/v1", or your own.
        api_key: API key, or a function, plain or async, that returns the current one. None for a server without keys.
        headers: Headers of each request.
        http_client: HTTP client of your own for one event loop; you close it.
        timeout_s: Seconds that the server may stay silent, above 0. Default 10.
        price: Price of the model, or a table of prices by prefixes of models' names. Default: the public list of
            genai-prices, if that package is installed.
    """

    def __init__(
        self,
        name: str,
        *,
        base_url: str,
        api_key: str | Callable[[], str] | Callable[[], Awaitable[str]] | None = None,
        headers: Mapping[str, str] | None = None,
        http_client: httpx.AsyncClient | httpx2.AsyncClient | None = None,
        timeout_s: float = TIMEOUT_S,
        price: Prices | None = None,
    ) -> None:
        POSITIVE.check("HTTPReranker", "timeout_s", timeout_s)
        self._endpoint = _RerankEndpoint(
            name, base_url=base_url, api_key=api_key, headers=headers, http_client=http_client, price=price
        )
        self.name = name
        self.timeout_s = timeout_s

    async def rerank(self, query: str, texts: Sequence[str]) -> Reranking:
        """Return the server's score for each text. Nothing is retried.

        Raises:
            ModelError: if the server cannot be reached, refuses the request, or answers with something else.
        """
        documents = [replace_surrogates(text) for text in texts]
        sent = {"model": self.name, "query": replace_surrogates(query), "documents": documents, "top_n": len(texts)}
        tokens = sum(map(estimate_tokens, (query, *texts)))
        return await self._endpoint.ask(
            encode_json(sent), self.timeout_s, lambda data: self._decode(data, len(texts), tokens)
        )

    async def aclose(self) -> None:
        """Close the connections of the running event loop. A later call opens new ones."""
        await self._endpoint.aclose()

    def _decode(self, data: bytes, count: int, estimate: int) -> Reranking:
        answer = parse_reply(data)
        entries = read_field(answer, "results", list, [])
        scores = {read_field(each, "index", int, -1): each.get("relevance_score") for each in entries}
        if sorted(scores) != list(range(count)) or not all(
            is_number(each) and math.isfinite(each) for each in scores.values()
        ):
            raise WireFormatError(f"{len(entries)} scores for {count} texts, or some that are no finite numbers")
        tokens = read_token_count(read_field(answer, "usage", dict, {}), "total_tokens")
        usage = Usage(input_tokens=tokens or estimate, estimated=not tokens)
        return Reranking(
            scores=tuple([float(scores[place]) for place in range(count)]),
            usage=usage.with_price(self._endpoint.cost_usd),
        )
