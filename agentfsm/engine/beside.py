"""Asking a model something beside the run, within its budget: to choose among tools, to summarise."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from agentfsm.core.errors import LimitError, ModelError
from agentfsm.core.messages import TextPart, Usage, UserMessage
from agentfsm.core.settings import Settings
from agentfsm.engine.ask import reply_of
from agentfsm.ports import Model, Request
from agentfsm.tally import estimated_tokens

if TYPE_CHECKING:
    from agentfsm.engine.drive import Drive
    from agentfsm.engine.engine import Engine


async def ask_beside(
    engine: Engine,
    drive: Drive,
    instructions: str,
    question: str,
    *,
    tokens: int,
    model: Model | None = None,
) -> tuple[str, Usage]:
    """Ask a model once, without tools.

    Args:
        engine: The agent.
        drive: Knows the budget, in which the worst case is held back while the model is asked.
        instructions: The system prompt.
        question: What the user says.
        tokens: Of the longest answer; less where the budget has less.
        model: None: the agent's own. Another one is asked with its provider's own defaults.

    Returns:
        The answer, and what it cost.

    Raises:
        ModelError: when it cannot be asked, or the budget has no room; with what was paid for nothing.
    """
    asked = estimated_tokens(instructions + question)
    whom = model or engine.model
    try:
        granted, held = await drive.budget.reserve(asked, tokens, whom.cost_usd)
    except LimitError as error:  # what is left may do for an answer
        raise ModelError(f"the budget has no room for it: {error}") from error
    usage = Usage()
    try:
        reply = await reply_of(
            whom,
            Request(
                instructions=instructions,
                messages=(UserMessage(parts=(TextPart(text=question),)),),
                settings=engine.choice_settings(granted) if model is None else Settings(max_tokens=granted),
                timeout_s=engine.limits.model_timeout_s,
            ),
        )
        written = estimated_tokens(reply.text)
        usage = reply.usage or Usage(input_tokens=asked, output_tokens=written, estimated=True)
        if drive.budget.counts_money and usage.cost_usd is None:
            usage = attrs.evolve(usage, cost_usd=whom.cost_usd(usage))
    except ModelError as error:
        usage = error.usage or usage
        raise
    else:
        return reply.text, usage
    finally:
        drive.budget.settle(held, usage)
