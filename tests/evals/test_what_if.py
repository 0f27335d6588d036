"""What-if runs: another agent in the place of a recorded one, in the world that the journal has recorded."""

import attrs
import pytest

from agentfsm import Agent, AnswerCache, Limits, MisuseError, Runs, Settings, Spend, ask_user, tool, wait
from agentfsm.evals import WhatIfVerdict, whatif
from agentfsm.evals.evaluation_runner import EvaluationLimitError
from agentfsm.guards import Guard, ask, refuse
from agentfsm.models import HostedMCP, WebSearch
from agentfsm.ports.memory_items import Recall
from agentfsm.scripts import Script
from agentfsm.stores import MemoryStore
from agentfsm.testing import FunctionModel, call
from tests.support.what_if_agents import HURRY, KINDS, World, flow, follow, list_steps, plain, record


@pytest.mark.parametrize("build", KINDS)
async def test_an_unchanged_agent_differs_in_nothing(build):
    """All of its calls are answered from the record, those after an approval too, and nothing is called or stored."""
    world = World()
    agent = build(world)
    run = await record(agent)
    made, stored = list(world.calls), [each.id for each in await agent.runs.list()]
    report = await whatif(agent, [run])
    [trial] = report.trials
    assert (trial.effects.same, trial.reads.same, trial.outside) == (2, 1, ())
    assert not trial.effects
    assert not trial.reads
    assert (trial.after_end, trial.agent_changes) == (trial.before_end, ())
    assert report.verdict is WhatIfVerdict.SAME
    assert world.calls == made
    assert [each.id for each in await agent.runs.list()] == stored


@pytest.mark.parametrize("build", KINDS)
async def test_an_agent_that_acts_otherwise_acts_on_nothing(build):
    """Another amount, and a call more: both are named, at any depth, and neither is made."""
    world = World()
    agent = build(world)
    run = await record(agent)
    made = list(world.calls)
    other = build(world, (*list_steps(cents=50_000), call("pay", account="Bob", cents=1)))
    report = await whatif(other, [run], source=agent.store)
    [trial] = report.trials
    if build is flow:
        assert [str(each) for each in trial.effects.more] == ['close({"mail": "sent"})']
    else:
        assert [(each.tool, each.fields) for each in trial.effects.other] == [("pay", ("cents",))]
        assert [each.tool for each in trial.effects.more] == ["pay"]
    assert (trial.is_cut_short, trial.differs("ends")) == (build is flow, False)
    assert report.verdict is WhatIfVerdict.DIFFERENT
    assert world.calls == made


def shop(world, *calls, **fields):
    """Return an agent of the name `shop` that makes calls."""
    return Agent(follow(*calls), **{"tools": world.tools(), "name": "shop", **fields})


async def try_other(agent, run, **changes):
    """Return the trial of a variant of an agent in the place of its run."""
    report = await whatif(agent.with_(**changes), [run])
    return report.trials[0]


async def test_planted_changes_are_named():
    """A cheaper amount, a check that is left out, a new tool, another schema, another prompt: each has its line."""
    world = World()
    agent = shop(world, *list_steps())
    run = await record(agent)
    made = list(world.calls)

    @tool
    async def refund(order: int) -> str:
        """Refund an order."""
        world.calls.append(("refund", order))
        return "refunded"

    @tool(name="pay")
    async def pay_in_euros(account: str, euros: float) -> str:
        """Pay."""
        world.calls.append(("pay", account, euros))
        return "paid"

    cheaper = await try_other(agent, run, model=follow(*list_steps(cents=400)))
    assert [str(each) for each in cheaper.effects.other] == [
        'pay: {"account": "Ann", "cents": 500} -> {"account": "Ann", "cents": 400}'
    ]
    unchecked = await try_other(agent, run, model=follow(*list_steps()[1:]))
    assert (not unchecked.effects, [str(each) for each in unchecked.reads.fewer]) == (True, ['look({"order": 7})'])
    newer = follow(call("look", order=7), call("refund", order=7))
    found = await try_other(agent, run, model=newer, tools=[*agent.tools, refund])
    assert [each.tool for each in found.effects.more] == ["refund"]
    assert [each.tool for each in found.effects.fewer] == ["pay", "mail"]
    assert found.agent_changes == ("tool refund is new",)
    look, _pay, mail = agent.tools
    found = await try_other(agent, run, tools=[look, pay_in_euros, mail])
    assert ([each.tool for each in found.effects.fewer], found.agent_changes) == (["pay"], ("tool pay has changed",))
    prompted = await try_other(agent, run, instructions="Be kind.")
    assert (prompted.agent_changes, bool(prompted.effects)) == (("other instructions",), False)
    gone = await try_other(agent, run, limits=Limits(turns=1))
    assert (gone.before_end, gone.after_end) == ("completed", "max_turns")
    assert world.calls == made


