"""Differences of servers from OpenAI's chat completions, by host. Those of models are in their profiles."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from hashlib import sha256
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import attrs

from agentfsm.core.value import Value
from agentfsm.models.profiles import ModelProfile
from agentfsm.ports.model import OutputMode

# Returns the messages as a server accepts them, from those that OpenAI accepts, without the instructions.
Adapt: TypeAlias = Callable[[Iterable[dict[str, Any]]], Iterator[dict[str, Any]]]


@attrs.frozen(kw_only=True)
class Dialect(Value):
    """Requirements of a server that OpenAI does not have."""

    adapt: Adapt = iter
    """Changes the messages of a request."""

    sees_neighbours: bool = False
    """Whether `adapt` changes a message that follows the result of a call, because of that result."""

    takes_reasoning: bool = False
    """Whether the field `reasoning` of a reply is sent back. Each server gets `reasoning_content` and
    `reasoning_details` back that sends them.
    """

    takes_stream_options: bool = True
    """Whether a request for a stream may ask for its usage. Other servers send it without being asked."""

    field_names: Mapping[str, str] = MappingProxyType({})
    """Names of settings that differ from OpenAI's."""

    joins_roles: bool = False
    """Whether `adapt` joins messages of the same side, with the results of calls on that of the user."""

    takes_tools: bool = True
    """Whether a request may have tools."""

    forces_tools: bool = True
    """Whether a request may force a call: `tool_choice` of "required" or a name."""

    takes_cache_key: bool = False
    """Whether a request may name a key by which the server finds its prompt cache, as at OpenAI itself."""

    output_modes: tuple[OutputMode, ...] = ()
    """Modes of typed answers, the preferred one first. Empty: those of every server."""


OPENAI: Final = Dialect()


# Mistral

_MISTRAL_ID: Final = re.compile(r"[a-zA-Z0-9]{9}")
_DIGITS: Final = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_ID_CHARS: Final = 9

# Stands between the results of calls and a message of the user. It must not be empty.
_BRIDGE: Final = "Noted."


def to_mistral_id(call_id: str) -> str:
    """Return a call id of nine letters and digits: a hash of the id, or the id itself if it has that form.

    Source: "Tool call id was t1.0 but must be a-z, A-Z, 0-9, with a length of 9" (mistral-common, code 3280). Of 512
    calls in each of 1,000 turns, two have one id with a probability of 1 in 100,000.
    """
    if _MISTRAL_ID.fullmatch(call_id):
        return call_id
    number = int.from_bytes(sha256(call_id.encode("utf-8", "surrogatepass")).digest())
    digits = []
    for _ in range(_ID_CHARS):
        number, digit = divmod(number, len(_DIGITS))
        digits.append(_DIGITS[digit])
    return "".join(digits)


