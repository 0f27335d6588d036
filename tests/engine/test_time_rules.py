"""Rules over time: each reads outcomes, of the run, its session and the runs around it, and holds after a crash."""

from __future__ import annotations

from datetime import date
from decimal import Decimal
from enum import Enum
from typing import Any

import anyio
import pytest
from pydantic import BaseModel

from agentfsm import Agent, Limits, MisuseError, ModelRetry, Outcome, RunContext, StopReason, tool
from agentfsm.core import events as e
from agentfsm.guards import Calls, Guard, approved, at_most, before, eventually, never, only_if, within
from agentfsm.stores import MemoryStore
from agentfsm.telemetry.measurements import FINDING, measure_run
from agentfsm.testing import ScriptedModel, call, say
from tests.support.checks import results_of, sound, virtually


@pytest.fixture
def store():
    """Rules read runs as the journals make them, whatever store has these."""
    return MemoryStore()


class Bank:
    """Tools that fail for the accounts in `bad`, and the effects that they had."""

    def __init__(self, *bad):
        self.made = []
        made = self.made

        @tool(read_only=True)
        async def verify(account: str) -> str:
            """Verify an account."""
            if account in bad:
                raise RuntimeError("not verified")
            return f"{account} is verified"

        @tool
        async def pay(account: str, cents: int = 1) -> str:
            """Pay."""
            made.append(("pay", account))
            if account == "broken":
                raise RuntimeError("the connection broke")
            return "paid"

        @tool
        async def charge(order: int) -> dict[str, bool]:
            """Charge an order."""
            made.append(("charge", order))
            return {"paid": order % 2 == 0}

        @tool
        async def ship(order: int) -> str:
            """Ship an order."""
            made.append(("ship", order))
            return "shipped"

        @tool
        async def lock(door: str) -> str:
            """Lock a door."""
            made.append(("lock", door))
            return "locked"

        @tool
        async def unlock(door: str) -> str:
            """Unlock a door."""
            made.append(("unlock", door))
            return "unlocked"

        self.tools = [verify, pay, charge, ship, lock, unlock]

    def agent(self, store, *script, guards, **options):
        return Agent(ScriptedModel(*script), tools=self.tools, store=store, guards=guards, **options)


class Door(Enum):
    """A choice."""

    FRONT = "front"


class Receipt(BaseModel):
    """A value with a default."""

    order: int
    paid: bool = False


def turns(*replies):
    """Return a script: one reply for each call, or list of calls, and an answer."""
    return (*[say("", *(reply if isinstance(reply, list) else [reply])) for reply in replies], "done")


def verify(account="A"):
    return call("verify", account=account)


def pay(account="A"):
    return call("pay", account=account)


VERIFIED = before("pay", "verify", same="account")


@pytest.mark.parametrize(
    ("replies", "paid"),
    [
        ([pay()], 0),
        ([verify("bad"), pay("bad")], 0),
        ([verify("B"), pay("A")], 0),
        ([[verify(), pay()]], 0),
        ([[verify(), pay()], pay()], 1),
        ([verify(), [pay(), pay()]], 2),
    ],
    ids=["none", "failed", "another", "one reply", "in the next reply", "two"],
)
async def test_a_verification_that_succeeded_comes_before_a_payment(store, replies, paid):
    """A failed one, one of another account, and one in the same reply permit nothing."""
    bank = Bank("bad")
    run = await bank.agent(store, *turns(*replies), guards=[VERIFIED]).run("go")
    assert len(bank.made) == paid
    assert run.output == "done"
    refused = [
        each.content for each in results_of(run.messages) if each.outcome is Outcome.FAILED and each.tool == "pay"
    ]
    for text in refused:
        assert "the rule before(pay, verify, same=account): no call of verify with the same account" in text
        assert text.endswith("It may run only after verify has succeeded: do that first.")


