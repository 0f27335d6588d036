"""Long results: the model is shown their two ends and reads on where it wants, and the journal keeps them whole."""

from __future__ import annotations

import re

import attrs
import pytest

from agentfsm import Agent, MisuseError, Outcome, Permissions, Run, RunContext, Settings, State, ToolResult, tool
from agentfsm.core.events import ToolFinished
from agentfsm.ports import Request, TokenCounter
from agentfsm.stores import MemoryStore
from agentfsm.testing import ScriptedModel, call, say
from agentfsm.tokens.ledger import BYTES_PER_TOKEN
from agentfsm.tools.tool import SHOWN_BYTES, SHOWN_TOKENS
from tests.support.checks import reach, results_of, sound

SCRIPTS = {
    "ascii": "".join(f"line {n}\n" for n in range(6_000)),
    "chinese": "".join(f"第{n}行,没有别的\n" for n in range(5_000)),
    "emoji": "\N{GRINNING FACE}\N{ZERO WIDTH JOINER}" * 15_000,
    "mixed": "aé中\N{GRINNING FACE}" * 10_000,
}


def source_of(text: str, **options: object):
    """A tool that returns the text."""

    @tool(read_only=True, **options)
    async def source() -> str:
        """Fetch it."""
        return text

    return source


def offered(request: Request) -> list[str]:
    """The tools of which a model was told."""
    return [each.name for each in request.tools]


def read(call_id: str, start: int) -> object:
    """A reply that reads on."""
    return say("", call("read_result", result=call_id, start=start))


def last(run: Run) -> ToolResult:
    """The newest result of a run."""
    return results_of(run.messages)[-1]


def gap(text: str) -> tuple[str, int, int]:
    """What the note in a shown result says: which result, and which of its characters are missing."""
    first, end = re.search(r"characters (\d+) to (\d+) of \d+ are not shown", text).groups()
    return re.search(r"in result (\S+) from", text)[1], int(first), int(end)


# What is shown, and what is kept


@pytest.mark.parametrize("script", SCRIPTS)
async def test_a_long_result_is_shown_by_its_ends_and_kept_whole_once(store, script):
    """Three quarters of what is shown are the beginning; the note names the result and what is missing."""
    whole = SCRIPTS[script]
    model = ScriptedModel(say("", call("source")), "done")
    agent = Agent(model, tools=[source_of(whole)], store=store)
    run = await agent.run("go")
    shown = model.requests[1].messages[-1].text
    call_id, first, end = gap(shown)
    assert call_id == "t1.0"
    assert shown.startswith(f"[source: done]\n{whole[:first]}")
    assert shown.endswith(whole[end:])
    ends = whole[:first] + whole[end:]
    assert len(ends.encode()) <= min(SHOWN_BYTES, (SHOWN_TOKENS + 1) * BYTES_PER_TOKEN)
    assert first == pytest.approx(3 * (len(whole) - end), abs=4)
    kept = [event.result for event in await agent.history(run.id) if isinstance(event, ToolFinished)]
    assert [result.content for result in kept] == [whole]
    await sound(agent, run)


async def test_the_reader_is_offered_only_where_something_was_cut(store):
    """Not before the first cut result, and from then on with every request."""
    texts = iter(["short", "x" * 100_000, "short"])

    @tool(read_only=True)
    async def source() -> str:
        return next(texts)

    model = ScriptedModel(*[say("", call("source")) for _ in range(3)], "done")
    agent = Agent(model, tools=[source], store=store)
    await agent.run("go")
    assert [offered(request) for request in model.requests] == [
        ["source"],
        ["source"],
        ["source", "read_result"],
        ["source", "read_result"],
    ]


async def test_the_reader_is_unknown_while_nothing_was_cut(store):
    """A model that makes it up is told the tools that there are."""
    model = ScriptedModel(read("t1.0", 0), "done")
    agent = Agent(model, tools=[source_of("x")], store=store)
    run = await agent.run("go")
    assert last(run).content == "there is no tool 'read_result'. Nothing was run. Tools: source."
    await sound(agent, run)


