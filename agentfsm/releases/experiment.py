"""Experiments: arms that are assigned to users, sessions or runs, and flags, which are experiments with two arms."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import attrs

from agentfsm.core.errors import MisuseError
from agentfsm.core.validation import NAME
from agentfsm.core.value import Value
from agentfsm.ports.store import Clock, Store
from agentfsm.releases.rollout_log import UNIT, UNIT_KINDS, RolloutControl, Unit

ON: Final = "on"
OFF: Final = "off"


@attrs.frozen(kw_only=True)
class Assignment(Value):
    """The arm that a unit was assigned to."""

    experiment: str
    """Name of the experiment."""

    arm: str
    """Name of the arm; "holdout" for a unit that is held out, which gets the base."""

    release: str = ""
    """Version of the arm's release; empty for none."""

    unit: Unit
    """Kind of unit that the arm was assigned to. It differs from the experiment's unit if that was not given."""

    @property
    def arms(self) -> dict[str, str]:
        """The arm by the name of the experiment, for `agent.run(..., arms=assignment.arms)`."""
        return {self.experiment: self.arm}


class Experiment:
    """Assigns arms: `tone = Experiment("tone", store, arms=("formal", "warm"))`.

    Give the arm to the run, `agent.run(prompt, arms=assignment.arms)`: the header keeps it. Until the experiment is
    started by its `control`, all get the first arm.
    """

    def __init__(
        self, name: str, store: Store, *, arms: Sequence[str], unit: Unit = "user", clock: Clock | None = None
    ) -> None:
        """Name an experiment, without I/O.

        Args:
            name: Name of the experiment, unique in the store.
            store: The store.
            arms: Names of the arms, the base first.
            unit: What an arm is assigned to until the experiment is started: "user", "session" or "run". `start` sets
                it from then on.
            clock: Clock; by default that of the system.

        Raises:
            MisuseError: if an argument is invalid.
        """
        UNIT.check("Experiment", "unit", unit)
        if isinstance(arms, str) or not arms or len({*arms}) < len(arms):
            raise MisuseError(f"Experiment(arms={arms!r:.80}): give the names of the arms, each once")
        for arm in arms:
            NAME.check("Experiment", "arms", arm)
        self.control: RolloutControl = RolloutControl(name, store, clock=clock)
        self.name = name
        self.store = store
        self.arms: tuple[str, ...] = tuple(arms)
        self.unit: Unit = unit

    async def assign(
        self,
        *,
        user: str | None = None,
        session: str | None = None,
        run_id: str | None = None,
        tenant: str | None = None,
        roles: Iterable[str] = (),
        metadata: Mapping[str, Any] = MappingProxyType({}),
    ) -> Assignment:
        """Return the arm of a user, a session or a run.

        A unit keeps its arm until a change of weights moves its bucket. If the experiment's unit is not given, the next
        of user, session and run is taken.

        Args:
            user: The user.
            session: The session.
            run_id: Id of the run, which is needed if the others are not given.
            tenant: Tenant of the user: users of two tenants may have the same name.
            roles: Roles of the user, for targets.
            metadata: Metadata of the run, for targets.

        Raises:
            MisuseError: if nothing is given that an arm could be assigned to.
            StoreError: if the store fails, and the plan was never read.
        """
        newest = await self.control.newest()
        wanted = self.unit if newest is None else newest.plan.unit
        given = {"user": user, "session": session, "run": run_id}
        # Not one unit for all who lack it, which would give all of them one arm.
        unit: Unit | None = next((each for each in UNIT_KINDS[UNIT_KINDS.index(wanted) :] if given[each]), None)
        if unit is None:
            raise MisuseError(f"experiment {self.name!r} assigns arms by {wanted}: give it, or session= or run_id=")
        if newest is None:
            return Assignment(experiment=self.name, arm=self.arms[0], unit=unit)
        about: dict[str, Any] = {"user": user, "tenant": tenant, "roles": roles, "metadata": metadata}
        arm = next((each.arm for each in newest.plan.targets if each.matches(**about)), "")
        arm = arm or newest.plan.find_arm(f"{unit}:{tenant or ''}:{given[unit]}")
        return Assignment(experiment=self.name, arm=arm, release=newest.plan.find_release(arm), unit=unit)


class Flag:
    """A feature that some users have: `if await Flag("new-search", store).is_on(user="ann"): ...`.

    A flag is an experiment with the arms "off" and "on": `agentfsm rollout start new-search off=90 on=10`.
    """

    def __init__(self, name: str, store: Store, *, unit: Unit = "user", clock: Clock | None = None) -> None:
        """Name a flag, without I/O. See `Experiment`.

        Raises:
            MisuseError: if an argument is invalid.
        """
        self.experiment: Experiment = Experiment(name, store, arms=(OFF, ON), unit=unit, clock=clock)

    async def is_on(
        self,
        *,
        user: str | None = None,
        session: str | None = None,
        run_id: str | None = None,
        tenant: str | None = None,
        roles: Iterable[str] = (),
        metadata: Mapping[str, Any] = MappingProxyType({}),
    ) -> bool:
        """Return whether a user, a session or a run has the feature. See `Experiment.assign`."""
        found = await self.experiment.assign(
            user=user, session=session, run_id=run_id, tenant=tenant, roles=roles, metadata=metadata
        )
        return found.arm == ON
