"""Servers with OpenAI's API, by the prefix of a model's name: addresses and the environment variables of their keys."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import attrs

from agentfsm.core.errors import MisuseError
from agentfsm.core.value import Value

if TYPE_CHECKING:
    from agentfsm.models.openai.chat import OpenAIChat


@attrs.frozen(kw_only=True)
class Provider(Value):
    """A provider with OpenAI's chat completions."""

    title: str
    """Name of the provider, for errors."""

    base_url: str | None
    """Address of its service; None if each customer has an address."""

    url_variable: str | None = None
    """Environment variable that replaces the address; None if there is none."""

    url_suffix: str = ""
    """Path that is appended to the address of that variable unless it is there."""

    key_variables: tuple[str, ...]
    """Environment variables of the API key; the first that is set counts."""

    needs_key: bool = True
    """Whether requests without a key are refused. Servers on one's own machine need none."""


PROVIDERS: Final[Mapping[str, Provider]] = {
    "alibaba": Provider(
        title="Alibaba Cloud Model Studio",
        base_url="https://dashscope-intl.aliyuncs.com/compatible-mode/v1",
        url_variable="DASHSCOPE_BASE_URL",  # a key belongs to one region
        url_suffix="/compatible-mode/v1",
        key_variables=("DASHSCOPE_API_KEY",),
    ),
    "azure": Provider(
        title="Azure OpenAI",
        base_url=None,
        url_variable="AZURE_OPENAI_ENDPOINT",
        url_suffix="/openai/v1",
        key_variables=("AZURE_OPENAI_API_KEY",),
    ),
    "cerebras": Provider(title="Cerebras", base_url="https://api.cerebras.ai/v1", key_variables=("CEREBRAS_API_KEY",)),
    "deepseek": Provider(title="DeepSeek", base_url="https://api.deepseek.com/v1", key_variables=("DEEPSEEK_API_KEY",)),
    "fireworks": Provider(
        title="Fireworks", base_url="https://api.fireworks.ai/inference/v1", key_variables=("FIREWORKS_API_KEY",)
    ),
    "gemini": Provider(
        title="Gemini",
        base_url="https://generativelanguage.googleapis.com/v1beta/openai",
        key_variables=("GEMINI_API_KEY", "GOOGLE_API_KEY"),
    ),
    "groq": Provider(title="Groq", base_url="https://api.groq.com/openai/v1", key_variables=("GROQ_API_KEY",)),
    "huggingface": Provider(
        title="Hugging Face", base_url="https://router.huggingface.co/v1", key_variables=("HF_TOKEN",)
    ),
    "mistral": Provider(title="Mistral", base_url="https://api.mistral.ai/v1", key_variables=("MISTRAL_API_KEY",)),
    "moonshot": Provider(
        title="Moonshot",
        base_url="https://api.moonshot.ai/v1",
        url_variable="MOONSHOT_BASE_URL",  # https://api.moonshot.cn/v1 in China, with keys of its own
        url_suffix="/v1",
        key_variables=("MOONSHOT_API_KEY",),
    ),
    "nebius": Provider(
        title="Nebius", base_url="https://api.tokenfactory.nebius.com/v1", key_variables=("NEBIUS_API_KEY",)
    ),
    "ollama": Provider(
        title="Ollama",
        base_url="http://localhost:11434/v1",
        url_variable="OLLAMA_BASE_URL",
        url_suffix="/v1",
        key_variables=("OLLAMA_API_KEY",),
        needs_key=False,
    ),
    "openrouter": Provider(
        title="OpenRouter", base_url="https://openrouter.ai/api/v1", key_variables=("OPENROUTER_API_KEY",)
    ),
    "perplexity": Provider(
        title="Perplexity", base_url="https://api.perplexity.ai", key_variables=("PERPLEXITY_API_KEY",)
    ),
    "sambanova": Provider(
        title="SambaNova", base_url="https://api.sambanova.ai/v1", key_variables=("SAMBANOVA_API_KEY",)
    ),
    "together": Provider(title="Together", base_url="https://api.together.xyz/v1", key_variables=("TOGETHER_API_KEY",)),
    "vllm": Provider(
        title="vLLM",
        base_url="http://localhost:8000/v1",
        url_variable="VLLM_BASE_URL",
        url_suffix="/v1",
        key_variables=("VLLM_API_KEY",),
        needs_key=False,
    ),
    "xai": Provider(title="xAI", base_url="https://api.x.ai/v1", key_variables=("XAI_API_KEY",)),
    "zai": Provider(title="Z.ai", base_url="https://api.z.ai/api/paas/v4", key_variables=("ZAI_API_KEY",)),
}

RETIRED: Final[Mapping[str, str]] = {
    "github": (
        "GitHub Models was retired on 30 July 2026 and answers no requests: use a model of Azure ('azure:gpt-5'), or "
        "one of the model's own provider"
    ),
}
"""Prefixes of services that have ended, with the remedy."""


def create_compatible_model(prefix: str, name: str) -> OpenAIChat:
    """Create the model of a provider, with the address and the key of the environment.

    Args:
        prefix: A key of `PROVIDERS`.
        name: Name of the model at the provider.

    Raises:
        MisuseError: if the environment has no key or no address, or one that is invalid.
    """
    from agentfsm.models.openai.chat import OpenAIChat  # noqa: PLC0415  brings the SDK

    provider = PROVIDERS[prefix]
    model = OpenAIChat(name, base_url=find_base_url(provider), api_key=find_key(provider))
    model.asks_window = not provider.needs_key
    return model


def find_base_url(provider: Provider) -> str:
    """Return the address of a provider, from its environment variable if that is set.

    Raises:
        MisuseError: if there is none.
    """
    given = os.environ.get(provider.url_variable or "", "").rstrip("/")
    if given:
        return given if given.endswith(provider.url_suffix) else given + provider.url_suffix
    if provider.base_url is None:
        raise MisuseError(
            f"there is no address for {provider.title}: set {provider.url_variable}, for example to "
            "https://NAME.openai.azure.com, or pass OpenAIChat(..., base_url=...)"
        )
    return provider.base_url


def find_key(provider: Provider) -> str:
    """Return the API key of a provider from the environment; "none" for a server that needs none.

    Raises:
        MisuseError: if there is none.
    """
    key = next(filter(None, map(os.environ.get, provider.key_variables)), None)
    if key is None and provider.needs_key:
        raise MisuseError(
            f"there is no API key for {provider.title}: set {' or '.join(provider.key_variables)}, or pass "
            "OpenAIChat(..., base_url=..., api_key=...)"
        )
    # Without a key of its own, the server must not get that of OPENAI_API_KEY.
    return key or "none"
