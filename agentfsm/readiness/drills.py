"""Drills: a roll-back and a restore that are carried out on copies, and measured."""

from __future__ import annotations

import shutil
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import anyio
import attrs

from agentfsm.core.errors import AgentError, MisuseError
from agentfsm.core.run import begin_run
from agentfsm.journal.run_list import RunIterator
from agentfsm.journal.seals import SealFile
from agentfsm.ports.store import ALL_RUNS
from agentfsm.readiness.evidence import DrillReport
from agentfsm.releases import Experiment, RolloutControl
from agentfsm.releases.release import load_release
from agentfsm.releases.rollout_log import ROLLOUTS
from agentfsm.stores import MemoryStore
from agentfsm.stores.loading import open_store

if TYPE_CHECKING:
    from agentfsm.ports.store import Clock, Store
    from agentfsm.releases import Target

# Users of the drill, each of whom begins a run: an arm with 1 % has ten of them.
USERS: Final = 1_000
# Seconds between two looks at the arms.
_POLL_S: Final = 0.05


async def drill_rollback(name: str, store: Store, *, by: str, clock: Clock | None = None) -> DrillReport:
    """Roll back a copy of a roll-out, and measure how long new runs still get the release that was taken back.

    The copy has the log of the roll-out and is in memory. One process changes it, and another one, which follows it as
    workers and servers do, assigns the arms of 1,000 users, and of one person for each target. The roll-out itself does
    not change.

    Args:
        name: Name of the roll-out.
        store: Its store.
        by: Person or program that practises.
        clock: Clock of the second process; by default that of the system.

    Returns:
        The report. It has a `failure` if no plan was in effect before, a release of that plan is not in the store, or
        no user would get another arm.

    Raises:
        MisuseError: if there is no such roll-out.
        StoreError: if its log cannot be read.
    """
    copy = MemoryStore() if clock is None else MemoryStore(clock=clock)
    after = f"{name}/"
    while page := await store.list_records(ROLLOUTS, prefix=f"{name}/", after=after):
        for record in page:
            await copy.write_record(ROLLOUTS, record.key, record.value, revision=0)
        after = page[-1].key
    control = RolloutControl(name, copy)
    newest = await control.newest()
    if newest is None:
        raise MisuseError(f"there is no roll-out {name!r}: `agentfsm rollout status` lists them")
    process = Experiment(name, copy, arms=tuple(newest.plan.releases), clock=clock)
    people = [*_list_users(USERS), *map(_find_person, newest.plan.targets)]
    begun = [(await process.assign(**person)).arm for person in people]
    start, failure, note = anyio.current_time(), "", ""
    try:
        change = await control.back(by=by, reason="drill")
        for arm in change.plan.active if newest.plan.agent else ():
            await load_release(store, newest.plan.agent, change.plan.releases[arm])
        rolled_back = Experiment(name, copy, arms=tuple(newest.plan.releases))
        wanted = [(await rolled_back.assign(**person)).arm for person in people]
        for person, arm in zip(people, wanted, strict=True):
            while (await process.assign(**person)).arm != arm:  # noqa: ASYNC110
                await anyio.sleep(_POLL_S)  # the other process looks into the store when it has to
        moved = sum(before != now for before, now in zip(begun, wanted, strict=True))
        note = f"a copy of roll-out {name!r}: {change}; {moved:,} of {len(people):,} users got another arm"
        if not moved:
            failure = "nobody got another arm, so nothing was practised: give the new one a target, or 1 % or more"
    except AgentError as error:
        failure = str(error)
    return DrillReport(
        kind="rollback",
        subject=newest.plan.agent,
        at=datetime.now(UTC).isoformat(timespec="seconds"),
        seconds=round(anyio.current_time() - start, 3),
        by=by,
        checked=len(people),
        note=note,
        failure=failure,
    )


def _list_users(number: int) -> list[dict[str, Any]]:
    return [{"user": name, "session": name, "run_id": name} for name in (f"user {each}" for each in range(number))]


def _find_person(target: Target) -> dict[str, Any]:
    """Return whom a target is about, as arguments of `assign`."""
    [person] = _list_users(1)
    return person | {
        "user": next(iter(target.users), person["user"]),
        "tenant": next(iter(target.tenants), None),
        "roles": target.roles[:1],
        "metadata": {name: values[0] for name, values in target.metadata.items()},
    }


