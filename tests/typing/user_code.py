"""What users type, and what they get for it: checked by mypy --strict and pyright, never run."""
# pyright: standard

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, assert_type

from agentfsm import (
    COORDINATION,
    TABLE,
    Agent,
    AgentCost,
    Claims,
    ConflictError,
    ErrorType,
    ImagePart,
    InputKind,
    Level,
    Limits,
    ModelRetry,
    Outcome,
    Pending,
    PendingKind,
    Permissions,
    RefusedError,
    Rule,
    Run,
    RunContext,
    RunError,
    Settings,
    State,
    StopReason,
    TextPart,
    ToolCall,
    ToolQueue,
    ToolRegistry,
    ToolResult,
    TransientError,
    Usage,
    tool,
)
from agentfsm.context import Context, DropAcknowledgements, SlidingWindow, TrimResults
from agentfsm.mcp import Argument, MCPServer, MCPService, Prompt, Resource
from agentfsm.models import Fallback, OpenAIChat, Throttled
from agentfsm.ports import Emit, Model, Reply, Request
from agentfsm.reflection import Reflector
from agentfsm.stores import MemoryStore, SQLiteStore
from agentfsm.testing import FunctionModel, ScriptedModel, call, say


@dataclass
class Deps:
    account: str


@tool(read_only=True)
async def search(query: str, limit: int = 5) -> list[str]:
    """Search the knowledge base.

    Args:
        query: Words to look for.
        limit: How many results, 1 to 50.
    """
    return [query] * limit


@tool(timeout_s=10, requires_approval=True)
async def pay(ctx: RunContext[Deps], account: str, cents: int) -> str:
    """Pay."""
    if cents < 0:
        raise ModelRetry("cents are 0 or more")
    await ctx.progress(f"paying {ctx.deps.account}")
    assert_type(ctx.idempotency_key, str)
    assert_type(ctx.deadline, float)
    assert_type(ctx.deps, Deps)
    return account


@tool
def add(a: int, b: int) -> int:
    """Add."""
    return a + b


@tool(
    idempotent=True,
    locks=lambda a: [a.account],
    after=["search"],
    limit=4,
    tags=["bank"],
    permission=Level.ADMIN,
    validate=lambda a: None if a.cents < 1_000 else "at most 9.99",
    requires_approval=lambda a: bool(a.cents > 500),
    describe=lambda a: f"Refunds {a.cents} cents.",
    shown_tokens=1_000,
)
def refund(ctx: RunContext[Deps], account: str, cents: int) -> ToolCall:
    """Refund."""
    ctx.progress("in a plain function nobody awaits it")
    if cents == 0:
        raise RefusedError("too early", retry_after_s=2.5)
    if ctx.cancelled:
        raise TransientError("given up")
    return ToolCall(id=account, name="x", arguments="{}")


def plain(word: str) -> str:
    """Say a word."""
    return word


class MyModel(Model):
    """A model of the user's own."""

    name = "mine"

    async def reply(self, request: Request, emit: Emit | None = None) -> Reply:
        """Answer."""
        return Reply(text=request.instructions, usage=Usage(input_tokens=1))


agent = Agent(
    "openai:gpt-4o",
    tools=[search, pay, add, plain],
    instructions="You are a billing assistant.",
    limits=Limits(turns=20, tokens=200_000, seconds=300, usd=0.50),
    store=SQLiteStore("runs.db"),
    settings=Settings(temperature=0.0, max_tokens=100),
)
coordinator = Agent(
    "openai:gpt-4o",
    tools=[agent.as_tool(name="billing", description="Asks the billing desk.", turns=2, timeout_s=20), refund],
    instructions=COORDINATION,
    permissions=Permissions(level=Level.WRITE, deny=("drop_*", Rule("refund", lambda a: a.cents > 500))),
)
others = [
    Agent(OpenAIChat("gpt-4o", base_url="https://its.host/v1", api_key="x")),
    Agent(MyModel(), store=MemoryStore()),
    Agent(model=MyModel(), tools=ToolRegistry()),
    Agent(ScriptedModel(say("", call("add", a=1, b=2)), "3"), tools=(add,)),
    Agent(FunctionModel(lambda request: request.instructions)),
    agent.with_(model=MyModel()),
]


async def tools_are_functions() -> None:
    """A tool can be called, and is checked, as the function that it is."""
    assert_type(await search("words", limit=2), list[str])
    assert_type(add(1, 2), int)
    await search(17)  # type: ignore[arg-type]
    add(1)  # type: ignore[call-arg]


async def the_ladder(deps: Deps) -> None:
    """Every rung gives a run."""
    run = agent.start("Refund order 17", id="order-17", user="ann", roles=["ops"], metadata={"order": 17})
    assert_type(run, Run)
    run = await agent.step(run, deps=deps)
    async for each in agent.steps(run, deps=deps):
        assert_type(each, Run)
    run = await agent.finish(run, deps=deps)
    run = await agent.run("Refund order 17", deps=deps, session="user-7")
    run = await agent.run([TextPart(text="What is this?"), ImagePart(url="https://its.host/a.png")], after=run)
    run = await agent.run("more", messages=run.messages)
    run = agent.run_sync("Refund order 17", deps=deps)
    run = await agent.resume(run.id, deps=deps, wait=False)
    run = await agent.load(run.id, at=3)
    assert_type(agent.cost(run), AgentCost)
    assert_type(run, Run)
    what_a_run_says(run)
    agent.start("x", idd="y")  # type: ignore[call-arg]
    agent.start(17)  # type: ignore[arg-type]


async def steps_can_be_left(run: Run) -> None:
    """A loop over the steps can be left early, and nothing has to be closed."""
    async for each in agent.steps(run):
        assert_type(each, Run)
        break


