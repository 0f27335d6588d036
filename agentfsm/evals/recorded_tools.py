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
    from agentfsm.core.calls import CallRecord
    from agentfsm.core.run import Run
    from agentfsm.evals.case import Case, ToolFixture

# Text of the result of a call that was not recorded. `find_missing` finds such calls in the journal by it.
NOT_RECORDED: Final = "This call was not recorded, so it has no result."


def list_results(run: Run[Any]) -> list[tuple[ToolCall, ToolResult]]:
    """Return the calls that a run made itself, with their results; those that were skipped left out.

    Raises:
        MisuseError: if the run made calls as steps of a plan, which no model repeats.
    """
    if run.plan is not None:
        raise MisuseError(f"run {run.id} has a plan, whose steps cannot be played back: evaluate the case live")
    own = run.messages[run.own_start :]
    calls = {call.id: call for each in own if isinstance(each, AssistantMessage) for call in each.calls}
    results = [each for each in own if isinstance(each, ToolResult) and each.outcome is not Outcome.SKIPPED]
    return [(calls[each.call_id], each) for each in results]


def _as_return(result: ToolResult | ToolFixture, **parts: Any) -> ToolReturn:
    return ToolReturn(
        outcome=result.outcome, content=result.content, error_type=result.error_type, labels=result.labels, **parts
    )


@attrs.frozen(kw_only=True, eq=False)
class Recording:
    """Results of the tool calls of a case, by tool and arguments."""

    results: dict[tuple[str, str], list[ToolReturn]]
    """Results of equal calls, in their order. After the last one, it is given again."""

    @classmethod
    async def of_case(cls, agent: Agent[Any], case: Case) -> Recording:
        """Return the fixtures of a case, or else the results of its run in the agent's store.

        Raises:
            RunNotFoundError: if the store has no such run.
            MisuseError: if the run made calls as steps of a plan, which no model repeats.
        """
        results: dict[tuple[str, str], list[ToolReturn]] = defaultdict(list)
        if case.fixtures is None:
            for call, result in list_results(await agent.runs.load(case.recorded)):
                results[call.name, call.canonical].append(_as_return(result, parts=result.parts))
        for each in case.fixtures or ():
            call = ToolCall(id="", name=each.tool, arguments=json.dumps(each.arguments))
            results[each.tool, call.canonical].append(_as_return(each))
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
            return results.pop(0) if len(results) > 1 else results[0]

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
            login=None,
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

    def find_missing(self, run: Run[Any]) -> list[CallRecord]:
        """Return the calls of a run that were not recorded."""
        missing = [each for each in run.messages if isinstance(each, ToolResult) and each.content == NOT_RECORDED]
        calls = {call.call_id: call for call in run.calls}
        return [calls[each.call_id] for each in missing]
