"""`Tiered`: which tier answers and why, what the journal says of it, and what each model is paid."""

import pytest

from agentfsm import (
    Agent,
    Limits,
    MisuseError,
    ModelReplyError,
    ModelUnavailableError,
    Purpose,
    Settings,
    Spend,
    TextDelta,
    TextPart,
    Usage,
    UserMessage,
    tool,
    usage_by_purpose,
)
from agentfsm.core.events import AnswerGiven, AttemptFailed
from agentfsm.core.run_facts import list_spending
from agentfsm.engine.execution.cost import calculate_run_cost
from agentfsm.models import HostedCall, HostedContent, TierClassifier, Tiered
from agentfsm.ports import FinishReason, Reply, Request
from agentfsm.reflection import Reflector
from agentfsm.stores import MemoryStore
from agentfsm.testing import FunctionModel, ScriptedModel, call, fail, say

REQUEST = Request(instructions="", messages=(UserMessage(parts=(TextPart(text="Hello"),)),))


class Priced(ScriptedModel):
    """A scripted model with a name and a price per token."""

    def __init__(self, name, *script, usd=1.0):
        super().__init__(*script)
        self.name, self.usd = name, usd

    def cost_usd(self, usage):
        return None if self.usd is None else usage.tokens * self.usd


@tool(read_only=True)
async def look() -> str:
    """Look."""
    return "nothing"


def tiers(small=(), large=(), **more):
    return Tiered({"small": Priced("mini", *small), "large": Priced("max", *large, usd=10.0)}, **more)


async def tiers_of(agent, run):
    """Return the tier, the reason and the model of each reply."""
    events = [each for each in await agent.history(run.id) if getattr(each, "tier", None) is not None]
    return [(each.tier.name, each.tier.reason, getattr(each, "model", "failed")) for each in events]


async def test_without_a_rule_the_last_tier_answers_turns_and_the_first_one_the_rest():
    """A judge without a model of its own asks the agent's: that is a short task, and goes to the small tier."""
    model = tiers(small=['{"evaluation": {"right": {"score": 5}}, "action": "accept"}'], large=["Rome."])
    agent = Agent(model, reflector=Reflector(rubric={"right": "Is it right?"}))
    run = await agent.run("The capital of Italy?")
    assert run.output == "Rome."
    assert await tiers_of(agent, run) == [("large", "default", "max")]
    judged = next(each for each in await agent.history(run.id) if type(each).__name__ == "Judged")
    assert (judged.model, judged.purpose) == ("mini", Purpose.JUDGE)
    assert run.usage.cost_usd == 15 * 10.0 + judged.usage.cost_usd


async def test_a_purpose_may_have_another_tier():
    """The map of purposes goes over the defaults, and over the rule."""
    model = tiers(large=["ok"], purposes={Purpose.JUDGE: "large"}, choose=lambda _: "small")
    assert (await model.reply(Request(instructions="", messages=REQUEST.messages, purpose=Purpose.JUDGE))).text == "ok"


async def test_a_run_moves_up_by_the_rule_and_never_down():
    """The rule sees the run; from its third turn on, it wants the large tier, and then the small one again in vain."""
    wanted = {0: "small", 1: None, 2: "large", 3: "small"}
    model = tiers(
        small=[say("", call("look")), say("", call("look"))],
        large=[say("", call("look")), "done"],
        choose=lambda request: wanted[request.run.turn],
    )
    agent = Agent(model, tools=[look])
    run = await agent.run("look around")
    assert [row[:2] for row in await tiers_of(agent, run)] == [
        ("small", "rule"),
        ("small", "kept"),
        ("large", "rule"),
        ("large", "kept"),
    ]
    assert run.output == "done"


