"""Model adapters and wrappers. Each is imported on first use, so that unused SDKs are not loaded."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from agentfsm.models.model_names import resolve

if TYPE_CHECKING:
    from agentfsm.core.hosted_tools import (
        CodeExecution,
        FileSearch,
        HostedMCP,
        HostedTool,
        ImageGeneration,
        URLContext,
        WebSearch,
    )
    from agentfsm.core.messages import Citation, HostedCall, HostedContent, HostedFile
    from agentfsm.models.adapter import AdapterModel
    from agentfsm.models.anthropic.model import Anthropic
    from agentfsm.models.gemini.model import Gemini
    from agentfsm.models.openai.chat import OpenAIChat
    from agentfsm.models.openai.conversion import from_openai, to_openai
    from agentfsm.models.openai.embeddings import OpenAIEmbedder
    from agentfsm.models.openai.reranking import HTTPReranker
    from agentfsm.models.openai.responses import OpenAIResponses
    from agentfsm.models.prices import Price
    from agentfsm.models.profiles import ModelProfile, Thinking, find_profile
    from agentfsm.models.wrappers.cached import CachedModel
    from agentfsm.models.wrappers.fallback import Fallback
    from agentfsm.models.wrappers.router import Router
    from agentfsm.models.wrappers.throttle import Throttled
    from agentfsm.models.wrappers.tiered import TierClassifier, Tiered

__all__ = [
    "AdapterModel",
    "Anthropic",
    "CachedModel",
    "Citation",
    "CodeExecution",
    "Fallback",
    "FileSearch",
    "Gemini",
    "HTTPReranker",
    "HostedCall",
    "HostedContent",
    "HostedFile",
    "HostedMCP",
    "HostedTool",
    "ImageGeneration",
    "ModelProfile",
    "OpenAIChat",
    "OpenAIEmbedder",
    "OpenAIResponses",
    "Price",
    "Router",
    "Thinking",
    "Throttled",
    "TierClassifier",
    "Tiered",
    "URLContext",
    "WebSearch",
    "find_profile",
    "from_openai",
    "resolve",
    "to_openai",
]

# The module of each exported name.
_EXPORT_MODULES = {
    "Citation": "agentfsm.core.messages",
    "CodeExecution": "agentfsm.core.hosted_tools",
    "FileSearch": "agentfsm.core.hosted_tools",
    "HostedCall": "agentfsm.core.messages",
    "HostedContent": "agentfsm.core.messages",
    "HostedFile": "agentfsm.core.messages",
    "HostedMCP": "agentfsm.core.hosted_tools",
    "HostedTool": "agentfsm.core.hosted_tools",
    "ImageGeneration": "agentfsm.core.hosted_tools",
    "URLContext": "agentfsm.core.hosted_tools",
    "WebSearch": "agentfsm.core.hosted_tools",
    "AdapterModel": "agentfsm.models.adapter",
    "Anthropic": "agentfsm.models.anthropic.model",
    "CachedModel": "agentfsm.models.wrappers.cached",
    "Fallback": "agentfsm.models.wrappers.fallback",
    "Gemini": "agentfsm.models.gemini.model",
    "ModelProfile": "agentfsm.models.profiles",
    "Thinking": "agentfsm.models.profiles",
    "find_profile": "agentfsm.models.profiles",
    "OpenAIChat": "agentfsm.models.openai.chat",
    "OpenAIEmbedder": "agentfsm.models.openai.embeddings",
    "HTTPReranker": "agentfsm.models.openai.reranking",
    "OpenAIResponses": "agentfsm.models.openai.responses",
    "Price": "agentfsm.models.prices",
    "Router": "agentfsm.models.wrappers.router",
    "Throttled": "agentfsm.models.wrappers.throttle",
    "TierClassifier": "agentfsm.models.wrappers.tiered",
    "Tiered": "agentfsm.models.wrappers.tiered",
    "from_openai": "agentfsm.models.openai.conversion",
    "to_openai": "agentfsm.models.openai.conversion",
}


def __getattr__(name: str) -> Any:
    if module := _EXPORT_MODULES.get(name):
        return getattr(import_module(module), name)
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)


def __dir__() -> list[str]:
    return [*globals(), *_EXPORT_MODULES]
