"""Protocols of detectors, which score texts, and of screens, which make calls wait for a person because of texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import attrs

from agentfsm.core.labels import LabelSource
from agentfsm.core.value import Value
from agentfsm.ports.guards import GuardDecision, ToolTraits


class Detector(Protocol):
    """Scores how likely a text is to give instructions that its reader should not follow."""

    async def score(self, text: str) -> float:
        """Return the score of a text, from 0 (harmless) to 1.

        Args:
            text: A window of a longer text, of some thousand characters.
        """
        ...


@attrs.frozen(kw_only=True)
class ScreenedText(Value):
    """A text that a run has read: the result of a call that has the label `untrusted`, or an input."""

    text: str
    """The whole text."""

    source: LabelSource | None
    """Call that brought the text; None for the prompt and other inputs."""

    @property
    def place(self) -> str:
        """Origin of the text for people, such as "call t1.0 of fetch_page"."""
        return "the input" if self.source is None else self.source.describe()


class TextScreen(Protocol):
    """Decides from the texts that a run has read whether a person is asked about its calls."""

    def concerns(self, tool: ToolTraits) -> bool:
        """Return whether a person can be asked about calls of the tool because of texts."""
        ...

    async def screen(self, texts: Sequence[ScreenedText]) -> GuardDecision | None:
        """Return the decision on the calls, with the verdict ASK; None if they give no reason to ask.

        It is called when a call of such a tool is about to be decided on, and the decision is committed with that of
        the guards. It never raises.

        Args:
            texts: Texts that the run had read when the calls were written, newest first.
        """
        ...
