"""Which call a server of the handshake era asks in: the protocol does not say, so it is found out or nobody guesses."""

from __future__ import annotations

import json

import anyio
import mcp.types as m
import pytest

from agentfsm import InputRequired
from agentfsm.mcp.client.elicitation import AMBIGUOUS_ELICITATION, ElicitationRouter, ElicitationState, QuestionHandling

SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}}
WHO = m.ElicitRequestFormParams(message="Who?", requested_schema=SCHEMA)


class Server:
    """Stands for a server: its calls take until they are told to go on, or ask."""

    def __init__(self):
        """Take no calls yet."""
        self.desk = ElicitationRouter()
        self.doors: dict[str, anyio.Event] = {}
        self.ends: dict[str, object] = {}
        self.replies: dict[str, str] = {}
        self.cut: list[str] = []

    def told(self, answer):
        """What an earlier attempt has left, where this was answered."""
        return ElicitationState([("q1", mark())], {"q1": answer})

    async def call(self, name, told=None, *, asks=False):
        """Make a call, which asks or waits for its door."""
        self.doors[name] = anyio.Event()
        handling = QuestionHandling(relay=None, may_repeat=True)
        attempt = _Attempt(self, name, asks=asks)
        self.ends[name] = await self.desk.run_call(told or ElicitationState([], {}), handling, attempt)


def mark():
    """What tells the question from others, as a pause keeps it."""
    asked = ElicitationState([], {}).pause_for({"": WHO})
    assert isinstance(asked, InputRequired)
    return json.loads(asked.state)["asked"][0][1]


class _Attempt:
    """An attempt, as the desk knows it."""

    def __init__(self, server, name, *, asks):
        self.server, self.name, self.asks = server, name, asks

    async def send(self):
        """Do it."""
        try:
            if self.asks:
                self.server.connection.start_soon(self._ask)
            await self.server.doors[self.name].wait()
        except anyio.get_cancelled_exc_class():
            self.server.cut.append(self.name)
            raise
        return m.CallToolResult(content=[m.TextContent(text=self.name)])

    async def _ask(self):
        reply = await self.server.desk.elicit(None, WHO)
        self.server.replies[self.name] = reply.action
        self.server.doors[self.name].set()


@pytest.fixture
async def server():
    """A server, and the tasks of the connection to it."""
    made = Server()
    async with anyio.create_task_group() as made.connection:
        yield made


async def test_a_question_waits_until_its_call_is_the_only_one(server):
    """The other call ends undisturbed; then it is known whose question it is, and that call pauses."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(server.call, "slow")
        await anyio.wait_all_tasks_blocked()
        tasks.start_soon(lambda: server.call("asker", asks=True))
        await anyio.wait_all_tasks_blocked()
        assert (server.ends, server.cut) == ({}, [])
        server.doors["slow"].set()
    assert server.ends["slow"].content[0].text == "slow"
    assert isinstance(server.ends["asker"], InputRequired)
    await anyio.wait_all_tasks_blocked()
    assert server.replies == {"asker": "cancel"}
    assert server.cut == ["asker"]


async def test_a_question_whose_call_has_ended_is_not_taken_for_another_calls(server):
    """It came while two were under way, and one of them was cut off: it may have been that one's."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(server.call, "slow")
        async with anyio.create_task_group() as others:
            others.start_soon(lambda: server.call("asker", asks=True))
            await anyio.wait_all_tasks_blocked()
            others.cancel_scope.cancel()
        await anyio.wait_all_tasks_blocked()
        assert server.replies == {"asker": "cancel"}
        server.doors["slow"].set()
    assert (server.ends["slow"].content[0].text, server.cut) == ("slow", ["asker"])


async def test_from_then_on_its_calls_come_one_by_one(server):
    """So that the next question is known at once."""
    server.desk.is_serial = True
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(server.call, "first")
        await anyio.wait_all_tasks_blocked()
        tasks.start_soon(lambda: server.call("second", asks=True))
        await anyio.wait_all_tasks_blocked()
        assert server.replies == {}
        server.doors["first"].set()
    assert isinstance(server.ends["second"], InputRequired)


async def test_two_that_ask_at_once_are_given_up_and_the_model_is_told(server):
    """Nobody guesses which asked what, and nothing is hidden."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: server.call("a", asks=True))
        tasks.start_soon(lambda: server.call("b", asks=True))
    assert [end.content[0].text for end in server.ends.values()] == [AMBIGUOUS_ELICITATION, AMBIGUOUS_ELICITATION]
    assert all(end.is_error for end in server.ends.values())
    await anyio.wait_all_tasks_blocked()
    assert server.replies == {"a": "cancel", "b": "cancel"}
    assert server.desk.is_serial


async def test_what_was_answered_is_answered_at_once(server):
    """The call goes on, and nothing is given up."""
    await server.call("asker", server.told({"name": "Ann"}), asks=True)
    assert (server.replies, server.cut) == ({"asker": "accept"}, [])


async def test_a_call_that_is_cancelled_leaves_no_trace(server):
    """The next one is not kept waiting for it."""
    server.desk.is_serial = True
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(server.call, "lost")
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
    await server.call("next", server.told(None), asks=True)
    assert server.replies == {"next": "decline"}


async def test_a_question_outside_of_any_call_is_answered_with_a_cancel(server):
    """There is nobody whose call could be made again."""
    assert (await server.desk.elicit(None, WHO)).action == "cancel"


def test_each_answer_serves_once_and_in_order():
    """A server that asks the same twice gets both answers, as they were given."""
    told = ElicitationState([("q1", mark()), ("q2", mark())], {"q1": {"name": "Ann"}, "q2": {"name": "Bob"}})
    found = [told.take_answer(WHO) for _ in range(3)]
    assert [None if each is None else each.content for each in found] == [{"name": "Ann"}, {"name": "Bob"}, None]
