"""Answers of runs with labels, so that a run whose prompt has one of them gets its labels."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from agentfsm.core.labels import EFFECT_LABELS, Label, LabelSource
from agentfsm.core.messages import TextPart

if TYPE_CHECKING:
    from agentfsm.core.messages import Part
    from agentfsm.core.run import Run

# Answers that are known in a process, the newest, over all agents.
MAX_ANSWERS: Final = 256
# Characters of such an answer: a shorter one would be found by chance, and a longer one takes memory.
MIN_CHARS: Final = 20
MAX_CHARS: Final = 20_000
_NOT_IN_TEXT: Final = EFFECT_LABELS | {Label.USER_DATA}

# The answers with the labels of their runs, for all agents of the process.
KNOWN_ANSWERS: Final[OrderedDict[str, Mapping[Label, LabelSource]]] = OrderedDict()


def remember_answer(run: Run[Any]) -> None:
    """Keep the answer of a run in DONE with the labels of the data that it has read; nothing if it has none."""
    labels = {label: source for label, source in run.labels.items() if label not in _NOT_IN_TEXT}
    text = run.answer.strip() if labels else ""
    if MIN_CHARS <= len(text) <= MAX_CHARS:
        KNOWN_ANSWERS[text] = {**KNOWN_ANSWERS.pop(text, {}), **labels}
        while len(KNOWN_ANSWERS) > MAX_ANSWERS:
            KNOWN_ANSWERS.popitem(last=False)


def find_answer_labels(prompt: Iterable[Part]) -> Mapping[Label, LabelSource]:
    """Return the labels of the known answers that stand in a prompt as a whole, with their first sources."""
    texts = [part.text for part in prompt if isinstance(part, TextPart)]
    labels: dict[Label, LabelSource] = {}
    for answer, found in list(KNOWN_ANSWERS.items()):  # another thread may add to them
        if any(answer in text for text in texts):
            labels = {**found, **labels}
    return labels
