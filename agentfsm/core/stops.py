"""When a run has to stop: its limits, stop conditions of its agent, and turns that repeat themselves."""

from __future__ import annotations

import re
from collections import Counter
from functools import partial
from itertools import pairwise, takewhile
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import attrs

from agentfsm.core.limits import Limits, StopReason
from agentfsm.core.messages import AssistantMessage, Media, Message, Outcome, ToolResult, UserMessage
from agentfsm.core.run import Run
from agentfsm.core.run_facts import list_newest_results
from agentfsm.core.usage import Usage, format_usd
from agentfsm.core.validation import NAME
from agentfsm.core.value import Value

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from collections.abc import Set as AbstractSet


def find_reached_limit(
    run: Run[Any], limits: Limits, *, reserves_last_answer: bool = False
) -> tuple[StopReason, str] | None:
    """Return the limit that the run has reached, and a message with the number and the limit to raise; None if none.

    Args:
        run: The run.
        limits: Limits of its agent.
        reserves_last_answer: Whether to reserve a turn and `last_answer_s` for a last answer. With a limit of one turn,
            no turn is reserved.
    """
    most, seconds = limits.turns, limits.seconds
    if reserves_last_answer:
        most, seconds = max(1, most - 1), seconds - limits.last_answer_s
    if run.consecutive_errors >= limits.errors:
        last = f"; the last: {run.errors[-1].message[:300]}" if run.errors else ""
        turns = "1 error turn" if run.consecutive_errors == 1 else f"{run.consecutive_errors} error turns in a row"
        return StopReason.TOO_MANY_ERRORS, f"{turns}{last}"
    if run.turn >= most:
        return StopReason.MAX_TURNS, f"{run.turn} of {limits.turns} turns used; a larger turns= allows more"
    if run.usage.tokens >= limits.tokens:
        return StopReason.TOKEN_BUDGET, format_tokens_used(run.usage.tokens, limits)
    if limits.usd is not None and (run.usage.cost_usd or 0.0) >= limits.usd:
        return StopReason.COST_BUDGET, format_usd_used(run.usage, limits)
    if run.tool_call_count >= limits.tool_calls:
        return StopReason.TOOL_BUDGET, format_calls_used(run.tool_call_count, limits)
    if run.duration_s >= seconds:
        return StopReason.TIMEOUT, format_seconds_used(run.duration_s, limits)
    return None


def find_near_limits(run: Run[Any], limits: Limits) -> tuple[tuple[str, float, float], ...]:
    """Return the limits of which the run has used `warn_at` or more, each as (name, used, limit)."""
    share, usage = limits.warn_at, run.usage
    tokens = usage.input_tokens + usage.output_tokens
    # One comparison for most turns, because this is called in each of them.
    if (
        run.turn < limits.turns * share
        and tokens < limits.tokens * share
        and run.tool_call_count < limits.tool_calls * share
        and run.duration_s < limits.seconds * share
        and (limits.usd is None or (usage.cost_usd or 0.0) < limits.usd * share)
    ):
        return ()
    used = (
        ("turns", run.turn, limits.turns),
        ("tokens", tokens, limits.tokens),
        ("usd", usage.cost_usd or 0.0, limits.usd),
        ("tool_calls", run.tool_call_count, limits.tool_calls),
        ("seconds", run.duration_s, limits.seconds),
    )
    return tuple([(name, now, of) for name, now, of in used if of is not None and now >= of * share])


StopCondition: TypeAlias = "Callable[[Run[Any]], bool | str | None]"
"""Function of the run for `Agent(stop_when=[...])`: False or None to go on, True to stop, or a text, the answer.

It is asked whenever the run would go on to another turn. It reads only the run, so that a resumed run decides the same.
"""


def stop_after_tool(*names: str) -> StopCondition:
    """Return the condition that a call of a tool has succeeded. The result is the answer of the run, as it stands.

    Of several such results of a turn, the last one is the answer. With an `output_type`, it has to fit the type; if it
    does not, the model is told so, and goes on.

    Args:
        *names: Names of the tools; one or more.

    Raises:
        MisuseError: if there are none, or one is not a string.
    """
    for name in names or ("",):
        NAME.check("stop_after_tool", "names", name)

    def condition(run: Run[Any]) -> str | None:
        done = [each for each in list_newest_results(run) if each.tool in names and each.outcome is Outcome.DONE]
        return (done[-1].content if done[-1].content.strip() else "The tool returned nothing.") if done else None

    condition.__name__ = f"stop_after_tool({', '.join(map(repr, names))})"
    return condition