def what_a_run_says(run: Run) -> None:
    """The fields of the contract, with their types."""
    assert_type(run.state, State)
    assert_type(run.output, str)
    assert_type(run.stop_reason, StopReason | None)
    assert_type(run.usage, Usage)
    assert_type(run.turn, int)
    assert_type(run.id, str)
    assert_type(run.version, int)
    assert_type(run.pending, tuple[Pending, ...])
    assert_type(run.is_over, bool)
    assert_type(run.metadata, Mapping[str, Any])
    for item in run.pending:
        assert_type(item.kind, PendingKind)
        assert_type(item.expires_at, float | None)
    for record in run.calls:
        assert_type(record.outcome, Outcome)
    run.turn = 3  # type: ignore[misc]


async def watched() -> None:
    """A stream hands out events, and has the run."""
    async with agent.stream("Refund order 17") as stream:
        async for event in stream:
            assert_type(event.seq, int)
    assert_type(stream.run, Run[str])


async def people(run_id: str) -> None:
    """Decisions and input."""
    await agent.approve(run_id, "t1.0", by="ann")
    await agent.approve(run_id, "t1.0", arguments={"account": "DE02", "cents": 5})
    await agent.reject(run_id, "t1.0", message="too much")
    await agent.settle(run_id, "t1.0", result="done")
    await agent.settle(run_id, "t1.0", rerun=True)
    await agent.send(run_id, "hurry", kind=InputKind.WEBHOOK, key="w-1")
    await agent.cancel(run_id, by="ann")
    for event in await agent.history(run_id):
        assert_type(event.at, float)


async def errors() -> str:
    """An error carries the run."""
    try:
        return (await agent.run("go")).output
    except RunError as error:
        assert_type(error.run, Run[Any])
        return str(error.run.stop_reason)
    except ConflictError as error:
        return str(error)


async def closing() -> None:
    """An agent is a context."""
    async with Agent(MyModel()) as own:
        assert_type(own, Agent)
    await agent.aclose()


async def the_queue_alone() -> None:
    """The queue serves without an agent."""
    queue = ToolQueue(registry=ToolRegistry.of([search, plain]), limit=4)
    results = await queue.execute_all([])
    assert_type(results, list[ToolResult])
    assert_type([result.outcome for result in results], list[Outcome])
    assert_type(queue.statistics().abandoned, int)
    plan = queue.plan([ToolCall(id="t1.0", name="search", arguments="{}")])
    assert_type(plan.batches, tuple[tuple[str, ...], ...])
    assert_type(plan.estimate_s, float)
    async with queue.stream([]) as stream:
        async for event in stream:
            assert_type(event.seq, int)
    assert_type(stream.results, list[ToolResult])


def what_a_result_says(result: ToolResult) -> None:
    """The fields of the contract, with their types."""
    assert_type((result.call_id, result.tool, result.index), tuple[str, str, int])
    assert_type((result.started_at, result.duration_s, result.completed_at), tuple[float, float, float])
    assert_type((result.error_type, result.error), tuple[ErrorType | None, str | None])
    assert_type((result.retryable, result.attempts), tuple[bool, int])
    assert_type(result.cut, tuple[int, int] | None)
    assert_type(result.child, AgentCost | None)


def the_table() -> list[str]:
    """The table is public data."""
    return [f"{state} {event.__name__} {after}" for state, row in TABLE.items() for event, after in row.items()]


async def runs(prompts: list[str]) -> AsyncIterator[Run]:
    """Agents are used inside other code."""
    for prompt in prompts:
        yield await agent.run(prompt)


@dataclass
class Refund:
    """What an agent answers."""

    order: int


async def answers() -> None:
    """The type of the answer is the agent's, and that of its runs; without one it is text."""
    typed = Agent("openai:gpt-4o", output_type=Refund, claims=Claims(complete=True))
    assert_type(typed.stream("Refund order 17").run, Run[Refund])
    run = await typed.run("Refund order 17")
    assert_type(run.output, Refund)
    assert_type((await typed.resume(run.id)).output, Refund)
    assert_type(run.answer, str)
    either: Agent[Refund | str] = Agent("openai:gpt-4o", output_type=Refund | str)
    word: Agent[Literal["yes", "no"]] = Agent("openai:gpt-4o", output_type=Literal["yes", "no"])
    assert_type((await word.run("Shall it be?")).output, Literal["yes", "no"])
    assert_type((await either.run("Refund order 17")).output, Refund | str)
    assert_type((await Agent("openai:gpt-4o").run("go")).output, str)


def policies_and_judges() -> Agent:
    """What takes several takes them in any kind of collection."""
    by_name = Reflector(model=ScriptedModel(), answers=False, tools={"search"})
    context = Context([TrimResults(), DropAcknowledgements(phrases=["ok"]), SlidingWindow()])
    model = Fallback("openai:gpt-4o", Throttled(MyModel(), concurrency=4))
    return Agent(model, tools=[search], reflector=by_name, context=context, pause_before=[State.ACT])


def served() -> MCPService:
    """A server of tools, documents and prompts."""
    readme = Resource(uri="docs://readme", name="readme", read=lambda: "Read me.")
    standup = Prompt(name="standup", render=lambda day: f"What was done on {day}?", arguments=[Argument("day")])
    return MCPService([search], name="desk", resources=[readme], prompts=[standup])


async def servers() -> None:
    """Servers' tools are an agent's, beside its own."""
    files = MCPServer.stdio("npx", ["-y", "server"], name="files", allow=["read_*"], confirm=False)
    async with Agent("openai:gpt-4o", tools=[files, search]) as told:
        assert_type(await told.run("go"), Run)
