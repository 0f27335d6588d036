"""JSON documents of agents: their tools, as declared and as checked, their sub-agents, and their MCP servers."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Final

import attrs

from agentfsm.agents.subagent import find_inner_agent
from agentfsm.tools.tool import Tool

if TYPE_CHECKING:
    from agentfsm.agents.agent import Agent

# Fields of a tool that are no declarations: its parts, and those that the document has under their own names.
_PARTS: Final = frozenset(
    {"function", "name", "description", "parameters", "dialect", "bind", "to_namespace", "takes_context", "is_async"}
    | {"kind", "strict", "shown_tokens", "shown_bytes", "waits_for", "inner_agent", "start_rule", "end_task"}
    | {"breaker", "limiter"}
)


def build_agent_document(agent: Agent) -> dict[str, Any]:
    """Return an agent: its name, its model and its tools."""
    tools = [{"name": each.name, "description": each.description, "read_only": each.read_only} for each in agent.tools]
    return {"name": agent.name, "version": agent.version, "model": agent.model.name, "tools": tools}


def build_full_agent_document(agent: Agent, *, shows_instructions: bool) -> dict[str, Any]:
    """Return an agent: the declarations of its tools, its sub-agents, MCP servers and limits; the inputs of a flow.

    Args:
        agent: The agent.
        shows_instructions: Whether its instructions are shown, if they are a text.
    """
    inner = [(tool.name, found) for tool in agent.tools if (found := find_inner_agent(tool)) is not None]
    return build_agent_document(agent) | {
        "instructions": agent.instructions if shows_instructions and isinstance(agent.instructions, str) else None,
        "input_schema": None if agent.planner is None else agent.planner.input_schema,
        "tools": [
            {
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.parameters,
                "declarations": list_tool_declarations(tool),
            }
            for tool in agent.tools
        ],
        "findings": [attrs.asdict(each) for each in agent.tools.check()],
        "sub_agents": [
            {"tool": name, "name": found.name, "model": found.driver.config.model.name} for name, found in inner
        ],
        "mcp_servers": [_build_source_document(each) for each in agent.tools.sources],
        "limits": attrs.asdict(agent.limits),
    }


def list_tool_declarations(tool: Tool[..., Any]) -> list[str]:
    """Return the options of a tool that differ from their defaults, a few words each."""
    found = []
    for field in attrs.fields(Tool):
        if field.name in _PARTS or field.name.startswith("_"):
            continue
        value = getattr(tool, field.name)
        if value == field.default or value is None or value is False or (isinstance(value, Collection) and not value):
            continue
        found.append(_describe_option(field.name, value))
    return found


def _describe_option(name: str, value: object) -> str:
    if value is True:
        return name
    if callable(value):
        return f"{name}: by a function"
    if isinstance(value, Collection) and not isinstance(value, str):
        return f"{name}: {', '.join(sorted(map(str, value)))}"
    return f"{name}: {value}"


def _build_source_document(source: Any) -> dict[str, Any]:
    """Return an MCP server, or another source of tools, as of its last listing. It is not contacted."""
    admitted = getattr(source, "admitted", None)
    policy = getattr(source, "tool_policy", None)
    error = getattr(source, "last_error", None)
    gate = getattr(source, "consent_gate", None)
    pin = None if gate is None else gate.load_pin()
    return {
        "name": getattr(source, "name", type(source).__name__),
        "tools": len(tuple(source.tools)),
        "trusted": bool(getattr(policy, "trusted", False)),
        "pinned": 0 if pin is None else sum(name.startswith("tool ") for name in pin.items),
        "refused": dict(getattr(admitted, "refused", {})),
        "withheld": dict(getattr(admitted, "withheld", {})),
        "error": None if error is None else str(error),
    }
