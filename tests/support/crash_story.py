"""A run with calls of every kind, driven by workers that are killed, and what must be true of it at its end.

What its tools do is counted outside of all processes: a line in a file for each effect, with the key of its call.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import anyio
import attrs
from anyio.lowlevel import checkpoint

from agentfsm import (
    Agent,
    AssistantMessage,
    Found,
    Limits,
    Outcome,
    PendingKind,
    Run,
    RunContext,
    RunNotFoundError,
    Settings,
    tool,
)
from agentfsm.agents.worker import Worker
from agentfsm.core import codec
from agentfsm.core.events import ApprovalGiven, Event, ToolFinished, ToolStarted
from agentfsm.engine.deciders import approvals as engine_approvals
from agentfsm.engine.execution.options import ExecutionOptions
from agentfsm.flow import Flow, step
from agentfsm.ports import (
    CallChunk,
    Emit,
    Filter,
    FinishChunk,
    FinishReason,
    Model,
    ProposedCall,
    Reply,
    Request,
    Store,
)
from agentfsm.stores import MemoryStore
from agentfsm.stores.postgres.connection import PostgresConnection
from agentfsm.stores.sqlite.store import _SQLiteBackend
from agentfsm.stores.threaded.group_commit import StoreJob
from agentfsm.stores.threaded.store import ThreadedStore
from agentfsm.testing.crash import crash_point, report
from agentfsm.tools.queue.result_text import build_decided_result
from tests.support.checks import calls_of, names, results_of, sound, starts_of

PERSON = "ann"
# Tools that may act once for a key: nobody said that they may be repeated, and the person looks before she says so.
ONCE = frozenset({"pay", "note", "book", "refund", "mail"})
# For runs whose workers die all the time, on a machine that may be busy.
DYING = Limits(crashes=1_000_000, tool_timeout_s=3600, seconds=3600)


@attrs.frozen
class World:
    """What outlives the workers of a run."""

    store: Callable[[], Store]
    run_id: str
    books: str
    # The file of effects.

    def write(self, key: str, tool: str) -> str:
        """Do something that cannot be taken back; return what tells it from all others."""
        mark = secrets.token_hex(6)
        book = os.open(self.books, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(book, f"{key} {tool} {mark}\n".encode())
        finally:
            os.close(book)
        return mark

    def effects(self, key: str = "") -> list[list[str]]:
        """Return key, tool and mark of what was done, oldest first."""
        try:
            lines = [line.split() for line in Path(self.books).read_text().splitlines()]
        except FileNotFoundError:
            return []
        return [line for line in lines if key in ("", line[0])]


# The tools.


async def act(ctx: RunContext[World], name: str) -> str:
    """Do what the tool is there for."""
    await checkpoint()
    crash_point("effect")
    mark = ctx.deps.write(ctx.idempotency_key, name)
    crash_point("effect")
    await checkpoint()
    return mark


@tool(read_only=True)
async def look(ctx: RunContext[World]) -> str:
    """Change nothing."""
    return await act(ctx, "look")


@tool(idempotent=True)
async def put(ctx: RunContext[World]) -> str:
    """Change what another try would change likewise."""
    return await act(ctx, "put")


@tool
async def pay(ctx: RunContext[World]) -> str:
    """Act; a person is asked when the outcome is unknown."""
    return await act(ctx, "pay")


@tool(on_unknown="fail")
async def note(ctx: RunContext[World]) -> str:
    """Act; the model is told when the outcome is unknown."""
    return await act(ctx, "note")


@tool(on_unknown="rerun")
async def retry(ctx: RunContext[World]) -> str:
    """Act, and act again when the outcome is unknown, as the author wants it."""
    return await act(ctx, "retry")


def found_out(ctx: RunContext[World], _arguments: Any) -> Found | str:
    """Look whether it was done."""
    done = ctx.deps.effects(ctx.idempotency_key)
    return Found(done[-1][2]) if done else "rerun"


@tool(on_unknown=found_out)
async def book(ctx: RunContext[World]) -> str:
    """Act; what became of it can be found out."""
    return await act(ctx, "book")


@tool(requires_approval=True)
async def refund(ctx: RunContext[World]) -> str:
    """Act once a person has said yes."""
    return await act(ctx, "refund")


@tool
def mail(ctx: RunContext[World]) -> str:
    """Act in a thread."""
    crash_point("effect")
    mark = ctx.deps.write(ctx.idempotency_key, "mail")
    crash_point("effect")
    return mark


# The agents.


@attrs.define(eq=False)
class Speaker(Model):
    """Asks for one batch after another, piece by piece where that is wanted, and answers when there are no more."""

    batches: Sequence[Sequence[str]]
    name: str = "speaker"

    async def reply(self, request: Request, emit: Emit | None = None) -> Reply:
        """Look how far the run is, and go on."""
        turn = sum(isinstance(message, AssistantMessage) for message in request.messages)
        wanted = self.batches[turn] if turn < len(self.batches) else ()
        calls = tuple(
            ProposedCall(id=f"p{turn}{at}", name=name, arguments='{"query": "go"}' if name == "helper" else "{}")
            for at, name in enumerate(wanted)
        )
        if emit is not None:
            for at, each in enumerate(calls):
                emit(CallChunk(index=at, name=each.name, arguments=each.arguments))
                await checkpoint()
            emit(FinishChunk(reason=FinishReason.TOOL_CALLS if calls else FinishReason.STOP))
        return Reply(text="" if calls else "all done", calls=calls)


BATCHES = (("look", "put", "look", "pay", "note", "book", "retry"), ("helper", "mail", "refund", "look"))
HELPER = Agent(Speaker((("look", "pay"),)), tools=[look, pay], name="helper", limits=DYING)
TOOLS = [look, put, pay, note, retry, book, refund, mail, HELPER.as_tool(timeout_s=3600)]


def agent_on(store: Store, *, stream: bool = False, crashes: int = DYING.crashes) -> Agent:
    """Return a worker's agent."""
    limits, settings = attrs.evolve(DYING, crashes=crashes), Settings(stream=stream)
    return Agent(Speaker(BATCHES), tools=TOOLS, store=store, name="clerk", limits=limits, settings=settings)


