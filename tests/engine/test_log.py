"""The log: silent until the application configures it, then facts with the run's id, and nothing that is secret."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import textwrap
import traceback
from typing import Any

import anyio
import pytest

from agentfsm import (
    Agent,
    Limits,
    ModelError,
    ModelReplyError,
    ModelRetry,
    ModelUnavailableError,
    RefusedError,
    RunContext,
    StopReason,
    Usage,
    tool,
)
from agentfsm.core.run import begin_run
from agentfsm.streaming.log import describe_events
from agentfsm.testing import ScriptedModel, VirtualClock, call, fail, run_virtual, say
from tests.support.checks import names

PROMPT, ARGUMENT, RESULT, ANSWER = "prompt-of-ann", "argument-of-ann", "result-of-ann", "answer-for-ann"
WORDS, KEY = "words-of-an-error", "sk-abcdefghijklmnop1234567890"
PRIVATE = (PROMPT, ARGUMENT, RESULT, ANSWER, KEY)


@tool
async def look(at: str) -> str:
    """Look."""
    return f"{RESULT} {at}"


@tool
async def broken(at: str) -> str:
    """Break."""
    raise RuntimeError(f"{at} {KEY}")


@tool
async def picky(at: str) -> str:
    """Be picky."""
    raise ModelRetry(f"not {at}")


def lines(caplog) -> list[str]:
    """All lines of the package's loggers."""
    return [record.getMessage() for record in caplog.records if record.name.startswith("agentfsm")]


@pytest.fixture
def logged(caplog):
    """Everything that the package logs, down to DEBUG."""
    caplog.set_level(logging.DEBUG, logger="agentfsm")
    return caplog


