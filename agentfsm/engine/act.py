"""ACT: decisions are taken in, calls run, and what happens to each is a fact in the journal before it counts."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import attrs

from agentfsm.core import events as e
from agentfsm.core.effects import Pending, RunTools, Wait
from agentfsm.core.errors import AgentError, ArgumentsError, RunNotFoundError, StoreError
from agentfsm.core.inbox import Approve, Cancel, Input, Posted, Reject, Rerun, Settle
from agentfsm.core.machine import State
from agentfsm.core.messages import AgentCost, ErrorType, Outcome, ToolCall, ToolResult, Usage, clean
from agentfsm.core.run import UNDECIDED, OpenCall, Phase
from agentfsm.engine import render
from agentfsm.engine.arguments import check_object, object_text, repair
from agentfsm.engine.builtin import builtin
from agentfsm.engine.context import RunContext, ToolKind
from agentfsm.engine.dispatch import End, Host, failed
from agentfsm.engine.drive import Drive
from agentfsm.engine.early import Attempt, EarlyCalls
from agentfsm.engine.engine import Engine
from agentfsm.engine.family import Parent, child_id
from agentfsm.engine.journal import load
from agentfsm.engine.queue import ToolQueue
from agentfsm.engine.stream import AgentEvent, ToolEvent
from agentfsm.engine.tools import Arguments, Bound, Tool
from agentfsm.ports import ProposedCall, Store
from agentfsm.tally import BYTES, estimated_tokens

if TYPE_CHECKING:
    from agentfsm.core.run import Run
    from agentfsm.engine.journal import Journal
    from agentfsm.engine.registry import ToolRegistry

DESCRIPTION_CHARS: Final = 2_000
# Of what a call will do, in the words of its tool: a sentence, not the whole of a letter.
MALFORMED_CHARS: Final = 2_000
# Of arguments that are no JSON object, kept for the record and shown to the model.
_NOT_IN_NAMES: Final = re.compile(r"[^a-zA-Z0-9_-]")


async def act(engine: Engine, drive: Drive, effect: RunTools | Wait) -> None:
    """Run what may run; where nothing may and calls are open, leave the run as it is: it waits for a person."""
    entries, asking, intended = drive.journal.run.open, engine.registry.asking, Phase.INTENDED
    calls = effect.calls if isinstance(effect, RunTools) else ()
    drive.unfinished = len(entries)
    if [each for each in entries if each.phase is not intended or each.call.name in asking]:
        await _decide(engine, drive)
        calls = _ready(drive)
        drive.unfinished = len([each for each in drive.journal.run.open if each.phase is not Phase.FINISHED])
    if not drive.unfinished:
        drive.journal.commit(e.ToolsReturned())
    elif calls:
        await drive.queue.execute_all(calls)
    elif drive.owes_drained:
        await drive.queue.tell_drained()
    drive.owes_drained = False


def _ready(drive: Drive) -> tuple[ToolCall, ...]:
    """Return the calls that may run now: those before the first one that still needs a decision."""
    ready: list[ToolCall] = []
    for entry in drive.journal.run.open:
        call_id = entry.call.id
        if entry.phase in UNDECIDED and call_id not in drive.granted and call_id not in drive.woken:
            break
        if entry.phase is not Phase.FINISHED:
            row = drive.granted.get(call_id)
            ready.append(entry.call if row is None else _as_approved(entry.call, row))
    return tuple(ready)


def _as_approved(call: ToolCall, row: Posted) -> ToolCall:
    """Return the call as a person let it run: with other arguments, where they changed them."""
    edited = row.item.arguments if isinstance(row.item, Approve) else None
    return call if edited is None else attrs.evolve(call, arguments=edited)


async def _decide(engine: Engine, drive: Drive) -> None:
    """Commit what is to be said of open calls before any runs: approvals to ask, decisions taken, calls lost."""
    rows: dict[str, Posted] = {}
    if any(entry.phase in UNDECIDED for entry in drive.journal.run.open):
        posted = await drive.journal.rows()
        rows = {row.item.call_id: row for row in posted if not isinstance(row.item, Input | Cancel)}
    facts: list[e.Event] = []
    taken: list[int] = []
    for entry in drive.journal.run.open:
        row = rows.get(entry.call.id)
        if entry.phase is Phase.PAUSED:
            await _look_after(engine, drive, entry)
        elif row is not None and isinstance(row.item, Approve | Rerun):
            drive.granted[entry.call.id] = row  # spent in the very append that marks the call as started
        elif (fact := _fact(engine, drive, entry, row)) is not None:
            facts.append(fact)
            taken += [row.number] if row is not None else []
    if facts:
        drive.journal.commit(*facts, taken=taken)


async def _look_after(engine: Engine, drive: Drive, entry: OpenCall) -> None:
    """Wake a paused call when what its agent waits for first was decided, or is due; once for each thing waited for."""
    call_id = entry.call.id
    first = {item.run_id: item for item in reversed(entry.waits)}
    drive.woken.discard(call_id)
    if drive.tried.get(call_id) != entry.waits and any(
        [await _may_go_on(engine, drive, each) for each in first.values()]
    ):
        drive.tried[call_id] = entry.waits
        drive.woken.add(call_id)


async def _may_go_on(engine: Engine, drive: Drive, item: Pending) -> bool:
    if item.expires_at is not None and engine.clock.now() >= item.expires_at:
        return True
    store = drive.journal.store
    if item not in (await load(store, item.run_id)).pending:
        return True  # somebody has driven it on
    rows = [row.item for row in await store.inbox(item.run_id)]
    return any(
        isinstance(each, Cancel) or (not isinstance(each, Input) and each.call_id == item.call_id) for each in rows
    )


def _fact(engine: Engine, drive: Drive, entry: OpenCall, row: Posted | None) -> e.Event | None:
    """Return what is to be recorded of an open call before any call runs, if anything."""
    call, tool = entry.call, None if entry.call.invented else engine.registry.get(entry.call.name)
    now = engine.clock.now()
    match entry.phase, row.item if row is not None else None:
        case Phase.INTENDED, _ if tool is not None and tool.requires_approval is not False:
            return _asked(engine, drive, tool, call)
        case Phase.RUNNING, _ if tool is None or not tool.repeatable:
            return e.ToolLost(call_id=call.id)
        case Phase.ASKED, Reject(by=by, message=message):
            return e.ToolFinished(result=_rejected(call, message), by=by)
        case Phase.ASKED, None if entry.expires_at is not None and now >= entry.expires_at:
            return e.ToolFinished(result=_rejected(call, "nobody answered in time"))
        case Phase.LOST, Settle(by=by, outcome=outcome, content=content):
            return e.ToolFinished(result=_decided(call, outcome, content), by=by)
    return None


def _asked(engine: Engine, drive: Drive, tool: Tool[..., Any], call: ToolCall) -> e.ApprovalAsked | None:
    """Return the question to a person; None where none is needed, or the call will not run anyway."""
    if call.malformed is not None or absence(engine, drive, tool) is not None:
        return None
    try:
        bound = tool.bound(call.arguments)
    except ArgumentsError:
        return None
    if barred(engine, drive, tool, bound) is not None:
        return None
    arguments = tool.arguments(bound)
    if not _needs_approval(tool, arguments):
        return None
    expires_at = engine.clock.now() + tool.approval_expires_s
    return e.ApprovalAsked(call_id=call.id, expires_at=expires_at, description=_described(tool, arguments))


def absence(engine: Engine, drive: Drive, tool: Tool[..., Any]) -> End | None:
    """Say why no call of a tool can run, whatever its arguments: withdrawn, not there now, or never permitted."""
    run, permissions = drive.journal.run, engine.permissions
    if tool.name in run.disabled:
        return End(Outcome.SKIPPED, render.withdrawn_text(tool.name), ErrorType.WITHDRAWN)
    if not is_enabled(tool, drive):
        return End(Outcome.SKIPPED, render.absent_text(tool.name), ErrorType.WITHDRAWN)
    if permissions is None or permissions.offers(tool, run.header.roles):
        return None
    reason = permissions.refusal(tool, run.header.roles, Arguments()) or f"{tool.name} is not permitted in this run"
    return failed(render.not_permitted_text(reason), ErrorType.NOT_PERMITTED)


def barred(engine: Engine, drive: Drive, tool: Tool[..., Any], bound: Bound) -> End | None:
    """Say that nobody could let a call with these arguments run."""
    if engine.permissions is None:
        return None
    reason = engine.permissions.refusal(tool, drive.journal.run.header.roles, tool.arguments(bound))
    return None if reason is None else failed(render.not_permitted_text(reason), ErrorType.NOT_PERMITTED)


def _needs_approval(tool: Tool[..., Any], arguments: Arguments) -> bool:
    if isinstance(tool.requires_approval, bool):
        return tool.requires_approval
    try:
        return bool(tool.requires_approval(arguments))
    except Exception:  # noqa: BLE001  what cannot say that nobody need be asked has not said it
        return True


def _described(tool: Tool[..., Any], arguments: Arguments) -> str:
    if tool.describe is None:
        return ""
    try:
        return clean(str(tool.describe(arguments))[:DESCRIPTION_CHARS])
    except Exception as error:  # noqa: BLE001  the person still sees the tool and its arguments
        return f"(its description failed: {render.describe(error)})"


def _rejected(call: ToolCall, message: str) -> ToolResult:
    content = f"not run: a person rejected it{f' ({message})' if message else ''}. Do not try it again unasked."
    return _decided(call, Outcome.REJECTED, content)


def _decided(call: ToolCall, outcome: Outcome, content: str) -> ToolResult:
    """Return the result of a call that a person has decided."""
    content = clean(content)
    return ToolResult(call_id=call.id, tool=call.name, outcome=outcome, content=content, index=_place_of(call))


def _place_of(call: ToolCall) -> int:
    """Return the call's place in the reply."""
    return int(call.id.rpartition(".")[2])


