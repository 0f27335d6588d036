"""A play: a run is begun by program A, stopped, continued by program B, perhaps taken back, and brought to its end."""

from __future__ import annotations

import json
import logging
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any, Final

import anyio
import attrs
import trio
from anyio.lowlevel import checkpoint

from agentfsm import AgentError, Pending, PendingKind, Run, RunContext, Runs
from agentfsm.core import events as e
from agentfsm.ports import Store
from agentfsm.stores import MemoryStore, PostgresStore, SQLiteStore
from tests.changed.change_promises import broken_at, broken_in
from tests.changed.mutations import mutate
from tests.changed.programs import INPUTS, Names, Program, Unit, build, describe, throw_program, walk
from tests.support.checks import Wrapped

# Executions by which a run has to come to its end, once everything is decided that it asks for.
ROUNDS: Final = 20
# Seconds in which an execution ends, else it hangs: a guard, never a bound that a play relies on.
HANG_S: Final = 60.0
Read = dict[str, tuple[Run, tuple[e.Event, ...]]]


class KilledError(BaseException):
    """The process is gone."""


@attrs.frozen
class Effect:
    """A line of the book."""

    unit: Unit
    run_id: str
    call_id: str
    key: str
    arguments: dict[str, Any]
    item: str
    # What tells it apart from other effects of its unit: the item of a list.

    @property
    def call(self) -> tuple[str, str]:
        """Run and call."""
        return self.run_id, self.call_id


@attrs.define(eq=False)
class World:
    """The two programs of a seed, the book of effects, which survives crashes, and the source of the crashes."""

    seed: int
    backend: str
    inner: Store
    tell: Callable[[str], None] = lambda _line: None
    dice: Random = attrs.field(init=False, default=attrs.Factory(lambda w: Random(w.seed), takes_self=True))
    names: Names = attrs.field(init=False)
    a: Program = attrs.field(init=False)
    b: Program = attrs.field(init=False)
    changes: list[str] = attrs.field(init=False)
    ids: dict[str, str] = attrs.field(init=False)
    # Of the units of both programs, by name.
    repeated: set[str] = attrs.field(init=False)
    # Ids of the units that act for each item, or in each repetition.
    undone: dict[str, str] = attrs.field(init=False)
    # Ids of what is undone, by those of what undoes it.
    below: dict[str, set[str]] = attrs.field(init=False)
    # Ids of a unit and of all within it, with which its result may begin.
    book: list[Effect] = attrs.field(factory=list)
    reruns: list[tuple[int, str]] = attrs.field(factory=list)
    # Effects by then, and the id of a unit that a person had run again.
    decided: set[tuple[str, str]] = attrs.field(factory=set)
    # Calls whose outcome a person has recorded.
    cut: dict[tuple[str, str], int] = attrs.field(factory=dict)
    # Calls that had started when a process ended, and how many times.
    asked: dict[tuple[str, str], dict[str, Unit]] = attrs.field(factory=dict)
    # The units, by id, of the program that asked a person about a call or a plan.
    units: dict[str, Unit] = attrs.field(factory=dict)
    # Those of the program that executes the run now.
    wrong: list[str] = attrs.field(factory=list)
    kill_at: tuple[str, int] | None = None
    # A kind of moment, "append" or "tool", and its number, from 1.
    moments: Counter[str] = attrs.field(factory=Counter)
    is_dead: bool = False
    keeps_leases: bool = False
    # Whether the dead process leaves its leases behind.

    def __attrs_post_init__(self) -> None:
        """Throw the program that begins the run."""
        self.names = Names(self.dice)
        self.a = throw_program(self.names)
        self.deploy(self.a, [])

    def deploy(self, b: Program, changes: list[str]) -> None:
        """Take a second program, and note what is where in both."""
        self.b, self.changes = b, changes
        everything = list(walk((*self.a.units, *self.b.units)))
        self.ids = {unit.name: unit.id for unit in everything}
        lists = [each.item for each in everything if each.item is not None]
        self.repeated = {each.id for each in walk(tuple(lists))}
        self.undone = {each.undo.id: each.id for each in everything if each.undo is not None}
        self.below = {}
        for unit in everything:
            own = [unit, *walk(unit.parts)]
            programs = [each.inner.id for each in own if each.inner is not None]
            self.below.setdefault(unit.id, set()).update([each.id for each in own], programs)

    @property
    def run_id(self) -> str:
        """The run at the top."""
        return f"s{self.seed}"

    def visit(self, kind: str) -> None:
        """Be at a moment at which the process may be killed.

        Raises:
            KilledError: if it is dead.
        """
        self.moments[kind] += 1
        if self.kill_at == (kind, self.moments[kind]):
            self.is_dead = True
            self.tell(f"  killed at {kind} {self.moments[kind]}")
        if self.is_dead:
            raise KilledError

    def act(self, unit: Unit, ctx: RunContext[Any], arguments: dict[str, Any]) -> str:
        """Have the effect of a unit, and return its result, which begins with its id."""
        self.visit("tool")
        item = str(arguments.get("item") or "")
        before = str(arguments.get(unit.name, ""))
        if unit.fails and item in ("", "c"):
            raise ValueError("no luck")
        if not unit.read_only:
            self._compare(unit, ctx)
            self.book.append(Effect(unit, ctx.run_id, ctx.call_id, ctx.idempotency_key, arguments, item or before))
            self.tell(f"  EFFECT {unit.id} {unit.name} {ctx.run_id} {ctx.call_id} {ctx.idempotency_key} {arguments}")
        self.visit("tool")
        return f"{unit.id}:{2 if before.startswith(unit.id) else 1}"

    def _compare(self, unit: Unit, ctx: RunContext[Any]) -> None:
        """See whether a person who had to let it run, or the plan that it is a step of, saw what runs now."""
        whole = ctx.call_id.partition(".")[0]
        shown = self.asked.get((ctx.run_id, ctx.call_id), self.asked.get((ctx.run_id, whole), {})).get(unit.id, unit)
        is_rerun = any(each == unit.id for _, each in self.reruns)
        if shown.description != unit.description and not is_rerun:
            self.blame(f"8: {unit.name} {ctx.run_id} {ctx.call_id} is not what was shown when a person let it run")

    def blame(self, text: str) -> None:
        """A promise is broken."""
        if text not in self.wrong:
            self.tell(f"  !!! {text}")
            self.wrong.append(text)


