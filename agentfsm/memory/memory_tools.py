"""Tools with which a model reads and writes the memory of the user that its run works for."""

from __future__ import annotations

from typing import Any, Final

from agentfsm.core.errors import ModelRetry
from agentfsm.core.labels import DATA_LEVELS, Label, highest_level
from agentfsm.core.text_safety import strip_unsafe
from agentfsm.memory.long_term import Memory
from agentfsm.ports.memory_items import ItemKind
from agentfsm.tools.run_context import RunContext
from agentfsm.tools.tool import Tool, make_tool

RECALL_TOOL: Final = "recall_memory"
REMEMBER_TOOL: Final = "remember"
FORGET_TOOL: Final = "forget_memory"
# Items that the tools return at most.
MAX_FOUND: Final = 8
# Level of data of an item, if its run has read nothing with a level.
DEFAULT_LEVEL: Final = "internal"
_HELD: Final = ", and not found before a person releases it, because this run has read something untrusted"
_NO_USER: Final = "this run has no user, so there is no memory; go on without it"


def build_memory_tools(memory: Memory) -> list[Tool[..., Any]]:
    """Return the tools `recall_memory`, `remember` and `forget_memory` for an agent with that memory.

    They work on the memory of the user that the run was started for. A deletion waits for an approval. An item has the
    labels and the level of data of its run. If the run has read something untrusted, the item is held until a person
    releases it (`memory.release`).
    """

    def mine(ctx: RunContext[Any]) -> Memory:
        if not ctx.user:
            raise ModelRetry(_NO_USER)
        return memory.for_(user=ctx.user, tenant=ctx.tenant or "")

    async def recall_memory(ctx: RunContext[Any], query: str) -> list[dict[str, str]]:
        """Search the facts that are kept of this user from earlier conversations.

        Args:
            ctx: Context of the call, which names the user.
            query: Words to look for.
        """
        found = await mine(ctx).recall(query, k=MAX_FOUND, max_level=ctx.clearance or DATA_LEVELS[-1])
        for each in found:
            ctx.add_labels(Label.USER_DATA, each.item.level, *each.item.labels)
        items = [each.item for each in found]
        return [{"id": item.id, "kind": item.kind.value, "text": strip_unsafe(item.text)} for item in items]

    async def remember(ctx: RunContext[Any], text: str, topic: str = "") -> str:
        """Keep a fact or a preference of this user for later conversations. Keep what the user said, in one sentence.

        Args:
            ctx: Context of the call, which names the user.
            text: The fact, in words that are clear without this conversation.
            topic: Subject of the fact, such as "home town", if it takes the place of an earlier one on the same.
        """
        held = Label.UNTRUSTED in ctx.labels
        level = highest_level(ctx.labels)
        item = await mine(ctx).remember(
            text,
            kind=ItemKind.PREFERENCE,
            key=ctx.idempotency_key,
            slot=topic.strip(" ="),
            level=DEFAULT_LEVEL if level is None else level.value,
            held=held,
        )
        return f"kept as {item.id}" + (_HELD if held else "")

    async def forget_memory(ctx: RunContext[Any], item_ids: list[str]) -> str:
        """Delete kept facts of this user for good, because the user asks for it.

        Args:
            ctx: Context of the call, which names the user.
            item_ids: Ids that recall_memory returned.
        """
        own = mine(ctx)
        there = await own.index.get(item_ids)
        ids = [each for each in item_ids if each in there and there[each].namespace == own.namespace]
        return f"deleted: {await own.forget(ids, by=ctx.user or '', reason='asked in a run')}"

    return [
        make_tool(recall_memory, name=RECALL_TOOL, read_only=True, reads_untrusted=False),  # it adds those of the items
        make_tool(remember, name=REMEMBER_TOOL, idempotent=True, reads_untrusted=False),
        make_tool(forget_memory, name=FORGET_TOOL, idempotent=True, requires_approval=True, reads_untrusted=False),
    ]
