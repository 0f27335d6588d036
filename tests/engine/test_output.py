"""Structured answers: how a model is held to a form, what becomes of its text, and what is refused."""

import json
from dataclasses import dataclass
from typing import Annotated, Literal

import attrs
import pytest
from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from agentfsm import (
    Agent,
    CallDelta,
    Limits,
    MisuseError,
    ModelRetry,
    RunContext,
    RunError,
    Settings,
    State,
    StopReason,
    TextDelta,
    tool,
)
from agentfsm.core import events as e
from agentfsm.ports import OutputMode
from agentfsm.stores import SQLiteStore
from agentfsm.testing import ScriptedModel, call, raw_call, say


class City(BaseModel):
    """A city of the answer."""

    name: str
    people: int = Field(ge=0)
    river: str | None = None


@dataclass
class Point:
    x: int
    y: int = 0


@attrs.frozen
class Town:
    name: str


class Road(TypedDict):
    to: str


ROME = {"name": "Rome", "people": 3}


def scripted(*lines, modes=tuple(OutputMode)):
    """Return a model that follows a script, and can be held to a form in these ways."""
    model = ScriptedModel(*lines)
    model.output_modes = modes
    return model


def names(history):
    return [type(event).__name__ for event in history]


@tool(read_only=True)
async def look(name: str) -> str:
    """Look a place up.

    Args:
        name: Of the place.
    """
    return f"{name} is there"