@pytest.mark.parametrize("options", [{"shown_tokens": 0}, {"shown_bytes": 0}, {"shown_bytes": -1}], ids=str)
def test_a_tool_that_may_show_nothing_is_refused(options):
    """No cut could ever be short enough."""
    with pytest.raises(MisuseError, match="above 0"):
        source_of("x", **options)


# Reading on


async def read_through(agent: Agent, run: Run, call_id: str, start: int) -> tuple[str, Run]:
    """Read a result from a place to its end, as a model would that follows what each page says."""
    parts: list[str] = []
    for _ in range(60):
        model = ScriptedModel(read(call_id, start), "done")
        run = await agent.with_(model=model).run("more", after=run)
        page = model.requests[-1].messages[-1].text
        assert "are not shown" not in page, "a page is shown whole"
        body = page.removeprefix("[read_result: done]\n")
        note = re.search(r"\n\[\.\.\. (\d+) more characters: go on from character (\d+) \.\.\.\]$", body)
        parts.append(body if note is None else body[: note.start()])
        if note is None:
            return "".join(parts), run
        assert start < int(note[2])
        start = int(note[2])
    raise AssertionError("it never ends")


@pytest.mark.parametrize("script", SCRIPTS)
async def test_the_pages_of_a_result_are_the_result(script):
    """From where the note says, or from the start, page by page, whatever the letters; no page is cut in its turn."""
    whole = SCRIPTS[script]
    agent = Agent(ScriptedModel(say("", call("source")), "done"), tools=[source_of(whole)], store=MemoryStore())
    run = await agent.run("go")
    call_id, first, end = gap(last(run).text)
    rest, run = await read_through(agent, run, call_id, first)
    assert whole[:first] + rest == whole
    assert (await read_through(agent, run, call_id, end))[0] == whole[end:]
    assert (await read_through(agent, run, call_id, 0))[0] == whole


@attrs.frozen
class _Dense(TokenCounter):
    """A vocabulary in which two characters are a token, as in text that no vocabulary knows."""

    encoding: str = "pairs"
    exact: bool = True

    def count(self, text: str) -> int:
        return len(text) // 2


async def test_a_page_is_shown_whole_where_a_vocabulary_counts_more_tokens_than_estimated(store, monkeypatch):
    """It is not cut a second time, or the model would have to read on in pages of pages."""

    async def load(_name: str) -> TokenCounter:
        return _Dense()

    monkeypatch.setattr("agentfsm.tokens.load_counter", load)
    model = ScriptedModel(say("", call("source")), read("t1.0", 0), "done")
    model.window_tokens = 30_000
    agent = Agent(model, tools=[source_of(SCRIPTS["ascii"])], store=store, settings=Settings(max_tokens=1_000))
    run = await agent.run("go " * 7_000)  # so long that only a vocabulary can say whether it fits
    assert _Dense().count(last(run).content) > SHOWN_TOKENS
    assert last(run).cut is None


@pytest.mark.parametrize("start", [-1, len(SCRIPTS["ascii"]), 10**12, -(10**12)])
async def test_a_place_outside_is_answered_with_those_that_there_are(store, start):
    """The model is told where it may start."""
    whole = SCRIPTS["ascii"]
    agent = Agent(
        ScriptedModel(say("", call("source")), read("t1.0", start), "done"), tools=[source_of(whole)], store=store
    )
    run = await agent.run("go")
    assert last(run).outcome is Outcome.FAILED
    assert last(run).content == f"result t1.0 has the characters 0 to {len(whole) - 1}: start among them"


@pytest.mark.parametrize(
    "call_id", ["t2.0", "t1.1", "", "call_0_0", "t1.0 ", "../t1.0", "\N{GRINNING FACE}", "x" * 9_999]
)
async def test_an_id_of_no_result_is_answered_with_where_to_find_one(store, call_id):
    """Also its own id, which has no result yet."""
    model = ScriptedModel(say("", call("source")), read(call_id, 0), "done")
    run = await Agent(model, tools=[source_of("x" * 100_000)], store=store).run("go")
    assert last(run).outcome is Outcome.FAILED
    assert "take the id from the note in the result" in last(run).content
    assert len(last(run).text) < 200


