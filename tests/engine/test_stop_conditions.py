"""Stop conditions: functions of the run that end it, with a text as its answer or without one."""

from __future__ import annotations

import contextlib
import json
from functools import partial

import attrs
import pytest

from agentfsm import Agent, Limits, MisuseError, ModelRetry, State, StopReason, TextDelta, stop_after_tool, tool
from agentfsm.core import events as e
from agentfsm.guards import exit_filter
from agentfsm.planning import Planner
from agentfsm.ports import Judge
from agentfsm.reflection import Action, Verdict
from agentfsm.testing import ScriptedModel, call, say
from tests.support.failing_stores import CrashingStore, WorkerKilled


@tool(read_only=True)
async def look(at: str = "") -> str:
    """Look."""
    return f"saw {at}"


@tool
async def submit(title: str) -> dict[str, str]:
    """Submit."""
    submitted.count += 1
    if title == "bad":
        raise ModelRetry("give a title")
    return {"title": title}


class Submitted:
    """How often `submit` was called."""

    count = 0


submitted = Submitted()


@attrs.frozen
class Report:
    title: str


def is_enough(run):
    return len(run.calls) >= 2


def looking(store, *lines, **options):
    lines = lines or [say(f"I look at {at}.", call("look", at=at)) for at in "abc"]
    return Agent(ScriptedModel(*lines), tools=[look, submit], store=store, **options)


async def test_a_condition_without_an_answer_stops_as_a_limit(store):
    """It is asked after each turn; the journal names it, and the last text is the partial answer."""
    agent = looking(store, stop_when=[lambda _run: False, is_enough])
    run = await agent.run("go")
    assert (run.state, run.stop_reason, run.turn) == (State.ERROR, StopReason.STOP_CONDITION, 2)
    assert (run.partial, run.stop_message) == ("I look at b.", "the stop condition is_enough holds")
    assert (await agent.history(run.id))[-1].message == run.stop_message


async def test_a_last_answer_may_be_asked_for(store):
    """As at any limit: without tools, and the stop reason stays."""
    lines = [say("", call("look", at="a"), call("look", at="b")), "Both are there."]
    run = await looking(store, *lines, stop_when=[is_enough], last_answer=True).run("go")
    assert (run.stop_reason, run.partial) == (StopReason.STOP_CONDITION, "Both are there.")


async def test_a_text_is_the_answer(store):
    """No model is asked for it; the journal has the name of the condition, and the decision in one append."""
    lines = [say("", call("look", at="a")), say("", call("look", at="b")), "More."]
    agent = looking(store, *lines, stop_when=[lambda run: f"{len(run.calls)} calls" if is_enough(run) else None])
    async with agent.stream("go") as stream:
        texts = [event.text async for event in stream if isinstance(event, TextDelta)]
    run = stream.run
    assert (run.output, run.state, run.stop_reason) == ("2 calls", State.DONE, StopReason.COMPLETED)
    assert texts[-1] == "2 calls"
    *_, continued, observed, drafted, accepted = await agent.history(run.id)
    assert [type(each) for each in (observed, drafted, accepted)] == [e.Observed, e.AnswerDrafted, e.Accepted]
    assert continued.note == "The stop condition <lambda> holds, so this is the answer:"
    assert (await agent.replay(run.id)).is_faithful
    assert (await agent.run("And now?", after=run)).output == "More."


async def test_stop_after_a_tool(store):
    """Its result is the answer. A failed call and another tool stop nothing, and a limit comes second."""
    lines = [say("", call("look")), say("", call("submit", title="bad")), say("", call("submit", title="Rain"))]
    agent = looking(store, *lines, stop_when=[stop_after_tool("submit")], limits=Limits(turns=3))
    run = await agent.run("go")
    assert (run.output, run.stop_reason) == ('{"title":"Rain"}', StopReason.COMPLETED)
    notes = [each.note for each in await agent.history(run.id) if isinstance(each, e.Continued)]
    assert "stop_after_tool('submit')" in notes[-1]


async def test_the_result_has_to_fit_the_type(store):
    """It is checked as an answer of the model; one that is refused is sent to the model, which goes on."""
    fits = looking(
        store, say("", call("submit", title="Rain")), output_type=Report, stop_when=[stop_after_tool("submit")]
    )
    assert (await fits.run("go")).output == Report("Rain")
    lines = [say("", call("look", at="a")), say("", call("final_answer", title="By hand"))]
    other = looking(store, *lines, output_type=Report, output_mode="tool", stop_when=[stop_after_tool("look")])
    assert (await other.run("go")).output == Report("By hand")
    assert "refused: the answer is not a JSON object" in other.model.requests[1].messages[-1].text


