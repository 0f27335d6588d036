"""The router: a closed set of routes, a threshold in code, rules before the model, and its calibration."""

from __future__ import annotations

import json

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentfsm import Agent, Limits, MisuseError, ModelUnavailableError, RunContext, RunError, UserMessage, tool
from agentfsm.memory import Memory
from agentfsm.patterns import (
    Ask,
    Calibration,
    IntentRouter,
    ReliabilityBin,
    Route,
    calibrate,
    plan_and_execute,
    reflect_until,
)
from agentfsm.prompts import Refuse
from agentfsm.stores import MemoryStore
from agentfsm.testing import FunctionModel, ScriptedModel, call, fail, say

ROUTES = {"billing": "Invoices and refunds.", "tech": "Faults of the device."}


def choice(route, confidence=0.9, question="", **more):
    return json.dumps({"reasoning": "Because.", "route": route, "confidence": confidence, "question": question, **more})


def router_of(*replies, **fields):
    return IntentRouter(ScriptedModel(*replies), routes=ROUTES, **fields)


async def test_a_route_is_picked(anyio_backend):
    """The run in which the model was asked is in the store."""
    store = MemoryStore()
    router = router_of(choice("billing"), options={"store": store})
    picked = await router.route("My invoice is wrong", user="ann")
    assert picked == Route(name="billing", confidence=0.9, reason="Because.", run_id=picked.run_id)
    assert (await router.agent.load(picked.run_id)).header.user == "ann"


async def test_the_model_sees_what_the_agent_sees_that_serves_the_requests(anyio_backend, tmp_path):
    """Its instructions, reminder, memory and session. The question is no part of the session."""
    memory, store = Memory(tmp_path / "memory.db"), MemoryStore()
    await memory.for_(user="ann").remember("Ann pays by invoice", kind="preference")

    async def told(ctx: RunContext) -> str:
        return "Calls are billed to the department."

    agent = Agent(
        ScriptedModel("It is 7.", "Done."),
        instructions=told,
        reminder="Be kind.",
        memory=memory,
        store=store,
        tools=[look],
    )
    await agent.run("What does a call cost?", user="ann", session="s")
    model = ScriptedModel(choice("billing"), choice("tech"))
    router = IntentRouter(model, routes=ROUTES, view_of=agent)
    assert (await router.route("It is too much", user="ann", session="s")).name == "billing"
    [asked] = model.requests
    assert asked.instructions.startswith("Calls are billed to the department.\n\nYou route requests.")
    texts = [each.text for each in asked.messages]
    assert "Ann pays by invoice" in texts[0]
    assert texts[1:3] == ["What does a call cost?", "It is 7."]
    assert texts[-1] == "Be kind."
    assert "look" not in [each.name for each in asked.tools]
    later = await agent.run("Thanks", user="ann", session="s")
    assert [each.text for each in later.messages if isinstance(each, UserMessage)] == [
        "What does a call cost?",
        "Thanks",
    ]
    plain = IntentRouter(model, routes=ROUTES, options={"instructions": "Faults are rare."})
    await plain.route("It hums")
    assert model.requests[1].instructions.startswith("Faults are rare.\n\nYou route")
    await memory.aclose()


@pytest.mark.parametrize(
    ("reply", "decision"),
    [
        (choice("billing", 0.59), Ask(question="Is this about billing or tech?", run_id="q")),
        (choice("billing", 0.59, "Which invoice?"), Ask(question="Which invoice?", run_id="q")),
        (choice("none", 0.9, "A bill or a fault?"), Ask(question="A bill or a fault?", run_id="q")),
        (choice("none", 0.9), Refuse("Because.")),
        (choice("tech", 0.6), "tech"),
    ],
)
async def test_no_route_is_taken_below_the_threshold(anyio_backend, reply, decision):
    """An ambiguous request is a question, and one without a route a refusal."""
    picked = await router_of(reply).route("Something is wrong", id="q")
    assert (picked.name if isinstance(picked, Route) else picked) == decision


async def test_the_threshold_holds_for_each_confidence(anyio_backend):
    """100 % of the picks below it do not act."""
    shares = [number / 100 for number in range(101)]
    router = router_of(*[choice("tech", share) for share in shares], threshold=0.75)
    for share in shares:
        assert isinstance(await router.route("x"), Route) == (share >= 0.75)


async def test_rules_come_before_the_model(anyio_backend):
    """The first that decides; the model is not asked then."""
    router = router_of(choice("tech"), rules=[lambda text: "billing" if "invoice" in text else None])
    assert await router.route("my invoice") == Route(name="billing")
    assert (await router.route("my phone")).name == "tech"
    with pytest.raises(MisuseError, match="returned 'sales': return one of billing, tech"):
        await router_of(rules=[lambda _text: "sales"]).route("x")


