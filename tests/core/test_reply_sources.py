"""The source of a reply in the journal, and the fields that a run derives from it."""

from agentfsm import AssistantMessage, Label, Purpose, TextPart, ToolCall, Usage, usage_by_purpose
from agentfsm.core import events as e
from agentfsm.core.events import AnswerSource
from agentfsm.core.header import Header
from agentfsm.core.run import begin_run
from agentfsm.core.run_facts import list_spending
from agentfsm.core.usage import Spending, TierChoice

ASKED = begin_run(Header(id="r1", prompt=(TextPart(text="Hello"),), created_at=1.0)).apply(e.Observed())
SMALL = Usage(input_tokens=10, output_tokens=2, cost_usd=0.5)
LARGE = Usage(input_tokens=12, output_tokens=3, cost_usd=2.0, reasoning_tokens=1, cached_tokens=4, cache_write_tokens=5)


def spent(usage, model="small", purpose=Purpose.TURN):
    return Spending(purpose=purpose, usage=usage, model=model)


def answer(**more):
    return e.AnswerGiven(message=AssistantMessage(text="Hi"), **more)


def test_a_run_keeps_the_tier_of_its_newest_reply():
    """The next turn keeps to it; a reply of another model leaves it as it is."""
    message = AssistantMessage(calls=(ToolCall(id="t1.0", name="look", arguments="{}", key="k"),))
    run = ASKED.apply(e.ToolsChosen(message=message, tier=TierChoice(name="small", reason="rule")))
    assert (ASKED.tier, run.tier) == ("", "small")
    assert ASKED.apply(answer()).tier == ""


def test_the_parts_of_an_escalated_reply_add_up():
    """The usage of the event is that of all models; each part has its model and its purpose."""
    routing = spent(Usage(input_tokens=6, cost_usd=0.25), "tiny", Purpose.ROUTING)
    tier = TierChoice(name="large", reason="escalated from small: refusal", spent=(routing, spent(SMALL)))
    event = answer(usage=routing.usage + SMALL + LARGE, model="large", tier=tier)
    assert list_spending(event) == (routing, spent(SMALL), spent(LARGE, "large"))
    assert usage_by_purpose([event]) == {Purpose.TURN: SMALL + LARGE, Purpose.ROUTING: routing.usage}
    assert ASKED.apply(event).usage == event.usage


def test_a_model_without_a_price_is_named_whichever_tier_it_is():
    """The small tier's unknown price is not the large one's."""
    unknown = unpriced(SMALL)
    tier = TierChoice(name="large", reason="escalated from small: refusal", spent=(spent(unknown),))
    run = ASKED.apply(answer(usage=unknown + LARGE, model="large", tier=tier))
    assert run.unpriced == ("small",)
    known = TierChoice(name="large", reason="escalated from small: refusal", spent=(spent(SMALL),))
    run = ASKED.apply(answer(usage=SMALL + unpriced(LARGE), model="large", tier=known))
    assert run.unpriced == ("large",)


def unpriced(usage):
    """Return the usage without its price."""
    return Usage(input_tokens=usage.input_tokens, output_tokens=usage.output_tokens, unpriced=True)


def test_a_repeated_answer_brings_the_labels_of_its_run():
    """A repeated answer has the labels of its source run; a new request to the model ends the reference to it."""
    source = AnswerSource(run_id="r0", at=5.0, labels=(Label.UNTRUSTED,))
    run = ASKED.apply(answer(answered_from=source))
    assert run.answered_from == source
    assert run.labels[Label.UNTRUSTED].describe() == "the answer of run r0"
    assert ASKED.apply(answer(answered_from=AnswerSource(run_id="r0", at=5.0))).labels == {}
    drafted = ASKED.apply(e.AnswerDrafted(message=AssistantMessage(text="Hi"), answered_from=source))
    again = drafted.apply(e.Continued()).apply(e.Observed()).apply(answer())
    assert (drafted.answered_from, again.answered_from) == (source, None)


def test_cached_replies_are_counted_and_cost_nothing():
    """They add up like tokens, and no price is asked for them."""
    hit = Usage(cached_replies=1)
    assert (hit + hit + SMALL).cached_replies == 2
    assert hit.with_price(lambda _: 1.0) == hit
    assert (hit + SMALL).without(SMALL) == Usage(cached_replies=1, cost_usd=0.0)
