"""The floor: what an agent costs that has no machine, no journal, no limits and no validation.

A list of messages, a coroutine for a model, a dict of tools, json.loads and asyncio.gather: what one writes on the
first day, and what every ratio here refers to.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

Message = dict[str, Any]


async def run(
    model: Callable[[list[Message]], Awaitable[Message]],
    tools: dict[str, Callable[..., Awaitable[object]]],
    prompt: str,
) -> str:
    """Drive the loop until the model answers."""
    messages: list[Message] = [{"role": "user", "content": prompt}]

    async def call(each: Message) -> Message:
        function = each["function"]
        result = await tools[function["name"]](**json.loads(function["arguments"]))
        return {"role": "tool", "tool_call_id": each["id"], "content": str(result)}

    while True:
        reply = await model(messages)
        messages.append(reply)
        if not reply.get("tool_calls"):
            return str(reply["content"])
        messages.extend(await asyncio.gather(*[call(each) for each in reply["tool_calls"]]))