def _as_user_note(message: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": f"<system>{message['content']}</system>"}


def _adapt_to_mistral(messages: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield messages with Mistral's ids, in an order that it accepts.

    Source: "Unexpected role 'user' after role 'tool'" (code 3230, NousResearch/hermes-agent#20154), and mistral-common
    for the role "system", which may not follow the roles "tool" and "assistant".
    """
    before = ""
    for given in messages:
        is_misplaced = given["role"] == "system" and before in {"tool", "assistant"}
        message = _as_user_note(given) if is_misplaced else given
        role = message["role"]
        if role == "user" and before == "tool":
            yield {"role": "assistant", "content": _BRIDGE}
        before = role
        if role == "tool":
            yield {**message, "tool_call_id": to_mistral_id(message["tool_call_id"])}
        elif calls := message.get("tool_calls"):
            yield {**message, "tool_calls": [{**call, "id": to_mistral_id(call["id"])} for call in calls]}
        else:
            yield message


# Perplexity


def _adapt_to_perplexity(messages: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield messages of alternating sides. Calls and results of other models become texts: there are no tools.

    Source: "After the (optional) system message(s), user or tool message(s) should alternate with assistant message(s)"
    (perplexityai/api-discussion#265, serac-labs/serac#53).
    """
    joined: dict[str, Any] = {}
    for given in messages:
        message = _as_user_note(given) if given["role"] == "system" else given
        content = message["content"] or ""
        if message["role"] == "tool":
            message = {"role": "user", "content": f"[Result of {message['tool_call_id']}] {content}"}
        elif calls := message.get("tool_calls"):
            called = [(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in calls]
            lines = [f"[Call {call_id}] {name}({arguments})" for call_id, name, arguments in called]
            message = {"role": "assistant", "content": "\n".join(filter(None, [content, *lines]))}
        if joined and joined["role"] == message["role"]:
            parts = [_as_parts(joined["content"]), _as_parts(message["content"])]
            joined = {"role": message["role"], "content": [*parts[0], *parts[1]]}
            continue
        if joined:
            yield joined
        joined = message
    if joined:
        yield joined


def _as_parts(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


_MISTRAL: Final = Dialect(adapt=_adapt_to_mistral, sees_neighbours=True)


# Gemini

# Takes the place of a signature that does not exist, such as that of another model's call. Gemini 3 refuses the first
# call of a message without one: https://ai.google.dev/gemini-api/docs/thought-signatures
_UNSIGNED: Final = {"google": {"thought_signature": "skip_thought_signature_validator"}}


def _adapt_to_gemini(messages: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for message in messages:
        calls = message.get("tool_calls")
        if calls and not any("extra_content" in call for call in calls):
            yield {**message, "tool_calls": [{**calls[0], "extra_content": _UNSIGNED}, *calls[1:]]}
        else:
            yield message


_NEW_LIMIT: Final = MappingProxyType({"max_tokens": "max_completion_tokens"})
# A typed answer by a tool would have to be forced.
_UNFORCED: Final = Dialect(forces_tools=False, output_modes=(OutputMode.JSON, OutputMode.PROMPT))
_KIMI: Final = attrs.evolve(_UNFORCED, field_names=_NEW_LIMIT)

# By the end of the host. Mistral refuses fields that it does not know: "extra_forbidden" (dnakov/anon-kode#53).
_BY_HOST: Final[Mapping[str, Dialect]] = {
    # docs.mistral.ai/inference/conversations/advanced/prompt-caching: without a key, nothing is cached.
    "mistral.ai": attrs.evolve(
        _MISTRAL, takes_stream_options=False, field_names={"seed": "random_seed"}, takes_cache_key=True
    ),
    # docs.fireworks.ai/guides/prompt-caching: requests with a key go to the same replica.
    "fireworks.ai": Dialect(takes_cache_key=True),
    "generativelanguage.googleapis.com": Dialect(adapt=_adapt_to_gemini),
    "openrouter.ai": Dialect(takes_reasoning=True),
    # inference-docs.cerebras.ai/api-reference/chat-completions
    "cerebras.ai": Dialect(field_names=_NEW_LIMIT),
    # platform.kimi.ai/docs/api/chat and /docs/guide/migrating-from-openai-to-kimi: no "required", no name of a tool.
    "moonshot.ai": _KIMI,
    "moonshot.cn": _KIMI,
    # docs.perplexity.ai: structured outputs by a schema; no tools.
    "perplexity.ai": Dialect(
        adapt=_adapt_to_perplexity,
        joins_roles=True,
        takes_tools=False,
        output_modes=(OutputMode.SCHEMA, OutputMode.PROMPT),
    ),
    # docs.z.ai/api-reference/llm/chat-completion: "only auto is supported".
    "z.ai": _UNFORCED,
    "bigmodel.cn": _UNFORCED,
}
# vLLM, Ollama, SGLang and LM Studio ignore fields that they do not know. Groq and Cerebras refuse their own `reasoning`
# (vercel/ai#8056).
_OWN_SERVER: Final = Dialect(takes_reasoning=True)


def find_dialect(host: str, profile: ModelProfile) -> Dialect:
    """Return the requirements of a server and a model.

    Args:
        host: Host of the server.
        profile: Abilities of the model.
    """
    named = next((dialect for end, dialect in _BY_HOST.items() if f".{host}".endswith(f".{end}")), None)
    dialect = named or (_OWN_SERVER if _is_private(host) else OPENAI)
    if dialect.adapt is iter and profile.checks_messages:
        return attrs.evolve(dialect, adapt=_adapt_to_mistral, sees_neighbours=True)
    if dialect.adapt is _adapt_to_gemini and not profile.signs_calls:
        return OPENAI
    return dialect


def _is_private(host: str) -> bool:
    """Return whether the host is a machine of the user: a private address, or a name without a domain."""
    try:
        return ipaddress.ip_address(host).is_private
    except ValueError:
        return "." not in host