async def note_children(engine: Engine, drive: Drive) -> None:
    """Put on the budget what agents below have spent whose calls are open, from their own journals."""
    journal, spent = drive.journal, {}
    for entry in journal.run.open:
        tool = engine.registry.get(entry.call.name)
        if entry.phase is Phase.FINISHED or tool is None or tool.kind is not ToolKind.AGENT:
            continue
        run_id = child_id(journal.run.id, entry.call.id)
        if (usage := await _usage_below(journal.store, run_id)) is not None:
            spent[run_id] = usage.tokens, usage.cost_usd or 0.0
    drive.budget.open(spent)


async def _usage_below(store: Store, run_id: str) -> Usage | None:
    """Return what a run and the open calls of agents below it have spent; None where there is no such run."""
    try:
        run = await load(store, run_id)
    except RunNotFoundError:
        return None
    usage = run.usage
    for entry in run.open:
        if entry.phase is not Phase.FINISHED:  # else it is in the usage
            usage += await _usage_below(store, child_id(run_id, entry.call.id)) or Usage()
    return usage


async def end_children(engine: Engine, drive: Drive) -> list[e.ToolFinished]:
    """End the agents at work for a run that is about to end, and return what they did as results of their calls."""
    journal, results = drive.journal, []
    for entry in journal.run.open:
        tool = engine.registry.get(entry.call.name)
        if tool is None and entry.phase is Phase.PAUSED:
            await _leave_word(drive, entry)
        if tool is None or tool.end is None or entry.phase is Phase.FINISHED:
            continue
        try:
            ended = await tool.end(journal.store, engine.clock, child_id(journal.run.id, entry.call.id))
        except RunNotFoundError:
            continue  # it never began
        except AgentError as error:
            journal.log.warning("child_not_ended", call=entry.call.id, error=type(error).__name__)
            continue
        child = None if ended.child is None else _counted(drive, ended.child)
        result = attrs.evolve(_decided(entry.call, ended.outcome, ended.content), child=child)
        results.append(e.ToolFinished(result=result))
    return results


