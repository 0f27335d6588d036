"""The context window: policies shorten the message groups until they fit, recorded as one event."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

import attrs
from anyio.lowlevel import checkpoint

from agentfsm.core import events as e
from agentfsm.core.errors import ContextTooLongError, MisuseError, ModelError, ModelReplyError
from agentfsm.core.history import Removed, Summarised, build_note
from agentfsm.core.notes import describe_hidden_effects
from agentfsm.core.usage import Purpose
from agentfsm.engine.execution.cost import SideSpending
from agentfsm.engine.execution.outcome import StepOutcome
from agentfsm.engine.model_calls.message_groups import build_segments, group_messages
from agentfsm.engine.model_calls.side_request import send_side_request
from agentfsm.engine.model_calls.view import View, build_view, measure_fixed_parts, measure_room
from agentfsm.ports.context import CompactionBudget, MessageGroup, count_tokens
from agentfsm.tokens.ledger import BATCH_MESSAGES, BYTE_COUNTER, count_message

if TYPE_CHECKING:
    from agentfsm.engine.execution.execution import Execution
    from agentfsm.engine.model_calls.request import PreparedRequest
    from agentfsm.ports.model import Model

# Share of the allowance that remains in use after a compaction. Each compaction changes the start of the request and so
# loses the provider's prompt cache. Cutting by half loses it once per half a window of new messages, not in every turn.
TARGET_SHARE: Final = 0.5


# Upper bound of the tokens of a note on removed messages, needed before the number of removed messages is known.
MAX_NOTE_TOKENS: Final = count_message(build_note(Removed(count=10**9)), BYTE_COUNTER)
# Maximum of consecutive compactions: one by our count and one by the provider's, or two by the provider's, which leave
# a quarter.
MAX_COMPACTIONS: Final = 2
# Maximum of characters of an error's text in `Compacted.why`, which every journal keeps.
REASON_CHARS: Final = 200


async def make_room(request: PreparedRequest) -> StepOutcome | None:
    """Build the view of a request, and return the event that makes room for it in the context window.

    None if there is enough room, or no more can be made.
    """
    request.view = view = build_view(request.execution)
    execution, run, tally = view.execution, view.run, view.execution.ledger
    share, tally.overhead_tokens = execution.config.context.share, view.measure_overhead()
    while not tally.update(run, BATCH_MESSAGES):
        await checkpoint()  # a long history was opened: the event loop goes on while it is counted
    if tally.shown_tokens <= int(share * measure_room(execution, view.settings)) or run.recent_compactions:
        return None  # directly after a compaction there is nothing to cut
    await _count_exactly(view)
    room = measure_room(execution, view.settings)
    allowance = int(share * room)
    if tally.shown_tokens <= allowance:
        return None
    why = f"{tally.shown_tokens:,} tokens of messages, {room:,} of room in the window of {execution.config.model.name}"
    cut = await _compact(execution, TARGET_SHARE * allowance, allowance, why)
    return None if cut is None else StepOutcome((cut,))


async def make_room_after_refusal(execution: Execution, error: ModelError) -> e.Compacted | None:
    """Return the event that halves the shown messages, after the provider refused a request as too long.

    None if further compactions would not help, or no more room can be made.
    """
    run, tally = execution.journal.run, execution.ledger
    if not isinstance(error, ContextTooLongError):
        return None
    if run.recent_compactions >= MAX_COMPACTIONS or len(run.messages) == 1:  # the task alone
        return None
    await _count_exactly(build_view(execution))
    half = TARGET_SHARE * tally.shown_tokens
    return await _compact(execution, half, half, str(error)[:REASON_CHARS])


async def _count_exactly(view: View) -> None:
    """Count with the model's own vocabulary if only bytes were counted: these are a safe but coarse upper bound."""
    config, tally = view.execution.config, view.execution.ledger
    if tally.counter is BYTE_COUNTER:
        for _ in tally.recount_in_batches(view.run, await config.load_counter(config.model.name)):
            await checkpoint()
        view.fixed = measure_fixed_parts(config, tally.counter, view.tools)
        tally.overhead_tokens = view.measure_overhead()


