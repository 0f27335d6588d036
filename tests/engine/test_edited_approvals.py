"""Approvals that depend on the arguments, show what a call will do, or change it: what was allowed is what runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import anyio
import pytest

from agentfsm import (
    Agent,
    ConflictError,
    ErrorType,
    MisuseError,
    Outcome,
    PendingKind,
    Permissions,
    Rule,
    Run,
    RunContext,
    State,
    Tool,
    tool,
)
from agentfsm.core.events import ApprovalAsked, ApprovalGiven, ToolsChosen
from agentfsm.stores import MemoryStore, SQLiteStore
from agentfsm.testing import ScriptedModel, call, raw_call, say
from tests.support.checks import calls_of, keys_of, names, results_of, sound, sound_run, virtually


class Bank:
    """A tool that pays, and notes what it paid under which key."""

    def __init__(self, **options: Any) -> None:
        """Take the tool's options; each call needs a yes unless they say otherwise."""
        self.paid: list[tuple[str, int]] = []
        self.keys: list[str] = []

        async def pay(ctx: RunContext[Any], to: str, cents: int = 100) -> str:
            self.paid.append((to, cents))
            self.keys.append(ctx.idempotency_key)
            await anyio.lowlevel.checkpoint()
            return f"paid {cents} to {to}"

        self.tool: Tool[..., Any] = tool(**{"requires_approval": True, **options})(pay)

    def agent(self, *replies: object, **options: Any) -> Agent:
        """A new agent with this tool."""
        return Agent(ScriptedModel(*replies), tools=[self.tool, *options.pop("tools", ())], **options)


# Who is asked


async def test_a_function_picks_the_calls_that_need_a_yes(store):
    """It is given the validated arguments, with defaults; the others run at once."""
    bank = Bank(requires_approval=lambda a: a.cents > 100)
    calls = [call("pay", to="Ann"), call("pay", to="Bob", cents=100), call("pay", to="Cid", cents=101)]
    agent = bank.agent(say("", *calls), "done", store=store)
    run = await agent.run("go")
    assert bank.paid == [("Ann", 100), ("Bob", 100)]
    assert [item.call_id for item in run.pending] == ["t1.2"]
    await agent.approve(run.id, "t1.2")
    done = await agent.resume(run.id)
    assert (done.output, bank.paid[-1]) == ("done", ("Cid", 101))
    await sound(agent, done)


def breaks(_arguments: object) -> bool:
    """Raise in place of an answer."""
    raise LookupError("no such limit")


class Unsayable:
    """Neither yes nor no."""

    def __bool__(self) -> bool:
        raise ValueError("ambiguous")


@pytest.mark.parametrize("ask", [breaks, lambda _a: Unsayable(), lambda a: a.no_such_argument], ids=["1", "2", "3"])
async def test_a_function_that_breaks_has_not_said_that_nobody_need_be_asked(store, ask):
    """So a person is asked."""
    bank = Bank(requires_approval=ask)
    run = await bank.agent(say("", call("pay", to="Ann")), store=store).run("go")
    assert (run.is_waiting, bank.paid) == (True, [])


@pytest.mark.parametrize(
    "proposed",
    [raw_call("pay", '{"to": "Ann"'), call("pay"), call("pay", to="Ann", cents="many"), call("pya", to="Ann")],
    ids=["malformed", "missing", "misfit", "unknown"],
)
async def test_nobody_is_asked_about_a_call_that_cannot_run(store, proposed):
    """The model is told at once."""
    bank = Bank()
    agent = bank.agent(say("", proposed), "done", store=store)
    run = await agent.run("go")
    assert (run.output, bank.paid) == ("done", [])
    assert "ApprovalAsked" not in names(await agent.history(run.id))


@pytest.mark.parametrize(
    "permissions",
    [
        Permissions(level="read"),
        Permissions(deny=("pay",)),
        Permissions(deny=(Rule("pay", when=lambda a: a.cents > 0),)),
    ],
    ids=["level", "name", "arguments"],
)
async def test_nobody_is_asked_about_a_call_that_is_not_permitted(store, permissions):
    """A yes could not let it run."""
    bank = Bank()
    agent = bank.agent(say("", call("pay", to="Ann")), "done", permissions=permissions, store=store)
    run = await agent.run("go")
    assert (run.output, bank.paid) == ("done", [])
    assert "ApprovalAsked" not in names(await agent.history(run.id))


