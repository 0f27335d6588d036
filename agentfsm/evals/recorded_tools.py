"""Tools that answer from the journal of an earlier run, so that a model is evaluated without effects."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final

import attrs

from agentfsm.core.errors import MisuseError
from agentfsm.core.labels import ToolKind
from agentfsm.core.messages import AssistantMessage, ErrorType, Outcome, ToolCall, ToolResult
from agentfsm.tools.registry import ToolRegistry
from agentfsm.tools.run_context import ToolReturn
from agentfsm.tools.schema.binding import Arguments, BoundArguments
from agentfsm.tools.tool import Tool

if TYPE_CHECKING:
    from agentfsm.agents.agent import Agent
    from agentfsm.core.run import Run

# Text of the result of a call that was not recorded. `list_missing` finds such calls in the journal by it.
NOT_RECORDED: Final = "This call was not recorded, so it has no result."


@attrs.frozen(kw_only=True, eq=False)
class Recording:
    """Results of the tool calls of a run, by tool and arguments."""

    results: dict[tuple[str, str], list[ToolResult]]
    """Results of equal calls, in their order. After the last one, it is given again."""

    @classmethod
    async def of_run(cls, agent: Agent[Any], run_id: str) -> Recording:
        """Read the results of a run in the agent's store.

        Raises:
            RunNotFoundError: if the store has no such run.
            MisuseError: if the run made calls as steps of a plan, which no model repeats.
        """
        run = await agent.runs.load(run_id)
        if run.plan is not None:
            raise MisuseError(f"run {run_id} has a plan, whose steps cannot be played back: evaluate the case live")
        results: dict[tuple[str, str], list[ToolResult]] = defaultdict(list)
        own = run.messages[run.own_start :]
        calls = {call.id: call for each in own if isinstance(each, AssistantMessage) for call in each.calls}
        for each in own:
            if isinstance(each, ToolResult) and each.outcome is not Outcome.SKIPPED:
                results[each.tool, calls[each.call_id].canonical].append(each)
        return cls(results=dict(results))

    def attach(self, agent: Agent[Any]) -> Agent[Any]:
        """Return the agent with tools that give the recorded results. They need no approval, and have no effect.

        Raises:
            MisuseError: if the agent has tools of a source, or of its provider, which cannot be played back.
        """
        if agent.tools.sources or agent.tools.hosted:
            raise MisuseError("tools of MCP servers and of providers cannot be played back: evaluate the case live")
        return agent.with_(tools=ToolRegistry.of([self._record_tool(tool) for tool in agent.tools]))

    def _record_tool(self, tool: Tool[..., Any]) -> Tool[..., Any]:
        rest = {key: list(results) for key, results in self.results.items() if key[0] == tool.name}

        async def answer(text: str) -> ToolReturn:
            results = rest.get((tool.name, text), [])
            if not results:
                return ToolReturn(outcome=Outcome.FAILED, content=NOT_RECORDED, error_type=ErrorType.UNKNOWN_TOOL)
            found = results.pop(0) if len(results) > 1 else results[0]
            return ToolReturn(
                outcome=found.outcome,
                content=found.content,
                error_type=found.error_type,
                parts=found.parts,
                labels=found.labels,
            )

        given: dict[str, Arguments] = {}  # for the rules about a call that read its arguments

        def bind(text: str) -> BoundArguments:
            bound, canonical = tool.bind_and_check(text), ToolCall(id="", name=tool.name, arguments=text).canonical
            given[canonical] = tool.to_namespace(bound)
            return (canonical,), {}

        return attrs.evolve(
            tool,
            function=answer,
            bind=bind,
            to_namespace=lambda bound: given[bound[0][0]],
            kind=ToolKind.DIRECT,
            takes_context=False,
            is_async=True,
            sandbox=None,
            locks=None,
            validate=None,
            describe=None,
            requires_approval=False,
            external=False,
            waits_for=None,
            cost_usd=None,
            concurrency_safe=True,
            inner_agent=None,
            start_rule=None,
        )

    def list_missing(self, run: Run[Any]) -> tuple[str, ...]:
        """Return a finding for each call of a run that was not recorded."""
        missing = [each for each in run.messages if isinstance(each, ToolResult) and each.content == NOT_RECORDED]
        calls = {call.call_id: call for call in run.calls}
        return tuple(
            f"{each.tool}({json.dumps(calls[each.call_id].arguments, ensure_ascii=False)}) was not recorded"
            for each in missing
        )
