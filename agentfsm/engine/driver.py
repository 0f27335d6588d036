"""The driver of an agent's runs: takes a run's lease, performs effects until it is over or waits, gives the lease back.

Every way to move a run goes through `Driver.drive`: the verbs of the agent, its workers, the agents that it is a tool
of, and the clients that it is served to.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, cast

import attrs

from agentfsm._concurrency import is_foreign_cancellation
from agentfsm.core.calls import Phase
from agentfsm.core.errors import AgentError, MisuseError
from agentfsm.core.events import Resumed
from agentfsm.core.machine import State
from agentfsm.core.messages import Usage
from agentfsm.core.run import A_co, Run
from agentfsm.engine.drive import journal as journals
from agentfsm.engine.drive.budget import Budget
from agentfsm.engine.drive.engine import Engine
from agentfsm.engine.drive.gate import Gate
from agentfsm.engine.drive.journal import Journal
from agentfsm.engine.follow import settled
from agentfsm.engine.perform import apply_requests, drive_of, run_steps
from agentfsm.ports import Durability, Lease, Store
from agentfsm.tokens.ledger import TokenLedger
from agentfsm.tools.builtin import find_builtin

if TYPE_CHECKING:
    from agentfsm.streaming.stream import Listener

# Runs whose token counts are kept between two steps, so that each message is counted once.
TALLIES: Final = 1_000
# Conversations whose last run is kept, so that the next one need not read all that was said.
CONVERSATIONS: Final = 64

K = TypeVar("K")
V = TypeVar("V")


@attrs.define(eq=False, repr=False, kw_only=True)
class Driver(Generic[A_co]):
    """Drives the runs of one agent in one store; between two calls it keeps only what would else be read or counted."""

    engine: Engine
    store: Store
    durability: Durability
    pause_before: frozenset[State]
    # States before which a run rests until it is resumed.
    _tallies: OrderedDict[tuple[str, float], TokenLedger] = attrs.field(init=False, factory=OrderedDict)
    _ended: OrderedDict[str, Run[Any]] = attrs.field(init=False, factory=OrderedDict)
    # The last runs of conversations, by id.

    async def load(self, run_id: str, at: int | None = None) -> Run[A_co]:
        """Return a run from its journal: as it stands, or as it was at version `at`.

        Raises:
            RunNotFoundError: when the store holds no such run.
        """
        return self.typed(await journals.load(self.store, run_id, at, self._ended))

    async def wait(self, run_id: str) -> Run[A_co]:
        """Return a run that others drive once it is over or waits for something that has not come."""
        return self.typed(await settled(self.store, run_id, self._ended))

    def typed(self, run: Run[Any]) -> Run[A_co]:
        """Return the run with what makes its `output`."""
        answers = self.engine.answers
        return run if answers is None else attrs.evolve(run, decoder=answers.value)

    async def drive(
        self,
        run: Run[Any] | str,
        deps: Any,
        *,
        once: bool = False,
        obeys: bool = False,
        resume: bool = False,
        takeover: bool = False,
        lease: Lease | None = None,
        listen: Listener | None = None,
        see: Callable[[Run], None] | None = None,
        above: Budget | None = None,
        gate: Gate | None = None,
    ) -> Run[A_co]:
        """Take the lease, perform effects until the run is over or waits, and give the lease back.

        Args:
            run: A run as somebody has it, which must be the newest one; or the id of one that is in the store.
            deps: Handed to tools as `ctx.deps`; never stored.
            once: Whether to perform a single effect.
            obeys: Whether to do only what the run's inbox asks for, such as to end it.
            resume: Whether a pause of the run ends.
            takeover: Whether to take the run from the worker that drives it.
            lease: Of this very run, where the caller holds it: it is given back with the end of this call.
            listen: Takes what is streamed.
            see: Takes each new value of the run.
            above: The budget of the run that this one works for.
            gate: Of this event loop, where the caller has passed it already.

        Raises:
            ConflictError: when the run has moved on, or somebody else drives it; nothing was done.
            StoreError: when the journal cannot be read or written.
            MisuseError: when a limit of money cannot be kept, or a tool of an open call is gone; nothing was done.
        """
        gate = gate or await Gate.passed()
        is_stored = isinstance(run, str)
        if not is_stored:
            self.check_price()
        engine = self.engine
        if engine.registry.sources and not obeys:
            await engine.registry.refresh()
            run = self._as_begun(run)
        journal = await Journal.open(
            self.store,
            run,
            engine.clock,
            listen,
            see,
            lease=lease,
            takeover=takeover,
            exact=once,
            durability=self.durability,
            pause_before=self.pause_before,
            ended=self._ended,
        )
        del run  # the journal has its newest value: this one would stay for as long, at 900 bytes
        journal.run = cast("Run", self.typed(journal.run))
        try:
            if not obeys and (is_stored or journal.run.version) and not journal.run.is_over:
                if is_stored:
                    self.check_price()
                self._take_up(journal, resume=resume)
            drive = drive_of(
                engine, journal, deps, self._tally_of(journal.run), above, resume=resume, takeover=takeover
            )
            await (apply_requests(drive) if obeys else run_steps(drive, gate, once=once))
            self._keep(journal.run, drive.tally)
            drive.close()
            return cast("Run[A_co]", journal.run)
        except GeneratorExit:  # the coroutine was closed, perhaps after its event loop: it can wait for nothing more
            journal.release()
            raise
        except BaseException as cancellation:
            if not is_foreign_cancellation(cancellation):
                if not isinstance(cancellation, Exception):
                    journal.lease.backoff_s = 0.0  # it is no fault of the run
                raise
            raise AgentError(
                f"run {journal.run.id!r} stopped in {journal.run.state.upper()}: what was awaited there, such as a "
                "validator's own task, had been cancelled by somebody else; mend that, then resume the run"
            ) from cancellation
        finally:
            await journal.close()

    def check_price(self) -> None:
        """Refuse a limit of money that cannot be kept, since the price is unknown.

        Raises:
            MisuseError: when it is; it says what to do.
        """
        model = self.engine.model
        if self.engine.limits.usd is not None and model.cost_usd(Usage(input_tokens=1)) is None:
            raise MisuseError(
                f"Limits(usd=...) needs a price, and none is known for {model.name!r}: install agentfsm[prices], "
                "give the model a price, or limit tokens instead",
            )

    def _as_begun(self, run: Run[Any] | str) -> Run[Any] | str:
        """Return a run that has not begun with the tools in its header that came after it was made."""
        fingerprint = self.engine.fingerprint
        if isinstance(run, str) or run.version or run.header.fingerprint == fingerprint:
            return run
        return attrs.evolve(run, header=attrs.evolve(run.header, fingerprint=fingerprint))

    def _take_up(self, journal: Journal, *, resume: bool) -> None:
        """Record that a pause ends, or that the agent is not what it was.

        Raises:
            MisuseError: when an open call needs a tool that this agent has not; nothing was changed.
        """
        run, fingerprint = journal.run, self.engine.fingerprint
        changes = fingerprint.changes_since(run.fingerprint or run.header.fingerprint)
        if changes:
            self._check_tools(run)
            journal.log.warning("agent_changed", changes="; ".join(changes))
        if resume if run.paused is not None else changes:
            journal.commit(Resumed(fingerprint=fingerprint if changes else None, changes=changes))

    def _check_tools(self, run: Run) -> None:
        for entry in run.open:
            name, is_open = entry.call.name, entry.phase is not Phase.FINISHED and not entry.call.invented
            if is_open and name not in self.engine.registry and find_builtin(run, name) is None:
                raise MisuseError(
                    f"run {run.id!r} has an open call {entry.call.id} of the tool {name!r}, which this "
                    "agent does not have: resume it with an agent that has it, or cancel it; nothing was changed",
                )

    def _tally_of(self, run: Run) -> TokenLedger:
        own = self._tallies.pop((run.id, run.created_at), None)
        return own or self._tally_before(run) or TokenLedger(own_start=run.own_start)

    def _tally_before(self, run: Run) -> TokenLedger | None:
        """Take the count of the run that this one goes on from, where that is at hand."""
        last = self._ended.get(run.header.after or "")
        if last is None or last.messages is not run.prior:
            return None
        tally = self._tallies.pop((last.id, last.created_at), None)
        if tally is not None:
            tally.resume_from(run.own_start)
        return tally

    def _keep(self, run: Run, tally: TokenLedger) -> None:
        """Keep what the next driving call, or the next run of the conversation, would have to read or count anew."""
        if run.is_over:
            if run.header.session is None and not run.prior:
                return
            self._ended.pop(run.header.after or "", None)
            _put(self._ended, run.id, run, CONVERSATIONS)
        _put(self._tallies, (run.id, run.created_at), tally, TALLIES)


def _put(kept: OrderedDict[K, V], key: K, value: V, most: int) -> None:
    """Keep a value, and let the oldest go where there are more than `most`."""
    kept[key] = value
    if len(kept) > most:
        kept.popitem(last=False)
