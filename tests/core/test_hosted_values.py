"""Tools that a provider executes, as values: how they are named, described and checked, and how their outcomes join."""

from __future__ import annotations

import pytest

from agentfsm import AssistantMessage, MisuseError, Usage
from agentfsm.core import events as e
from agentfsm.core.messages import join_hosted
from agentfsm.models import Citation, CodeExecution, FileSearch, HostedContent, HostedFile, HostedMCP, WebSearch
from tests.support.sample_runs import observing

HIDDEN = "sk-1"
CRM = HostedMCP(server="crm", url="https://crm.example/mcp?key=sk-1", authorization=HIDDEN, allowed_tools=["find"])
CITED = HostedContent(citations=(Citation(url="https://python.org"),), container="c1")
WRITTEN = HostedContent(files=(HostedFile(id="f1"),), container="c2")


def test_a_tool_is_named_by_its_kind_and_a_server_by_its_name():
    """Two servers can be listed together, two searches cannot."""
    assert [CodeExecution().name, WebSearch().name, CRM.name] == ["code_execution", "web_search", "crm"]


def test_a_description_has_the_options_and_no_secret():
    """It is hashed into the run's fingerprint, and shown by `diff`."""
    assert CRM.describe() == {"hosted": "mcp", "server": "crm", "allowed_tools": ("find",)}
    assert WebSearch(country="FR").describe()["country"] == "FR"
    assert HIDDEN not in repr(CRM)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: WebSearch(allowed_domains="python.org"), "a list of strings, also for a single one"),
        (lambda: WebSearch(blocked_domains=["a.com", ""]), "not a list of names"),
        (lambda: WebSearch(max_uses=0), r"^WebSearch\(max_uses=0\): give a whole number, 1 or more, or None$"),
        (lambda: FileSearch(vector_store_ids=[]), r"give the id of a store, as \['vs_\.\.\.'\]"),
        (lambda: HostedMCP(server="crm", url="http://crm.example"), "has to be an https:// address"),
        (lambda: HostedMCP(server="crm", url="https://"), "has to be an https:// address"),
        (lambda: HostedMCP(server="crm", url=5), "has to be an https:// address"),
        (lambda: HostedMCP(server=" ", url="https://crm.example"), r"^HostedMCP\(server=' '\): give a string"),
    ],
)
def test_a_wrong_option_is_refused(make, message):
    """The error says which option it is and what to give."""
    with pytest.raises(MisuseError, match=message):
        make()


def test_valid_options_are_kept():
    """Lists become tuples."""
    assert FileSearch(vector_store_ids=["vs_1"]).vector_store_ids == ("vs_1",)
    assert WebSearch(allowed_domains=["python.org"], max_uses=3).allowed_domains == ("python.org",)


def test_outcomes_join_in_order_with_the_newest_container():
    """A container alone is no outcome."""
    joined = join_hosted([CITED, WRITTEN, HostedContent()])
    assert joined == HostedContent(citations=CITED.citations, files=WRITTEN.files, container="c2")
    assert joined
    assert not HostedContent(container="c1")


def test_a_run_joins_the_outcomes_of_its_replies():
    """Earlier conversations do not count, and neither do the person's messages."""
    reply = AssistantMessage(text="See python.org.", hosted=CITED)
    run = observing().fold([e.Observed(), e.AnswerGiven(message=reply, usage=Usage())])
    assert run.hosted == CITED
    assert observing().hosted == HostedContent()
