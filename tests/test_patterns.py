"""The router: a closed set of routes, a threshold in code, rules before the model, and its calibration."""

from __future__ import annotations

import json

import pytest

from agentfsm import MisuseError
from agentfsm.patterns import Calibration, IntentRouter, ReliabilityBin, Route, calibrate
from agentfsm.prompts import Clarify, Refuse
from agentfsm.stores import MemoryStore
from agentfsm.testing import FunctionModel, ScriptedModel

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


@pytest.mark.parametrize(
    ("reply", "decision"),
    [
        (choice("billing", 0.59), Clarify("Is this about billing or tech?")),
        (choice("billing", 0.59, "Which invoice?"), Clarify("Which invoice?")),
        (choice("none", 0.9, "A bill or a fault?"), Clarify("A bill or a fault?")),
        (choice("none", 0.9), Refuse("Because.")),
        (choice("tech", 0.6), "tech"),
    ],
)
async def test_no_route_is_taken_below_the_threshold(anyio_backend, reply, decision):
    """An ambiguous request is a question, and one without a route a refusal."""
    picked = await router_of(reply).route("Something is wrong")
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


async def test_a_route_that_does_not_exist_is_asked_for_again(anyio_backend):
    """So is a confidence beyond 1: the set is closed by the type of the answer."""
    router = router_of(choice("sales"), choice("tech", 7), choice("tech"))
    assert (await router.route("x")).name == "tech"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"routes": {}}, r"^IntentRouter\(routes=\{\}\): give a dict"),
        ({"routes": {"none": "Nothing."}}, "none called"),
        ({"routes": ["billing"]}, "give a dict"),
        ({"routes": ROUTES, "threshold": 60}, "a share, above 0 and up to 1"),
        ({"routes": ROUTES, "rules": ["billing"]}, "give a function"),
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
