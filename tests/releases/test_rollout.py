"""Roll-outs: who gets which release, what a roll-back changes, and what it leaves alone."""

import logging
from collections import Counter
from functools import partial

import anyio
import attrs
import pytest

from agentfsm import Agent, ConflictError, Limits, MisuseError, ModelError, State, StoreError, tool
from agentfsm.prompts import Prompts
from agentfsm.releases import (
    Experiment,
    Flag,
    Release,
    Rollout,
    RolloutControl,
)
from agentfsm.releases.arm_results import OutcomeReader
from agentfsm.releases.release import load_release, save_release
from agentfsm.releases.rollout_guard import abort_runs, watch_rollout
from agentfsm.stores import MemoryStore, PostgresStore, RedisStore, SQLiteStore
from agentfsm.testing import FunctionModel, ScriptedModel, VirtualClock, call, run_virtual, say
from tests.support.database_servers import empty_schema

pytestmark = pytest.mark.anyio
BY = {"by": "ann", "reason": "a test"}


def make_agent(store, version, reply=None, **options):
    """Return a release of the agent, which answers with its version."""
    model = FunctionModel(reply or (lambda _request: version))
    return Agent(model, name="billing", version=version, store=store, **options)


def make_rollout(store, **options):
    return Rollout("billing", {"old": make_agent(store, "1"), "new": make_agent(store, "2")}, **options)


@pytest.fixture(params=["memory", "sqlite", "postgres", "redis"])
async def store(request, tmp_path):
    """A store of each kind in turn."""
    match request.param:
        case "memory":
            store = MemoryStore()
        case "sqlite":
            store = SQLiteStore(tmp_path / "runs.db")
        case "postgres":
            url, desk = map(request.getfixturevalue, ("shared_postgres", "postgres_desk"))
            with empty_schema(desk) as schema:
                store = PostgresStore(url, schema=schema)
                yield store
                await store.aclose()
            return
        case _:
            store = RedisStore(request.getfixturevalue("redis_url"), accept_loss="everything")
    yield store
    await store.aclose()


# Who gets which release.


async def test_a_user_keeps_the_arm_until_its_bucket_moves():
    """The header names arm and release; a step gives the new release to more users and takes it from none."""
    rollout = make_rollout(MemoryStore())
    assert (await rollout.run("go", user="ann")).output == "1"  # not started: the base
    await rollout.start({"old": 70, "new": 30}, **BY)
    users = [f"user {number}" for number in range(60)]
    seen = []
    for weights in ({"old": 40, "new": 60}, {"old": 0, "new": 100}):
        runs = [await rollout.run("go", user=user) for user in users]
        assert all(
            run.output == run.header.release == {"old": "1", "new": "2"}[run.header.arms["billing"]] for run in runs
        )
        seen.append({run.header.user for run in runs if run.output == "2"})
        await rollout.control.set_weights(weights, **BY)
    assert 5 < len(seen[0]) < 31
    assert seen[0] < seen[1] < set(users)
    assert {(await rollout.run("go", user=user)).output for user in users} == {"2"}


async def test_a_run_without_a_user_is_assigned_by_its_session_or_its_own_id():
    """So no arm gets everyone who has no user; users of two tenants are two units."""
    experiment = Experiment("tone", MemoryStore(), arms=("formal", "warm"))
    await experiment.control.start({"formal": 50, "warm": 50}, **BY)
    by_run = [await experiment.assign(run_id=f"r{number}") for number in range(200)]
    assert {each.unit for each in by_run} == {"run"}
    assert 60 < Counter(each.arm for each in by_run)["warm"] < 140
    sessions = {(await experiment.assign(session="s", run_id=f"r{number}")).arm for number in range(20)}
    assert len(sessions) == 1
    tenants = [(await experiment.assign(user="ann", tenant=f"t{number}")).arm for number in range(40)]
    assert {*tenants} == {"formal", "warm"}
    with pytest.raises(MisuseError, match="assigns arms by user: give it, or session= or run_id="):
        await experiment.assign()


async def test_a_repeated_start_of_a_run_keeps_its_release():
    """The same id is the same run, whatever the weights are by then."""
    rollout = make_rollout(MemoryStore())
    await rollout.start({"old": 0, "new": 100}, **BY)
    first = await rollout.submit("go", id="r", user="ann")
    await rollout.control.kill(**BY)
    again = await rollout.run("go", id="r", user="ann")
    assert (first.header.release, again.header.release, again.output) == ("2", "2", "2")
    assert (await rollout.run("go", user="ann")).output == "1"