# The form


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (City, '{"name": "Rome", "people": 3}', City(name="Rome", people=3)),
        (Point, '{"x": 1}', Point(1)),
        (Town, '{"name": "Ur"}', Town("Ur")),
        (Road, '{"to": "Rome"}', {"to": "Rome"}),
        (int, '{"result": 7}', 7),
        (list[Point], '{"result": [{"x": 1, "y": 2}]}', [Point(1, 2)]),
        (City | Town, '{"result": {"name": "Ur"}}', Town("Ur")),
        (Literal["yes", "no"], '{"result": "yes"}', "yes"),
        (dict[str, int], '{"result": {"a": 1}}', {"a": 1}),
        (Point | str, "no idea", "no idea"),
        (Point | str, '{"result": {"x": 1}}', Point(1)),
        (str, "plain", "plain"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("mode", OutputMode)
async def test_an_answer_is_a_value_of_its_type(kind, text, value, mode):
    """Whatever JSON carries can be an answer, in each mode; what is no object stands under "result"."""
    if kind is str or (mode is OutputMode.SCHEMA and kind == dict[str, int]):
        mode = None
    reply = say("", raw_call("final_answer", text)) if mode is OutputMode.TOOL and text[0] == "{" else text
    agent = Agent(scripted(reply), output_type=kind, output_mode=mode)
    run = await agent.run("Where?")
    assert run.output == value
    assert type(run.output) is type(value)
    assert run.answer == text


@pytest.mark.parametrize(
    ("modes", "chosen"),
    [
        (tuple(OutputMode), "schema"),
        (("tool", "json", "prompt"), "tool"),
        (("json", "prompt"), "json"),
        (("prompt",), "prompt"),
    ],
)
async def test_the_best_way_that_the_model_has_is_taken(modes, chosen):
    """The provider's schema goes before a tool, that before JSON mode, and words come last."""
    words = json.dumps(ROME)
    reply = say("", call("final_answer", **ROME)) if chosen == "tool" else words
    model = scripted(reply, modes=tuple(map(OutputMode, modes)))
    run = await Agent(model, output_type=City, instructions="Be brief.").run("Where?")
    assert run.output == City(**ROME)
    (request,) = model.requests
    form, told = request.output, '"people"' in request.instructions
    assert (form is not None, form is not None and form.schema is not None) == (
        chosen in {"schema", "json"},
        chosen == "schema",
    )
    assert told == (chosen in {"json", "prompt"})
    assert [each.name for each in request.tools] == (["final_answer"] if chosen == "tool" else [])
    assert request.settings.tool_choice == ("required" if chosen == "tool" else None)
    assert request.instructions.startswith("Be brief.")
    if chosen == "schema":
        assert form.schema["additionalProperties"] is False
        assert set(form.schema["required"]) == {"name", "people", "river"}
    if chosen == "tool":
        assert "A city of the answer." in request.tools[0].description


async def test_a_type_that_strict_schemas_cannot_say_goes_another_way():
    """A dict with free keys has no strict schema: the next mode is taken, and asking for the first is an error."""
    model = scripted(say("", raw_call("final_answer", '{"result": {"a": 1}}')))
    assert (await Agent(model, output_type=dict[str, int]).run("x")).output == {"a": 1}
    with pytest.raises(MisuseError, match="strict"):
        Agent(scripted(), output_type=dict[str, int], output_mode="schema")


async def test_the_nulls_of_a_strict_schema_stand_for_what_is_left_out():
    """Strict schemas require every field; null is then the default of one that does not take it."""
    run = await Agent(scripted('{"x": 1, "y": null}'), output_type=Point).run("x")
    assert run.output == Point(1, 0)


async def test_how_an_answer_is_written_is_mended_and_its_text_kept():
    """Fences and trailing commas do no harm; the run keeps what the model wrote."""
    text = '```json\n{"name": "Ur",}\n```'
    run = await Agent(scripted(text, modes=(OutputMode.PROMPT,)), output_type=Town).run("x")
    assert (run.output, run.answer) == (Town("Ur"), text)


@pytest.mark.parametrize("serial", [False, True])
async def test_an_answer_beside_other_calls_comes_too_early(serial):
    """It is answered "not yet"; the other calls run, and the answer counts when it comes alone."""
    first = say("", call("look", name="Rome"), call("final_answer", **ROME))
    model = scripted(first, say("", call("final_answer", **ROME), expect="Not yet"), modes=(OutputMode.TOOL,))
    agent = Agent(model, tools=[look], output_type=City, settings=Settings(parallel_tool_calls=not serial))
    run = await agent.run("Where?")
    assert run.output == City(**ROME)
    assert [record.name for record in run.calls] == ["look", "final_answer"]
    assert names(await agent.history(run.id)).count("AnswerDrafted") == 1


async def test_plain_text_in_place_of_the_tool_is_looked_at_all_the_same():
    """JSON as text is taken; other words are sent back, with the tool's name."""
    agent = Agent(scripted(json.dumps(ROME), modes=(OutputMode.TOOL,)), output_type=City)
    assert (await agent.run("x")).output == City(**ROME)
    model = scripted(
        "Rome!", say("", call("final_answer", **ROME), expect="Call final_answer"), modes=(OutputMode.TOOL,)
    )
    assert (await Agent(model, output_type=City).run("x")).output == City(**ROME)


# Refusals


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (list[str], ["a", "b"]),
        (tuple[str, int], ("a", 1)),
        (dict[str, int], {"a": 1}),
        (set[str], {"a"}),
        (Annotated[str, Field(max_length=3)], "abc"),
        (Literal["a", "b"], "a"),
    ],
    ids=str,
)
async def test_a_type_that_only_holds_texts_is_no_text(kind, value):
    """What the model says beside it is sent back, as of any other type."""
    sent = [*value] if isinstance(value, set | tuple) else value
    model = scripted("I found none of them.", say("", call("final_answer", result=sent)), modes=(OutputMode.TOOL,))
    agent = Agent(model, output_type=kind)
    run = await agent.run("go")
    assert run.output == value
    assert len(model.requests) == 2


@pytest.mark.parametrize("kind", [str | City, City | str | None], ids=str)
async def test_a_union_with_text_takes_text(kind):
    """Whatever is none of the others."""
    run = await Agent(scripted("I found none.", modes=(OutputMode.TOOL,)), output_type=kind).run("go")
    assert run.output == "I found none."


