"""Rules over time before any run: steps that break one in whatever order are refused, with the path."""

from __future__ import annotations

import pytest

from agentfsm import Agent, MisuseError, tool
from agentfsm.flow import Flow, step
from agentfsm.guards import Guard, at_most, before, eventually, never
from agentfsm.planning import Planner
from agentfsm.testing import ScriptedModel


@step(read_only=True)
async def verify(account: str) -> str:
    """Verify an account."""
    return account


@step(depends_on=[verify])
async def pay(account: str, verify: str) -> str:
    """Pay."""
    return "paid"


@step
async def pay_at_once(account: str) -> str:
    """Pay without a look."""
    return "paid"


@step(depends_on=[pay_at_once], name="verify")
async def verify_late(account: str, pay_at_once: str) -> str:
    """Verify an account that was paid."""
    return account


@step(depends_on=[verify], when=lambda account: account == "A", name="lock")
async def lock_some(account: str) -> str:
    """Lock some accounts."""
    return account


VERIFIED = before("pay*", "verify", same="account")


def test_a_flow_whose_steps_break_a_rule_is_refused():
    """What earlier runs have done, and steps that may be skipped, are no reason."""
    with pytest.raises(MisuseError) as refused:
        Flow([pay_at_once, verify_late], guards=[Guard(VERIFIED)])
    assert str(refused.value) == (
        "the steps of the flow 'flow' cannot be carried out: before(pay*, verify, same=account) is broken in "
        "any order: step 1 (pay_at_once) -> step 2 (verify)"
    )
    Flow([verify, pay], guards=[VERIFIED])
    Flow([pay_at_once], guards=[VERIFIED])
    with pytest.raises(MisuseError, match=r"step 1 \(verify\) -> step 2 \(pay\)"):
        Flow([verify, pay], guards=[never("pay", after="verify", same="account")])
    Flow([verify, pay], guards=[never("pay", after="verify", until="pardon", verdict="ask")])
    Flow([verify, lock_some], guards=[eventually("unlock", after="lock")])
    with pytest.raises(MisuseError, match="at_most"):
        Flow([verify, pay], guards=[at_most(1, "*")])


async def test_a_plan_that_breaks_a_rule_is_made_anew():
    """The planner reads what is wrong with it."""
    made = []

    @tool
    async def charge(order: int) -> str:
        """Charge an order."""
        made.append("charge")
        return "charged"

    @tool
    async def ship(order: int) -> str:
        """Ship an order."""
        made.append("ship")
        return "shipped"

    def plan(first, second):
        steps = f'[{{"id": 1, "tool": "{first}", "arguments": {{"order": 1}}}}, '
        return f'{{"steps": {steps}{{"id": 2, "tool": "{second}", "arguments": {{"order": 1}}, "after": [1]}}]}}'

    model = ScriptedModel(plan("ship", "charge"), plan("charge", "ship"), "done")
    agent = Agent(
        model,
        tools=[charge, ship],
        planner=Planner(),
        guards=[before("ship", "charge", same="order")],
    )
    run = await agent.run("Ship order 1")
    assert (made, run.output) == (["charge", "ship"], "done")
    asked = str(model.requests[1].messages)
    assert "before(ship, charge, same=order) is broken in any order: step 1 (ship) -> step 2 (charge)" in asked


async def test_steps_obey_rules_when_they_start():
    """A step is permitted by one that ended in the same run; what is due at the end of a flow is a finding."""
    rules = [VERIFIED, eventually("receipt", after="pay")]
    run = await Flow([verify, pay], guards=rules).run({"account": "A"})
    assert run.output == '{"pay": "paid"}'
    assert run.findings == ("the rule eventually(receipt, after=pay): receipt has to succeed after pay",)
    run = await Flow([pay_at_once], guards=rules).run({"account": "A"})
    assert run.stop_reason == "step_failed"
    assert "no call of verify with the same account ('A') has succeeded before" in run.stop_message