async def test_the_holdout_gets_the_base_and_is_no_part_of_it():
    """The same users are held out of every roll-out, and their runs do not count for the base arm."""
    store = MemoryStore()
    found = []
    for name in ("first", "second"):
        experiment = Experiment(name, store, arms=("off", "on"))
        await experiment.control.start({"off": 0, "on": 100}, holdout=20, **BY)
        found.append({user for user in range(300) if (await experiment.assign(user=f"{user}")).arm == "holdout"})
    assert found[0] == found[1]
    assert 35 < len(found[0]) < 85


async def test_a_flag_is_on_for_its_share():
    """A flag is an experiment with two arms; until it is started, it is off."""
    flag = Flag("new-search", MemoryStore())
    assert not await flag.is_on(user="ann")
    await flag.experiment.control.start({"off": 0, "on": 100}, **BY)
    assert await flag.is_on(user="ann")


# Changes.


async def test_a_roll_back_returns_to_what_was_active_before():
    """Not to what was written before: a plan that was rolled back is never returned to."""
    control = RolloutControl("x", MemoryStore())
    await control.start({"a": 95, "b": 5, "c": 0}, **BY)
    await control.set_weights({"a": 80, "b": 20}, **BY)
    await control.back(**BY)  # to 95 : 5
    await control.set_weights({"a": 50, "b": 0, "c": 50}, **BY)
    back = await control.back(**BY)
    assert (back.restored, back.plan.weights) == (1, {"a": 95, "b": 5, "c": 0})
    assert (await control.back(**BY)).plan.weights == {"a": 100, "b": 0, "c": 0}
    with pytest.raises(MisuseError, match="has no plan that was in effect before"):
        await control.back(**BY)
    log = await control.log()
    assert [(each.number, each.action) for each in log] == [
        (1, "start"), (2, "weights"), (3, "back"), (4, "weights"), (5, "back"), (6, "back"),
    ]  # fmt: skip
    assert all(each.by == "ann" and each.reason == "a test" and each.at for each in log)


async def test_an_arm_is_rolled_back_to_no_weight_whatever_steps_it_took():
    """From 20 % a bad arm does not return to 5 %, and other arms keep what they had when it had nothing."""
    control = RolloutControl("x", MemoryStore())
    await control.start({"a": 90, "b": 0, "c": 10}, **BY)
    await control.set_weights({"a": 85, "b": 5, "c": 10}, **BY)
    await control.set_weights({"a": 70, "b": 20, "c": 10}, **BY)
    assert (await control.back(arm="b", **BY)).plan.weights == {"a": 90, "b": 0, "c": 10}
    for arm, text in (("b", "has no weight"), ("a", "is the base")):
        with pytest.raises(MisuseError, match=text):
            await control.back(arm=arm, **BY)


async def test_a_roll_back_never_crosses_a_kill():
    """After a new start, going back ends at the base, and says so; the plan that was killed stays ended."""
    rollout = Rollout("x", {arm: make_agent(MemoryStore(), arm) for arm in ("old", "bad", "good")})
    control = rollout.control
    await rollout.start({"old": 50, "bad": 50}, **BY)
    await control.kill(**BY)
    await rollout.start({"old": 95, "good": 5}, **BY)
    await control.set_weights({"old": 80, "good": 20}, **BY)
    assert [(await control.back(**BY)).plan.weights["good"] for _ in range(2)] == [5, 0]
    with pytest.raises(MisuseError, match=r"since its start: change the weights .*, or kill it"):
        await control.back(**BY)
    assert (await control.newest()).plan.weights == {"old": 100, "bad": 0, "good": 0}


@pytest.mark.parametrize("second", [("2", "3"), ("3", "2"), ("1", "3")])
async def test_a_roll_back_of_a_start_returns_to_the_release_that_all_had(second):
    """If the new start has it, under whatever name; else to its base. It never leaves the arms of the new start."""
    store = MemoryStore()
    first = Rollout("x", {"old": make_agent(store, "1"), "new": make_agent(store, "2")})
    await first.start({"old": 50, "new": 50}, **BY)
    await first.control.set_weights({"new": 100}, **BY)
    rollout = Rollout("x", {"a": make_agent(store, second[0]), "b": make_agent(store, second[1])})
    await rollout.start({"a": 50, "b": 50}, **BY)
    back = await rollout.control.back(**BY)
    assert (back.plan.base, back.plan.salt, [*back.plan.releases]) == ("a", "x#3", ["a", "b"])
    assert (await rollout.run("go", user="ann")).output == ("2" if "2" in second else "1")
    with pytest.raises(MisuseError, match="since its start"):
        await rollout.control.back(**BY)