async def test_an_answer_that_does_not_fit_is_sent_back_with_all_that_is_wrong():
    """The model reads each problem, and its next answer counts; the journal tells of it."""
    wrong = '{"name": 1, "people": -2}'
    agent = Agent(scripted(wrong, say(json.dumps(ROME), expect="name: should be a valid string")), output_type=City)
    run = await agent.run("Where?")
    assert run.output == City(**ROME)
    assert "people: should be greater than or equal to 0" in run.messages[-2].text
    assert names(await agent.history(run.id)) == [
        *("Observed", "AnswerDrafted", "Continued"),
        *("Observed", "AnswerDrafted", "Accepted"),
    ]
    assert run.refusals == 1


@pytest.mark.parametrize("retries", [0, 1, 2])
async def test_refusals_are_bounded(retries):
    """After so many corrections the run ends, with the last reason; what it spent is counted."""
    model = scripted(*["nothing"] * (retries + 1))
    run = await Agent(model, output_type=City, limits=Limits(answer_retries=retries)).run("x")
    assert (run.state, run.stop_reason) == (State.ERROR, StopReason.TOO_MANY_ERRORS)
    assert f"answers refused: {retries + 1}" in run.stop_message
    assert "not a JSON object" in run.stop_message
    assert run.usage.input_tokens == 10 * (retries + 1)
    with pytest.raises(RunError):
        _ = run.output


async def test_input_begins_the_count_anew():
    """Somebody who says more is owed new attempts."""
    agent = Agent(scripted("no", "no", "no", json.dumps(ROME)), output_type=City, limits=Limits(answer_retries=2))
    run = agent.start("x")
    while run.refusals < 2:
        run = await agent.step(run)
    await agent.send(run.id, "It is Rome.")
    run = await agent.finish(run)
    assert run.output == City(**ROME)


async def test_validators_refuse_with_their_own_words():
    """Plain and async ones, with and without the context, in order; none hears of a value that does not fit."""
    heard = []

    def is_even(value: int) -> None:
        heard.append(value)
        if value % 2:
            raise ModelRetry("give an even number")

    async def is_new(ctx: RunContext[int], value: int) -> None:
        if value == ctx.deps:
            raise ModelRetry(f"anything but {ctx.deps}")

    replies = [f'{{"result": {value}}}' for value in ('"x"', 3, 4, 6)]
    agent = Agent(
        scripted(*replies), output_type=int, output_validators=[is_even, is_new], limits=Limits(answer_retries=5)
    )
    run = await agent.run("A number", deps=4)
    assert run.output == 6
    assert heard == [3, 4, 6]
    notes = [message.text for message in run.messages if message.text.startswith("Your answer was refused")]
    assert ["even number" in notes[1], "anything but 4" in notes[2]] == [True, True]


async def test_validators_serve_plain_text_too():
    """Without an output_type the text itself is checked."""

    def is_short(text: str) -> None:
        if len(text) > 5:
            raise ModelRetry("at most 5 characters")

    run = await Agent(scripted("much too long", "short"), output_validators=[is_short]).run("x")
    assert run.output == "short"


async def test_a_fault_in_a_validator_is_its_authors():
    """It is raised, nothing is accepted, and the run can go on when it is mended."""
    faults = [ZeroDivisionError("mine")]

    def broken(_value: int) -> None:
        if faults:
            raise faults.pop()

    agent = Agent(scripted('{"result": 1}'), output_type=int, output_validators=[broken])
    run = agent.start("x")
    with pytest.raises(ZeroDivisionError):
        await agent.finish(run)
    assert (await agent.load(run.id)).state is State.REFLECT
    assert (await agent.resume(run.id)).output == 1


# What stays


