"""The line of deciders: the points of a run at which features of its agent take part, and their order.

A feature is one file in `engine/deciders/`, with a function for each point at which it takes part. The handlers of the
states call the functions of a point one after the other, and name no feature. To add a feature, add its file, and a row
here at each of its points.

A function reads the run and what is decided, and returns a value. The first decision of a point ends the step: its
events are committed, and the next step starts the list again. So each feature sees in the journal that it has decided.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

import attrs

from agentfsm.core.messages import AssistantMessage
from agentfsm.core.value import Value
from agentfsm.engine.deciders import (
    answer_cache,
    approvals,
    background,
    claims,
    cost,
    duties,
    guards,
    judge,
    labels,
    limits,
    loops,
    output,
    permissions,
    plans,
    recall,
    recorded_world,
    reminder,
    shared_state,
    spend,
    started_calls,
    stops,
    text_filters,
    tool_selection,
    window,
)
from agentfsm.tools.front_end import UPDATE_STATE

if TYPE_CHECKING:
    from agentfsm.core import events as e
    from agentfsm.core.effects import Reflect
    from agentfsm.core.errors import ModelError
    from agentfsm.core.messages import ToolCall, ToolResult
    from agentfsm.core.run import Run
    from agentfsm.core.usage import Usage
    from agentfsm.engine.execution.config import EngineConfig
    from agentfsm.engine.execution.execution import Execution
    from agentfsm.engine.execution.open_calls import CallLedger, EndedCall, OpenCalls
    from agentfsm.engine.execution.outcome import StepOutcome
    from agentfsm.engine.model_calls.received import ReceivedReply
    from agentfsm.engine.model_calls.request import PreparedRequest
    from agentfsm.tools.queue.dispatch import CallOutcome
    from agentfsm.tools.schema.binding import BoundArguments
    from agentfsm.tools.tool import Tool

F = TypeVar("F")
_NO_NAMES: Final[frozenset[str]] = frozenset()

# OBSERVE, before the inbox is read and again with the inputs that are about to be taken: the end of the run, or None.
OnInputs: TypeAlias = "Callable[[Execution, e.Observed | None], StepOutcome | None]"
# THINK, before the model is asked: what is committed instead of asking it now, or None.
BeforeRequest: TypeAlias = "Callable[[PreparedRequest], Awaitable[StepOutcome | None]]"
# THINK, after a request that failed for good: the events with which the run goes on, or None.
OnRequestError: TypeAlias = "Callable[[Execution, ModelError], Awaitable[e.Event | None]]"
# THINK, with a reply that is to be read: changes it.
OnReply: TypeAlias = "Callable[[Execution, ReceivedReply], None]"
# THINK, with an answer: whether it is a draft that REFLECT reviews.
MustReview: TypeAlias = Callable[[AssistantMessage], bool]
# REFLECT: an event that says how the run goes on, the end of the run, or None.
Review: TypeAlias = "Callable[[Execution, Reflect], Awaitable[e.Continued | e.Accepted | StepOutcome | None]]"
# REFLECT, before the run goes on with a note for the model: the note as it is committed, or the end of the run.
OnContinue: TypeAlias = "Callable[[Execution, e.Continued], e.Continued | StepOutcome]"


# REFLECT, with a draft that is accepted: what is not as it should be, for the end of the run.
FindFaults: TypeAlias = "Callable[[Execution], Awaitable[Sequence[str]]]"


# ACT, before any call runs: commits decisions on the open calls, and returns the calls that may run.
OnOpenCalls: TypeAlias = "Callable[[OpenCalls, Sequence[ToolCall]], Awaitable[Sequence[ToolCall]]]"
# ACT, with steps of a plan that become ready while others run: commits decisions, and returns those that may start now.
OnReadySteps: TypeAlias = "Callable[[OpenCalls, Sequence[ToolCall]], Sequence[ToolCall]]"
# Right before a call starts: the refusal, or None.
BeforeStart: TypeAlias = "Callable[[OpenCalls, ToolCall, Tool[..., Any], BoundArguments], CallOutcome | None]"
# With the result of a call, however it came: changes it.
OnResult: TypeAlias = "Callable[[Execution, EndedCall], None]"
# With the result of a background run: the result as it is committed.
OnChildResult: TypeAlias = "Callable[[Execution, ToolResult], ToolResult]"
# After that, for a call that costs money: the refusal, or None.
ReserveStart: TypeAlias = "Callable[[Execution, CallLedger, ToolCall, Tool[..., Any]], Awaitable[CallOutcome | None]]"
# When a call ends, pauses or is cut off: gives back what was reserved for it. The usage is None if it is not known.
OnRelease: TypeAlias = "Callable[[Execution, CallLedger, Usage | None], None]"
# Deciders on results that concern only calls of which the execution knows something beside the journal.
_OF_LEDGERS = frozenset({cost.add_child, cost.bill, spend.count, labels.add_reported, approvals.consume_unused})


@attrs.frozen(kw_only=True)
class Line(Value):
    """The deciders of an agent, in their order at each point. Features that the agent does not use are not there."""

    has_background: bool
    """Whether the run has background runs, or tools that begin some."""

    on_inputs: tuple[OnInputs, ...]
    before_request: tuple[BeforeRequest, ...]
    before_last_answer: tuple[BeforeRequest, ...]
    on_request_error: tuple[OnRequestError, ...]
    on_reply: tuple[OnReply, ...]
    must_review: tuple[MustReview, ...]
    open_calls: tuple[OnOpenCalls, ...]
    ready_steps: tuple[OnReadySteps, ...]
    before_start: tuple[BeforeStart, ...]
    reserve_start: tuple[ReserveStart, ...]
    before_shown: tuple[OnResult, ...]
    """Those of `on_result` that decide what listeners see."""

    on_result: tuple[OnResult, ...]
    on_plain_result: tuple[OnResult, ...]
    """Those of `on_result` that concern a call of which the execution knows nothing beside the journal."""

    on_release: tuple[OnRelease, ...]
    decided_tools: tuple[Callable[[EngineConfig], frozenset[str]], ...]
    """Names of tools whose calls are decided on one by one: they start only when the decision is in the journal."""

    secrets: tuple[Callable[[EngineConfig], Sequence[str]], ...]
    """Texts that no error of a tool may show."""

    holds_calls: tuple[Callable[[Run], bool], ...]
    """Whether no call of the next reply may start before the reply is in the journal."""

    holds_texts: bool
    """Whether texts are passed to listeners only when the reply is complete."""

    review_results: tuple[Review, ...]
    review_draft: tuple[Review, ...]
    find_faults: tuple[FindFaults, ...]
    on_child_result: tuple[OnChildResult, ...]
    on_exit: tuple[Callable[[Execution], Awaitable[None]], ...]
    """What is done when an execution ends, however it ends."""

    describe_wait: tuple[Callable[[Execution], str], ...]
    """What the effect in progress waited for when the time of the run was up, as a clause; empty for nothing."""

    after_results: OnContinue
    after_draft: tuple[OnContinue, ...]

    def list_decided_tools(self, config: EngineConfig) -> frozenset[str]:
        """Return the names of the tools whose calls are decided on one by one."""
        return _NO_NAMES.union(*[names(config) for names in self.decided_tools]) if self.decided_tools else _NO_NAMES


def build_line(execution: Execution) -> Line:
    """Return the deciders of a run, in their order at each point.

    It is built once for an agent and its tools, and for each kind of run: what else decides is in `key`. A recorded
    world is not, because an agent in one is a variant of its own.
    """
    config, run, has_spend = execution.config, execution.journal.run, execution.budget.spend is not None
    has_plans, has_reminder = config.planner is not None or run.plan is not None, bool(config.reminder or run.reminder)
    key = (
        config.registry.version,
        has_plans,
        has_reminder,
        run.header.withhold,
        bool(run.open),
        bool(run.verdict),
        has_spend,
        not run.background,
    )
    known: Line | None = config.lines.get(key)
    if known is not None:
        return known
    has_duties = any(guard.binds_end() for guard in config.guards)
    has_guards, has_background = bool(config.guards), bool(config.registry.background_tools or run.background)
    is_live = execution.options.world is None
    has_cache, has_output, has_judge = (
        each is not None for each in (config.answer_cache, config.output_spec, config.judge)
    )
    has_claims = config.output_spec is not None and config.output_spec.claims is not None
    holds_answers = has_claims and config.output_spec is not None and config.output_spec.tool is None
    filters_texts = any(guard.filters_texts() for guard in config.guards)
    remind, make_room = (reminder.remind, has_reminder), (window.make_room, True)
    on_result = (
        (background.note_begin, has_background),
        (cost.add_child, True),
        (cost.bill, True),
        (spend.count, has_spend),
        (labels.add_reported, True),
        (labels.withhold_forbidden, has_guards),
        (labels.fence_result, has_guards),
        (approvals.consume_unused, True),
        (plans.add_ready_steps, has_plans),
    )
    line = config.lines[key] = Line(
        has_background=has_background,
        on_inputs=_used((labels.check_inputs, has_guards), (recorded_world.bring_inputs, not is_live)),
        before_request=_used(
            (limits.check_before_request, True),
            (answer_cache.repeat_answer, has_cache),
            (tool_selection.refresh_tools, config.registry.sources),
            (recall.recall, config.memory is not None),
            remind,
            (plans.advance_plan, has_plans),
            (tool_selection.select_tools, True),
            make_room,
        ),
        before_last_answer=_used(remind, make_room),
        on_request_error=_used((window.make_room_after_refusal, True)),
        on_reply=_used(
            (answer_cache.note_refusal, has_cache),
            (output.unwrap_answer, has_output),
            (claims.read_claims, has_claims),
            (labels.label_hosted, config.registry.hosted),
            (text_filters.filter_texts, filters_texts),
            (text_filters.pass_texts, holds_answers and not filters_texts),
        ),
        decided_tools=_used((guards.find_guarded_tools, has_guards), (recorded_world.list_tools, not is_live)),
        secrets=_used((guards.list_secrets, has_guards)),
        holds_calls=_used((plans.holds_calls, has_plans)),
        holds_texts=filters_texts or holds_answers,
        must_review=_used(
            (_always, config.reviews_answers or has_background or not is_live), (labels.has_read_data, has_guards)
        ),
        open_calls=_used(
            (limits.admit_calls, True),
            (guards.decide_on_calls, has_guards),
            (approvals.ask_about_calls, is_live),
            (recorded_world.start_unasked, not is_live),
        ),
        ready_steps=_used(
            (guards.admit_ready_steps, has_guards),
            (approvals.admit_ready_steps, has_plans and is_live),
        ),
        before_start=_used(
            (permissions.check_start, config.permissions is not None or run.header.withhold),
            (shared_state.check_start, UPDATE_STATE in config.registry),
            (started_calls.check_start, run.open),
            (guards.check_start, has_guards),
            (recorded_world.answer_call, not is_live),
            (approvals.check_asked_by_guard, has_guards and is_live),
            (approvals.check_asked, is_live),
            (cost.reserve, True),
        ),
        reserve_start=_used((spend.reserve, has_spend)),
        before_shown=_used((labels.add_reported, has_guards), (labels.withhold_forbidden, has_guards)),
        on_result=_used(*on_result),
        on_plain_result=_used(*[each for each in on_result if each[0] not in _OF_LEDGERS]),
        on_release=_used((cost.release, True), (spend.release, has_spend)),
        review_results=_used(
            (stops.check_results, config.stop_when),
            (limits.check_results, True),
            (judge.apply_verdict, has_judge or run.verdict),
            (plans.ask_about_plan, has_plans),
            (loops.review_calls, True),
            (judge.ask_judge, has_judge),
        ),
        review_draft=_used(
            (background.await_runs, has_background),
            (labels.review_draft, has_guards),
            (judge.apply_verdict, has_judge or run.verdict),
            (output.check_draft, has_output),
            (claims.check_claims, has_claims),
            (duties.check_draft, has_duties),
            (judge.ask_judge, has_judge),
            (recorded_world.await_inputs, not is_live),
        ),
        find_faults=_used((duties.find_due, has_duties)),
        on_child_result=_used((labels.withhold_from_child, has_guards), (labels.fence_child, has_guards)),
        on_exit=_used((spend.flush, has_spend)),
        describe_wait=_used((spend.describe_wait, has_spend)),
        after_results=loops.note_equal_calls,
        after_draft=_used((stops.check_objection, config.stop_when), (loops.send_back, True)),
    )
    return line


def _used(*deciders: tuple[F, object]) -> tuple[F, ...]:
    """Return the functions of the features that are used."""
    return tuple([decide for decide, is_used in deciders if is_used])


def _always(_message: AssistantMessage) -> bool:
    return True
