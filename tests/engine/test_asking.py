"""How a model is asked: settings of the agent, of a run and of a turn, and parts that a model cannot take."""

import attrs
import pytest

from agentfsm import (
    Agent,
    AudioPart,
    FilePart,
    ImagePart,
    MisuseError,
    Runs,
    Settings,
    SystemMessage,
    TextPart,
    UserMessage,
    tool,
)
from agentfsm.models import OpenAIChat
from agentfsm.stores import SQLiteStore
from agentfsm.testing import ScriptedModel, call, say
from tests.support.checks import sound

IMAGE = ImagePart.of(b"\x89PNG")
SOUND = AudioPart.of(b"RIFF")
PAGE = FilePart.of(b"%PDF-", name="a.pdf")


@tool(read_only=True)
async def look() -> str:
    """Look."""
    return "seen"


class Deaf(ScriptedModel):
    """Takes no recordings."""

    def unsupported_part(self, part):
        """Say so."""
        return "it cannot hear" if isinstance(part, AudioPart) else None


# Settings


async def test_a_runs_settings_go_before_the_agents(tmp_path):
    """What a run says counts, what it leaves open is the agent's; both hold after a resume."""
    model = ScriptedModel(say("", call("look")), "done")
    base = Settings(temperature=0.5, seed=7, extra_body={"a": 1, "b": 1})
    store = SQLiteStore(tmp_path / "runs.db")
    async with Agent(model, tools=[look], settings=base, store=store) as agent:
        own = Settings(temperature=1.0, reasoning_effort="low", extra_body={"b": 2})
        run = agent.start("x", settings=own)
        for _ in range(2):
            run = await agent.step(run)
        assert (await agent.load(run.id)).header.settings == own
        await agent.resume(run.id)
        wanted = attrs.evolve(base, temperature=1.0, reasoning_effort="low", extra_body={"a": 1, "b": 2})
        assert [request.settings for request in model.requests] == [wanted, wanted]
        assert (await agent.replay(run.id)).is_faithful
        assert not (await agent.with_(settings=Settings()).replay(run.id)).is_faithful


async def test_settings_may_go_by_the_turn():
    """A function of the run tells them: here the first turn has to call a tool."""
    model = ScriptedModel(say("", call("look")), "done")

    def by_turn(run):
        return Settings(tool_choice="required" if run.turn == 0 else None, temperature=0.1 * run.turn)

    run = await Agent(model, tools=[look], settings=by_turn).run("x")
    assert [request.settings.tool_choice for request in model.requests] == ["required", None]
    assert [request.settings.temperature for request in model.requests] == [0, 0.1]
    assert run.output == "done"


async def test_nothing_is_sent_that_was_not_set():
    """No temperature of ours, above all."""
    model = ScriptedModel("done")
    await Agent(model).run("x")
    assert model.requests[0].settings == Settings()
    assert Settings().temperature is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": 3},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": "0.5"},
        {"temperature": True},
        {"top_p": 2},
        {"max_tokens": 0},
        {"max_tokens": 1.5},
        {"max_tokens": True},
    ],
)
def test_settings_out_of_range_are_refused(wrong):
    """The name of the setting and its range are told."""
    with pytest.raises(MisuseError, match=next(iter(wrong))):
        Settings(**wrong)


# Parts


@pytest.mark.parametrize("part", [IMAGE, SOUND, PAGE, ImagePart(url="https://x.test/a.png")])
async def test_parts_reach_the_model_as_they_are(part):
    """Text and other parts stay in their order, through the journal too."""
    model = ScriptedModel("seen")
    agent = Agent(model)
    run = await agent.run([TextPart(text="Look:"), part])
    assert model.requests[0].messages[-1].parts == (TextPart(text="Look:"), part)
    assert (await agent.load(run.id)).messages[0].parts[1] == part


async def test_a_part_that_the_model_cannot_take_is_refused_before_anything_happens():
    """At the start, on sending, and for a fork's prompt: with the model's reason, and nothing is stored."""
    agent = Agent(Deaf("a", "b"))
    with pytest.raises(MisuseError, match="scripted cannot take this: it cannot hear"):
        agent.start([SOUND])
    run = await agent.step(agent.start("x"))
    with pytest.raises(MisuseError, match="cannot hear"):
        await agent.send(run.id, SOUND)
    with pytest.raises(MisuseError, match="cannot hear"):
        await agent.fork(run.id, prompt=[SOUND])
    assert (await agent.finish(run)).output == "a"


async def test_a_part_that_was_sent_without_a_model_is_left_out(store):
    """`Runs.send` cannot refuse it: the model reads that it is not there and why, and the run goes on."""
    model = Deaf(say("", call("look")), "It was a recording.")
    agent = Agent(model, tools=[look], store=store)
    run = await agent.step(agent.start("x"))
    await Runs(store).send(run.id, [TextPart(text="Listen:"), SOUND, IMAGE])
    run = await agent.finish(run)
    assert run.output == "It was a recording."
    note = TextPart(text="[recording left out, audio/wav, 4 bytes: it cannot hear]")
    taken = UserMessage(parts=(TextPart(text="Listen:"), note, IMAGE))
    assert model.requests[1].messages[-1] == taken
    loaded = await agent.load(run.id)
    assert loaded.messages == run.messages
    assert taken in loaded.messages
    assert (await agent.replay(run.id)).is_faithful
    await sound(agent, run)


async def test_what_is_no_word_of_the_user_keeps_its_parts(store):
    """The model reads them as text in any case."""
    agent = Agent(Deaf(say("", call("look")), "done"), tools=[look], store=store)
    run = await agent.step(agent.start("x"))
    sent = AudioPart(url="https://x.test/a.wav")
    await Runs(store).send(run.id, sent, kind="event")
    run = await agent.finish(run)
    assert any(sent.url in message.text for message in run.messages if isinstance(message, SystemMessage))
    assert run.output == "done"


def test_the_wire_says_what_it_cannot_carry():
    """Chat completions take recordings and files whole only."""
    model = OpenAIChat("gpt-4o", api_key="k")
    assert [model.unsupported_part(part) for part in (TextPart(text="x"), IMAGE, SOUND, PAGE)] == [None] * 4
    assert "AudioPart.of" in model.unsupported_part(AudioPart(url="https://x.test/a.wav"))
    assert "AudioPart.of" in model.unsupported_part(AudioPart.of(b"x", "audio/flac"))
    assert "FilePart.of" in model.unsupported_part(FilePart(url="https://x.test/a.pdf"))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ImagePart(url="file:///etc/passwd"), "ImagePart takes"),
        (lambda: ImagePart(url="data:text/html;base64,AA"), "data:image/"),
        (lambda: AudioPart(url="data:image/png;base64,AA"), "data:audio/"),
        (lambda: FilePart(url="javascript:alert(1)"), "FilePart takes"),
        (lambda: FilePart(url="data:text/plain,hello"), "base64"),
        (lambda: ImagePart(url=b"x"), "ImagePart takes"),
        (lambda: ImagePart(url="https://x.test/a.png", detail="huge"), "'auto', 'low' or 'high'"),
    ],
)
def test_a_part_that_is_none_is_refused(make, words):
    """By its kind, with what to write."""
    with pytest.raises(MisuseError, match=words):
        make()