async def test_a_roll_back_of_an_arm_gives_no_weight_to_one_that_was_removed():
    """The base gets it. What a person has decided of the other arms stays, and the bad arm is never returned to."""
    control = RolloutControl("x", MemoryStore())
    await control.start({"a": 50, "b": 50, "c": 0}, **BY)
    await control.set_weights({"a": 45, "c": 50, "b": 5}, **BY)
    await control.set_weights({"a": 50, "c": 50}, by="ann", reason="b writes wrong invoices")
    back = await control.back(arm="c", automatic=True, **BY)
    assert (back.action, back.arm, back.plan.weights) == ("auto_back", "c", {"a": 100, "b": 0, "c": 0})
    assert str(back).startswith("4 auto_back of c by ann: a=100 b=0 c=0")
    assert (await control.back(**BY)).restored == 1  # entries 2 and 3 have c


async def test_of_two_changes_at_the_same_moment_one_is_refused(store):
    """With the change that was faster; so no change is lost."""
    first, second = RolloutControl("x", store), RolloutControl("x", store)
    await first.start({"a": 95, "b": 5}, **BY)
    seen, other = await second.log(), await first.kill(by="bob", reason="it is bad")

    async def stale(**_options):
        return seen if len(seen) == 1 else (other,)

    second.log, log = stale, second.log
    with pytest.raises(ConflictError, match="changed at the same moment"):
        await second.set_weights({"a": 0, "b": 100}, **BY)
    second.log = log
    with pytest.raises(MisuseError, match=r"was killed .*bob.*it is bad.: start it again"):
        await second.set_weights({"a": 0, "b": 100}, **BY)
    assert (await first.start({"a": 50, "b": 50}, **BY)).number == 3


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"weights": {"old": 95, "nwe": 5}}, "has no arm 'nwe': old, new"),
        ({"holdout": 60}, "give a number from 0 to 50"),
        ({"rules": ["failures"]}, "is not a rule"),
        ({"by": ""}, "by=''.: give a string that is not empty"),
        ({"reason": " "}, "reason=' '.: give a string that is not empty"),
    ],
)
async def test_a_start_with_a_mistake_changes_nothing(options, text):
    """Every error says what is wrong; a change without an author and a reason is none."""
    rollout = make_rollout(MemoryStore())
    with pytest.raises(MisuseError, match=text):
        await rollout.start(**{"weights": {"old": 95, "new": 5}, **BY, **options})
    assert await rollout.control.log() == ()


async def test_a_roll_out_in_progress_is_not_started_again():
    """Which would move its users: first one arm has all the weight."""
    rollout = make_rollout(MemoryStore())
    await rollout.start({"old": 95, "new": 5}, **BY)
    with pytest.raises(MisuseError, match=r"is in progress .*give one arm all the weight, or kill it"):
        await rollout.start({"old": 50, "new": 50}, **BY)
    await rollout.control.set_weights({"old": 0, "new": 100}, **BY)
    assert (await rollout.start({"old": 50, "new": 50}, **BY)).plan.salt == "billing#3"


# Releases, and the workers that have them.


def two_versions(store):
    """Return agents whose runs wait for an approval, then answer with their version."""

    @tool(requires_approval=True)
    def pay() -> str:
        """Pay."""
        return "paid"

    from agentfsm.ports import ProposedCall, Reply  # noqa: PLC0415

    def replying(version):
        def reply(request):
            asked = len(request.messages) == 1
            return Reply(calls=(ProposedCall(id="c", name="pay", arguments="{}"),)) if asked else version

        return reply

    return {
        arm: make_agent(store, version, replying(version), tools=[pay]) for arm, version in (("old", "1"), ("new", "2"))
    }