def name_condition(condition: StopCondition) -> str:
    """Return the name of a stop condition, under which the journal has it."""
    function = condition.func if isinstance(condition, partial) else condition
    return str(getattr(function, "__name__", type(function).__name__))


# Messages of exhausted limits: the number reached, and the limit to raise.


def format_tokens_used(tokens: int, limits: Limits) -> str:
    """Return the message for an exhausted token budget."""
    return f"{tokens:,} of {limits.tokens:,} tokens used; a larger tokens= allows more"


def format_usd_used(usage: Usage, limits: Limits) -> str:
    """Return the message for an exhausted cost budget."""
    return f"{usage.format_cost()} of {format_usd(limits.usd)} used; a larger usd= allows more"


def format_calls_used(calls: int, limits: Limits) -> str:
    """Return the message for an exhausted budget of tool calls."""
    return f"{calls:,} of {limits.tool_calls:,} tool calls made; a larger tool_calls= allows more"


def format_seconds_used(seconds: float, limits: Limits) -> str:
    """Return the message for exhausted active time."""
    return f"{seconds:.1f} of {limits.seconds:.1f} seconds used; a larger seconds= allows more"


_DEFAULTS: Final = Limits()
# Turns in the longest sequence that is detected: longer repetitions are too rare to be worth the cost.
MAX_PERIOD: Final = 4
# Share of common shingles that makes texts highly similar. One changed word in 20 leaves 0.81, in 50 0.92.
MIN_SIMILARITY: Final = 0.8
# Characters of each of the three samples of a text: about 60 words in total.
SAMPLE_CHARS: Final = 128
# Characters of the shortest text that is compared by similarity: in a shorter text each word matters.
MIN_SIMILAR_CHARS: Final = 40
# Most results of a turn that are compared by similarity; more results are only checked for equality.
MAX_SIMILAR_RESULTS: Final = 4

# A word; in scripts without spaces between words, a character.
_UNSPACED_SCRIPTS: Final = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3\u0e00-\u0eff"
_WORD: Final = rf"[{_UNSPACED_SCRIPTS}]|[^\W{_UNSPACED_SCRIPTS}]+"

Signature: TypeAlias = tuple[tuple[str, str], ...]
# Text and media of a result: the texts of two images of the same size are equal.
_Content: TypeAlias = tuple[str, tuple[Media, ...]]


@attrs.frozen(kw_only=True)
class DetectedLoop(Value):
    """A repetition in the newest turns."""

    description: str
    """Description of the repetition, for the model and for people."""

    tools: tuple[str, ...] = ()
    """Names of the tools that are called repeatedly; empty for repeated text."""

    is_hint: bool = False
    """Whether the repetition may be harmless. The model then gets a note, and the run never stops for it."""


@attrs.frozen(kw_only=True)
class _LoopTurn(Value):
    reply: AssistantMessage
    signature: Signature
    results: tuple[_Content, ...]