async def test_reads_outside_the_record():
    """They have no result and are counted, unless they may run live; a call that may act never does."""
    world = World()
    agent = shop(world, call("look", order=7))
    run = await record(agent)
    made = list(world.calls)
    other = agent.with_(model=follow(call("look", order=8), call("look", order=7), call("pay", account="A", cents=1)))
    [trial] = (await whatif(other, [run])).trials
    assert ([str(each) for each in trial.outside], trial.live) == (['look({"order": 8})'], 0)
    assert world.calls == made
    [trial] = (await whatif(other, [run], read="live")).trials
    assert (trial.outside, trial.live) == ((), 1)
    assert world.calls == [*made, ("look", 8)]
    look, pay, mail = agent.tools
    trusting = other.with_(tools=[look, attrs.evolve(pay, read_only=True), mail])
    paying = await record(shop(world, call("pay", account="A", cents=5), store=agent.store))
    made = list(world.calls)
    [trial] = (await whatif(trusting, [paying], read="live")).trials  # the record says that it acts
    assert [each.tool for each in trial.effects.other] == ["pay"]
    assert [each for each in world.calls if each[0] == "pay"] == [each for each in made if each[0] == "pay"]


class Untouched:
    """A store that may only be read."""

    def __init__(self, store):
        self.store = store

    def __getattr__(self, name):
        assert name in {"read", "runs", "now", "inbox"}, f"the store was asked to {name}"
        return getattr(self.store, name)


async def test_a_live_read_starts_no_run():
    """Its function may call an agent of its own, whose run would be in a store of production."""
    world = World()
    inner = plain(world)

    @tool(read_only=True)
    async def ask_refunds(text: str) -> str:
        """Ask."""
        return (await inner.run(text)).id

    agent = shop(world, call("look", order=7))
    run = await record(agent)
    other = agent.with_(model=follow(call("ask_refunds", text="Refund 7")), tools=[*agent.tools, ask_refunds])
    [trial] = (await whatif(other, [run], read="live")).trials
    assert (trial.live, await inner.runs.list(), world.calls) == (1, (), [("look", 7)])


async def test_no_function_of_the_agent_starts_a_run():
    """Validators, instructions and live reads are no calls that may act: an agent that they would run is refused."""
    world = World()
    side = plain(world)
    waiting, over = await side.run("Refund 7"), await record(side)
    known = [each.id for each in await side.runs.list()]

    async def run(*_args):
        await side.run("Refund 7")

    async def fork():
        await side.finish(await side.fork(over.id, at=0))

    async def resume():
        await side.approve(waiting.id, waiting.pending[0].call_id)
        await side.resume(waiting.id)

    agent = shop(world, call("look", order=7))
    recorded = await record(agent)
    made = list(world.calls)
    for fields in ({"output_validators": [run]}, {"instructions": run}, {"reminder": run}):
        with pytest.raises(MisuseError, match="reach nothing outside"):
            await whatif(agent.with_(**fields), [recorded])
    for act in (run, fork, resume):

        async def go() -> None:
            """Go."""
            await act()  # noqa: B023  called in this turn of the loop

        go = tool(go, read_only=True)
        other = agent.with_(model=follow(call("go")), tools=[*agent.tools, go])
        assert (await whatif(other, [recorded], read="live")).trials[0].live == 1
    assert ([each.id for each in await side.runs.list()], world.calls) == (known, made)


async def test_arguments_are_compared_as_json():
    """The number 1 is not the value `true`, and `null` is not the same as nothing: each difference names its field."""

    @tool
    async def put(value: bool | int | None = None) -> str:
        """Put a value."""
        return "put"

    agent = Agent(follow(call("put", value=1)), tools=[put])
    run = await agent.run("Go")
    [trial] = (await whatif(agent.with_(model=follow(call("put", value=True))), [run])).trials
    assert [each.fields for each in trial.effects.other] == [("value",)]
    run = await agent.with_(model=follow(call("put", value=None))).run("Go")
    [trial] = (await whatif(agent.with_(model=follow(call("put"))), [run])).trials
    assert [each.fields for each in trial.effects.other] == [("value",)]


async def test_what_if_runs_can_be_tried_again_and_their_forks_are_production():
    """Withheld calls are those of the record; a fork that acts is no what-if run any more."""
    world, keep = World(), MemoryStore()
    agent = shop(world, *list_steps())
    run = await record(agent)
    other = agent.with_(model=follow(*list_steps(cents=9)))
    await whatif(other, [run], keep=keep)
    [kept] = await Runs(keep).list()
    assert (await whatif(other, [kept], source=keep)).verdict is WhatIfVerdict.SAME
    other = other.with_(store=keep)
    assert (await other.fork(kept.id, at=0)).header.purpose == ""
    assert (await other.fork(kept.id, at=0, withhold=True)).header.purpose == "what-if"


