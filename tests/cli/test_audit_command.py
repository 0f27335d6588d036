"""`agentfsm audit`: the calls of a run, or of all runs, for people and for programs."""

import hashlib
import json

import anyio
import pytest

from agentfsm import Agent, Claims, Limits, ToolResult, tool
from agentfsm.ports import SandboxEnd, SandboxOutcome
from agentfsm.stores import SQLiteStore
from agentfsm.testing import ScriptedModel, call, say


@pytest.fixture
def audited(here):
    """A store with a payment that was changed and approved, a price, one below another run, and one that waits."""
    here.run("app:payer", "--id", "paid", "Pay.", code=3)
    here("approve", "paid", "t1.0", "--arguments", '{"account": "Ann", "cents": 3}', "--by", "bob")
    here("resume", "paid")
    here.run("app:market", "--id", "market", "Tea?")
    here.run("app:shopper", "--id", "price", "--session", "s", "Tea?")
    here.run("app:payer", "--id", "waits", "Pay.", code=3)
    return here


def ids(here, *words):
    return [(call["run_id"], call["call_id"], call["tool"]) for call in here.json("audit", *words)["calls"]]


def test_the_calls_of_a_run(audited):
    """What was called with what, how it ended, for whom, and who had a say in it."""
    lines = audited("audit", "paid").splitlines()
    assert lines[0].endswith('  paid t1.0  pay(account="Ann", cents=3)')
    digest = hashlib.sha256(b"paid 3 to Ann").hexdigest()
    assert lines[1].startswith("    done in ")
    assert lines[1].endswith(f" s, by agent, 13 characters, SHA-256 {digest[:12]}...")
    assert lines[2:] == [
        "    approved by bob",
        '    arguments of the model before the edit: account="17", cents=5',
    ]


def work() -> str:
    """Work."""
    return "done"


class Elsewhere:
    """A sandbox that starts no process."""

    seconds = 5.0

    def check_function(self, function):
        """Take any function."""

    async def run(self, function, args, kwargs):
        return SandboxOutcome(end=SandboxEnd.DONE, level="bubblewrap", value=function())


def test_the_sandbox_of_a_call(here):
    """The isolation in which a function ran stands with its call."""

    async def drive():
        model = ScriptedModel(say("", call("work")), say("done"))
        store = SQLiteStore(here.folder / ".agentfsm" / "runs.db")
        async with Agent(model, tools=[tool(sandbox=Elsewhere())(work)], store=store) as agent:
            await agent.run("go", id="boxed")

    anyio.run(drive)
    assert "    sandbox: bubblewrap" in here("audit", "boxed").splitlines()
    assert [each["sandbox"] for each in here.json("audit", "boxed")["calls"]] == ["bubblewrap"]


def test_the_caller_of_a_run_that_a_tool_started(here):
    """`show`, `runs` and `audit` have a line with the call, and the documents the fields."""
    store = SQLiteStore(here.folder / ".agentfsm" / "runs.db")
    inner = Agent(ScriptedModel(say("", call("work")), say("done")), tools=[tool(work)], name="inner", store=store)

    @tool
    async def delegate() -> str:
        """Delegate the work."""
        return (await inner.run("Work.")).id

    async def drive():
        model = ScriptedModel(say("", call("delegate")), say("done"))
        async with Agent(model, tools=[delegate], name="outer", store=store) as agent:
            run = await agent.run("go", id="outer")
            return next(each.content for each in run.messages if isinstance(each, ToolResult))

    made = anyio.run(drive)
    assert "caller   call t1.0 of run outer" in here("show", made).splitlines()
    assert "    started by call t1.0 of run outer" in here("runs").splitlines()
    assert "by inner, started by call t1.0 of run outer, 4 characters" in here("audit", made)
    assert here.json("show", made)["caller"] == "outer/t1.0"
    assert [each["caller"] for each in here.json("audit", made)["calls"]] == ["outer/t1.0"]


def test_an_agent_below_is_told_behind_its_call(audited):
    """What its name holds does nothing to the terminal."""
    assert ids(audited, "market") == [("market", "t1.0", "ask_shopper"), ("market.t1.0", "t1.0", "get_price")]
    out = audited("audit", "market")
    assert "by shopper" in out
    assert "\x1b" not in out


def test_all_runs(audited):
    """The newest first, each call once."""
    assert ids(audited) == [
        ("waits", "t1.0", "pay"),
        ("price", "t1.0", "get_price"),
        ("market.t1.0", "t1.0", "get_price"),
        ("market", "t1.0", "ask_shopper"),
        ("paid", "t1.0", "pay"),
    ]