class MortalStore(Wrapped):
    """The way of one process to the store."""

    def __init__(self, world: World) -> None:
        self.inner, self.world = world.inner, world

    def append(self, lease: Any, run: Any, events: Any, **options: Any) -> Any:
        """Append, with a moment before and after it."""
        self.world.visit("append")
        written = self.inner.append(lease, run, events, **options)
        for event in events:
            self.world.tell(f"    {run.id} {_told(event)}")
            if isinstance(event, e.ApprovalAsked):
                self.world.asked[run.id, event.call_id] = self.world.units
        self.world.visit("append")
        return written

    def release(self, lease: Any) -> Any:
        """Release; a dead process leaves it to the end of the lease, or of the event loop."""
        if self.world.is_dead and self.world.keeps_leases:
            return _Nothing()
        return self.inner.release(lease)

    async def post(self, *args: Any, **options: Any) -> Any:
        """Post, unless it is dead."""
        if self.world.is_dead:
            raise KilledError
        return await self.inner.post(*args, **options)


def _told(event: e.Event) -> str:
    """Return an event as a line, without times and usage."""
    fields = {name: each for name, each in event.to_dict().items() if name not in ("is", "at", "took_s", "usage")}
    return f"{type(event).__name__} {json.dumps(fields)[:400]}"


class _Nothing:
    is_done = True

    async def wait(self) -> bool:
        await checkpoint()
        return False


# Executions, each of a process of its own


