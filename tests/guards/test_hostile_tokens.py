"""Texts that anybody may write: what looks like a token of a vault, and what unpacks to far more than it is."""

import base64
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentfsm import Agent, State
from agentfsm.guards import DataKind, Vault, exit_filter
from agentfsm.testing import ScriptedModel

VAULT = Vault(Vault.create_key())
AGENT = Agent(ScriptedModel("ok"))
RUN, OTHER = AGENT.start("go"), AGENT.start("go")
TOKEN = VAULT.tokenise(DataKind.EMAIL, "ann@example.org", RUN.header)

words = st.text("ABab09_-", min_size=20, max_size=40)


@given(words, st.sampled_from([*DataKind, "NO_SUCH_KIND"]))
@pytest.mark.parametrize("around", ["{}", "x {} y", "{0}{0}", "[{}]"])
def test_what_only_looks_like_a_token_stays(around, word, kind):
    """Whatever its length: a model or a stranger may have written it, and the rest of the text is still read."""
    text = around.format(f"[{kind.upper()}:{word}]")
    assert VAULT.restore(text, RUN) == text
    assert VAULT.restore(f"{text} {TOKEN}", RUN) == f"{text} ann@example.org"


@given(st.text(), st.sampled_from(DataKind))
def test_a_token_is_turned_back_in_its_run_only(data, kind):
    """With its key and its kind; changed in any place it stays a token."""
    token = VAULT.tokenise(kind, data, RUN.header)
    assert VAULT.restore(token, RUN) == data
    other_kind = token.replace(kind.upper(), "EMAIL" if kind != "email" else "PHONE")
    for text, vault, run in (
        (token, VAULT, OTHER),
        (token, Vault(Vault.create_key()), RUN),
        (other_kind, VAULT, RUN),
        (token[:-2] + ("A" if token[-2] != "A" else "Q") + "]", VAULT, RUN),
    ):
        assert vault.restore(text, run) == text


def packed(text):
    """Return a text compressed, in base64: a few characters that stand for many."""
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


PHRASE = "sesame-open-4711-abcdef"
FILLER = "ab " * 30_000


@pytest.mark.parametrize(
    ("answer", "passes"),
    [
        (f"The key: {packed('nothing of interest')}", True),
        (packed(FILLER), True),
        (packed(f"The key is {PHRASE}"), False),
        (packed(f"{FILLER}{PHRASE}"), False),
        (packed(f"{FILLER * 2}{PHRASE}"), False),
        (" ".join(packed(f"{number}{FILLER}") for number in range(3)), False),
        (packed(" ".join(packed(f"{number}{FILLER}") for number in range(3))), False),
    ],
)
async def test_a_secret_cannot_hide_behind_more_than_is_read(answer, passes):
    """A text with more compressed characters than are looked through is withheld, and takes no time."""
    agent = Agent(ScriptedModel(answer), guards=[exit_filter(secrets=[PHRASE], canary=False, kinds=())])
    run = await agent.run("go")
    assert (run.state is State.DONE) is passes
    assert passes or "an encoded secret, all withheld" in run.stop_message