@pytest.mark.parametrize(
    ("reply", "fault"),
    [
        (choice("sales"), "route"),
        (choice("tech", 7), "confidence"),
        ("I would say billing.", "not a JSON object"),
        (f"{choice('billing')} or {choice('tech')}", "two JSON objects that differ"),
        (choice("billing")[:-9], "EOF"),
    ],
)
async def test_a_reply_that_does_not_fit_is_sent_back_once(anyio_backend, reply, fault):
    """With what is wrong with it. If the next does not fit either, nothing acts, unless there is a fallback."""
    router = router_of(reply, choice("tech"))
    assert (await router.route("x")).name == "tech"
    assert fault in router.agent.model.requests[1].messages[-1].text
    refused = await router_of(reply, reply).route("x")
    assert isinstance(refused, Refuse)
    assert fault in refused.reason
    fallback = await router_of(reply, reply, fallback="tech").route("x")
    assert (fallback.name, fallback.confidence) == ("tech", 0.0)


async def test_a_model_that_is_down_is_no_pick(anyio_backend):
    """The fallback is for replies that do not fit; an outage is an error of the caller's."""
    limits = Limits(errors=1, model_retries=0)
    router = router_of(fail(ModelUnavailableError("down")), fallback="tech", options={"limits": limits})
    with pytest.raises(RunError, match="down"):
        await router.route("x")


WRAPPINGS = [
    "{}",
    "```json\n{}\n```",
    "My decision: {}",
    'The "best" fit [1]:\n{}\nHope that helps: ok?',
    "{},",
    "\ufeff{}",
]
REPLIES = st.builds(
    lambda wrap, route, share, end: wrap.replace("{}", choice(route, share))[:end],
    st.sampled_from(WRAPPINGS),
    st.sampled_from(["billing", "tech", "none", "sales"]),
    st.floats(-0.5, 1.5),
    st.none() | st.integers(1, 160),
) | st.text(max_size=20).filter(str.strip)


@given(first=REPLIES, second=REPLIES)
def test_a_router_never_acts_on_a_reply_that_does_not_fit(first, second):
    """Whatever the model writes, a route is one that a whole reply names with enough confidence; nothing is raised."""
    router = router_of(first, second)
    decided = anyio.run(router.route, "x")
    if isinstance(decided, Route):
        assert decided.confidence >= router.threshold
        assert f'"route": "{decided.name}", "confidence": {decided.confidence}, "question": ""' in f"{first} {second}"


@tool
async def weather(city: str, days: int = 1) -> str:
    """Return the weather."""
    raise AssertionError("a router calls nothing")


async def test_the_input_of_a_tool_is_read_from_the_request(anyio_backend):
    """Document F, 3.1. It has to fit the tool's parameters, and is asked for again if it does not."""
    replies = [choice("weather", tool_input={"town": "Oslo"}), choice("weather", tool_input={"city": "Oslo"})]
    router = IntentRouter(ScriptedModel(*replies), routes={**ROUTES, "weather": weather})
    route = await router.route("Will it rain in Oslo?")
    assert (route.name, route.tool_input) == ("weather", {"city": "Oslo"})
    first, second = router.agent.model.requests
    assert '"city"' in first.instructions
    assert "tool_input: the arguments of weather do not fit" in second.messages[-1].text
    unsure = IntentRouter(ScriptedModel(choice("weather", 0.3)), routes={"weather": weather})
    assert isinstance(await unsure.route("x"), Ask)
    plain = IntentRouter(ScriptedModel(choice("billing", tool_input={"a": 1})), routes={**ROUTES, "weather": weather})
    assert (await plain.route("x")).tool_input == {}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"routes": {}}, r"^IntentRouter\(routes=\{\}\): give a dict"),
        ({"routes": {"none": "Nothing."}}, "none called"),
        ({"routes": ["billing"]}, "give a dict"),
        ({"routes": ROUTES, "threshold": 60}, "a share, above 0 and up to 1"),
        ({"routes": ROUTES, "rules": ["billing"]}, "give a function"),
        ({"routes": ROUTES, "fallback": "sales"}, r"fallback='sales'\): give one of billing, tech"),
    ],
)
def test_wrong_arguments_are_refused(fields, message):
    with pytest.raises(MisuseError, match=message):
        IntentRouter(ScriptedModel(), **fields)


def knowing(request):
    """Pick the route in the text, as confident as it says: "tech 0.8"."""
    route, share = request.messages[-1].text.split()
    return choice(route, float(share))


async def test_calibration_finds_the_threshold(anyio_backend):
    """Up to 0.5 the picks are wrong, from 0.7 on they are right."""
    cases = [("tech 0.3", "billing"), ("tech 0.5", "billing"), ("tech 0.7", "tech"), ("billing 1", "billing")]
    found = await calibrate(IntentRouter(FunctionModel(knowing), routes=ROUTES), [*cases, ("none 0.9", None)])
    assert found == Calibration(
        threshold=0.7,
        accuracy=1.0,
        interval=(pytest.approx(0.342, abs=0.001), 1.0),
        coverage=0.4,
        bins=(
            ReliabilityBin(low=0.2, count=1, confidence=0.3, accuracy=0.0),
            ReliabilityBin(low=0.4, count=1, confidence=0.5, accuracy=0.0),
            ReliabilityBin(low=0.6, count=1, confidence=0.7, accuracy=1.0),
            ReliabilityBin(low=0.8, count=1, confidence=1.0, accuracy=1.0),
        ),
    )