@pytest.mark.parametrize("arguments", [{}, {"result": 1}, {"result": "t1.0", "start": "x"}, {"id": "t1.0"}])
async def test_wrong_arguments_are_answered_as_for_any_tool(store, arguments):
    """With what it takes."""
    model = ScriptedModel(say("", call("source")), say("", call("read_result", **arguments)), "done")
    run = await Agent(model, tools=[source_of("x" * 100_000)], store=store).run("go")
    assert last(run).content.startswith("the arguments of read_result do not fit:")
    assert "result (string, required)" in last(run).content


async def test_a_result_that_was_not_cut_can_be_read_too(store):
    """And so can a failure: whatever is in the history."""

    @tool(read_only=True)
    async def fail() -> str:
        raise ValueError("no luck")

    calls = say("", call("source"), call("fail"))
    model = ScriptedModel(calls, read("t1.1", 0), "done")
    run = await Agent(model, tools=[source_of("x" * 100_000), fail], store=store).run("go")
    assert last(run).content.startswith("ValueError: no luck.")


# In other circumstances


async def test_another_worker_reads_on(store):
    """What was cut is known from the journal, and its open call needs no tool of the agent's own."""
    whole = SCRIPTS["mixed"]
    first = Agent(ScriptedModel(say("", call("source")), read("t1.0", 16_000)), tools=[source_of(whole)], store=store)
    run = await reach(first, first.start("go"), State.ACT)
    run = await reach(first, await first.step(run), State.ACT)
    assert [entry.call.name for entry in run.open] == ["read_result"]
    model = ScriptedModel("done")
    second = Agent(model, tools=[source_of(whole)], store=store, instructions="Other words, so another fingerprint.")
    run = await second.resume(run.id)
    assert last(run).outcome is Outcome.DONE
    assert last(run).content.startswith(whole[16_000:17_000])
    assert offered(model.requests[0]) == ["source", "read_result"]
    await sound(second, run)


@pytest.mark.parametrize("how", ["after", "session", "messages"])
async def test_a_run_that_goes_on_from_another_reads_on_in_its_results(store, how):
    """The note still stands in the history, so what it speaks of is there."""
    whole = SCRIPTS["ascii"]
    agent = Agent(ScriptedModel(say("", call("source")), "done"), tools=[source_of(whole)], store=store)
    before = await agent.run("go", **({"session": "s"} if how == "session" else {}))
    options = {"after": {"after": before}, "session": {"session": "s"}, "messages": {"messages": before.messages}}[how]
    model = ScriptedModel(read("t1.0", 20_000), "done")
    agent = agent.with_(model=model)
    run = await agent.run("and then?", **options)
    assert offered(model.requests[0]) == ["source", "read_result"]
    assert last(run).content.startswith(whole[20_000:21_000])
    await sound(agent, run)


@pytest.mark.parametrize("cut", [False, True])
async def test_a_tool_of_the_users_own_by_that_name_takes_its_place(store, cut):
    """It is offered once, and it is the one that runs."""

    @tool(read_only=True)
    async def read_result(result: str, start: int = 0) -> str:
        """Read in my own way."""
        return f"mine: {result} from {start}"

    model = ScriptedModel(say("", call("source")), read("t1.0", 7), "done")
    agent = Agent(model, tools=[source_of("x" * (100_000 if cut else 1)), read_result], store=store)
    run = await agent.run("go")
    assert last(run).content == "mine: t1.0 from 7"
    assert {tuple(offered(request)) for request in model.requests} == {("source", "read_result")}
    assert {each.description for request in model.requests for each in request.tools if each.name == "read_result"} == {
        "Read in my own way."
    }


