"""Who and what a run belongs to: the fields of its header, in its sub-agents and forks, and in what shows them."""

from __future__ import annotations

import pytest

from agentfsm import Agent, Limits, MisuseError, difference
from agentfsm.cli.render.text import format_run
from agentfsm.core.header import INHERITED_FIELDS, short_hash
from agentfsm.core.trace_context import child_traceparent
from agentfsm.testing import ScriptedModel, call, say

IDENTITY = {
    "tenant": "acme",
    "clearance": "internal",
    "release": "2026-11",
    "arms": {"tone": "warm"},
    "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    "purpose": "eval",
}


def agent_of(store, *replies, **fields):
    return Agent(ScriptedModel(*replies), store=store, **fields)


async def test_a_sub_agent_and_a_fork_have_the_identity_of_the_run(store):
    """All of it; the trace of a sub-agent's run names the call.

    Each run has a nonce of its own; that of a sub-agent's run is derived from the call's key.
    """
    clerk = Agent(ScriptedModel("Ann"), name="clerk").as_tool()
    agent = agent_of(store, say("", call("clerk", query="who?")), "done", tools=[clerk])
    run = await agent.run("go", user="ann", roles=["lead"], **IDENTITY)
    child = await agent.load(f"{run.id}.t1.0")
    fork = await agent.fork(run.id, at=1)
    assert set(INHERITED_FIELDS) == {*IDENTITY, "withhold"}
    below = {**IDENTITY, "traceparent": child_traceparent(run.header, "t1.0")}
    for each, identity in ((run, IDENTITY), (child, below), (fork, IDENTITY)):
        assert {name: getattr(each.header, name) for name in IDENTITY} == identity
        assert (each.header.user, each.header.roles) == ("ann", ("lead",))
    assert len({run.header.nonce, child.header.nonce, fork.header.nonce}) == 3
    key = next(entry.key for entry in run.messages[1].calls)
    assert child.header.nonce == short_hash(key, 16)
    assert (await agent.load(run.id)).header == run.header


async def test_show_lists_the_identity(store):
    """A line for each field that is given, and none for the others."""
    agent = agent_of(store, "done", "done")
    shown = format_run(await agent.run("go", user="ann", **IDENTITY)).splitlines()
    for line in (
        "user     ann",
        "tenant   acme",
        "cleared  internal",
        "release  2026-11",
        "arms     tone=warm",
        "purpose  eval",
    ):
        assert line in shown
    assert f"trace    {IDENTITY['traceparent']}" in shown
    plain = format_run(await agent.run("go"))
    assert not [
        word for word in ("tenant", "cleared", "release", "arms", "trace", "user", "purpose") if f"\n{word} " in plain
    ]


@pytest.mark.parametrize(
    ("field", "value", "wanted"),
    [
        ("tenant", 5, "a string that is not empty"),
        ("clearance", "secret", "one of public, internal, confidential, restricted"),
        ("arms", {"tone": 1}, "a dict of names of experiments and arms"),
        ("traceparent", "00-0-0-0", "the value of the W3C header"),
        ("purpose", "What if", "a word in small letters"),
    ],
)
def test_a_wrong_field_is_refused(field, value, wanted):
    """Before anything is stored; the message says what is wanted."""
    with pytest.raises(MisuseError, match=wanted):
        Agent(ScriptedModel("done")).start("go", **{field: value})


async def test_a_difference_names_the_parts_of_the_release(store):
    """Other limits are another configuration; the release and the arms stand beside it."""
    agent = agent_of(store, "done", "done")
    first = await agent.run("go", release="1", arms={"tone": "warm"})
    second = await agent.with_(limits=Limits(turns=3)).run("go", release="2", arms={"tone": "cold"})
    told = difference(first, second)
    assert told.agent == ("other limits, settings or policies",)
    assert told.changed["release"] == ("1", "2")
    assert told.changed["arms"] == ({"tone": "warm"}, {"tone": "cold"})
    assert first.header.fingerprint.config != second.header.fingerprint.config