def is_told_to_call_again(run: Run) -> None:
    """The last call was refused, and the model reads how a person comes to be asked."""
    result = results_of(run.messages)[-1]
    assert (result.outcome, result.error_type, result.retryable) == (Outcome.FAILED, ErrorType.BLOCKED, True)
    assert "call it again to request it" in result.content


async def test_a_call_that_an_earlier_one_makes_possible_does_not_run_unasked(store):
    """What cannot run when the turn begins, and could when its turn comes, has not been allowed by anybody."""
    known: list[str] = []

    @tool
    async def add(name: str) -> str:
        known.append(name)
        return "added"

    bank = Bank(validate=lambda a: None if a.to in known else f"there is no account {a.to}")
    agent = bank.agent(say("", call("add", name="Ann"), call("pay", to="Ann")), "done", tools=[add], store=store)
    is_told_to_call_again(await agent.run("go"))
    assert bank.paid == []


async def test_a_tool_that_an_earlier_call_unlocks_does_not_run_unasked(store):
    """The same where it was not there when the turn began."""
    unlocked: list[bool] = []

    @tool
    async def unlock() -> str:
        unlocked.append(True)
        return "unlocked"

    bank = Bank(enabled=lambda _ctx: bool(unlocked))
    agent = bank.agent(say("", call("unlock"), call("pay", to="Ann")), "done", tools=[unlock], store=store)
    is_told_to_call_again(await agent.run("go"))
    assert bank.paid == []


# What is shown


async def test_a_person_sees_the_action_and_what_it_means(store):
    """Tool, arguments, and the sentence that the tool's author wrote for them, also after a restart."""
    bank = Bank(describe=lambda a: f"Pay {a.cents / 100:.2f} EUR to {a.to}")
    agent = bank.agent(say("", call("pay", to="Ann")), store=store)
    run = await agent.run("go")
    (item,) = run.pending
    assert (item.kind, item.tool, item.arguments) == (PendingKind.APPROVAL, "pay", {"to": "Ann"})
    assert item.description == "Pay 1.00 EUR to Ann"
    assert (await bank.agent(store=store).load(run.id)).pending == run.pending
    (asked,) = [event for event in await agent.history(run.id) if isinstance(event, ApprovalAsked)]
    assert asked.description == item.description


