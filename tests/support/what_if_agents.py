"""Agents of several kinds that read, pay and write, and what they have done outside."""

import json
from pathlib import Path

from agentfsm import Agent, ToolResult, UserMessage, tool
from agentfsm.flow import Flow, step
from agentfsm.planning import Planner
from agentfsm.testing import FunctionModel, call, say

HURRY = "Hurry up"


class World:
    """What the tools of a test have done outside."""

    def __init__(self, calls=None):
        self.calls = [] if calls is None else calls

    def tools(self):
        """Return a tool that reads, one that acts, and one that asks a person before."""

        @tool(read_only=True)
        async def look(order: int) -> str:
            """Look up an order."""
            self.calls.append(("look", order))
            return f"order {order}: 500 cents, Ann"

        @tool
        async def pay(account: str, cents: int) -> str:
            """Pay."""
            self.calls.append(("pay", account, cents))
            return "paid"

        @tool(requires_approval=True)
        async def mail(to: str) -> str:
            """Write to somebody."""
            self.calls.append(("mail", to))
            return "sent"

        return [look, pay, mail]


def follow(*steps):
    """Return a model that makes these calls, one in each turn, and then answers."""

    def think(request):
        tasks = [at for at, each in enumerate(request.messages) if isinstance(each, UserMessage) and each.text != HURRY]
        asked = max(tasks)
        done = len([each for each in request.messages[asked:] if isinstance(each, ToolResult)])
        return say("", steps[done]) if done < len(steps) else "Done."

    return FunctionModel(think)


def list_steps(cents=500):
    """Return the calls of an agent that looks up an order, pays and writes."""
    return call("look", order=7), call("pay", account="Ann", cents=cents), call("mail", to="Ann")


STEPS = list_steps()
# Another amount, and a call more.
OTHER = (*list_steps(cents=50_000), call("pay", account="Bob", cents=1))


def plain(world, steps=STEPS):
    """Return an agent that makes calls."""
    return Agent(follow(*steps), tools=world.tools(), name="refunds")


def sub_agents(world, steps=STEPS):
    """Return an agent that leaves all to another one."""
    return Agent(follow(call("refunds", query="Refund 7")), tools=[plain(world, steps).as_tool(turns=9)], name="desk")


def background(world, steps=STEPS):
    """Return an agent that leaves all to one in the background."""
    tools = [plain(world, steps).as_tool(background=True)]
    return Agent(follow(call("refunds", query="Refund 7")), tools=tools, name="desk")


def planned(world, steps=STEPS):
    """Return an agent that makes a plan of calls, one after the other."""
    plan = [
        {"id": at, "tool": each.name, "arguments": json.loads(each.arguments), "after": [at - 1] if at > 1 else []}
        for at, each in enumerate(steps, 1)
    ]

    def think(request):
        return "Done." if request.tools else json.dumps({"steps": plan})

    return Agent(FunctionModel(think), tools=world.tools(), planner=Planner(), name="planned")


def flow(world, steps=STEPS):
    """Return a flow of calls."""
    look_tool, pay_tool, mail_tool = world.tools()

    @step(read_only=True)
    async def look(order: int) -> str:
        return await look_tool.function(order)

    @step(depends_on=[look])
    async def pay(look: str) -> str:
        return await pay_tool.function("Ann", 500)

    @step(depends_on=[pay], requires_approval=True)
    async def mail(pay: str) -> str:
        return await mail_tool.function("Ann")

    @step(depends_on=[mail])
    async def close(mail: str) -> str:
        return await pay_tool.function("Bob", 1)

    return Flow([look, pay, mail, *([close] if len(steps) > 3 else [])], name="flow")


KINDS = [plain, sub_agents, background, planned, flow]


async def record(agent, **start):
    """Return a run of the agent that is over, whose approvals were given."""
    run = await agent.run({"order": 7} if isinstance(agent, Flow) else "Refund order 7", **start)
    while run.pending:
        await agent.approve(run.pending[0].run_id, run.pending[0].call_id)
        run = await agent.resume(run.id)
    assert run.answer, run
    return run


class FileWorld(World):
    """A world outside of all processes."""

    def __init__(self):
        super().__init__(self)

    def append(self, call):
        """Note a call."""
        with Path("world.txt").open("a", encoding="utf-8") as file:
            print(*call, file=file)
