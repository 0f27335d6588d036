"""Notes at the end of a request that stay before the reply which is bound to them, and keys that agentfsm derives."""

from agentfsm import AssistantMessage, SystemMessage, TextPart
from agentfsm.core.events import AnswerGiven, Observed, Reminded
from agentfsm.core.inbox import Input
from agentfsm.core.messages import NativeReply
from agentfsm.core.run import begin_run
from agentfsm.core.run_ids import build_said_key, is_reserved_key
from tests.support.sample_runs import header


def test_a_reply_that_is_bound_to_a_note_keeps_it():
    """The next request shows the note at the place where the reply has read it; other replies keep none."""
    asked = begin_run(header()).fold(
        [Observed(inputs=(Input(parts=(TextPart(text="go"),)),)), Reminded(text="Be brief.")]
    )
    bound = NativeReply(provider="anthropic", content="[]", prefix="0a1b")
    for native, shown in ((bound, [SystemMessage]), (None, [])):
        run = asked.apply(AnswerGiven(message=AssistantMessage(text="Done.", native=native)))
        assert [type(each) for each in run.shown if isinstance(each, SystemMessage)] == shown
        assert [each for each in run.shown if not isinstance(each, SystemMessage)] == [*run.messages]


def test_a_derived_key_is_reserved_for_agentfsm():
    """A text from outside with its form is refused; the derived one is not."""
    assert not is_reserved_key(build_said_key("0.x"))
    assert is_reserved_key(str(build_said_key("0.x")) + "")
