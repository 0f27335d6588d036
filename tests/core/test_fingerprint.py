"""What an agent was when a run was begun, and what has changed since."""

import attrs
import pytest

from agentfsm.core.header import Fingerprint

BEFORE = Fingerprint(instructions="aaaa", model="gpt-4o", tools={"pay": "1111", "ask": "2222"})


def test_the_same_agent_has_not_changed():
    """An agent that is as it was has no changes, in whatever order its tools stand."""
    again = Fingerprint(instructions="aaaa", model="gpt-4o", tools={"ask": "2222", "pay": "1111"})
    assert again.changes_since(BEFORE) == ()


@pytest.mark.parametrize(
    ("now", "words"),
    [
        ({"instructions": "bbbb"}, ("other instructions",)),
        ({"instructions": ""}, ("other instructions",)),
        ({"model": "o3"}, ("model gpt-4o -> o3",)),
        ({"tools": {"pay": "1111"}}, ("tool ask is gone",)),
        ({"tools": {**BEFORE.tools, "look": "3333"}}, ("tool look is new",)),
        ({"tools": {"pay": "9999", "ask": "2222"}}, ("tool pay has changed",)),
        ({"tools": {}}, ("tool pay is gone", "tool ask is gone")),
    ],
    ids=str,
)
def test_each_change_is_named(now, words):
    """Instructions, model and tools are told apart, and each tool is named."""
    assert attrs.evolve(BEFORE, **now).changes_since(BEFORE) == words


def test_all_changes_are_named_at_once():
    """Whoever reads them sees the whole: what is other, what is gone, what is new, what has changed."""
    now = Fingerprint(instructions="bbbb", model="o3", tools={"look": "3333", "pay": "9999"})
    assert now.changes_since(BEFORE) == (
        "other instructions",
        "model gpt-4o -> o3",
        "tool ask is gone",
        "tool look is new",
        "tool pay has changed",
    )


def test_of_an_unknown_agent_nothing_is_said():
    """Runs that kept no fingerprint, or one that says nothing apart, are gone on with in silence."""
    assert BEFORE.changes_since(Fingerprint()) == ()


def test_the_digest_covers_all_parts():
    """It is the same for the same parts in any order, and another one after a change of any of them."""
    again = attrs.evolve(BEFORE, tools={"ask": "2222", "pay": "1111"})
    assert BEFORE.digest == again.digest
    changes = ({"instructions": "b"}, {"model": "o3"}, {"tools": {}}, {"config": "c"}, {"prompts": {"p": "1#2"}})
    digests = {attrs.evolve(BEFORE, **change).digest for change in changes}
    assert len(digests | {BEFORE.digest}) == 6
    assert all(len(each) == 12 for each in digests)


def test_skills_are_a_part_of_the_fingerprint():
    """A fingerprint without any has the digest that it had before there were skills."""
    plain = Fingerprint(model="gpt")
    assert Fingerprint(model="gpt", skills={"pdf": "ab"}).digest != plain.digest == Fingerprint(model="gpt").digest
