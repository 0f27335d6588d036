"""Encoding and decoding that chat completions and the Responses API share, without I/O or the SDK."""

from __future__ import annotations

import logging
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from agentfsm.core.usage import Usage
from agentfsm.models.wire import WireFormatError, read_field, read_token_count

if TYPE_CHECKING:
    from collections.abc import Callable

    from agentfsm.ports.model import Request

_log: Final = logging.getLogger("agentfsm.models")


def tool_fields(request: Request, named_choice: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    """Return the fields that control tool calls. Without tools there are none, because OpenAI refuses them then.

    Args:
        request: The request.
        named_choice: Builds the value that forces a tool, from its name.
    """
    if not (request.tools or request.hosted_tools):
        return {}
    fields: dict[str, Any] = {}
    choice, parallel = request.settings.tool_choice, request.settings.parallel_tool_calls
    if choice is not None:
        fields["tool_choice"] = choice if choice in {"auto", "none", "required"} else named_choice(choice)
    if parallel is not None:
        fields["parallel_tool_calls"] = parallel
    return fields


def explain_foreign_call(kind: str) -> str:
    """Return the message of a call that only the caller can execute and agentfsm cannot, with the remedy.

    Args:
        kind: Type of the call in the API, such as "custom".
    """
    return (
        f"The model made a {kind}, which the caller has to execute, but agentfsm executes only functions. "
        "Leave that tool out of Settings(extra_body=...), or offer it as a function."
    )


def read_openai_usage(source: object, input_name: str, output_name: str) -> Usage | None:
    """Return the usage in a response or an event; None if it is missing, zero or malformed.

    A malformed one does not fail the reply. Servers that do not count send zeros; the engine then estimates.

    Args:
        source: The response, or the event of a stream.
        input_name: Name of input tokens in the fields: "prompt" or "input".
        output_name: Name of output tokens in the fields: "completion" or "output".
    """
    try:
        fields = read_field(source, "usage", dict, {})
        usage = _build_usage(fields, input_name, output_name)
    except WireFormatError:
        return None
    return usage if usage.tokens else None


def _build_usage(usage: dict[str, Any], input_name: str, output_name: str) -> Usage:
    of_input = read_field(usage, f"{input_name}_tokens_details", dict, {})
    of_output = read_field(usage, f"{output_name}_tokens_details", dict, {})
    # Details are capped at their total: servers may count otherwise.
    input_tokens, output_tokens = (
        read_token_count(usage, f"{input_name}_tokens"),
        read_token_count(usage, f"{output_name}_tokens"),
    )
    more = read_token_count(usage, "total_tokens") - input_tokens - output_tokens
    if more > 0:  # xAI, for example, counts reasoning beside the output
        _warn_of_total(", ".join(sorted(usage)))
        output_tokens += more
    cached_tokens = min(read_token_count(of_input, "cached_tokens"), input_tokens)
    return Usage(
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        cached_tokens=cached_tokens,
        cache_write_tokens=min(read_token_count(of_input, "cache_write_tokens"), input_tokens - cached_tokens),
        reasoning_tokens=min(read_token_count(of_output, "reasoning_tokens"), output_tokens),
    )


@cache
def _warn_of_total(names: str) -> None:
    """Log once for each form of a usage that its total is more than the sum of its parts."""
    _log.warning(
        "a usage whose total is more than input and output (fields: %s): the rest counts as output, and as paid", names
    )