@pytest.mark.parametrize(
    "permissions",
    [Permissions(allow=("source",)), Permissions(deny=("read_*",)), Permissions(level="read"), Permissions()],
    ids=["allowed others", "denied", "level", "all"],
)
async def test_the_reader_is_offered_exactly_where_it_may_be_called(store, permissions):
    """A rule about it is a rule as about any tool."""
    model = ScriptedModel(say("", call("source")), read("t1.0", 0), "done")
    agent = Agent(model, tools=[source_of("x" * 100_000)], store=store, permissions=permissions)
    run = await agent.run("go")
    assert ("read_result" in offered(model.requests[1])) == (last(run).outcome is Outcome.DONE)


async def test_the_reader_is_withdrawn_like_any_tool(store):
    """A model that reads the same page over and over is nudged, and then the tool is gone."""
    model = ScriptedModel(say("", call("source")), *[read("t1.0", 0)] * 7, "done")
    agent = Agent(model, tools=[source_of("x" * 100_000)], store=store)
    run = await agent.run("go")
    assert run.disabled == ("read_result",)
    assert "read_result" not in offered(model.requests[-1])


async def test_the_reader_starts_early(store):
    """It is read-only, so its calls start while the reply streams; the run is the same."""
    model = ScriptedModel(
        say("", call("source")),
        say("", call("read_result", result="t1.0", start=5), call("read_result", result="t1.0", start=99_990)),
        "done",
    )
    agent = Agent(model, tools=[source_of("x" * 100_000)], store=store, settings=Settings(stream=True))
    run = await agent.run("go")
    assert [result.outcome for result in results_of(run.messages)] == [Outcome.DONE] * 3
    assert last(run).content == "x" * 10
    await sound(agent, run)


async def test_a_tool_can_read_what_was_kept(store):
    """The context of a call knows the whole results of the run, and no others."""
    seen = []

    @tool(read_only=True)
    async def peep(ctx: RunContext[None]) -> str:
        seen.extend(ctx.find_result_text(call_id) for call_id in ("t1.0", "t2.0", "t9.9"))
        return "ok"

    whole = "x" * 100_000
    model = ScriptedModel(say("", call("source")), say("", call("peep")), "done")
    await Agent(model, tools=[source_of(whole), peep], store=store).run("go")
    assert seen == [whole, None, None]


# Huge ones


@pytest.mark.parametrize("char", ["x", "é", "\n"], ids=["ascii", "two bytes", "escaped"])
async def test_a_result_of_thirty_million_characters_breaks_nothing(store, char):
    """It is kept whole, shown by its ends, read on in its midst, and the journal still folds to the run."""
    whole = char * 15_000_000 + "here" + char * 14_999_996
    model = ScriptedModel(say("", call("source")), read("t1.0", 15_000_000), "done")
    agent = Agent(model, tools=[source_of(whole)], store=store)
    run = await agent.run("go")
    assert run.output == "done"
    assert last(run).content.startswith(f"here{char}")
    first, *_ = results_of((await agent.load(run.id)).messages)
    assert first.content == whole
    assert len(model.requests[1].messages[-1].text) < 20_000


@pytest.mark.parametrize("size", [70_000_000, 34_000_000], ids=["long", "long when written"])
@pytest.mark.parametrize("read_only", [False, True], ids=["unsafe", "read-only"])
async def test_a_result_that_no_record_can_hold_does_not_break_the_run(store, size, read_only):
    """Its two ends are kept: what was done is done, and a run that cannot write it could never go on."""
    char = "x" if size > 64 * 1024 * 1024 else "\n"

    @tool(read_only=read_only)
    async def source() -> str:
        return "begin" + char * size + "end"

    agent = Agent(ScriptedModel(say("", call("source")), "done"), tools=[source], store=store)
    run = await agent.run("go")
    assert run.output == "done"
    result = last(run)
    assert result.outcome is Outcome.DONE
    assert result.text.startswith("[source: done]\nbegin")
    assert result.text.endswith("end")
    assert (await agent.load(run.id)).messages == run.messages