async def test_a_resumed_run_keeps_its_tier_from_the_journal():
    """Another process has another `Tiered`, which has seen nothing: what decides is in the journal."""
    store = MemoryStore()
    first = Agent(tiers(small=[say("", call("look"))], choose=lambda _: "small"), tools=[look], store=store)
    run = first.start("look around", id="r1")
    while run.turn < 1:
        run = await first.step(run)
    second = Agent(
        tiers(small=["done"], classifier=TierClassifier(ScriptedModel(), {"small": "all", "large": "none"})),
        tools=[look],
        store=store,
    )
    run = await second.resume("r1")
    assert run.output == "done"
    assert [row[:2] for row in await tiers_of(second, run)] == [("small", "rule"), ("small", "kept")]


@pytest.mark.parametrize(
    ("line", "flaw"),
    [
        (say("I cannot.", finish_reason=FinishReason.REFUSAL), "refusal"),
        (say(""), "bad reply"),
        (fail(ModelReplyError("garbage", Usage(input_tokens=10, output_tokens=5))), "bad reply"),
        (say("meh"), "score 0.10"),
    ],
    ids=["refusal", "empty", "unusable", "score"],
)
async def test_a_reply_that_is_not_good_enough_is_replaced_at_once(line, flaw):
    """The next tier answers in the same attempt. Each model's tokens are counted at its own price, and told apart."""
    model = tiers(
        small=[line],
        large=["Rome."],
        choose=lambda _: "small",
        score=lambda _, reply: 0.1 if reply.text == "meh" else 1,
    )
    agent = Agent(model, limits=Limits(model_retries=0))
    run = await agent.run("The capital of Italy?")
    assert run.output == "Rome."
    assert await tiers_of(agent, run) == [("large", f"escalated from small: {flaw}", "max")]
    events = await agent.history(run.id)
    parts = [part for event in events for part in list_spending(event)]
    assert [(part.model, part.usage.tokens, part.usage.cost_usd) for part in parts] == [
        ("mini", 15, 15.0),
        ("max", 15, 150.0),
    ]
    assert run.usage.cost_usd == 165.0
    assert usage_by_purpose(events) == {Purpose.TURN: run.usage}


async def test_an_outage_does_not_escalate():
    """An overloaded model says nothing about the task: the engine asks the same tier again, as without tiers."""
    model = tiers(small=[fail(ModelUnavailableError("529", retry_after_s=0)), "Rome."], choose=lambda _: "small")
    agent = Agent(model)
    run = await agent.run("The capital of Italy?")
    assert await tiers_of(agent, run) == [("small", "rule", "failed"), ("small", "rule", "mini")]


async def test_a_retry_begins_with_the_tier_that_failed():
    """The refusal below is paid once, counts before the next attempt, and is in the journal; the limit holds."""
    asked = []

    def small(request):
        asked.append(("small", request.settings.max_tokens))
        return say("I cannot.", usage=Usage(output_tokens=32), finish_reason=FinishReason.REFUSAL)

    def large(request):
        asked.append(("large", request.settings.max_tokens))
        if len(asked) < 4:
            raise (ModelUnavailableError("529", retry_after_s=0), OSError("reset"))[len(asked) % 2]
        return say("Rome.", usage=Usage(output_tokens=32))

    class Metered(FunctionModel):
        def cost_usd(self, usage):
            return usage.output_tokens / 64

    model = Tiered({"small": Metered(small), "large": Metered(large)}, choose=lambda _: "small")
    limits = Limits(usd=2, retry_wait_s=0.001)
    agent = Agent(model, limits=limits, settings=Settings(max_tokens=64))
    run = await agent.run("The capital of Italy?")
    # Of 2 US dollars, 0.5 are spent: 48 tokens of both tiers together cost the rest.
    assert asked == [("small", 64), ("large", 64), ("large", 48), ("large", 48)]
    events = [each for each in await agent.history(run.id) if isinstance(each, AttemptFailed | AnswerGiven)]
    assert {(event.tier.name, event.tier.reason) for event in events} == {("large", "escalated from small: refusal")}
    paid = [part for event in events for part in list_spending(event) if part.usage.cost_usd]
    assert [part.usage.cost_usd for part in paid] == [0.5, 0.5]
    assert run.usage.cost_usd == 1.0