SESSIONS = {
    "never": (never("pay", after="lock"), [call("lock", door="x")], [pay()], 0),
    "lifted": (
        never("pay", after="lock", until="unlock"),
        [call("lock", door="x"), call("unlock", door="x")],
        [pay()],
        1,
    ),
    "locked anew": (
        never("pay", after="lock", until="unlock"),
        [call("unlock", door="x"), call("lock", door="x")],
        [pay()],
        0,
    ),
    "at most": (at_most(2, "pay"), [pay("B")], [[pay(), pay()]], 2),
    "at most, each": (at_most(1, "pay", same="account"), [pay("B")], [[pay(), pay("A ")]], 2),
    "at most, in a run": (at_most(1, "pay", per="run"), [pay("B")], [[pay(), pay()]], 2),
    "broke": (at_most(1, "pay"), [pay("broken")], [pay()], 1),
    "before": (VERIFIED, [verify()], [pay()], 1),
    "within": (within("pay", of="charge", days=2), [call("charge", order=1)], [pay()], 1),
    "never charged": (within("pay", of="charge", days=2), [], [pay()], 0),
}


@pytest.mark.parametrize("name", SESSIONS)
async def test_rules_hold_for_a_session(store, name):
    """What an earlier run of the session has done counts; failed calls whose tool ran may have happened."""
    rule, first, second, paid = SESSIONS[name]
    bank = Bank()
    agent = bank.agent(store, *turns(*first), *turns(*second), guards=[Guard(rule)])
    earlier = await agent.run("go", session="s")
    run = await agent.run("go on", session="s")
    assert run.output == "done"
    assert len([each for each in bank.made if each[0] == "pay"]) == paid
    await sound(agent, earlier)


PAID = Calls("charge", result=lambda charge: charge["paid"])


@pytest.mark.parametrize(("order", "shipped"), [(1, 0), (2, 1)])
async def test_the_newest_outcome_decides(store, order, shipped):
    """An order is shipped only if its charge was paid, whatever other orders were."""
    bank, same = Bank(), only_if("ship", outcome=PAID, same="order")
    script = turns(call("charge", order=4), call("charge", order=order), call("ship", order=order))
    run = await bank.agent(store, *script, guards=[same]).run("go")
    assert bank.made.count(("ship", order)) == shipped
    if not shipped:
        text = results_of(run.messages)[-1].content
        assert "the newest call of charge with the same order (1) is not a success of charge with <lambda>" in text


async def test_a_person_approves_what_a_rule_forbids(store):
    """With `until=approved`, each such call is asked about."""
    bank = Bank()
    agent = bank.agent(store, *turns(verify(), pay(), pay("B")), guards=[never("pay", after="verify", until=approved)])
    run = await agent.run("go")
    [waiting] = run.pending
    assert waiting.reason == (
        "the rule never(pay, after=verify, until=approved): a call of verify has or may have happened before"
    )
    await agent.approve(run.id, waiting.call_id, by="ann")
    run = await agent.resume(run.id)
    assert bank.made == [("pay", "A")]
    await agent.reject(run.id, run.pending[0].call_id)
    assert (await agent.resume(run.id)).output == "done"


async def test_a_draft_goes_back_while_a_door_is_locked(store):
    """The model unlocks it when it is told; if it does not, the run says so at its end."""
    bank, rule = Bank(), eventually("unlock", after="lock", same="door")
    lock, unlock = call("lock", door="x"), call("unlock", door="x")
    agent = bank.agent(store, *turns(lock), *turns(unlock), guards=[rule])
    run = await agent.run("go")
    assert bank.made == [("lock", "x"), ("unlock", "x")]
    assert (run.output, run.findings) == ("done", ())
    agent = bank.agent(store, *turns(lock), "done", "really done", guards=[rule])
    run = await agent.run("go")
    [finding] = run.findings
    assert finding == (
        "the rule eventually(unlock, after=lock, same=door): unlock with the door 'x' has to succeed after lock"
    )
    assert run.refusals == agent.limits.answer_retries
    assert (await agent.load(run.id)).findings == run.findings
    measured = measure_run(run.header, await agent.history(run.id))
    assert [each.labels for each in measured if FINDING in each.labels] == [("agent", FINDING)]


