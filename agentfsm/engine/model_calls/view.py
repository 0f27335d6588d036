"""The view of a run: all that its next request shows the model, part by part.

The request, its hashes and its tokens are read from the view, and so are the room in the window and the shares of its
layers. The parts stand in the order in which providers read them; those that change from turn to turn are at the end.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Final

import attrs

from agentfsm.core.header import short_hash
from agentfsm.core.messages import AssistantMessage, Message, SystemMessage, ToolResult, UserMessage
from agentfsm.core.usage import Purpose
from agentfsm.core.view_parts import FixedParts, ViewPart, ViewSource, find_source
from agentfsm.engine.execution.config import ANSWER_TOKENS
from agentfsm.engine.execution.tool_access import check_available
from agentfsm.ports.model import Request, to_mutable_json
from agentfsm.tokens.ledger import MESSAGE_TOKENS, count_message, read_text
from agentfsm.tokens.tool_prompts import count_tools
from agentfsm.tools.builtin import FIND_TOOLS, READ_RESULT, build_find_tools_definition, find_tools, read_result

if TYPE_CHECKING:
    from agentfsm.core.hosted_tools import HostedTool
    from agentfsm.core.run import Run
    from agentfsm.core.settings import Settings
    from agentfsm.core.usage import TierChoice
    from agentfsm.engine.execution.config import EngineConfig
    from agentfsm.engine.execution.execution import Execution
    from agentfsm.ports.model import TokenCounter, ToolDefinition
    from agentfsm.tools.tool import Tool

# Members of the enum, looked up once: in each turn, Python 3.11 would take several calls for it.
_TURN: Final = Purpose.TURN
_LAST_ANSWER: Final = Purpose.LAST_ANSWER
# Values of `tool_choice` that do not name a tool.
_TOOL_CHOICE_MODES: Final = frozenset({"auto", "none", "required"})


def measure_fixed_parts(config: EngineConfig, counter: TokenCounter, tools: Sequence[ToolDefinition]) -> FixedParts:
    """Return the parts that all requests with these tools have. Each is counted once."""
    key = counter.encoding, *config.tools_key(tools)
    if (known := config.fixed_parts.get(key)) is not None:
        return known
    defined = json.dumps(_describe_tools(tools, config.registry.hosted), sort_keys=True, default=str)
    parts = [ViewPart(source=ViewSource.TOOLS, text=defined, tokens=count_tools(tools, counter, config.model.name))]
    instructions = ""
    for source, text in (
        (ViewSource.AGENT, config.instructions),
        (ViewSource.TOOL_SOURCES, config.registry.instructions),
        (ViewSource.GUARDS, config.guard_instructions),
    ):
        if text:
            added = f"\n\n{text}" if instructions else text
            instructions += added
            parts.append(ViewPart(source=source, text=text, tokens=counter.count(added)))
    tools_tokens, total = parts[0].tokens, sum([part.tokens for part in parts])
    digest = "" if callable(config.settings) else _hash_shape(config, tools, config.settings)
    fixed = FixedParts(
        parts=tuple(_chain(parts)),
        instructions=instructions,
        tools_tokens=tools_tokens,
        instructions_tokens=total - tools_tokens,
        digest=digest,
    )
    config.fixed_parts[key] = fixed
    return fixed


def _hash_shape(config: EngineConfig, tools: Sequence[ToolDefinition], settings: Settings) -> str:
    output = None if config.output_spec is None else config.output_spec.output_form
    parts = [
        config.model.name,
        config.own_instructions,
        _describe_tools(tools, config.registry.hosted),
        attrs.asdict(attrs.evolve(settings, stream=False)),  # streaming does not change the request
        None if output is None else to_mutable_json(output.schema),
    ]
    return short_hash(json.dumps(parts, sort_keys=True, default=str), 8)


def _describe_tools(tools: Sequence[ToolDefinition], hosted: Sequence[HostedTool]) -> list[object]:
    own = [[tool.name, tool.description, to_mutable_json(tool.parameters), tool.strict] for tool in tools]
    return [*own, *[tool.describe() for tool in hosted]]


def _chain(parts: Sequence[ViewPart], prefix: str = "") -> Iterator[ViewPart]:
    for part in parts:
        prefix = short_hash(f"{prefix}\0{part.source}\0{part.text}", 8)
        yield attrs.evolve(part, prefix=prefix)


@attrs.define(eq=False, repr=False)
class View:
    """All that the next request of a run shows the model."""

    execution: Execution
    run: Run
    tools: Sequence[ToolDefinition]
    """Definitions of the offered tools."""

    withheld: Sequence[ToolDefinition]
    """Definitions of the tools that a request for a last answer does not offer any more."""

    settings: Settings
    """Settings of the next turn."""

    note: str
    """The text at the end of the request, which is not in the history; empty for none."""

    fixed: FixedParts
    """The tools and the instructions."""

    def measure_overhead(self) -> int:
        """Return the tokens of all but the messages of the history, in the unit of the ledger's counter."""
        counter, tokens = self.execution.ledger.counter, self.fixed.tools_tokens + self.fixed.instructions_tokens
        if self.withheld:
            tokens += measure_fixed_parts(self.execution.config, counter, self.withheld).tools_tokens
        if self.run.profile is not None:
            tokens += count_message(self.run.profile, counter)
        return tokens + counter.count(self.note) + MESSAGE_TOKENS if self.note else tokens

    @property
    def digest(self) -> str:
        """Two hashes of the request, 8 hexadecimal digits each: of the agent's part, and of the messages.

        Guards' instructions do not count, because they differ between runs.
        """
        config = self.execution.config
        is_own = self.settings is config.settings
        shape = self.fixed.digest if is_own else _hash_shape(config, self.tools, self.settings)
        if self.run.profile is not None:
            shape = short_hash(f"{shape} {self.run.profile.text}", 8)
        if self.note:
            shape = short_hash(f"{shape} {self.note}", 8)
        return f"{shape}-{self.execution.ledger.digest}"

    @property
    def parts(self) -> tuple[ViewPart, ...]:
        """The parts in their order, with one for each message. Those that change are counted at each call."""
        run, counter = self.run, self.execution.ledger.counter
        whole = tuple(run.labels)
        given = tuple([label for label, source in run.labels.items() if not source.call_id])
        moving: list[ViewPart] = []
        for message in run.shown:
            is_given = isinstance(message, UserMessage)
            labels = message.labels if isinstance(message, ToolResult) else given if is_given else whole
            text, tokens = read_text(message), count_message(message, counter)
            source = ViewSource.PROFILE if message is run.profile else find_source(message)
            moving.append(ViewPart(source=source, text=text, tokens=tokens, labels=labels))
        if self.note:
            tokens = counter.count(self.note) + MESSAGE_TOKENS
            moving.append(ViewPart(source=ViewSource.NOTE, text=self.note, tokens=tokens, labels=whole))
        return (*self.fixed.parts, *_chain(moving, self.fixed.parts[-1].prefix))

    def render(
        self,
        messages: Sequence[Message],
        *,
        cap_tokens: int | None = None,
        is_plain: bool = False,
        tier: TierChoice | None = None,
    ) -> Request:
        """Return the request.

        Args:
            messages: The messages that the model is shown.
            cap_tokens: Maximum of tokens of the answer, if the budget grants less than the settings ask for.
            is_plain: Whether the reasoning of earlier replies is left out.
            tier: Tier with which a retry begins.
        """
        config, settings, run = self.execution.config, self.settings, self.execution.journal.run
        choice, answers = settings.tool_choice, config.output_spec
        if choice is None and answers is not None and answers.requires_tool_call and not _has_thinking(settings):
            settings = attrs.evolve(settings, tool_choice="required")  # models that think may refuse to be forced
        if choice is not None and choice not in _TOOL_CHOICE_MODES and all(choice != tool.name for tool in self.tools):
            settings = attrs.evolve(settings, tool_choice=None)  # a provider refuses the name of a tool it has not got
        hosted = config.registry.hosted
        if run.header.withhold:  # the provider would execute them
            settings.check_withheld()
            hosted = _list_harmless(self.execution, hosted)
        has_note = self.note != "" and not isinstance(messages[-1], AssistantMessage)  # a paused reply goes on
        # Without tools, reviews and a session, the prompt alone is a request that none will follow.
        may_go_on = self.tools or hosted or run.turn or answers or config.judge or config.planner or run.header.session
        is_lone = not may_go_on and len(messages) == 1
        key, tenant = self.fixed.parts[-1].prefix, run.header.tenant
        return Request(
            instructions=self.fixed.instructions,
            messages=(*messages, SystemMessage(text=self.note)) if has_note else messages,
            passing=has_note + is_lone,
            # Each request that is kept keeps all before it, so the 1st, 2nd, 4th, 8th, ... after the first one suffice.
            keep_longer=run.waited_turn >= 0 and (turns := run.turn - run.waited_turn) > 0 and not turns & (turns - 1),
            cache_key=key if tenant is None else f"{key}-{short_hash(tenant, 8)}",
            tools=self.tools,
            withheld_tools=self.withheld,
            hosted_tools=() if run.limit_reached is not None else hosted,
            settings=settings if cap_tokens is None else attrs.evolve(settings, max_tokens=cap_tokens),
            output=None if answers is None else answers.output_form,
            timeout_s=config.limits.model_timeout_s,
            purpose=_TURN if run.limit_reached is None else _LAST_ANSWER,
            run=run,
            is_plain=is_plain,
            tier=tier,
        )