async def _leave_word(drive: Drive, entry: OpenCall) -> None:
    """Tell waiting agents that their caller has ended, where it has ended without the tools that drive them."""
    journal = drive.journal
    for run_id in {child_id(journal.run.id, entry.call.id), *(item.run_id for item in entry.waits)}:
        try:
            await journal.store.post(run_id, "cancel", Cancel(by="its caller"))
        except StoreError as error:
            journal.log.warning("child_not_told", child=run_id, error=type(error).__name__)


def _counted(drive: Drive, child: AgentCost) -> AgentCost:
    """Return what a child cost as it enters the run's usage: without money, where the run counts none of its own."""
    if drive.budget.counts_money or child.usage.cost_usd is None:
        return child
    return attrs.evolve(child, usage=attrs.evolve(child.usage, cost_usd=None))


@attrs.define(eq=False)
class RunHost(Host):
    """Serves the calls of a run: what happens to each is committed, and what may not run is refused."""

    engine: Engine
    drive: Drive
    held: list[ToolResult] | None = None
    # Results of calls that started before the reply was in the journal; None where they are committed as they come.

    def find(self, registry: ToolRegistry, name: str) -> Tool[..., Any] | None:
        """Return the tool of that name: the agent's, or one that the engine brings along."""
        return registry.get(name) or builtin(self.drive.journal.run, name)

    def names(self, registry: ToolRegistry) -> Sequence[str]:
        """Return the names of the tools that the run has and may use."""
        return [tool.name for tool in registry if self.absence(tool) is None]

    def position(self, call: ToolCall, index: int) -> int:  # noqa: ARG002  of those that run now
        """Return the call's place in the reply: some of its calls may have run before."""
        return _place_of(call)

    def context(self, call: ToolCall, tool: Tool[..., Any], deadline: float) -> RunContext[Any]:
        """Make what a tool may know of its call."""
        run = self.drive.journal.run
        attempts = [entry.attempts for entry in run.open if entry.call.id == call.id]
        return attrs.evolve(
            context_of(self.drive),
            call_id=call.id,
            idempotency_key=call.key,
            attempt=max([1, *attempts]),
            deadline=deadline,
            kept=self._kept,
            parent=self._parent() if tool.kind is ToolKind.AGENT else None,
        )

    def _kept(self, call_id: str) -> str | None:
        results = (m for m in self.drive.journal.run.messages if isinstance(m, ToolResult))
        return next((result.content for result in results if result.call_id == call_id), None)

    def _parent(self) -> Parent:
        journal, drive = self.drive.journal, self.drive
        return Parent(
            run=journal.run,
            store=journal.store,
            clock=journal.clock,
            budget=drive.budget,
            depth_limit=self.engine.limits.depth,
        )

    def absence(self, tool: Tool[..., Any]) -> End | None:
        """Say why no call of a tool can run, whatever its arguments, or None."""
        return absence(self.engine, self.drive, tool)

    def refusal(self, call: ToolCall, tool: Tool[..., Any], bound: Bound) -> End | None:
        """Say why a valid call may not run: not with these arguments, or not approved."""
        return barred(self.engine, self.drive, tool, bound) or self._unapproved(call, tool, bound)

    def _unapproved(self, call: ToolCall, tool: Tool[..., Any], bound: Bound) -> End | None:
        """Refuse a call that could not run when approvals were asked for, and now could."""
        if tool.requires_approval is False or call.id in self.drive.granted:
            return None
        if self.drive.journal.run.entry(call.id).phase is not Phase.INTENDED:
            return None
        if not _needs_approval(tool, tool.arguments(bound)):
            return None
        text = f"{call.name} needs a person's yes, which nobody was asked for: call it again to have them asked."
        return failed(text, ErrorType.BLOCKED, retryable=True)

    async def starting(self, call: ToolCall, tool: Tool[..., Any]) -> None:
        """Record that a call is about to run; what may have an effect does not start before that is durable."""
        if tool.read_only and tool.requires_approval is False:
            return
        journal = self.drive.journal
        facts, taken = self._spent(call.id)
        if not tool.read_only:
            facts.append(e.ToolStarted(call_id=call.id, repeatable=tool.repeatable))
        if facts:
            journal.commit(*facts, taken=taken)
        if not tool.read_only:
            await journal.flush()

    def _spent(self, call_id: str) -> tuple[list[e.Event], list[int]]:
        """Spend the decision that lets a call run: return what is to be recorded of it, and its row in the inbox."""
        row = self.drive.granted.pop(call_id, None)
        if row is None or not isinstance(row.item, Approve | Rerun):
            return [], []
        edited = row.item.arguments if isinstance(row.item, Approve) else None
        return [e.ApprovalGiven(call_id=call_id, by=row.item.by, arguments=edited)], [row.number]

    def finished(self, result: ToolResult) -> None:
        """Record a call's result, as it comes; the last one ends the turn, in the same append."""
        if self.held is not None:
            self.held.append(result)
            return
        journal, drive = self.drive.journal, self.drive
        drive.unfinished -= 1
        if result.child is not None:
            drive.budget.returned(result.child.run_id)
            result = attrs.evolve(result, child=_counted(drive, result.child))
        finished = e.ToolFinished(result=result)
        ending = () if drive.unfinished else (e.ToolsReturned(),)
        facts, taken = self._spent(result.call_id)  # where it was let run, and could not
        journal.commit(*facts, finished, *ending, taken=taken)
        if journal.log.is_read:
            tool = (
                result.tool if result.tool in drive.queue.registry else "(unknown)"
            )  # what a model invents is no fact
            outcome, wall_s = result.outcome.value, result.duration_s
            journal.log.info("call", call=result.call_id, tool=tool, outcome=outcome, wall_s=wall_s)

    def release(self) -> None:
        """Record the results that were held back: the reply that asked for them is in the journal."""
        held, self.held = self.held or [], None
        for result in held:
            self.finished(result)

    def paused(self, call: ToolCall, pending: Sequence[Pending]) -> bool:
        """Record what a call waits for."""
        self.drive.woken.discard(call.id)
        self.drive.journal.commit(e.ToolPaused(call_id=call.id, pending=tuple(pending)))
        return True

    def count(self, text: str) -> int:
        """Return the tokens of a text, exactly where a vocabulary is loaded."""
        counter = self.drive.tally.counter
        return estimated_tokens(text) if counter is BYTES else counter.count(text)


