"""Driver of an agent's runs: takes a run's lease and performs effects until the run is over or waits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, Generic

import anyio
import attrs

from agentfsm._lib.concurrency import is_foreign_cancellation
from agentfsm._lib.fairness import StepThrottle
from agentfsm._lib.newest import Newest
from agentfsm.core.errors import (
    AgentError,
    ConflictError,
    IncompatibleProgramError,
    LeaseHeldError,
    MisuseError,
    RunNotFoundError,
)
from agentfsm.core.events import Resumed
from agentfsm.core.machine import State
from agentfsm.core.run import A_co, Run
from agentfsm.core.run_ids import find_caller
from agentfsm.core.usage import Usage
from agentfsm.engine.deciders.answer_cache import keep_answer
from agentfsm.engine.execution.config import EngineConfig
from agentfsm.engine.execution.execution import build_execution
from agentfsm.engine.execution.journal import Journal, create_shield
from agentfsm.engine.execution.options import ExecutionOptions
from agentfsm.engine.execution.tool_access import build_run_context
from agentfsm.engine.execution.unattended import apply_stop_requests
from agentfsm.engine.program_check import check_program, find_changes, select_names
from agentfsm.engine.step import run_steps
from agentfsm.ports.store import Durability, Store
from agentfsm.streaming.log import RunLogger
from agentfsm.tokens.ledger import TokenLedger
from agentfsm.tools.executing_call import (
    check_withheld,
    current_call,
    outside_calls,
    report_read_run,
)

if TYPE_CHECKING:
    from agentfsm.engine.execution.recorded_world import RecordedWorld
    from agentfsm.streaming.stream import Listener

# Seconds between two attempts to take a lease that another worker holds. A lease lasts 10 s.
LEASE_POLL_S: Final = 0.2
# Maximum of runs whose token counts are cached, so that each message is counted once.
MAX_LEDGERS: Final = 1_000
# Maximum of conversations whose last run is cached, so that the next run need not read the whole conversation.
MAX_CONVERSATIONS: Final = 64


@attrs.define(eq=False, repr=False, kw_only=True)
class Driver(Generic[A_co]):
    """Executes the runs of one agent in one store. Between two executions it keeps only caches."""

    config: EngineConfig
    store: Store
    durability: Durability
    pause_before: frozenset[State]
    """States before which a run pauses until it is resumed."""

    _ledgers: Newest[tuple[str, float], TokenLedger] = attrs.field(init=False, factory=lambda: Newest(MAX_LEDGERS))
    ended_runs: Newest[str, Run[Any]] = attrs.field(init=False, factory=lambda: Newest(MAX_CONVERSATIONS))
    """The last runs of conversations, by id."""

    @property
    def is_recorded(self) -> bool:
        """Whether the runs are executed in a recorded world."""
        return False

    def attach_decoder(self, run: Run[Any]) -> Run[A_co]:
        """Return the run with the function that parses its `output`."""
        answers = self.config.output_spec
        return run if answers is None else attrs.evolve(run, decoder=answers.parse)

    async def run_until_blocked(self, run: Run[Any] | str, options: ExecutionOptions) -> Run[A_co]:
        """Take the lease, perform effects until the run is over or waits, and give the lease back.

        Args:
            run: The run at its newest version, or the id of a stored run.
            options: What the caller gives and asks for.

        Raises:
            ConflictError: if the run has moved on, or another worker executes it; nothing was changed.
            StoreError: if the journal cannot be read or written.
            MisuseError: if the price for a money limit is unknown.
            IncompatibleProgramError: if this agent cannot continue the run; nothing was changed.
        """
        throttle = options.throttle or await StepThrottle.enter()
        if not (is_stored := isinstance(run, str)):
            self.check_price()
            run = await self.record_instructions(run, options.deps)
        engine = self.config
        if engine.registry.sources:
            await engine.registry.refresh()
            run = self._refresh_fingerprint(run)
        journal = await self._open_journal(run, options)
        del run  # the journal has the latest state; this one would occupy 900 bytes until the end
        journal.run = self.attach_decoder(journal.run)
        try:
            if engine.resolve_deferred is not None and journal.run.header.instructions is None:
                context = build_run_context(journal.run, options.deps)  # another version of the agent has started it
                engine = engine.for_run(await engine.resolve_deferred(journal.run.header, context))
            if (is_stored or journal.run.version) and not journal.run.is_over:
                check_withheld(journal.run.header, is_recorded=options.world is not None)
                if is_stored:
                    self.check_price()
                own = engine.for_run(journal.run.header)
                await check_program(own, self.store, journal.run, options.renamed)
                names = select_names(own, journal.run, options.renamed)
                self._record_resumption(engine, journal, resume=options.resume, renamed=names)
            drive = build_execution(engine, journal, self._take_ledger(journal.run), options)
            work = run_steps(drive, throttle)
            if drive.answer_claim is not None:
                work = keep_answer(drive, drive.answer_claim, work)
            await outside_calls(work, journal.run.header)
            self._cache(journal.run, drive.ledger)
        except GeneratorExit:  # the coroutine was closed, perhaps after its event loop: awaiting is impossible
            journal.release()
            raise
        except BaseException as cancellation:
            if not is_foreign_cancellation(cancellation):
                if isinstance(cancellation, IncompatibleProgramError):
                    journal.lease.backoff_s = journal.lease.refusal_backoff_s or journal.lease.backoff_s
                if not isinstance(cancellation, Exception):
                    journal.lease.backoff_s = 0.0  # not the run's fault
                raise
            raise AgentError(
                f"run {journal.run.id!r} stopped in {journal.run.state.upper()}: a task that it awaited, such as a "
                "validator's, was cancelled by other code; correct that code, then resume the run"
            ) from cancellation
        finally:
            report_read_run(journal.run)
            if await journal.close() and journal.run.stop_reason is None:
                journal.run = await self._apply_late_requests(journal.run, options.on_event, options.on_run)
        return journal.run

    async def _open_journal(self, run: Run[Any] | str, options: ExecutionOptions) -> Journal:
        takeover = options.takeover
        # A repeated call finds the run that it started before, perhaps in the hands of another worker.
        is_repeatable = isinstance(run, Run) and run.version == 0 and find_caller(run.id) is not None
        while True:
            try:
                return await Journal.open(
                    self.store,
                    run,
                    self.config.clock,
                    options.on_event,
                    options.on_run,
                    lease=options.lease,
                    takeover=takeover,
                    must_be_new=options.once and not is_repeatable,
                    durability=self.durability,
                    pause_before=self.pause_before,
                    ended_runs=self.ended_runs,
                    watch=self.config.watch,
                )
            except LeaseHeldError:
                if not is_repeatable:
                    raise
                call = current_call()
                if isinstance(run, Run) and call is not None and call.takeover:
                    run, takeover = run.id, True
                else:
                    await anyio.sleep(LEASE_POLL_S)
            except ConflictError:  # the run has moved on: the lease was held briefly to check that
                if isinstance(run, Run):
                    await self._apply_late_requests(run)
                raise

    async def _apply_late_requests(
        self,
        run: Run[Any],
        on_event: Listener | None = None,
        on_run: Callable[[Run], None] | None = None,
    ) -> Run[A_co]:
        """Cancel or pause a run if that was requested between the last read of its inbox and the release of its lease.

        Shielded, with a time limit. Failures are logged: everything done before is durable.
        """
        try:
            with create_shield():
                return await self.apply_stop_requests(run.id, on_event, on_run) or run
        except RunNotFoundError:  # deleted in the meantime
            return run
        except AgentError as error:
            log = RunLogger(run.id, run.header.agent)
            log.warning("stop_requests_not_applied", error=type(error).__name__)
        return run

    async def apply_stop_requests(
        self,
        run_id: str,
        on_event: Listener | None = None,
        on_run: Callable[[Run], None] | None = None,
    ) -> Run[A_co] | None:
        """Cancel or pause a run if that was requested while this process held its lease; call it after the release.

        Returns:
            The run after the last request; None if no request was applied here.

        Raises:
            RunNotFoundError: if the store has no such run.
        """
        stopped = await apply_stop_requests(
            self.store,
            run_id,
            clock=self.config.clock,
            tools=self.config.registry,
            durability=self.durability,
            on_event=on_event,
            on_run=on_run,
            watch=self.config.watch,
        )
        return None if stopped is None else self.attach_decoder(stopped)

    def check_price(self) -> None:
        """Check that the model's price is known if the agent has a money limit or a spending limit.

        Raises:
            MisuseError: if it is unknown.
        """
        model, config = self.config.model, self.config
        is_limited = config.limits.usd is not None or config.spend
        if is_limited and model.cost_usd(Usage(input_tokens=1)) is None:
            name = "Limits(usd=...)" if config.limits.usd is not None else "Agent(spend=...)"
            raise MisuseError(
                f"{name} needs a price, and none is known for {model.name!r}: install agentfsm[prices], "
                "give the model a price, or limit tokens instead",
            )

    async def record_instructions(self, run: Run[Any], deps: object) -> Run[Any]:
        """Return a run that is not in the store yet with its instructions, if they are known only now."""
        resolve = self.config.resolve_deferred
        if resolve is None or run.version or run.header.instructions is not None:
            return run
        header = await resolve(run.header, build_run_context(run, deps))
        header = attrs.evolve(header, fingerprint=self.config.for_run(header).fingerprint)
        return attrs.evolve(run, header=header)

    def _refresh_fingerprint(self, run: Run[Any] | str) -> Run[Any] | str:
        """Update the fingerprint of a run that has not begun: tools may have been added since it was created."""
        if isinstance(run, str) or run.version:
            return run
        fingerprint = self.config.for_run(run.header).fingerprint
        if run.header.fingerprint == fingerprint:
            return run
        return attrs.evolve(run, header=attrs.evolve(run.header, fingerprint=fingerprint))

    def _record_resumption(
        self, engine: EngineConfig, journal: Journal, *, resume: bool, renamed: Mapping[str, str]
    ) -> None:
        """Record the end of a pause, a change of the agent, or new names of tools."""
        run = journal.run
        fingerprint, changes = find_changes(engine, run)
        if changes:
            journal.log.warning("agent_changed", changes="; ".join(changes))
        if renamed or (resume if run.paused is not None else changes):
            journal.commit(Resumed(fingerprint=fingerprint if changes else None, changes=changes, renamed=renamed))

    def _take_ledger(self, run: Run[Any]) -> TokenLedger:
        tally = self._ledgers.pop((run.id, run.created_at), None)
        last = self.ended_runs.get(run.header.after or "")
        if not tally and last is not None and last.messages is run.prior:  # the counts of the run before go on
            tally = self._ledgers.pop((last.id, last.created_at), None)
            if tally:
                tally.resume_from(run.own_start)
        return tally or TokenLedger(own_start=run.own_start)

    def _cache(self, run: Run[Any], ledger: TokenLedger) -> None:
        """Cache the token counts and the run for the next execution, or the next run of the conversation."""
        if run.is_over:
            if run.header.session is None and not run.prior:
                return
            self.ended_runs.pop(run.header.after or "", None)
            self.ended_runs[run.id] = run
        self._ledgers[run.id, run.created_at] = ledger


@attrs.define(eq=False, repr=False, kw_only=True)
class RecordedDriver(Driver[A_co]):
    """Executes the runs of an agent in a recorded world."""

    world: RecordedWorld

    @property
    def is_recorded(self) -> bool:
        """Whether the runs are executed in a recorded world."""
        return True

    async def run_until_blocked(self, run: Run[Any] | str, options: ExecutionOptions) -> Run[A_co]:
        """Do as a `Driver` does, with calls that are answered from the record."""
        return await super().run_until_blocked(run, options._replace(world=self.world))