async def execute(world: World, program: Program, how: str) -> Run | None:
    """Execute the run as far as it goes; None if the process was killed."""
    agent = build(program, world, MortalStore(world))
    run_id = world.run_id
    match how:
        case "run":
            names = (*agent.inputs, *agent._plan.optional_inputs) if program.is_flow else ()
            prompt = {name: INPUTS[name] for name in names} if program.is_flow else "go"
            await agent.run(prompt, id=run_id)
        case "worker":
            await agent.worker(until_idle=True)
        case _:
            await agent.resume(run_id, takeover=how == "takeover")
    return await Runs(world.inner).load(run_id)


async def decide(world: World, program: Program, *, always: bool) -> None:
    """Be a person who decides on what the run asks for, without an agent or with that of a program."""
    client: Any = Runs(world.inner) if world.dice.random() < 0.5 else build(program, world, world.inner)
    try:
        run = await Runs(world.inner).load(world.run_id)
    except AgentError:
        return
    for item in run.pending:
        if always or world.dice.random() < 0.7:
            try:
                await _decide_on(world, client, item)
            except AgentError as error:
                world.tell(f"  a person is told: {error}")


async def _decide_on(world: World, client: Any, item: Pending) -> None:
    dice, which = world.dice, (item.run_id, item.call_id)
    world.tell(f"  a person decides on {item.kind} of {item.tool} {which}")
    match item.kind:
        case PendingKind.APPROVAL if dice.random() < 0.85:
            await client.approve(*which, by="ann")
        case PendingKind.APPROVAL:
            await client.reject(*which, by="ann", message="no")
        case PendingKind.OUTCOME | PendingKind.MISSING:
            unit = world.ids.get(item.tool, "")
            happened = any(each.call == which for each in world.book)
            word = dice.choice(("result" if happened else "failed", "rerun"))
            how: dict[str, Any] = {"result": f"{unit}:9"} if word == "result" else {word: "it failed"}
            if word == "rerun" and item.kind is PendingKind.OUTCOME:
                how = {"rerun": True}
            await client.settle(*which, by="ann", **how)
            if "rerun" in how:
                world.reruns.append((len(world.book), unit))
            else:
                world.decided.add(which)
        case PendingKind.INPUT:
            await (client.send(item.run_id, "go on") if dice.random() < 0.5 else client.cancel(item.run_id))
        case PendingKind.PAUSE | PendingKind.CRASH:
            pass


async def read(world: World) -> Read:
    """Return the run and all below it, with their events."""
    runs, found, waiting = Runs(world.inner), {}, [world.run_id]
    while waiting:
        run_id = waiting.pop()
        try:
            found[run_id] = (await runs.load(run_id), await runs.history(run_id))
        except AgentError:
            continue
        waiting += [each.id for each in await runs.children(run_id)]
    return found


async def live(
    world: World, program: Program, how: str, kill_at: tuple[str, int] | None, *, always: bool
) -> Run | None:
    """Let a person decide, then a process execute the run until it stops or is killed; and see what holds then."""
    await decide(world, world.dice.choice((world.a, world.b)), always=always)
    world.kill_at, world.is_dead, world.moments = kill_at, False, Counter()
    world.units = {unit.id: unit for unit in walk(program.units)}
    world.keeps_leases = world.dice.random() < 0.5
    before = await read(world)
    world.tell(f"{how} by {'A' if program is world.a else 'B'}")
    run = None
    try:
        with anyio.fail_after(HANG_S):
            run = await execute(world, program, how)
    except AgentError as error:
        world.tell(f"  refused: {type(error).__name__}: {error}")
        if not world.is_dead and (after := await read(world)) != before:
            changed = [each for each in after if after[each] != before.get(each)]
            world.blame(f"6: it was refused ({error}), and the journals of {changed} have changed")
    except BaseException:  # perhaps in a group
        if not world.is_dead:
            raise
    world.kill_at = None
    is_idle = how == "worker" and before == await read(world)  # it sees a lease that was left until its time is up
    if run is not None and not run.is_over and not run.pending and not is_idle:
        world.blame(f"6: {run.id} stops, and waits for nothing")
    for text in broken_at(world, await read(world)):
        world.blame(text)
    return run