def early_calls(engine: Engine, drive: Drive) -> EarlyCalls:
    """Return what starts read-only calls while a reply streams; their results wait for the reply to be journalled."""

    def prepare() -> Attempt:
        host = RunHost(engine, drive, held=[])
        return Attempt(attrs.evolve(drive.queue, host=host), host.release)

    return EarlyCalls(prepare, mint=lambda index, call: mint(drive, index, call))


def mint(drive: Drive, index: int, proposed: ProposedCall) -> ToolCall:
    """Give a call of the reply its id and key, mend its arguments if need be, and set aside what is no JSON object."""
    run = drive.journal.run
    call_id = f"t{run.turns_before + run.turn + 1}.{index}"
    known = drive.queue.host.find(drive.queue.registry, proposed.name) is not None
    arguments = object_text(proposed.arguments)
    flaw, mended = check_object(arguments), None
    if flaw is not None:
        mended = repair(proposed.arguments)
    return ToolCall(
        id=call_id,
        name=proposed.name if known else _legal_name(proposed.name),
        invented=not known,
        arguments=arguments if flaw is None else mended or "{}",
        key=f"{run.id}:{call_id}",
        provider_id=clean(proposed.id),
        malformed=None if flaw is None or mended else f"{flaw}; it began: {clean(arguments[:MALFORMED_CHARS])}",
        repaired=clean(arguments[:MALFORMED_CHARS]) if mended else None,
    )


