"""What tools return beside text: how it is named, what is left out, and what becomes of it in a run."""

from __future__ import annotations

import json

import attrs
import pytest

from agentfsm import (
    Agent,
    AudioPart,
    FilePart,
    Found,
    ImagePart,
    Outcome,
    RunContext,
    TextPart,
    ToolCall,
    ToolQueue,
    ToolRegistry,
    ToolResult,
    tool,
)
from agentfsm.context import TrimResults
from agentfsm.core.codec import encode_event
from agentfsm.core.encoding import MAX_RECORD_CHARS
from agentfsm.core.events import Compacted, ToolFinished
from agentfsm.core.header import Header
from agentfsm.ports import Context
from agentfsm.testing import ScriptedModel, call, say
from agentfsm.tools.queue import media, result_text
from agentfsm.tools.run_context import ToolReturn
from tests.support.checks import results_of, sound
from tests.support.unknown_outcomes import recovered

PNG = b"\x89PNG\r\n\x1a\n" + b"\0" * 37
IMAGE = ImagePart.of(PNG)
PDF = FilePart.of(b"%PDF-1.7 ...", name="a.pdf")
HEADER = Header(id="r1", prompt=(TextPart(text="go"),), created_at=0.0)
SOUND = AudioPart.of(b"RIFF\0\0\0\0WAVE")


# In words


def test_a_part_is_named_by_its_place_and_what_it_is():
    """The text stands by itself: each line is a piece of what was returned."""
    text, found = result_text.render_result(["Two pages:", IMAGE, TextPart(text="and"), PDF, SOUND, {"pages": 2}])
    assert text.split("\n") == [
        "Two pages:",
        "[image 1: image/png, 45 bytes]",
        "and",
        "[file 2: a.pdf, application/pdf, 12 bytes]",
        "[recording 3: audio/wav, 12 bytes]",
        '{"pages":2}',
    ]
    assert found == (IMAGE, PDF, SOUND)


@pytest.mark.parametrize("value", [IMAGE, (IMAGE,), [IMAGE]])
def test_one_part_alone(value):
    """By itself or in a list, it is the same."""
    assert result_text.render_result(value) == ("[image 1: image/png, 45 bytes]", (IMAGE,))


def test_a_part_by_its_address():
    """Nothing is fetched to look at it."""
    part = ImagePart(url="https://example.com/a.png", detail="low")
    assert result_text.render_result(part) == ("[image 1: https://example.com/a.png]", (part,))


@pytest.mark.parametrize("value", [None, "a", 7, [], [1, "a"], ("a",), {"a": [1]}, [[1]], [None]])
def test_what_holds_no_part_is_told_as_before(value):
    """Lists stay JSON."""
    assert result_text.render_result(value) == (result_text.render_text(value), ())


# What is left out

