"""Served tools that ask a person in the middle of their call, in both revisions of the protocol."""

import itertools
import json

import anyio
import attrs
import pytest
from mcp import Client, ClientSession, MCPError
from mcp.types import ClientCapabilities, ElicitationCapability, ElicitRequestURLParams, ElicitResult

from agentfsm import InputRequired, Question, RunContext, tool
from agentfsm.mcp import MCPService
from agentfsm.mcp.server import input_requests as serve_asking
from agentfsm.tools.question_validation import MAX_ROUNDS

MODES = pytest.mark.parametrize("mode", ["auto", "legacy"])
NAME = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
WHO = Question(key="who", message="Who travels?", schema=NAME)
SURE = Question(key="sure", message="Book it?")
PAY = Question(key="pay", message="Pay here.", url="https://pay.example/1")
ANN = ElicitResult(action="accept", content={"name": "Ann"})
AGREED = ElicitResult(action="accept", content={})
DECLINED = ElicitResult(action="decline")
DISMISSED = ElicitResult(action="cancel")


class Desk:
    """What a tool has seen, attempt by attempt."""

    def __init__(self):
        self.seen = []

    def tool(self, *rounds, **declared):
        """Return a tool that asks these, round by round, and then tells what it was told."""

        @tool(**declared)
        async def book(ctx: RunContext[None], city: str) -> str:
            """Book a journey."""
            self.seen.append((ctx.attempt, (ctx.idempotency_key, ctx.call_id)))
            ctx.progress("booking")
            number = ctx.state or 0
            if number < len(rounds):
                raise InputRequired(*rounds[number], state=number + 1)
            return json.dumps({"city": city, "answers": dict(ctx.answers), "state": ctx.state})

        return book


@pytest.fixture
def desk():
    return Desk()


def served(*tools):
    return MCPService(tools, name="demo").server


def person(answers, seen):
    """A client's callback that answers by the message."""

    async def answer(_context, params):
        seen.append(params)
        return answers[params.message]

    return answer


def as_text(result):
    (block,) = result.content
    return block.text


async def call(server, mode, answers, *, seen=None, **options):
    callback = person(answers, [] if seen is None else seen)
    async with Client(server, mode=mode, elicitation_callback=callback, **options) as client:
        return await client.call_tool("book", {"city": "Rome"})


@MODES
async def test_what_a_tool_asks_is_put_to_the_client(desk, mode):
    """Forms and addresses of several rounds: the tool is called again with all answers and its state, as one call."""
    seen = []
    answers = {"Who travels?": ANN, "Book it?": DECLINED, "Pay here.": AGREED}
    result = await call(served(desk.tool([WHO, SURE], [PAY])), mode, answers, seen=seen)
    told = {"who": {"name": "Ann"}, "sure": None, "pay": {}}
    assert (result.is_error, json.loads(as_text(result))) == (False, {"city": "Rome", "answers": told, "state": 2})
    bare, address, form = sorted(seen, key=lambda params: params.message)  # those of one round are put at once
    assert form.requested_schema == NAME
    assert bare.requested_schema == {"type": "object", "properties": {}}
    assert isinstance(address, ElicitRequestURLParams)
    assert address.url == "https://pay.example/1"
    assert [attempt for attempt, _ in desk.seen] == [1, 2, 3]
    assert len({identity for _, identity in desk.seen}) == 1


@MODES
async def test_a_call_that_needs_a_yes_asks_for_it_once(desk, mode):
    """The yes holds for all attempts at the call; its own question comes behind."""
    seen = []

    async def answer(_context, params):
        seen.append(params.message.partition("\n")[0])
        yes = ElicitResult(action="accept", content={"approve": True})
        return yes if params.message.startswith("May") else ANN

    async with Client(served(desk.tool([WHO], requires_approval=True)), mode=mode, elicitation_callback=answer) as c:
        result = await c.call_tool("book", {"city": "Rome"})
    assert (result.is_error, seen) == (False, ["May book run?", "Who travels?"])
    assert len(desk.seen) == 2


