"""Drills: a roll-back and a restore that are carried out on copies, and measured."""

from __future__ import annotations

import shutil
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

import anyio

from agentfsm.core.errors import MisuseError
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

# Users of the drill, each of whom begins a run: an arm with 1 % has ten of them.
USERS: Final = 1_000
# Seconds between two looks at the arms.
_POLL_S: Final = 0.05


async def drill_rollback(name: str, store: Store, *, by: str, clock: Clock | None = None) -> DrillReport:
    """Roll back a copy of a roll-out, and measure how long new runs still get the release that was taken back.

    The copy has the log of the roll-out and is in memory. One process changes it, and another one, which follows it as
    workers and servers do, assigns the arms of 1,000 users. The roll-out itself does not change.

    Args:
        name: Name of the roll-out.
        store: Its store.
        by: Person or program that practises.
        clock: Clock of the second process; by default that of the system.

    Raises:
        MisuseError: if the roll-out is not in progress, no plan was in effect before, or a release of that plan is not
            in the store.
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
    users = [f"user {number}" for number in range(USERS)]
    begun = [(await process.assign(user=user, session=user, run_id=user)).release for user in users]
    start = anyio.current_time()
    change = await control.back(by=by, reason="drill")
    if newest.plan.agent:
        for arm in change.plan.ranges:
            await load_release(store, newest.plan.agent, change.plan.releases[arm])
    unit = newest.plan.unit
    wanted = [change.plan.find_release(change.plan.find_arm(f"{unit}::{user}")) for user in users]
    for user, release in zip(users, wanted, strict=True):
        while (await process.assign(user=user, session=user, run_id=user)).release != release:  # noqa: ASYNC110
            await anyio.sleep(_POLL_S)  # the other process looks into the store when it has to
    moved = sum(before != now for before, now in zip(begun, wanted, strict=True))
    return DrillReport(
        kind="rollback",
        subject=newest.plan.agent,
        at=datetime.now(UTC).isoformat(timespec="seconds"),
        seconds=round(anyio.current_time() - start, 3),
        by=by,
        checked=USERS,
        note=f"a copy of roll-out {name!r}: {change}; {moved:,} of {USERS:,} users got another release",
    )


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

    Raises:
        MisuseError: if the command fails, the backup has no runs, lacks some, or differs from its seals.
        StoreError: if a journal cannot be read.
    """
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
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
            ids, events, newest = set[str](), 0, 0.0
            async for summary in RunIterator(store, ALL_RUNS):
                stored = await store.read(summary.id)
                run = begin_run(stored.header).fold(stored.events)
                ids.add(run.id)
                events, newest = events + len(stored.events), max(newest, summary.updated_at)
            faults = []
            if seals is not None:
                faults = [each async for each in SealFile(Path(seals)).verify(store) if each.fault is not None]
        finally:
            await store.aclose()
    seconds = time.perf_counter() - start
    if not ids:
        raise MisuseError("the backup has no runs: it is of another store, or was made before the first run")
    if faults:
        first = f"{faults[0].run_id}: {faults[0].fault}"
        raise MisuseError(f"{len(faults)} runs of the backup differ from their seals, the first {first}")
    if live is not None:
        older = RunIterator(live, ALL_RUNS)
        if missing := [each.id async for each in older if each.updated_at <= newest and each.id not in ids]:
            raise MisuseError(
                f"the backup lacks {len(missing)} runs that are older than its newest event, such as {missing[0]}"
            )
    until = datetime.fromtimestamp(newest, UTC).isoformat(timespec="seconds")
    compared = ", as they were sealed" if seals is not None else ""
    return DrillReport(
        kind="restore",
        subject=Path(backup).name if "://" not in backup else backup.partition("://")[0],
        at=datetime.now(UTC).isoformat(timespec="seconds"),
        seconds=round(seconds, 3),
        by=by,
        checked=len(ids),
        note=f"{len(ids):,} runs with {events:,} events until {until}, all journals read{compared}",
    )