@pytest.mark.parametrize("validators", [[], ["strict"]])
async def test_a_text_of_a_stop_condition_goes_back_as_often_as_any_other(store, validators):
    """The condition still holds then, and the run ends all the same."""

    def refuse(_answer: str) -> None:
        raise ModelRetry("say more")

    bank = Bank()
    options = {"stop_when": [lambda run: "That is all." if run.calls else False], "limits": Limits(answer_retries=1)}
    rules = [eventually("unlock", after="lock", same="door")]
    agent = bank.agent(
        store, *turns(call("lock", door="A")), guards=rules, output_validators=[refuse for _ in validators], **options
    )
    with anyio.fail_after(10):
        run = await agent.run("go")
    assert run.findings == (
        "the rule eventually(unlock, after=lock, same=door): unlock with the door 'A' has to succeed after lock",
    )
    assert (run.refusals, run.stop_reason is StopReason.TOO_MANY_ERRORS) == (1, bool(validators))
    await sound(agent, run)


async def test_a_run_that_fails_says_what_is_due(store):
    """Also if a limit stops it while the door is locked."""
    bank = Bank()
    lock = say("", call("lock", door="x"))
    agent = bank.agent(store, lock, guards=[eventually("unlock", after="lock")], limits=Limits(turns=1))
    run = await agent.run("go")
    assert run.stop_reason == "max_turns"
    assert run.findings == ("the rule eventually(unlock, after=lock): unlock has to succeed after lock",)


def clerk(bank, name, *script, tools=None):
    return Agent(ScriptedModel(*script), tools=tools or bank.tools, name=name).as_tool(concurrency_safe=True)


@pytest.mark.parametrize("rule", [at_most(3, "pay"), at_most(3, "pay", same="account")], ids=str)
async def test_sub_agents_side_by_side_share_a_limit(store, rule):
    """No two of them get the last call, and the run above them knows what they did."""
    bank = Bank()
    clerks = [clerk(bank, name, *turns([pay(), pay()])) for name in ("ann", "bob")]
    script = turns([call("ann", query="pay"), call("bob", query="pay")], pay())
    agent = Agent(ScriptedModel(*script), tools=[*clerks, *bank.tools], store=store, guards=[Guard(rule)])
    run = await agent.run("go")
    assert run.output == "done"
    assert len(bank.made) == 3
    assert "in this session have or may have happened" in results_of(run.messages)[-1].content


async def test_a_sub_agent_knows_what_the_runs_above_it_did(store):
    """The caller has verified the account, and another sub-agent one that the caller may pay then."""
    bank = Bank()
    tools = [clerk(bank, "payer", *turns(pay(), pay("B"))), clerk(bank, "checker", *turns(verify("C"))), *bank.tools]
    script = turns(verify(), call("payer", query="pay"), call("checker", query="check"), pay("C"))
    agent = Agent(ScriptedModel(*script), tools=tools, store=store, guards=[VERIFIED])
    assert (await agent.run("go")).output == "done"
    assert bank.made == [("pay", "A"), ("pay", "C")]


async def test_the_verdict_is_taken_again_right_before_the_start(store):
    """Between the decision on a payment and its start another agent has locked the door."""
    bank, locked = Bank(), anyio.Event()
    [lock] = [each for each in bank.tools if each.name == "lock"]

    @tool
    async def wait_for_lock() -> str:
        """Wait."""
        await locked.wait()
        return "waited"

    @tool(name="lock")
    async def lock_now(door: str) -> str:
        """Lock a door."""
        locked.set()
        return await lock(door)

    payer = clerk(bank, "payer", *turns([call("wait_for_lock"), pay()]), tools=[wait_for_lock, *bank.tools])
    locker = clerk(bank, "locker", *turns(call("lock", door="x")), tools=[lock_now])
    both = [call("payer", query="pay"), call("locker", query="lock")]
    agent = Agent(
        ScriptedModel(*turns(both)), tools=[payer, locker], store=store, guards=[Guard(never("pay", after="lock"))]
    )
    run = await agent.run("go")
    assert bank.made == [("lock", "x")]
    told = [each for each in await agent.history(f"{run.id}.t1.0") if isinstance(each, e.Guarded)]
    assert [each.verdict for each in told] == ["allow", "refuse"]


