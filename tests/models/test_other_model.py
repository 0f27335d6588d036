"""A provider that replies with another model than the snapshot that was asked for."""

import pytest

from agentfsm import Agent
from agentfsm.core.events import AnswerGiven
from agentfsm.engine.model_calls.reply import find_other_model
from agentfsm.ports import Reply
from agentfsm.telemetry.measurements import OTHER_MODELS, measure_run
from agentfsm.testing import FunctionModel, say
from tests.support.model_wires import ANTHROPIC, CHAT, RESPONSES, both_ways, forget_keys


@pytest.mark.parametrize(
    ("asked", "served", "is_other"),
    [
        ("gpt-4o-2024-08-06", "gpt-4o-2024-11-20", True),
        ("claude-sonnet-4-20250514", "claude-sonnet-4-5-20250929", True),
        ("gemini-1.5-pro-002", "gemini-1.5-pro-001", True),
        ("gpt-4-0613", "gpt-4o-mini", True),
        ("gpt-4o-2024-08-06", "gpt-4o-2024-08-06", False),
        ("openai/gpt-4o-2024-08-06", "gpt-4o-2024-08-06", False),
        ("gpt-4o-2024-08-06", "azure/GPT-4o-2024-08-06", False),
        ("anthropic.claude-3-5-sonnet-20241022-v2:0", "claude-3-5-sonnet-20241022", False),
        ("claude-3-5-sonnet@20241022", "claude-3-5-sonnet-20241022", False),
        ("gpt-4o-2024-08-06", "gpt-4o", False),  # less exact, not another
        ("gpt-4o", "gpt-4o-2024-11-20", False),  # the name stands for any snapshot
        ("prod", "gpt-4o-2024-11-20", False),  # a deployment of Azure
    ],
)
def test_only_a_snapshot_can_be_another_model(asked, served, is_other):
    """A name without a snapshot promises nothing, and servers add prefixes to names or shorten them."""
    assert find_other_model(asked, served) == (served if is_other else "")


@pytest.mark.parametrize("wire", [CHAT, RESPONSES, ANTHROPIC], ids=str)
@both_ways
async def test_each_adapter_reports_the_model_of_the_reply(wire, streamed, monkeypatch, tmp_path):
    """Streamed or not; the local server replies with the name that it was asked for."""
    forget_keys(monkeypatch, tmp_path)
    reply, _, _ = await wire.ask(say("It is sunny."), streamed=streamed, name="m-2026-11-20")
    assert reply.served_model == "m-2026-11-20"


async def test_another_model_is_in_the_journal_the_log_and_the_metrics(caplog):
    """The run goes on, because its answer may be good; and a reply of the snapshot itself says nothing."""
    names = ["m-2026-11-20", "m-2026-05-01"]
    for served, expected in zip(names, ["m-2026-11-20", ""], strict=True):
        model = FunctionModel(lambda _, served=served: Reply(text="done", served_model=served))
        model.name = "m-2026-05-01"
        agent = Agent(model)
        run = await agent.run("go")
        (answer,) = [each for each in await agent.history(run.id) if isinstance(each, AnswerGiven)]
        measured = measure_run(run.header, await agent.history(run.id))
        labels = [each.labels for each in measured if each.metric == OTHER_MODELS.name]
        assert (run.output, answer.served_model) == ("done", expected)
        assert labels == ([("agent", "m-2026-05-01", expected)] if expected else [])
    assert caplog.text.count("other_model") == 1