async def test_the_money_is_limited(monkeypatch):
    """The estimate is stated before the first request; no trial begins that is likely to exceed the limit."""
    agent = shop(World(), call("look", order=7))
    runs = [await record(agent) for _ in range(3)]
    with pytest.raises(MisuseError, match="the price of a model of run"):
        await whatif(agent, runs, usd=1.0)
    monkeypatch.setattr(agent.model, "cost_usd", lambda usage: 0.5, raising=False)
    told = []
    with pytest.raises(EvaluationLimitError, match="2 of 3 trials were made") as caught:
        await whatif(agent, runs, usd=2.2, parallel=1, on_estimate=told.append)
    assert (told, [each.run_id for each in caught.value.results]) == ([1.5], [each.id for each in runs[:2]])
    with pytest.raises(MisuseError, match="a store of its own"):
        await whatif(agent, runs, keep=agent.store)
    with pytest.raises(MisuseError, match="a store of its own"):
        await whatif(agent, runs, keep=Untouched(agent.store))  # another way to the same store
    waiting = await agent.with_(model=follow(call("mail", to="Ann"))).run("Go")
    with pytest.raises(MisuseError, match=f"run {waiting.id!r} is not over"):
        await whatif(agent, [*runs, waiting])
    assert (await whatif(agent, [])).verdict is WhatIfVerdict.UNDECIDED
    report = await whatif(agent, [runs[0], *runs])
    assert [each.run_id for each in report.trials] == [each.id for each in runs]


@pytest.mark.parametrize("build", KINDS)
async def test_runs_are_driven_from_a_version(build):
    """What was copied is compared with nothing, at any depth; a plan that was made stays."""
    world = World()
    agent = build(world)
    run = await record(agent)
    made = list(world.calls)
    for at in range(2, len((await agent.store.read(run.id)).events) + 2, 4):
        assert (await whatif(agent, [run], at=at)).verdict is WhatIfVerdict.SAME
    assert world.calls == made


async def test_tools_of_the_provider_are_not_offered():
    """They would be executed there. Those that change nothing are a read, which may run live."""
    seen = []

    class Hosting(FunctionModel):
        def unsupported_hosted_tool(self, tool):
            return None

    model = Hosting(lambda request: seen.append([each.name for each in request.hosted_tools]) or "Done.")
    agent = Agent(model, tools=[WebSearch(), HostedMCP(server="bank", url="https://bank.example/mcp")])
    run = await agent.run("Go")
    await whatif(agent, [run])
    await whatif(agent, [run], read="live")
    assert seen == [["web_search", "bank"], [], ["web_search"]]
    above = agent.with_(tools=[Agent(model, settings=Settings(extra_body={"tools": []}), name="below").as_tool()])
    with pytest.raises(MisuseError, match="cannot withhold their calls"):
        await whatif(above, [run])


class Server:
    """A server of tools that is asked for them."""

    is_stale, version, tools = True, 0, ()

    def __init__(self, tools):
        self.listed = tools

    async def update(self):
        self.is_stale, self.version, self.tools = False, 1, self.listed

    async def aclose(self):
        pass


async def test_tools_of_a_server_are_answered():
    """They are known only once the server has listed them, and no call reaches it."""
    world = World()
    agent = shop(world, *list_steps(), tools=[Server(world.tools())])
    run = await record(agent)
    made = list(world.calls)
    assert (await whatif(agent, [run])).verdict is WhatIfVerdict.SAME
    [trial] = (await whatif(agent.with_(model=follow(*list_steps(cents=9))), [run], read="live")).trials
    assert [each.tool for each in trial.effects.other] == ["pay"]
    assert world.calls == made


async def test_scripts_are_answered_call_by_call():
    """A script is a run below; the candidate writes another one."""
    world = World()
    look, pay, _mail = world.tools()
    code = "await look(7)\nawait pay('Ann', {})"
    agent = shop(world, call("run_python", code=code.format(500)), tools=[look, pay, Script(look, pay)])
    run = await record(agent)
    made = list(world.calls)
    assert made == [("look", 7), ("pay", "Ann", 500)]
    same = await try_other(agent, run)
    assert (same.effects.same, same.reads.same, same.differs("ends")) == (1, 1, False)
    other = await try_other(agent, run, model=follow(call("run_python", code=code.format(9))))
    assert [(each.tool, each.fields) for each in other.effects.other] == [("pay", ("cents",))]
    assert world.calls == made


