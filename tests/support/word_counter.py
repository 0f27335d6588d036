"""Words for tokens, so that a test can be read."""

from __future__ import annotations

from collections import Counter

from agentfsm.ports import TokenCounter


class WordCounter(TokenCounter):
    """Counts words, and remembers what it was asked."""

    encoding = "words"
    exact = True

    def __init__(self) -> None:
        """Begin with nothing asked."""
        self.asked: Counter[str] = Counter()

    def count(self, text: str) -> int:
        """Count."""
        self.asked[text] += 1
        return len(text.split())