async def test_a_run_begun_in_an_arm_ends_in_it_after_a_roll_back(store, caplog):
    """Only a worker that has its release executes it; one that has only the old release leaves it alone and says so."""
    arms = two_versions(store)
    rollout = Rollout("billing", arms)
    await rollout.start({"old": 0, "new": 100}, **BY)
    await rollout.submit("go", id="r", user="ann")
    await rollout.worker(until_idle=True)
    await rollout.control.back(**BY)
    await rollout.base.approve("r", (await rollout.base.load("r")).pending[0].call_id)
    with caplog.at_level(logging.WARNING, "agentfsm.worker"):
        await arms["old"].worker(until_idle=True)
        await Rollout("billing", {"old": arms["old"]}).worker(until_idle=True)
    left = "runs of agent 'billing' are ready that were begun with release '2', and this worker has '1': it leaves them"
    assert [record.getMessage().startswith(left) for record in caplog.records] == [True] * 2
    assert (await rollout.base.load("r")).state is State.ACT
    with pytest.raises(MisuseError, match=r"run 'r' was begun with release '2' of agent 'billing', and this .* '1'"):
        await arms["old"].resume("r")
    await rollout.worker(until_idle=True)
    ended = await rollout.resume("r")
    assert (ended.output, ended.header.arms) == ("2", {"billing": "new"})
    assert (await rollout.run("go", user="ann")).header.release == "1"


async def test_a_release_that_was_changed_in_place_continues_no_run(store):
    """`resume` refuses it as workers do, before anything is done: the run was begun with other contents."""
    arms = two_versions(store)
    rollout = Rollout("billing", arms)
    await rollout.start({"old": 100}, **BY)
    run = await rollout.run("go")
    await rollout.base.approve(run.id, run.pending[0].call_id)
    changed = Rollout("billing", {**arms, "old": arms["old"].with_(instructions="Be generous.")})
    for refused in (partial(changed.resume, run.id), partial(changed.worker, until_idle=True)):
        with pytest.raises(ConflictError, match=r"release '1' of agent 'billing' was saved with other contents"):
            await refused()
    assert (await rollout.base.load(run.id)).version == run.version
    assert (await rollout.resume(run.id)).state is State.DONE


async def test_a_fork_belongs_to_the_release_that_continues_it(store):
    """An old run is tried again with a new release, whose workers execute it; its result counts for no arm."""
    arms = two_versions(store)
    rollout = Rollout("billing", arms)
    await rollout.start({"old": 100}, **BY)
    run = await rollout.run("go", user="ann")
    fork, same = [await arms[arm].fork(run.id, at=1) for arm in ("new", "old")]
    await rollout.worker(until_idle=True)
    assert [(each.header.release, dict(each.header.arms)) for each in (fork, same)] == [
        ("2", {}), ("1", {"billing": "old"}),
    ]  # fmt: skip
    assert [(each.arm, each.open, each.runs) for each in await rollout.results()] == [("old", 2, 0), ("new", 1, 0)]


async def test_open_runs_count_whatever_the_weights_were_meanwhile(store):
    """As long as one is open its release is needed; results are those since the start, of arms without weight too."""
    rollout = Rollout("billing", two_versions(store))
    await rollout.start({"old": 100}, **BY)
    waiting = [await rollout.run("go") for _ in range(2)]
    await rollout.base.approve(waiting[0].id, waiting[0].pending[0].call_id)
    await rollout.resume(waiting[0].id)
    for old in (0, 10, 0):
        await rollout.control.set_weights({"old": old, "new": 100 - old}, **BY)
    assert [(each.arm, each.open, each.runs) for each in await rollout.results()] == [("old", 1, 1), ("new", 0, 0)]
    await rollout.control.kill(**BY)
    await rollout.start({"new": 100}, **BY)
    assert [(each.arm, each.open, each.runs) for each in await rollout.results()] == [("old", 1, 0), ("new", 0, 0)]


def test_a_release_whose_executions_raise_errors_is_rolled_back():
    """Its runs stay open, for a repaired worker. Runs that wait for a person, or for a worker, roll nothing back."""

    async def watch(new_reply, has_worker: bool):
        clock = VirtualClock()
        store = MemoryStore(clock=clock)

        @tool(requires_approval=True)
        def pay() -> str:
            """Pay."""
            return "paid"

        replies = {"1": None, "2": new_reply}
        arms = {
            version: make_agent(store, version, reply, clock=clock, tools=[pay]) for version, reply in replies.items()
        }
        rollout = Rollout("billing", arms)
        await rollout.start({"1": 0, "2": 100}, rules=["failures 5%"], **BY)
        for _ in range(20):
            await rollout.submit("go")
        found = []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(rollout.worker if has_worker else partial(watch_rollout, rollout.control))
            for _ in range(2):
                await anyio.sleep(50)
                new = (await rollout.results())[1]
                found.append((new.weight, new.open, new.stalled, new.runs))
            tasks.cancel_scope.cancel()
        return found

    def breaks(_request):
        raise ValueError("a bug")

    def asks(_request):
        return say("", call("pay"))

    assert run_virtual(partial(watch, breaks, True)) == [(100, 20, 0, 0), (0, 20, 20, 0)]
    assert run_virtual(partial(watch, breaks, False)) == [(100, 20, 0, 0), (100, 20, 20, 0)]
    assert run_virtual(partial(watch, asks, True)) == [(100, 20, 0, 0), (100, 20, 0, 0)]