def prepare() -> None:
    """Load what is loaded late, so that not each life has to: logging, flows, and the codec for each kind of event."""
    import_module("structlog")
    anyio.run(rehearse)


async def rehearse() -> None:
    """Take a run through the codec, and fail a flow."""
    store = MemoryStore()
    agent = attrs.evolve(agent_on(store), model=Speaker((("look", "put", "refund"),)))
    run = await agent.run("go", deps=World(MemoryStore, "", os.devnull))
    await agent.approve(run.id, "t1.2")
    for row in await store.inbox(run.id):
        codec.decode_item(codec.encode_item(row.item))
    await agent.resume(run.id, deps=World(MemoryStore, run.id, os.devnull))
    stored = await store.read(run.id)
    header = codec.decode_header(codec.encode_header(stored.header))
    for event in stored.events:
        codec.decode_event(codec.encode_event(event, header), header)
    await Flow([fail]).run({})


@step(read_only=True)
async def fail() -> str:
    """Fail, so that what describes an error is loaded."""
    raise LookupError("nothing there")


async def life(world: World, **how: Any) -> None:
    """Be a worker that drives the run to its end."""
    await lives(world.store, [world], **how)


async def lives(
    store: Callable[[], Store],
    worlds: Sequence[World],
    *,
    stepwise: bool = False,
    stream: bool = False,
    fault: str = "",
    crashes: int = DYING.crashes,
) -> None:
    """Be a worker that drives the runs of several worlds to their ends, all at once."""
    count_statements()
    FAULTS[fault]()
    report("alive")
    async with agent_on(store(), stream=stream, crashes=crashes) as agent, anyio.create_task_group() as tasks:
        for world in worlds:
            tasks.start_soon(drive, agent, world, stepwise)