def test_a_time_that_passes_while_a_person_thinks():
    """The charge was new enough when the refund was asked about, and is not when it would start."""

    async def play(store, clock):
        bank = Bank()
        tools = [each for each in bank.tools if each.name != "pay"]

        @tool(requires_approval=True)
        async def refund(order: int) -> str:
            """Refund an order."""
            bank.made.append(("refund", order))
            return "refunded"

        rules = [within("refund", of="charge", days=2, same="order")]
        script = turns(call("charge", order=2), call("refund", order=2))
        agent = Agent(ScriptedModel(*script), tools=[*tools, refund], store=store, guards=rules, clock=clock)
        run = await agent.run("go")
        await anyio.sleep(3 * 86_400)
        await agent.approve(run.id, "t2.0")
        run = await agent.resume(run.id)
        assert bank.made == [("charge", 2)]
        assert "is 3 days ago, and 2 days are allowed" in results_of(run.messages)[-1].content

    virtually(play)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: before("", "verify"), "give a tool, its name or Calls"),
        (lambda: before("pay", 5), "give a tool, its name or Calls"),
        (lambda: before("pay", "verify", same=("a",)), "same= is the name of an argument"),
        (lambda: within("pay", of="charge"), "days and hours"),
        (lambda: at_most(-1, "pay"), "limit"),
        (lambda: at_most(1, "pay", per="day"), "per"),
        (lambda: at_most(1, "pay", same=("a", "b")), "same"),
        (lambda: within("pay", of="charge", days="2"), "days"),
        (lambda: Calls("pay", result=True), "give a function of the result"),
        (
            lambda: before(Bank().tools[1], "verify", same="acount"),
            "no such argument; it has: account, cents",
        ),
        (lambda: eventually("unlock", after=Bank().tools[4], same="gate"), "the tool lock has no such argument"),
        (lambda: never("pay", after="lock", verdict="perhaps"), "verdict"),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused(make, match):
    """When it is made."""
    with pytest.raises(MisuseError, match=match):
        make()


async def test_tools_name_themselves_and_arguments_are_compared_as_services_do(store):
    """What permits is compared exactly, what forbids as loosely as a service may read it."""
    bank = Bank()
    tools = {each.name: each for each in bank.tools}
    rules = [
        before(tools["pay"], tools["verify"], same="account"),
        at_most(1, Calls("pay", lambda a: a.cents < 9), same="account"),
    ]
    script = turns(verify("A"), verify("a"), pay("A"), pay("a"), call("pay", account="a", cents=9), pay("Ä"))
    run = await bank.agent(store, *script, guards=rules).run("go")
    assert bank.made == [("pay", "A"), ("pay", "a")]
    assert run.output == "done"


@pytest.mark.parametrize(
    ("kind", "first", "second", "permitted", "counted"),
    [
        (Any, "1", 1, False, 2),
        (Any, "true", True, False, 2),
        (Any, "[1]", [1], False, 2),
        (Any, 1, 1.0, True, 2),
        (Any, True, 1, False, 1),
        (Any, "A\u200b B", "AB", False, 2),
        (Any, "12345678901234567890", "12345678901234567891", False, 1),
        (int, "5", "5", True, 2),
        (date, "2026-01-02", "2026-01-02", True, 2),
        (Decimal, "5.0", "5.0", True, 2),
        (Decimal, 5, "5.00", False, 2),
        (Door, "front", "front", True, 2),
        (Receipt, {"order": 1}, {"order": 1.0}, False, 1),
        (Receipt | None, {"order": 1}, {"order": 1}, True, 2),
    ],
)
async def test_values_of_each_type_are_compared_as_they_were_written(kind, first, second, permitted, counted):
    """Earlier calls are known by their JSON: a rule about a date or a choice permits and counts as one about a text."""
    made = []

    async def act(key: Any) -> str:
        """Act."""
        made.append(key)
        return "done"
        return "done"

    act.__annotations__["key"] = kind
    tools = [tool(act, name=name) for name in ("look", "act")]
    for rule, number in (
        (before("act", "look", same="key"), 1 + permitted),
        (at_most(1, "*", same="key"), 3 - counted),
    ):
        made.clear()
        model = ScriptedModel(*turns(call("look", key=first), call("act", key=second)))
        await Agent(model, tools=tools, guards=[rule]).run("go")
        assert len(made) == number


