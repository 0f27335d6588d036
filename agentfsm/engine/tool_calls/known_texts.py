"""The texts that a run has read and written, for rules that look for data of one in another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from agentfsm.core.labels import Label
from agentfsm.core.messages import AssistantMessage, MessageOrigin, TextPart, ToolResult, UserMessage
from agentfsm.core.recalled_items import read_recall_note
from agentfsm.ports.guards import KnownText
from agentfsm.tools.builtin import ASK_USER

if TYPE_CHECKING:
    from agentfsm.core.header import Header
    from agentfsm.core.messages import ToolCall
    from agentfsm.core.run import Run

_NONE = frozenset[Label]()
_USER_DATA = frozenset({Label.USER_DATA})
_UNTRUSTED = frozenset({Label.UNTRUSTED})


def find_prompt_labels(header: Header) -> frozenset[Label]:
    """Return the labels that were given for the prompt of a run, or for that of the run of which it is a fork."""
    is_own = header.parent is None and header.caller is None  # else they may be those of a prompt above it
    given = [each for each in header.labels if each.name == "prompt" and (is_own or each.run_id == header.id)]
    return frozenset([each.label for each in given])


def list_known_texts(run: Run) -> tuple[KnownText, ...]:
    """Return the texts that a run had read when its open calls were written, and the arguments of earlier calls.

    The words of the user, recalled items and answers to `ask_user` are user data. A prompt or an input that is labelled
    as untrusted is a stranger's text instead; the prompt is both if it is labelled as user data, too.
    """
    return tuple(_iter_known_texts(run))


def _iter_known_texts(run: Run) -> Iterator[KnownText]:
    def write(call: ToolCall) -> KnownText:
        return KnownText(text=call.arguments, labels=_NONE, name=call.name, call_id=call.id, is_written=True)

    def read(result: ToolResult) -> KnownText:
        labels = frozenset((*result.labels, Label.USER_DATA) if result.tool == ASK_USER else result.labels)
        return KnownText(text=result.content, labels=labels, name=result.tool, call_id=result.call_id)

    prompt_place, given = run.own_start + len(run.header.history), find_prompt_labels(run.header)
    said = frozenset([TextPart(text=text) for text in run.said])
    for place, message in enumerate(run.messages):
        if isinstance(message, ToolResult):
            yield read(message)
        elif isinstance(message, AssistantMessage):
            if message.hosted is not None:
                cited = [f"{each.url} {each.title} {each.quote}" for each in message.hosted.citations]
                text = "\n".join([*cited, *[each.output for each in message.hosted.calls]])
                yield KnownText(text=text, labels=frozenset(message.hosted.labels), name="reply")
            yield from map(write, message.calls)
        elif isinstance(message, UserMessage) and message.origin is MessageOrigin.MEMORY:
            yield KnownText(text=read_recall_note(message), labels=_USER_DATA, name="memory")
        elif isinstance(message, UserMessage) and message.origin is MessageOrigin.USER:
            labels = _USER_DATA
            if place == prompt_place:
                labels = given if Label.UNTRUSTED in given else given | _USER_DATA
            elif place > prompt_place and said.isdisjoint(message.parts):
                labels = _UNTRUSTED | _USER_DATA if Label.USER_DATA in run.labels else _UNTRUSTED
            yield KnownText(text=message.text, labels=labels, name="prompt" if place <= prompt_place else "input")
    # The arguments of the steps of a plan may come from results of its other steps.
    for entry in (*(() if run.plan is None else run.plan.closed), *(run.open if run.reply is None else ())):
        if entry.result is not None:
            yield write(entry.call)
            yield read(entry.result)