async def test_a_mistake_in_a_function_does_not_hide_what_was_paid():
    """The journal and the spending limits have the cost of the reply that `score` could not judge, and no more."""
    broken = [True]

    def score(_, reply):
        if broken:
            broken.pop()
            raise ValueError(reply.text)
        return 1

    store = MemoryStore()
    model = tiers(small=["Rome.", "Rome."], choose=lambda _: "small", score=score)
    agent = Agent(model, store=store, name="teller", spend=[Spend(per="day", usd=1_000_000)])
    with pytest.raises(MisuseError, match="score= of Tiered failed") as caught:
        await agent.run("The capital of Italy?", id="r1")
    assert caught.value.usage.cost_usd == 15.0
    [record] = await store.list_records("spend")
    assert (record.value["spent_usd"], record.value["reserved"]) == (15.0, {})
    assert (await agent.history("r1"))[-1].usage.cost_usd == 15.0
    run = await agent.resume("r1")
    assert (run.output, run.usage.cost_usd) == ("Rome.", 30.0)


async def test_the_last_tier_is_the_end():
    """Its bad reply is the failure of the request, with the usage of all tiers."""
    bad = ModelReplyError("garbage", Usage(input_tokens=1, output_tokens=1))
    model = tiers(
        small=[fail(bad)], large=[fail(ModelReplyError("too", Usage(input_tokens=2)))], choose=lambda _: "small"
    )
    with pytest.raises(ModelReplyError, match="too") as caught:
        await model.reply(REQUEST)
    assert (caught.value.usage.tokens, caught.value.usage.cost_usd) == (4, 22.0)


async def test_a_replaced_reply_is_never_streamed():
    """Readers of the stream see the reply that is used, once, and no attempt more."""
    model = tiers(
        small=[say("I cannot help.", finish_reason=FinishReason.REFUSAL)], large=["Rome."], choose=lambda _: "small"
    )
    async with Agent(model).stream("The capital of Italy?") as stream:
        deltas = [event async for event in stream if isinstance(event, TextDelta)]
    assert "".join(delta.text for delta in deltas) == "Rome."
    kept = tiers(small=["It is Rome ."], choose=lambda _: "small")
    async with Agent(kept).stream("The capital of Italy?") as stream:
        deltas = [event async for event in stream if isinstance(event, TextDelta)]
    assert "".join(delta.text for delta in deltas) == "It is Rome ."
    assert {delta.attempt for delta in deltas} == {1}


async def test_the_classifier_is_asked_once_and_paid_for():
    """It reads the task, not the history of the agent, and its tokens are those of the purpose `routing`."""
    judge = Priced("tiny", say("Small.", expect="look around"), usd=0.5)
    model = tiers(
        small=[say("", call("look")), "done"],
        classifier=TierClassifier(judge, {"small": "Short questions.", "large": "All else."}),
    )
    agent = Agent(model, tools=[look])
    run = await agent.run("look around")
    assert [row[:2] for row in await tiers_of(agent, run)] == [("small", "classifier"), ("small", "kept")]
    spent = usage_by_purpose(await agent.history(run.id))
    assert {purpose: usage.cost_usd for purpose, usage in spent.items()} == {Purpose.TURN: 30.0, Purpose.ROUTING: 7.5}
    judge.assert_done()


@pytest.mark.parametrize("answer", ["I am not sure", fail(ModelUnavailableError("529"))], ids=["other", "failed"])
async def test_a_classifier_without_an_answer_leaves_the_task_to_the_last_tier(answer):
    """Neither its words nor its outage stop the run."""
    classifier = TierClassifier(ScriptedModel(answer), {"small": "Short questions.", "large": "All else."})
    agent = Agent(tiers(large=["Rome."], classifier=classifier))
    run = await agent.run("The capital of Italy?")
    assert [row[:2] for row in await tiers_of(agent, run)] == [("large", "default")]


async def test_the_last_answer_names_its_tier_and_model():
    """It stays in the tier of the run, whatever the rule says by then."""
    model = tiers(small=[say("", call("look")), "So far: nothing."], choose=lambda _: "small")
    agent = Agent(model, tools=[look], last_answer=True, limits=Limits(turns=2))
    run = await agent.run("look around")
    assert run.partial == "So far: nothing."
    assert (await tiers_of(agent, run))[-1] == ("small", "kept", "mini")


