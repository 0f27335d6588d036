"""A play: processes that drive runs and die, people who decide and change their minds, and a fate that strikes.

After a while of that all is calm: faults end, one new process goes on with whatever is not over, and people decide
whatever is asked, until every run is over. Then the promises are read off the journals and the world.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

import anyio
import attrs
import trio
from promises import broken_in
from seeded import run_seeded
from shared_disk import BLOCKED_S, Handle
from world import World, agent_of, here

from agentfsm import Agent, InputKind, MisuseError, Pending, PendingKind, Priority, Run, StoreError
from agentfsm.core.inbox import Cancel, Decision

# After which a run that is not over hangs.
ROUNDS: Final = 40
# What a person waits for, to decide at the last moment.
SOON_S: Final = 10.0
STRIKES: Final = ("dies", "dies", "stalls", "stalls", "blocks", "is cut off")


@attrs.define(eq=False)
class Process:
    """An operating system's process: an agent of its own, and a way to the disk that dies with it."""

    world: World
    name: str
    handle: Handle = attrs.field(init=False)
    agent: Agent = attrs.field(init=False)
    drifted: bool = False
    life: anyio.CancelScope = attrs.field(init=False, factory=anyio.CancelScope)
    drives: list[anyio.CancelScope] = attrs.field(init=False, factory=list)

    def __attrs_post_init__(self) -> None:
        """Come to life."""
        self.handle = Handle(self.world, self.world.disk, self.name)
        self.agent = agent_of(self.world, self.handle, drifted=self.drifted)

    def strike(self) -> None:
        """Let fate strike: it dies without manners, falls silent for a while, or drops what it was doing."""
        deed = self.world.dice.choice(STRIKES)
        if self.world.is_calm or not self.handle.is_heard:
            return
        self.world.note(self.name, lambda: deed)
        match deed:
            case "dies":
                self.die()
            case "stalls":
                self.world.tasks.start_soon(self.handle.stall, self.world.dice.choice((1.0, 3.5, 5.0, 5.0)))
            case "blocks":
                seconds = self.world.dice.choice((1.0, 4.0, 7.0))
                self.world.tasks.start_soon(self.handle.stall, seconds, BLOCKED_S)
            case "is cut off" if self.drives:
                self.drives[-1].cancel()

    def die(self) -> None:
        """End without manners: nothing that it still does reaches the disk or the world."""
        if self.handle.died_at is None:
            self.handle.die()
            self.life.cancel()

    async def drive(self, what: Callable[[], Awaitable[Run | None]]) -> None:
        """Do one driving call, which fate may cut off; note what it returns."""
        began, task = self.world.disk.clock.now(), trio.lowlevel.current_task()
        nurseries = list(task.child_nurseries)
        with anyio.CancelScope() as scope:
            self.drives.append(scope)
            try:
                run = await what()
            except StoreError as error:
                told = f"is told {type(error).__name__}: {error}"
                self.world.note(self.name, lambda: told)
            except Exception as error:  # noqa: BLE001  nothing else may come out of a driving call here
                self.world.blame(f"P8: a driving call raised {error!r}")
            else:
                if run is not None:
                    self.world.note(self.name, lambda: f"returns {run.id} v{run.version} {run.state} {_waits(run)}")
                    self.world.returned.append(run)
                    self._look_at_waits(run, began)
            finally:
                self.drives.remove(scope)
        if task.child_nurseries != nurseries:
            self.world.blame(f"P6: a driving call of {self.name} left a nursery open")

    def _look_at_waits(self, run: Run, began: float) -> None:
        """See that nothing is waited for whose time was up when the run was taken up."""
        record = self.world.disk._records.get(run.id)
        if record is None or record.run.header.nonce != run.header.nonce:  # it was deleted in between
            return
        inbox = record.inbox.values()
        decided = {row.item.call_id for row in inbox if isinstance(row.item, Decision)}  # behind another one's wait
        for item in run.pending if run.paused is None else ():
            is_late = item.expires_at is not None and item.expires_at <= began
            if is_late and item.run_id == run.id and item.call_id not in decided:
                self.world.blame(f"P7: {run.id} waits for {item.kind} of {item.call_id}, whose time is up")

    async def live(self) -> None:
        """Begin runs, and drive whatever there is, until nothing is left to do."""
        world, ids = self.world, self.world.disk._records
        while True:
            await anyio.sleep(world.tick())
            live = [each for each in sorted(ids) if ids[each].run.header.parent is None and not ids[each].run.is_over]
            if ids and not live and len(ids) >= world.runs and world.chance(0.5):
                return
            over = [each for each in sorted(ids) if self._is_deletable(each)] if world.reuses else []
            if over and world.chance(0.5):
                reused = world.dice.choice(over)
                world.note(self.name, lambda reused=reused: f"deletes {reused}, and begins it again")
                world.bury(reused)
                await self._begin(reused)
            elif not ids or (len(ids) < world.runs and world.chance(0.3)):
                await self._begin(f"r{len(ids)}")
            elif (ready := [each for each in live if self._is_worth_it(each)]) or world.chance(0.2):
                await self._go_on(world.dice.choice(ready or live or ["r0"]))

    def _is_worth_it(self, run_id: str) -> bool:
        """Whether something may come of driving a run; else it is tried seldom, since there is little to see."""
        record, tenure = self.world.disk._records[run_id], self.world.disk.tenures.get(run_id)
        soon = self.world.disk.clock.now() + 1.5
        is_due = any(item.expires_at is not None and item.expires_at <= soon for item in record.run.pending)
        is_free = tenure is None or not tenure.handle.is_heard
        return is_free and (is_due or bool(record.inbox) or not record.run.is_waiting)

    def _is_deletable(self, run_id: str) -> bool:
        """Whether a run is over, nobody drives it, and none that is left has begun with a part of it."""
        records, tenures = self.world.disk._records, self.world.disk.tenures
        header = records[run_id].run.header
        below = [each for each, record in records.items() if record.run.header.parent == run_id]
        family = {run_id, *below}
        forks = any(record.run.header.forked_from in family for record in records.values())
        is_idle = all(records[each].run.is_over and each not in tenures for each in family)
        return is_idle and not forks and header.parent is None and header.forked_from is None

    async def _begin(self, run_id: str) -> None:
        agent, deps = self.agent, self.handle
        match self.world.dice.choice(("run", "submit", "stream", "steps")):
            case "run":
                await self.drive(lambda: agent.run("do it", id=run_id, deps=deps))
            case "submit":
                await self.drive(lambda: agent.submit("do it", id=run_id))
            case "stream":
                await self.drive(lambda: self._watch(run_id))
            case "steps":
                await self.drive(lambda: self._step(agent.start("do it", id=run_id)))

    async def _go_on(self, run_id: str) -> None:
        agent, deps = self.agent, self.handle
        match self.world.dice.choice(("resume", "resume", "worker", "wait", "stream", "steps")):
            case "resume":
                await self.drive(lambda: agent.resume(run_id, deps=deps, wait=False))
            case "worker":
                await self.drive(self._work)
            case "wait":
                await self.drive(lambda: agent.resume(run_id, deps=deps))
            case "stream":
                await self.drive(lambda: self._watch(run_id))
            case "steps":
                await self.drive(lambda: self._load_and_step(run_id))

    async def _work(self) -> None:
        await self.agent.worker(deps=self.handle, until_idle=True)

    async def _load_and_step(self, run_id: str) -> Run:
        return await self._step(await self.agent.load(run_id))

    async def _step(self, run: Run) -> Run:
        async for after in self.agent.steps(run, deps=self.handle):
            self.world.returned.append(after)
            run = after
            if self.world.chance(0.1):
                break
        return run

    async def _watch(self, run_id: str) -> Run | None:
        known = run_id in self.world.disk._records
        begun = await self.agent.load(run_id) if known else self.agent.start("do it", id=run_id)
        async with self.agent.stream(begun, deps=self.handle) as events:
            async for _event in events:
                if self.world.chance(0.02):
                    return None
        return events.run


