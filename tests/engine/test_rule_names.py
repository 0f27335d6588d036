"""Names of tools in rules: case does not count, wherever a rule names tools."""

import pytest

from agentfsm import Agent, Permissions, Rule, ToolRegistry, tool
from agentfsm.core.labels import matches_tool
from agentfsm.guards import Guard, allow, ask, max_calls, only_for, refuse
from agentfsm.mcp.trust.tool_policy import ToolPolicy
from agentfsm.openapi import tools_from_openapi
from agentfsm.stores import MemoryStore
from agentfsm.testing import ScriptedModel, call, say
from agentfsm.tools.label_rules import find_declarations

# Rules about the tool `Drop_table`.
GLOBS = ["drop_*", "DROP_*", "drop_table", "Drop_Table", "[a-f]rop_*", "*_TABLE"]


@tool(name="Drop_table", irreversible=True)
async def drop_table(name: str = "t") -> str:
    """Drop a table."""
    return "dropped"


def build(**options):
    script = [say("", call("Drop_table"), call("Drop_table")), "done"]
    return Agent(ScriptedModel(*script), tools=[drop_table], store=MemoryStore(), **options)


async def outcomes(agent):
    """Return what became of two calls of the tool: done, failed, or asked."""
    run = await agent.run("go")
    records = await agent.audit(run.id)
    return [str(each.status) for each in records]


@pytest.mark.parametrize("glob", GLOBS)
async def test_rules_of_guards_and_permissions(glob):
    """Refusals, questions, exemptions, roles and quotas, and what permissions allow and deny."""
    assert await outcomes(build(guards=[refuse(glob)])) == ["failed", "failed"]
    assert await outcomes(build(guards=[ask(glob)])) == ["asked", "asked"]
    assert await outcomes(build(guards=[Guard(ask("*"), allow(glob))])) == ["done", "done"]
    assert await outcomes(build(guards=[only_for(glob, "admin")])) == ["failed", "failed"]
    assert await outcomes(build(guards=[max_calls(glob, 1)])) == ["done", "failed"]
    assert await outcomes(build(permissions=Permissions(deny=(glob,)))) == ["failed", "failed"]
    assert await outcomes(build(permissions=Permissions(allow=(glob,)))) == ["done", "done"]
    assert Rule(glob).covers(drop_table)


@pytest.mark.parametrize("glob", GLOBS)
def test_rules_of_registries_servers_and_documents(glob):
    """Selections by name, labels by name, and the tools of an MCP server that may be used or called again."""
    assert [each.name for each in ToolRegistry.of([drop_table]).filter(names=[glob])] == ["Drop_table"]
    assert find_declarations({glob: {"sends_out": True}}, ["Drop_table"]) == {"sends_out": True}
    policy = ToolPolicy(deny=(glob,), repeat_for_input=(glob,), labels={glob: {"irreversible": True}})
    assert not policy.allows("Drop_table")
    assert policy.repeats_for_input("Drop_table")
    assert policy.find_declarations("db", "Drop_table") == {"irreversible": True}
    assert policy.unmatched_globs("db", ["Drop_table"], []) == ()
    assert ToolPolicy(allow=(glob,)).allows("Drop_table")
    operation = {"operationId": "Drop_table", "responses": {"200": {"description": "done"}}}
    document = {"openapi": "3.1.0", "info": {"title": "db", "version": "1"}, "paths": {"/drop": {"post": operation}}}
    [made] = tools_from_openapi(document, base_url="https://db.example.org", labels={glob: {"harmless": "a test"}})
    assert made.harmless == "a test"


def test_other_letters_are_other_names():
    """Only the case is left out of the comparison."""
    assert not any(matches_tool(glob, "Drop_table") for glob in ("drop", "drop-*", "dropp_*", "[g-z]rop_*", ""))