def run_script(body: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a process of its own."""
    program = textwrap.dedent(
        """
        from agentfsm import Agent, Limits, tool
        from agentfsm.core.errors import ModelUnavailableError
        from agentfsm.testing.models import ScriptedModel, call, fail, say

        @tool
        async def broken(at: str) -> str:
            '''Break.'''
            raise RuntimeError("no luck")

        lines = [fail(ModelUnavailableError("529")), *[say("", call("broken", at="x"))] * 5]
        agent = Agent(ScriptedModel(*lines), tools=[broken], limits=Limits(retry_wait_s=1e-9), log_prompts=True)
        """
    )
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", program + textwrap.dedent(body)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )


def test_the_library_is_silent_by_default():
    """A run with retries, failures and an end in ERROR writes nothing at all, anywhere."""
    done = run_script("assert agent.run_sync('go').stop_reason == 'too_many_errors'")
    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.parametrize(
    ("configured", "agent_made", "run_over"),
    [("", False, False), ("level=logging.WARNING", False, True), ("level=logging.INFO", True, True)],
)
def test_structlog_is_loaded_if_a_line_is_written_and_early_if_many_will_be(configured, agent_made, run_over):
    """Nobody who does not read the log pays for it, and the first line of a run that is logged stalls no event loop."""
    done = run_script(
        f"""
        import logging, sys
        if {configured!r}:
            logging.basicConfig({configured})
        assert 'structlog' not in sys.modules
        agent = agent.with_(name="other")
        print('structlog' in sys.modules)
        agent.run_sync('go')
        print('structlog' in sys.modules)
        """
    )
    assert done.stdout.split() == [str(agent_made), str(run_over)]


def test_a_program_that_configures_logging_sees_facts_on_stderr():
    """The stdlib's own configuration is enough; nothing goes to stdout, which belongs to results."""
    done = run_script(
        """
        import logging
        logging.basicConfig(level=logging.INFO)
        run = agent.run_sync('go')
        print(run.id)
        """
    )
    run_id = done.stdout.strip()
    told = done.stderr.splitlines()
    assert len(told) >= 5
    facts = [line for line in told if "event=" in line]  # between them stand the tracebacks of the tool
    assert all(f"run={run_id}" in line for line in facts)
    for event in ("model_retry", "turn", "tool_raised", "call", "run_ended"):
        assert f"event={event} " in done.stderr


async def test_every_line_names_its_run_and_its_fact(store, logged):
    """The lines of many runs can be told apart."""
    agent = Agent(ScriptedModel(say("", call("look", at="x")), "done"), tools=[look], store=store, name="seer")
    run = await agent.run("go")
    told = lines(logged)
    assert told
    assert all(f"run={run.id}" in line and "agent=seer" in line and "event=" in line for line in told)
    turn = next(line for line in told if "event=turn " in line)
    assert "input=10" in turn
    assert "output=5" in turn
    done = next(line for line in told if "event=call " in line)
    assert "tool=look" in done
    assert "outcome=done" in done
    assert "call=t1.0" in done


async def test_the_end_is_one_line_with_the_totals(store, logged):
    """What a dashboard sums up: tokens, money with its marks, time, waits, calls by outcome, and what was executed."""
    script = [
        say("", call("look", at="x"), call("broken", at="y"), usage=Usage(input_tokens=100, cached_tokens=60)),
        say("done", usage=Usage(output_tokens=7, estimated=True)),
    ]
    model = ScriptedModel(*script)
    agent = Agent(model, tools=[look, broken], store=store, name="seer", version="3")
    run = await agent.run("go")
    [end] = [record for record in logged.records if "event=run_ended" in record.getMessage()]
    assert end.levelno == logging.INFO
    facts = {name: value for name, value in end.facts.items() if name not in {"wall_s", "waited_s"}}
    assert facts == {
        "event": "run_ended",
        "run": run.id,
        "agent": "seer",
        "reason": "completed",
        "turns": 2,
        "input": 100,
        "output": 7,
        "cached": 60,
        "cost_usd": None,
        "estimated": True,
        "unpriced": True,
        "calls_done": 1,
        "calls_failed": 1,
        "version": "3",
        "release": "",
        "purpose": "production",
    }
    assert end.facts["wall_s"] >= end.facts["waited_s"] >= 0
    lived = [line for line in lines(logged) if re.match("event=(turn|call|run_ended) ", line)]
    stored = await store.read(run.id)
    read, now = [], begin_run(stored.header)
    for event in stored.events:
        now = now.apply(event)
        read += [line.format(stored.header) for line in describe_events(now, (event,))]
    assert read == lived


def everything(store, **options: object) -> Agent:
    """An agent that meets every kind of line: retries, errors of tools, loops, a bad end."""
    script = [
        fail(ModelUnavailableError(f"529 {WORDS} {KEY}")),
        say(ANSWER, call("look", at=ARGUMENT)),
        say(ANSWER, call("look", at=ARGUMENT)),
        say(ANSWER, call("look", at=ARGUMENT)),
        say("", call("broken", at=ARGUMENT)),
        say("", call("picky", at=ARGUMENT)),
        say("", call(ARGUMENT, at=ARGUMENT)),
    ]
    limits = Limits(retry_wait_s=1e-9)
    return Agent(
        ScriptedModel(*script), tools=[look, broken, picky], instructions=PROMPT, limits=limits, store=store, **options
    )


async def test_nothing_private_is_logged(store, logged):
    """Neither prompts nor arguments, results, answers or secrets are in any line, whatever goes wrong."""
    agent = everything(store)
    run = await agent.run(PROMPT)
    assert run.stop_reason is StopReason.TOO_MANY_ERRORS
    assert "Failed" in names(await agent.history(run.id))
    told = "\n".join(lines(logged))
    assert "event=loop" in told
    assert "event=model_retry" in told
    assert "event=tool_raised" in told
    assert "event=run_ended" in told
    for word in PRIVATE:
        assert word not in told, f"{word} is in the log"


async def test_a_models_refusal_is_logged_without_secrets(store, logged):
    """Providers repeat the key that they refuse; it does not reach the log."""
    agent = Agent(ScriptedModel(fail(ModelError(f"401: incorrect API key provided: {KEY}"))), store=store)
    run = await agent.run(PROMPT)
    assert run.stop_reason is StopReason.MODEL_ERROR
    told = "\n".join(lines(logged))
    assert "event=run_ended" in told
    assert KEY not in told


async def test_prompts_are_logged_where_asked_for_and_masked(store, logged):
    """`log_prompts=True` shows the newest message at DEBUG, with what looks like a secret or personal data masked."""
    secrets = {
        KEY: f"my key is {KEY}",
        "hunter2": "password: hunter2",
        "hunter3": '{"password": "hunter3"}',
        "eyJabc.def": "Authorization: Bearer eyJabc.def",
        "abc123def": "api_key=abc123def",
        "topsecret9": "OPENAI_API_KEY=topsecret9",
        "topsecret8": "client_secret: topsecret8",
        "topsecret7": "access_token=topsecret7",
        "13800138000": "手机13800138000",
        "ann@example.com": "邮箱ann@example.com",
    }
    agent = Agent(ScriptedModel(*["done"] * len(secrets)), store=store, log_prompts=True)
    for secret, prompt in secrets.items():
        await agent.run(f"tell me: {prompt} please")
        told = "\n".join(lines(logged))
        assert "tell me" in told
        assert "please" in told
        assert secret not in told, f"{secret} is in the log"
        logged.clear()


async def test_replies_are_logged_as_prompts_are(store, logged):
    """The text and the calls of each reply, with masked secrets; not without the switch."""
    turns = say(f"I found {KEY}", call("look", at=f"password: {KEY}")), ANSWER
    await Agent(ScriptedModel(*turns), tools=[look], store=store, log_prompts=True).run("go")
    told = [line for line in lines(logged) if "event=reply" in line]
    assert "I found" in told[0]
    assert "look" in told[0]
    assert ANSWER in told[1]
    assert KEY not in "\n".join(told)
    logged.clear()
    await Agent(ScriptedModel(*turns), tools=[look], store=store).run("go")
    assert not [line for line in lines(logged) if "event=reply" in line]


async def test_more_turns_than_expected_are_one_warning(store, logged):
    """At the first turn above the number that most tasks need, and not again."""
    turns = [say("", call("look", at=str(number))) for number in range(10)]
    await Agent(ScriptedModel(*turns[:7], "done"), tools=[look], store=store).run("go")
    assert "more_turns_than_expected" not in "\n".join(lines(logged))
    await Agent(ScriptedModel(*turns, "done"), tools=[look], store=store).run("go")
    (told,) = [line for line in lines(logged) if "more_turns_than_expected" in line]
    assert "turn=9 expected=8" in told


async def test_prompts_are_logged_at_debug_only(store, caplog):
    """At INFO the switch shows nothing."""
    caplog.set_level(logging.INFO, logger="agentfsm")
    await Agent(ScriptedModel("done"), store=store, log_prompts=True).run(PROMPT)
    assert PROMPT not in "\n".join(lines(caplog))


async def test_a_prompt_in_the_log_is_short(store, logged):
    """A book in the prompt is not a book in the log, and a line stays a line."""
    agent = Agent(ScriptedModel("done"), store=store, log_prompts=True)
    await agent.run("a line\nand another\n" * 10_000)
    (told,) = [line for line in lines(logged) if "event=prompt" in line]
    assert len(told) < 5_000
    assert "\n" not in told


async def test_what_a_person_writes_cannot_forge_a_line(store, logged):
    """Names and messages from outside are escaped: one fact, one line."""
    agent = Agent(ScriptedModel(), store=store, name="x\nevent=forged")
    run = await agent.step(agent.start("go"))
    await agent.cancel(run.id, by="ann\nevent=forged run=other", message="bye\x1b[2J")
    assert lines(logged)
    for line in lines(logged):
        assert "\n" not in line
        assert "\x1b" not in line


async def test_unusual_things_are_warnings_and_ends_are_errors(store, logged):
    """The levels can be relied on."""
    await everything(store).run(PROMPT)
    levels = {
        record.getMessage().split()[0].removeprefix("event="): record.levelno
        for record in logged.records
        if record.name.startswith("agentfsm")
    }
    assert levels["turn"] == levels["call"] == logging.INFO
    assert levels["model_retry"] == levels["loop"] == levels["tool_raised"] == logging.WARNING
    assert levels["run_ended"] == logging.ERROR


@tool
def buggy(at: str) -> str:
    """Break in a thread."""
    return {"tea": "hot"}[at]


@pytest.mark.parametrize(("broken_tool", "error"), [(broken, RuntimeError), (buggy, KeyError)])
async def test_what_a_tool_has_raised_is_logged_with_its_traceback(store, logged, broken_tool, error):
    """The line says which call of which run it was; below it stands where in the tool it went wrong."""
    agent = Agent(ScriptedModel(say("", call(broken_tool.name, at=ARGUMENT)), "done"), tools=[broken_tool], store=store)
    run = await agent.run("go")
    (record,) = [record for record in logged.records if record.exc_info]
    assert record.getMessage() == f"event=tool_raised run={run.id} agent=agent call=t1.0 tool={broken_tool.name}"
    assert record.levelno == logging.WARNING
    assert record.exc_info[0] is error
    frame = traceback.extract_tb(record.exc_info[2])[-1]
    assert (frame.filename, frame.name) == (__file__, broken_tool.name)


class TrapError(Exception):
    """An error whose every attribute is a trap."""

    def __getattr__(self, name):
        raise RuntimeError(name)


async def test_an_error_that_cannot_be_written_is_told_by_its_type(store, logged):
    """Who formats its traceback reads its notes, which raise before Python 3.13: the run goes on, its place is told."""

    @tool
    async def trapped():
        """Break."""
        raise TrapError("the words")

    run = await Agent(ScriptedModel(say("", call("trapped")), "done"), tools=[trapped], store=store).run("go")
    assert run.output == "done"
    (record,) = [record for record in logged.records if record.exc_info]
    told = "".join(traceback.format_exception(record.exc_info[1]))
    assert "TrapError" in told
    assert "in trapped" in told


@tool(read_only=True)
async def passing(ctx: RunContext[Any], how: str) -> str:
    """Fail for a while, or take too long."""
    if how == "slow":
        await anyio.sleep(60)
    if how == "away" or ctx.attempt == 1:
        raise RefusedError("closed") if how == "refused" else ConnectionError("no route")
    return "done"


@pytest.mark.parametrize(("how", "tracebacks"), [("once", 0), ("slow", 0), ("refused", 0), ("away", 1)])
def test_a_passing_fault_is_no_traceback_until_it_is_given_up(caplog, how, tracebacks):
    """One that a retry mends, a refusal and a time-out say all there is to say in the call's result."""
    caplog.set_level(logging.DEBUG, logger="agentfsm")

    async def play() -> None:
        agent = Agent(ScriptedModel(say("", call("passing", how=how)), "done"), tools=[passing], clock=VirtualClock())
        await agent.run("go")

    run_virtual(play)
    raised = [record.exc_info[0] for record in caplog.records if record.exc_info]
    assert raised == [ConnectionError] * tracebacks


async def test_each_attempt_at_a_model_says_why_and_when_the_next_comes(store, logged):
    """A wrong address shows in the log at once; the words of a reply that is of no use stay out of it."""
    script = [fail(ModelUnavailableError("no route to http://localhost:9/v1")), fail(ModelReplyError(ANSWER)), "done"]
    await Agent(ScriptedModel(*script), store=store, limits=Limits(retry_wait_s=1e-3)).run("go")
    away, useless = [record for record in logged.records if "event=model_retry" in record.getMessage()]
    assert away.levelno == useless.levelno == logging.WARNING
    assert 'why="no route to http://localhost:9/v1"' in away.getMessage()
    assert 1e-3 <= away.facts["wait_s"] <= 1.5e-3
    assert ANSWER not in useless.getMessage()


async def test_a_record_has_its_facts_as_values(store, logged):
    """Who writes JSON needs not read them out of a line."""
    run = await Agent(ScriptedModel("done"), store=store).run("go")
    turn = next(record.facts for record in logged.records if record.facts["event"] == "turn")
    assert turn == {
        "event": "turn", "run": run.id, "agent": "agent", "turn": 1, "calls": 0, "input": 10, "output": 5
    }  # fmt: skip


async def test_a_limit_that_is_near_is_worth_a_warning(store, logged):
    """A run that has used four fifths of its turns says so, once."""
    lines_ = [say("", call("look", at=str(n))) for n in range(10)]
    await Agent(ScriptedModel(*lines_), tools=[look], limits=Limits(turns=10), store=store).run("go")
    (told,) = [line for line in lines(logged) if "event=budget_warning" in line]
    assert "which=turns" in told
    assert "used=8" in told
    assert "limit=10" in told
