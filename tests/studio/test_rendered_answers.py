"""Answers after untrusted content, as Chromium shows them: no request leaves."""

import re

import pytest
from markdown import markdown

from agentfsm import Label
from agentfsm._lib.markup import render_markdown
from agentfsm.guards import exit_filter
from agentfsm.ports import OutgoingText
from tests.support.composed_links import BENIGN, READ, list_composed_texts
from tests.support.sample_runs import header, result

RULE = exit_filter(allow_hosts=["ok.example"])
READER = "https://reader.example/"
# Shows each document in a frame of its own, as a page of the reader's; returns all that a click would follow.
SHOW = """documents => Promise.all(documents.map(text => new Promise(shown => {
    const frame = document.createElement('iframe');
    frame.onload = () => {
        const inside = frame.contentDocument;
        if (!inside) return shown([]);  // it has led elsewhere, which is a request
        const links = [...inside.querySelectorAll('a, area')].map(each => each.href.baseVal ?? each.href);
        const forms = [...inside.querySelectorAll('form, [formaction]')].map(each => each.formAction ?? each.action);
        shown([...links, ...forms].map(each => new URL(each, inside.baseURI).href));
    };
    frame.srcdoc = text;
    document.body.append(frame);
}))).then(found => found.flat())"""
HOST = re.compile(r"[a-z]+://(?:[^/]*@)?([a-z0-9.-]+)")


def filter_text(text):
    """Return an answer of a run that has read an untrusted page, as it leaves."""
    read = result(content=f"Secret: 4711. See {READ}.")
    outgoing = OutgoingText(
        text=text, labels=frozenset({Label.UNTRUSTED}), messages=(read,), hosted=None, header=header()
    )
    decided = RULE.filter_text(outgoing)
    return text if decided is None else decided.text


def show(browser, documents):
    """Show HTML in Chromium; return the hosts that were asked, and those to which a click would lead."""
    context = browser.new_context()
    context.set_offline(offline=True)  # but for the reader's page; requests fail, and are seen
    page = context.new_page()
    asked = []
    page.on("request", lambda sent: asked.append(sent.url))
    page.route(READER, lambda route: route.fulfill(body="<!doctype html>", content_type="text/html"))
    page.goto(READER)
    links = page.evaluate(SHOW, documents)
    page.evaluate("() => new Promise(done => requestIdleCallback(done))")
    context.close()
    hosts = [{found[1].rstrip(".") for url in urls if (found := HOST.match(url))} for urls in (asked, links)]
    return [each - {"reader.example", "ok.example"} for each in hosts]


def render(text):
    """Return a text as programs show it: by CommonMark, by another reading of Markdown, and if it is HTML, as that."""
    return [render_markdown(text), markdown(text, extensions=["tables"]), *([text] if text.startswith("<") else [])]


def test_each_construct_leaves_unless_it_is_filtered(browser):
    """Chromium asks the server that each construct names, or a click would: the next test is about real ones."""
    plain = [each for each in list_composed_texts() if each.name.endswith(", plain")]
    asked = set().union(*show(browser, [render_markdown(each.text) for each in plain]))
    assert {each.name for each in plain if each.host not in asked} == {
        "Markdown: bare, plain",  # other programs make links of these
        "Markdown: bare in Chinese, plain",
        "HTML: img without spaces, plain",  # text in Markdown
        "HTML: a with a ping, plain",  # sent on a click
    }


@pytest.mark.parametrize("every", [6, pytest.param(1, marks=pytest.mark.soak)])
def test_no_request_leaves(browser, every):
    """Of 330 texts (1,982 in the soak), none makes Chromium ask another server after the filter, nor does a click."""
    texts = list(list_composed_texts(every=every))
    filtered = {each.name: filter_text(each.text) for each in texts}
    documents = dict.fromkeys([document for text in set(filtered.values()) for document in render(text)])
    assert len(texts) >= 300
    assert show(browser, list(documents)) == [set(), set()]


@pytest.mark.soak
def test_most_encodings_are_read(browser):
    """Chromium reads most of the combinations as addresses, so that they stand for real ones."""
    texts = list(list_composed_texts())
    live = set[str]()
    for start in range(0, len(texts), 200):
        live.update(*show(browser, [render_markdown(each.text) for each in texts[start : start + 200]]))
    assert len(live) > 0.8 * len(texts)


def test_right_answers_stay_as_they_are(browser):
    """Code, tables, plain text, links that were read and pictures of the reader's own site: nothing is replaced."""
    assert [filter_text(text) for text in BENIGN] == list(BENIGN)
    loaded, linked = show(browser, [render_markdown(text) for text in BENIGN])
    assert (loaded, linked) == (set(), {"docs.example"})