async def test_the_steps_of_a_plan_count(store):
    """They are calls like others."""
    plan = json.dumps({"steps": [{"id": 1, "tool": "submit", "arguments": {"title": "Rain"}}]})
    agent = looking(store, plan, planner=Planner(), stop_when=[stop_after_tool("submit")])
    assert (await agent.run("go")).output == '{"title":"Rain"}'


@attrs.frozen
class Never(Judge):
    """Sends every draft back."""

    async def judge(self, run, ask):
        return Verdict(action=Action.RETRY_STEP, note="better")

    def wants(self, run):
        return run.state is State.REFLECT and not run.calls


async def test_it_is_asked_when_a_draft_is_sent_back(store):
    """Otherwise a judge could keep a run going that has to stop. A draft that is accepted needs no condition."""
    agent = looking(store, "one", "two", "three", reflector=Never(), stop_when=[lambda run: run.turn >= 2])
    run = await agent.run("go")
    assert (run.stop_reason, run.partial, run.turn) == (StopReason.STOP_CONDITION, "two", 2)
    assert (await looking(store, "one", stop_when=[lambda _run: True]).run("go")).output == "one"


@pytest.mark.parametrize(("mode", "reason"), [("redact", StopReason.COMPLETED), ("refuse", StopReason.GUARD)])
async def test_guards_read_the_answer(store, mode, reason):
    """A text that no model wrote is filtered as one of a model is, and the journal says so."""
    guards = [exit_filter(secrets=["horse-battery"], mode=mode)]
    agent = looking(store, stop_when=[lambda _run: "the key: horse-battery"], guards=guards)
    run = await agent.run("go")
    assert run.stop_reason is reason
    assert "horse-battery" not in str(await agent.history(run.id))


def impure(run, *, times):
    raise ValueError(f"no {times}")


async def later(run):
    return True


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        (partial(impure, times=3), "impure raised ValueError: no 3"),
        (lambda run: run.turn, "returned 1: return False or None"),
        (lambda run: "  ", "returned '  '"),
        (lambda run, wait=later: wait(run), "returned <coroutine"),
    ],
)
async def test_a_wrong_condition_is_an_error_and_the_run_can_be_resumed(store, condition, message):
    """With the corrected agent, which goes on where it was: nothing is called twice."""
    agent = looking(store, stop_when=[condition])
    with pytest.raises(MisuseError, match=f"the stop condition .*{message}"):
        await agent.run("go", id="r")
    corrected = looking(store, "unused", stop_when=[stop_after_tool("look")])
    run = await corrected.resume("r")
    assert (run.output, len(run.calls)) == ("saw a", 1)
    assert corrected.model.requests == []


@pytest.mark.parametrize("given", [is_enough, "stop", [3], [later]])
def test_wrong_lists_are_refused(given):
    with pytest.raises(MisuseError, match=r"Agent\(stop_when=.*give a list of functions of the run"):
        Agent(ScriptedModel(), stop_when=given)
    for names in [(), ("",), (3,)]:
        with pytest.raises(MisuseError, match="stop_after_tool"):
            stop_after_tool(*names)


@pytest.mark.parametrize("written", [False, True], ids=["before", "after"])
async def test_a_run_that_dies_at_any_append_decides_the_same(store, written):
    """Killed before or after each append, and resumed: it ends with the same answer and calls nothing twice."""
    lines = [say("", call("look", at="a")), say("", call("submit", title="Rain"))]
    for at in range(1, 40):
        mortal, name = CrashingStore(store, at, written=written), f"run-{at}"
        stop_when, submitted.count = [stop_after_tool("submit")], 0
        with contextlib.suppress(WorkerKilled):
            await looking(mortal, *lines, stop_when=stop_when).run("go", id=name)
        known = sum(isinstance(each, e.ToolsChosen) for each in (await store.read(name)).events)
        run = await looking(store, *lines[known:], stop_when=stop_when).resume(name)
        if run.is_waiting:  # the call may have been made: a person settles it
            continue
        assert (run.output, run.stop_reason, submitted.count) == ('{"title":"Rain"}', StopReason.COMPLETED, 1)
        if not mortal.dead:
            break
    assert at > 3