@MODES
@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (DISMISSED, "'who' was dismissed"),
        (ElicitResult(action="accept", content={"name": 7}), "name"),
        (ElicitResult(action="accept", content={"name": "Ann", "age": 7}), "not asked for"),
        (ElicitResult(action="accept"), "name"),
    ],
)
async def test_a_call_without_a_fitting_answer_ends(desk, mode, reply, words):
    """A dismissal, and what does not fit the form, is a result that says so; the tool is not called again."""
    result = await call(served(desk.tool([WHO])), mode, {"Who travels?": reply})
    assert (result.is_error, len(desk.seen)) == (True, 1)
    assert "book was not finished" in as_text(result)
    assert words in as_text(result)


async def test_a_client_that_fails_to_ask_ends_the_call(desk):
    """Its error is in the result."""

    async def fail(_context, _params):
        raise MCPError(-32603, "no screen")

    async with Client(served(desk.tool([WHO])), mode="legacy", elicitation_callback=fail) as client:
        result = await client.call_tool("book", {"city": "Rome"})
    assert result.is_error
    assert "no screen" in as_text(result)


async def test_a_client_that_cannot_ask_gets_the_error_of_its_revision(desk):
    """In 2026-07-28 that is -32021, with the capability that it would have to declare."""
    async with Client(served(desk.tool([WHO]))) as client:
        with pytest.raises(MCPError, match="has not declared elicitation") as caught:
            await client.call_tool("book", {"city": "Rome"})
    required = {"requiredCapabilities": {"elicitation": {"form": {}}}}
    assert (caught.value.error.code, caught.value.error.data, len(desk.seen)) == (-32021, required, 1)


async def test_a_client_of_the_handshake_that_cannot_ask_is_told_so(desk):
    """That revision has no such error: the call ends with what to do about it."""
    async with Client(served(desk.tool([WHO])), mode="legacy") as client:
        result = await client.call_tool("book", {"city": "Rome"})
    assert (result.is_error, len(desk.seen)) == (True, 1)
    assert "has not declared elicitation" in as_text(result)


@pytest.mark.parametrize(("declared", "question"), [({"form": {}}, PAY), ({"url": {}}, WHO), ({}, PAY)])
@MODES
async def test_only_what_the_client_has_declared_is_asked(desk, mode, declared, question, monkeypatch):
    """Form and address are two capabilities, and an empty declaration means forms."""
    kinds = ClientCapabilities(elicitation=ElicitationCapability(**declared))
    monkeypatch.setattr(ClientSession, "_build_capabilities", lambda _session, *_: kinds)
    way = "url" if question is PAY else "form"
    words = f"has not declared elicitation by {'URL' if question is PAY else 'form'}"
    if mode == "legacy":
        result = await call(served(desk.tool([question])), mode, {question.message: AGREED})
        assert result.is_error
        assert words in as_text(result)
        return
    async with Client(served(desk.tool([question])), elicitation_callback=person({}, [])) as client:
        with pytest.raises(MCPError, match=words) as caught:
            await client.call_tool("book", {"city": "Rome"})
    assert caught.value.error.data == {"requiredCapabilities": {"elicitation": {way: {}}}}


@MODES
async def test_a_tool_that_never_stops_asking_is_given_up(mode):
    """After as many rounds as in a run of ours; the client's own limit is raised, so that it is ours that holds."""
    rounds = itertools.count()

    @tool
    async def book(city: str) -> str:
        """Ask for ever."""
        raise InputRequired(attrs.evolve(SURE, key=f"q{next(rounds)}"))

    result = await call(served(book), mode, {"Book it?": AGREED}, input_required_max_rounds=MAX_ROUNDS + 5)
    assert (result.is_error, next(rounds)) == (True, MAX_ROUNDS + 1)
    assert f"asked for input {MAX_ROUNDS} times" in as_text(result)