async def test_a_run_without_an_event_has_an_outcome():
    """Its first execution may end before its first event is stored."""
    store = MemoryStore()
    rollout = Rollout("billing", {"old": make_agent(store, "1"), "new": make_agent(store, "2")})
    await rollout.start({"old": 0, "new": 100}, **BY)
    await rollout.submit("go", id="tried")
    reader = OutcomeReader("billing", store)
    [summary] = await store.runs()
    assert summary.version == 0
    assert (await reader._look_up(summary)).outcome.failed


async def test_every_store_tells_a_run_that_is_tried_again_from_one_that_waits_for_a_worker(store, monkeypatch):
    """By the time from which it is tried again: only the first is the fault of its release."""
    monkeypatch.setattr("agentfsm.agents.worker.BACKOFF_S", 60.0)
    monkeypatch.setattr("agentfsm.releases.arm_results._STALLED_S", -60.0)

    def breaks(_request):
        raise ValueError("a bug")

    rollout = Rollout("billing", {"old": make_agent(store, "1"), "new": make_agent(store, "2", breaks)})
    plan = (await rollout.start({"old": 0, "new": 100}, **BY)).plan
    await rollout.submit("go", id="tried")
    await rollout.worker(until_idle=True)
    await rollout.submit("go", id="queued")
    plan = attrs.evolve(plan, since=dict.fromkeys(plan.since, 0.0))  # whatever the clocks of store and process say
    outcomes = await OutcomeReader("billing", store).read(plan, failing_at=await store.now())
    assert [(each.run_id, each.failed) for each in outcomes["new"]] == [("tried", True)]


async def test_the_runs_of_an_arm_are_cancelled_if_asked_for(store):
    """`abort_runs` ends the open runs of the arms that a change has left without weight, and no others."""
    rollout = Rollout("billing", two_versions(store))
    before = await rollout.start({"old": 0, "new": 100}, **BY)
    await rollout.run("go", id="new")
    after = await rollout.control.kill(**BY)
    await rollout.run("go", id="old")
    assert await abort_runs(store, before.plan, after.plan, by="ann", message="bad") == 1
    assert [(await rollout.base.load(each)).state for each in ("new", "old")] == [State.ERROR, State.ACT]


async def test_a_release_does_not_change(tmp_path):
    """The same version with other contents is refused, by dimension; an evaluation may be added."""
    store = MemoryStore()
    first = make_agent(store, "1")
    release = Release.of(first, code="abc")
    await save_release(store, release)
    await save_release(store, release)
    assert await load_release(store, "billing", "1") == release
    with pytest.raises(MisuseError, match="has no release '7'; saved are: 1"):
        await load_release(store, "billing", "7")
    changed = Release.of(first.with_(limits=Limits(turns=3), instructions="Be brief."), code="abd")
    assert {name: len(words) for name, words in release.diff(changed).items()} == {
        "code": 1, "prompts": 1, "configuration": 2,
    }  # fmt: skip
    assert release.diff(changed)["code"] == ("abc -> abd",)
    with pytest.raises(ConflictError, match=r"release '1' of agent 'billing' was saved with other contents .code: abc"):
        await save_release(store, changed)


async def test_a_release_covers_its_sub_agents_and_refuses_a_prompt_that_may_change(tmp_path):
    """A changed agent below is a changed tool; an active version of a prompt would change the release afterwards."""
    below = Agent(ScriptedModel("x"), name="helper", instructions="One.")
    one, two = [
        make_agent(MemoryStore(), "1", tools=[each.as_tool()]) for each in (below, below.with_(instructions="Two."))
    ]
    assert list(Release.of(one).diff(Release.of(two))) == ["tools"]
    (tmp_path / "greeting").mkdir()
    (tmp_path / "greeting" / "1.0.0.md").write_text("+++\n+++\nGreet.")
    prompts = Prompts(tmp_path)
    fixed = Release.of(one.with_(instructions=prompts["greeting", "1.0.0"]))
    assert fixed.prompts["greeting"].startswith("1.0.0#")
    with pytest.raises(MisuseError, match=r"choose the version, prompts\['greeting', '1.0.0'\]"):
        Release.of(one.with_(instructions=prompts["greeting"]))
    with pytest.raises(MisuseError, match="has no version to name the release"):
        Release.of(below)


