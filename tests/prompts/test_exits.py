"""Scratchpads and exits: what the user never sees, and the answers that leave a task undone."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentfsm import Agent, ModelRetry
from agentfsm.prompts import Clarify, Refuse, split_scratchpad, take_action
from agentfsm.testing import ScriptedModel, call, say


@dataclass
class Route:
    """The tool for a request."""

    tool: str


def test_the_scratchpad_is_split_off():
    """Also if it talks of actions."""
    reply = "<scratchpad>\nMaybe <action>delete</action>?\n</scratchpad>\n<action>\n{}\n</action>"
    split = split_scratchpad(reply)
    assert (split.scratchpad, split.action) == ("Maybe <action>delete</action>?", "{}")


@pytest.mark.parametrize(
    "reply",
    ["", "{}", "<scratchpad>x<action>{}</action>", "<action>a</action><action>b</action>", "<action>open"],
)
def test_a_reply_without_one_action_is_refused(reply):
    """The model reads why."""
    with pytest.raises(ModelRetry, match="write one <action>"):
        split_scratchpad(reply)


@given(st.text(max_size=50), st.text(max_size=50))
def test_no_thought_is_taken_for_the_action(thought, action):
    """For any text that has no tags of its own."""
    if "<" not in thought + action:
        split = split_scratchpad(f"<scratchpad>{thought}</scratchpad><action>{action}</action>")
        assert (split.scratchpad, split.action) == (thought.strip(), action.strip())


async def test_a_run_gives_the_action_and_keeps_the_thought():
    """The output is the action; the journal has all of it."""
    model = ScriptedModel("just do it", "<scratchpad>It is maths.</scratchpad><action>calculator</action>")
    run = await Agent(model, output_validators=[take_action]).run("2+2?")
    assert take_action(run.output) == "calculator"
    assert split_scratchpad(run.answer).scratchpad == "It is maths."


@pytest.mark.parametrize(
    ("result", "answer"),
    [
        ({"tool": "search"}, Route("search")),
        ({"action": "clarify", "question": "Which month?"}, Clarify("Which month?")),
        ({"action": "refuse", "reason": "not allowed"}, Refuse("not allowed")),
    ],
)
async def test_exits_are_answers_of_a_union(result, answer):
    """The model chooses one of three types."""
    agent = Agent(ScriptedModel(say("", call("final_answer", result=result))), output_type=Route | Clarify | Refuse)
    assert (await agent.run("Route this.")).output == answer