class Guarded(MemoryStore):
    """A store that can be closed to all but readers."""

    is_closed = False

    def __getattribute__(self, name):
        readers = {"read", "runs", "now", "aclose", "is_closed"}
        if not name.startswith("_") and type(self).is_closed and name not in readers:
            raise AssertionError(f"the store was asked to {name}")
        return super().__getattribute__(name)


class UserMemory:
    """A memory of one item, which counts its searches."""

    searches = 0

    def wants(self, run):
        return True

    async def recall_for(self, run, query, demand):
        self.searches += 1
        return Recall()


async def test_nothing_beside_the_run_is_touched(monkeypatch):
    """No store, cache, limit, memory or watcher of the agent, or of one below it, is told of the run."""
    world, told, store, cache, memory = World(), [], Guarded(), Guarded(), UserMemory()
    outside = {
        "spend": Spend(usd=1.0, per="day"),
        "answer_cache": AnswerCache(store=cache),
        "watch": [lambda run, events: told.append(run.header.purpose)],
    }
    model = follow(*list_steps())
    monkeypatch.setattr(model, "cost_usd", lambda usage: 0.001, raising=False)
    inner = Agent(model, tools=world.tools(), name="inner", **outside)
    above = follow(call("inner", query="Refund 7"))
    monkeypatch.setattr(above, "cost_usd", lambda usage: 0.001, raising=False)
    agent = Agent(
        above,
        tools=[inner.as_tool(turns=9)],
        store=store,
        memory=memory,
        spend=outside["spend"],
        watch=outside["watch"],
    )
    before, run = [await record(agent, session="s", user="ann") for _ in range(2)]
    searches, made = memory.searches, list(world.calls)
    monkeypatch.setattr(Guarded, "is_closed", True)
    report = await whatif(agent, [run.id, before.id], repeats=2)
    assert report.verdict is WhatIfVerdict.SAME
    assert {each.effects.same for each in report.trials} == {2}
    assert (set(told), memory.searches, world.calls) == ({""}, searches, made)


async def test_people_are_not_asked():
    """Their answers are results of the record: a refusal, an answer, the end of a wait, and a message that came in."""
    world = World()
    agent = shop(
        world, call("ask_user", question="Which?"), call("mail", to="Ann"), call("wait", seconds=9, reason="x")
    )
    agent = agent.with_(tools=[*agent.tools, ask_user, wait])
    run = await agent.run("Go")
    await agent.answer(run.id, run.pending[0].call_id, "The red one")
    run = await agent.resume(run.id)
    await agent.reject(run.id, run.pending[0].call_id, message="not Ann")
    run = await agent.resume(run.id)
    await agent.send(run.id, HURRY)
    run = await agent.resume(run.id)
    assert (run.answer, len(run.messages)) == ("Done.", 9)
    seen, think = [], agent.model._function
    model = FunctionModel(lambda request: seen.append(request.messages) or think(request))
    report = await whatif(agent.with_(model=model), [run], control=agent)
    assert report.verdict is WhatIfVerdict.SAME
    assert [each.text for each in seen[-1]] == [each.text for each in run.messages[:-1]]
    [trial] = (await whatif(agent.with_(model=follow(call("ask_user", question="Who?"))), [run])).trials
    assert (trial.after_end, [each.tool for each in trial.effects.fewer]) == ("completed", ["mail"])


async def test_a_message_that_forestalled_the_end_does_so_again():
    """It had come in while the model answered."""
    store, sent = MemoryStore(), []

    async def think(request):
        if not sent:
            sent.append(await Runs(store).send(request.run.id, HURRY))
        return f"Answer {len(request.messages)}."

    agent = Agent(FunctionModel(think), store=store)
    run = await agent.run("Go")
    assert [each.text for each in run.messages] == ["Go", "Answer 1.", HURRY, "Answer 3."]
    [trial] = (await whatif(agent, [run])).trials
    assert (trial.after.turns, trial.unread_inputs) == (2, 0)


async def test_a_guard_that_asks_is_answered_by_the_record_and_one_that_refuses_refuses():
    """What a guard refuses is no effect that the agent would have had."""
    world = World()
    agent = shop(world, *list_steps())
    run = await record(agent)
    assert (await whatif(agent.with_(guards=[Guard(ask("pay"))]), [run])).verdict is WhatIfVerdict.SAME
    [trial] = (await whatif(agent.with_(guards=[Guard(refuse("pay"))]), [run])).trials
    assert (trial.effects.same, [each.tool for each in trial.effects.fewer]) == (1, ["pay"])
    other = agent.with_(guards=[Guard(ask("pay"))], model=follow(*list_steps(cents=9)))
    [trial] = (await whatif(other, [run], read="live")).trials
    assert [each.tool for each in trial.effects.other] == ["pay"]
    assert len(world.calls) == len(list_steps())
