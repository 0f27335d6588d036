"""One call of a function as a tool."""

from __future__ import annotations

import anyio

from agentfsm import ToolCall, ToolQueue, ToolRegistry, ToolResult, tool
from tests.support.checks import HANG_S


async def ran(function, arguments: str = "{}", *, beside: bool = False, **options: object) -> ToolResult:
    """Run one call of a function as a tool, alone or in a batch of two, and return its result."""
    made = tool(name="act", concurrency_safe=beside, **options)(function)
    queue = ToolQueue(registry=ToolRegistry.of([made]))
    wanted = [ToolCall(id=f"t1.{n}", name="act", arguments=arguments, key=f"k{n}") for n in range(1 + beside)]
    with anyio.fail_after(HANG_S):
        results = await queue.execute_all(wanted)
    assert len(results) == len(wanted)
    assert queue.statistics().running == 0
    assert all(result.outcome is results[0].outcome for result in results)
    results[0].text.encode()
    return results[0]
