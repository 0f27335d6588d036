"""What OpenAI's two wires have in common, chat completions and the Responses API. Pure, and no vendor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agentfsm.core.messages import Usage
from agentfsm.models.wire import FormError, count, field

if TYPE_CHECKING:
    from collections.abc import Callable

    from agentfsm.ports import Request


def tool_fields(request: Request, named: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    """Return the fields that say how tools are called; none where there are no tools: OpenAI refuses them there.

    Args:
        request: The whole question.
        named: How the wire writes the choice of one tool, by its name.
    """
    if not request.tools:
        return {}
    fields: dict[str, Any] = {}
    choice, parallel = request.settings.tool_choice, request.settings.parallel_tool_calls
    if choice is not None:
        fields["tool_choice"] = choice if choice in {"auto", "none", "required"} else named(choice)
    if parallel is not None:
        fields["parallel_tool_calls"] = parallel
    return fields


def usage_by(source: object, into: str, out: str) -> Usage | None:
    """Return what was billed, by an answer or by a piece of one.

    None where that is not said, or not in the wire's form: an odd bill spoils no reply.

    Args:
        source: The answer, or the piece.
        into: What the wire calls what was read: "prompt" or "input".
        out: What it calls what was written: "completion" or "output".
    """
    try:
        usage = field(source, "usage", dict, {})
        return _usage(usage, into, out) if usage else None
    except FormError:
        return None


def _usage(usage: dict[str, Any], into: str, out: str) -> Usage:
    of_input = field(usage, f"{into}_tokens_details", dict, {})
    of_output = field(usage, f"{out}_tokens_details", dict, {})
    # A share is never more than the whole, whatever the server counts.
    input_tokens, output_tokens = count(usage, f"{into}_tokens"), count(usage, f"{out}_tokens")
    cached_tokens = min(count(of_input, "cached_tokens"), input_tokens)
    return Usage(
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        cached_tokens=cached_tokens,
        cache_write_tokens=min(count(of_input, "cache_write_tokens"), input_tokens - cached_tokens),
        reasoning_tokens=min(count(of_output, "reasoning_tokens"), output_tokens),
    )
