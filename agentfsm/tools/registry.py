"""Registry of an agent's tools by name, with their definitions for the model and their limiters."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from typing import Any, Protocol, TypeGuard, cast

import anyio
import attrs

from agentfsm._lib.limiter import Limiter
from agentfsm.core.errors import AgentError, DuplicateToolError, MisuseError
from agentfsm.core.hosted_tools import HostedTool
from agentfsm.core.labels import Level, ToolKind, matches_tool
from agentfsm.ports.model import ToolDefinition
from agentfsm.tools.builtin import cancel_run, message_run, wait
from agentfsm.tools.lint import Finding
from agentfsm.tools.lint import lint_tools as check_tools
from agentfsm.tools.tool import NAME_CHARS, Tool, make_tool


def _to_limiters(limits: Mapping[str, int | Limiter]) -> dict[str, Limiter]:
    if not isinstance(limits, Mapping):
        raise MisuseError(f'ToolRegistry(tag_limits={limits!r}): give limits by tag, as {{"db": 2}}, {{}} for none')
    return {tag: _to_limiter(tag, limit) for tag, limit in limits.items()}


def _to_limiter(tag: object, limit: object) -> Limiter:
    if not isinstance(tag, str):
        raise MisuseError(f"ToolRegistry(tag_limits={{{tag!r}: ...}}): give a tag, which is a str")
    if isinstance(limit, Limiter):
        return limit
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
        raise MisuseError(
            f"ToolRegistry(tag_limits={{{tag!r}: {limit!r}}}): give a whole number, 1 or more, of calls in flight at "
            "once, or a limiter, as Limiter(2, per_minute=60)"
        )
    return Limiter(limit)


class ToolSource(Protocol):
    """Source of tools that may change between two turns, such as an MCP server.

    It is listed among an agent's tools. The engine checks `is_stale` before each turn, which is cheap, and awaits
    `update` only if it is True. A source may also have `instructions`: a text on its tools for the model, which is
    added to the instructions of the agent. It changes only with `version`.
    """

    @property
    def is_stale(self) -> bool:
        """Whether the tools may have changed, or were never fetched."""
        ...

    @property
    def version(self) -> int:
        """Version of `tools`; increases with each change."""
        ...

    @property
    def tools(self) -> Iterable[Tool[..., Any]]:
        """The tools as of the last update."""
        ...

    async def update(self) -> None:
        """Fetch the current tools.

        Raises:
            AgentError: if no tools were ever fetched, and the source cannot be reached.
        """
        ...

    async def aclose(self) -> None:
        """Close the connections opened by `update`. The source can be updated again afterwards."""
        ...


class SkillSource(Protocol):
    """The skills of an agent: `agentfsm.skills.Skills`."""

    @property
    def tools(self) -> tuple[Tool[..., Any], ...]:
        """The tools that read the skills and run their scripts."""
        ...

    @property
    def instructions(self) -> str:
        """The names and descriptions of the skills, for the model."""
        ...

    @property
    def digests(self) -> Mapping[str, str]:
        """Hash of all files of each skill, by name."""
        ...


def _is_source(candidate: object) -> TypeGuard[ToolSource]:
    return all(hasattr(candidate, name) for name in ("is_stale", "update", "tools"))


@attrs.define(eq=False, repr=False, kw_only=True)
class ToolRegistry:
    """The tools of an agent, by name, in the order of registration.

    Data needed for each turn or call is kept up to date on registration, so that reading it is cheap.
    """

    tag_limits: Mapping[str, Limiter] = attrs.field(factory=dict, converter=_to_limiters)
    """Limits by tag, each shared by all tools with the tag in the whole process: the maximum of concurrent calls,
    `{"db": 2}`, or a limiter, `{"db": Limiter(2, per_minute=100)}`. Registries that are given the same limiter share
    it.
    """

    definitions: tuple[ToolDefinition, ...] = attrs.field(default=(), init=False)
    """Definitions of the tools for the model, in the order of registration."""

    polling_tools: frozenset[str] = attrs.field(default=frozenset(), init=False)
    """Names of the tools with `poll`, which are excluded from loop detection."""

    interactive_tools: frozenset[str] = attrs.field(default=frozenset(), init=False)
    """Names of the tools whose calls may need an approval or an answer from outside."""

    eager_tools: frozenset[str] = attrs.field(default=frozenset(), init=False)
    """Names of the tools whose calls may start while the reply streams."""

    conditional_tools: frozenset[str] = attrs.field(default=frozenset(), init=False)
    """Names of the tools with an `enabled` condition."""

    background_tools: frozenset[str] = attrs.field(default=frozenset(), init=False)
    """Names of the tools whose work goes on in the background."""

    agent_tools: frozenset[str] = attrs.field(default=frozenset(), init=False)
    """Names of the tools that call an agent."""

    prerequisite_tools: frozenset[str] = attrs.field(default=frozenset(), init=False)
    """Names of the tools listed in the `after` of any tool."""

    replacements: Mapping[str, str] = attrs.field(factory=dict, init=False)
    """Names of the tools with `replaces`, by the names that they replace."""

    sources: tuple[ToolSource, ...] = attrs.field(default=(), init=False)
    """Sources of further tools, fetched by `refresh`."""

    instructions: str = attrs.field(default="", init=False)
    """Instructions of the sources and the skills for the model; empty if they have none."""

    skills: SkillSource | None = attrs.field(default=None, init=False)
    """Skills whose tools and instructions are in this registry; None if there are none."""

    hosted: tuple[HostedTool, ...] = attrs.field(default=(), init=False)
    """Tools that the provider of the model executes itself. They are not among the tools that calls find here."""

    version: int = attrs.field(default=0, init=False)
    """Version of the registry; increases with each change, for use as a cache key."""

    _tools: dict[str, Tool[..., Any]] = attrs.field(factory=dict, init=False)
    _source_tools: dict[ToolSource, tuple[int, tuple[str, ...]]] = attrs.field(factory=dict, init=False)
    """For each source: its version, and the names of its tools in this registry."""

    _limiters: dict[Tool[..., Any], tuple[Limiter, ...]] = attrs.field(factory=dict, init=False)

    @classmethod
    def of(cls, tools: Iterable[Tool[..., Any] | Callable[..., Any] | ToolSource | HostedTool]) -> ToolRegistry:
        """Return a registry of these tools, or `tools` itself if it is a registry; functions become tools."""
        if isinstance(tools, ToolRegistry):
            return tools
        if not isinstance(tools, Iterable) or isinstance(tools, str | Tool | HostedTool) or callable(tools):
            raise _not_a_collection_error(tools)
        registry = cls()
        for each in tools:
            if isinstance(each, HostedTool):
                registry.add_hosted(each)
            elif isinstance(each, Tool) or not _is_source(each):
                registry.register(cast("Callable[..., Any]", each))
            else:
                registry.attach(each)
        return registry

    def add_hosted(self, tool: HostedTool) -> None:
        """Add a tool that the provider executes itself.

        Raises:
            DuplicateToolError: if the name is taken.
        """
        self._check_free(tool.name, "leave one of them out")
        self.hosted += (tool,)
        self.version += 1

    def _check_free(self, name: str, remedy: str) -> None:
        if name in self._tools or any(name == tool.name for tool in self.hosted):
            raise DuplicateToolError(f"two tools are called {name!r}: {remedy}")

    def attach(self, source: ToolSource) -> None:
        """Add a source of tools, which are registered by the next `refresh`."""
        self.sources += (source,)
        self._source_tools.setdefault(source, (0, ()))

    async def refresh(self) -> None:
        """Update all stale sources concurrently, and register their changes.

        Raises:
            AgentError: if a source that was never fetched cannot be reached.
            DuplicateToolError: if a source has a tool whose name is taken.
        """
        stale = [source for source in self.sources if source.is_stale]
        if len(stale) == 1:
            await stale[0].update()
        elif stale:
            await _update_sources(stale)
        for source in self.sources:
            if self._source_tools[source][0] != source.version:
                self._sync_source(source)

    def _sync_source(self, source: ToolSource) -> None:
        for name in self._source_tools[source][1]:
            if name in self._tools:
                self.unregister(name)
        names: list[str] = []
        try:
            for tool in source.tools:
                names.append(self.register(tool).name)  # noqa: PERF401  if a tool is refused, those before it stay
        finally:
            self._source_tools[source] = source.version, tuple(names)
            self.instructions = self.join_instructions()
            self.version += 1

    def join_instructions(self) -> str:
        """Return the instructions of the skills and the sources, as they are now."""
        given = [each for each in (self.skills, *self.sources) if each is not None]
        return "\n\n".join(filter(None, (getattr(each, "instructions", "") for each in given)))

    async def aclose(self) -> None:
        """Close the sources."""
        for source in self.sources:
            await source.aclose()

    def register(self, candidate: Tool[..., Any] | Callable[..., Any]) -> Tool[..., Any]:
        """Add a tool, or a function converted to a tool.

        Raises:
            DuplicateToolError: if the name is taken.
            MisuseError: if it is not a function, or no schema can be built from it.
        """
        if not callable(candidate):
            raise _not_a_tool_error(candidate)
        added = candidate if isinstance(candidate, Tool) else make_tool(candidate)
        how = "as_tool" if added.kind is ToolKind.AGENT else "@tool"
        self._check_free(added.name, f"rename one, for example with {how}(name='{added.name}_2')")
        self._tools[added.name] = added
        self._limiters[added] = self._collect_limiters(added)
        self.definitions += (added.definition,)
        self.polling_tools |= {added.name} if added.poll else set()
        self.interactive_tools |= {added.name} if added.is_interactive else set()
        self.eager_tools |= {added.name} if added.may_start_early else set()
        self.conditional_tools |= {added.name} if added.enabled is not True else set()
        self.agent_tools |= {added.name} if added.inner_agent is not None else set()
        self.prerequisite_tools |= set(added.after)
        if added.replaces:
            self.replacements = {**self.replacements, **dict.fromkeys(added.replaces, added.name)}
        if added.background:
            self.background_tools |= {added.name}
            for each in (wait(), message_run(), cancel_run()):
                if each.name not in self._tools:
                    self.register(each)
        self.version += 1
        return added

    def unregister(self, name: str) -> Tool[..., Any]:
        """Remove a tool and return it. Running calls of it still complete.

        Raises:
            MisuseError: if no tool has that name.
        """
        if name not in self._tools:
            near = " or ".join(map(repr, self._close_names(name, 3)))
            raise MisuseError(
                f"unknown tool {name!r}: {f'did you mean {near}?' if near else 'the property `names` lists the tools'}"
            )
        removed = self._tools.pop(name)
        del self._limiters[removed]
        self.definitions = tuple(each for each in self.definitions if each.name != name)
        self.polling_tools -= {name}
        self.interactive_tools -= {name}
        self.eager_tools -= {name}
        self.conditional_tools -= {name}
        self.agent_tools -= {name}
        self.background_tools -= {name}
        self.prerequisite_tools = frozenset(other for each in self for other in each.after)
        self.replacements = {old: new for old, new in self.replacements.items() if new != name}
        self.version += 1
        return removed

    def filter(
        self,
        names: Iterable[str] | None = None,
        tags: Iterable[str] | None = None,
        permission: Level | str | None = None,
    ) -> ToolRegistry:
        """Return a new registry of the tools that match all arguments: the same tools, under the same limits.

        Hosted tools have neither tags nor a level, so they match by name only.

        Args:
            names: Names or globs, in any case; a tool must match any of them. None: all names.
            tags: Tags; a tool must have any of them. None: all tools.
            permission: The highest level that a tool may need. None: any level.

        Raises:
            MisuseError: if the level does not exist, or a string is given in place of a list.
        """
        globs, wanted = _to_names("names", names), _to_names("tags", tags)
        most = None if permission is None else Level(permission)
        part = ToolRegistry(tag_limits=self.tag_limits)
        for each in self:
            named = globs is None or any(matches_tool(glob, each.name) for glob in globs)
            tagged = wanted is None or not each.tags.isdisjoint(wanted)
            if named and tagged and (most is None or each.permission <= most):
                part.register(each)
        for tool in self.hosted if wanted is None and most is None else ():
            if globs is None or any(matches_tool(glob, tool.name) for glob in globs):
                part.add_hosted(tool)
        return part

    def extended(self, tools: Iterable[Tool[..., Any]]) -> ToolRegistry:
        """Return a new registry that has further tools as well: the same others, limits and sources.

        Raises:
            DuplicateToolError: if a name is taken.
        """
        whole = copy(self)
        for name in ("_tools", "_limiters", "_source_tools"):
            setattr(whole, name, dict(getattr(self, name)))
        for each in tools:
            whole.register(each)
        return whole

    def with_skills(self, skills: SkillSource | None) -> ToolRegistry:
        """Return a new registry with these skills in place of its own; None for none.

        Raises:
            DuplicateToolError: if the name of one of their tools is taken.
        """
        whole = self.extended(())
        for each in () if self.skills is None else self.skills.tools:
            if whole.get(each.name) is each:
                whole.unregister(each.name)
        for each in () if skills is None else skills.tools:
            if whole.get(each.name) is not each:  # `filter` keeps it
                whole.register(each)
        whole.skills = skills
        whole.version += 1
        whole.instructions = whole.join_instructions()
        return whole

    def limiters_for(self, tool: Tool[..., Any]) -> tuple[Limiter, ...]:
        """Return the limiters of a tool: its own first, then those of its tags, the oldest first.

        Callers that acquire them in this order cannot deadlock. A limiter shared by several tags is listed once.
        """
        known = self._limiters.get(tool)
        return self._collect_limiters(tool) if known is None else known  # the tool was removed while a call of it runs

    def _collect_limiters(self, tool: Tool[..., Any]) -> tuple[Limiter, ...]:
        own = () if tool.limiter is None else (tool.limiter,)
        of_tags = {self.tag_limits[tag] for tag in tool.tags if tag in self.tag_limits}
        return *own, *sorted(of_tags, key=lambda limiter: limiter.number)

    def for_openai(self) -> list[dict[str, Any]]:
        """Return the definitions in the format of OpenAI's `tools=`."""
        return [each.openai() for each in self.definitions]

    def for_anthropic(self) -> list[dict[str, Any]]:
        """Return the definitions in the format of Anthropic's `tools=`."""
        return [each.anthropic() for each in self.definitions]

    def summary(self) -> str:
        """Return one line per tool with its parameters and its first sentence, short enough to choose from many."""
        return "\n".join([each.summary for each in self.definitions])

    def check(self, count: Callable[[str], int] | None = None) -> tuple[Finding, ...]:
        """Check the tools for problems that make them hard to choose or call, or unsafe to run.

        Args:
            count: Function that counts the tokens of a text. None: tokens are estimated.
        """
        return check_tools(self, count)

    def __contains__(self, name: object) -> bool:
        return name in self._tools

    def get(self, name: str) -> Tool[..., Any] | None:
        """Return the tool of that name, or None."""
        return self._tools.get(name)

    def nearest(self, name: str) -> str | None:
        """Return the most similar name, or None if no name is similar."""
        return next(iter(self._close_names(name, 1)), None)

    def _close_names(self, name: str, most: int) -> list[str]:
        return difflib.get_close_matches(name[:NAME_CHARS], self._tools, n=most)

    @property
    def names(self) -> tuple[str, ...]:
        """All names, in the order of registration."""
        return tuple(self._tools)

    def __iter__(self) -> Iterator[Tool[..., Any]]:
        return iter(self._tools.values())

    def __len__(self) -> int:
        return len(self._tools)