async def test_a_text_without_a_reply_that_fits_is_not_routed(anyio_backend):
    """It counts as one for which no route is taken."""
    found = await calibrate(router_of("?", "?", choice("tech")), [("x", "tech"), ("y", "tech")], accuracy=0.9)
    assert (found.threshold, found.coverage) == (0.9, 0.5)


async def test_a_threshold_that_does_not_exist_is_none(anyio_backend):
    """A model that is surest where it is wrong cannot be trusted from any confidence on."""
    router = IntentRouter(FunctionModel(knowing), routes=ROUTES)
    found = await calibrate(router, [("tech 0.3", "tech"), ("tech 1", None)], accuracy=0.9)
    assert (found.threshold, found.accuracy, found.coverage) == (None, 0.5, 0.0)
    assert (await calibrate(router, [("none 0.9", "tech")])).interval == (0.0, 1.0)


@pytest.mark.parametrize(
    ("cases", "message"), [([], "the list is empty"), ([("x", "sales")], "the router 'router' has no route 'sales'")]
)
async def test_wrong_cases_are_refused(anyio_backend, cases, message):
    with pytest.raises(MisuseError, match=message):
        await calibrate(router_of(), cases)


async def test_an_ambiguous_request_waits_with_a_question(anyio_backend):
    """Document F, 3.1: the run waits until the user answers, and another process may go on with it."""
    store, replies = (
        MemoryStore(),
        [choice("billing", 0.4, "Which invoice?"), choice("billing", 0.5), choice("billing")],
    )
    router = router_of(*replies, options={"store": store})
    asked = await router.route("It is wrong")
    assert isinstance(asked, Ask)
    run = await router.agent.load(asked.run_id)
    assert (run.is_waiting, run.pending[0].description) == (True, "Which invoice?")
    again = router_of(*replies[1:], options={"store": store})
    unsure = await again.answer(asked.run_id, "the last one")
    assert unsure == Ask(question="Is this about billing or tech?", run_id=asked.run_id)
    assert (await again.answer(asked.run_id, "billing, please")).name == "billing"
    assert [message.text for message in again.agent.model.requests[-1].messages if message.text][
        -1
    ] == "billing, please"


@tool(read_only=True)
async def look(what: str) -> str:
    """Look something up."""
    return f"{what}: 17"


def review(score, action="accept", change=""):
    scores = {name: {"score": score, "reason": change} for name in ("completeness", "correctness", "format")}
    details = {"step_id": "", "modification": change}
    return json.dumps({"evaluation": scores, "action": action, "overall_pass": score > 3, "retry_details": details})


async def test_each_role_has_its_own_model(anyio_backend):
    """The planner's plans and questions, the executor's goals and answers, and the reflector's reviews."""
    first = [{"id": 1, "tool": "look", "arguments": {"what": "a"}}, {"id": 2, "question": "Enough?", "after": [1]}]
    again = [{"id": 3, "goal": "Look for b.", "tools": ["look"], "after": [1]}]
    planner = ScriptedModel(json.dumps({"steps": first}), "No", json.dumps({"steps": again}))
    executor = ScriptedModel("17.", say("", call("look", what="b")), "17", "17 and 17.")
    reflector = ScriptedModel(review(2, "replan", "look for b, too"), review(5))
    agent = reflect_until(plan_and_execute(Agent(executor, tools=[look]), planner=planner), reflector=reflector)
    run = await agent.run("Look for a and b.")
    assert run.output == "17 and 17."
    assert [len(model.requests) for model in (planner, executor, reflector)] == [3, 4, 2]
    assert "look for b, too" in planner.requests[2].messages[-2].text
    assert [record.call_id for record in run.calls] == ["p1.1", "p2.3"]


async def test_checks_come_before_the_review(anyio_backend):
    """The model reads what is wrong, and the reflector is not asked about it."""
    reflector = ScriptedModel(review(5))
    check = lambda answer: None if answer.isupper() else "Write in capitals."  # noqa: E731  as users write it
    agent = reflect_until(Agent(ScriptedModel("no", "YES")), reflector=reflector, checks=[check])
    assert (await agent.run("go")).output == "YES"
    assert "Write in capitals." in agent.model.requests[1].messages[-1].text
    assert len(reflector.requests) == 1


def test_wrong_options_of_the_patterns_are_refused():
    agent = Agent(ScriptedModel())
    with pytest.raises(MisuseError, match="checks"):
        reflect_until(agent, checks=["capitals"])
    with pytest.raises(MisuseError, match="a list of functions"):
        reflect_until(agent, checks="capitals")  # type: ignore[arg-type]
    with pytest.raises(MisuseError, match="mode"):
        plan_and_execute(agent, mode="react")
    with pytest.raises(MisuseError):
        plan_and_execute(agent, planner="no such model")
    with pytest.raises(MisuseError, match="give an Agent"):
        plan_and_execute(ScriptedModel())
    with pytest.raises(MisuseError, match=r"reflect_until\(agent='x'\): give an Agent"):
        reflect_until("x")
