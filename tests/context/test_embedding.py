"""The scorer by meaning, and what it costs."""

import pytest

from agentfsm import Agent, Usage
from agentfsm.context import BySimilarity, EmbeddingScorer
from agentfsm.context import similarity as module
from agentfsm.ports import ToolDefinition
from agentfsm.testing import HashEmbedder, ScriptedModel


def build_tools(*names):
    return [ToolDefinition(name=name, description=f"{name} it", parameters={"type": "object"}) for name in names]


async def test_scores_are_cosines():
    """From -1 to 1, in the order of the texts; a text is embedded once, and a query each time."""
    embedder = HashEmbedder()
    scorer = EmbeddingScorer(embedder)
    found = await scorer.scores("send mail", ["mail send", "weather", "mail send"])
    assert found.scores[0] == found.scores[2] == pytest.approx(1)
    assert found.scores[1] < 0.5
    assert found.usage == Usage(input_tokens=5)
    again = await scorer.scores("weather", ["mail send", "weather"])
    assert again.scores[1] == pytest.approx(1)
    assert embedder.texts == ["send mail", "mail send", "weather", "weather"]


async def test_the_cache_is_bounded(monkeypatch):
    """The least recently used texts are dropped, and embedded again when they return."""
    monkeypatch.setattr(module, "MAX_CACHED_TEXTS", 2)
    embedder = HashEmbedder()
    scorer = EmbeddingScorer(embedder)
    for texts in (["a", "b"], ["a", "c"], ["b"]):
        await scorer.scores("q", texts)
    assert embedder.texts == ["q", "a", "b", "q", "c", "q", "b"]


async def test_a_selection_counts_the_embedder():
    """The usage is that of the selection; a failing embedder falls back to the first tools, and says why."""
    embedder = HashEmbedder()
    selector = BySimilarity(top=1, scorer=EmbeddingScorer(embedder))
    chosen = await selector.select("please send", build_tools("read", "send", "drop"), ScriptedModel("x"))
    assert (chosen.tools, chosen.how, chosen.usage.input_tokens) == (("send",), "similarity", 11)
    assert (await selector.find("drop", build_tools("read", "drop")))[0] == "drop"
    embedder.fault = OSError("away")
    chosen = await selector.select("please send", build_tools("read", "send"), ScriptedModel("x"))
    assert chosen.tools == ("read", "send")
    assert "the scorer raised OSError: away" in chosen.how
    assert Agent(ScriptedModel("x"), selector=selector).selector is selector