def _waits(run: Run) -> str:
    return " ".join(f"{item.kind} {item.call_id}" for item in run.pending)


@attrs.define(eq=False)
class Person:
    """Somebody who decides, asks, stops and changes their mind; each word is signed by another name."""

    world: World
    desk: Process
    name: str
    words: int = 0

    async def live(self) -> None:
        """Do one thing after the other."""
        while True:
            await anyio.sleep(self.world.dice.choice((0.25, 0.5, 1.0, 2.0)))
            records = self.world.disk._records
            asking = [each for each in sorted(records) if records[each].run.is_waiting]
            if records:
                rather = asking if asking and self.world.chance(0.7) else sorted(records)
                await self.act(self.world.dice.choice(rather))

    async def act(self, run_id: str) -> None:
        """Do something about a run; what is refused is refused."""
        deeds = (self.decide,) * 7 + (self.send,) * 3 + (self.pause, self.resume, self.cancel, self.fork, self.err)
        deed = self.world.dice.choice(deeds)
        try:
            await deed(run_id)
            if self.world.chance(0.2):
                await deed(run_id)  # again: nothing may come of it that was not meant
        except (StoreError, MisuseError) as error:
            told = f"is told: {error}"
            self.world.note(self.name, lambda: told)

    def sign(self) -> str:
        """Return a name for the next word."""
        self.words += 1
        return f"{self.name}#{self.words}"

    async def decide(self, run_id: str) -> None:
        """Decide on something that the run waits for."""
        run = await self.desk.agent.load(run_id)
        if run.pending:
            item = self.world.dice.choice(run.pending)
            if item.expires_at is not None and self.world.chance(0.5):  # at the last moment, or just too late
                left_s = item.expires_at - self.world.disk.clock.now()
                early_s = self.world.dice.choice((0.0, 0.25, 0.5))
                await anyio.sleep(max(0.0, left_s - early_s) if left_s < SOON_S else 0.0)
            await self.word(item)

    async def word(self, item: Pending) -> None:
        """Decide on one thing."""
        agent, by, dice = self.desk.agent, self.sign(), self.world.dice
        how: dict[str, Any]
        self.world.note(by, lambda: f"decides on {item.kind} of {item.run_id} {item.call_id}")
        match item.kind:
            case PendingKind.APPROVAL if dice.random() < 0.7:
                edited = {"n": 2_000 + self.words} if dice.random() < 0.2 else None
                digest = item.digest if dice.random() < 0.5 else None
                await agent.approve(item.run_id, item.call_id, by=by, arguments=edited, digest=digest)
            case PendingKind.APPROVAL:
                await agent.reject(item.run_id, item.call_id, by=by, message="not so")
            case PendingKind.QUESTION if item.questions:
                how = dice.choice(({"content": {"n": self.words}}, {"content": {"n": "x"}}, {"declined": True}))
                digest = item.digest if dice.random() < 0.5 else None
                await agent.answer(item.run_id, item.call_id, by=by, digest=digest, **how)
            case PendingKind.QUESTION:
                await agent.answer(item.run_id, item.call_id, "the left one", by=by, failed=dice.random() < 0.2)
            case PendingKind.OUTCOME:
                how = dice.choice(({"rerun": True}, {"result": "it was"}, {"failed": "it was not"}))
                await agent.settle(item.run_id, item.call_id, by=by, **how)
            case PendingKind.INPUT:
                await self.send(item.run_id)
            case PendingKind.PAUSE | PendingKind.CRASH:
                await self.resume(item.run_id)

    async def send(self, run_id: str) -> None:
        """Give it input, now or later."""
        dice, text = self.world.dice, f"word {self.sign()}"
        at = self.world.disk.clock.now() + dice.choice((1.0, 5.0)) if dice.random() < 0.3 else None
        kind, priority = dice.choice(list(InputKind)), dice.choice(list(Priority))
        row = await self.desk.agent.send(run_id, text, kind=kind, priority=priority, at=at, key=text)
        self.world.sent[text] = row

    async def pause(self, run_id: str) -> None:
        """Let it rest."""
        if self.world.disk._records[run_id].run.header.parent is None:
            await self.desk.drive(lambda: self.desk.agent.pause(run_id, by=self.sign()))

    async def resume(self, run_id: str) -> None:
        """Go on with it."""
        if self.world.disk._records[run_id].run.header.parent is None:
            await self.desk.drive(lambda: self.desk.agent.resume(run_id, deps=self.desk.handle, wait=False))

    async def cancel(self, run_id: str) -> None:
        """End it, seldom."""
        if self.world.chance(0.6):
            await self.desk.drive(lambda: self.desk.agent.cancel(run_id, by=self.sign()))

    async def fork(self, run_id: str) -> None:
        """Begin again somewhere in the middle, seldom."""
        disk = self.world.disk
        if (
            len(disk._records) < 6
            and disk._records[run_id].run.version
            and disk._records[run_id].run.header.parent is None
        ):
            at = self.world.dice.randrange(disk._records[run_id].run.version + 1)
            await self.desk.agent.fork(run_id, at=at, id=f"f{len(disk._records)}")

    async def err(self, run_id: str) -> None:
        """Decide on what is not asked."""
        call_id = f"t{self.world.dice.randint(1, 3)}.{self.world.dice.randint(0, 2)}"
        deed = self.world.dice.choice((self.desk.agent.approve, self.desk.agent.reject))
        await deed(run_id, call_id, by=self.sign())


