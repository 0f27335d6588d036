"""`agentfsm graph`: pictures of agents and of runs, exactly, and with whatever names."""

from __future__ import annotations

import re

import pytest

from agentfsm import Agent, ask_user, tool
from agentfsm.cli.render import flowchart
from agentfsm.cli.render.flowchart import draw_plans
from agentfsm.flow import Flow, agent_step, each, step, until
from agentfsm.testing import ScriptedModel, call, say

HOSTILE = [
    'a "quoted" name',
    "a [bracket] (paren) {brace} <tag> |pipe|",
    "two\nlines\r\nand\ttabs",
    "back\\slash\\",
    "#35; #quot; &amp; %% comment ; end",
    "`code` and $math$ and ~~~",
    "\x1b[31mred\x00\u202e",
    '"]\n    n9 --> n0\n    click n0 "javascript:alert(1)"',
]
# What a line of a picture may be, with texts that nothing ends but their own quotes.
MERMAID = re.compile(
    r'flowchart LR|    n\d+(?:\(\[|\[\(|\[\[|\[)"[\w \-.,:/()#;<>]*"(?:\]\)|\)\]|\]\]|\])'
    r'|    n\d+ -->(?:\|"[\w \-.,:/()#;<>]*"\|)? n\d+'
)
DOT = re.compile(
    r'digraph agentfsm \{|    rankdir=LR|    n\d+ \[label="(?:[^"\\]|\\.)*", shape=\w+\]'
    r'|    n\d+ -> n\d+(?: \[label="(?:[^"\\]|\\.)*"\])?|\}'
)


@tool(read_only=True)
async def look() -> str:
    """Look."""
    return "saw"


@tool(idempotent=True)
async def put() -> str:
    """Put."""
    return "put"


@tool(requires_approval=True)
async def pay() -> str:
    """Pay."""
    return "paid"


@tool(requires_approval=lambda _arguments: True)
async def send() -> str:
    """Send."""
    return "sent"


class Shelf:
    """A source of tools that was not asked yet."""

    name = "shelf"
    is_stale = True
    version = 0
    tools = ()

    async def update(self) -> None:
        """Never called: nothing is started for a picture."""
        raise AssertionError

    async def aclose(self) -> None:
        """Close nothing."""


def office() -> Agent:
    """An agent with tools of every kind, one of them an agent."""
    scout = Agent(ScriptedModel(), tools=[look], name="scout")
    tools = [look, put, pay, send, ask_user, scout.as_tool(name="find"), Shelf()]
    return Agent(ScriptedModel(), tools=tools, name="clerk")


def test_an_agent_as_mermaid():
    """Its tools with what they declare, the agent behind one of them with its own, and where more tools come from."""
    assert flowchart.render_mermaid(flowchart.draw_agent(office())).splitlines() == [
        "flowchart LR",
        '    n0(["clerk<br/>scripted"])',
        '    n1["look<br/>read-only"]',
        '    n2["put<br/>idempotent"]',
        '    n3["pay<br/>needs approval"]',
        '    n4["send<br/>may need approval"]',
        '    n5["ask_user<br/>answered from outside"]',
        '    n6(["scout<br/>scripted"])',
        '    n7["look<br/>read-only"]',
        '    n8[("shelf<br/>Shelf")]',
        "    n0 --> n1",
        "    n0 --> n2",
        "    n0 --> n3",
        "    n0 --> n4",
        "    n0 --> n5",
        '    n0 -->|"find<br/>read-only"| n6',
        "    n6 --> n7",
        "    n0 --> n8",
    ]


def test_an_agent_for_graphviz():
    """The same."""
    assert flowchart.render_dot(
        flowchart.draw_agent(Agent(ScriptedModel(), tools=[pay], name="clerk"))
    ).splitlines() == [
        "digraph agentfsm {",
        "    rankdir=LR",
        r'    n0 [label="clerk\nscripted", shape=ellipse]',
        r'    n1 [label="pay\nneeds approval", shape=box]',
        "    n0 -> n1",
        "}",
    ]


def test_an_agent_that_several_call_is_drawn_once():
    """Two tools of one agent are two arrows."""
    scout = Agent(ScriptedModel(), name="scout")
    drawn = flowchart.draw_agent(Agent(ScriptedModel(), tools=[scout.as_tool(name="a"), scout.as_tool(name="b")]))
    assert len(drawn.nodes) == 2
    assert [(source, target, lines[0]) for source, target, lines in drawn.arrows] == [(0, 1, "a"), (0, 1, "b")]


async def test_a_run_that_waits():
    """The states that it was in, how often each event led on, and what it waits for where it stands."""
    agent = Agent(ScriptedModel(say("", call("look")), say("", call("pay"))), tools=[look, pay])
    run = await agent.run("go")
    drawn = flowchart.draw_run(run, await agent.history(run.id))
    assert flowchart.render_mermaid(drawn).splitlines() == [
        "flowchart LR",
        '    n0["OBSERVE"]',
        '    n1["THINK"]',
        '    n2[["ACT<br/>turn 2<br/>waits for the approval of t2.0"]]',
        '    n3["REFLECT"]',
        '    n0 -->|"Observed 2"| n1',
        '    n1 -->|"ToolsChosen 2"| n2',
        '    n2 -->|"ToolFinished 1<br/>ApprovalAsked 1"| n2',
        '    n2 -->|"ToolsReturned 1"| n3',
        '    n3 -->|"Continued 1"| n0',
    ]