def play(seed: int, store: Store, backend: str, tell: Callable[[str], None] = lambda _line: None) -> World:
    """Play a seed to its end, and return the world; what broke a promise is in `wrong`."""
    world = World(seed, backend, store, tell)
    dice = world.dice

    def run(program: Program, how: str, kills: float = 0.0, *, always: bool = False) -> Run | None:
        moment = dice.choice((("tool", dice.randint(1, 8)), ("append", dice.randint(1, 30))))
        _free_leases(store)
        kill_at = moment if dice.random() < kills else None
        return anyio.run(lambda: live(world, program, how, kill_at, always=always), backend=backend)

    async def deploy() -> None:
        opened = [entry.call.name for run, _ in (await read(world)).values() for entry in run.open]
        world.deploy(*mutate(world.names, world.a, sorted({world.ids[name] for name in opened if name in world.ids})))

    with _quiet(seed):
        found = run(world.a, "run", kills=0.8)
        anyio.run(deploy, backend=backend)
        for _ in range(dice.choice((1, 1, 2))):
            found = run(world.b, dice.choice(("resume", "resume", "worker")), kills=0.4)
        first = (world.a, world.b, world.a) if dice.random() < 0.4 else (world.b,) * 4
        program = world.b
        for number in range(ROUNDS):
            if found is not None and found.is_over:
                break
            other = world.b if program is world.a else world.a  # taken where the run is refused
            program = first[number] if number < len(first) else other if found is None else program
            found = run(program, "resume", always=True)
        anyio.run(lambda: _end(world, found), backend=backend)
    return world


async def _end(world: World, last: Run | None) -> None:
    """See whether the run has come to its end, and what holds then."""
    found = await read(world)
    if last is None or not last.is_over:
        waits = [(str(each.kind), each.run_id, each.call_id, each.tool) for each in last.pending] if last else ()
        world.blame(f"6: {world.run_id} does not come to its end, waits for {waits}")
    for text in broken_in(world, found, await Runs(world.inner).audit(world.run_id)):
        world.blame(text)


def backend_of(seed: int) -> str:
    """Return the event loop of a seed."""
    return ("asyncio", "trio")[seed % 2]


@contextmanager
def store_of(seed: int, postgres: str = "", schema: str = "changed") -> Iterator[Store]:
    """Open the store of a seed: in memory or in a file, in turns of two; in a server if its address is given."""
    with tempfile.TemporaryDirectory() as folder:
        file = SQLiteStore(f"{folder}/runs.db") if seed % 4 > 1 else MemoryStore()
        store = PostgresStore(postgres, schema=schema) if postgres else file
        try:
            yield store
        finally:
            anyio.run(store.aclose)


def _free_leases(store: Any) -> None:
    """End the leases that a dead process has left; other stores see that its event loop is closed."""
    if isinstance(store, MemoryStore):
        for record in store._records.values():
            store._free_run(record)


@contextmanager
def _quiet(seed: int) -> Iterator[None]:
    """Make the order of trio's tasks depend on the seed, and turn logging off."""
    log, inside = logging.getLogger("agentfsm"), trio._core._run
    level, log.level = log.level, logging.CRITICAL + 1
    before, inside._ALLOW_DETERMINISTIC_SCHEDULING = inside._ALLOW_DETERMINISTIC_SCHEDULING, True
    inside._r.seed(seed)
    log.manager._clear_cache()
    try:
        yield
    finally:
        inside._ALLOW_DETERMINISTIC_SCHEDULING = before
        log.level = level
        log.manager._clear_cache()


def show(world: World) -> str:
    """Return both programs of a world, and what tells them apart."""
    return f"A: {describe(world.a)}\nB ({', '.join(world.changes)}): {describe(world.b)}"
