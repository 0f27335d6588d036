"""Servers that die, hang, flood and lie, end to end: a clear result each time, the run goes on, nothing is left."""

import threading

import anyio
import pytest

from agentfsm import ErrorType, Outcome
from agentfsm.mcp import MCPServerError
from agentfsm.mcp.connection import stdio_process
from agentfsm.tools.breaker import BreakerState
from tests.support.mcp_calls import at_home, heard, leftovers, lives, one_call, rude


@pytest.fixture
def record(tmp_path):
    return tmp_path / "record"


@pytest.fixture(autouse=True)
def no_leak(record):
    """Whatever a server does, nothing of it is left when its agent is closed."""
    yield
    assert not leftovers(record)
    own = [thread for thread in threading.enumerate() if thread.name == "agentfsm-mcp"]
    assert len(own) <= 1


@pytest.mark.parametrize(
    ("habit", "error_type", "words"),
    [
        ("dies", None, "was lost during the call: it ended with exit code 3"),
        ("half", None, "was lost during the call: it ended with exit code 0"),
        ("huge", ErrorType.TOOL, "too long: it sent a message of more than 1 MiB"),
        ("endless", ErrorType.TOOL, "Ask for less"),
        ("wrong-type", ErrorType.TOOL, "violates the protocol: the answer is not a message of the protocol"),
        ("no-content", ErrorType.TOOL, "invalid fields: content"),
        ("toolless", ErrorType.UNKNOWN_TOOL, "there is no tool 'rude__act'"),
    ],
)
async def test_what_a_server_does_to_a_call_is_told_in_words(habit, error_type, words, record, monkeypatch):
    """A call that fails is a result that names the cause and what to do, and the run goes on to its end."""
    monkeypatch.setattr(stdio_process, "MESSAGE_BYTES", 1 << 20)
    (result,) = await one_call(rude(habit, record))
    assert (result.outcome, result.error_type) == (Outcome.FAILED, error_type)
    assert words in result.content


async def test_a_rule_says_what_becomes_of_a_call_whose_server_died(record):
    """No person is asked: the model reads that the outcome is unknown. The call was sent once."""
    (result,) = await one_call(rude("dies", record, labels={"act": {"on_unknown": "fail"}}))
    assert (result.outcome, "settled" in result.content) == (Outcome.UNKNOWN, False)
    assert len([message for message in heard(record) if message["method"] == "tools/call"]) == 1


async def test_a_rule_on_unknown_outcomes_does_not_concern_tools_that_only_read(record):
    """Their calls run again anyhow, so a glob may cover both kinds."""
    server = rude("plain", record, labels={"*": {"on_unknown": "ask"}, "act": {"read_only": True}})
    (result,) = await one_call(server)
    assert (result.outcome, server.tools[0].read_only, server.tools[0].on_unknown) == (Outcome.DONE, True, "rerun")


@pytest.mark.parametrize("habit", ["plain", "chatty", "rubbish", "strangers", "floods", "changes", "cursor-loops"])
async def test_what_a_server_says_beside_an_answer_does_no_harm(habit, record):
    """Rubbish, answers that nobody waits for, and floods of notifications do not keep the answer from coming."""
    (result,) = await one_call(rude(habit, record, env={"FLOOD": "20000"}))
    assert (result.outcome, result.content) == (Outcome.DONE, "acted")


@pytest.mark.parametrize("era", ["", "-today"])
async def test_a_result_with_blocks_that_nobody_knows_is_no_less_a_result(era, record):
    """The call has had its effect: what can be shown is shown, and the rest is named."""
    (result,) = await one_call(rude("holograms" + era, record))
    assert result.outcome is Outcome.DONE
    hologram, image, nothing, text = result.content.split("\n")
    assert hologram == "[a block of the unknown type 'hologram': not shown]"
    assert image.startswith("[a block of the unknown type 'image': not shown")
    assert nothing.startswith("[a block of the unknown type '': not shown")
    assert text == "acted"


@pytest.mark.parametrize("era", ["", "-today"])
async def test_tools_that_do_not_fit_the_protocol_cost_the_others_nothing(era, record):
    """They are refused, each with its reason, in the same words for both eras."""
    server = rude("odd" + era, record)
    (result,) = await one_call(server)
    assert (result.outcome, result.content) == (Outcome.DONE, "acted")
    assert server.refused["odd"] == "it does not fit the protocol: inputSchema: Field required"
    assert server.refused["(no name)"].startswith("it does not fit the protocol: Input should be")


