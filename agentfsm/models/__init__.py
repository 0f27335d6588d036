"""Models: each adapter in a file of its own, loaded when it is asked for, so that no vendor library loads before."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from agentfsm._plugins import MODELS, find_plugins, load_plugin
from agentfsm.core.errors import MisuseError
from agentfsm.ports import ensure_model

if TYPE_CHECKING:
    from agentfsm.models.anthropic.model import Anthropic
    from agentfsm.models.openai.chat import OpenAIChat
    from agentfsm.models.openai.conversion import from_openai, to_openai
    from agentfsm.models.openai.responses import OpenAIResponses
    from agentfsm.models.prices import Price
    from agentfsm.models.wrappers.fallback import Fallback
    from agentfsm.models.wrappers.router import Router
    from agentfsm.models.wrappers.throttle import Throttled
    from agentfsm.ports import Model

__all__ = [
    "Anthropic",
    "Fallback",
    "OpenAIChat",
    "OpenAIResponses",
    "Price",
    "Router",
    "Throttled",
    "from_openai",
    "resolve",
    "to_openai",
]

# Where each name lives.
_EXPORT_MODULES = {
    "Anthropic": "agentfsm.models.anthropic.model",
    "Fallback": "agentfsm.models.wrappers.fallback",
    "OpenAIChat": "agentfsm.models.openai.chat",
    "OpenAIResponses": "agentfsm.models.openai.responses",
    "Price": "agentfsm.models.prices",
    "Router": "agentfsm.models.wrappers.router",
    "Throttled": "agentfsm.models.wrappers.throttle",
    "from_openai": "agentfsm.models.openai.conversion",
    "to_openai": "agentfsm.models.openai.conversion",
}


def resolve(model: str) -> Model:
    """Make the model that a name like "openai:gpt-4o" stands for.

    Args:
        model: A prefix, a colon, and the model's name as the provider knows it. The prefix is `openai`,
            `openai-responses` or `anthropic`, or one that an installed package provides as an entry point of the group
            `agentfsm.models`.

    Raises:
        MisuseError: if the name has another form, or no installed package knows the prefix; or, from the adapter, if no
            API key is found, or its package is missing.
    """
    prefix, _, name = model.partition(":")
    if not name or prefix not in find_plugins(MODELS):
        known = ", ".join(f"'{each}:'" for each in sorted(find_plugins(MODELS)))
        msg = (
            f"{model!r} names no model: a model is named by its provider, a colon and its name, such as "
            f"'openai:gpt-4o'. Known providers: {known}. For another server that speaks OpenAI's wire, pass "
            "OpenAIChat('its-model', base_url='https://its.host/v1')."
        )
        raise MisuseError(msg)
    adapter: Model = load_plugin(MODELS, prefix)(name)
    return adapter


def resolve_model(model: Model | str) -> Model:
    """Return a model that is given as such, or by a string such as "openai:gpt-4o".

    Raises:
        MisuseError: when it is none, or as from `resolve`.
    """
    return resolve(model) if isinstance(model, str) else ensure_model(model)


def __getattr__(name: str) -> Any:
    if home := _EXPORT_MODULES.get(name):
        return getattr(import_module(home), name)
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)


def __dir__() -> list[str]:
    return [*globals(), *_EXPORT_MODULES]
