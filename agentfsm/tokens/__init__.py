"""Token counters. Vocabularies are loaded on demand, by `tokens.tiktoken_counter`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from agentfsm._lib.concurrency import start_in_thread

if TYPE_CHECKING:
    from agentfsm.ports.model import TokenCounter

__all__ = ["load_counter"]


async def load_counter(model_name: str) -> TokenCounter:
    """Load the token counter for a model, once per process; fall back to an estimate (`exact` is False).

    tiktoken itself is imported in a thread, since that takes 0.1 s.
    """
    module = await start_in_thread(lambda: import_module("agentfsm.tokens.tiktoken_counter")).wait()
    counter: TokenCounter = await module.load_counter(model_name)
    return counter
