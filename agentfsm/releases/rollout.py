"""Roll-outs: several releases of an agent side by side, each for its share of the users.

The arm is chosen once, before the run is created, and is in its header. So a run that is resumed is executed by the
release that it was begun with, whatever the weights are by then.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Unpack

import anyio

from agentfsm.agents.agent import WORKER_PARALLEL, WORKER_POLL_S, Agent
from agentfsm.agents.agent_starts import StartOptions
from agentfsm.agents.extras import create_due_runs
from agentfsm.agents.worker import Worker
from agentfsm.core.errors import MisuseError, RunNotFoundError, first_error
from agentfsm.core.validation import COUNT, NOT_NEGATIVE, SECONDS
from agentfsm.engine.execution.options import ExecutionOptions
from agentfsm.releases.arm_results import ArmResults, read_results
from agentfsm.releases.experiment import Experiment
from agentfsm.releases.release import Release, save_release
from agentfsm.releases.rollout_guard import watch_rollout
from agentfsm.releases.rollout_log import HOLDOUT, UNIT, RolloutChange, RolloutControl, Unit
from agentfsm.releases.targets import Target
from agentfsm.stores import MemoryStore
from agentfsm.tools.executing_call import current_call

if TYPE_CHECKING:
    from agentfsm.agents.runs import Prompt
    from agentfsm.core.pending import Elicit
    from agentfsm.core.run import Run
    from agentfsm.evals import Evaluation
    from agentfsm.ports.store import Store
    from agentfsm.releases.rollback_rules import RollbackRule

_log = logging.getLogger("agentfsm.releases")


class Rollout:
    """Releases of an agent, of which each user gets one: `rollout = Rollout("billing", {"old": one, "new": other})`.

    It starts, submits and executes runs like an agent: `await rollout.run(prompt, user="ann")`. The command line takes
    it in place of an agent: `agentfsm worker app:rollout`, `agentfsm serve app:rollout`. Until it is started, all get
    the first arm, which is the base.
    """

    def __init__(
        self,
        name: str,
        arms: Mapping[str, Agent[Any]],
        *,
        store: Store | None = None,
        unit: Unit = "user",
        code: str = "",
        evaluations: Mapping[str, Evaluation] = MappingProxyType({}),
    ) -> None:
        """Name the arms, without I/O.

        Args:
            name: Name of the roll-out, unique in the store.
            arms: The agents by the name of their arm, the base first. They are variants of one agent: they have one
                name, and each has a version, which names its release.
            store: Store of the runs and of the roll-out; None for that of the first agent.
            unit: What an arm is assigned to: "user", "session" or "run".
            code: Version of the source code, such as a commit, for the manifests of the releases.
            evaluations: Evaluation by arm, from `evaluate`.

        Raises:
            MisuseError: if an argument is invalid, an agent has no version, two have the same, or `Release.of` refuses
                one.
        """
        UNIT.check("Rollout", "unit", unit)
        if not isinstance(arms, Mapping) or not arms or not all(isinstance(each, Agent) for each in arms.values()):
            raise MisuseError(
                f"Rollout(arms={arms!r:.80}): give the agents by arm, such as {{'old': one, 'new': other}}"
            )
        if unknown := evaluations.keys() - arms.keys():
            raise MisuseError(f"Rollout(evaluations=...): there is no arm {min(unknown)!r}")
        if store is None and all(isinstance(agent.store, MemoryStore) for agent in arms.values()):
            store = next(iter(arms.values())).store  # agents without store= have one each
        self.arms: Mapping[str, Agent[Any]] = MappingProxyType(
            dict(arms) if store is None else {arm: agent.with_(store=store) for arm, agent in arms.items()}
        )
        """The agents by arm, the base first."""

        self.name = name
        """Name of the roll-out."""

        self.base: Agent[Any] = next(iter(self.arms.values()))
        """The agent of the first arm."""

        self._check_arms()
        self.releases: Mapping[str, Release] = MappingProxyType(
            {arm: Release.of(agent, code=code, evaluation=evaluations.get(arm)) for arm, agent in self.arms.items()}
        )
        """The release of each arm."""

        self.experiment: Experiment = Experiment(
            name, self.base.store, arms=tuple(self.arms), unit=unit, clock=self.base.clock
        )
        """Assigns the arms."""

        self._options: dict[str, Any] = {"unit": unit, "code": code, "evaluations": evaluations}
        self._is_saved = False

    def __repr__(self) -> str:
        arms = ", ".join(f"{arm}: {agent.version}" for arm, agent in self.arms.items())
        return f"<Rollout {self.name} of {self.base.name}, {arms}>"

    def _check_arms(self) -> None:
        if HOLDOUT in self.arms:
            raise MisuseError(f"an arm cannot be called {HOLDOUT!r}: give it another name")
        versions = [agent.version for agent in self.arms.values()]
        for arm, agent in self.arms.items():
            if agent.name != self.base.name:
                raise MisuseError(
                    f"arm {arm!r} is agent {agent.name!r}, and the first is {self.base.name!r}: workers find runs by "
                    "the name of the agent, so give all arms one name"
                )
            if not agent.version:
                raise MisuseError(
                    f"the agent of arm {arm!r} has no version to name its release: write Agent(..., version='1.0.0'), "
                    "and give it another version with each change"
                )
            if agent.store is not self.base.store:
                raise MisuseError(f"arm {arm!r} has a store of its own: write Rollout(..., store=...)")
            if versions.count(agent.version) > 1:
                raise MisuseError(f"two arms have version {agent.version!r}: give each release a version of its own")

    @property
    def control(self) -> RolloutControl:
        """Changes the weights, rolls back, and kills the roll-out; reads its log."""
        return self.experiment.control

    @property
    def versions(self) -> tuple[str, ...]:
        """Versions of the releases."""
        return tuple([agent.version for agent in self.arms.values()])

    def with_(self, *, store: Store | None = None, target: str | None = None) -> Rollout:
        """Return the roll-out with its agents in another store, or with another target."""
        changes = {} if target is None else {"target": target}
        arms = {arm: agent.with_(**changes) for arm, agent in self.arms.items()}
        return Rollout(self.name, arms, store=store, **self._options)

    async def start(
        self,
        weights: Mapping[str, float],
        *,
        by: str,
        reason: str,
        holdout: float = 0.0,
        rules: Iterable[RollbackRule | str] = (),
        targets: Iterable[Target | str] = (),
    ) -> RolloutChange:
        """Start the roll-out. `control` changes it afterwards.

        Args:
            weights: Percent by arm, in steps of 0.01; their sum is 100. An arm that is not named gets nothing.
            by: Person or program that starts it.
            reason: The reason.
            holdout: Percent of the users that get the base, here and in all other roll-outs with a holdout.
            rules: Rules of automatic roll-backs, such as "failures 5%" (see `RollbackRule`).
            targets: Runs that get an arm whatever its weight is, such as "new:role=tester" (see `Target`).

        Raises:
            MisuseError: if an argument is invalid, or the roll-out is in progress.
            ConflictError: if it was changed at the same moment, or a release was saved with other contents.
        """
        if unknown := weights.keys() - self.arms.keys():
            raise MisuseError(f"roll-out {self.name!r} has no arm {min(unknown)!r}: {', '.join(self.arms)}")
        await self.save_releases()
        return await self.control.start(
            {arm: weights.get(arm, 0) for arm in self.arms},
            by=by,
            reason=reason,
            agent=self.base.name,
            releases={arm: agent.version for arm, agent in self.arms.items()},
            unit=self.experiment.unit,
            holdout=holdout,
            rules=rules,
            targets=targets,
        )

    async def results(self) -> tuple[ArmResults, ...]:
        """Return the results of each arm since the start of the roll-out; empty if it was never started."""
        return await read_results(self.control)

    async def save_releases(self) -> None:
        """Save the manifests of the releases in the store, once. All methods that start or execute runs do this.

        Raises:
            ConflictError: if a release was saved with other contents.
        """
        if not self._is_saved:
            for release in self.releases.values():
                await save_release(self.base.store, release)
            self._is_saved = True

    # Start and execute runs.

    async def choose(
        self,
        *,
        user: str | None = None,
        session: str | None = None,
        tenant: str | None = None,
        id: str | None = None,  # noqa: A002  as in `Agent.start`
        arms: Mapping[str, str] | None = None,
        roles: Iterable[str] = (),
        metadata: Mapping[str, Any] = MappingProxyType({}),
    ) -> tuple[Agent[Any], StartOptions]:
        """Return the agent of the arm of a new run, and the options of its start, which contain the given ones.

        `agent, options = await rollout.choose(user="ann"); stream = agent.stream(prompt, **options)`. If the store has
        a run with this id, its own release is chosen.

        Args:
            user: User on whose behalf the run works.
            session: Session of the run.
            tenant: Tenant that the user belongs to.
            id: Id of the run; by default a new one.
            arms: Arms of other experiments that the run takes part in.
            roles: Roles of the user, for the targets of the roll-out.
            metadata: Metadata of the run, for the targets of the roll-out.

        Raises:
            MisuseError: if `arms` names this roll-out, which chooses its arm itself, or this process does not have the
                release.
            ConflictError: if a release was saved with other contents.
        """
        if arms and self.name in arms:
            raise MisuseError(
                f"arms={dict(arms)!r:.80}: roll-out {self.name!r} chooses its arm; give the run's users a target "
                "(`control.set_targets`), or use the agent of an arm"
            )
        await self.save_releases()
        call = current_call()
        if call is not None:  # the function of a tool starts the run, as in `Agent.start`
            own = call.run.header
            roles = own.roles if not roles and user in {None, own.user} else roles
            user, tenant = user or own.user, tenant or own.tenant
            id = call.next_run_id() if id is None else id  # noqa: A001
        run_id = self.base.new_id() if id is None else id
        options = StartOptions(user=user, session=session, id=run_id)
        if tenant is not None:
            options["tenant"] = tenant
        if id is not None:
            try:
                known = await self.base.runs.header(id)
            except RunNotFoundError:
                pass
            else:
                return self.find_agent(known.release), {**options, "release": known.release, "arms": known.arms}
        found = await self.experiment.assign(
            user=user, session=session, run_id=run_id, tenant=tenant, roles=roles, metadata=metadata
        )
        agent = self.find_agent(found.release) if found.release else self.arms[found.arm]
        return agent, {**options, "release": agent.version, "arms": {**(arms or {}), **found.arms}}

    def find_agent(self, release: str) -> Agent[Any]:
        """Return the agent of a release; the base for a run without one.

        Raises:
            MisuseError: if this process does not have the release.
        """
        if not release:
            return self.base
        found = next((agent for agent in self.arms.values() if agent.version == release), None)
        if found is None:
            raise MisuseError(
                f"this process does not have release {release!r} of agent {self.base.name!r}, it has "
                f"{', '.join(map(repr, self.versions))}: deploy that release here, or give its arm no weight"
            )
        return found

    async def _choose_for(self, start: StartOptions) -> tuple[Agent[Any], StartOptions]:
        if start.get("release"):
            raise MisuseError("the roll-out chooses the release: leave release= out, or use the agent of an arm")
        names = ("user", "session", "tenant", "id", "arms", "roles", "metadata")
        chosen: dict[str, Any] = {name: value for name, value in start.items() if name in names and value is not None}
        agent, options = await self.choose(**chosen)
        return agent, {**start, **options}

    async def run(
        self, prompt: Prompt, *, deps: Any = None, elicit: Elicit | None = None, **start: Unpack[StartOptions]
    ) -> Run[Any]:
        """Start a run of the arm of its user and finish it. See `Agent.run`.

        Raises:
            MisuseError: if this process does not have the release of the arm.
        """
        agent, options = await self._choose_for(start)
        return await agent.run(prompt, deps=deps, elicit=elicit, **options)

    async def submit(self, prompt: Prompt, *, deps: Any = None, **start: Unpack[StartOptions]) -> Run[Any]:
        """Create a run of the arm of its user in the store, for a worker to execute. See `Agent.submit`.

        Raises:
            MisuseError: if this process does not have the release of the arm.
        """
        agent, options = await self._choose_for(start)
        return await agent.submit(prompt, deps=deps, **options)

    async def resume(self, run_id: str, **options: Any) -> Run[Any]:
        """Continue a run with the release that it was begun with. See `Agent.resume`, which has the options.

        Raises:
            RunNotFoundError: if the store has no such run.
            MisuseError: if this process does not have the release.
            ConflictError: if a release was saved with other contents; the run is not continued.
        """
        await self.save_releases()
        header = await self.base.runs.header(run_id)
        return await self.find_agent(header.release).resume(run_id, **options)

    async def execute(self, run: Run[Any], options: ExecutionOptions) -> Run[Any]:
        """Execute a run with the agent of its release until it is over or waits. Workers call this."""
        driver = self.find_agent(run.header.release).driver
        return await driver.run_until_blocked(driver.attach_decoder(run), options)

    async def worker(
        self,
        *,
        deps: Any = None,
        parallel: int = WORKER_PARALLEL,
        poll_s: float = WORKER_POLL_S,
        until_idle: bool = False,
        drain_s: float = 0.0,
    ) -> None:
        """Execute the runs that are ready and were begun with one of the releases, until cancelled.

        Runs of other releases are left to other workers. The worker also checks the rules of the roll-out, and rolls
        back by them. For the other arguments see `Agent.worker`.

        Args:
            deps: Dependencies of every run, or a function, plain or async, that takes the run and returns them.
            parallel: Maximum number of runs executed at once, 1 or more.
            poll_s: Seconds between two polls of the store, above 0.
            until_idle: Whether to return when no run is ready.
            drain_s: Seconds that effects in flight have to end after a cancellation, 0 or more.

        Raises:
            MisuseError: if an argument is invalid.
            ConflictError: if a release was saved with other contents.
        """
        COUNT.check("worker", "parallel", parallel)
        SECONDS.check("worker", "poll_s", poll_s)
        NOT_NEGATIVE.check("worker", "drain_s", drain_s)
        worker = self.build_worker(self.execute, deps=deps, parallel=parallel, poll_s=poll_s, drain_s=drain_s)
        await self.run_worker(worker, until_idle=until_idle)

    def build_worker(
        self,
        execute: Callable[[Run[Any], ExecutionOptions], Awaitable[Run[Any]]],
        *,
        deps: Any = None,
        parallel: int,
        poll_s: float,
        drain_s: float = 0.0,
    ) -> Worker:
        """Return a worker of the releases, which executes each run by `execute`, for `run_worker`."""
        return Worker(
            agent=self.base,
            execute=execute,
            deps=deps,
            parallel=parallel,
            poll_s=poll_s,
            drain_s=drain_s,
            releases=self.versions,
            starter=create_due_runs(self.base, self.choose),
        )

    async def run_worker(self, worker: Worker, *, until_idle: bool) -> None:
        """Run a worker of the releases, and check the rules of the roll-out meanwhile."""
        await self.save_releases()
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(watch_rollout, self.control)
                await worker.run(until_idle=until_idle)
                tasks.cancel_scope.cancel()
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None