async def drained(world: World, *, after: int) -> None:
    """Be a worker that is drained when the run has had so many events in it, and tell what it leaves."""
    count_statements()
    report("alive")
    async with agent_on(world.store()) as agent:
        await agent.submit(await begun(agent, world.run_id))

        async def execute(run: Run, options: ExecutionOptions) -> Run:
            def watch(newer: Run) -> None:
                options.on_run(newer)
                if newer.version >= run.version + after:
                    worker.drain()

            return await agent.driver.run_until_blocked(run, options._replace(on_run=watch))

        worker = Worker(agent=agent, execute=execute, deps=world, parallel=1, poll_s=0.05, drain_s=3600)
        await worker.run(until_idle=True)
        run = await agent.load(world.run_id)
        report((run.id, run.version, run.updated_at))


async def drive(agent: Agent, world: World, stepwise: bool) -> None:
    """Drive the run to its end or its parking; decide what it waits for, and tell what was acknowledged before that."""
    run = await begun(agent, world.run_id)
    while not run.is_over:
        before = run
        run = await (agent.step(run, deps=world) if stepwise else agent.finish(run, deps=world))
        report((run.id, run.version, run.updated_at))
        if any(item.kind is PendingKind.CRASH for item in run.pending):
            return  # too many workers died of it: a person looks at it
        if run.is_waiting:
            await decide(agent, world, run)
        else:
            assert run.version > before.version


def count_statements() -> None:
    """Let PostgreSQL have the crash points that SQLite has."""
    execute, end = PostgresConnection.execute, PostgresConnection._end_transaction

    def counted(link: PostgresConnection, *args: Any) -> Any:
        crash_point("statement")
        return execute(link, *args)

    def ended(link: PostgresConnection, how: str) -> None:
        crash_point("commit")
        end(link, how)
        crash_point("commit")

    PostgresConnection.execute, PostgresConnection._end_transaction = counted, ended


async def begun(agent: Agent, run_id: str) -> Run:
    """Return the run as it is in the store, or a new one."""
    try:
        return await agent.load(run_id)
    except RunNotFoundError:
        return agent.start("go", id=run_id)


async def decide(agent: Agent, world: World, run: Run) -> None:
    """Be the person: approve, and say of a call what the books say, or have it run again where they say nothing."""
    for item in run.pending:
        if item.kind is PendingKind.APPROVAL:
            await agent.approve(item.run_id, item.call_id, by=PERSON)
        else:
            asking = await agent.load(item.run_id)
            done = world.effects(asking.open_call(item.call_id).call.key)
            saying = {"result": done[-1][2]} if done else {"rerun": True}
            await agent.settle(item.run_id, item.call_id, by=PERSON, **saying)
        report((item.run_id, item.call_id))


# What is broken on purpose, in the worker's process.


def lagging() -> None:
    """Acknowledge each append at once, and write it with the next one."""
    append, release = ThreadedStore.append, ThreadedStore.release
    held: list[Callable[[], Any]] = []

    def write(store: ThreadedStore[Any]) -> None:
        while held:
            held.pop(0)()

    def lag(store: ThreadedStore[Any], *args: Any, **options: Any) -> Any:
        write(store)
        if options.get("final"):
            return append(store, *args, **options)
        held.append(lambda: append(store, *args, **options))
        return StoreJob.done(value=True)

    def let_go(store: ThreadedStore[Any], lease: Any) -> Any:
        write(store)
        return release(store, lease)

    ThreadedStore.append, ThreadedStore.release = lag, let_go


def forgetful() -> None:
    """Lose the newest event of a run whose worker has died."""
    read = _SQLiteBackend.read

    def forget(ledger: Any, run_id: str, after: int) -> Any:
        row = ledger._get_row(run_id)
        if row.owner is not None and not ledger.leases.is_ours(row.owner):
            number, kept = row.number, max(row.version - 1, 0)
            ledger.execute("DELETE FROM events WHERE run = ? AND version > ?", (number, kept))
            ledger.execute("UPDATE runs SET version = ?, owner = NULL WHERE number = ?", (kept, number))
        return read(ledger, run_id, after)

    _SQLiteBackend.read = forget


def hushed_up() -> None:
    """Say of a call in flight that it was not run."""

    async def recovered(_execution: Any, entry: Any, *_: Any) -> ToolFinished:
        return ToolFinished(result=build_decided_result(entry, Outcome.SKIPPED, "not run"))

    engine_approvals.settle_cut_off_call = recovered