def measure_room(execution: Execution, settings: Settings) -> int:
    """Return the tokens that the window leaves for messages, beside all else in the latest request and the answer."""
    taken = execution.ledger.overhead_tokens + execution.ledger.correction_tokens
    return execution.config.model.window_tokens - (settings.max_tokens or ANSWER_TOKENS) - taken


def list_offered_tools(execution: Execution, *, before_limit: bool = False) -> Sequence[ToolDefinition]:
    """Return the definitions of the tools offered to the model, in the order of registration.

    Args:
        execution: The execution.
        before_limit: Whether to return those of the turns before a last answer, which is offered none.
    """
    engine, run = execution.config, execution.journal.run
    answer = (
        ()
        if engine.output_spec is None or engine.output_spec.tool_definition is None
        else (engine.output_spec.tool_definition,)
    )
    if run.limit_reached is not None and not before_limit:
        return answer
    if run.plan is not None and not run.plan.is_stale and engine.planner is not None and engine.planner.frozen:
        return answer
    if run.offered is not None:
        definitions = _select_definitions(execution, frozenset(run.offered))
    elif run.disabled or engine.can_hide_tools:
        definitions = tuple([tool.definition for tool in list_available_tools(execution)])
    else:
        definitions = engine.registry.definitions
    if run.has_cut and READ_RESULT not in engine.registry and check_available(execution, read_result()) is None:
        definitions = (*definitions, read_result().definition)
    return (*definitions, *answer) if answer else definitions


