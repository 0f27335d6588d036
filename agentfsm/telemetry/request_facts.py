"""Facts about a model request that its journal does not have, from the process that sends it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Final
from urllib.parse import urlsplit

import attrs

from agentfsm.core.settings import Settings
from agentfsm.core.value import Value
from agentfsm.ports.model import Model, Reply, Request
from agentfsm.telemetry import attribute_names as n

# Providers by the end of the host's name, as the conventions call them; the first that matches counts.
_PROVIDERS: Final[Mapping[str, str]] = {
    "anthropic.com": "anthropic",
    "openai.azure.com": "azure.ai.openai",
    "azure.com": "azure.ai.inference",
    "openai.com": "openai",
    "generativelanguage.googleapis.com": "gcp.gemini",
    "aiplatform.googleapis.com": "gcp.vertex_ai",
    "amazonaws.com": "aws.bedrock",
    "cohere.com": "cohere",
    "deepseek.com": "deepseek",
    "groq.com": "groq",
    "mistral.ai": "mistral_ai",
    "perplexity.ai": "perplexity",
    "x.ai": "x_ai",
}
# Providers by the formats of adapters, for other hosts: the conventions name the API, which many servers have.
_FORMATS: Final[Mapping[str, str]] = {
    "chat completions": "openai",
    "openai-responses": "openai",
    "anthropic": "anthropic",
    "gemini": "gcp.gen_ai",
}
_PORTS: Final[Mapping[str, int]] = {"https": 443, "http": 80}


@attrs.frozen(kw_only=True)
class RequestFacts(Value):
    """A model request, and its outcome."""

    model: Model
    """The model that was asked."""

    request: Request
    """The request."""

    reply: Reply | None = None
    """The reply; None if it failed."""

    error_type: str = ""
    """HTTP status or refusal of the provider, else the name of the exception's class; empty if it did not fail."""

    exception_type: str = ""
    """Name of the exception's class with its module; empty if it did not fail."""

    @classmethod
    def of(cls, model: Model, request: Request, outcome: Reply | BaseException) -> RequestFacts:
        """Return the facts of a request, without the exception, which would keep the frames of its traceback alive."""
        if isinstance(outcome, Reply):
            return cls(model=model, request=request, reply=outcome)
        kind = type(outcome)
        code = getattr(outcome, "status", None) or getattr(outcome, "refusal", None) or kind.__qualname__
        return cls(
            model=model,
            request=request,
            error_type=str(code),
            exception_type=f"{kind.__module__}.{kind.__qualname__}",
        )

    def to_attributes(self, write: Callable[[str], str | None]) -> dict[str, object]:
        """Return the attributes of the request's span; `write` returns a text as it is exported."""
        request, reply = self.request, self.reply
        texts: dict[str, object] = {}
        if write("") is not None:
            parts = [{"type": "text", "content": request.instructions}] if request.instructions else []
            tools = [{"type": "function", **tool.openai()["function"]} for tool in request.tools]
            texts[n.INSTRUCTIONS] = parts and write(json.dumps(parts, ensure_ascii=False))
            texts[n.TOOL_DEFINITIONS] = tools and write(json.dumps(tools, ensure_ascii=False))
        return {
            **describe_model(self.model, "" if reply is None else reply.model),
            **describe_settings(request.settings),
            n.OUTPUT_TYPE: None if request.output is None else "json",
            n.RESPONSE_ID: None if reply is None else reply.response_id,
            n.RESPONSE_MODEL: None if reply is None else reply.served_model,
            n.FINISH_REASONS: None if reply is None else (str(reply.finish_reason),),
            **texts,
        }


def describe_settings(settings: Settings | None) -> dict[str, object]:
    """Return the attributes of settings; without those that are not sent."""
    if settings is None:
        return {}
    return {
        n.TEMPERATURE: settings.temperature,
        n.TOP_P: settings.top_p,
        n.MAX_TOKENS: settings.max_tokens,
        n.SEED: settings.seed,
        n.STOP_SEQUENCES: settings.stop,
        n.STREAM: settings.stream or None,
        n.REASONING: settings.reasoning_effort,
    }


def describe_model(model: Model, replied: str) -> dict[str, object]:
    """Return the attributes of a model: its provider, and the address of its server.

    Args:
        model: The model, which may choose among several.
        replied: Name of the one that replied; empty if none did, or the model is a single one.
    """
    single = [each for each in _list_single_models(model) if not replied or each.name == replied]
    found = {(_name_provider(each), getattr(each, "base_url", "")) for each in single}
    if len(found) != 1:
        return {}  # it is not known which of them was asked
    [(provider, address)] = found
    if not address:
        return {n.PROVIDER: provider}
    url = urlsplit(address)
    return {n.PROVIDER: provider, n.SERVER_ADDRESS: url.hostname, n.SERVER_PORT: url.port or _PORTS.get(url.scheme)}


def _list_single_models(model: Model) -> Iterator[Model]:
    """Yield the models that a wrapper chooses among, those of wrappers in it included."""
    inner = getattr(model, "models", None)
    if not isinstance(inner, tuple):
        yield model
        return
    for each in inner:
        yield from _list_single_models(each)


def _name_provider(model: Model) -> str:
    """Return the provider of a model, or the name of its class."""
    host = urlsplit(getattr(model, "base_url", "")).hostname or ""
    known = next((name for end, name in _PROVIDERS.items() if f".{host}".endswith(f".{end}")), None)
    return known or _FORMATS.get(getattr(model, "provider", ""), type(model).__name__)
