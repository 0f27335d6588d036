"""Lists of runs that fit a terminal, and calls to approve that are shown whole."""

from agentfsm import Agent, tool
from agentfsm.cli.render.formatting import count_columns
from agentfsm.cli.render.text import format_run, format_summaries
from agentfsm.cli.resolve.command_hint import CommandHint
from agentfsm.cli.session.attended_run import format_end
from agentfsm.journal.run_status import list_statuses
from agentfsm.stores import MemoryStore
from agentfsm.testing import ScriptedModel, call, say

LINES = ["# Report", *[f"- finding {number}" for number in range(60)]]


@tool(requires_approval=True)
def write_report(title: str, markdown: str) -> str:
    """Write a report."""
    return "written"


def make_agent():
    model = ScriptedModel(say("", call("write_report", title="Survey", markdown="\n".join(LINES))))
    return Agent(model, tools=[write_report], store=MemoryStore())


async def test_a_list_keeps_its_columns_at_80():
    """All columns stay at 80 characters; reasons and years are left out there, and shown in a wider terminal."""
    async with make_agent() as agent:
        await agent.run("Survey the folder, and write a report about it.", id="r" * 20)
        await agent.submit("Another long prompt that does not fit into the line of a terminal.", id="q" * 20)
        await agent.cancel("q" * 20)
        rows = await agent.runs.list()
        statuses = await list_statuses(agent.store, rows)
    narrow = list(format_summaries(rows, statuses, 80))
    assert narrow[0].split() == ["ID", "STATUS", "UPDATED", "TURN", "TOKENS", "PROMPT"]
    assert max(map(count_columns, narrow)) <= 80
    assert [line.split()[1] for line in narrow[1:]] == ["failed", "waiting"]
    wide = list(format_summaries(rows, statuses))
    assert "failed, cancelled" in wide[1]
    assert wide[2].endswith("Survey the folder, and write a report about it.")


async def test_a_call_to_approve_is_shown_whole():
    """A run that waits shows each line of a long argument, where a line of the list would cut it."""
    async with make_agent() as agent:
        run = await agent.run("go")
    for shown in (format_run(run), "\n".join(format_end(run, CommandHint(location="runs.db")))):
        assert '"title": "Survey",' in shown
        assert [line for line in LINES if f"| {line}" not in shown] == []
