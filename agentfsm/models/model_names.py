"""Create models from names such as "openai:gpt-5.4-mini": the prefix names a provider or an adapter of a package."""

from __future__ import annotations

from agentfsm._lib.plugins import MODELS, create_from_plugin, find_plugins
from agentfsm.core.errors import MisuseError
from agentfsm.models.openai.providers import PROVIDERS, RETIRED, create_compatible_model
from agentfsm.ports.model import Model, ensure_model


def resolve(model: str) -> Model:
    """Create the model for a name such as "openai:gpt-5.4-mini".

    Args:
        model: A prefix, a colon, and the model's name as the provider knows it. The prefix is `openai`,
            `openai-responses` or `anthropic`, one of a provider with OpenAI's API (`PROVIDERS`), or one that an
            installed package provides as an entry point of the group `agentfsm.models`.

    Raises:
        MisuseError: if the name has another form, no installed package knows the prefix, or the package that does is at
            fault; or, from the adapter, if no API key is found, or its package is missing.
    """
    prefix, _, name = model.partition(":")
    if name and prefix in find_plugins(MODELS):  # an installed package goes before the table
        return create_from_plugin(MODELS, prefix, name, ensure_model)
    if name and prefix in RETIRED:
        raise MisuseError(f"{model!r}: {RETIRED[prefix]}.")
    if not name or prefix not in PROVIDERS:
        known = ", ".join(f"'{each}:'" for each in sorted({*find_plugins(MODELS), *PROVIDERS}))
        msg = (
            f"{model!r} does not name a model: give the provider, a colon and the model's name, such as "
            f"'openai:gpt-5.4-mini'. Known providers: {known}. For another server that speaks OpenAI's API, give "
            "OpenAIChat('its-model', base_url='https://its.host/v1')."
        )
        if name:
            msg += f" A package provides '{prefix}:' by an entry point of the group {MODELS}; none is installed."
        raise MisuseError(msg)
    return create_compatible_model(prefix, name)


def resolve_model(model: Model | str) -> Model:
    """Return the model unchanged, or create it if it is a string such as "openai:gpt-5.4-mini".

    Raises:
        MisuseError: when the object is not a model, or as from `resolve`.
    """
    return resolve(model) if isinstance(model, str) else ensure_model(model)