# The play


def play(seed: int, listen: Callable[[str], None] | None = None, **given: Any) -> World:
    """Play a seed to its end, and return the world; what broke a promise is in `wrong`.

    Args:
        seed: Makes the world.
        listen: Told of all that happens.
        **given: Fields of the world that are not thrown.
    """

    async def whole() -> World:
        world = World(seed, listen)
        for name, value in given.items():
            setattr(world, name, value)
        here.set(world)
        async with anyio.create_task_group() as world.tasks:
            await _chaos(world)
            world.is_calm = True
            await _end(world)
            world.tasks.cancel_scope.cancel()
        for text in broken_in(world):
            world.blame(text)
        return world

    return run_seeded(whole, seed)


async def _chaos(world: World) -> None:
    seconds = world.dice.choice((5.0, 10.0, 20.0))
    desk = Process(world, "desk")
    with anyio.move_on_after(seconds):
        async with anyio.create_task_group() as people:
            for number in range(world.dice.choice((0, 1, 2))):
                people.start_soon(Person(world, desk, f"ann{number}").live)
            async with anyio.create_task_group() as slots:
                for number in range(world.dice.choice((1, 2, 3))):
                    slots.start_soon(_slot, world, f"p{number}")
            people.cancel_scope.cancel()
    desk.handle.die()


