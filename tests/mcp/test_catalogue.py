"""What a server lists on a new connection is compared with what was admitted, before any call goes there."""

import pytest

from agentfsm import Agent, ErrorType, Outcome, ToolResult
from agentfsm.testing import ScriptedModel, call, say
from tests.support.mcp_calls import heard, leftovers, lives, one_call, rude, until


@pytest.fixture
def record(tmp_path):
    return tmp_path / "record"


@pytest.fixture(autouse=True)
def no_leak(record):
    """Nothing of a server is left when its agent is closed."""
    yield
    assert not leftovers(record)


def asked(record, method):
    return [message for message in heard(record) if message.get("method") == method]


async def over_a_death(server, *, calls=1):
    """Run an agent that calls, wait until the server has died of it, and run it again; return the later results."""
    acts = say("", *[call("rude__act") for _ in range(calls)])
    model = ScriptedModel(
        say("", call("rude__act")), say("one"), acts, say("two"), say("", call("rude__act")), say("3")
    )
    async with Agent(model, tools=[server]) as agent:
        await agent.run("act")
        await until(lambda: server.connection._thread_state.connection is None)
        run = await agent.run("act again")
        results = [message for message in run.messages if isinstance(message, ToolResult)]
        third = await agent.run("and again")
        return results, [message for message in third.messages if isinstance(message, ToolResult)]


@pytest.mark.parametrize("era", ["", "-today"])
@pytest.mark.parametrize(
    ("habit", "words"),
    [
        ("returns-described", "it differs from the approved version"),
        ("returns-with-schema", "it differs from the approved version"),
        ("returns-twice", "the server now lists two tools with this name"),
        ("returns-unfit", "it does not fit the protocol: inputSchema: Field required"),
        ("returns-empty", "it is no longer listed"),
    ],
)
async def test_a_server_that_comes_back_as_another_is_not_called(record, habit, words, era):
    """The call that opens the new connection is not made, and before the next turn its listing is reviewed."""
    server = rude(habit + era, record)
    (result,), (later,) = await over_a_death(server)
    assert (result.outcome, result.error_type) == (Outcome.FAILED, ErrorType.UNAVAILABLE)
    assert words in result.content
    assert "Nothing was run" in result.content
    assert later.outcome is not Outcome.DONE
    assert len(asked(record, "tools/call")) == 1
    assert len(lives(record)) == 2


@pytest.mark.parametrize("era", ["", "-today"])
async def test_a_server_that_comes_back_the_same_is_called(record, era):
    """It is asked once what it lists, however many calls open the new connection together."""
    server = rude("returns" + era, record)
    results, (later,) = await over_a_death(server, calls=5)
    assert [result.outcome for result in (*results, later)] == [Outcome.DONE] * 6
    methods = [message["method"] for message in heard(record) if message.get("method", "").startswith("tools/")]
    assert methods[:2] == ["tools/list", "tools/call"]
    assert methods[2:8] == ["tools/list", *["tools/call"] * 5]


async def test_a_server_that_does_not_list_its_tools_again_is_not_called(record):
    """That is no call whose effect may have happened, and it says so."""
    server = rude("returns-silent", record)
    (result,), _later = await over_a_death(server)
    assert (result.outcome, result.error_type) == (Outcome.FAILED, ErrorType.UNAVAILABLE)
    assert "was reconnected, but did not list its tools: it ended with exit code 3" in result.content
    assert len(asked(record, "tools/call")) == 1


async def test_a_connection_is_listed_once_for_all_calls(record):
    """The calls of an agent cost no listing."""
    server = rude("plain", record)
    async with Agent(ScriptedModel(*[say("", call("rude__act"))] * 3, say("done")), tools=[server]) as agent:
        await agent.run("act")
    assert len(asked(record, "tools/list")) == 1
    assert len(asked(record, "tools/call")) == 3


async def test_a_call_whose_headers_do_not_fit_is_sent_again_behind_a_new_listing(record):
    """A server of today's protocol refuses it before it runs, and the headers are made of what it lists."""
    (result,) = await one_call(rude("mismatches-today", record))
    assert result.outcome is Outcome.DONE
    methods = [message["method"] for message in heard(record) if message.get("method", "").startswith("tools/")]
    assert methods == ["tools/list", "tools/call", "tools/list", "tools/call"]


async def test_an_older_server_that_says_so_is_not_asked_again(record):
    """It knows of no such headers: its error is an error like any other."""
    (result,) = await one_call(rude("mismatches", record))
    assert "an error of the MCP server 'rude': Mcp-Param-N does not match" in result.content
    assert len(asked(record, "tools/call")) == 1
