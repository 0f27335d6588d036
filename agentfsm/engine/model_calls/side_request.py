"""Side requests to a model (tool choice, judgement, summary) within the run's budget."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from agentfsm.core.errors import LimitError, ModelError
from agentfsm.core.messages import TextPart, UserMessage
from agentfsm.core.usage import Usage
from agentfsm.engine.execution.cost import SideSpending
from agentfsm.engine.execution.reservations import reserve_request, settle_spend
from agentfsm.engine.model_calls.reply import calculate_usd, fetch_reply
from agentfsm.engine.model_calls.request import price_usage
from agentfsm.ports.model import Request
from agentfsm.tokens.billing import estimate_written_tokens, find_billed_excess, find_failed_usage
from agentfsm.tokens.ledger import BYTE_COUNTER, estimate_tokens

if TYPE_CHECKING:
    from agentfsm.engine.execution.execution import Execution
    from agentfsm.ports.model import Model, OutputForm


async def send_side_request(
    execution: Execution,
    spending: SideSpending,
    instructions: str,
    question: str,
    *,
    max_tokens: int,
    model: Model | None = None,
    output: OutputForm | None = None,
) -> tuple[str, Usage]:
    """Send one request without tools, which is not a turn. Return the answer and its usage.

    Args:
        execution: The execution that pays, and whose limits apply.
        spending: Where the usage is added, also if the request fails.
        instructions: The instructions for the model.
        question: The question, of any length.
        max_tokens: The maximum of tokens of the answer.
        model: The model; None for the agent's own, with its settings.
        output: The form of the answer, if the model supports it.

    Raises:
        ModelError: if the request fails, or the budget has no room; it carries the usage.
    """
    engine, asked = execution.config, estimate_tokens(instructions + question)
    who = engine.model if model is None else model
    try:
        corrected = find_billed_excess(who).correct(asked)
        granted, held, held_spend = await reserve_request(
            execution, corrected, max_tokens, max_tokens, partial(calculate_usd, who)
        )
    except LimitError as error:  # the rest may suffice for an answer
        raise ModelError(f"the budget has no room for a question beside the run: {error}") from error
    usage, paid, name = None, None, who.name
    try:
        request = Request(
            instructions=instructions,
            messages=(UserMessage(parts=(TextPart(text=question),)),),
            passing=1,
            settings=engine.side_request_settings(execution.journal.run, granted, own=model is None),
            output=output,
            timeout_s=engine.limits.model_timeout_s,
            purpose=spending.purpose,
            run=execution.journal.run,
        )
        reply = await fetch_reply(who, request)
        counted = Usage(
            input_tokens=asked, output_tokens=estimate_written_tokens(BYTE_COUNTER.count(reply.text)), estimated=True
        )
        usage = price_usage(execution, who, reply.usage or counted)
        name = reply.model or name
        for part in () if reply.tier is None else reply.tier.spent:
            spending.add(part.model, Usage())  # the sum is in the usage of the reply
    except BaseException as error:
        usage = price_usage(execution, who, find_failed_usage(error, asked, 0))
        if isinstance(error, ModelError):
            error.usage = usage
        paid = usage if isinstance(error, Exception) else None  # as for the requests of turns
        raise
    else:
        paid = usage
        return reply.text, usage
    finally:
        spending.add(name, usage or Usage())
        execution.budget.settle(held, usage or Usage(), spending.purpose)
        if held_spend is not None:
            await settle_spend(execution, held_spend, paid)