def _select_definitions(execution: Execution, names: Collection[str]) -> tuple[ToolDefinition, ...]:
    """Return the tools of these names, and the tool that finds the others, if there are any."""
    there = list_available_tools(execution)
    chosen = tuple([tool.definition for tool in there if tool.name in names])
    if len(chosen) == len(there) or FIND_TOOLS in execution.config.registry:
        return chosen
    if check_available(execution, find_tools()) is not None:
        return chosen
    return *chosen, build_find_tools_definition(len(there) - len(chosen))


def list_available_tools(execution: Execution) -> list[Tool[..., object]]:
    """Return the tools that are available to this run and permitted."""
    return [tool for tool in execution.config.registry if check_available(execution, tool) is None]


def build_view(execution: Execution) -> View:
    """Return the view of a run, as it is now."""
    config, run, tools = execution.config, execution.journal.run, list_offered_tools(execution)
    fixed = measure_fixed_parts(config, execution.ledger.counter, tools)
    note = run.closing_note if run.cutoff else run.reminder  # without a compaction, nothing is hidden
    withheld = list_offered_tools(execution, before_limit=True) if run.limit_reached is not None and not tools else ()
    return View(execution, run, tools, withheld, config.resolve_settings(run), note, fixed)


def _list_harmless(execution: Execution, hosted: Sequence[HostedTool]) -> tuple[HostedTool, ...]:
    """Return the tools of the provider that a run which withholds calls is offered."""
    world = execution.options.world
    if world is not None and not world.reads_live:
        return ()
    return tuple([tool for tool in hosted if tool.read_only])


def _has_thinking(settings: Settings) -> bool:
    """Return whether the model is asked to think, by a reasoning effort or an extra parameter."""
    return settings.reasoning_effort is not None or "thinking" in settings.extra_body
