"""What an agent is made of, as the engine sees it: ports and settings."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import attrs

from agentfsm.compaction import Context
from agentfsm.core.fingerprint import hash_of
from agentfsm.core.limits import Limits
from agentfsm.core.settings import Settings
from agentfsm.engine.permission import Permissions
from agentfsm.engine.registry import ToolRegistry
from agentfsm.ports import Clock, Model, TokenCounter, ToolDefinition, ToolSelector, plain_json
from agentfsm.tally import Tally, count_tools

ANSWER_TOKENS: Final = 4_096
# Room for an answer. Where the token budget leaves less, it caps the answer; every current model may answer so long.


@attrs.frozen(kw_only=True)
class Engine:
    """What an agent is made of: ports and settings. It holds nothing of any run."""

    model: Model
    instructions: str
    registry: ToolRegistry
    permissions: Permissions | None
    selector: ToolSelector
    limits: Limits
    settings: Settings
    context: Context
    clock: Clock
    load_counter: Callable[[str], Awaitable[TokenCounter]]
    # Loads the token counter for a model name; called only when a history comes near the window.
    log_prompts: bool = False
    _overhead: dict[tuple[object, ...], int] = attrs.field(factory=dict, init=False)
    # Tokens of what every request holds, by encoding and tools.
    _shapes: dict[tuple[object, ...], str] = attrs.field(factory=dict, init=False)
    # Hashes of the same, by tools.

    @property
    def narrows(self) -> bool:
        """Whether a run may be offered fewer tools than there are, by permission or by what a tool says of itself."""
        return self.permissions is not None or bool(self.registry.conditional)

    def choice_settings(self, max_tokens: int) -> Settings:
        """Return the settings for a question beside the run: as always, but short and without tools."""
        return attrs.evolve(self.settings, max_tokens=max_tokens, tool_choice=None, parallel_tool_calls=None)

    def room_tokens(self, tally: Tally) -> int:
        """Return what the window leaves for messages beside instructions, tool definitions and the answer."""
        return self.model.window_tokens - (self.settings.max_tokens or ANSWER_TOKENS) - tally.overhead

    def allowance_tokens(self, tally: Tally) -> int:
        """Return what messages may fill of that before there is a compaction."""
        return int(self.context.share * self.room_tokens(tally))

    def overhead_tokens(self, counter: TokenCounter, tools: Sequence[ToolDefinition]) -> int:
        """Return the tokens of instructions and tool definitions; counted once per counter and set of tools."""
        key = counter.encoding, *self._key(tools)
        tokens = self._overhead.get(key)
        if tokens is None:
            tokens = counter.count(self.instructions) + count_tools(tools, counter)
            self._overhead[key] = tokens
        return tokens

    def request_digest(self, tally: Tally, tools: Sequence[ToolDefinition]) -> str:
        """Return two hashes of a request, 8 hexadecimal digits each: of the agent's part, and of the messages."""
        key = self._key(tools)
        shape = self._shapes.get(key)
        if shape is None:
            told = [[tool.name, tool.description, plain_json(tool.parameters), tool.strict] for tool in tools]
            settings = attrs.asdict(attrs.evolve(self.settings, stream=False))  # how it is sent is no part of it
            text = json.dumps([self.model.name, self.instructions, told, settings], sort_keys=True, default=str)
            shape = self._shapes[key] = hash_of(text, 8)
        return f"{shape}-{tally.digest}"

    def _key(self, tools: Sequence[ToolDefinition]) -> tuple[object, ...]:
        """Return what stands for a set of tools; for all of them without a look at each."""
        whole = tools is self.registry.definitions
        return self.registry.version, None if whole else tuple([tool.name for tool in tools])
