"""Asking a model something beside the run (which tools, how good, in short), within the run's budget."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from agentfsm.core.errors import LimitError, ModelError
from agentfsm.core.messages import TextPart, UserMessage
from agentfsm.core.usage import Usage
from agentfsm.engine.model_calls.reply import calculate_usd, fetch_reply
from agentfsm.engine.model_calls.request import price_usage
from agentfsm.ports.model import Request
from agentfsm.tokens.ledger import estimate_tokens

if TYPE_CHECKING:
    from agentfsm.engine.execution.execution import Execution
    from agentfsm.ports.model import Model, OutputForm


async def send_side_request(
    execution: Execution,
    instructions: str,
    question: str,
    *,
    max_tokens: int,
    model: Model | None = None,
    output: OutputForm | None = None,
) -> tuple[str, Usage]:
    """Ask once, without tools and without a turn, and return the answer and what it cost.

    Args:
        execution: The driving call that pays, and whose limits hold.
        instructions: What the model is to do.
        question: Of any length.
        max_tokens: The longest answer.
        model: Who is asked; None for the agent's own, with its settings.
        output: The form of the answer, where the model can be held to it.

    Raises:
        ModelError: when it cannot be asked, or the budget has no room; with what was spent.
    """
    engine, asked = execution.config, estimate_tokens(instructions + question)
    who = engine.model if model is None else model
    try:
        granted, held = await execution.budget.reserve(asked, max_tokens, max_tokens, partial(calculate_usd, who))
    except LimitError as error:  # what is left may do for an answer
        raise ModelError(f"the budget has no room for a question beside the run: {error}") from error
    usage = Usage()
    try:
        request = Request(
            instructions=instructions,
            messages=(UserMessage(parts=(TextPart(text=question),)),),
            settings=engine.side_request_settings(execution.journal.run, granted, own=model is None),
            output=output,
            timeout_s=engine.limits.model_timeout_s,
        )
        reply = await fetch_reply(who, request)
        counted = Usage(input_tokens=asked, output_tokens=estimate_tokens(reply.text), estimated=True)
        usage = price_usage(execution, who, reply.usage or counted)
    except ModelError as error:
        usage = error.usage = price_usage(execution, who, error.usage or usage)
        raise
    else:
        return reply.text, usage
    finally:
        execution.budget.settle(held, usage)