@pytest.mark.parametrize(
    ("words", "runs"),
    [
        (["--tool", "get_*"], ["price", "market.t1.0"]),
        (["--status", "asked"], ["waits"]),
        (["--session", "s"], ["price"]),
        (["--agent", "nobody"], []),
        (["--user", "nobody"], []),
        (["--since", "2286-01-01"], ["waits"]),
        (["--until", "2001-09-10"], []),
        (["--since", "2001-09-10", "--tool", "PAY", "--status", "done"], ["paid"]),
        (["market", "--tool", "get_*"], ["market.t1.0"]),
    ],
)
def test_what_is_asked_for(audited, words, runs):
    """By tool, status, session, agent, user and time; what is still open was open at any time."""
    assert [run_id for run_id, *_ in ids(audited, *words)] == runs
    audited("audit", *words)
    assert ("no calls" in audited.err) == (not runs)


def test_a_limit_does_not_go_unsaid(audited):
    """That there is more is told, to people and to programs."""
    assert len(audited("audit", "--limit", "2", "--tool", "*").splitlines()) == 4
    assert "there are more than these 2" in audited.err
    assert audited.json("audit", "--limit", "2")["more"] is True
    assert audited.json("audit", "--limit", "5")["more"] is False
    assert "there are more" not in audited.err


def test_results_are_told_by_their_hash_unless_asked_for(audited):
    """So that a record can be passed on without what was read."""
    [call] = audited.json("audit", "paid")["calls"]
    digest = hashlib.sha256(b"paid 3 to Ann").hexdigest()
    assert call["result"] == {"sha256": digest, "chars": 13}
    assert "content" not in call
    [call] = audited.json("audit", "paid", "--results")["calls"]
    assert call["content"] == "paid 3 to Ann"
    assert (call["approved_by"], call["proposed"]["cents"], call["arguments"]["cents"]) == ("bob", 5, 3)
    [call] = audited.json("audit", "waits")["calls"]
    assert (call["status"], call["result"], call["ended_at"]) == ("asked", None, None)


def test_a_status_that_there_is_not(here):
    """It is an error of usage, which names those that there are."""
    here("audit", "--status", "great", code=2)
    assert "timed_out" in here.err


def test_sensitive_data_is_replaced(here):
    """Neither output has personal data and secrets in arguments and results; the hash is of the result as it was."""
    account = "ann@example.com, 13800138000"
    here.run("app:payer", "--id", "paid", "Pay.", code=3)
    here("approve", "paid", "t1.0", "--arguments", json.dumps({"account": account, "cents": 3}), "--by", "bob")
    here("resume", "paid")
    marked = "[EMAIL_REDACTED], [PHONE_REDACTED]"
    assert f'pay(account="{marked}", cents=3)' in here("audit", "paid")
    [paid] = here.json("audit", "paid", "--results")["calls"]
    assert (paid["arguments"], paid["content"]) == ({"account": marked, "cents": 3}, f"paid 3 to {marked}")
    assert paid["result"]["sha256"] == hashlib.sha256(f"paid 3 to {account}".encode()).hexdigest()


def test_the_claims_of_an_answer(here):
    """Each with its call, or the reason why there is none, and what the answer does not mention."""

    @tool
    def pay(cents: int) -> str:
        """Pay."""
        return "paid"

    async def drive():
        named = [{"tool": "pay", "arguments": {"cents": cents}} for cents in (1, 3)]
        answer = say("", call("final_answer", result="Paid.", claims=named))
        model = ScriptedModel(say("", call("pay", cents=1), call("pay", cents=2)), answer)
        store = SQLiteStore(here.folder / ".agentfsm" / "runs.db")
        limits = Limits(answer_retries=0)
        async with Agent(model, tools=[pay], store=store, claims=Claims(), limits=limits) as agent:
            await agent.run("go", id="claimed")
        async with Agent(ScriptedModel("Hello."), store=SQLiteStore(here.folder / ".agentfsm" / "runs.db")) as plain:
            await plain.run("go", id="plain")

    anyio.run(drive)
    assert here("audit", "--claims", "claimed", code=1).splitlines() == [
        "done by t1.0: pay(cents=1)",
        "not done, the call t1.0 differs in cents: pay(cents=3)",
        "not claimed, t1.1: pay(cents=2)",
    ]
    found = here.json("audit", "--claims", "claimed", code=1)
    assert [each["call_id"] for each in found["claims"]] == ["t1.0", ""]
    assert found["unclaimed"] == [{"call_id": "t1.1", "tool": "pay"}]
    assert 'not done pay({"cents":3}): the call t1.0 differs in cents' in here("show", "claimed")
    assert here.json("show", "claimed")["not_done"] == [found["claims"][1]]
    assert here.json("audit", "--claims", "plain") == {"claims": None, "unclaimed": []}
    here("audit", "--claims", code=2)