async def drill_restore(
    backup: str, *, by: str, live: Store | None = None, command: str = "", seals: str | Path | None = None
) -> DrillReport:
    """Restore a backup of a store, read all of its journals, and measure the time.

    A file is copied into a temporary folder and opened there. A server has the backup restored already, or `command`
    does it.

    Args:
        backup: File of a SQLite store, or URL of the store that the backup is restored into. Not the one in production.
        by: Person or program that practises.
        live: Store in production; each of its runs that has not changed since the backup has to be in it.
        command: Command of the shell that restores the backup, such as `pg_restore`; empty for none.
        seals: File of seals that all journals are compared with; None for none.

    Returns:
        The report. It has a `failure` if the command fails, or the backup is missing, has no runs, lacks some, cannot
        be read, or differs from its seals.
    """
    start, found = time.perf_counter(), _Restored()
    try:
        with tempfile.TemporaryDirectory() as folder:
            await _restore(backup, command, folder, found, seals)
        seconds = time.perf_counter() - start
        await _compare(found, live)
        failure = ""
    except Exception as error:  # noqa: BLE001  whatever keeps a backup from being read is the result of the drill
        seconds = time.perf_counter() - start
        failure = str(error) or type(error).__name__
    until = datetime.fromtimestamp(found.newest, UTC).isoformat(timespec="seconds")
    compared = ", as they were sealed" if seals is not None else ""
    note = f"{len(found.ids):,} runs with {found.events:,} events until {until}, all journals read{compared}"
    return DrillReport(
        kind="restore",
        subject=Path(backup).name if "://" not in backup else backup.partition("://")[0],
        at=datetime.now(UTC).isoformat(timespec="seconds"),
        seconds=round(seconds, 3),
        by=by,
        checked=len(found.ids),
        note="" if failure else note,
        agents=tuple(sorted(found.agents)),
        failure=failure,
    )


@attrs.define(eq=False)
class _Restored:
    """The content of a backup."""

    ids: set[str] = attrs.field(factory=set)
    agents: set[str] = attrs.field(factory=set)
    events: int = 0
    newest: float = 0.0


async def _restore(backup: str, command: str, folder: str, found: _Restored, seals: str | Path | None) -> None:
    """Restore a backup, and note what it has.

    Raises:
        MisuseError: if the command fails, the backup has no runs, or differs from its seals.
        StoreError: if a journal cannot be read.
    """
    if command:
        done = await anyio.run_process(["sh", "-c", command], check=False)
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip()[-300:]
            raise MisuseError(f"{command!r} ended with code {done.returncode}: {said}")
    place = backup
    if "://" not in backup:
        if not await anyio.Path(backup).is_file():
            raise MisuseError(f"there is no backup at {backup}: name a file of a SQLite store, or a URL")
        place = str(await anyio.to_thread.run_sync(shutil.copy, backup, folder))
    store = open_store(place)
    try:
        async for summary in RunIterator(store, ALL_RUNS):
            stored = await store.read(summary.id)
            run = begin_run(stored.header).fold(stored.events)
            found.ids.add(run.id)
            found.agents.add(run.header.agent)
            found.events, found.newest = found.events + len(stored.events), max(found.newest, summary.updated_at)
        faults = []
        if seals is not None:
            faults = [each async for each in SealFile(Path(seals)).verify(store) if each.fault is not None]
    finally:
        await store.aclose()
    if not found.ids:
        raise MisuseError("the backup has no runs: it is of another store, or was made before the first run")
    if faults:
        first = f"{faults[0].run_id}: {faults[0].fault}"
        raise MisuseError(f"{len(faults)} runs of the backup differ from their seals, the first {first}")


async def _compare(found: _Restored, live: Store | None) -> None:
    """Check that a backup has the runs of the store in production that have not changed since.

    Raises:
        MisuseError: if it lacks some.
    """
    if live is None:
        return
    older = RunIterator(live, ALL_RUNS)
    if missing := [each.id async for each in older if each.updated_at <= found.newest and each.id not in found.ids]:
        raise MisuseError(
            f"the backup lacks {len(missing)} runs that are older than its newest event, such as {missing[0]}"
        )
