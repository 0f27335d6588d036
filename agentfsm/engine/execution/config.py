"""Configuration of an agent for the engine: ports and settings."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import attrs

from agentfsm.core.errors import MisuseError
from agentfsm.core.header import Fingerprint, short_hash
from agentfsm.core.limits import Limits, Spend
from agentfsm.core.settings import PROVIDER_TOOLS, Settings
from agentfsm.core.stops import StopCondition, name_condition
from agentfsm.core.value import Value
from agentfsm.core.view_parts import FixedParts
from agentfsm.engine.execution.answer_cache import AnswerCache
from agentfsm.ports.context import Context
from agentfsm.ports.guards import (
    CallGuard,
    collect_instructions,
    describe_guard,
)
from agentfsm.ports.memory_items import RunMemory
from agentfsm.ports.model import Model, TokenCounter, ToolDefinition
from agentfsm.ports.policies import Judge, PlanMaker, ToolSelector
from agentfsm.ports.store import Clock
from agentfsm.tokens.billing import BilledExcess, find_billed_excess
from agentfsm.tools.builtin import FIND_TOOLS, READ_RESULT
from agentfsm.tools.front_end import describe_page, read_front_end
from agentfsm.tools.permission import Permissions
from agentfsm.tools.registry import ToolRegistry
from agentfsm.tools.tool import Tool

if TYPE_CHECKING:
    from agentfsm.core.header import Header
    from agentfsm.core.run import Run
    from agentfsm.engine.execution.output import OutputSpec
    from agentfsm.streaming.watch import Outlet, RunTracer
    from agentfsm.tools.run_context import RunContext

# Returns the header of a run with instructions.
DeferredInstructions: TypeAlias = "Callable[[Header, RunContext[Any]], Awaitable[Header]]"
# Tokens left free for an answer, which all current models can write. A token budget with less caps the answer.
ANSWER_TOKENS: Final = 4_096
# Assumed maximum of tokens of an answer without a cap, if other requests spend from the same budget: the maximum of
# many models. A longer answer is detected (see `budget`).
MAX_ANSWER_TOKENS: Final = 16_384


def join_instructions(text: str, output_spec: OutputSpec | None) -> str:
    """Return instructions with the text on the form of the answer."""
    added = "" if output_spec is None else output_spec.instructions
    return "\n\n".join(filter(None, (text, added)))


@attrs.frozen(kw_only=True)
class EngineConfig(Value):
    """Configuration of an agent: ports and settings. It holds no state of a run."""

    model: Model
    instructions: str
    registry: ToolRegistry
    permissions: Permissions | None
    selector: ToolSelector
    limits: Limits
    settings: Settings | Callable[[Run], Settings]
    """Settings of the agent, or a function that returns them for each turn."""

    context: Context
    clock: Clock
    output_spec: OutputSpec | None
    """Required form of an answer; None if any text is accepted."""

    judge: Judge | None
    last_answer: bool
    """Whether a run stopped by a limit is asked once more for a last answer."""

    load_counter: Callable[[str], Awaitable[TokenCounter]]
    """Loads the token counter for a model name; called only when a history comes near the window."""

    answer_cache: AnswerCache | None = None
    """Cache of the answers of runs; None if there is none."""

    planner: PlanMaker | None = None
    """Makes plans; None if the model is asked for each step."""

    memory: RunMemory | None = None
    """Memory that is searched for each input; None if there is none."""

    guards: tuple[CallGuard, ...] = ()
    """Guards that decide on calls before they start; empty if there are no rules."""

    guard_instructions: str = ""
    """Text that guards add to the instructions of this run; empty for none. It is not part of the fingerprint, nor of
    the hash of a request, because it differs between runs.
    """

    spend: tuple[Spend, ...] = ()
    """Spending limits over all runs of a window; empty if there are none."""

    stop_when: tuple[StopCondition, ...] = ()
    """Functions of the run that end it; empty if there are none."""

    engine_tools: Mapping[str, Tool[..., Any]] = attrs.field(factory=dict)
    """The engine's own tools for plans, by name. Models do not see them."""

    resolve_instructions: Callable[[Header], Header] | None = None
    """Adds instructions to the header of a run at its start, from a prompt or a function; None if that is not needed.
    """

    resolve_deferred: DeferredInstructions | None = None
    """The same before the run is created in the store, from an async function, or one that takes the context."""

    reminder: Callable[[Run, RunContext[Any]], Awaitable[str]] | None = None
    """Returns the note at the end of the run's next request; None if there is none."""

    prompts: Mapping[str, str] = attrs.field(factory=dict)
    """Versions of the prompts in the instructions, by name."""

    log_prompts: bool = False
    watch: tuple[Outlet, ...] = ()
    """Watchers of the runs and of their child runs."""

    fixed_parts: dict[tuple[object, ...], FixedParts] = attrs.field(factory=dict, init=False)
    """Parts that all requests with the same tools have, by the counter's encoding and the tools."""

    tracer: RunTracer | None = attrs.field(
        default=attrs.Factory(
            lambda config: next((outlet.tracer for outlet in config.watch if outlet.tracer is not None), None),
            takes_self=True,
        ),
        init=False,
    )
    """The watcher that makes the spans of requests and calls current; None if there is none."""

    lines: dict[tuple[object, ...], Any] = attrs.field(factory=dict, init=False)
    """Features of the agent at the points of a run, by kind of run; see `engine/line.py`."""

    tool_names: dict[tuple[str, int], frozenset[str]] = attrs.field(factory=dict, init=False)
    """Names of the tools that a feature concerns, by feature and the registry's version."""

    concerned_guards: dict[tuple[int, str], tuple[CallGuard, ...]] = attrs.field(factory=dict, init=False)
    """Guards that decide on calls of a tool, by the registry's version and its name."""

    _fingerprints: dict[object, Fingerprint] = attrs.field(factory=dict, init=False)
    """Fingerprints by the registry's version and the digests of the agents that tools call, since tools may be
    registered later.
    """

    billed: BilledExcess = attrs.field(
        default=attrs.Factory(lambda config: find_billed_excess(config.model), takes_self=True), init=False
    )
    """By how much the model bills more than is counted."""

    _unpriced_models: set[str] = attrs.field(factory=set, init=False)
    """Names of models already logged as having no price."""

    def for_run(self, header: Header) -> EngineConfig:
        """Return the configuration of a run.

        It has the instructions that the run recorded at its start, those of guards, and the tools of the run's front
        end with what that shows. A tool of the agent with the name of one of these, which it got later, is kept.
        """
        if self.guards and (added := collect_instructions(self.guards, header)) != self.guard_instructions:
            return attrs.evolve(self, guard_instructions=added).for_run(header)
        if header.instructions is None and self.resolve_instructions is not None:  # started by another version
            header = self.resolve_instructions(header)
        config = self
        if header.instructions is not None:
            instructions = join_instructions(header.instructions, self.output_spec)
            config = attrs.evolve(self, instructions=instructions, prompts=header.fingerprint.prompts)
        if not header.metadata or (found := read_front_end(header.metadata)) is None:
            return config
        tools, page = found
        missing = [tool for tool in tools if tool.name not in config.registry]
        registry = config.registry.extended(missing) if missing else config.registry
        shown = describe_page(page)
        if config.instructions.endswith(shown):  # it is the configuration of the run already
            return attrs.evolve(config, registry=registry) if missing else config
        return attrs.evolve(config, registry=registry, instructions=f"{config.instructions}\n\n{shown}".strip())

    @property
    def can_hide_tools(self) -> bool:
        """Whether a run may be offered fewer tools than are registered, by permissions or conditions."""
        return self.permissions is not None or bool(self.registry.conditional_tools)

    @property
    def own_instructions(self) -> str:
        """Instructions of the agent and of the sources of its tools, which are the same in all runs."""
        added = self.registry.instructions
        return f"{self.instructions}\n\n{added}" if self.instructions and added else self.instructions or added

    @property
    def fingerprint(self) -> Fingerprint:
        """Fingerprint of the agent's behaviour: instructions, model, and tools with their schemas and agents."""
        known = None if self.registry.agent_tools else self._fingerprints.get(self.registry.version)
        return self.find_fingerprint(()) if known is None else known

    def find_fingerprint(self, seen: tuple[object, ...]) -> Fingerprint:
        """Return the fingerprint; of agents that call each other, `seen` are the tools on the way here."""
        inner = dict[str, str]()
        for name in self.registry.agent_tools:
            tool = self.registry.get(name)
            if tool is not None and tool.inner_agent is not None and tool not in seen:
                inner[name] = tool.inner_agent.hash_agent((*seen, tool))
        key = (self.registry.version, *sorted(inner.items())) if inner else self.registry.version
        known = self._fingerprints.get(key)
        if known is None:
            instructions = short_hash(self.own_instructions, 8)
            settings = getattr(self.settings, "__qualname__", None) or repr(self.settings)
            policies = [*self.context.policies, self.selector, self.judge, self.planner, self.memory]
            names = [type(each).__qualname__ for each in policies]
            rest = [self.limits, settings, self.context.share, *names, *map(describe_guard, self.guards)]
            rest += map(name_condition, self.stop_when)
            if self.output_spec is not None and self.output_spec.claims is not None:
                rest.append(self.output_spec.claims)
            tools = {tool.name: tool.digest[:8] for tool in self.registry}
            tools |= {name: short_hash(f"{tools[name]} {digest}", 8) for name, digest in inner.items()}
            tools |= {tool.name: short_hash(json.dumps(tool.describe()), 8) for tool in self.registry.hosted}
            known = Fingerprint(
                instructions=instructions,
                model=self.model.name,
                tools=tools,
                config=short_hash(repr(rest), 8),
                prompts=self.prompts,
                skills={} if self.registry.skills is None else self.registry.skills.digests,
            )
            self._fingerprints[key] = known
        return known

    @property
    def reviews_answers(self) -> bool:
        """Whether answers are reviewed before they are accepted."""
        has_duties = any(guard.binds_end() for guard in self.guards)
        return self.output_spec is not None or self.judge is not None or has_duties

    def find_tool(self, name: str) -> Tool[..., Any] | None:
        """Return the agent's tool of that name, or the engine's own."""
        return self.registry.get(name) or self.engine_tools.get(name)

    def check_free(self, names: Iterable[str]) -> None:
        """Check that no tool of the agent has one of the names that a front end gives its tools.

        Raises:
            MisuseError: if one has.
        """
        own = {*self.registry.names, *self.engine_tools, *[tool.name for tool in self.registry.hosted]}
        own |= {READ_RESULT, FIND_TOOLS}
        if self.output_spec is not None and self.output_spec.tool is not None:
            own.add(self.output_spec.tool.name)
        if taken := own.intersection(names):
            raise MisuseError(f"the agent has a tool {min(taken)!r} of its own: rename the one of the front end")

    def resolve_settings(self, run: Run) -> Settings:
        """Return the model settings for the run's next turn."""
        settings: object = self.settings(run) if callable(self.settings) else self.settings
        if not isinstance(settings, Settings):
            raise MisuseError(f"the function settings= returned {type(settings).__name__}: return Settings(...)")
        return settings if run.header.settings is None else run.header.settings.with_defaults(settings)

    def side_request_settings(self, run: Run, max_tokens: int, *, own: bool) -> Settings:
        """Return the settings for a side request: short and without tools.

        They are based on the run's settings if the model is its own. Thinking is off, too: Anthropic refuses a cap
        that is not above the tokens for thinking.
        """
        base = self.resolve_settings(run) if own else Settings()
        left_out = {"thinking", *PROVIDER_TOOLS}
        extra = {name: value for name, value in base.extra_body.items() if name not in left_out}
        return attrs.evolve(
            base, max_tokens=max_tokens, tool_choice=None, parallel_tool_calls=None, stop=(), extra_body=extra
        )

    def mark_unpriced(self, model: Model) -> bool:
        """Return whether this is the first reply of the model with an unknown price, and remember that."""
        is_first = model.name not in self._unpriced_models
        self._unpriced_models.add(model.name)
        return is_first

    def tools_key(self, tools: Sequence[ToolDefinition]) -> tuple[object, ...]:
        """Return a cache key for a set of tools; for the whole registry without reading each tool."""
        whole = tools is self.registry.definitions
        # The engine's own tools have a new definition for each set.
        return self.registry.version, None if whole else tuple([(tool.name, tool.description) for tool in tools])
