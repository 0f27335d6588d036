"""Whatever the model writes, and whenever the worker dies: no call starts against a rule, or without its decision."""

from __future__ import annotations

import contextlib

import attrs
from hypothesis import given
from hypothesis import strategies as st

from agentfsm import Agent, Label, PendingKind, RunContext, Settings, tool
from agentfsm.core import events as e
from agentfsm.core.labels import EFFECT_LABELS
from agentfsm.core.run import begin_run
from agentfsm.guards import Guard, LabelRule, QuotaRule, max_calls, no, two_of
from agentfsm.testing import ScriptedModel, call, say
from tests.support.checks import sound, virtually
from tests.support.failing_stores import CrashingStore, WorkerKilled

NAMES = ("a", "b", "c", "d")
# Each tool has one of these labels, so that they come together often, and some others.
OWN = (Label.UNTRUSTED, Label.PRIVATE, Label.SENDS_OUT, Label.IRREVERSIBLE)
LABELS = st.frozensets(st.sampled_from(OWN), max_size=2)
# The other labels of each tool, and whether it only reads.
TOOLS = st.lists(st.tuples(LABELS, st.booleans()), min_size=len(NAMES), max_size=len(NAMES))
VERDICTS = st.sampled_from(("ask", "refuse"))
RULES = st.lists(
    st.builds(no, st.just("untrusted"), st.sampled_from(("irreversible", "sends_out")), verdict=VERDICTS)
    | st.builds(two_of, st.just("untrusted"), st.just("private"), st.just("sends_out"), verdict=VERDICTS)
    | st.builds(no, st.just("untrusted"), st.just("private"), verdict=VERDICTS)
    | st.builds(max_calls, st.just("*"), st.integers(0, 3), verdict=VERDICTS),
    min_size=1,
    max_size=3,
)
REPLIES = st.lists(st.lists(st.sampled_from(NAMES), min_size=1, max_size=3), min_size=3, max_size=5)
# The append at which the worker dies, and whether it was written; it lives if the run has fewer.
CRASHES = st.tuples(st.integers(1, 16), st.booleans())


@attrs.define
class World:
    """The starts of tools: the tool, the call, and the events that the journal had then."""

    inner: object
    starts: list[tuple[str, str, tuple[e.Event, ...]]] = attrs.field(factory=list)

    def make_tool(self, name, labels, is_reading):
        """Return a tool that records its start; one that can be repeated, so that only guards ask."""

        async def act(ctx: RunContext[None]) -> str:
            self.starts.append((name, ctx.call_id, (await self.inner.read(ctx.run_id)).events))
            return "done"

        read_only = is_reading and Label.IRREVERSIBLE not in labels
        flags = {
            "reads_untrusted": Label.UNTRUSTED in labels,
            "reads_private": Label.PRIVATE in labels,
            "sends_out": Label.SENDS_OUT in labels,
            "irreversible": Label.IRREVERSIBLE in labels,
        }
        return tool(name=name, read_only=read_only, idempotent=not read_only, **flags)(act)


def breaks(rule, labels, before, counted):
    """Return whether a call breaks a rule, from the labels of its tool, those read before, and the calls so far."""
    if isinstance(rule, QuotaRule):
        return counted >= rule.limit
    assert isinstance(rule, LabelRule)
    effects = EFFECT_LABELS.intersection(rule.labels)
    own = labels & (EFFECT_LABELS if effects else frozenset(Label))
    return bool(own.intersection(rule.labels)) and (own | before).issuperset(rule.labels)


def check_start(called, call_id, journal, header, rules):
    """Fail unless the journal, as it was when a call started, permits the start."""
    run, before, is_early = begin_run(header), frozenset(), True
    for event in journal:
        if isinstance(event, e.ToolsChosen) and any(each.id == call_id for each in event.message.calls):
            before, is_early = frozenset(run.labels), False
        run = run.apply(event)
    if is_early:
        assert not any(rule.concerns(called.traits) for rule in rules), f"{call_id} started before it was decided on"
        return
    decisions = [each for each in journal if isinstance(each, e.Guarded) and each.call_id == call_id]
    earlier = journal[: journal.index(decisions[0])] if decisions else ()
    counted = sum(begin_run(header).fold(earlier).counted.values())
    for rule in rules:
        if breaks(rule, frozenset(called.labels), before, counted):
            assert len(decisions) == 1, f"{call_id} started against {rule} without a decision, or with several"
            assert decisions[0].verdict != "allow"
            assert rule.verdict == "ask", f"{call_id} started although {rule} refuses it"
    if decisions and decisions[0].verdict == "ask":
        assert any(isinstance(each, e.ApprovalGiven) and each.call_id == call_id for each in journal)
    assert not decisions or decisions[0].verdict != "refuse"


async def finish(agent, run_id, answers):
    """Resume until the run is over; a person approves or rejects what is asked, in turn."""
    while not (run := await agent.resume(run_id)).is_over:
        for item in run.pending:
            assert item.kind is PendingKind.APPROVAL
            assert item.reason
            decide = agent.approve if next(answers) else agent.reject
            await decide(run_id, item.call_id)
    return run


@given(TOOLS, RULES, REPLIES, CRASHES, st.lists(st.booleans(), min_size=20, max_size=20))
def test_no_call_starts_against_a_rule(traits, rules, replies, crash, answers):
    """The rules are evaluated a second time here, from the journal as it was when each tool began."""

    async def play(store, clock):
        world = World(store)
        given_traits = zip(NAMES, OWN, traits, strict=True)
        tools = {name: world.make_tool(name, {own, *others}, reads) for name, own, (others, reads) in given_traits}
        lines = [say("", *map(call, names)) for names in replies]

        def build_agent(on, skipped=0):
            model = ScriptedModel(*lines[skipped:], "done")
            settings = Settings(stream=answers[0])
            return Agent(model, tools=tools.values(), store=on, clock=clock, guards=[Guard(*rules)], settings=settings)

        mortal = CrashingStore(store, crash[0], written=crash[1])
        with contextlib.suppress(WorkerKilled):
            first = build_agent(mortal)
            await first.run("go", id="r")
        stored = (await store.read("r")).events
        agent = build_agent(store, sum(isinstance(event, e.ToolsChosen) for event in stored))
        run = await finish(agent, "r", iter(answers * 3))
        for name, call_id, journal in world.starts:
            check_start(tools[name], call_id, journal, run.header, rules)
        await sound(agent, run)

    virtually(play)
