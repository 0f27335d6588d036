"""Finding out that a run goes round in circles, by turn.

A loop is the same calls three turns running, a sequence of calls repeated (A B A B, A B C A B C), or the same reply
three turns running. Equal results of different calls are a finding too, but only a hint: polling looks like that. What
the user says ends the look back. A reply that says the same as before but calls something else is progress, no loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from agentfsm.core.messages import AssistantMessage, Media, Message, ToolResult, UserMessage
from agentfsm.core.value import Value

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from collections.abc import Set as AbstractSet

# Turns alike before it counts: twice is a retry.
REPEATS = 3
# The longest sequence looked for: beyond it, repetition is too rare to be worth the look.
LONGEST = 4


Signature = tuple[tuple[str, str], ...]
# A result, as it is compared: two pictures of one size are told in the same words.
_Content = tuple[str, tuple[Media, ...]]


@attrs.frozen(kw_only=True)
class Loop(Value):
    """A repetition."""

    what: str
    # For the model and for people: what repeats.
    tools: tuple[str, ...] = ()
    # The tools that take part; empty for repeated text.
    hint: bool = False
    # True where it may be harmless: worth a word, never a stop.


@attrs.frozen(kw_only=True)
class _Turn(Value):
    said: AssistantMessage
    signature: Signature
    results: tuple[_Content, ...]


def find(messages: Sequence[Message], exempt: AbstractSet[str] = frozenset()) -> Loop | None:
    """Look for a loop that the newest turn completes.

    Args:
        messages: The history, oldest first.
        exempt: Names of tools whose repetition is their job (polling).
    """
    if not _suspicious(messages, exempt):
        return None
    turns = _newest(messages, 2 * LONGEST, exempt)
    return _same_calls(turns) or _sequence(turns) or _same_reply(turns) or _same_results(turns)


def _suspicious(messages: Sequence[Message], exempt: AbstractSet[str]) -> bool:
    """Whether the newest turn is like any of those that a loop would need: a quick look that usually settles it."""
    newest: AssistantMessage | None = None
    wanted: Signature = ()
    results: set[_Content] = set()
    turns = 0
    for message in reversed(messages):
        if isinstance(message, AssistantMessage):
            turns += 1
            if newest is None:
                newest, wanted = message, _signature(message, exempt)
            elif turns > LONGEST + 1:
                return False
            elif _signature(message, exempt) == wanted and (wanted or message.text.strip() == newest.text.strip()):
                return True
        elif isinstance(message, ToolResult):
            if turns == 0:
                results.add((message.content, message.parts))
            elif turns == 1 and (message.content, message.parts) in results:
                return True
        elif isinstance(message, UserMessage):
            return False
    return False


def _signature(message: AssistantMessage, exempt: AbstractSet[str]) -> Signature:
    if not exempt:
        return message.signature
    return tuple([call for call in message.signature if call[0] not in exempt])


def _newest(messages: Sequence[Message], count: int, exempt: AbstractSet[str]) -> list[_Turn]:
    """Return up to `count` turns, newest first, up to what the user said last or a turn of exempt calls only."""
    turns: list[_Turn] = []
    results: list[_Content] = []
    for message in reversed(messages):
        if isinstance(message, ToolResult):
            results.append((message.content, message.parts))
        elif isinstance(message, AssistantMessage):
            signature = _signature(message, exempt)
            if (message.calls and not signature) or len(turns) == count:
                return turns
            turns.append(_Turn(said=message, signature=signature, results=tuple(results)))
            results = []
        elif isinstance(message, UserMessage):
            return turns
    return turns


def _alike(turns: Sequence[_Turn], key: Callable[[_Turn], object]) -> bool:
    if len(turns) < REPEATS or not key(turns[0]):
        return False
    return all(key(turn) == key(turns[0]) for turn in turns[1:REPEATS])


def _tools(turns: Sequence[_Turn]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for turn in turns for name, _ in turn.signature))


def _same_calls(turns: Sequence[_Turn]) -> Loop | None:
    if not _alike(turns, lambda turn: turn.signature):
        return None
    tools = _tools(turns[:1])
    return Loop(what=f"the same call of {', '.join(tools)} {REPEATS} turns running", tools=tools)


def _sequence(turns: Sequence[_Turn]) -> Loop | None:
    for period in range(2, LONGEST + 1):
        newer, older = turns[:period], turns[period : 2 * period]
        if len(older) < period or not all(a.signature and a.signature == b.signature for a, b in zip(newer, older)):  # noqa: B905  equally long
            continue
        tools = _tools(newer)
        return Loop(what=f"the same sequence of {period} turns ({', '.join(tools)}) twice running", tools=tools)
    return None


def _same_reply(turns: Sequence[_Turn]) -> Loop | None:
    if not _alike(turns, lambda turn: not turn.said.calls and turn.said.text.strip()):
        return None
    return Loop(what=f"the same reply {REPEATS} turns running")


def _same_results(turns: Sequence[_Turn]) -> Loop | None:
    if not _alike(turns, lambda turn: turn.results):
        return None
    tools = _tools(turns[:REPEATS])
    return Loop(what=f"equal results of {', '.join(tools)} {REPEATS} turns running", tools=tools, hint=True)