LEFT_OUT = {
    "no picture that a model is shown": (ImagePart.of(b"BM...", "image/bmp"), "PNG, JPEG, GIF and WebP only"),
    "said to be a PNG": (ImagePart.of(b"<html>", "image/png"), "its data is not image/png"),
    "said to be a recording": (AudioPart.of(b"<html>"), "its data is not audio/wav"),
    "a film": (AudioPart.of(b"RIFF\0\0\0\0AVI ", "audio/wav"), "its data is not audio/wav"),
    "no frame of a recording": (AudioPart.of(b"\xff\xdf", "audio/mpeg"), "its data is not audio/mpeg"),
    "said to be a PDF": (FilePart.of(b"<html>"), "its data is not application/pdf"),
    "empty": (ImagePart.of(b""), "it is empty"),
    "not base64": (ImagePart(url="data:image/png;base64,a!"), "its data is not base64"),
    "not ASCII": (ImagePart(url="data:image/png;base64,ä"), "its data is not base64"),
    "of no type": (FilePart(url="data:;base64,AAAA"), "its media type is not said"),
    "too large": (ImagePart.of(PNG + b"\0" * 15_000_000), "15,000,000 bytes are the most"),
    "a long address": (ImagePart(url="https://a.test/" + "x" * 8_000), "more than 8,000 characters"),
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_what_no_provider_takes_is_left_out(name):
    """A provider would refuse every later request of the run; the text says what it was, and why it is not there."""
    part, why = LEFT_OUT[name]
    text, found = result_text.render_result(["before", part, IMAGE])
    first, note, last = text.split("\n")
    assert (first, last, found) == ("before", "[image 1: image/png, 45 bytes]", (IMAGE,))
    assert " left out, " in note
    assert note.endswith(f"{why}]")
    assert len(note) < 400


def test_a_result_holds_only_so_many_parts():
    """The others are left out, and those that are there keep their numbers."""
    text, found = result_text.render_result([IMAGE] * 23)
    assert len(found) == media.MAX_PARTS
    assert text.count("20 parts at most") == 3


def test_parts_are_too_large_together():
    """What would not fit is left out; a smaller one behind it still fits."""
    large = ImagePart.of(PNG + b"\0" * 12_000_000)
    text, found = result_text.render_result([large, large, IMAGE])
    assert found == (large, IMAGE)
    assert "too large together" in text.split("\n")[1]


@pytest.mark.parametrize(
    ("said", "data", "kind"),
    [
        ("image/jpg", b"\xff\xd8\xff\xe0", "image/jpeg"),
        ("image/png", b"\xff\xd8\xff\xe0", "image/jpeg"),
        ("image/unknown", b"RIFF\0\0\0\0WEBP", "image/webp"),
        ("image/GIF; q=1", b"GIF89a", "image/gif"),
    ],
)
def test_an_image_is_of_the_type_that_its_data_has(said, data, kind):
    """Providers compare the two, and refuse what differs."""
    [found] = result_text.render_result(ImagePart.of(data, said))[1]
    assert found == ImagePart.of(data, kind)


@pytest.mark.parametrize(
    ("part", "kind"),
    [
        (AudioPart.of(b"ID3\x04", "audio/mp3"), "audio/mpeg"),
        (AudioPart.of(b"\xff\xfb\x90", "audio/mpeg"), "audio/mpeg"),
        (AudioPart.of(b"\xff\xe0", "audio/mpeg"), "audio/mpeg"),
        (AudioPart.of(b"RIFF\0\0\0\0WAVE", "audio/x-wav"), "audio/wav"),
        (AudioPart.of(b"OggS", "audio/ogg"), "audio/ogg"),
        (FilePart.of(b"a,b", "text/csv"), "text/csv"),
    ],
)
def test_other_types_go_by_their_usual_names(part, kind):
    """Those that nothing is known of are left to the model to refuse."""
    text, [found] = result_text.render_result(part)
    assert found.url.startswith(f"data:{kind};base64,")
    assert kind in text


def test_what_cannot_be_written_is_cleaned():
    """A name may be anything: half a surrogate pair, another type, a page long."""
    named = attrs.evolve(PDF, name="a\ud800\nb" + "c" * 1_000)
    text, [found] = result_text.render_result([named, "x\ud800"])
    text.encode()
    found.name.encode()
    assert text.startswith("[file 1: a\ufffd bccc")
    assert "\n" not in text.split("application/pdf")[0]
    assert len(text) < 400
    assert result_text.render_result(attrs.evolve(PDF, name=17))[1][0].name == "17"


def test_the_largest_result_fits_into_a_record():
    """Text that JSON writes in six characters each, and as many parts as are kept."""
    large = ImagePart.of(PNG + b"\0" * 11_000_000)
    text, found = result_text.render_result([large, large, "\x01" * 30_000_000])
    assert len(found) == 2
    assert "characters were dropped" in text
    result = ToolResult(call_id="t1.0", tool="look", outcome=Outcome.DONE, content=text, parts=found)
    assert len(encode_event(ToolFinished(result=result), HEADER)) < MAX_RECORD_CHARS


# In a run


def camera(value: object, **options: object):
    """A tool that returns the value."""

    @tool(read_only=True, **options)
    async def look(number: int = 0) -> object:
        """Look."""
        return value

    return look


async def test_the_model_is_shown_the_parts_and_the_journal_keeps_them(store):
    """As they were returned, also where the run is read from its journal again; and a replay finds the same request."""
    model = ScriptedModel(say("", call("look"), call("look")), "done")
    agent = Agent(model, tools=[camera(["So:", IMAGE, PDF])], store=store)
    run = await agent.run("go")
    [shown, _] = results_of(model.requests[1].messages)
    assert shown.parts == (IMAGE, PDF)
    assert shown.text == "[look: done]\nSo:\n[image 1: image/png, 45 bytes]\n[file 2: a.pdf, application/pdf, 12 bytes]"
    loaded = await agent.load(run.id)
    assert loaded.messages == run.messages
    assert (await agent.replay(run.id)).is_faithful
    await sound(agent, run)


async def test_another_picture_is_another_request(store):
    """The hash of a request sees what the text does not tell apart."""
    other = ImagePart.of(PNG[:-1] + b"\1")
    digests = []
    for part in (IMAGE, other, IMAGE):
        agent = Agent(ScriptedModel(say("", call("look")), "done"), tools=[camera(part)], store=store)
        run = await agent.run("go")
        digests.append((await agent.history(run.id))[-1].request)
    assert digests[0] == digests[2] != digests[1]


async def test_a_thread_of_its_own_returns_parts_too():
    """A plain function, beside others."""

    @tool(read_only=True)
    def look() -> ImagePart:
        """Look."""
        return IMAGE

    queue = ToolQueue(ToolRegistry.of([look]))
    calls = [ToolCall(id=f"t1.{n}", name="look", arguments="{}") for n in range(3)]
    assert [result.parts for result in await queue.execute_all(calls)] == [(IMAGE,)] * 3


async def test_a_call_that_ended_by_its_own_word_has_parts():
    """A failure may show something, too."""
    text, found = result_text.render_parts(["no", IMAGE])
    ended = ToolReturn(outcome=Outcome.FAILED, content=text, parts=found)
    queue = ToolQueue(ToolRegistry.of([camera(ended)]))
    [result] = await queue.execute_all([ToolCall(id="t1.0", name="look", arguments="{}")])
    assert (result.outcome, result.content, result.parts) == (Outcome.FAILED, text, (IMAGE,))


async def test_what_is_found_out_after_a_crash_may_be_a_picture(store):
    """As if the call had returned it."""
    run, _, _ = await recovered(store, on_unknown=lambda _ctx, _arguments: Found(IMAGE))
    [result] = results_of(run.messages)
    assert (result.content, result.parts) == ("[image 1: image/png, 45 bytes]", (IMAGE,))


async def test_only_the_text_is_cut(store):
    """What a tool may show of its text says nothing of its pictures."""
    model = ScriptedModel(say("", call("look")), "done")
    agent = Agent(model, tools=[camera(["x" * 5_000, IMAGE], shown_bytes=400)], store=store)
    run = await agent.run("go")
    [result] = results_of(run.messages)
    assert (result.cut is not None, result.parts) == (True, (IMAGE,))
    assert "image 1: image/png" in result.text


async def test_a_picture_that_was_taken_off_can_be_seen_again(store):
    """A policy takes those of old results off, the text says so, and `read_result` brings them back."""
    steps = [say("", call("look", number=number)) for number in range(6)]
    model = ScriptedModel(*steps, say("", call("read_result", result="t1.0")), "done")
    model.window_tokens = 12_000
    context = Context([TrimResults(keep=1)])
    agent = Agent(model, tools=[camera(IMAGE)], store=store, context=context)
    run = await agent.run("go")
    assert any(isinstance(event, Compacted) for event in await agent.history(run.id))
    shown = results_of(model.requests[6].messages)
    note = "[not shown any more: image 1; to see it again, read result t1.0 to its end]"
    assert (shown[0].parts, shown[0].content) == ((), f"[image 1: image/png, 45 bytes]\n{note}")
    assert shown[-1].parts == (IMAGE,)
    again = results_of(run.messages)[-1]
    assert (again.tool, again.parts) == ("read_result", (IMAGE,))
    assert results_of(run.messages)[0].parts == (IMAGE,)
    await sound(agent, run)


async def test_a_tool_can_ask_for_the_parts_of_a_result(store):
    """Of this run, and of no other."""
    seen = []

    @tool(read_only=True)
    async def peep(ctx: RunContext[None]) -> str:
        """Look back."""
        seen.extend(ctx.find_result_parts(call_id) for call_id in ("t1.0", "t2.0", "t9.9"))
        return "ok"

    model = ScriptedModel(say("", call("look")), say("", call("peep")), "done")
    await Agent(model, tools=[camera(IMAGE), peep], store=store).run("go")
    assert seen == [(IMAGE,), (), ()]


async def test_no_log_and_no_error_shows_the_data():
    """What is written of a part in passing is its type and its size."""
    assert "iVBOR" in IMAGE.url
    assert "iVBOR" not in repr(IMAGE)
    assert "'data:image/png;base64', and " in repr(IMAGE)
    event = ToolFinished(result=results_of((await _run()).messages)[0])
    assert "iVBOR" not in repr(event)
    assert "iVBOR" in json.dumps(attrs.asdict(event), default=str)


async def _run():
    return await Agent(ScriptedModel(say("", call("look")), "done"), tools=[camera(IMAGE)]).run("go")
