"""Tiers and caches in traces and metrics: each model's own tokens, and no request where none was sent."""

import pytest

from agentfsm import Agent, AnswerCache, Settings
from agentfsm.models import CachedModel, Tiered
from agentfsm.ports import FinishReason
from agentfsm.stores import MemoryStore
from agentfsm.telemetry import trace_of
from agentfsm.telemetry.measurements import REQUESTS, TOKENS, measure_run
from agentfsm.testing import ScriptedModel, say

pytestmark = pytest.mark.anyio


class Named(ScriptedModel):
    """A script with a name."""

    def __init__(self, name, *script):
        super().__init__(*script)
        self.name = name


async def observe(agent, run):
    """Return the first span of a run, with the tokens and the requests that it counts by model."""
    stored = await agent.store.read(run.id)
    span, *_ = [each for each in trace_of(stored.header, stored.events) if not each.name.startswith("wait")]
    measured = list(measure_run(stored.header, stored.events))
    tokens = {each.labels[1:]: each.value for each in measured if each.metric == TOKENS.name}
    return span, tokens, [each.labels[1:] for each in measured if each.metric == REQUESTS.name]


async def test_an_escalated_reply_and_its_repetition():
    """The tokens of both models are counted, each under its name; the repeated answer is not a request."""
    small = Named("mini", say("No.", finish_reason=FinishReason.REFUSAL))
    model = Tiered({"small": small, "large": Named("max", "Rome.")}, choose=lambda _: "small")
    agent = Agent(model, answer_cache=AnswerCache())
    first, again = [await agent.run("The capital of Italy?", user="ann") for _ in range(2)]
    span, tokens, requests = await observe(agent, first)
    assert (span.name, span.attributes["agentfsm.tier"]) == ("chat max", "large")
    assert span.attributes["agentfsm.tier.reason"] == "escalated from small: refusal"
    assert {model for model, _ in tokens} == {"mini", "max"}
    assert requests == [("max", "done")]
    span, tokens, requests = await observe(agent, again)
    assert (span.name, span.attributes["agentfsm.answered_from"]) == ("repeat_answer", first.id)
    assert "gen_ai.request.model" not in span.attributes
    assert (tokens, requests) == ({}, [])


async def test_a_cached_reply():
    """It is a request of the agent, which no provider was sent."""
    store = MemoryStore()
    for script in (["Rome."], []):
        agent = Agent(CachedModel(ScriptedModel(*script), store), settings=Settings(temperature=0))
        run = await agent.run("The capital of Italy?")
    span, tokens, requests = await observe(agent, run)
    assert (span.attributes["agentfsm.cached_replies"], span.attributes["gen_ai.usage.input_tokens"]) == (1, 0)
    assert (tokens, requests) == ({}, [("scripted", "cached")])