async def test_nobody_is_waited_for_longer_than_the_tool_says(desk):
    """A question of the handshake revision ends with its time, and a state of 2026-07-28 counts no longer."""
    server = served(desk.tool([WHO], answer_expires_s=0.0))

    async def never(_context, _params):
        await anyio.sleep_forever()

    async with Client(server, mode="legacy", elicitation_callback=never) as client:
        result = await client.call_tool("book", {"city": "Rome"})
    assert result.is_error
    assert "its question was not answered in time" in as_text(result)
    async with Client(server, elicitation_callback=person({"Who travels?": ANN}, [])) as client:
        with pytest.raises(MCPError, match="expired requestState"):
            await client.call_tool("book", {"city": "Rome"})
    assert len(desk.seen) == 2


class Hand:
    """A client that makes its requests by hand."""

    def __init__(self, client):
        self.client = client

    async def __call__(self, city="Rome", state=None, **replies):
        """Call the tool."""
        return await self.client.session.call_tool(
            "book", {"city": city}, input_responses=replies or None, request_state=state, allow_input_required=True
        )


@pytest.fixture
async def hand(desk):
    async with Client(served(desk.tool([WHO, SURE])), elicitation_callback=person({}, [])) as client:
        yield Hand(client)


async def test_what_is_not_answered_is_asked_again(hand, desk):
    """Answers that are there are kept, others put again, those to nothing passed over; the tool waits for all."""
    first = await hand(wrong=ANN)
    assert list(first.input_requests) == ["who", "sure"]
    second = await hand(state=first.request_state, who=ANN, wrong=ANN)
    assert list(second.input_requests) == ["sure"]
    assert len(desk.seen) == 1
    last = await hand(state=second.request_state, sure=AGREED)
    assert json.loads(as_text(last))["answers"] == {"who": {"name": "Ann"}, "sure": {}}


async def test_answers_may_come_with_the_first_request(hand):
    """They are the client's word in any case."""
    result = await hand(who=ANN, sure=DECLINED)
    assert json.loads(as_text(result))["answers"] == {"who": {"name": "Ann"}, "sure": None}


async def test_a_state_counts_once_and_for_its_call(hand, desk):
    """What is made up, belongs to other arguments, or was used runs nothing."""
    state = (await hand()).request_state
    assert not (await hand(state=state, who=ANN, sure=AGREED)).is_error
    other = (await hand()).request_state
    attempts = len(desk.seen)
    for city, token in [("Rome", state), ("Rome", f"{other}x"), ("Bern", other), ("Rome", other)]:
        with pytest.raises(MCPError, match="requestState"):
            await hand(city, token, who=ANN, sure=AGREED)
    assert len(desk.seen) == attempts


@pytest.mark.parametrize(("limit", "most"), [("MAX_WAITING_CALLS", 1), ("MAX_WAITING_CHARS", 400)])
async def test_the_oldest_calls_that_wait_are_forgotten(hand, monkeypatch, limit, most):
    """So that what is kept of them is bounded, in number and in size."""
    monkeypatch.setattr(serve_asking, limit, most)
    old, new = (await hand()).request_state, (await hand()).request_state
    with pytest.raises(MCPError, match="requestState"):
        await hand(state=old, who=ANN, sure=AGREED)
    assert not (await hand(state=new, who=ANN, sure=AGREED)).is_error


async def test_progress_goes_on_over_the_attempts_of_one_request(desk):
    """Each note has a higher number than the one before."""
    told, both = [], anyio.Event()

    async def progress(number, _total, _message):
        told.append(number)
        if len(told) == 2:
            both.set()

    callback = person({"Who travels?": ANN}, [])
    async with Client(served(desk.tool([WHO])), mode="legacy", elicitation_callback=callback) as client:
        await client.call_tool("book", {"city": "Rome"}, progress_callback=progress)
        with anyio.fail_after(5):
            await both.wait()
    assert told == [1, 2]
