"""The texts that a run has read and written, for rules that look for data of one in another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from agentfsm.core.labels import Label, LabelSource
from agentfsm.core.messages import AssistantMessage, MessageOrigin, ToolResult, UserMessage
from agentfsm.ports.guards import KnownText
from agentfsm.tools.builtin import ASK_USER

if TYPE_CHECKING:
    from agentfsm.core.messages import HostedContent, ToolCall
    from agentfsm.core.run import Run

_USER_DATA = frozenset({Label.USER_DATA})


def list_known_texts(run: Run) -> tuple[KnownText, ...]:
    """Return the texts that a run had read when its open calls were written, and the arguments of earlier calls.

    The words of the user, recalled items and answers to `ask_user` are user data. A prompt that is labelled as
    untrusted when the run is started is a stranger's text instead, unless it is labelled as user data too.
    """
    return tuple(_iter_known_texts(run))


def _iter_known_texts(run: Run) -> Iterator[KnownText]:
    owner = run.header.user or ""

    def source(name: str, call_id: str = "") -> LabelSource:
        return LabelSource(label=Label.USER_DATA, run_id=run.id, call_id=call_id, name=name, owner=owner)

    def write(call: ToolCall) -> KnownText:
        return KnownText(text=call.arguments, labels=frozenset(), source=source(call.name, call.id), is_written=True)

    def read(result: ToolResult) -> KnownText:
        labels = frozenset(result.labels).union(_USER_DATA if result.tool == ASK_USER else ())
        return KnownText(text=result.content, labels=labels, source=source(result.tool, result.call_id))

    given = frozenset([each.label for each in run.header.labels if each.run_id == run.id and each.name == "prompt"])
    prompt_labels = given if Label.UNTRUSTED in given else given | _USER_DATA
    prompt_place = run.own_start + len(run.header.history)
    for place, message in enumerate(run.messages):
        if isinstance(message, ToolResult):
            yield read(message)
        elif isinstance(message, AssistantMessage):
            if message.hosted is not None:
                name = message.hosted.calls[0].tool if message.hosted.calls else "reply"
                text = "\n".join(_iter_hosted(message.hosted))
                yield KnownText(text=text, labels=frozenset(message.hosted.labels), source=source(name))
            yield from map(write, message.calls)
        elif isinstance(message, UserMessage) and message.origin is not MessageOrigin.PLAN:  # its results follow
            labels = prompt_labels if place == prompt_place else _USER_DATA
            yield KnownText(text=message.text, labels=labels, source=source("memory" if message.is_note else "prompt"))
    # The arguments of the steps of a plan may come from results of its other steps.
    steps = (*(() if run.plan is None else run.plan.closed), *(run.open if run.reply is None else ()))
    for entry in steps:
        if entry.result is not None:
            yield write(entry.call)
            yield read(entry.result)


def _iter_hosted(content: HostedContent) -> Iterator[str]:
    for citation in content.citations:
        yield f"{citation.url} {citation.title} {citation.quote}"
    for call in content.calls:
        yield call.output
