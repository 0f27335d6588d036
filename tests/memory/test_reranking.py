"""Rerankers of a memory: the order, failing ones, and the request of the HTTP one."""

import pytest

from agentfsm import Agent, MisuseError, ModelError, Usage
from agentfsm.core.events import Recalled
from agentfsm.memory import Memory, TermReranker
from agentfsm.models import HTTPReranker
from agentfsm.ports.reranker import Reranker, Reranking
from agentfsm.testing import ScriptedModel
from tests.support.embedding_server import serving_embeddings


class Lengths(Reranker):
    """Puts short texts first."""

    name = "lengths"
    fault = None
    count = 0

    async def rerank(self, query, texts):
        if self.fault is not None:
            raise self.fault
        return Reranking(scores=tuple(-float(len(text)) for text in texts)[self.count :], usage=Usage(input_tokens=7))


@pytest.fixture
async def memory(tmp_path):
    memory = Memory(tmp_path / "memory.db", reranker=Lengths())
    ann = memory.for_(user="ann")
    for text in ("Ann likes green tea and green tea", "Ann likes green tea, and her sister does not", "any tea"):
        await ann.remember(text)
    yield memory
    await memory.aclose()


async def test_the_reranker_orders_what_was_found(memory):
    """Its order replaces that of the search, also of scores below 0; the reasons name its ranks."""
    found = await memory.for_(user="ann").recall("green tea")
    assert [len(each.item.text) for each in found] == sorted(len(each.item.text) for each in found)
    assert [each.why["rerank"] for each in found] == [1, 2, 3]
    assert found[0].why["similarity"] == 1.0


async def test_a_run_records_the_reranker(memory):
    """The event has its usage; and if it fails, the reason, and the order of the search."""
    async with Agent(ScriptedModel("yes", "yes"), memory=memory) as agent:
        for fault in (None, OSError("away")):
            memory.reranker.fault = fault
            run = await agent.run("green tea", user="ann")
            (event,) = [each for each in await agent.history(run.id) if isinstance(each, Recalled)]
            assert len(event.items) == 3
            assert event.fault == ("" if fault is None else "the reranker lengths failed: OSError: away")
            assert event.usage.input_tokens == (7 if fault is None else 0)


async def test_a_wrong_number_of_scores_is_refused(memory):
    """A reranker that leaves texts out is a mistake of its author."""
    memory.reranker.count = 1
    with pytest.raises(MisuseError, match="2 scores for 3 texts"):
        await memory.for_(user="ann").recall("green tea")


async def test_a_reranker_of_another_form_is_refused(memory, monkeypatch):
    """The error says what to return."""

    async def rerank(_query, texts):
        return [1.0 for _ in texts]

    monkeypatch.setattr(memory.reranker, "rerank", rerank)
    with pytest.raises(MisuseError, match=r"returned list: return .*Reranking\(scores="):
        await memory.for_(user="ann").recall("green tea")


async def test_terms_are_scored():
    """Words in the order of the query are better than the same words elsewhere."""
    texts = ["tea that is not green", "a cup of green tea", "coffee"]
    first, second, none = (await TermReranker().rerank("Who drinks green tea?", texts)).scores
    assert second > first > none == 0.0


async def test_the_request_of_cohere_and_jina():
    """The documents are sent once, and the scores are put in their order."""
    with serving_embeddings() as server:
        results = [{"index": 1, "relevance_score": 0.9}, {"index": 0, "relevance_score": 0.1}]
        server.answer = lambda _body: (200, {"results": results, "usage": {"total_tokens": 12}})
        reranker = HTTPReranker("rerank-v3.5", base_url=server.base_url, api_key="secret")
        found = await reranker.rerank("tea", ["coffee", "green tea"])
        assert found.scores == (0.1, 0.9)
        assert found.usage.input_tokens == 12
        sent = {"model": "rerank-v3.5", "query": "tea", "documents": ["coffee", "green tea"], "top_n": 2}
        assert server.requests == [sent]
        for answer in ({"results": results[:1]}, {"results": [{"index": 0}, {"index": 1}]}, {"error": "no"}, []):
            server.answer = lambda _body, answer=answer: (200, answer)
            with pytest.raises(ModelError):
                await reranker.rerank("tea", ["coffee", "green tea"])
        await reranker.aclose()
