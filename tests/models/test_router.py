"""`Router`: the function's word counts, and a function that errs is said so."""

import pytest

from agentfsm import Agent, ImagePart, MisuseError, ModelUnavailableError, TextPart, Usage, UserMessage, tool
from agentfsm.models import Fallback, Router, Throttled
from agentfsm.ports import Model, OutputMode, Request, TextChunk
from agentfsm.testing import ScriptedModel, call, fail, say

REQUEST = Request(instructions="", messages=(UserMessage(parts=(TextPart(text="Hello"),)),))


class Named(ScriptedModel):
    """A scripted model with a name and a price of its own."""

    def __init__(self, name, *script, usd=None, refusal=None, window=128_000):
        super().__init__(*script)
        self.name, self.usd, self.refusal, self.window_tokens = name, usd, refusal, window
        self.closed = False

    def cost_usd(self, usage):
        return None if self.usd is None else usage.tokens * self.usd

    def unsupported_part(self, part):
        return self.refusal

    async def aclose(self):
        self.closed = True


@tool(read_only=True)
async def look() -> str:
    """Look."""
    return "nothing"


async def test_a_long_run_goes_to_the_strong_model():
    """The function sees each request whole: three messages are enough here to change the model within a run."""
    cheap, strong = Named("cheap", say("", call("look")), usd=0.5), Named("strong", "done", usd=2.0)
    router = Router(lambda request: "b" if len(request.messages) > 2 else "a", {"a": cheap, "b": strong})
    agent = Agent(router, tools=[look])
    run = await agent.run("look around")
    assert run.output == "done"
    assert (len(cheap.requests), len(strong.requests)) == (1, 1)
    assert run.usage.cost_usd == agent.cost(run).usd == 15 * 0.5 + 15 * 2.0


async def test_an_async_function_may_wait():
    """It may ask a model itself; that one's outage is the request's, and worth another attempt."""
    judge = ScriptedModel("strong", fail(ModelUnavailableError("overloaded")))

    async def choose(request):
        return (await judge.reply(request)).text

    router = Router(choose, {"strong": Named("s", "ok")})
    assert (await router.reply(REQUEST)).model == "s"
    with pytest.raises(ModelUnavailableError):
        await router.reply(REQUEST)


@pytest.mark.parametrize("named", ["c", "", None, 7, ["a"], "x" * 10_000], ids=lambda named: repr(named)[:10])
async def test_a_name_that_stands_for_no_model_is_misuse(named):
    """The error says what there is, and not all of what was returned."""
    router = Router(lambda _: named, {"a": Named("m"), "b": Named("n")})
    with pytest.raises(MisuseError, match="one of 'a', 'b'") as caught:
        await router.reply(REQUEST)
    assert len(str(caught.value)) < 300


async def test_a_function_that_fails_is_misuse():
    """Its error is the cause, and the run is not retried over it."""

    def choose(request):
        return {}["nothing"]

    with pytest.raises(MisuseError, match="KeyError: 'nothing'") as caught:
        await Agent(Router(choose, {"a": Named("m")})).run("hello")
    assert isinstance(caught.value.__cause__, KeyError)


async def test_it_streams_through():
    """The chunks of the chosen model arrive as they are."""
    chunks = []
    await Router(lambda _: "a", {"a": Named("m", "one two")}).reply(REQUEST, chunks.append)
    assert chunks[:2] == [TextChunk("one "), TextChunk("two")]


async def test_it_promises_what_each_of_its_models_can_do():
    """The smallest window and the dearest price; a part is refused where no model can take it."""
    blind, seeing = Named("blind", usd=1.0, refusal="no pictures", window=8_000), Named("seeing", usd=3.0)
    router = Router(lambda _: "b", {"a": blind, "b": seeing})
    picture = ImagePart(url="https://example.com/a.png")
    assert (router.name, router.window_tokens, router.output_modes) == ("blind or seeing", 8_000, Model.output_modes)
    assert router.unsupported_part(picture) is None
    assert Router(lambda _: "a", {"a": blind}).unsupported_part(picture) == "no pictures"
    assert router.cost_usd(Usage(input_tokens=2)) == 6
    await router.aclose()
    assert blind.closed
    assert seeing.closed


def test_a_router_without_models_is_misuse():
    """So is one whose models cannot be held to an answer in any one way."""
    with pytest.raises(MisuseError, match="no models"):
        Router(lambda _: "a", {})
    odd = Named("odd")
    odd.output_modes = (OutputMode.JSON,)
    with pytest.raises(MisuseError, match="output mode"):
        Router(lambda _: "a", {"a": Named("m"), "b": odd})


async def test_they_nest():
    """A throttled model, one behind a router, one behind a fallback: the one that answers is named and billed."""
    busy = Throttled(Named("busy", fail(ModelUnavailableError("overloaded", status=529)), usd=9.0), concurrency=1)
    routed = Router(lambda _: "x", {"x": Throttled(Named("inner", "ok", usd=1.0), per_minute=5), "y": Named("other")})
    reply = await Fallback(busy, routed).reply(REQUEST)
    assert (reply.text, reply.model, reply.usage.cost_usd) == ("ok", "inner", 15.0)
    assert busy.statistics().in_flight == 0
