"""A play: a run is begun, killed, continued, decided on and brought to its end, as a seed throws it.

Kills strike at the number of an append, a tool or a piece of a reply, and people act between two executions or a while
after one has begun, so that what happens depends on what the journals hold and on virtual time, and on nothing else.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

import anyio
import attrs
from anyio.lowlevel import checkpoint

from agentfsm import AgentError, Answer, InputKind, Pending, PendingKind, Priority, Run, Runs, tokens
from agentfsm.core import events as e
from agentfsm.core.codec import encode_header
from agentfsm.core.limits import SPEND_RECORDS
from agentfsm.stores import MemoryStore
from agentfsm.testing import VirtualClock
from tests.recorded.cast import LIKED, TOOLS, agent_of, features_of, here
from tests.simulation.seeded import run_seeded
from tests.support.checks import Wrapped
from tests.support.word_counter import WordCounter

# Executions after which a run that is not over is cancelled, and further ones after which it hangs.
ROUNDS: Final = 10
SPARE: Final = 4
# A guard against a play that never ends, in virtual seconds.
LONG_S: Final = 100_000.0


@attrs.frozen
class Task:
    """A run that is begun, unless it exists."""

    run_id: str
    prompt: Any
    options: dict[str, Any]


class KilledError(BaseException):
    """The process is gone."""


@attrs.frozen
class Line:
    """An event of a journal, as it is compared."""

    name: str
    text: str
    # The event as JSON with all its fields; for the first of an append, also what was taken from the inbox.
    begins: bool
    # Whether an append begins with it.


@attrs.define(eq=False)
class World:
    """What a seed is about, and what happens."""

    seed: int
    features: tuple[str, ...]
    tell: Callable[[str], None] | None = None
    store: MemoryStore = attrs.field(factory=lambda: MemoryStore(clock=VirtualClock()))
    lines: dict[str, list[Line]] = attrs.field(factory=dict)
    # By run.
    covered: Counter[str] = attrs.field(factory=Counter)
    # Things that happened.
    acted: set[str] = attrs.field(factory=set)
    # Keys of the calls that had an effect.
    moments: Counter[str] = attrs.field(factory=Counter)
    kill_at: tuple[str, int] | None = None
    # A kind of moment and its number in this execution, from 1.
    is_dead: bool = False
    deaths: Counter[str] = attrs.field(factory=Counter)
    # Of owners, by run, since it finished a turn.
    asked_at: Counter[str] = attrs.field(factory=Counter)
    open_steps: Counter[str] = attrs.field(factory=Counter)
    # Time of the newest reply with calls, and whether steps of a plan are open, by run.
    held: dict[str, Any] = attrs.field(factory=dict)
    # Leases of the process that lives, by run.
    thrown: Counter[tuple[object, ...]] = attrs.field(factory=Counter)
    tool_faults: float = attrs.field(init=False)
    model_faults: float = attrs.field(init=False)
    turns: int = attrs.field(init=False)
    # With calls, before a model answers.
    expires_s: float = attrs.field(init=False)
    streams: bool = attrs.field(init=False)
    liked: frozenset[str] = attrs.field(init=False)
    tools: tuple[str, ...] = TOOLS
    agents: tuple[str, ...] = ("helper", "scout")

    def __attrs_post_init__(self) -> None:
        """Throw what holds for the whole."""
        dice = self.throw("world")
        self.tool_faults = 0.4 if self.has("broken tools") else dice.choice((0.0, 0.05, 0.1))
        self.model_faults = 0.3 if self.has("broken models") else dice.choice((0.0, 0.0, 0.05))
        self.turns = 7 if self.has("window", "limits", "breaker", "loops") else dice.choice((1, 2, 2, 3))
        if self.has("loops"):
            self.tool_faults = 0.0
        if self.has("cut off"):
            self.tool_faults = 0.4
        if self.has("allowances"):
            self.turns = 4
        if self.has("loops"):
            self.turns = 8
        if self.has("answer cache") and not self.has("broken tools", "broken models"):
            self.tool_faults = self.model_faults = 0.0
            self.turns = 1
        self.expires_s = 5.0 if self.has("expiry") else 1_000.0
        self.streams = self.has("streams", "broken streams")
        self.liked = frozenset(name for each in self.features for name in LIKED.get(each, ()))

    def has(self, *features: str) -> bool:
        """Whether the seed has one of the features."""
        return any(each in self.features for each in features)

    def throw(self, *about: object, again: bool = True) -> random.Random:
        """Return dice for one thing; unless not `again`, the next ones for the same thing are others."""
        number = self.thrown[about]
        self.thrown[about] += again
        return random.Random(repr((self.seed, *about, number)))

    def happens(self, what: str) -> None:
        """Count a thing."""
        self.covered[what] += 1

    def visit(self, kind: str) -> None:
        """Be at a moment at which the process may be killed.

        Raises:
            KilledError: if it is dead.
        """
        self.moments[kind] += 1
        if self.kill_at == (kind, self.moments[kind]) and not self.is_dead:
            self.is_dead = True
            self.happens(f"killed at {kind}")
        if self.is_dead:
            raise KilledError


class Disk(Wrapped):
    """The way of one process to the store; what it appends is noted."""

    def __init__(self, world: World) -> None:
        self.inner, self.world = world.store, world

    def append(
        self, lease: Any, run: Run, events: Sequence[e.Event], *, taken: Sequence[int] = (), final: bool = False
    ) -> Any:
        """Append, with a moment before and after it."""
        world = self.world
        world.visit("append")
        rows = [row.number for row in world.store._records[run.id].posts_by_key.values()]
        before = world.store._records[run.id].run
        written = self.inner.append(lease, run, events, taken=taken, final=final)
        if world.store._records[run.id].run is run:
            if run.turn != before.turn or run.paused is not None:
                world.deaths[run.id] = 0
            note_events(world, run.id, events, [rows.index(number) + 1 for number in taken])
        world.visit("append")
        delay = world.throw("disk", run.id, run.version).random() / 4 if world.has("slow disks") else 0.0
        return _Late(written, anyio.current_time() + delay) if delay else written

    async def create(self, header: Any, **options: Any) -> Any:
        """Create; the events of a fork come with it."""
        self._be_alive()
        is_new = header.id not in self.world.store._records
        found, lease = await self.inner.create(header, **options)
        if is_new:
            note(self.world, header.id, Line("Header", encode_header(found), begins=True))
            note_events(self.world, header.id, options.get("events", ()), [])
        return found, self._marked(lease)

    async def lease(self, run_id: str, **options: Any) -> Any:
        """Lease."""
        self._be_alive()
        return self._marked(await self.inner.lease(run_id, **options))

    async def claim(self, agent: str, **options: Any) -> Any:
        """Claim."""
        self._be_alive()
        claim = await self.inner.claim(agent, **options)
        for lease in claim.leases:
            self._marked(lease)
        return claim

    def _marked(self, lease: Any) -> Any:
        lease.crashes = self.world.deaths[lease.run_id]
        lease.abandoned = lease.crashes > 0
        self.world.held[lease.run_id] = lease
        return lease

    def release(self, lease: Any) -> Any:
        """Release, unless it is dead."""
        if self.world.is_dead:
            return _Nothing()
        self.world.held.pop(lease.run_id, None)
        return self.inner.release(lease)

    async def post(self, *args: Any, **options: Any) -> Any:
        """Post, unless it is dead."""
        self._be_alive()
        return await self.inner.post(*args, **options)

    async def write_record(self, kind: str, key: str, *args: Any, **options: Any) -> Any:
        """Write, unless it is dead."""
        self._be_alive()
        written = await self.inner.write_record(kind, key, *args, **options)
        self._note_record("written", kind, key)
        return written

    async def delete_record(self, kind: str, key: str, **options: Any) -> Any:
        """Delete, unless it is dead."""
        self._be_alive()
        self._note_record("deleted", kind, key)
        return await self.inner.delete_record(kind, key, **options)

    def _note_record(self, what: str, kind: str, key: str) -> None:
        """Note a change of a record beside the runs, but for spending limits, which are written in the background."""
        if kind != SPEND_RECORDS:
            note(self.world, "records", Line(what, f"{kind} {key}", begins=True))

    def _be_alive(self) -> None:
        if self.world.is_dead:
            raise KilledError


class _Nothing:
    is_done = True

    async def wait(self) -> bool:
        await checkpoint()
        return False


@attrs.frozen
class _Late:
    """An append that is on the disk, of which its owner hears a while later."""

    written: Any
    at: float

    @property
    def is_done(self) -> bool:
        return anyio.current_time() >= self.at

    async def wait(self) -> bool:
        await anyio.sleep_until(self.at)
        return bool(await self.written.wait())


def note(world: World, run_id: str, line: Line) -> None:
    """Note a line of a journal."""
    lines = world.lines.setdefault(run_id, [])
    lines.append(line)
    if world.tell is not None:
        world.tell(f"{run_id} {len(lines):3} {'>' if line.begins else ' '} {line.name} {line.text}")


def note_events(world: World, run_id: str, events: Sequence[e.Event], taken: Sequence[int]) -> None:
    """Note the events of an append, and what they cover."""
    for number, event in enumerate(events):
        fields, name = event.to_dict(), type(event).__name__
        text = json.dumps(fields, sort_keys=True)
        if taken and not number:
            text += f" takes {list(taken)}"
        note(world, run_id, Line(name, text, begins=not number))
        world.covered.update(f"{name}.{each}" for each in fields.keys() - {"is", "at", "took_s"})
        match event:
            case e.Guarded():
                world.happens(f"a guard says {event.verdict}")
                if world.store._records[run_id].run.header.parent is not None:
                    world.happens(f"a guard says {event.verdict} about a call of an agent below")
            case e.ToolFinished():
                world.happens(f"a call is {event.result.outcome}")
                if event.by == "on_unknown":
                    world.happens(f"a call is found to be {event.result.outcome}")
                if not event.by:
                    world.happens(f"a call is {event.result.outcome}, by nobody")
                if event.result.child is not None:
                    world.happens("an agent has cost something")
                if 0 < event.result.started_at < world.asked_at[run_id] and not world.open_steps[run_id]:
                    world.happens("a call has begun before its reply was there")
                world.covered.update(f"ToolResult.{each}" for each in fields["result"])
                if event.result.error_type is not None:
                    world.happens(f"an error of the type {event.result.error_type}")
            case e.Failed() | e.LimitReached():
                world.happens(f"{name} for {event.reason}")
            case e.ToolsChosen():
                world.asked_at[run_id], world.open_steps[run_id] = event.at, 0
            case e.StepsReady():
                if world.open_steps[run_id] and not number:
                    world.happens("steps join later")
                world.open_steps[run_id] = 1
            case e.Judged():
                world.happens(f"a judge says {event.verdict.action}")
            case e.Planned():
                world.happens(f"a plan is {event.kind}")
            case e.ToolPaused():
                world.covered.update(f"a call waits for {each.kind}" for each in event.pending)
            case e.Observed():
                world.covered.update(f"input of the kind {each.kind}" for each in event.inputs)
            case _:
                pass


def note_rest(world: World) -> None:
    """Note what is left when all is over: unread posts, leases, and records beside the runs."""
    for run_id, record in world.store._records.items():
        rows = [row.number for row in record.posts_by_key.values()]
        left = [rows.index(number) + 1 for number in record.inbox]
        if left or record.lease is not None:
            note(world, run_id, Line("Left", f"posts {left}, lease {record.lease is not None}", begins=True))
    for kind, records in sorted(world.store._store_records.items()):
        for key, value in sorted(records.items()):
            kept = json.loads(value.text)
            if isinstance(kept, dict) and "reserved" in kept:  # under random names
                kept["reserved"] = sorted(json.dumps(each, sort_keys=True) for each in kept["reserved"].values())
            text = json.dumps([key, kept, value.expires_at], sort_keys=True)
            note(world, "records", Line(kind, text, begins=True))
            world.happens(f"a record of the kind {kind}")


# People


async def decide(world: World, client: Any, item: Pending, *, always: bool = False) -> None:
    """Be a person who decides on something, or leaves it for later."""
    which = (item.run_id, item.call_id)
    dice = world.throw("person", *which, item.kind)
    if not always and dice.random() < (0.6 if world.has("expiry") else 0.15):
        return
    by, kind = dice.choice(("ann", "bob", "")), item.kind
    if world.tell is not None:
        world.tell(f"  a person decides on {kind} of {item.tool} {which}")
    match kind:
        case PendingKind.APPROVAL:
            await _approve(world, client, item, dice, by)
        case PendingKind.OUTCOME:
            how: dict[str, Any] = dice.choice(({"result": "it was done"}, {"failed": "it failed"}, {"rerun": True}))
            world.happens(f"settled with {min(how)}")
            await client.settle(*which, by=by, **how)
        case PendingKind.QUESTION if item.questions:
            content = {each.key: {"n": dice.randint(1, 9)} for each in item.questions}
            first = next(iter(content.values()))
            world.happens("a tool is answered")
            await client.answer(*which, first if len(content) == 1 else content, by=by, declined=False)
        case PendingKind.QUESTION:
            world.happens("a question is answered")
            await client.answer(*which, f"answer {dice.randint(1, 9)}", by=by, failed=dice.random() < 0.2)
        case PendingKind.INPUT:
            await client.send(item.run_id, f"go on {dice.randint(1, 9)}", key=f"go{world.thrown['go', item.run_id]}")
            world.throw("go", item.run_id)
        case PendingKind.PAUSE | PendingKind.CRASH:
            pass


async def _approve(world: World, client: Any, item: Pending, dice: random.Random, by: str) -> None:
    which, rejected = (item.run_id, item.call_id), 0.4 if world.has("approvals") else 0.2
    if world.has("four eyes") and "n" in item.arguments and dice.random() < 0.5:
        world.happens("edited by one of four eyes")
        await client.approve(*which, by="ann", arguments={**item.arguments, "n": dice.choice((1, 2, 4))})
    elif dice.random() < rejected:
        world.happens("rejected")
        await client.reject(*which, by=by, message=dice.choice(("", "not today")))
    elif world.has("allowances") and dice.random() < 0.7 and "n" in item.arguments:
        world.happens("allowed for the session")
        await client.approve(*which, by=by, digest=item.digest, allow=["n"])
    elif dice.random() < 0.4 and "n" in item.arguments:
        world.happens("approved with other arguments")
        await client.approve(*which, by=by, arguments={**item.arguments, "n": dice.choice((2, 4, "many"))})
    else:
        world.happens("approved")
        await client.approve(*which, by=by, digest=item.digest if dice.random() < 0.5 else None)


async def meddle(world: World, client: Any, run_id: str, number: int) -> None:
    """Be people who act while a run is executed."""
    dice = world.throw("meddle", number)
    await anyio.sleep(dice.random() * 4)
    if world.has("inbox") and dice.random() < 0.8:
        kind, urgent = dice.choice(list(InputKind)), dice.choice(list(Priority))
        at = world.store.clock.now() + 3.25 if dice.random() < 0.3 else None
        labels = ["untrusted"] if dice.random() < 0.3 else []
        world.happens("input is sent")
        await client.send(run_id, f"word {number}", kind=kind, priority=urgent, at=at, key=f"w{number}", labels=labels)
    if world.has("stops") and dice.random() < 0.6:
        await anyio.sleep(dice.random())
        deed = dice.choice(("pause", "pause", "cancel"))
        world.happens(f"{deed} is asked for")
        await (client.pause if deed == "pause" else client.cancel)(run_id, by="ann", message="as it is")
    for _ in range(2):
        await anyio.sleep(1 + dice.random() * 3)
        run = await Runs(world.store).load(run_id)
        for item in run.pending:
            await decide(world, client, item)


# Executions


async def execute(world: World, how: str, task: Task) -> None:
    """Execute the run as far as it goes."""
    run_id, prompt, options = task.run_id, task.prompt, task.options
    known = run_id in world.store._records
    changed = known and world.has("changed programs") and world.throw("program").random() < 0.8
    agent: Any = agent_of(world, Disk(world), changed=changed)
    if known and how != "worker" and world.has("changed programs"):
        names = {"put": "place"} if changed and agent.tools.get("place") is not None else {}
        await agent.resume(run_id, renamed=names or None, takeover=how == "stream")
        return
    elicit = _attend if world.has("attended") else None
    match how:
        case "worker":
            if not known:
                await agent.submit(prompt, id=run_id, **options)
            await agent.worker(until_idle=True)
        case "stream":
            begun = await agent.load(run_id) if known else agent.start(prompt, id=run_id, **options)
            async with agent.stream(begun, elicit=elicit) as events:
                async for _event in events:
                    pass
        case "steps":
            run = await agent.load(run_id) if known else agent.start(prompt, id=run_id, **options)
            async for _run in agent.steps(run, elicit=elicit):
                pass
        case _ if known:
            await agent.resume(run_id, elicit=elicit)
        case _:
            await agent.run(prompt, id=run_id, elicit=elicit, **options)


async def _attend(item: Pending) -> Answer | None:
    world = here.get()
    dice = world.throw("attends", item.run_id, item.call_id)
    await anyio.sleep(dice.random())
    world.happens("an attending person is asked")
    return None if dice.random() < 0.3 else Answer(content={"n": dice.randint(1, 9)}, by="eve")


async def live(world: World, how: str, number: int, task: Task) -> None:
    """Let a process live until it has nothing to do or dies."""
    dice = world.throw("life", number)
    world.is_dead, world.moments, world.kill_at, world.held = False, Counter(), None, {}
    chance = (
        0.95
        if world.has("poison")
        else 0.7
        if world.has("kills", "unknown outcomes", "found calls", "workers")
        else 0.0
    )
    if dice.random() < chance and number < ROUNDS - 2:
        kinds = (
            ("tool", "tool", "append")
            if world.has("unknown outcomes", "found calls", "poison")
            else ("append", "tool", "model")
        )
        kind = dice.choice(kinds)
        world.kill_at = (kind, dice.randint(1, {"append": 24, "tool": 4, "model": 5}[kind]))
        if world.has("poison"):
            world.kill_at = ("tool", 1)
    cut_s = dice.random() * 6 if world.has("cut off") and number < ROUNDS - 2 and dice.random() < 0.7 else LONG_S
    if world.tell is not None:
        world.tell(f"{number}: {how}, killed at {world.kill_at}, cut off after {cut_s:.2f} s")
    try:
        with anyio.move_on_after(cut_s) as scope:
            await execute(world, how, task)
        if scope.cancelled_caught:
            world.happens("cut off")
    except AgentError as error:
        world.happens(f"told {type(error).__name__}")
        if world.tell is not None:
            world.tell(f"  told {type(error).__name__}: {error}")
    except BaseException:  # perhaps in a group
        if not world.is_dead:
            raise
    if world.is_dead:
        for held in sorted(world.held):
            record = world.store._records[held]
            world.deaths[held] += record.run.header.parent is None
            world.store._free_run(record)
        world.held = {}


async def finish(world: World, task: Task) -> Run | None:
    """Have a run begun and brought to its end, whatever happens."""
    run_id = task.run_id
    for number in range(ROUNDS + SPARE):
        dice = world.throw("round", run_id)
        ways = ["resume", "resume"]
        ways += ["worker"] * (6 if world.has("workers", "kills", "sessions") else 1)
        ways += ["stream"] * (4 if world.streams else 0) + ["steps"] * (number == 0)
        client: Any = Runs(world.store, clock=world.store.clock, four_eyes=world.has("four eyes"))
        if dice.random() < 0.5 and not world.has("four eyes", "flows"):
            client = agent_of(world, world.store)
        world.is_dead = False
        async with anyio.create_task_group() as people:
            if world.has("inbox", "stops", "children", "approvals") and number < 3:
                people.start_soon(_meddle_quietly, world, client, run_id, number)
            await live(world, dice.choice(ways), number, task)
            people.cancel_scope.cancel()
        world.is_dead = False
        if run_id not in world.store._records:
            continue
        run = world.store._records[run_id].run
        if run.is_over:
            return run
        await anyio.sleep(0.5 + dice.random() * (8 if world.has("expiry") else 2))
        for item in (await Runs(world.store).load(run_id)).pending:
            try:
                await decide(world, client, item, always=number > 4)
            except AgentError as error:
                world.happens(f"a person is told {type(error).__name__}")
        if number == ROUNDS:
            await client.cancel(run_id, by="eve")
    return None


async def _meddle_quietly(world: World, client: Any, run_id: str, number: int) -> None:
    try:
        await meddle(world, client, run_id, number)
    except AgentError as error:
        world.happens(f"a person is told {type(error).__name__}")


async def _whole(world: World) -> None:
    user = (
        {"user": "ann", "roles": ["staff"]}
        if world.throw("user").random() < 0.7 or world.has("memory", "spend", "answer cache")
        else {}
    )
    options: dict[str, Any] = {**user, **({"clearance": "confidential"} if world.has("clearance") else {})}
    if world.has("labels") and world.throw("prompt").random() < 0.3:
        options["labels"] = ["private"]
    if world.has("sessions", "allowances"):
        options["session"] = "s"
    first: Any = {} if world.has("flows") else "do it with n 2"
    await finish(world, Task("r0", first, options))
    if world.has("sessions", "allowances", "spend", "answer cache", "breaker", "guards"):
        again = first if world.has("answer cache", "flows") else "and now the rest"
        await finish(world, Task("r1", again, options))
    if world.has("answer cache"):
        await anyio.sleep(60.0)
        await finish(world, Task("r2", again, options))
    if world.has("forks"):
        await _fork(world)


async def _fork(world: World) -> None:
    """Begin again in the middle of a run, perhaps with something edited."""
    for number in range(2):
        dice, record = world.throw("fork"), world.store._records["r0"]
        events = record.events
        at = dice.randrange(len(events))
        edit: dict[int, e.Event] = {}
        said = [n for n, each in enumerate(events[:at], 1) if isinstance(each, e.ToolFinished)]
        if said and dice.random() < 0.6:
            which = dice.choice(said)
            event: Any = events[which - 1]
            edit[which] = attrs.evolve(event, result=attrs.evolve(event.result, content="edited"))
        agent, name = agent_of(world, Disk(world)), f"f{number}"
        prompt = "do something else" if dice.random() < 0.3 and not world.has("flows") else None
        try:
            await agent.fork("r0", at=at, edit=edit, id=name, prompt=prompt, withhold=dice.random() < 0.3, by="ann")
        except AgentError as error:
            world.happens(f"a fork is refused: {type(error).__name__}")
            continue
        world.happens("a fork with an edit" if edit else "a fork")
        await finish(world, Task(name, "do it", {}))


def play(seed: int, tell: Callable[[str], None] | None = None) -> World:
    """Play a seed to its end, and return the world."""
    world = World(seed, features_of(seed), tell)

    async def whole() -> World:
        here.set(world)
        with anyio.fail_after(LONG_S):
            await _whole(world)
        note_rest(world)
        return world

    async def load(_model: str) -> WordCounter:
        return WordCounter()

    before, tokens.load_counter = tokens.load_counter, load
    try:
        return run_seeded(whole, seed, in_order=True)
    finally:
        tokens.load_counter = before