def unasked() -> None:
    """Run every call in flight again."""

    async def recovered(*_: Any) -> None:
        return

    engine_approvals.settle_cut_off_call = recovered


FAULTS = {
    "": lambda: None,
    "lagging": lagging,
    "forgetful": forgetful,
    "hushed up": hushed_up,
    "unasked": unasked,
}


# What must be true.


async def check(store: Callable[[], Store], worlds: Sequence[World], told: Sequence[Any]) -> None:
    """Fail unless the runs are over and nothing of them was lost, repeated or hidden.

    Args:
        store: Where they are.
        worlds: Of each.
        told: What was acknowledged: run, version and time of the newest event; or run and call of a decision.
    """
    async with agent_on(store()) as agent:
        for world in worlds:
            family = [word for word in told if word[0].split(".")[0] == world.run_id]
            await check_run(agent, world, family)


async def check_run(agent: Agent, world: World, told: Sequence[Any]) -> None:
    """Check a run, and the runs of agents below it."""
    runs = [await agent.load(world.run_id)]
    runs += [await agent.load(line.id) for line in await agent.store.runs(Filter(parent=world.run_id))]
    histories = {run.id: await agent.history(run.id) for run in runs}
    for run in runs:
        assert names(histories[run.id])[-1] == "AnswerGiven", f"run {run.id} did not end: {run!r}"
        await sound(agent, run)
    for word in told:
        check_told(word, histories)
    keys: set[str] = set()
    for run in runs:
        for call, result in zip(calls_of(run.messages), results_of(run.messages), strict=True):
            assert call.key.startswith(f"{run.header.nonce}:{call.id}:")
            check_call_id(call.name, call.id, world.effects(call.key), histories[run.id], result)
            keys.add(call.key)
    hidden = {key for key, *_ in world.effects()} - keys
    assert not hidden, f"hidden: effects under keys that no call has: {hidden}"


def check_told(word: Any, histories: dict[str, tuple[Event, ...]]) -> None:
    """Fail unless what was acknowledged is in the journal."""
    match word:
        case (run_id, int(version), float(at)):
            assert len(histories[run_id]) >= version, f"lost: {word}"
            assert histories[run_id][version - 1].at == at, f"lost, and done again: {word}"
        case (run_id, str(call_id)):
            assert [fact for fact in histories[run_id] if decides(fact, call_id)], f"lost: the word on {word}"


def decides(fact: Event, call_id: str) -> bool:
    """Whether the event says what the person decided on a call."""
    if isinstance(fact, ApprovalGiven):
        return fact.call_id == call_id and fact.by == PERSON
    return isinstance(fact, ToolFinished) and fact.result.call_id == call_id and fact.by == PERSON


def check_call_id(name: str, call_id: str, effects: list[list[str]], events: Sequence[Event], result: Any) -> None:
    """Fail unless a call did what the journal says, and no more than its tool may."""
    starts = starts_of(events, call_id)
    ends = [fact for fact in events if isinstance(fact, ToolFinished) and fact.result.call_id == call_id]
    assert len(ends) == 1, f"{name} {call_id} ended {len(ends)} times"
    if name == "helper":
        return
    assert {tool for _, tool, _ in effects} <= {name}
    if name in ONCE:
        assert len(effects) <= 1, f"repeated: {name} {call_id} acted {len(effects)} times"
    if name != "look":
        assert len(effects) <= starts, f"hidden: {name} {call_id} acted {len(effects)} times and began {starts} times"
        assert events.index(ends[0]) > max(at for at, fact in enumerate(events) if is_start(fact, call_id))
    if result.outcome is Outcome.DONE:
        assert effects, f"{name} {call_id} is told as done and was not"
        assert result.content == effects[-1][2], f"repeated: {name} {call_id} ran again when it had its result"
    else:
        assert (name, result.outcome) == ("note", Outcome.UNKNOWN), f"hidden: {name} {call_id} is {result.outcome}"


def is_start(fact: Event, call_id: str) -> bool:
    """Whether the event says that the call begins."""
    return isinstance(fact, ToolStarted) and fact.call_id == call_id