class MuteError(Exception):
    """An error without words."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


def mute(_arguments: object) -> str:
    """Raise it."""
    raise MuteError


@pytest.mark.parametrize(("describe", "says"), [(breaks, "no such limit"), (mute, "MuteError")])
async def test_a_description_that_breaks_is_told_and_changes_nothing(store, describe, says):
    """The person still sees the call, and decides."""
    bank = Bank(describe=describe)
    agent = bank.agent(say("", call("pay", to="Ann")), "done", store=store)
    run = await agent.run("go")
    assert says in run.pending[0].description
    await agent.approve(run.id, "t1.0")
    assert (await agent.resume(run.id)).output == "done"
    assert bank.paid == [("Ann", 100)]


async def test_a_description_is_text_that_every_store_keeps(store):
    """Half a character is replaced before anybody sees it, so the loaded run is the same."""
    bank = Bank(describe=lambda _a: "half \ud83d")
    agent = bank.agent(say("", call("pay", to="Ann")), store=store)
    run = await agent.run("go")
    assert run.pending[0].description == "half \ufffd"
    await sound(agent, run)


# Edited arguments


async def test_edited_arguments_are_what_runs(store):
    """The tool gets them, under a key of their own; history and audit say so; what the model wanted is kept."""
    bank = Bank()
    agent = bank.agent(say("", call("pay", to="Ann", cents=900)), say("done", expect="paid 9 to Ann Lee"), store=store)
    run = await agent.run("go")
    await agent.approve(run.id, "t1.0", by="bob", arguments={"to": "Ann Lee", "cents": 9})
    done = await agent.resume(run.id)
    assert bank.paid == [("Ann Lee", 9)]
    (made,) = calls_of(done.messages)
    assert bank.keys == [made.key] == [record.key for record in await agent.audit(run.id)]
    assert made.key not in keys_of(run).values()
    assert json.loads(made.arguments) == {"to": "Ann Lee", "cents": 9}
    assert done.calls[0].arguments == {"to": "Ann Lee", "cents": 9}
    events = await agent.history(run.id)
    (chosen,) = [event for event in events if isinstance(event, ToolsChosen)]
    assert json.loads(chosen.message.calls[0].arguments) == {"to": "Ann", "cents": 900}
    (given,) = [event for event in events if isinstance(event, ApprovalGiven)]
    assert (given.by, json.loads(given.arguments or "")) == ("bob", {"to": "Ann Lee", "cents": 9})
    assert names(events)[1:6] == ["ToolsChosen", "ApprovalAsked", "ApprovalGiven", "ToolStarted", "ToolFinished"]
    await sound(agent, done)


async def test_the_model_reads_the_edited_call(store):
    """The next request shows the call as it was run, so that call and result belong together."""
    bank = Bank()
    model = ScriptedModel(say("", call("pay", to="Ann")), "done")
    agent = Agent(model, tools=[bank.tool], store=store)
    run = await agent.run("go")
    await agent.approve(run.id, "t1.0", arguments={"to": "Bob"})
    await agent.resume(run.id)
    (shown,) = calls_of(model.requests[1].messages)
    assert json.loads(shown.arguments) == {"to": "Bob"}


async def test_only_the_call_that_was_edited_is_changed(store):
    """Its neighbours in the same message run as the model wrote them, in their order."""
    bank = Bank()
    agent = bank.agent(say("", *[call("pay", to=to) for to in "abc"]), "done", store=store)
    run = await agent.run("go")
    for index, arguments in enumerate((None, {"to": "B", "cents": 1}, None)):
        await agent.approve(run.id, f"t1.{index}", arguments=arguments)
    done = await agent.resume(run.id)
    assert bank.paid == [("a", 100), ("B", 1), ("c", 100)]
    assert [record.arguments["to"] for record in done.calls] == ["a", "B", "c"]
    await sound(agent, done)


@pytest.mark.parametrize(
    "arguments",
    [
        {"to": "Ann", "cents": "many"},
        {"cents": 5},
        {"to": "Ann", "why": "a gift"},
        {"to": "Ann", "cents": 500},
        {"to": "nul \0"},
    ],
    ids=["type", "missing", "unknown", "rule", "nul"],
)
async def test_arguments_that_do_not_fit_are_refused_where_they_are_given(store, arguments):
    """The person is told what is wrong, nothing is decided, and a second try may be right."""
    bank = Bank(validate=lambda a: "too much" if a.cents > 400 else None)
    agent = bank.agent(say("", call("pay", to="Ann")), "done", store=store)
    run = await agent.run("go")
    with pytest.raises(MisuseError, match=r"t1\.0 was not approved"):
        await agent.approve(run.id, "t1.0", arguments=arguments)
    assert (await agent.resume(run.id)).is_waiting
    await agent.approve(run.id, "t1.0", arguments={"to": "Bob"})
    assert (await agent.resume(run.id)).output == "done"
    assert bank.paid == [("Bob", 100)]


@pytest.mark.parametrize("arguments", [[1], "{}", {"to": object()}, {"to": float("nan")}, {("a",): 1}], ids=repr)
async def test_arguments_that_are_no_json_object_are_misuse(store, arguments):
    """A journal could not keep them."""
    bank = Bank()
    agent = bank.agent(say("", call("pay", to="Ann")), store=store)
    run = await agent.run("go")
    with pytest.raises(MisuseError, match=r"arguments must be plain JSON|arguments=.*: give a dict"):
        await agent.approve(run.id, "t1.0", arguments=arguments)
    assert (await agent.load(run.id)).pending


async def test_an_agent_that_lacks_the_tool_may_still_edit(store):
    """Its arguments are validated before the call runs; if they do not fit, the run asks for the approval again."""
    bank = Bank()
    run = await bank.agent(say("", call("pay", to="Ann")), store=store).run("go")
    await Agent(ScriptedModel(), store=store).approve(run.id, "t1.0", arguments={"cents": "many"})
    agent = bank.agent("done", store=store)
    run = await agent.resume(run.id)
    assert (run.is_waiting, bank.paid) == (True, [])
    await Agent(ScriptedModel(), store=store).approve(run.id, "t1.0", arguments={"to": "Bob"})
    done = await agent.resume(run.id)
    assert (done.output, bank.paid) == ("done", [("Bob", 100)])
    await sound(agent, done)


async def test_an_edit_that_is_not_permitted_does_not_run(store):
    """A person's yes does not lift a rule. The journal says that they gave it, to what, and that it was refused."""
    bank = Bank()
    permissions = Permissions(deny=(Rule("pay", when=lambda a: a.cents > 400),))
    agent = bank.agent(say("", call("pay", to="Ann")), "done", permissions=permissions, store=store)
    run = await agent.run("go")
    await agent.approve(run.id, "t1.0", by="bob", arguments={"to": "Ann", "cents": 500})
    done = await agent.resume(run.id)
    (result,) = results_of(done.messages)
    assert (done.output, bank.paid, result.error_type) == ("done", [], ErrorType.NOT_PERMITTED)
    await sound(agent, done)
    (given,) = [event for event in await agent.history(run.id) if isinstance(event, ApprovalGiven)]
    assert (given.by, json.loads(given.arguments or "")) == ("bob", {"to": "Ann", "cents": 500})
    assert done.calls[0].arguments == {"to": "Ann", "cents": 500}, "the model reads what was refused"