async def test_a_cancelled_run_says_what_is_due(store):
    """The calls that were open then may have happened."""
    bank, agents = Bank(), []

    @tool(name="lock")
    async def lock_and_stop(ctx: RunContext, door: str) -> str:
        """Lock a door, and stop."""
        await agents[0].cancel(ctx.run_id)
        await anyio.sleep_forever()

    rules = [eventually("unlock", after="lock")]
    script = turns(call("lock", door="x"))
    agents.append(Agent(ScriptedModel(*script), tools=[lock_and_stop, *bank.tools[5:]], store=store, guards=rules))
    run = await agents[0].run("go")
    assert run.stop_reason == "cancelled"
    assert run.findings == ("the rule eventually(unlock, after=lock): unlock has to succeed after lock",)


async def test_what_sub_agents_of_earlier_runs_did_counts(store):
    """In the session, and in a fork, whose sub-agent was that of the run that it was forked from."""
    bank = Bank()

    def agent(*script):
        tools = [clerk(bank, "checker", *turns(verify())), *bank.tools]
        return Agent(ScriptedModel(*script), tools=tools, store=store, guards=[VERIFIED])

    first = await agent(*turns(call("checker", query="check"))).run("go", session="s")
    assert (await agent(*turns(pay())).run("go on", session="s")).output == "done"
    assert bank.made == [("pay", "A")]
    forking = agent(*turns(pay()))
    fork = await forking.fork(first.id, at=first.version - 1)
    assert (await forking.finish(fork)).output == "done"
    assert bank.made == 2 * [("pay", "A")]


async def test_a_sub_agent_that_is_resumed_by_itself_reads_the_run_above_it(store):
    """The caller has verified the account, and is not executed here."""
    bank = Bank()
    asking = tool(requires_approval=True)(bank.tools[1].function)
    payer = Agent(ScriptedModel(*turns(pay(), pay("B"))), tools=[asking], name="payer", store=store, guards=[VERIFIED])
    script = turns(verify(), call("payer", query="pay"))
    run = await Agent(ScriptedModel(*script), tools=[bank.tools[0], payer.as_tool()], store=store).run("go")
    [waiting] = run.pending
    await payer.approve(waiting.run_id, waiting.call_id)
    below = await payer.resume(waiting.run_id)
    assert (below.output, bank.made) == ("done", [("pay", "A")])


async def test_an_agent_in_the_background_has_not_happened_before_its_end(store):
    """The result of the call that begins it is none of its work."""
    bank, let = Bank(), anyio.Event()

    @tool(read_only=True)
    async def dig() -> str:
        """Dig."""
        await let.wait()
        return "gold"

    @tool
    async def let_it_dig() -> str:
        """Let it dig."""
        let.set()
        return "digging"

    digger = Agent(ScriptedModel(*turns(call("dig"))), tools=[dig], name="digger").as_tool(background=True)
    early = turns(call("digger", query="dig"), pay(), call("let_it_dig"))
    script = (*early[:-1], "I wait for it.", *turns(pay()))
    tools = [digger, let_it_dig, *bank.tools]
    agent = Agent(ScriptedModel(*script), tools=tools, store=store, guards=[before("pay", "digger")])
    assert (await agent.run("go")).output == "done"
    assert bank.made == [("pay", "A")]


def test_a_time_that_passes_in_the_same_reply():
    """The charge was new enough when the reply came, and is not once the call before the refund has ended."""

    async def play(store, clock):
        bank = Bank()

        @tool
        async def nap() -> str:
            """Sleep."""
            await anyio.sleep(10)
            return "awake"

        rules = [within("ship", of="charge", hours=0.001, same="order")]
        late = [call("nap"), call("ship", order=2)]
        agent = Agent(
            ScriptedModel(*turns([call("charge", order=2)], late, [call("charge", order=2)], call("ship", order=2))),
            tools=[nap, *bank.tools],
            store=store,
            guards=rules,
            clock=clock,
        )
        assert (await agent.run("go")).output == "done"
        assert bank.made == [("charge", 2), ("charge", 2), ("ship", 2)]

    virtually(play)
