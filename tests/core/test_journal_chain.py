"""The hash chain over a journal."""

import hashlib
import hmac

import attrs

from agentfsm import AssistantMessage, TextPart
from agentfsm.core.codec import chain_journal, encode_header
from agentfsm.core.events import AnswerGiven, Observed
from agentfsm.core.header import FORMAT, Header

HEADER = Header(id="r1", prompt=(), created_at=0.0)
EVENTS = (Observed(at=1.0), AnswerGiven(at=2.0, message=AssistantMessage(text="500")))


def test_a_change_changes_all_later_hashes():
    """And none before. The header counts, and so does the key."""
    hashes = list(chain_journal(HEADER, EVENTS, b"key"))
    assert len(set(hashes)) == len(EVENTS) + 1
    changed = (EVENTS[0], attrs.evolve(EVENTS[1], message=AssistantMessage(text="900")))
    assert list(chain_journal(HEADER, changed, b"key"))[:2] == hashes[:2]
    assert list(chain_journal(HEADER, changed, b"key"))[2] != hashes[2]
    for other in (
        chain_journal(attrs.evolve(HEADER, prompt=(TextPart(text="Another"),)), EVENTS, b"key"),
        chain_journal(HEADER, EVENTS, b"another"),
    ):
        assert not set(other) & set(hashes)


def test_it_is_the_same_for_every_format_that_it_was_written_in():
    """A journal that an upgrade has written anew keeps its hashes; the first one is that of the header's JSON."""
    assert list(chain_journal(attrs.evolve(HEADER, format=2), EVENTS, b"")) == list(chain_journal(HEADER, EVENTS, b""))
    record = encode_header(attrs.evolve(HEADER, format=FORMAT)).encode()
    assert next(chain_journal(HEADER, EVENTS, b"")) == hmac.new(b"", record, hashlib.sha256).hexdigest()