def _legal_name(name: str) -> str:
    """Return an invented name in the letters that a provider takes back."""
    return _NOT_IN_NAMES.sub("_", name)[:64] or "unnamed"


def context_of(drive: Drive) -> RunContext[Any]:
    """Return what a tool may know of the run, apart from any call."""
    run = drive.journal.run
    return RunContext(
        deps=drive.deps,
        run_id=run.id,
        turn=turn_of(run),
        user=run.header.user,
        roles=run.header.roles,
        metadata=run.metadata,
    )


def turn_of(run: Run) -> int:
    """Return the turn that a call which runs now belongs to; while the reply streams it is not in the journal yet."""
    return run.turn + 1 if run.state is State.THINK else run.turn


def is_enabled(tool: Tool[..., Any], drive: Drive) -> bool:
    """Whether a tool is there now; one that cannot say so is not."""
    if isinstance(tool.enabled, bool):
        return tool.enabled
    try:
        return bool(tool.enabled(context_of(drive)))
    except Exception as error:  # noqa: BLE001  it has not said yes
        drive.journal.log.warning("tool_enabled_failed", tool=tool.name, error=type(error).__name__)
        return False


def queue_of(engine: Engine, drive: Drive) -> ToolQueue:
    """Return the queue of a driving call, which records each call's start and end in the journal."""
    journal, limits = drive.journal, engine.limits
    serial = engine.settings.parallel_tool_calls is False
    return ToolQueue(
        engine.registry,
        limit=1 if serial else limits.parallel,
        timeout_s=limits.tool_timeout_s,
        clock=engine.clock,
        owner=journal.run.id,
        host=RunHost(engine, drive),
        watch=_tool_listener(journal) if journal.listen is not None else None,
        retries_per_tool=limits.retries_per_tool,
        retries_per_run=limits.retries_per_run,
        retries=dict(journal.run.retries),
    )


def _tool_listener(journal: Journal) -> Callable[[ToolEvent | AgentEvent], None]:
    """Return a listener that adds the run and the turn, which the queue does not know."""

    def listen(event: ToolEvent | AgentEvent) -> None:
        if journal.listen is None:
            return
        if isinstance(event, ToolEvent):
            event = attrs.evolve(event, run_id=journal.run.id, turn=turn_of(journal.run))
        journal.listen(event)

    return listen