def test_arms_that_cannot_be_told_apart_are_refused():
    """Their versions name the releases, their name finds the runs, and one store has them all."""
    store = MemoryStore()
    one = make_agent(store, "1")
    for arms, text in [
        ({}, "give the agents by arm"),
        ({"a": one, "b": one.with_(version="")}, "the agent of arm 'b' has no version to name its release"),
        ({"a": one, "b": one}, "two arms have version '1'"),
        ({"a": one, "b": one.with_(name="other", version="2")}, "give all arms one name"),
        ({"a": one, "b": make_agent(SQLiteStore("unused.db"), "2")}, r"write Rollout\(..., store=...\)"),
    ]:
        with pytest.raises(MisuseError, match=text):
            Rollout("billing", arms)
    with pytest.raises(MisuseError, match=r"name='bad name'.: give a name of 1 to 200 letters, digits"):
        Flag("bad name", store)


async def test_a_process_without_the_release_says_so():
    """At the door, with the release that it lacks and those that it has."""
    store = MemoryStore()
    rollout = make_rollout(store)
    await rollout.start({"old": 0, "new": 100}, **BY)
    with pytest.raises(MisuseError, match="does not have release '2' of agent 'billing', it has '1': deploy"):
        await Rollout("billing", {"old": make_agent(store, "1")}).run("go", user="ann")


class HandClock(VirtualClock):
    """A clock that a test sets."""

    time = 0.0

    def monotonic(self):
        return self.time


async def test_an_outage_of_the_store_keeps_the_plan(caplog):
    """What was read last counts; without it, the error is the caller's."""
    store = MemoryStore()
    clock = HandClock()
    experiment = Experiment("x", store, arms=("a", "b"), clock=clock)
    await RolloutControl("x", store).start({"a": 0, "b": 100}, **BY)
    list_records, fails = store.list_records, True

    async def shaky(*args, **options):
        if fails:
            raise StoreError("gone")
        return await list_records(*args, **options)

    store.list_records = shaky
    with pytest.raises(StoreError):
        await experiment.assign(user="ann")
    fails = False
    assert (await experiment.assign(user="ann")).arm == "b"
    fails = True
    clock.time += 2
    assert (await experiment.assign(user="ann")).arm == "b"
    assert "the plan that was read last is used: gone" in caplog.text


# The drill.


def test_the_drill_takes_less_than_5_minutes_with_two_workers():
    """A bad release at 5 % is rolled back by its rule, all processes follow within 10 s, and no run is lost."""

    async def drill():
        clock = VirtualClock()
        store = MemoryStore(clock=clock)

        def make(model, version):
            return Agent(
                model, name="billing", version=version, store=store, clock=clock, limits=Limits(model_retries=0)
            )

        def deploy():
            """Return the roll-out as another process has it."""

            def fails(_request):
                raise ModelError("400: no such parameter")

            good, bad = FunctionModel(lambda _: "fine"), FunctionModel(fails)
            return Rollout("billing", {"old": make(good, "1"), "new": make(bad, "2")})

        door = deploy()
        await door.start({"old": 95, "new": 5}, rules=["failures 10%"], **BY)
        began, submitted = clock.now(), []
        async with anyio.create_task_group() as tasks:
            for _ in range(2):
                tasks.start_soon(deploy().worker)
            while (await door.control.log())[-1].action != "auto_back" and clock.now() < began + 300:
                for _ in range(5):
                    submitted.append(await door.submit("go", user=f"user {len(submitted)}"))
                await anyio.sleep(0.5)
            back = (await door.control.log())[-1]
            await anyio.sleep(10)
            after = [await door.submit("go", user=f"late {number}") for number in range(100)]
            await anyio.sleep(30)
            tasks.cancel_scope.cancel()
        runs = [await door.base.load(each.id) for each in submitted]
        return began, back, runs, after, clock.now()

    began, back, runs, after, ended = run_virtual(drill)
    assert ended - began < 300
    assert (back.by, back.plan.weights) == ("agentfsm", {"old": 100, "new": 0})
    assert back.reason.startswith("failures 10% after 20: 2")
    assert {run.header.release for run in after} == {"1"}
    assert all(run.is_over for run in runs)
    assert {run.header.release for run in runs if run.state is State.ERROR} == {"2"}
