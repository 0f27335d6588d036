"""Compare an open run with the program that would continue it, without a model, a tool, a lease or an append.

Each difference is found by the same function that decides when the run is executed: the hashes of a replay, the
obstacles of a program, the start rules and the digests of approvals.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

import attrs

from agentfsm.core import events as e
from agentfsm.core.calls import Phase, stricter_policy
from agentfsm.core.errors import ArgumentsError, MisuseError
from agentfsm.core.events import GuardVerdict
from agentfsm.core.inbox import Approve
from agentfsm.core.labels import ToolKind
from agentfsm.core.plans import find_step_number, has_references
from agentfsm.core.run import begin_run
from agentfsm.core.value import Value
from agentfsm.engine.deciders.approvals import digest_call, has_changed, needs_approval
from agentfsm.engine.deciders.started_calls import find_other_kind, has_other_parameters
from agentfsm.engine.execution.tool_access import build_run_context
from agentfsm.engine.program_check import (
    find_changes,
    is_new_step,
    list_inner_agents,
    list_obstacles,
    select_names,
)
from agentfsm.engine.replay import replay_stored
from agentfsm.tools.builtin import find_builtin
from agentfsm.tools.executing_call import reach_nothing

if TYPE_CHECKING:
    from agentfsm.core.calls import OpenCall
    from agentfsm.core.messages import ToolCall
    from agentfsm.core.plans import PlanStep
    from agentfsm.core.run import Run
    from agentfsm.engine.execution.config import EngineConfig
    from agentfsm.engine.program_check import Obstacle
    from agentfsm.engine.replay import Replay
    from agentfsm.ports.store import Store
    from agentfsm.ports.stored import StoredRun
    from agentfsm.tools.tool import Tool


class UpgradeVerdict(StrEnum):
    """What becomes of an open run under another program, the worst last."""

    SAME = "same"
    DIFFERS = "differs"
    ATTENTION = "attention"
    REFUSED = "refused"


# The verdict by kind of change; docs/releases.md describes them.
CHANGES: Final[Mapping[str, UpgradeVerdict]] = {
    "request": UpgradeVerdict.DIFFERS,
    "agent": UpgradeVerdict.DIFFERS,
    "tool": UpgradeVerdict.DIFFERS,
    "replaced": UpgradeVerdict.DIFFERS,
    "looser": UpgradeVerdict.DIFFERS,
    "unasked": UpgradeVerdict.DIFFERS,
    "arguments": UpgradeVerdict.ATTENTION,
    "approval": UpgradeVerdict.ATTENTION,
    "permission": UpgradeVerdict.ATTENTION,
    "kind": UpgradeVerdict.ATTENTION,
    "stricter": UpgradeVerdict.ATTENTION,
    "parameters": UpgradeVerdict.ATTENTION,
    "step": UpgradeVerdict.ATTENTION,
    "compensation": UpgradeVerdict.ATTENTION,
    "tool_gone": UpgradeVerdict.REFUSED,
    "plan_gone": UpgradeVerdict.REFUSED,
    "agent_gone": UpgradeVerdict.REFUSED,
    "program": UpgradeVerdict.REFUSED,
    "format": UpgradeVerdict.REFUSED,
    "unreadable": UpgradeVerdict.REFUSED,
}
ORDER: Final = tuple(UpgradeVerdict)
"""The verdicts, the worst last."""


@attrs.frozen(kw_only=True)
class UpgradeChange(Value):
    """A difference that another program makes to an open run."""

    kind: str
    """Kind of the difference, a key of the table in docs/releases.md, such as "request" or "tool_gone"."""

    text: str
    """The difference, and what follows from it."""

    run_id: str
    """Id of the run that it concerns: the open run, or that of a sub-agent below it."""

    call_id: str = ""
    """Id of the call; empty if it concerns no call."""

    version: int = 0
    """Version of the first reply whose request would differ; 0 if it concerns no request."""

    @property
    def verdict(self) -> UpgradeVerdict:
        """What becomes of the run."""
        return CHANGES[self.kind]


@attrs.frozen(kw_only=True)
class RunUpgrade(Value):
    """An open run under another program."""

    id: str
    """Id of the run."""

    release: str = ""
    """Release of a roll-out that the run belongs to; empty if there is none. Its workers go on to execute it."""

    checked: int = 0
    """Number of requests that were compared, those of sub-agents included."""

    changes: tuple[UpgradeChange, ...] = ()
    """The differences; none if the run goes on as it would have."""

    @property
    def verdict(self) -> UpgradeVerdict:
        """The worst of the verdicts of the changes."""
        return max([each.verdict for each in self.changes], key=ORDER.index, default=UpgradeVerdict.SAME)


async def compare_run(config: EngineConfig, store: Store, run_id: str, deps: Any = None) -> RunUpgrade:
    """Compare an open run, and the open runs below it, with the program that would continue them.

    Args:
        config: Configuration of the agent that would continue it.
        store: Store of the run.
        run_id: The id of the run.
        deps: Dependencies for the tools' `enabled` functions, which decide the tools of a request.

    Raises:
        RunNotFoundError: if the store has no such run.
        StoreError: if a journal cannot be read.
    """
    stored = await store.read(run_id)
    with reach_nothing(stored.header):
        return await _compare_stored(config, store, stored, deps)


async def _compare_stored(config: EngineConfig, store: Store, stored: StoredRun, deps: Any) -> RunUpgrade:
    header, run_id = stored.header, stored.header.id
    if header.instructions is None and config.resolve_deferred is not None:
        context = build_run_context(begin_run(header, None), deps)
        config = config.for_run(await config.resolve_deferred(header, context))
    replayed = await replay_stored(config, store, stored, deps)
    if replayed.run.is_over:
        return RunUpgrade(id=run_id, release=header.release, checked=replayed.checked)
    config = config.for_run(header)
    changes = list(_compare_agent(config, replayed, stored.events))
    run = replayed.run
    try:
        names = select_names(config, run, {})
    except MisuseError as error:
        names = {}
        changes.append(_build_change(run, "program", str(error)))
    if names:
        run = run.apply(e.Resumed(renamed=names))
        changes += [
            _build_change(run, "replaced", f"open calls and steps of {old!r} go on as {new!r}")
            for old, new in names.items()
        ]
    changes += [_describe_obstacle(run, each) for each in list_obstacles(config, run)]
    is_asked = any(entry.phase is Phase.AWAITING_APPROVAL for entry in run.open)
    posts = await store.inbox(run_id) if is_asked else ()
    approved = {row.item.call_id: row.item for row in posts if isinstance(row.item, Approve)}
    for entry in run.open:
        if entry.phase is not Phase.FINISHED and not entry.call.invented:
            changes += _compare_call(config, run, entry, approved)
    changes += _compare_approvals(config, run, stored.events)
    changes += _compare_steps(config, run)
    checked = replayed.checked
    for inner, call_id in list_inner_agents(config, run):
        if (found := await inner.find_child(store, run_id, call_id)) is not None:
            child_config, child = found
            below = await compare_run(child_config, store, child.id, deps)
            changes += below.changes
            checked += below.checked
    return RunUpgrade(id=run_id, release=header.release, checked=checked, changes=tuple(changes))


def _build_change(run: Run[Any], kind: str, text: str, call_id: str = "", *, version: int = 0) -> UpgradeChange:
    return UpgradeChange(kind=kind, text=text, run_id=run.id, call_id=call_id, version=version)


def _compare_agent(config: EngineConfig, replayed: Replay, events: Sequence[e.Event]) -> Iterator[UpgradeChange]:
    """Yield the difference of the requests, or of the agent where no request shows it.

    Requests before the newest change of the agent were sent by others, so they are left out.
    """
    run = replayed.run
    before = [n for n, each in enumerate(events, 1) if isinstance(each, e.Resumed) and each.fingerprint is not None]
    since = before[-1] if before else 0
    first = next((each for each in replayed.divergences if each.version > since), None)
    _, changes = find_changes(config, run)
    if first is not None:
        text = ", ".join(changes or first.what)
        yield _build_change(run, "request", f"requests differ: {text}", version=first.version)
    elif changes:
        yield _build_change(run, "agent", ", ".join(changes))


def _describe_obstacle(run: Run[Any], obstacle: Obstacle) -> UpgradeChange:
    kind, name, call_id = obstacle.kind, obstacle.tool, obstacle.call_id
    match kind:
        case "program":
            return _build_change(run, kind, f"the run {obstacle.text}")
        case "plan":
            return _build_change(run, "plan_gone", f"the tool {name!r} of a plan under review is gone", call_id)
        case "background":
            return _build_change(run, "agent_gone", f"the agent {name!r} of a background run is gone", call_id)
    if run.open_call(call_id).kind is ToolKind.AGENT:
        return _build_change(run, "agent_gone", f"the agent {name!r} of an open call is gone", call_id)
    return _build_change(run, "tool_gone", f"the tool {name!r} of an open call is gone", call_id)


def _compare_call(
    config: EngineConfig, run: Run[Any], entry: OpenCall, approved: Mapping[str, Approve]
) -> Iterator[UpgradeChange]:
    """Yield the differences that the tool of an open call makes to it."""
    call, name = entry.call, entry.call.name
    tool = config.find_tool(name) or find_builtin(run, name)
    if tool is None:
        if is_new_step(run, entry) and not entry.lacks_tool:
            yield _build_change(run, "step", f"the step {name!r} is gone: it waits for a person", call.id)
        return
    is_decided = call.malformed is not None or entry.phase is Phase.OUTCOME_UNKNOWN  # it is not run by itself
    if is_decided or (entry.phase is Phase.PAUSED and tool.waits_for is not None):  # or its result comes from outside
        return
    edited = None if (approval := approved.get(call.id)) is None else approval.arguments
    fate = "a person settles it" if entry.may_have_acted else "it is not run, and the model is told"
    if find_other_kind(run, entry, tool):
        was, now = ("agent", "function") if entry.kind is ToolKind.AGENT else ("function", "agent")
        text = f"{name!r}, of a call that had started, was {was} and is {now} now: a person settles it"
        yield _build_change(run, "kind", text, call.id)
    elif not _fits(tool, call.arguments):
        text = f"the arguments of an open call do not fit {name!r} any more: {fate}"
        yield _build_change(run, "arguments", text, call.id)
    elif (is_admitted := _is_admitted(run, entry)) and not _is_permitted(config, run, tool, call):
        text = f"an open call of {name!r} is not permitted any more: {fate}"
        yield _build_change(run, "permission", text, call.id)
    elif edited is not None and not _fits(tool, edited):
        text = f"the arguments of a call, as a person has edited them, do not fit {name!r}: the person is asked again"
        yield _build_change(run, "approval", text, call.id)
    elif entry.phase is Phase.AWAITING_APPROVAL and has_changed(config, entry):
        fate = "" if approval is None else "the approval does not hold, and "
        text = f"a person would be shown something else about a call of {name!r}: {fate}the person is asked again"
        yield _build_change(run, "approval", text, call.id)
    elif is_admitted and _is_unapproved(config, entry, tool):
        fate = "a person settles it" if entry.may_have_acted else "a person is asked"
        yield _build_change(run, "approval", f"an open call of {name!r} needs an approval now: {fate}", call.id)
    elif entry.phase is Phase.RUNNING:
        yield from _compare_policy(run, entry, tool)
    elif (was_hash := _find_tool_hash(run, name)) and was_hash != config.fingerprint.tools.get(name):
        yield _build_change(run, "tool", f"{name!r} of an open call has changed, and its arguments fit", call.id)


def _is_admitted(run: Run[Any], entry: OpenCall) -> bool:
    """Return whether a call has passed the checks at its start, or a person is asked about it.

    The calls of a reply are admitted together, so one beside others that have started was admitted.
    """
    if entry.phase is not Phase.INTENDED:
        return True
    return run.reply is not None and any(each.phase is not Phase.INTENDED for each in run.open)


def _is_permitted(config: EngineConfig, run: Run[Any], tool: Tool[..., Any], call: ToolCall) -> bool:
    """Return whether the tool is available, as far as that does not depend on a function, and permitted."""
    arguments, permissions = tool.to_namespace(tool.bind(call.arguments)), config.permissions
    if tool.enabled is False:
        return False
    return permissions is None or permissions.refusal_reason(tool, run.header.roles, arguments) is None


def _is_unapproved(config: EngineConfig, entry: OpenCall, tool: Tool[..., Any]) -> bool:
    """Return whether a call would start only with an approval that it lacks, and about which no person is asked."""
    if tool.waits_for is not None or not tool.is_interactive or entry.phase is Phase.AWAITING_APPROVAL:
        return False
    if not needs_approval(tool, tool.to_namespace(tool.bind(entry.call.arguments))):
        return False
    return entry.approved != digest_call(config, tool, entry.call, entry.guarded)


def _fits(tool: Tool[..., Any], arguments: str) -> bool:
    try:
        tool.bind(arguments)
    except ArgumentsError:
        return False
    return True


def _find_tool_hash(run: Run[Any], name: str) -> str:
    return (run.fingerprint or run.header.fingerprint).tools.get(name, "")


def _compare_policy(run: Run[Any], entry: OpenCall, tool: Tool[..., Any]) -> Iterator[UpgradeChange]:
    """Yield the difference in the fate of a call that was cut off. The stricter of two policies counts."""
    recorded = entry.on_unknown or "rerun"
    present = tool.on_unknown if isinstance(tool.on_unknown, str) else "check"
    strictest, call_id = stricter_policy(recorded, present), entry.call.id
    text = f"on_unknown of {tool.name!r}, whose call had started, was {recorded!r} and is {present!r}"
    if strictest == "rerun" and has_other_parameters(entry, tool):
        text = f"the parameters of {tool.name!r}, whose call had started, have changed: a person settles it"
        yield _build_change(run, "parameters", text, call_id)
    elif strictest != recorded:
        yield _build_change(run, "stricter", f"{text} now, which counts", call_id)
    elif present != recorded:
        yield _build_change(run, "looser", f"{text} now: that of the start counts", call_id)


def _compare_approvals(config: EngineConfig, run: Run[Any], events: Sequence[e.Event]) -> Iterator[UpgradeChange]:
    """Yield the tools of which a person was asked about a call, and is not asked about an equal one any more."""
    calls: dict[str, ToolCall] = {}
    by_guard, told = set[str](), set[str]()
    for event in events:
        match event:
            case e.ToolsChosen():
                calls |= {call.id: call for call in event.message.calls}
            case e.StepsReady():
                calls |= {call.id: call for call in event.calls}
            case e.Guarded(verdict=GuardVerdict.ASK):
                by_guard.add(event.call_id)
            case e.ApprovalAsked(call_id=call_id) if call_id in calls and call_id not in by_guard:
                call, tool = calls[call_id], config.find_tool(calls[call_id].name)
                if tool is None or tool.name in told or not _fits(tool, call.arguments):
                    continue
                if not needs_approval(tool, tool.to_namespace(tool.bind(call.arguments))):
                    told.add(tool.name)
                    text = f"a person was asked about a call of {tool.name!r}, and would not be asked about it now"
                    yield _build_change(run, "unasked", text, call_id)
            case _:
                pass


def _compare_steps(config: EngineConfig, run: Run[Any]) -> Iterator[UpgradeChange]:
    """Yield the differences of steps that have not started, and of compensations."""
    if run.plan is None or run.plan.plan is None:
        return
    started = {find_step_number(entry.call.id) for entry in (*run.plan.closed, *run.open)}
    for step in run.plan.plan.steps:
        undo = step.compensation
        if undo is not None and config.find_tool(undo.tool) is None:
            text = f"{undo.tool!r} is gone, which undoes {step.tool!r}: if the flow fails, a person is asked"
            yield _build_change(run, "compensation", text)
        if step.id in started:
            continue
        names = (step.tool, *step.tools) if step.tool else step.tools
        if gone := [name for name in names if config.find_tool(name) is None]:
            yield _build_change(run, "step", f"the step {gone[0]!r} is gone: it waits for a person, or its program")
        elif (tool := config.find_tool(step.tool)) is not None and not _fits_step(tool, step):
            text = f"the arguments of a step do not fit {step.tool!r} any more: the step fails"
            yield _build_change(run, "arguments", text)


def _fits_step(tool: Tool[..., Any], step: PlanStep) -> bool:
    """Return whether the arguments fit; of those that are results, only the names are known."""
    if not has_references(dict(step.arguments)):
        return _fits(tool, json.dumps(step.arguments, ensure_ascii=False))
    required = tool.parameters.get("required")
    return set(required if isinstance(required, Sequence) else ()) <= step.arguments.keys()
