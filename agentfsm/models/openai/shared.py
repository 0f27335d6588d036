"""What OpenAI's two wires have in common, chat completions and the Responses API. Pure, and no vendor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agentfsm.core.usage import Usage
from agentfsm.models.wire import WireFormatError, read_field, read_token_count

if TYPE_CHECKING:
    from collections.abc import Callable

    from agentfsm.ports.model import Request


def tool_fields(request: Request, named_choice: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    """Return the fields that say how tools are called; none where there are no tools: OpenAI refuses them there.

    Args:
        request: The whole question.
        named_choice: How the wire writes the choice of one tool, by its name.
    """
    if not request.tools:
        return {}
    fields: dict[str, Any] = {}
    choice, parallel = request.settings.tool_choice, request.settings.parallel_tool_calls
    if choice is not None:
        fields["tool_choice"] = choice if choice in {"auto", "none", "required"} else named_choice(choice)
    if parallel is not None:
        fields["parallel_tool_calls"] = parallel
    return fields


def read_openai_usage(source: object, input_name: str, output_name: str) -> Usage | None:
    """Return what was billed, by an answer or by a piece of one.

    None where that is not said, or not in the wire's form: an odd bill spoils no reply.

    Args:
        source: The answer, or the piece.
        input_name: What the wire calls what was read: "prompt" or "input".
        output_name: What it calls what was written: "completion" or "output".
    """
    try:
        usage = read_field(source, "usage", dict, {})
        return _build_usage(usage, input_name, output_name) if usage else None
    except WireFormatError:
        return None


def _build_usage(usage: dict[str, Any], input_name: str, output_name: str) -> Usage:
    of_input = read_field(usage, f"{input_name}_tokens_details", dict, {})
    of_output = read_field(usage, f"{output_name}_tokens_details", dict, {})
    # A share is never more than the whole, whatever the server counts.
    input_tokens, output_tokens = (
        read_token_count(usage, f"{input_name}_tokens"),
        read_token_count(usage, f"{output_name}_tokens"),
    )
    cached_tokens = min(read_token_count(of_input, "cached_tokens"), input_tokens)
    return Usage(
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        cached_tokens=cached_tokens,
        cache_write_tokens=min(read_token_count(of_input, "cache_write_tokens"), input_tokens - cached_tokens),
        reasoning_tokens=min(read_token_count(of_output, "reasoning_tokens"), output_tokens),
    )