class RecentTurns:
    """The newest turns of a run: whether its newest turn may complete a loop. Each message is read once.

    A look through the history in each turn took 400 opcodes of 9,700 (`tests/test_cost.py`).
    """

    __slots__ = ("_before", "_exempt", "_read", "_results", "_signatures", "_texts")

    def __init__(self) -> None:
        # Number of messages read, and the tools that were exempt.
        self._read: int = 0
        self._exempt: AbstractSet[str] = frozenset()
        # Of each turn, oldest first; then what the newest turn and the one before it brought.
        self._signatures: list[Signature] = []
        self._texts: list[str] = []
        self._results: list[_Content] = []
        self._before: list[_Content] = []

    def may_loop(self, messages: Sequence[Message], exempt: AbstractSet[str], limits: Limits) -> bool:
        """Return whether the newest turn resembles a recent one. Otherwise `find_loop`, which takes the same, is None.

        The messages are those of the call before and, at their end, what was added since.
        """
        signatures, texts = self._signatures, self._texts
        if not self._read or exempt != self._exempt:
            own = takewhile(lambda message: type(message) is not UserMessage, reversed(messages))
            self._read, self._exempt = len(messages) - sum(1 for _ in own), exempt
            signatures.clear()
            texts.clear()
        for message in messages[self._read :]:
            if type(message) is ToolResult:
                self._results.append((message.content, message.parts))
            elif type(message) is AssistantMessage:
                signatures.append(_signature(message, exempt))
                texts.append(message.text)
                self._before, self._results = self._results, []
            elif type(message) is UserMessage:
                signatures.clear()
                texts.clear()
                self._results = []
        self._read = len(messages)
        most = max(MAX_PERIOD + 1, limits.loop_window, limits.loop_turns)
        if signatures[most:]:
            del signatures[:-most], texts[:-most]
        if not signatures:
            return False
        wanted, said = signatures[-1], texts[-1]
        if signatures.count(wanted) > 1:
            earlier = zip(signatures[:-1], texts[:-1], strict=True)
            if wanted or any(not each and _are_similar(text, said) for each, text in earlier):
                return True
        results = self._results
        for content in self._before if texts[1:] else ():
            if content in results:
                return True
            if content[0][MIN_SIMILAR_CHARS:] and any(_are_similar(content[0], text) for text, _ in results):
                return True
        return False


def find_loop(
    messages: Sequence[Message], exempt: AbstractSet[str] = frozenset(), limits: Limits = _DEFAULTS
) -> DetectedLoop | None:
    """Return the loop that the newest turn completes, or None.

    Args:
        messages: The history, oldest first.
        exempt: Names of tools that are meant to be called repeatedly (polling).
        limits: Limits of the agent, for their `loop_turns` and `loop_window`.
    """
    repeats, window = limits.loop_turns, max(limits.loop_turns, limits.loop_window)
    times = max(2, repeats - 1)  # a sequence is several turns
    if not (turns := _newest_turns(messages, max(MAX_PERIOD * times, window), exempt)):
        return None
    return (
        _find_same_calls(turns, repeats, window)
        or _find_sequence(turns, times)
        or _find_same_reply(turns, repeats)
        or _find_similar_replies(turns, repeats)
        or _find_similar_results(turns, repeats)
    )


def count_equal_calls(messages: Sequence[Message], names: AbstractSet[str]) -> dict[str, int]:
    """Return those tools that the newest turn ran several times with equal arguments, each with its most equal calls.

    Args:
        messages: The history, which ends with the results of that turn.
        names: Names of the tools to count.
    """
    ran: set[str] = set()
    for message in reversed(messages):
        if isinstance(message, AssistantMessage):
            counts = Counter((call.name, call.canonical) for call in message.calls if call.id in ran)
            return {name: count for (name, _), count in reversed(counts.most_common()) if count > 1 and name in names}
        if isinstance(message, ToolResult) and message.attempts:
            ran.add(message.call_id)
    return {}


def _signature(message: AssistantMessage, exempt: AbstractSet[str]) -> Signature:
    if not exempt:
        return message.signature
    return tuple([call for call in message.signature if call[0] not in exempt])


def _newest_turns(messages: Sequence[Message], count: int, exempt: AbstractSet[str]) -> list[_LoopTurn]:
    """Return up to `count` turns, newest first. They end at a message of the user or a turn of exempt calls only."""
    turns: list[_LoopTurn] = []
    results: list[_Content] = []
    for message in reversed(messages):
        if isinstance(message, ToolResult):
            results.append((message.content, message.parts))
        elif isinstance(message, AssistantMessage):
            signature = _signature(message, exempt)
            if (message.calls and not signature) or len(turns) == count:
                return turns
            turns.append(_LoopTurn(reply=message, signature=signature, results=tuple(results)))
            results = []
        elif isinstance(message, UserMessage):
            return turns
    return turns


def _tool_names(turns: Sequence[_LoopTurn]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for turn in turns for name, _ in turn.signature))


def _find_same_calls(turns: Sequence[_LoopTurn], repeats: int, window: int) -> DetectedLoop | None:
    signature = turns[0].signature
    if not signature or sum(turn.signature == signature for turn in turns[:window]) < repeats:
        return None
    tools = _tool_names(turns[:1])
    is_running = all(turn.signature == signature for turn in turns[:repeats])
    when = f"{repeats} turns running" if is_running else f"in {repeats} of the last {window} turns"
    return DetectedLoop(description=f"the same call of {', '.join(tools)} {when}", tools=tools)


