"""`agentfsm rules check`: what rules over time would have refused in old runs, without running anything."""

import anyio

from agentfsm import Agent, tool
from agentfsm.stores import SQLiteStore
from agentfsm.testing import ScriptedModel, call, say

RULES = '''
from agentfsm import Agent, tool
from agentfsm.guards import at_most, before, eventually
from agentfsm.testing import ScriptedModel

@tool
async def pay(account: str, cents: int = 1) -> str:
    """Pay."""
    raise AssertionError("nothing runs")

ruled = Agent(
    ScriptedModel(),
    name="bank",
    tools=[pay],
    guards=[before("pay", "verify", same="account"), at_most(2, "pay"), eventually("unlock", after="lock")],
)
bare = Agent(ScriptedModel(), name="bank", tools=[pay])
'''


@tool(read_only=True)
async def verify(account: str) -> str:
    """Verify an account."""
    if account == "bad":
        raise RuntimeError("not verified")
    return "verified"


@tool
async def pay(account: str) -> str:
    """Pay."""
    return "paid"


@tool
async def lock() -> str:
    """Lock."""
    return "locked"


async def fill(store):
    """Run an agent without guards: one run that obeys them, one that does not, one whose sub-agent pays."""

    def agent(*script, tools=(verify, pay, lock), name="bank"):
        return Agent(ScriptedModel(*script), tools=tools, name=name, store=store)

    good = say("", call("verify", account="A")), say("", call("pay", account="A"))
    await agent(*good, "done").run("go", id="good")
    bad = say("", call("verify", account="bad"), call("pay", account="bad")), say("", call("lock"))
    await agent(*bad, "done").run("go", id="bad")
    clerk = agent(say("", call("pay", account="A")), "paid", name="clerk").as_tool()
    both = say("", call("pay", account="A"), call("pay", account="A"))
    below = say("", call("verify", account="A")), both, say("", call("clerk", query="pay"))
    await agent(*below, "done", tools=[verify, pay, clerk]).run("go", id="below")
    await store.aclose()


def test_old_runs_are_checked(here):
    """Each call is judged by what was known when it was written; the calls of sub-agents count."""
    (here.folder / "bank.py").write_text(RULES, encoding="utf-8")
    anyio.run(fill, SQLiteStore(here.folder / "old.db"))
    found = here.json("rules", "check", "--agent", "bank:ruled", "--store", "old.db", "--since", "1d", code=1)
    assert (found["runs"], found["calls"]) == (4, 5)
    assert sorted((each["run_id"], each["call_id"], each["outcome"]) for each in found["findings"]) == [
        ("bad", "", None),
        ("bad", "t1.1", "done"),
        ("below.t3.0", "t1.0", "done"),
    ]
    told = here("rules", "check", "--agent", "bank:ruled", "--store", "old.db", code=1)
    assert "bad t1.1  pay, done: refused: the rule before(pay, verify, same=account): no call of verify" in told
    assert "bad  end: the rule eventually(unlock, after=lock): unlock has to succeed after lock" in told
    assert "4 runs, 5 calls of tools that the rules are about: 3 would have been refused" in here.err
    assert here("rules", "check", "--agent", "bank:ruled", "--store", "old.db", "--name", "nobody") == ""
    here("rules", "check", "--agent", "bank:bare", "--store", "old.db", code=2)
    assert "the agent has no rules over time" in here.err
