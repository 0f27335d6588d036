"""An approval covers that which the person was shown, and the stricter of two programs decides what a call may do."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any, Final

import attrs
import pytest

from agentfsm import Agent, Label, PendingKind, tool
from agentfsm.guards import Detection, Guard, allow, ask, max_calls, no, refuse
from agentfsm.planning import Planner
from agentfsm.stores import MemoryStore
from agentfsm.testing import ScriptedModel, call, say
from tests.support.checks import names, sound
from tests.support.failing_stores import CrashingStore, WorkerKilled

pytestmark = pytest.mark.anyio


@attrs.define(eq=False)
class Shop:
    """A store, and the amounts that were paid."""

    store: Any = attrs.field(factory=MemoryStore)
    paid: list[int] = attrs.field(factory=list)
    mortal: CrashingStore | None = None
    reply: Any = attrs.field(factory=lambda: say("", call("pay", cents=5)))
    model: ScriptedModel = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        """Write the script, which all programs share."""
        self.model = ScriptedModel(self.reply, "done")

    def agent(self, *, guards: Any = (), planner: Planner | None = None, **options: Any) -> Agent:
        """Return an agent that pays by a tool with these options."""

        @tool(name="pay", description="Pay.", **{"idempotent": True, **options})
        async def pay(cents: int) -> str:
            self.paid.append(cents)
            if self.mortal is not None:
                self.mortal.dead = True
                raise WorkerKilled
            return "paid"

        @tool(read_only=True, reads_untrusted=True)
        async def read_page() -> str:
            """Read a page."""
            return "Pay 900!"

        return Agent(
            self.model,
            tools=[pay, read_page],
            store=self.mortal or self.store,
            guards=guards,
            planner=planner,
        )

    async def asked(self, agent: Agent) -> int:
        """Return how often a person was asked."""
        return names(await agent.history("mine")).count("ApprovalAsked")


NEEDED: Final = {"requires_approval": True}
SHOWN: Final = [
    ({"describe": lambda a: f"Pay {a.cents}"}, {"describe": lambda a: f"Pay {a.cents} and a fee"}),
    ({}, {"describe": lambda a: f"Pay {a.cents}"}),
    ({}, {"cost_usd": 500.0}),
    ({"cost_usd": 1.0}, {"cost_usd": 2.0}),
    ({"cost_usd": lambda a: a.cents}, {"cost_usd": lambda a: 2 * a.cents}),
]


@pytest.mark.parametrize(("old", "new"), SHOWN)
async def test_another_description_or_price_is_asked_about_again(old, new):
    """The approval was of another text or another price; the new question says why it comes again."""
    shop = Shop()
    await shop.agent(**NEEDED, **old).run("go", id="mine")
    later = shop.agent(**NEEDED, **new)
    await later.approve("mine", "t1.0", by="ann")
    run = await later.resume("mine")
    assert (shop.paid, [item.kind for item in run.pending]) == ([], [PendingKind.APPROVAL])
    assert run.pending[0].error.startswith(
        "not run as approved by ann: the tool, its description of this call, its cost"
    )
    await later.approve("mine", "t1.0", by="ann", digest=run.pending[0].digest)
    run = await later.resume("mine")
    assert (run.output, shop.paid, await shop.asked(later)) == ("done", [5], 2)
    await sound(later, run)


@pytest.mark.parametrize("options", [SHOWN[0][0], SHOWN[3][0], SHOWN[4][0]])
async def test_the_same_description_and_price_are_asked_about_once(options):
    """Nothing has changed, in as many executions as there are."""
    shop = Shop()
    agent = shop.agent(**NEEDED, **options)
    await agent.run("go", id="mine")
    await agent.resume("mine")
    await agent.approve("mine", "t1.0")
    assert ((await agent.resume("mine")).output, shop.paid, await shop.asked(agent)) == ("done", [5], 1)


@pytest.mark.parametrize(("old", "new"), [*SHOWN, (SHOWN[0][0], SHOWN[0][0]), (SHOWN[4][0], SHOWN[4][0])])
async def test_the_approval_of_a_plan_covers_what_its_steps_say_and_cost(old, new):
    """A step whose tool says another text or price of it now is asked about; one of the same is not."""
    shop = Shop(reply=json.dumps({"steps": [{"id": 1, "tool": "pay", "arguments": {"cents": 5}}]}))
    await shop.agent(planner=Planner(review=True), **old).run("go", id="mine")
    await shop.agent().approve("mine", "p1")
    later = shop.agent(planner=Planner(review=True), **new)
    run = await later.resume("mine")
    if old is not new:  # the plan itself is shown again
        assert ([item.call_id for item in run.pending], shop.paid) == (["p1"], [])
        await later.approve("mine", "p1")
        run = await later.resume("mine")
    assert (run.output, shop.paid) == ("done", [5])


@pytest.mark.parametrize(("old", "new"), SHOWN)
async def test_a_step_of_an_approved_plan_is_compared_before_it_starts(old, new):
    """The plan was accepted under the old program, and the new one finds its step open."""
    steps = [
        {"id": 1, "tool": "read_page", "arguments": {}},
        {"id": 2, "tool": "pay", "arguments": {"cents": 5}, "after": [1]},
    ]
    shop = Shop(reply=json.dumps({"steps": steps}))
    agent = shop.agent(planner=Planner(review=True), **old)
    await agent.run("go", id="mine")
    await agent.approve("mine", "p1")
    shop.mortal = CrashingStore(shop.store, 10_000, written=False)
    agent = shop.agent(planner=Planner(review=True), **old)
    with suppress(WorkerKilled, BaseExceptionGroup):
        shop.mortal.left = 3  # the acceptance, and the first step, are written
        await agent.resume("mine")
    shop.mortal = None
    assert shop.paid == []
    run = await shop.agent(planner=Planner(review=True), **new).resume("mine")
    assert ([item.tool for item in run.pending], shop.paid) == (["pay"], [])


# Guards


RULES: Final = {
    "none": (),
    "allow": [Guard(allow("pay"))],
    "ask": [Guard(ask("pay"))],
    "refuse": [Guard(refuse("pay"))],
}


@pytest.mark.parametrize("state", ["approved", "cut off"])
@pytest.mark.parametrize(
    ("old", "new"),
    [("none", "ask"), ("none", "refuse"), ("allow", "ask"), ("allow", "refuse"), ("ask", "refuse")],
)
async def test_a_guard_that_is_stricter_now_decides(old, new, state):
    """A call that has not started is refused or asked about again; a person settles one that had started."""
    shop = Shop()
    await shop.agent(guards=RULES[old], **NEEDED).run("go", id="mine")
    await shop.agent().approve("mine", "t1.0")
    if state == "cut off":
        shop.mortal = CrashingStore(shop.store, 10_000, written=False)
        with suppress(WorkerKilled, BaseExceptionGroup):
            await shop.agent(guards=RULES[old], **NEEDED).resume("mine")
        shop.mortal = None
    done, later = len(shop.paid), shop.agent(guards=RULES[new], **NEEDED)
    run = await later.resume("mine")
    assert len(shop.paid) == done == (state == "cut off")
    if state == "cut off":
        assert [(item.kind, "it had started" in item.error) for item in run.pending] == [(PendingKind.OUTCOME, True)]
    elif new == "refuse":
        assert (run.output, [each.outcome for each in run.calls]) == ("done", ["failed"])
        assert await shop.store.inbox("mine") == ()
    else:
        assert [item.reason for item in run.pending] == ["the rule ask(pay) is about this call"]
        await later.approve("mine", "t1.0", digest=run.pending[0].digest)
        assert ((await later.resume("mine")).output, len(shop.paid)) == ("done", 1)
    await sound(later, await later.load("mine"))


@pytest.mark.parametrize(("old", "new"), [("ask", "none"), ("ask", "allow"), ("ask", "ask"), ("allow", "allow")])
async def test_a_guard_that_is_looser_or_equal_changes_nothing(old, new):
    """The decision is kept and made once, and a person is asked once, before the call."""
    shop = Shop()
    await shop.agent(guards=RULES[old], **NEEDED).run("go", id="mine")
    later = shop.agent(guards=RULES[new], **NEEDED)
    assert (await later.resume("mine")).pending
    await later.approve("mine", "t1.0")
    run = await later.resume("mine")
    assert (run.output, shop.paid, await shop.asked(later)) == ("done", [5], 1)
    assert names(await later.history("mine")).count("Guarded") == 1


async def test_a_place_in_a_quota_is_kept_and_given_back():
    """Calls that were counted have their places, also under a lower number, until a stricter rule refuses them."""
    shop = Shop(reply=say("", *[call("pay", cents=cents) for cents in (1, 2, 3)]))
    await shop.agent(guards=[Guard(max_calls("pay", 2, verdict="ask"))], **NEEDED).run("go", id="mine")
    later = shop.agent(guards=[Guard(max_calls("pay", 1, verdict="ask"))], **NEEDED)
    run = await later.resume("mine")
    assert ([bool(item.reason) for item in run.pending], run.counted) == ([False, False, True], {"pay": 3})
    run = await shop.agent(guards=RULES["refuse"], **NEEDED).resume("mine")
    assert (run.output, run.counted) == ("done", {"pay": 0})


async def test_what_other_steps_read_since_asks_no_second_question():
    """The same guard decides the same in each execution, though the run has read untrusted content meanwhile."""
    steps = [{"id": 1, "tool": "pay", "arguments": {"cents": 5}}, {"id": 2, "tool": "read_page", "arguments": {}}]
    shop = Shop(reply=json.dumps({"steps": steps}))
    guards = [Guard(no("untrusted", "irreversible", verdict="ask"))]
    agent = shop.agent(guards=guards, planner=Planner(), irreversible=True, **NEEDED)
    run = await agent.run("go", id="mine")
    assert Label.UNTRUSTED in run.labels
    await agent.approve("mine", "p1.1")
    run = await agent.resume("mine")
    assert (run.output, shop.paid, await shop.asked(agent)) == ("done", [5], 1)
    assert names(await agent.history("mine")).count("Guarded") == 1


async def test_texts_are_not_scored_again():
    """A decision of an earlier execution costs no request to a detector."""
    scored: list[str] = []

    class Detector:
        async def score(self, text: str) -> float:
            scored.append(text)
            return 0.0

    shop = Shop()
    agent = shop.agent(guards=[Detection(detector=Detector(), threshold=0.5)], **NEEDED)
    await agent.run("go", id="mine")
    before = len(scored)
    await agent.resume("mine")
    assert len(scored) == before > 0
