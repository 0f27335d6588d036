"""Check the rules of a roll-out, and roll an arm back by them.

Any number of processes may check: one at a time does, and a roll-back is one entry of the log, written by one of them.
"""

from __future__ import annotations

import logging
import secrets
from typing import Final

import anyio

from agentfsm.agents.runs import Runs
from agentfsm.core.errors import (
    ConflictError,
    CorruptError,
    PartlyDoneError,
    RunNotFoundError,
    StoreError,
    TooNewError,
)
from agentfsm.journal.run_list import RunIterator
from agentfsm.ports.store import Filter, Store
from agentfsm.releases.arm_results import OutcomeReader
from agentfsm.releases.rollout_log import RolloutChange, RolloutControl, RolloutPlan
from agentfsm.stores.rules import FINAL_STATES

_log = logging.getLogger("agentfsm.releases")

# Seconds between two checks.
CHECK_S: Final = 5.0
# Seconds after which another process checks if the one that did has died.
_HOLD_S: Final = 15.0
# Kind of the records of the processes that check.
_WATCHES: Final = "rollout-watch"
# Author of automatic roll-backs.
AUTHOR: Final = "agentfsm"


class RolloutGuard:
    """Checks the rules of a roll-out: `change = await RolloutGuard(control).check()`."""

    def __init__(self, control: RolloutControl) -> None:
        """Take the roll-out, without I/O."""
        self._control = control
        self._reader = OutcomeReader(control.name, control.store)
        self._id = secrets.token_hex(8)

    async def check(self) -> RolloutChange | None:
        """Check each arm that gets runs by each rule; roll the first bad one back, and return the entry of the log.

        Its weight goes to the base, and the other arms keep theirs. None: nothing was changed.
        """
        log = await self._control.log()
        if not log or log[-1].is_killed:
            return None
        plan = log[-1].plan
        arms = [arm for arm in plan.active if arm != plan.base]
        if not arms or not plan.rules:
            return None
        outcomes = await self._reader.read(plan, failing_at=await self._control.store.now())
        for arm in arms:
            base = [each for each in outcomes.get(plan.base, ()) if each.created_at >= plan.since[arm]]
            for rule in plan.rules:
                if why := rule.check(outcomes[arm], base, tests=len(arms) * len(plan.rules)):
                    return await self._roll_back(arm, why)
        return None

    async def _roll_back(self, arm: str, why: str) -> RolloutChange | None:
        try:
            change = await self._control.back(arm=arm, by=AUTHOR, reason=why, automatic=True)
        except ConflictError:  # changed meanwhile: the next check decides again
            return None
        _log.error("roll-out %r: arm %r was rolled back: %s", self._control.name, arm, why)
        return change

    async def hold(self) -> bool:
        """Return whether this object is the one that checks now; another takes over 15 s after its last call."""
        store, name = self._control.store, self._control.name
        record = await store.read_record(_WATCHES, name)
        now = await store.now()
        until = now + _HOLD_S
        is_other = record is not None and record.value != self._id
        # One that holds for longer than that has written while its clock was ahead, and may have died since.
        if is_other and record is not None and record.expires_at is not None and record.expires_at < until + _HOLD_S:
            return False
        try:
            await store.write_record(
                _WATCHES, name, self._id, revision=0 if record is None else record.revision, expires_at=until
            )
        except ConflictError:
            return False
        return True


async def watch_rollout(control: RolloutControl, *, once: bool = False) -> None:
    """Check the rules of a roll-out every 5 s, until cancelled. Workers of a `Rollout` do this.

    Args:
        control: The roll-out.
        once: Whether to return after one check.
    """
    guard = RolloutGuard(control)
    while True:
        try:
            if once or await guard.hold():
                await guard.check()
        except StoreError as error:  # it may recover; the weights stay as they are meanwhile
            _log.warning("roll-out %r: the store failed, and is checked again: %s", control.name, error)
        if once:
            return
        await anyio.sleep(CHECK_S)


async def abort_runs(store: Store, before: RolloutPlan, after: RolloutPlan, *, by: str, message: str) -> int:
    """Cancel the open runs of the arms that a change has left without weight. Return their number.

    Args:
        store: Store of the runs.
        before: Plan before the change.
        after: Plan after the change.
        by: Person or program that cancels.
        message: The reason.
    """
    runs, count = Runs(store), 0
    for arm in {*before.active} - {*after.active}:
        release = before.releases[arm]
        if release in {after.releases[each] for each in after.active if each in after.releases}:
            continue
        async for each in RunIterator(store, Filter(agent=before.agent, release=release)):
            if each.state in FINAL_STATES or each.parent is not None:
                continue
            try:
                await runs.cancel(each.id, by=by, message=message)
            except (ConflictError, RunNotFoundError):  # it has ended, or was deleted meanwhile
                continue
            except (CorruptError, TooNewError) as error:  # the others are cancelled
                _log.error("run %s of arm %r cannot be read, and is not cancelled: %s", each.id, arm, error)
                continue
            except PartlyDoneError as error:  # its next worker cancels it
                _log.warning("a run of arm %r is cancelled later: %s", arm, error)
            count += 1
    return count