async def _slot(world: World, name: str) -> None:
    """One process after the other."""
    for life in range(1_000):
        process = Process(world, f"{name}.{life}", drifted=world.drifts and world.chance(0.5))
        process.handle.strike, process.handle.end = process.strike, process.die
        with process.life:
            await process.live()
        if process.handle.died_at is None:
            return
        await anyio.sleep(world.dice.choice((0.0, 1.0, 4.0)))


async def _end(world: World) -> None:
    """Go on with all that is not over, and decide what is asked, until everything is over."""
    last = Process(world, "last", drifted=world.drifts)
    person = Person(world, last, "eve")
    records = world.disk._records
    for _ in range(ROUNDS):
        live = [run_id for run_id in sorted(records) if not records[run_id].run.is_over]
        if not live:
            break
        await anyio.sleep(5.0)
        for run_id in live:
            await _move(world, last, person, run_id)
    for run_id, record in records.items():
        if not record.run.is_over:
            tenure = world.disk.tenures.get(run_id)
            held = "" if tenure is None else f"; {tenure.handle.owner} has its lease"
            world.blame(f"{run_id} does not come to its end: {record.run.state} {_waits(record.run)}{held}")
    if mine := [run_id for run_id, tenure in world.disk.tenures.items() if tenure.handle is last]:
        world.blame(f"P6: leases are left behind: {mine}")


async def _move(world: World, last: Process, person: Person, run_id: str) -> None:
    run = world.disk._records[run_id].run
    for item in run.pending:
        if item.run_id == run_id and world.chance(0.9):
            try:
                await person.word(item)
            except (StoreError, MisuseError) as error:
                world.note(person.name, lambda error=error: f"is told: {error}")
    if world.disk._records[run_id].run.is_over:  # with its caller
        return
    parent = None if run.header.parent is None else world.disk._records[run.header.parent].run
    if parent is not None and parent.is_over:  # nobody looks after it any more
        is_told = any(each.run_id == run_id and isinstance(each.row.item, Cancel) for each in world.disk.accepted)
        if not is_told and not world.faults:  # where the disk fails at that moment, it is told to the log alone
            world.blame(f"P6: {run_id} goes on, and {run.header.parent} is over")
        await last.drive(lambda: last.agent.cancel(run_id))
    elif parent is None:
        await last.drive(lambda: last.agent.resume(run_id, deps=last.handle, wait=False))