async def _compact(execution: Execution, target: float, limit: float, why: str) -> e.Compacted | None:
    """Apply the policies until the messages fit, and return the event."""
    run, tally = execution.journal.run, execution.ledger
    aside = _PolicyRequests(execution, SideSpending(Purpose.SUMMARY, execution.config.model.name))
    count = partial(count_message, counter=tally.counter)
    noted = MAX_NOTE_TOKENS  # and the effects of all calls, which are those that it may have to list
    if effects := describe_hidden_effects(run.acted, run.messages, ((), len(run.messages))):
        noted += tally.counter.count(effects)
    room = CompactionBudget(
        target_tokens=int(target) - noted,
        limit_tokens=int(limit) - noted,
        history=run.messages,
        model=execution.config.model,
        count=count,
        ask=aside.ask,
    )
    groups, names = await _apply_policies(group_messages(run, tally), room, aside)
    start, head = build_segments(groups, len(run.messages))
    before = tally.shown_tokens
    after = count_tokens(groups) + sum(count(build_note(entry)) for entry in head if isinstance(entry, Removed))
    after += tally.counter.count(describe_hidden_effects(run.acted, run.messages, (head, start)))
    if after >= before and not aside.spent.usage.tokens:
        return None
    if after >= before:  # failed requests are paid for, too
        start, head, after, names = run.cutoff, run.segments, before, []
    execution.journal.log.info("compacted", before=before, after=after, policies=", ".join(names))
    return e.Compacted(
        start=start,
        head=head,
        tokens_before=before,
        tokens_after=after,
        why="; ".join([why, *aside.errors]),
        policies=tuple(names),
        usage=aside.spent.usage,
        purpose=aside.spent.recorded_purpose,
        model=aside.spent.model,
    )


async def _apply_policies(
    groups: tuple[MessageGroup, ...], room: CompactionBudget, requests: _PolicyRequests
) -> tuple[tuple[MessageGroup, ...], list[str]]:
    """Return the groups that the policies leave, and the names of the policies that changed something."""
    names: list[str] = []
    for policy in requests.execution.config.context.policies:
        if room.fits(groups):
            break
        requests.policy_name = type(policy).__name__
        left = tuple(await policy.compact(groups, room))
        if left != groups:
            _check_policy_result(requests.policy_name, groups, left)
            names.append(requests.policy_name)
        groups = left
    return groups, names


def _check_policy_result(policy: str, before: Sequence[MessageGroup], left: Sequence[MessageGroup]) -> None:
    """Check that a policy has kept the required groups and added none.

    Raises:
        MisuseError: if it has not.
    """
    spans = [each.segment for each in left if not isinstance(each.segment, Summarised)]
    places = {(span.start, span.end) for each in before if not isinstance(span := each.segment, Summarised)}
    firsts = [span.start for span in spans]
    if not {(span.start, span.end) for span in spans} <= places or firsts != sorted(set(firsts)):
        raise MisuseError(f"{policy} returned groups that it was not given, or not in their order, or one twice")
    if sum(each.is_task or each.is_newest for each in left) < sum(each.is_task or each.is_newest for each in before):
        raise MisuseError(f"{policy} dropped the task or the newest group: groups with `is_task` or `is_newest` stay")


@attrs.define(eq=False, repr=False)
class _PolicyRequests:
    """Sends the requests of policies to models, and records their cost and errors."""

    execution: Execution
    spent: SideSpending
    policy_name: str = ""
    """Class name of the current policy."""

    errors: list[str] = attrs.field(factory=list)

    async def ask(self, model: Model | None, instructions: str, question: str, tokens: int) -> str:
        """Send a request, as described for `ports.context.PolicyAsk`."""
        try:
            text, _ = await send_side_request(
                self.execution,
                self.spent,
                instructions,
                question,
                max_tokens=tokens,
                model=model,
            )
            if not text.strip():
                raise ModelReplyError("it gave an empty reply")
        except ModelError as error:
            self.errors.append(f"{self.policy_name}: {str(error)[:REASON_CHARS]}")
            raise
        return text.strip()