def _not_a_collection_error(tools: object) -> MisuseError:
    if isinstance(tools, Tool | HostedTool) or callable(tools) or _is_source(tools):
        name = getattr(tools, "name", None) or getattr(tools, "__name__", "it")
        return MisuseError(f"tools={name}: give a list of tools, also for a single tool: tools=[{name}]")
    if tools is None or isinstance(tools, str):
        return MisuseError(f"tools={tools!r}: give a list of tools, [] for none")
    return _not_a_tool_error(tools)


def _not_a_tool_error(candidate: object) -> MisuseError:
    """Build the error for a value that is not a tool, with a hint how to make one of it."""
    kind = type(candidate).__name__
    how = "use @tool on a function"
    if hasattr(candidate, "digests"):
        return MisuseError(f"{kind} are no tools: write Agent(skills=...)")
    if hasattr(candidate, "as_tool"):
        how = "write agent.as_tool(name=...)"
    elif isinstance(candidate, list | tuple):
        how = "unpack it, for example tools=[*MCPServer.load('servers.json')]"
    return MisuseError(f"a tool is a function or a Tool, not {kind}: {how}")


async def _update_sources(sources: Iterable[ToolSource]) -> None:
    """Update several sources concurrently; raise the error of the first source in their order that failed."""
    errors: dict[ToolSource, AgentError] = {}

    async def update(source: ToolSource) -> None:
        try:
            await source.update()
        except AgentError as error:
            errors[source] = error

    async with anyio.create_task_group() as group:
        for source in sources:
            group.start_soon(update, source)
    for source in sources:
        if source in errors:
            raise errors[source]


def _to_names(argument: str, given: Iterable[str] | None) -> tuple[str, ...] | None:
    if isinstance(given, str):
        raise MisuseError(f"filter({argument}={given!r}): give a list, [{given!r}]")
    return None if given is None else tuple(given)