async def test_a_sub_agents_call_is_not_checked_by_the_callers_tool_of_that_name(store):
    """The caller may have a tool of the same name that takes other arguments."""
    sent: list[str] = []

    @tool(requires_approval=True, name="send")
    async def send_mail(to: str) -> str:
        sent.append(to)
        return "sent"

    @tool(name="send")
    async def send_number(number: int) -> str:
        return str(number)

    helper = Agent(ScriptedModel(say("", call("send", to="Ann")), "sent it"), tools=[send_mail], name="helper")
    model = ScriptedModel(say("", call("helper", query="write to Ann")), "done")
    agent = Agent(model, tools=[helper.as_tool(), send_number], store=store)
    run = await agent.run("go")
    (item,) = run.pending
    await agent.approve(item.run_id, item.call_id, arguments={"to": "Bob"})
    assert (await agent.resume(run.id)).output == "done"
    assert sent == ["Bob"]


# Who is first


FIRST: Mapping[str, Any] = {"to": "Ann", "cents": 1}


@pytest.mark.parametrize("second", [{"to": "Ann", "cents": 2}, None], ids=["other arguments", "as it was"])
async def test_of_two_approvals_that_differ_the_first_wins(store, second):
    """The second is told that the call runs with other arguments than it allowed."""
    bank = Bank()
    agent = bank.agent(say("", call("pay", to="Ann")), "done", store=store)
    run = await agent.run("go")
    await agent.approve(run.id, "t1.0", by="bob", arguments=FIRST)
    with pytest.raises(ConflictError, match="bob"):
        await agent.approve(run.id, "t1.0", by="eve", arguments=second)
    await agent.resume(run.id)
    assert bank.paid == [("Ann", 1)]


async def test_the_same_edit_twice_is_content(store):
    """A click that is delivered twice is one."""
    bank = Bank()
    agent = bank.agent(say("", call("pay", to="Ann")), "done", store=store)
    run = await agent.run("go")
    for _ in range(2):
        await agent.approve(run.id, "t1.0", by="bob", arguments=FIRST)
    await agent.resume(run.id)
    assert bank.paid == [("Ann", 1)]


async def test_a_no_behind_an_edit_is_a_conflict(store):
    """And a yes behind a no as well."""
    bank = Bank()
    agent = bank.agent(say("", *[call("pay", to=to) for to in "ab"]), "done", store=store)
    run = await agent.run("go")
    await agent.approve(run.id, "t1.0", arguments=FIRST)
    with pytest.raises(ConflictError):
        await agent.reject(run.id, "t1.0")
    await agent.reject(run.id, "t1.1", message="not Bob")
    with pytest.raises(ConflictError):
        await agent.approve(run.id, "t1.1", arguments=FIRST)
    done = await agent.resume(run.id)
    assert (bank.paid, [r.outcome for r in results_of(done.messages)]) == (
        [("Ann", 1)],
        [Outcome.DONE, Outcome.REJECTED],
    )


