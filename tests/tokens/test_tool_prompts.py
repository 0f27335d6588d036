"""Tools are counted in the form that a provider shows its model; a provider's own count corrects the rest."""

from __future__ import annotations

import attrs
import pytest

from agentfsm import Agent, Usage, tool
from agentfsm.ports import Model, ProposedCall, Reply, ToolDefinition
from agentfsm.tokens.ledger import BYTE_COUNTER, TokenLedger
from agentfsm.tokens.tool_prompts import count_tools
from tests.support.word_counter import WordCounter

WEATHER = ToolDefinition(
    name="get_weather",
    description="Return the weather.",
    parameters={
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "Name of the city."},
            "unit": {"enum": ["C", "F"]},
            "days": {"type": "array", "items": {"type": "integer"}},
        },
        "required": ["city"],
        "additionalProperties": False,
    },
)


class Recording(WordCounter):
    """Keeps the texts."""

    def __init__(self):
        super().__init__()
        self.texts = []

    def count(self, text):
        self.texts.append(text)
        return super().count(text)


@pytest.mark.parametrize("name", ["gpt-4o", "openai/gpt-5", "o3", "ft:gpt-4o-mini:me"])
def test_openai_is_counted_as_typescript(name):
    counter = Recording()
    assert count_tools((WEATHER,), counter, name) > 6
    assert counter.texts[0].splitlines()[6:13] == [
        "// Return the weather.",
        "type get_weather = (_: {",
        "// Name of the city.",
        "city: string,",
        'unit?: "C" | "F",',
        "days?: number[],",
        "}) => any;",
    ]


def test_claude_is_counted_with_its_instructions():
    """They are most of the tokens of a small tool."""
    as_json = count_tools((WEATHER,), BYTE_COUNTER)
    assert count_tools((WEATHER,), BYTE_COUNTER, "claude-sonnet-4-5") == 500 + int(1.3 * as_json)
    assert count_tools((WEATHER,), BYTE_COUNTER, "claude-3-5-haiku") == 300 + int(1.3 * as_json)
    assert count_tools((WEATHER,), BYTE_COUNTER, "mistral-large") == as_json
    assert count_tools((), BYTE_COUNTER, "claude-sonnet-4-5") == 0


@pytest.mark.parametrize(
    "odd", [{}, {"type": "object"}, {"properties": {"a": True}}, {"properties": {"a": {"$ref": "#"}}}]
)
def test_schemas_of_any_form_are_counted(odd):
    assert count_tools((attrs.evolve(WEATHER, parameters=odd),), BYTE_COUNTER, "gpt-4o") > 0


class Billing(Model):
    """Bills 300 tokens more than are counted, and notes what is counted for each request."""

    name = "billing"
    window_tokens = 4_000

    def __init__(self) -> None:
        self.turns = 0

    async def reply(self, request, emit=None):
        self.turns += 1
        calls = (ProposedCall(id="c", name="look", arguments="{}"),) if self.turns < 12 else ()
        words = sum(len(str(message).split()) for message in request.messages)
        return Reply(text="" if calls else "done", calls=calls, usage=Usage(input_tokens=words * 3, output_tokens=1))


async def test_the_providers_count_leads_to_an_earlier_compaction(monkeypatch):
    """What it bills above the count is room that the next request does not have."""
    counted = []
    original = TokenLedger.calibrate

    def note(self, input_tokens):
        original(self, input_tokens)
        counted.append((self.correction_tokens, self.request_tokens, input_tokens))

    async def load(_model):
        return WordCounter()

    monkeypatch.setattr(TokenLedger, "calibrate", note)
    monkeypatch.setattr("agentfsm.tokens.load_counter", load)

    @tool(read_only=True, poll=True)
    def look() -> str:
        """Look."""
        return "word " * 300

    agent = Agent(Billing(), tools=[look])
    run = await agent.run("go")
    assert run.output == "done"
    assert counted, "the vocabulary was never loaded"
    assert all(total == max(billed, total - correction) for correction, total, billed in counted)
    assert any(correction > 0 for correction, _, _ in counted)
