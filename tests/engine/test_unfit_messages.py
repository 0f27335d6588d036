"""Messages that a vendor would refuse never come to be: not from a model, a caller, nor from a click that is late."""

from __future__ import annotations

import contextlib

import pytest

from agentfsm import (
    Agent,
    AssistantMessage,
    Limits,
    MisuseError,
    Outcome,
    State,
    SystemMessage,
    TextPart,
    ToolCall,
    ToolResult,
    UserMessage,
    tool,
)
from agentfsm.core.inbox import Approve, PostedItem
from agentfsm.core.messages import Message
from agentfsm.ports import FinishReason, Request
from agentfsm.stores import MemoryStore
from agentfsm.testing import FunctionModel, ScriptedModel, call, say
from tests.support.valid_histories import IMAGE, RUN, taken
from tests.support.wire_rules import check_wires, openai_of


@tool(read_only=True)
async def read() -> str:
    """Read."""
    return "words"


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.CONTENT_FILTER])
async def test_an_answer_cut_off_before_its_first_word_is_no_message(reason):
    """A model that thinks may spend all its tokens on that; what it did not say is not sent back to it."""
    script = ScriptedModel(say(" ", finish_reason=reason), "done")
    agent = Agent(script)
    cut = await agent.run("go")
    assert (cut.state, cut.usage.tokens) == (State.ERROR, 15)
    await agent.run("go on", after=cut)
    check_wires(script.requests[-1].messages)


async def test_a_reply_of_more_calls_than_openai_takes_back_is_sent_in_portions():
    """128 to a message; no call and no result is lost, and a text is said once."""
    script = ScriptedModel(say("all of them", *[call("read")] * 300), "done")
    run = await Agent(script, tools=[read], limits=Limits(tool_calls=301)).run("go")
    wire = openai_of(script.requests[-1].messages)
    check_wires(script.requests[-1].messages)
    assert [len(message["tool_calls"]) for message in wire if "tool_calls" in message] == [128, 128, 44]
    assert [message["tool_call_id"] for message in wire if message["role"] == "tool"] == [c.call_id for c in run.calls]
    assert [message["content"] for message in wire if message["role"] == "assistant"] == ["all of them", None, None]


async def test_a_blank_part_of_a_prompt_is_left_out():
    """No vendor takes it; what is beside it is kept."""
    script = ScriptedModel("done")
    await Agent(script).run((TextPart(text=" "), IMAGE, TextPart(text="what is it?")))
    check_wires(script.requests[0].messages)
    assert script.requests[0].messages[0].parts[1:] == (TextPart(text="what is it?"),)


class Late(MemoryStore):
    """Somebody clicks too late: once before the answer, and three times more while it is judged."""

    clicks = 0

    async def click(self) -> None:
        """Post a decision on a call that is closed."""
        await self.post(RUN, f"approval:{self.clicks}", Approve(call_id=f"t1.{self.clicks}"))
        self.clicks += 1

    async def inbox(self, run_id: str) -> tuple[PostedItem, ...]:
        """Return the rows, and click again."""
        rows = await super().inbox(run_id)
        if 0 < self.clicks < 4:
            await self.click()
        return rows


async def test_a_late_click_does_not_have_the_model_go_on_from_its_own_answer():
    """A request ends with what the model is to answer: its own draft would be taken for the beginning of one."""
    store = Late()
    asked: list[Request] = []

    async def answer(request: Request) -> str:
        asked.append(request)
        if not store.clicks:
            await store.click()
        return "done"

    assert (await Agent(FunctionModel(answer), store=store).run("go", id=RUN)).output == "done"
    for request in asked:
        check_wires(request.messages)


def called(**call: str) -> tuple[Message, ...]:
    """A call and its result."""
    result = ToolResult(call_id=call["id"], tool=call["name"], outcome=Outcome.DONE, content="")
    return AssistantMessage(calls=(ToolCall(**call),)), result


UNFIT: dict[str, tuple[Message, ...]] = {
    "an empty answer": (AssistantMessage(),),
    "a blank note": (SystemMessage(text=" "),),
    "a prompt of no parts": (UserMessage(parts=()),),
    "a blank part": (UserMessage(parts=(TextPart(text=""), IMAGE)),),
    "a long id": called(id="t" * 41, name="a", arguments="{}"),
    "no id": called(id="", name="a", arguments="{}"),
    "a name with a space": called(id="c", name="a b", arguments="{}"),
    "no number": called(id="c", name="a", arguments='{"n": NaN}'),
}


@pytest.mark.parametrize("name", UNFIT)
def test_a_history_that_no_vendor_takes_is_refused_at_the_start(name):
    """A caller's own messages are looked at as closely as a model's."""
    history = (UserMessage(parts=(TextPart(text="hello"),)), *UNFIT[name])
    with contextlib.suppress(MisuseError):
        run = Agent(ScriptedModel()).start("go on", messages=history)
        taken(run.header.history)
