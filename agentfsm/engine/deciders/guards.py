"""Guards: they decide on open calls, and each decision is committed before the call starts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import dropwhile
from typing import TYPE_CHECKING, Any, TypeAlias

import attrs

from agentfsm.core import events as e
from agentfsm.core.calls import OpenCall, Phase
from agentfsm.core.errors import ArgumentsError
from agentfsm.core.events import GuardVerdict
from agentfsm.core.labels import NOT_SAID, Label, LabelSource
from agentfsm.core.messages import (
    AssistantMessage,
    ErrorType,
    MessageOrigin,
    Outcome,
    TextPart,
    ToolResult,
    UserMessage,
)
from agentfsm.core.recalled_items import read_recall_note
from agentfsm.core.reducers import add_counts
from agentfsm.engine.execution.forked_calls import ForkedCalls, find_line
from agentfsm.engine.execution.known_calls import may_differ, read_calls, view_calls
from agentfsm.engine.execution.tool_access import check_available, check_permitted
from agentfsm.ports.guards import GuardDecision, GuardedCall, KnownText, describe_guard
from agentfsm.ports.screening import ScreenedText
from agentfsm.tools.builtin import ASK_USER
from agentfsm.tools.queue.dispatch import CallOutcome, failed_outcome
from agentfsm.tools.queue.result_text import build_decided_result

if TYPE_CHECKING:
    from agentfsm.core.header import Header
    from agentfsm.core.messages import ToolCall
    from agentfsm.core.run import Run
    from agentfsm.engine.execution.config import EngineConfig
    from agentfsm.engine.execution.execution import Execution
    from agentfsm.engine.execution.open_calls import OpenCalls
    from agentfsm.ports.guards import CallGuard, ToolTraits
    from agentfsm.ports.screening import TextScreen
    from agentfsm.tools.schema.binding import BoundArguments
    from agentfsm.tools.tool import Tool

# Decision of a screen on the calls of all tools that it concerns.
Finding: TypeAlias = "tuple[TextScreen, GuardDecision]"
# Labels of the texts that rules look for data in.
_NONE = frozenset[Label]()
_USER_DATA = frozenset({Label.USER_DATA})
_UNTRUSTED = frozenset({Label.UNTRUSTED})


def find_guarded_tools(config: EngineConfig) -> frozenset[str]:
    """Return the names of the tools whose calls guards decide on."""
    return _find_names(config, "guarded", lambda guard, traits: guard.concerns(traits))


def find_counted_tools(config: EngineConfig) -> frozenset[str]:
    """Return the names of the tools whose calls guards count."""
    return _find_names(config, "counted", lambda guard, traits: guard.counts(traits))


def _list_concerned(config: EngineConfig, tool: Tool[..., Any]) -> tuple[CallGuard, ...]:
    """Return the guards that decide on calls of a tool."""
    key = config.registry.version, tool.name
    if key not in config.concerned_guards:
        config.concerned_guards[key] = tuple([guard for guard in config.guards if guard.concerns(tool.traits)])
    return config.concerned_guards[key]


def _find_names(config: EngineConfig, what: str, asks: Callable[[CallGuard, ToolTraits], bool]) -> frozenset[str]:
    key = what, config.registry.version  # tools may be registered later
    if key not in config.tool_names:
        names = [tool.name for tool in config.registry if any(asks(guard, tool.traits) for guard in config.guards)]
        config.tool_names[key] = frozenset(names)
    return config.tool_names[key]


def find_timed_tools(config: EngineConfig) -> frozenset[str]:
    """Return the names of the tools on whose calls guards decide by the calls before."""
    return _find_names(config, "timed", lambda guard, traits: guard.reads_calls() and guard.concerns(traits))


def list_secrets(config: EngineConfig) -> list[str]:
    """Return the texts that guards call secrets."""
    return [secret for guard in config.guards for secret in guard.list_secrets()]


def _list_screens(config: EngineConfig) -> list[TextScreen]:
    """Return the screens of the guards, which read the texts of a run."""
    return [screen for guard in config.guards for screen in getattr(guard, "screens", ())]


async def decide_on_calls(calls: OpenCalls, ready: Sequence[ToolCall]) -> Sequence[ToolCall]:
    """Commit the decisions of guards on the open calls."""
    execution = calls.execution
    if any(guard.reads_calls() for guard in execution.config.guards):
        await read_calls(execution)
    found = await _screen_texts(execution)
    is_first = not calls.has_decided
    counted = find_counted_tools(execution.config)
    if counted and any(entry.call.name in counted for entry in execution.journal.run.open):
        await _apply_quotas(calls, found, is_first=is_first)
    elif decisions := _guard_calls(execution, found, is_first=is_first):
        calls.record(*decisions)
        execution.budget.report_counted_calls()
    return ready


async def _apply_quotas(calls: OpenCalls, found: Sequence[Finding], *, is_first: bool) -> None:
    """Commit the decisions of guards that count calls, also those that other forks of the session make meanwhile."""
    execution, budget, journal = calls.execution, calls.execution.budget, calls.execution.journal
    if budget.tree.forked_calls is None:
        root = (budget.ancestors or (budget,))[-1].source.run.header
        budget.tree.forked_calls = ForkedCalls(journal.store, await find_line(journal.store, root))
    forked = budget.tree.forked_calls
    async with forked.lock:
        await forked.read()
        while decisions := _guard_calls(execution, found, is_first=is_first):
            before, after = journal.run.counted, journal.run.fold(decisions).counted
            added = {name: count - before.get(name, 0) for name, count in after.items()}
            if await forked.write(add_counts(budget.root_counted_calls, added)):
                calls.record(*decisions)
                budget.report_counted_calls()
                return
            await forked.read()


def admit_ready_steps(calls: OpenCalls, steps: Sequence[ToolCall]) -> Sequence[ToolCall]:
    """Commit the decisions of guards on steps that they allow, and return those; others are decided on later.

    Screens of texts, and quotas in a session with forks, decide only at the next step of the engine.
    """
    execution = calls.execution
    guarded, forked = find_guarded_tools(execution.config), execution.budget.tree.forked_calls
    free = [call for call in steps if call.name not in guarded]
    if len(free) == len(steps) or _list_screens(execution.config) or (forked is not None and forked.is_forked):
        return free
    counted, allowed = execution.budget.counted_calls, dict[str, e.Guarded]()
    for call in steps:
        verdicts = [(each.call_id, each.verdict) for each in allowed.values()]
        decided = decide_call(execution, call, counted, decided=verdicts) if call.name in guarded else None
        if decided is not None and decided.verdict is GuardVerdict.ALLOW:
            allowed[call.id] = decided
            counted = add_counts(counted, {call.name: 1}) if decided.counts else counted
    if allowed:
        calls.record(*allowed.values())
        execution.budget.report_counted_calls()
    return [call for call in steps if call.name not in guarded or call.id in allowed]


def check_start(calls: OpenCalls, call: ToolCall, _tool: Tool[..., Any], _bound: BoundArguments) -> CallOutcome | None:
    """Refuse a call that guards have refused or not decided on. Whether a person has approved it is checked later."""
    if call.name not in find_guarded_tools(calls.execution.config):
        return None
    entry = calls.find_entry(call)
    guarded = entry.guarded
    if guarded is None:
        text = f"{call.name} was not checked before, because it could not run then: call it again."
        return failed_outcome(text, ErrorType.BLOCKED, retryable=True)
    # No refusal may deny that a call ran which had started before; this execution has decided on it anew already.
    is_new = guarded.verdict is not GuardVerdict.REFUSE and not entry.attempts
    if is_new and call.name in find_timed_tools(calls.execution.config) and may_differ(calls.execution, guarded):
        now = _decide_by_history(calls.execution, call, guarded)
        if now is not None and now.verdict.strictness > guarded.verdict.strictness:
            calls.record(now)
            guarded = now
    if guarded.verdict is GuardVerdict.REFUSE:
        return failed_outcome(_format_refusal(guarded), ErrorType.NOT_PERMITTED)
    return None


def _decide_by_history(execution: Execution, call: ToolCall, before: e.Guarded) -> e.Guarded | None:
    """Return the decision of the guards that read the calls before, on a call that is about to start.

    Others that run at the same time may have been made since the first decision.
    """
    tool = execution.config.find_tool(call.name)
    asked = None if tool is None else _build_guarded_call(execution, tool, call, {}, before)
    if tool is None or asked is None:
        return None
    guards = [guard for guard in _list_concerned(execution.config, tool) if guard.reads_calls()]
    decisions = [each for guard in guards if (each := guard.decide(asked)) is not None]
    strictest = max(decisions, key=lambda each: each.verdict.strictness, default=_ALLOWED)
    counts = before.counts and strictest.verdict is GuardVerdict.REFUSE  # its result gives the place back
    return _build_event(call, strictest, digest=tool.digest_call(call), counts=counts)


def _guard_calls(execution: Execution, found: Sequence[Finding] = (), *, is_first: bool = False) -> tuple[e.Event, ...]:
    """Return the decisions of the guards on open calls without one, and their consequences.

    A call that is refused gets its result. A call that may have begun before there were guards, and that they do not
    allow, is handed to a person. A decision of an earlier execution is replaced if the guards are stricter now.

    Args:
        execution: The execution of the run.
        found: Decisions of screens, from the texts that the run has read.
        is_first: Whether these are the first decisions of this execution.
    """
    guarded, run = find_guarded_tools(execution.config), execution.journal.run
    events: list[e.Event] = []
    counted = execution.budget.counted_calls
    for entry in run.open:
        is_new = _is_undecided(execution, entry)
        if entry.call.name not in guarded or not (is_new or (is_first and _may_start_again(entry))):
            continue
        is_counted = entry.guarded is not None and entry.guarded.counts
        others = add_counts(counted, {entry.call.name: -1}) if is_counted else counted
        if is_counted and not is_new:
            others = {}  # it keeps its place
        known = (found, None) if is_new else ((), entry.guarded)
        verdicts = [(each.call_id, each.verdict) for each in events if isinstance(each, e.Guarded)]
        decided = decide_call(execution, entry.call, others, *known, decided=verdicts)
        if decided is None:  # it will be refused for another reason
            continue
        if not is_new and entry.guarded and decided.verdict.strictness <= entry.guarded.verdict.strictness:
            continue
        if is_counted and decided.verdict is GuardVerdict.REFUSE:
            decided = attrs.evolve(decided, counts=True)  # its result gives the place back
        events.append(decided)
        if decided.counts and not is_counted:
            counted = add_counts(counted, {entry.call.name: 1})
        has_not_started = not entry.attempts and (entry.phase in _NOT_STARTED or entry.lacks_tool)
        if decided.verdict is GuardVerdict.REFUSE and has_not_started:
            result = build_decided_result(entry, Outcome.FAILED, _format_refusal(decided))
            events.append(e.ToolFinished(result=attrs.evolve(result, error_type=ErrorType.NOT_PERMITTED)))
        elif decided.verdict is not GuardVerdict.ALLOW and entry.phase is Phase.RUNNING:
            reason = f"it had started before, and is not run again: {decided.reason}"
            events.append(e.ToolLost(call_id=entry.call.id, reason=reason))
    return tuple(events)


_NOT_STARTED = frozenset({Phase.INTENDED, Phase.AWAITING_APPROVAL, Phase.APPROVED, Phase.PAUSED})


def _is_undecided(execution: Execution, entry: OpenCall) -> bool:
    """Return whether guards have to decide on a call: they have not, or its tool has changed before it started."""
    if entry.phase is Phase.FINISHED or entry.guarded is None:
        return entry.phase is not Phase.FINISHED
    tool = execution.config.find_tool(entry.call.name)
    is_waiting = entry.phase in (Phase.INTENDED, Phase.AWAITING_APPROVAL) or entry.lacks_tool
    return is_waiting and tool is not None and tool.digest_call(entry.call) != entry.guarded.digest


def _may_start_again(entry: OpenCall) -> bool:
    """Return whether a call may start under this program. One that waits for its result from outside has been made."""
    return entry.phase is not Phase.FINISHED and (entry.phase is not Phase.PAUSED or entry.attempts > 0)


def decide_call(
    execution: Execution,
    call: ToolCall,
    counted: Mapping[str, int] | None = None,
    found: Sequence[Finding] = (),
    before: e.Guarded | None = None,
    *,
    decided: Iterable[tuple[str, GuardVerdict]] = (),
) -> e.Guarded | None:
    """Return the decision of the guards on a call, which may have other arguments than in the journal.

    Args:
        execution: The execution of the run.
        call: The call.
        counted: Number of calls before it that count toward a quota, by tool name. None: quotas do not matter, because
            the call has been counted.
        found: Decisions of screens, from the texts that the run has read.
        before: An earlier decision on the call: labels since then are left out, so that the same guards decide alike.
        decided: Verdicts on calls before it that are not in the journal yet.

    Returns:
        The strictest decision of all guards, of several the first. None if the call will be refused for another reason:
        its tool is not available, the arguments are invalid, or it is not permitted.
    """
    config = execution.config
    tool = None if call.invented or call.malformed is not None else config.find_tool(call.name)
    asked = None if tool is None else _build_guarded_call(execution, tool, call, counted, before, decided=decided)
    if tool is None or asked is None:
        return None
    decisions = [each for guard in _list_concerned(config, tool) if (each := guard.decide(asked)) is not None]
    decisions += [decision for screen, decision in found if screen.concerns(asked.tool)]
    strictest = max(decisions, key=lambda each: each.verdict.strictness, default=_ALLOWED)
    counts = strictest.verdict is not GuardVerdict.REFUSE and any(guard.counts(tool.traits) for guard in config.guards)
    return _build_event(call, strictest, digest=tool.digest_call(call), counts=counts)


def _build_guarded_call(
    execution: Execution,
    tool: Tool[..., Any],
    call: ToolCall,
    counted: Mapping[str, int] | None,
    before: e.Guarded | None,
    *,
    decided: Iterable[tuple[str, GuardVerdict]] = (),
) -> GuardedCall | None:
    """Return a call as guards see it; None if it will be refused for another reason."""
    if check_available(execution, tool) is not None:
        return None
    try:
        bound = tool.bind_and_check(call.arguments)
    except ArgumentsError:
        return None
    if check_permitted(execution, tool, bound) is not None:
        return None
    run, arguments = execution.journal.run, tool.to_namespace(bound)
    labels: Mapping[Label, LabelSource] = run.labels
    if later := _list_later_calls(run, before):
        labels = {
            label: source for label, source in labels.items() if source.run_id != run.id or source.call_id not in later
        }
    return GuardedCall(
        tool=tool.select_traits(arguments),
        arguments=arguments,
        written=call.arguments,
        labels=labels,
        counted=counted or {},
        header=run.header,
        said=_find_words_of_user([*execution.options.callers, run][0]) if Label.UNTRUSTED in run.labels else "",
        defaults=tool.defaults,
        list_texts=partial(_list_all_known_texts, (*execution.options.callers, run)),
        history=view_calls(execution, call.id, decided),
    )


def is_asked_only_by(execution: Execution, tool: Tool[..., Any], entry: OpenCall, rule: str) -> bool:
    """Return whether no other rule of the guards asks about a call. A detector may, wherever it is concerned.

    A rule may have the same text as another one, such as two with a lambda. Then it is not known which one has asked.
    """
    later = dropwhile(lambda each: each.call.id != entry.call.id, execution.journal.run.open)
    counting = [each for each in later if each.guarded is not None and each.guarded.counts]
    placed = Counter([each.call.name for each in counting if each.phase is not Phase.FINISHED])
    counted = add_counts(execution.budget.counted_calls, {name: -count for name, count in placed.items()})
    asked = _build_guarded_call(execution, tool, entry.call, counted, None)
    if asked is None or any(screen.concerns(asked.tool) for screen in _list_screens(execution.config)):
        return False
    guards = execution.config.guards
    alike = [each for each in _list_single_rules(guards) if describe_guard(each) == rule]
    return all(each == alike[0] for each in alike) and set(_list_asking_rules(guards, asked)) <= {rule}


def _list_rules(guard: CallGuard) -> list[CallGuard]:
    """Return the rules of a guard that is a set of rules; of any other, none."""
    return [each for each in getattr(guard, "rules", ()) if hasattr(each, "decide")]


def _list_single_rules(guards: Iterable[CallGuard]) -> list[CallGuard]:
    """Return guards, and the rules of those that are sets of rules instead of them."""
    return [each for guard in guards for each in _list_single_rules(_list_rules(guard)) or [guard]]


def _list_asking_rules(guards: Iterable[CallGuard], asked: GuardedCall) -> list[str]:
    """Return the rules that ask about a call; of a set of rules, none if one of them allows it."""
    found: list[str] = []
    for guard in guards:
        decision = guard.decide(asked)
        if decision is not None and decision.verdict is GuardVerdict.ASK:
            found += _list_asking_rules(_list_rules(guard), asked) or [decision.rule]
    return found


def _find_words_of_user(run: Run) -> str:
    """Return the words of the user in this run; empty if another run or a program has written the prompt."""
    header = run.header
    if header.parent is not None or header.caller is not None:
        return ""
    is_own = NOT_SAID.isdisjoint(_find_prompt_labels(header))
    prompt = [part.text for part in header.prompt if isinstance(part, TextPart)] if is_own else []
    return "\n".join([*prompt, *run.said])


_ALLOWED = GuardDecision(verdict=GuardVerdict.ALLOW, rule="", reason="")


def _build_event(call: ToolCall, decision: GuardDecision, *, digest: str, counts: bool = False) -> e.Guarded:
    return e.Guarded(
        call_id=call.id,
        verdict=decision.verdict,
        rule=decision.rule,
        reason=decision.reason,
        labels=decision.labels,
        digest=digest,
        counts=counts,
        first=decision.first,
    )


def _list_later_calls(run: Run, before: e.Guarded | None) -> frozenset[str]:
    """Return the ids of the open calls whose results do not count for decisions on the others.

    A reply is written before the results of its own calls are read. The arguments of the steps of a plan may come from
    results of other steps, so all count there that had ended when the call was decided on before.
    """
    if run.reply is not None:
        return frozenset([entry.call.id for entry in run.open])
    if before is None:
        return frozenset()
    ends = {entry.call.id: entry.result for entry in run.open}
    had_ended = [call for call, end in ends.items() if end is not None and end.started_at + end.duration_s < before.at]
    return frozenset(ends.keys() - set(had_ended))


def needs_approval_by_guard(entry: OpenCall) -> bool:
    """Return whether guards let the call run only if a person approves it."""
    return entry.guarded is not None and entry.guarded.verdict is GuardVerdict.ASK


def _format_refusal(decided: e.Guarded) -> str:
    """Return the text for the model about a call that guards refuse."""
    if decided.first:
        return f"not run: {decided.reason}. It may run only after {decided.first} has succeeded: do that first."
    return f"not run: {decided.reason}. Do not try it again; go on without it, and tell the user that it was not done."


async def _screen_texts(execution: Execution) -> tuple[Finding, ...]:
    """Return the decisions of screens that concern a call without a decision. Nothing is committed."""
    config, run = execution.config, execution.journal.run
    if not (screens := _list_screens(config)):
        return ()
    undecided = [entry for entry in run.open if _is_undecided(execution, entry)]
    tools = [tool for entry in undecided if (tool := config.find_tool(entry.call.name)) is not None]
    screens = [screen for screen in screens if any(screen.concerns(tool.traits) for tool in tools)]
    if not screens:
        return ()
    texts = _list_texts(run)
    found = [(screen, await screen.screen(texts)) for screen in screens]
    return tuple([(screen, decision) for screen, decision in found if decision is not None])


def _list_texts(run: Run) -> tuple[ScreenedText, ...]:
    """Return the untrusted results and the inputs that a run has read, newest first, also those before a compaction."""
    texts: list[ScreenedText] = []
    steps = () if run.plan is None else run.plan.closed
    for message in (*run.messages, *[entry.result for entry in steps]):
        if isinstance(message, ToolResult) and Label.UNTRUSTED in message.labels:
            source = LabelSource(label=Label.UNTRUSTED, run_id=run.id, call_id=message.call_id, name=message.tool)
            texts.append(ScreenedText(text=message.content, source=source))
        elif isinstance(message, UserMessage) and not message.is_note:
            texts.append(ScreenedText(text=message.text, source=None))
    return tuple(reversed(texts))


def _find_prompt_labels(header: Header) -> frozenset[Label]:
    """Return the labels that were given for the prompt of a run, or for that of the run of which it is a fork."""
    is_own = header.parent is None and header.caller is None  # else they may be those of a prompt above it
    given = [each for each in header.labels if each.name == "prompt" and (is_own or each.run_id == header.id)]
    return frozenset([each.label for each in given])


def _list_all_known_texts(runs: Sequence[Run]) -> tuple[KnownText, ...]:
    """Return the texts that a run and those after it had read; the first has written the prompts of the others."""
    return tuple([text for run in runs for text in _list_known_texts(run) if run is runs[0] or text.name != "prompt"])


def _list_known_texts(run: Run) -> tuple[KnownText, ...]:
    """Return the texts that a run had read when its open calls were written, and the arguments of earlier calls.

    The words of the user, recalled items and answers to `ask_user` are user data. A prompt or an input that is labelled
    as untrusted is a stranger's text instead; the prompt is both if it is labelled as user data, too.
    """

    def write(call: ToolCall) -> KnownText:
        return KnownText(text=call.arguments, labels=_NONE, name=call.name, call_id=call.id, is_written=True)

    def read(result: ToolResult) -> KnownText:
        labels = frozenset((*result.labels, Label.USER_DATA) if result.tool == ASK_USER else result.labels)
        return KnownText(text=result.content, labels=labels, name=result.tool, call_id=result.call_id)

    prompt_place, given = run.own_start + len(run.header.history), _find_prompt_labels(run.header)
    texts: list[KnownText] = []
    said = frozenset([TextPart(text=text) for text in run.said])
    if run.profile is not None:
        texts.append(KnownText(text=read_recall_note(run.profile), labels=_USER_DATA, name="memory"))
    for place, message in enumerate(run.messages):
        if isinstance(message, ToolResult):
            texts.append(read(message))
        elif isinstance(message, AssistantMessage):
            if message.hosted is not None:
                cited = [f"{each.url} {each.title} {each.quote}" for each in message.hosted.citations]
                text = "\n".join([*cited, *[each.output for each in message.hosted.calls]])
                texts.append(KnownText(text=text, labels=frozenset(message.hosted.labels), name="reply"))
            texts += map(write, message.calls)
        elif isinstance(message, UserMessage) and message.origin is MessageOrigin.MEMORY:
            texts.append(KnownText(text=read_recall_note(message), labels=_USER_DATA, name="memory"))
        elif isinstance(message, UserMessage) and message.origin is MessageOrigin.USER:
            labels = _USER_DATA
            if place == prompt_place:
                labels = given if Label.UNTRUSTED in given else given | _USER_DATA
            elif place > prompt_place and said.isdisjoint(message.parts):
                labels = _UNTRUSTED | _USER_DATA if Label.USER_DATA in run.labels else _UNTRUSTED
            name = "prompt" if place <= prompt_place else "input"
            texts.append(KnownText(text=message.text, labels=labels, name=name))
    # The arguments of the steps of a plan may come from results of its other steps.
    for entry in (*(() if run.plan is None else run.plan.closed), *(run.open if run.reply is None else ())):
        if entry.result is not None:
            texts.append(write(entry.call))
            texts.append(read(entry.result))
    return tuple(texts)