async def test_a_run_that_is_over():
    """It stands where it ended, with the reason; one that has not begun stands at the start."""
    agent = Agent(ScriptedModel("Hello."))
    run = await agent.run("hi")
    drawn = flowchart.draw_run(run, await agent.history(run.id))
    assert flowchart.render_dot(drawn).splitlines() == [
        "digraph agentfsm {",
        "    rankdir=LR",
        '    n0 [label="OBSERVE", shape=box]',
        '    n1 [label="THINK", shape=box]',
        r'    n2 [label="DONE\nturn 1, completed", shape=doubleoctagon]',
        '    n0 -> n1 [label="Observed 1"]',
        '    n1 -> n2 [label="AnswerGiven 1"]',
        "}",
    ]
    assert flowchart.draw_run(agent.start("hi"), ()).nodes == (
        flowchart.FlowchartNode(lines=("OBSERVE", "turn 0"), shape=flowchart.CURRENT_STATE),
    )


@pytest.mark.parametrize("name", HOSTILE)
def test_a_name_ends_no_text(name):
    """Whatever a name holds, each line of a picture stays what it is, and the name is shown."""
    model = ScriptedModel()
    model.name = name
    inner = Agent(model, name=name)
    drawn = flowchart.draw_agent(Agent(model, tools=[look, inner.as_tool(name="ask", description="")], name=name))
    for line in flowchart.render_mermaid(drawn).splitlines():
        assert MERMAID.fullmatch(line), line
    for line in flowchart.render_dot(drawn).splitlines():
        assert DOT.fullmatch(line), line


def test_the_command_draws_an_agent_and_a_run(here):
    """What has a colon and two names is an agent, all else is a run's id; as JSON the picture is in a document."""
    assert 'n0(["' in here("graph", "app:shopper")
    run_id = here.run("app:shopper")
    drawn = here("graph", run_id, "--format", "dot")
    assert drawn.startswith("digraph")
    assert r"DONE\nturn 2, completed" in drawn
    assert here.json("graph", run_id, "--format", "dot") == {"format": "dot", "graph": drawn.rstrip("\n")}


def test_what_cannot_be_drawn_is_refused(here):
    """An agent that is not there, a run that is not there, and a form that only the machine has."""
    here("graph", "app:nobody", code=2)
    assert "has no attribute 'nobody'" in here.err
    run_id = here.run("app:shopper")
    here("graph", "nowhere", code=2)
    assert "no run 'nowhere'" in here.err
    here("graph", run_id, "--format", "text", code=2)
    assert "--format text is only for the state machine: give --format mermaid or dot" in here.err


def test_a_flow_is_drawn_as_its_steps():
    """With their order, joins, agents, conditions and compensations."""

    async def act() -> str:
        return ""

    reader = agent_step(Agent(ScriptedModel(), name="reader"), "Read.", when=lambda: True)
    first = step(act, name="first", read_only=True)
    last = step(act, name="last", depends_on=[first, reader], join="any", compensate=act)
    assert flowchart.render_mermaid(flowchart.draw_agent(Flow([last, reader, first]))).splitlines() == [
        "flowchart LR",
        '    n0["first<br/>read-only"]',
        '    n1["reader<br/>agent reader<br/>read-only<br/>may be skipped"]',
        '    n2["last<br/>undone by compensate_last"]',
        '    n0 -->|"any"| n2',
        '    n1 -->|"any"| n2',
    ]


@step(read_only=True)
async def extract(day: str) -> list[int]:
    """Extract."""
    return [len(day)]


@step(depends_on=[extract], when=lambda extract: not extract)
async def alarm(extract: list[int]) -> str:
    """Alarm."""
    return str(extract)


@step(depends_on=[extract], requires_approval=True)
async def load(extract: list[int]) -> int:
    """Load."""
    return len(extract)


@step(depends_on=[alarm, load], join="any")
async def report(load: int | None) -> int | None:
    """Report."""
    return load


async def test_a_run_of_a_flow_is_drawn_with_the_status_of_each_step():
    """While it waits, and after it has ended; other plans are drawn in the same way."""
    flow = Flow([extract, alarm, load, report])
    run = await flow.run({"day": "today"})
    assert await _drawn_statuses(flow, run) == ["success", "skipped", "waiting", "pending"]
    drawn = flowchart.render_dot(draw_plans(run, await flow.runs.history(run.id)))
    assert 'n2 [label="load\\nwaiting", shape=box, style=filled, fillcolor="#ffe9b8"]' in drawn
    assert 'n1 -> n3 [label="any"]' in drawn
    await flow.reject(run.id, run.pending[0].call_id)
    assert await _drawn_statuses(flow, await flow.resume(run.id)) == ["success", "skipped", "failed", "not run"]


async def _drawn_statuses(flow, run):
    return [node.lines[1] for node in draw_plans(run, await flow.runs.history(run.id)).nodes]


def test_steps_that_repeat_another_say_so():
    """In place of the agent of their child run."""

    async def act(item: int) -> int:
        return item

    items = each(step(act, name="load"), over="items", name="rows")
    loop = until(step(act, name="ask"), lambda ask: ask > 0, times=3)
    lines = flowchart.render_mermaid(flowchart.draw_agent(Flow([items, loop]))).splitlines()
    assert lines[1:] == ['    n0["rows<br/>for each of items"]', '    n1["ask<br/>up to 3 times"]']
