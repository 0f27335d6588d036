"""An approval means this exact action: the tool as it was shown, these arguments, in time, once."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from agentfsm import Agent, ConflictError, Outcome, PendingKind, Run, State, Tool, ToolCall, tool
from agentfsm.core.events import ApprovalAsked
from agentfsm.core.inbox import Approve, Cancel
from agentfsm.stores import MemoryStore, SQLiteStore
from agentfsm.testing import ScriptedModel, call, say
from tests.support.checks import Wrapped, names, results_of, sound, virtually

PAYS = say("", call("pay", to="Ann", cents=5))


class Bank:
    """Pays."""

    def __init__(self) -> None:
        """Begin with nothing paid."""
        self.paid: list[tuple[str, int]] = []

    def tool(self, about: str = "Pay.", **options: Any) -> Tool[..., Any]:
        """The tool, with this description."""
        options = {"requires_approval": True} | options

        @tool(description=about, **options)
        async def pay(to: str, cents: int) -> str:
            self.paid.append((to, cents))
            return f"paid {to}"

        return pay

    def stricter(self) -> Tool[..., Any]:
        """The tool of a new version, that takes other arguments."""

        @tool(name="pay", description="Pay.", requires_approval=True)
        async def pay(to: str, cents: int, reason: str) -> str:
            self.paid.append((to, cents))
            return f"paid {to} for {reason}"

        return pay

    def agent(self, store, *script: object, used: Tool[..., Any] | None = None, **options: Any) -> Agent:
        """An agent with the tool."""
        return Agent(ScriptedModel(*script), tools=[used or self.tool()], store=store, **options)


async def asked(store, bank: Bank, **options: Any) -> Run:
    """A run that waits for a yes."""
    return await bank.agent(store, PAYS, **options).run("pay", id="mine")


def test_a_digest_is_of_the_tool_and_of_the_exact_arguments():
    """Another name, description, schema or promise, or any other argument, is another thing to say yes to."""
    bank = Bank()
    base = bank.tool()
    calls = [call_of(arguments) for arguments in ('{"to": "Ann", "cents": 5}', '{"to": "Ann", "cents": 6}', "{}")]
    tools = [base, bank.tool("Pay now."), bank.tool(idempotent=True), bank.tool(name="send"), bank.stricter()]
    digests = [each.digest_call(one) for each in tools for one in calls]
    assert len(set(digests)) == len(tools) * len(calls)
    assert bank.tool().digest_call(calls[0]) == base.digest_call(calls[0])
    assert bank.tool(timeout_s=9.0).digest_call(calls[0]) == base.digest_call(calls[0])


def call_of(arguments: str):
    """A call with these arguments."""
    return ToolCall(id="t1.0", name="pay", arguments=arguments)


async def test_what_is_shown_is_what_is_bound(store):
    """The question, its record and the yes name one digest."""
    bank = Bank()
    run = await asked(store, bank)
    [item] = run.pending
    agent = bank.agent(store, "done")
    [event] = [event for event in await agent.history("mine") if isinstance(event, ApprovalAsked)]
    await agent.approve("mine", "t1.0", digest=item.digest, by="ann")
    [row] = await store.inbox("mine")
    assert item.digest == event.digest == row.item.digest == bank.tool().digest_call(run.open[0].call)
    assert (await agent.resume("mine")).output == "done"
    assert bank.paid == [("Ann", 5)]


async def test_a_yes_to_something_else_is_refused(store):
    """Who approves by what they saw is told when that is not what would run; nothing is posted."""
    bank = Bank()
    await asked(store, bank)
    agent = bank.agent(store)
    for digest in ("0123456789abcdef", ""):
        with pytest.raises(ConflictError, match="has changed since it was shown"):
            await agent.approve("mine", "t1.0", digest=digest)
    assert await store.inbox("mine") == ()


CHANGES = [{"about": "Pay at once."}, {"idempotent": True}]


@pytest.mark.parametrize("change", CHANGES, ids=str)
@pytest.mark.parametrize("yes", ["before", "never"])
async def test_a_tool_that_has_changed_is_asked_about_again(store, change, yes):
    """A yes to the tool as it was is not spent on what it is now: the question comes again, with a new digest."""
    bank = Bank()
    run = await asked(store, bank)
    if yes == "before":
        await bank.agent(store).approve("mine", "t1.0", by="ann")
    later = bank.agent(store, "done", used=bank.tool(**change))
    again = await later.resume("mine")
    assert [item.kind for item in again.pending] == [PendingKind.APPROVAL]
    assert again.pending[0].digest != run.pending[0].digest
    assert (bank.paid, await store.inbox("mine")) == ([], ())
    assert names(await later.history("mine")).count("ApprovalAsked") == 2
    assert await later.resume("mine") == again
    with pytest.raises(ConflictError, match="has changed since it was shown"):
        await later.approve("mine", "t1.0", digest=run.pending[0].digest)
    await later.approve("mine", "t1.0", digest=again.pending[0].digest, by="bob")
    done = await later.resume("mine")
    assert (done.output, bank.paid) == ("done", [("Ann", 5)])
    await sound(later, done)


async def test_a_yes_that_was_on_its_way_while_the_question_changed_is_not_spent(store):
    """It is posted under the old question; whoever drives the new one asks again, and does not run it."""
    bank = Bank()
    run = await asked(store, bank)
    later = bank.agent(store, "done", used=bank.tool("Pay at once."))
    again = await later.resume("mine")
    digest = run.pending[0].digest
    await store.post("mine", f"approval:t1.0:{digest}", Approve(call_id="t1.0", by="ann", digest=digest))
    waiting = await later.resume("mine")
    assert (waiting.is_waiting, bank.paid) == (True, [])
    assert waiting.pending[0].digest == again.pending[0].digest


async def test_a_tool_that_changes_back_is_asked_about_once_more_and_can_be_approved(store):
    """A release is rolled back: the third question is the first one again, and its yes counts all the same."""
    bank = Bank()
    await asked(store, bank)
    old, new = bank.agent(store, "done"), bank.agent(store, used=bank.tool("Pay at once."))
    await old.approve("mine", "t1.0", by="ann")
    assert (await new.resume("mine")).is_waiting
    third = await old.resume("mine")
    assert third.is_waiting
    await old.approve("mine", "t1.0", by="bob")
    done = await old.resume("mine")
    assert (done.output, bank.paid) == ("done", [("Ann", 5)])


async def test_a_rejection_holds_for_whatever_the_tool_is_now(store):
    """A no needs no digest: it is spent, though the tool has changed since."""
    bank = Bank()
    await asked(store, bank)
    await bank.agent(store).reject("mine", "t1.0")
    done = await bank.agent(store, "done", used=bank.tool("Pay at once.")).resume("mine")
    assert (done.output, [r.outcome for r in done.calls], bank.paid) == ("done", [Outcome.REJECTED], [])


@pytest.mark.parametrize("yes", [True, False], ids=["approved", "undecided"])
async def test_a_call_that_no_longer_fits_its_tool_does_not_wait_for_ever(store, yes):
    """The new tool takes other arguments: nobody can say yes to them, so the model is told to call it as it is now."""
    bank = Bank()
    await asked(store, bank)
    if yes:
        await bank.agent(store).approve("mine", "t1.0", by="ann")
    done = await bank.agent(store, "done", used=bank.stricter()).resume("mine")
    assert (done.output, bank.paid) == ("done", [])
    [result] = results_of(done.messages)
    assert (result.outcome, "has changed" in result.content) == (Outcome.SKIPPED, True)
    assert await store.inbox("mine") == ()


async def test_a_question_that_was_asked_is_not_taken_back(store):
    """A tool that has changed, and now needs no yes, is asked about once more: somebody may see a reason."""
    bank = Bank()
    await asked(store, bank)
    agent = bank.agent(store, "done", used=bank.tool("Pay for free.", requires_approval=False))
    assert (await agent.resume("mine")).is_waiting
    await agent.approve("mine", "t1.0")
    assert ((await agent.resume("mine")).output, bank.paid) == ("done", [("Ann", 5)])


async def test_edited_arguments_are_approved_as_they_are(store):
    """The yes is to the question that was shown, and runs what the person made of it."""
    bank = Bank()
    run = await asked(store, bank)
    agent = bank.agent(store, "done")
    edited = {"to": "Bob", "cents": 7}
    await agent.approve("mine", "t1.0", digest=run.pending[0].digest, arguments=edited)
    done = await agent.resume("mine")
    assert (done.output, bank.paid, done.calls[0].arguments) == ("done", [("Bob", 7)], edited)


async def test_an_edited_yes_is_not_spent_on_a_changed_tool(store):
    """The person knew the tool as it was."""
    bank = Bank()
    await asked(store, bank)
    await bank.agent(store).approve("mine", "t1.0", arguments={"to": "Bob", "cents": 7})
    again = await bank.agent(store, used=bank.tool("Pay at once.")).resume("mine")
    assert (again.is_waiting, again.pending[0].arguments, bank.paid) == (True, {"to": "Ann", "cents": 5}, [])


# In time, by the store's clock


def test_a_yes_in_the_last_moment_counts_and_one_after_is_refused():
    """The store decides, whatever the clocks of others say."""

    async def play(store, _clock):
        bank = Bank()
        used = bank.tool(approval_expires_s=60)
        two = say("", call("pay", to="Ann", cents=1), call("pay", to="Bob", cents=2))
        agent = bank.agent(store, two, "done", used=used)  # its own clock is years behind
        run = await agent.run("pay", id="mine")
        await anyio.sleep(59.999)
        await agent.approve("mine", "t1.0")
        await anyio.sleep(0.001)
        for decide in (agent.approve, agent.reject):
            with pytest.raises(ConflictError, match="time is up"):
                await decide("mine", "t1.1")
        done = await agent.resume("mine")
        assert (done.output, bank.paid) == ("done", [("Ann", 1)])
        assert [r.outcome for r in done.calls] == [Outcome.DONE, Outcome.REJECTED]
        assert results_of(done.messages)[1].content.startswith(
            "not run: a person was asked, and no answer came in time."
        )
        assert run.is_waiting

    virtually(play)


class Hand:
    """A clock that is set by hand."""

    def __init__(self, at: float) -> None:
        """Set it."""
        self.at = at

    def now(self) -> float:
        """What it was set to."""
        return self.at

    def monotonic(self) -> float:
        """The same."""
        return self.at


class LastMoment(Wrapped):
    """A store that is asked the time right after somebody elsewhere has decided, in the last moment."""

    def __init__(self, inner: object, decide) -> None:
        """Take the real store, and what happens elsewhere."""
        self.inner, self.decide = inner, decide

    async def now(self) -> float:
        """Pass on."""
        await self.decide()
        return await self.inner.now()


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
async def test_a_yes_in_the_last_moment_counts_for_one_who_already_drives_the_run(tmp_path, kind):
    """Who takes the run up hears of a decision from another process only by looking: when the time is up, it looks."""
    clock, bank = Hand(1_000.0), Bank()
    path = tmp_path / "runs.db"
    here = MemoryStore(clock=clock) if kind == "memory" else SQLiteStore(path, clock=clock)
    there = here if kind == "memory" else SQLiteStore(path, clock=clock)
    used = bank.tool(approval_expires_s=60)
    run = await bank.agent(here, PAYS, used=used).run("pay", id="mine")
    expires_at = run.pending[0].expires_at

    async def decide() -> None:
        if clock.at < expires_at:
            clock.at = expires_at - 0.001
            await bank.agent(there, used=used).approve("mine", "t1.0", by="ann")
            clock.at = expires_at

    done = await bank.agent(LastMoment(here, decide), "done", used=used).resume("mine")
    assert (done.output, bank.paid) == ("done", [("Ann", 5)])
    assert here is there or await there.aclose() is None
    await here.aclose()


async def test_a_yes_that_arrives_with_the_end_of_the_run_does_nothing(store):
    """Whoever cancels and whoever approves at once: the run ends, and the effect does not happen."""
    bank = Bank()
    await asked(store, bank)
    agent = bank.agent(store)
    await agent.approve("mine", "t1.0")
    await store.post("mine", "cancel", Cancel(by="ann"))
    done = await agent.resume("mine")
    assert (done.state, bank.paid) == (State.ERROR, [])
    await sound(agent, done)