def _find_sequence(turns: Sequence[_LoopTurn], times: int) -> DetectedLoop | None:
    for period in range(2, MAX_PERIOD + 1):
        seen = turns[: period * times]
        is_same = all(turn.signature and turn.signature == seen[at % period].signature for at, turn in enumerate(seen))
        if len(seen) < period * times or not is_same:
            continue
        tools, often = _tool_names(seen[:period]), "twice" if times == 2 else f"{times} times"
        return DetectedLoop(
            description=f"the same sequence of {period} turns ({', '.join(tools)}) {often} running", tools=tools
        )
    return None


def _find_same_reply(turns: Sequence[_LoopTurn], repeats: int) -> DetectedLoop | None:
    newest = [turn.reply for turn in turns[:repeats]]
    said = {reply.text.strip() for reply in newest}
    if len(newest) < repeats or len(said) > 1 or said == {""} or any(reply.calls for reply in newest):
        return None
    return DetectedLoop(description=f"the same reply {repeats} turns running")


def _find_similar_replies(turns: Sequence[_LoopTurn], repeats: int) -> DetectedLoop | None:
    newest = turns[0].reply

    def is_like(turn: _LoopTurn) -> bool:
        return not turn.reply.calls and _are_similar(turn.reply.text, newest.text)

    if newest.calls or not newest.text.strip() or not _is_just_completed(turns, is_like, repeats):
        return None
    return DetectedLoop(description=f"nearly the same reply {repeats} turns running", is_hint=True)


def _find_similar_results(turns: Sequence[_LoopTurn], repeats: int) -> DetectedLoop | None:
    newest = turns[0].results
    if not newest or not _is_just_completed(turns, lambda turn: _are_similar_results(turn.results, newest), repeats):
        return None
    tools = _tool_names(turns[:repeats])
    are_equal = all(set(turn.results) == set(newest) for turn in turns[:repeats])
    finding = "equal results" if are_equal else "nearly equal results"
    return DetectedLoop(
        description=f"{finding} of {', '.join(tools)} {repeats} turns running", tools=tools, is_hint=True
    )


def _is_just_completed(turns: Sequence[_LoopTurn], is_similar: Callable[[_LoopTurn], bool], repeats: int) -> bool:
    """Return whether exactly the newest turns of this number are similar. With more, it was reported before."""
    if len(turns) < repeats or not all(map(is_similar, turns[1:repeats])):
        return False
    return len(turns) == repeats or not is_similar(turns[repeats])


# Similarity


def _are_similar_results(some: tuple[_Content, ...], others: tuple[_Content, ...]) -> bool:
    if set(some) == set(others):  # also of another number of calls: three searches that find nothing, then one
        return True
    if not len(some) == len(others) <= MAX_SIMILAR_RESULTS:
        return False
    pairs = zip(some, others, strict=True)
    return all(parts == other_parts and _are_similar(text, other) for (text, parts), (other, other_parts) in pairs)


def _are_similar(one: str, other: str) -> bool:
    """Return whether two texts are equal except for outer white space, or share nearly all of their shingles."""
    if one.strip() == other.strip():
        return True
    shorter, longer = sorted((len(one), len(other)))
    if shorter < MIN_SIMILAR_CHARS or shorter < MIN_SIMILARITY * longer:
        return False
    shingles, others = _shingles(one), _shingles(other)
    return bool(shingles) and len(shingles & others) >= MIN_SIMILARITY * len(shingles | others)


def _shingles(text: str) -> frozenset[tuple[str, str]]:
    """Return the pairs of neighbouring words of a text, or of the beginning, middle and end of a long text."""
    if len(text) > 3 * SAMPLE_CHARS:
        middle = (len(text) - SAMPLE_CHARS) // 2
        text = f"{text[:SAMPLE_CHARS]} {text[middle : middle + SAMPLE_CHARS]} {text[-SAMPLE_CHARS:]}"
    words = re.findall(_WORD, text.casefold())  # compiled on first use: it takes 4 ms
    return frozenset(pairwise(words))