async def test_money_is_reserved_for_all_tiers_that_may_answer():
    """A request costs at most the replies of all of them; an unknown price of a used model is named."""
    usage = Usage(input_tokens=1)
    assert tiers().cost_usd(usage) == 11.0
    assert tiers(escalate_on=()).cost_usd(usage) == 10.0
    unknown = Tiered(
        {"small": Priced("mini", say("", finish_reason=FinishReason.REFUSAL), usd=None), "large": Priced("max", "ok")},
        choose=lambda _: "small",
    )
    assert unknown.cost_usd(usage) is None
    run = await Agent(unknown).run("Hello")
    assert calculate_run_cost(run).unpriced == ("mini",)


async def test_tokens_that_a_provider_does_not_report_are_estimated():
    """Those of the reply that was not used as well, and marked so."""
    no = say("I cannot.", usage=None, finish_reason=FinishReason.REFUSAL)
    model = tiers(small=[no], large=[say("Rome.", usage=None)], choose=lambda _: "small")
    agent = Agent(model)
    run = await agent.run("The capital of Italy?")
    [event] = [each for each in await agent.history(run.id) if isinstance(each, AnswerGiven)]
    assert all(part.usage.estimated and part.usage.output_tokens for part in list_spending(event))
    assert run.usage == event.usage


async def test_what_the_provider_has_done_is_not_done_again():
    """A refusal with outcomes of the provider's own tools is used as it is."""
    hosted = HostedContent(calls=(HostedCall(tool="web_search", id="1"),))
    refusal = Reply(text="I cannot.", finish_reason=FinishReason.REFUSAL, hosted=hosted)
    model = Tiered({"small": FunctionModel(lambda _: refusal), "large": ScriptedModel()}, choose=lambda _: "small")
    assert (await model.reply(REQUEST)).text == "I cannot."


async def test_a_rule_that_asks_a_model_may_fail_like_one():
    """Its outage is that of the request, which the engine sends again."""

    def choose(_):
        raise ModelUnavailableError("529")

    with pytest.raises(ModelUnavailableError):
        await tiers(choose=choose).reply(REQUEST)


async def test_closing_it_closes_the_classifier():
    """As all models that were given to it."""
    closed = []

    class Closing(ScriptedModel):
        async def aclose(self):
            closed.append(self)

    models = [Closing() for _ in range(3)]
    classifier = TierClassifier(models[2], {"a": "Short.", "b": "Long."})
    await Tiered({"a": models[0], "b": models[1]}, classifier=classifier).aclose()
    assert closed == models
    with pytest.raises(MisuseError, match="a sentence on its tasks"):
        TierClassifier(ScriptedModel(), {"a": ""})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"tiers": {"small": ScriptedModel()}}, "two tiers or more"),
        ({"purposes": {"judge": "huge"}}, "no tier 'huge': name one of 'small', 'large'"),
        ({"escalate_on": ["sadness"]}, "some of bad_reply, refusal"),
        ({"min_score": 2}, "min_score=2"),
        ({"classifier": TierClassifier(ScriptedModel(), {"small": "a", "big": "b"})}, "big, large"),
    ],
)
def test_misuse_is_said_at_once(arguments, words):
    """Before a request was sent."""
    with pytest.raises(MisuseError, match=words):
        Tiered(**{"tiers": {"small": Priced("a"), "large": Priced("b")}, **arguments})


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"choose": lambda _: "huge"}, "no tier 'huge'"),
        ({"choose": lambda _: {}["x"]}, r"choose= of Tiered failed \(KeyError"),
        ({"choose": lambda _: "small", "score": lambda *_: 7}, "score= of Tiered returned 7"),
    ],
)
async def test_a_function_that_errs_is_misuse(more, words):
    """The run is unchanged, and the mistake is named."""
    with pytest.raises(MisuseError, match=words):
        await tiers(small=["ok"], **more).reply(REQUEST)