async def test_a_run_from_the_journal_has_its_type(tmp_path):
    """The store holds text; each agent that loads it makes its own value of it."""
    store = SQLiteStore(tmp_path / "runs.db")
    async with Agent(scripted(json.dumps(ROME)), output_type=City, store=store) as agent:
        run = await agent.run("x")
        assert (await agent.load(run.id)).output == City(**ROME)
        assert (await agent.resume(run.id)).output == City(**ROME)
        assert (await agent.with_(output_type=None).load(run.id)).output == json.dumps(ROME)
        steps = [run async for run in agent.with_(model=scripted(json.dumps(ROME))).steps(agent.start("y"))]
        assert steps[-1].output == City(**ROME)
        replay = await agent.replay(run.id)
        assert (replay.is_faithful, replay.checked) == (True, 1)
        draft = next(each for each in await agent.history(run.id) if isinstance(each, e.AnswerDrafted))
        assert draft.message.text == json.dumps(ROME)


async def test_two_runs_are_equal_whatever_makes_their_values():
    """What decodes the answer is no part of the run."""
    agent = Agent(scripted(json.dumps(ROME)), output_type=City)
    run = await agent.run("x")
    assert run == attrs.evolve(run, decoder=None)
    assert "decoder" not in repr(run)


# Streams


@pytest.mark.parametrize(
    ("mode", "fence"), [(OutputMode.SCHEMA, ""), (OutputMode.TOOL, ""), (OutputMode.PROMPT, "```")]
)
async def test_an_answer_can_be_read_while_it_is_written(mode, fence):
    """What has come of it is told as JSON values, which only grow; a reply that is no answer tells nothing."""
    bare = '{"name": "Rome on the Tiber", "people": 3}'
    text = f"{fence}{bare}{fence}"
    final = say("", raw_call("final_answer", text)) if mode is OutputMode.TOOL else text
    agent = Agent(Pieces(say("", call("look", name="Rome")), final), tools=[look], output_type=City, output_mode=mode)
    async with agent.stream("Where?") as stream:
        seen = [stream.partial async for event in stream if isinstance(event, TextDelta | CallDelta)]
    assert stream.run.output == City(**json.loads(bare))
    values = [value for value in seen if value]
    assert set(values[0]) == {"name"}
    assert seen[-1] == values[-1] == json.loads(bare)
    lengths = [len(value.get("name", "")) for value in values]
    assert lengths == sorted(lengths)
    assert len(set(lengths)) > 3


async def test_a_plain_answer_has_no_partial_value():
    """Its text is in the deltas."""
    async with Agent(ScriptedModel("Rome")).stream("Where?") as stream:
        assert [stream.partial async for _ in stream][-1] is None


class Pieces(ScriptedModel):
    """Hands a reply out in pieces of three characters."""

    output_modes = tuple(OutputMode)

    async def reply(self, request, emit=None):
        def cut(chunk):
            field = next((name for name in ("arguments", "text") if getattr(chunk, name, "")), None)
            whole = getattr(chunk, field) if field else ""
            for start in range(0, max(len(whole), 1), 3):
                emit(attrs.evolve(chunk, **{field: whole[start : start + 3]}) if field else chunk)

        return await super().reply(request, emit and cut)


# Misuse


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"output_type": object()}, "has no JSON Schema"),
        ({"output_type": type}, "has no JSON Schema"),
        ({"output_mode": "tool"}, "pass output_type as well"),
        ({"output_type": City, "output_mode": "magic"}, "no output_mode 'magic'; it has: schema, tool, json, prompt"),
        ({"output_validators": [lambda: None]}, "takes one value"),
        ({"output_validators": [lambda a, b: None]}, "takes one value"),
    ],
)
def test_what_cannot_work_is_refused_when_the_agent_is_made(options, words):
    """Nobody finds out at the first answer."""
    with pytest.raises(MisuseError, match=words):
        Agent(scripted(), **options)


def test_the_name_of_the_output_tool_is_taken():
    """A tool of the user's cannot have it."""

    @tool(name="final_answer")
    def mine() -> str:
        """Do."""

    with pytest.raises(MisuseError, match="rename yours"):
        Agent(scripted(), tools=[mine], output_type=City)
