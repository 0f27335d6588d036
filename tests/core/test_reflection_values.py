"""What the core says of runs that wait for a word, and of histories that no model would accept."""

import pytest

from agentfsm import AssistantMessage, MisuseError, RunError, TextPart, ToolCall, UserMessage
from agentfsm.core import events as e
from agentfsm.core.header import Header
from agentfsm.core.messages import check_history
from agentfsm.core.run import begin_run


def test_a_run_that_waits_for_a_word_says_so():
    """Who asks for its output is told what it waits for."""
    run = begin_run(Header(id="r1", prompt=(TextPart(text="go"),), created_at=1.0)).apply(e.Observed())
    run = run.apply(e.AnswerDrafted(message=AssistantMessage(text="so"))).apply(e.Continued(asks="Which year?"))
    with pytest.raises(RunError, match="an answer to: Which year"):
        _ = run.output


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("text", "not str"),
        (UserMessage(parts=()), "an empty"),
        (AssistantMessage(calls=(ToolCall(id="t1.0", name="a b", arguments="{}"),)), "calls 'a b'"),
        (AssistantMessage(calls=(ToolCall(id="t 1", name="a", arguments="{}"),)), "has a call 't 1'"),
        (AssistantMessage(calls=(ToolCall(id="t1.0", name="a", arguments='{"a": NaN}'),)), "are not a JSON object"),
    ],
)
def test_a_history_that_no_model_accepts_is_refused(message, words):
    """Each flaw is named."""
    with pytest.raises(MisuseError, match=words):
        check_history([message])