@pytest.mark.parametrize("habit", ["cursor-ignored", "cursor-ignored-and-new"])
async def test_a_server_that_ignores_the_cursor_keeps_its_tools(habit, record):
    """The page that came before is not taken for more tools of the same names, and the list is told to end there."""
    server = rude(habit, record)
    (result,) = await one_call(server)
    assert (result.outcome, result.content) == (Outcome.DONE, "acted")
    assert server.refused == {"(further pages)": "the server sent the same page for different cursors"}


async def test_ten_megabytes_come_through(record):
    """The journal has the whole result, and the model is shown a part of it."""
    (result,) = await one_call(rude("big", record))
    assert result.outcome is Outcome.DONE
    assert len(result.content) == 10_000_003
    assert result.content.endswith("end")
    assert len(result.text) < 200_000


async def test_half_a_surrogate_pair_is_mended(record):
    """What no store takes is replaced, and the rest of the answer stands."""
    (result,) = await one_call(rude("surrogates", record))
    assert result.content == "a\ufffdb"


@pytest.mark.parametrize("habit", ["hangs", "hangs-today"])
async def test_a_call_that_hangs_is_cut_off_and_taken_back(habit, record):
    """The time of the call ends it, and the server is told so, of either era."""
    (result,) = await one_call(rude(habit, record, timeout_s=0.3))
    assert result.outcome is Outcome.TIMED_OUT
    (asked,) = [message for message in heard(record) if message["method"] == "tools/call"]
    assert ("initialize" in {message["method"] for message in heard(record)}) == (habit == "hangs")
    (taken_back,) = [message for message in heard(record) if message["method"] == "notifications/cancelled"]
    assert taken_back["params"]["requestId"] == asked["id"]


async def test_a_server_that_died_is_started_again_for_the_next_call(record):
    """A person settles the call in which it died, since its effect may have happened; the next has another process."""
    first, second = await one_call(rude("dies-once", record), turns=2)
    assert first.content.startswith("settled: ")
    assert (first.outcome, second.outcome) == (Outcome.FAILED, Outcome.DONE)
    assert len(lives(record)) == 2


async def test_a_server_that_dies_each_time_is_let_rest(record):
    """After five failures in a row the sixth call is answered at once, without another start."""
    server = rude("dies", record)
    results = [result for _ in range(3) for result in await one_call(server, turns=2)]
    assert [result.error_type for result in results] == [None] * 5 + [ErrorType.CIRCUIT_OPEN]
    assert "no request was sent to the MCP server 'rude'" in results[5].content
    assert server.connection.breaker.state is BreakerState.OPEN
    starts = server.connection.start_count
    (rests,) = await one_call(server)
    assert rests.error_type is ErrorType.CIRCUIT_OPEN
    assert len(lives(record)) == server.connection.start_count == starts


async def test_the_breaker_is_the_server_s(record):
    """A server that rests is not asked, and is well again when a call after the rest has shown it."""
    now = [0.0]
    server = rude("plain", record)
    server.connection.now = lambda: now[0]
    await server.update()
    for _ in range(5):
        server.connection.breaker.record_failure(server.connection.breaker.admit(0.0), 0.0)
    (rests,) = await one_call(server)
    now[0] = 60.0
    (done,) = await one_call(server)
    assert (rests.error_type, rests.retryable) == (ErrorType.CIRCUIT_OPEN, True)
    assert "Try again in 60 s" in rests.content
    assert done.outcome is Outcome.DONE
    assert server.connection.breaker.state is BreakerState.CLOSED


async def test_five_calls_in_vain_end_the_process_that_hangs(record):
    """What opens the breaker closes the connection, so that the probe after the rest meets a new process."""
    server = rude("hangs", record, timeout_s=0.1)
    results = await one_call(server, calls=5)
    assert {result.outcome for result in results} == {Outcome.TIMED_OUT}
    assert server.connection.breaker.state is BreakerState.OPEN
    assert server.connection.start_count == 1