async def test_a_rejection_is_text_that_every_store_keeps(store):
    """Half a character in a person's message is replaced, so that the history can be sent and loaded."""
    bank = Bank()
    agent = bank.agent(say("", call("pay", to="Ann")), "done", store=store)
    run = await agent.run("go")
    await agent.reject(run.id, "t1.0", message="half \ud83d")
    done = await agent.resume(run.id)
    assert "half \ufffd" in results_of(done.messages)[0].content
    await sound(agent, done)


def test_an_edit_that_comes_too_late_is_a_no():
    """The time is up for it as for any other yes."""

    async def play(store, clock):
        bank = Bank(approval_expires_s=60)
        agent = bank.agent(say("", call("pay", to="Ann")), "done", store=store, clock=clock)
        run = await agent.run("go")
        await anyio.sleep(60)
        with pytest.raises(ConflictError, match="time is up"):
            await agent.approve(run.id, "t1.0", arguments=FIRST)
        done = await agent.resume(run.id)
        (result,) = results_of(done.messages)
        assert (bank.paid, result.outcome) == ([], Outcome.REJECTED)
        assert "in time" in result.content

    virtually(play)


# Crash and resume


class Killed(BaseException):
    """The process is gone."""


class Mortal(MemoryStore):
    """A store whose process dies right after it wrote an event of a kind."""

    dies_after = ""

    def append(self, lease, run, events, *, taken=(), final=False):
        """Write, and die if it was that."""
        commit = super().append(lease, run, events, taken=taken, final=final)
        if self.dies_after in names(events):
            self.dies_after = ""
            raise Killed
        return commit


@pytest.mark.parametrize("options", [{"read_only": True}, {"idempotent": True}, {}], ids=["read", "put", "pay"])
async def test_a_worker_that_dies_when_the_yes_was_spent(options):
    """The edit is in the journal: whoever goes on runs that, or shows a person that very action."""
    store, bank = Mortal(), Bank(**options)
    agent = bank.agent(say("", call("pay", to="Ann")), "done", store=store)
    run = await agent.run("go")
    await agent.approve(run.id, "t1.0", arguments=FIRST)
    store.dies_after = "ApprovalGiven"
    with pytest.raises(Killed):
        await agent.resume(run.id)
    assert bank.paid == []
    done = await agent.resume(run.id)
    if not options:
        (item,) = done.pending
        assert (item.kind, item.arguments) == (PendingKind.OUTCOME, FIRST)
        await agent.settle(run.id, "t1.0", rerun=True)
        done = await agent.resume(run.id)
    assert (done.output, bank.paid) == ("done", [("Ann", 1)])
    assert len([e for e in await agent.history(run.id) if isinstance(e, ApprovalGiven) and e.arguments]) == 1
    await sound(agent, done)


async def test_an_edit_is_taken_in_another_process(tmp_path):
    """Asked by one, edited by a second, run by a third: they share nothing but the file."""
    path, bank = tmp_path / "runs.db", Bank()
    first, second, third = [SQLiteStore(path) for _ in range(3)]
    run = await bank.agent(say("", call("pay", to="Ann")), store=first).run("go")
    await first.aclose()
    await Agent(ScriptedModel(), tools=[bank.tool], store=second).approve(run.id, "t1.0", arguments=FIRST)
    await second.aclose()
    agent = bank.agent("done", store=third)
    done = await agent.resume(run.id)
    assert (done.output, bank.paid) == ("done", [("Ann", 1)])
    await sound(agent, done)
    await third.aclose()


async def test_what_is_behind_an_edited_call_waits_for_it(store):
    """Calls before the first undecided one run, those behind wait, and the edit changes nothing of that."""
    did: list[str] = []

    @tool
    async def write(at: str) -> str:
        did.append(at)
        return at

    bank = Bank()
    calls = [call("write", at="a"), call("pay", to="Ann"), call("write", at="b")]
    agent = bank.agent(say("", *calls), "done", tools=[write], store=store)
    run = await agent.run("go")
    assert (did, run.state) == (["a"], State.ACT)
    await agent.approve(run.id, "t1.1", arguments=FIRST)
    done = await agent.resume(run.id)
    assert (did, bank.paid, done.output) == (["a", "b"], [("Ann", 1)], "done")
    sound_run(done)