@pytest.mark.parametrize(
    ("code", "error_type", "words"),
    [
        (-32601, ErrorType.TOOL, "does not know 'act': <html>no</html>. Nothing was run"),
        (-32602, ErrorType.RETRY, "refused the arguments of 'act'"),
        (-32603, ErrorType.TOOL, "failed inside the MCP server"),
        (-32000, ErrorType.UNAVAILABLE, "is having trouble: <html>no</html>"),
        (-32001, ErrorType.UNAVAILABLE, "is having trouble: <html>no</html>"),
        (-32600, ErrorType.TOOL, "refused the request of 'act': <html>no</html>. Nothing was run"),
        (-32002, ErrorType.TOOL, "Its effect may have happened"),
        (0, ErrorType.TOOL, "Its effect may have happened"),
        (7, ErrorType.TOOL, "'act' ended in an error of the MCP server 'rude': <html>no</html>. Its effect may have"),
    ],
)
async def test_errors_of_the_protocol_go_their_ways(code, error_type, words, record):
    """What arguments could mend goes back to the model, what may pass is said to, and the rest is the end of it."""
    (result,) = await one_call(rude("refuses", record, env={"CODE": str(code)}))
    assert result.error_type is error_type
    assert words in result.content


@pytest.mark.parametrize(
    ("habit", "words"),
    [
        (
            "exits",
            "closed the connection before answering; it ended with exit code 1; its standard error ends with: no API",
        ),
        ("mute", "it did not answer within 0.5 s. Next, run it by hand"),
        ("only-chat", "which is for messages only: 'Welcome! Type help.'"),
        ("noisy", "its standard error ends with: xxx"),
        ("liar", "did not return its tools: Method not found"),
        ("pages-for-ever", "the list has more than"),
    ],
)
async def test_a_server_of_no_use_is_told_of_at_the_start(habit, words, record):
    """An agent whose server was never of use says so before it does anything, with what the server left."""
    server = rude(habit, record, start_s=0.5 if habit in {"mute", "only-chat"} else 30)
    with pytest.raises(MCPServerError) as caught:
        await one_call(server)
    assert words in str(caught.value)
    assert len(str(caught.value)) < 4_000
    await server.aclose()


async def test_a_server_that_hangs_after_the_handshake_is_not_waited_for(record):
    """The listing has the time of a call."""
    server = rude("hangs-after-handshake", record, timeout_s=0.3)
    with pytest.raises(MCPServerError, match=r"did not return its tools: no answer within 0\.3 s"):
        await server.update()
    await server.aclose()


async def test_a_command_that_is_not_there_is_told_of(record):
    """The error names the command, and what to try."""
    server = rude("plain", record)
    server.connection.transport.command = "no-such-command"
    with pytest.raises(MCPServerError, match=r"FileNotFoundError.*run it by hand.*: no-such-command") as caught:
        await server.update()
    assert not caught.value.is_passing


async def test_tools_that_are_known_stay_when_they_cannot_be_listed_anew(record):
    """A server that is down between two turns does not end the run."""
    server = rude("plain", record)
    await server.update()
    server.connection.transport.command, server.needs_refresh = "no-such-command", True
    await server.aclose()
    await server.update()
    assert [tool.name for tool in server.tools] == ["rude__act"]
    assert "no-such-command" in str(server.last_error)
    (result,) = await one_call(server)
    assert result.error_type is ErrorType.UNAVAILABLE
    assert "no-such-command" not in result.content.partition("FileNotFound")[0]


async def test_what_ignores_being_told_to_end_is_made_to(record):
    """Neither the end of its input nor SIGTERM ends it, and it is gone all the same when the agent is closed."""
    (result,) = await one_call(rude("stubborn", record))
    assert result.outcome is Outcome.DONE


async def test_what_a_server_has_started_ends_with_it(record):
    """A child that the server leaves behind does not outlive the connection."""
    (result,) = await one_call(rude("parent", record))
    assert result.outcome is Outcome.DONE
    assert len(lives(record)) == 2


@pytest.mark.parametrize("habit", ["plain", "dies", "half", "toolless"])
async def test_nothing_is_left_in_this_process_either(habit, record):
    """Neither tasks nor open files, however often a server is opened and closed, and however it ends."""
    await one_call(rude(habit, record))
    before = at_home()
    for _ in range(5):
        await one_call(rude(habit, record))
    assert at_home() == before


async def test_many_calls_at_once_share_a_connection_and_a_death(record):
    """When it dies, all of them are told, and none waits for ever."""
    server = rude("dies", record)
    await server.update()
    errors = []

    async def ask():
        try:
            await server.connection.request(lambda client: client.call_tool("act", {}))
        except Exception as error:  # noqa: BLE001  what it is, is looked at below
            errors.append(error)

    async with anyio.create_task_group() as group:
        for _ in range(10):
            group.start_soon(ask)
    assert {type(error).__name__ for error in errors} == {"RequestError"}
    await server.aclose()
