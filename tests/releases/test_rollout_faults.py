"""Roll-outs when things fail: unreadable runs, changes stopped half-way, dead watchers, rubbish, races."""

import anyio
import pytest

from agentfsm import (
    Agent,
    ClosedError,
    ConflictError,
    CorruptError,
    Limits,
    MisuseError,
    ModelError,
    StoreError,
    TooNewError,
    tool,
)
from agentfsm.releases import Experiment, Release, RollbackRule, Rollout, RolloutControl
from agentfsm.releases.release import save_release
from agentfsm.stores import MemoryStore, SQLiteStore
from agentfsm.testing import FunctionModel, ScriptedModel, VirtualClock, call, run_virtual, say

BY = {"by": "ann", "reason": "a test"}


def fails(_request):
    raise ModelError("400: no such parameter")


def make_rollout(store, new=None, **options):
    """Return a roll-out with two releases of the agent."""
    old = Agent(
        FunctionModel(lambda _request: "1"),
        name="billing",
        version="1",
        store=store,
        limits=Limits(model_retries=0),
        **options,
    )
    return Rollout("billing", {"old": old, "new": old.with_(model=FunctionModel(new or (lambda _: "2")), version="2")})


# Rules as text, in which the log keeps them.


@pytest.mark.parametrize(
    "rule", ["cost>0.00001 5%", "time>1000000 5%", "time>86400.5 5%", "failures 0.0001%", "ratings<4.123456789 12.34%"]
)
async def test_a_rule_of_any_size_can_be_read_back(rule):
    """A roll-out whose log could not be read would be stuck for ever: entries are never changed."""
    store = MemoryStore()
    await make_rollout(store).start({"old": 50, "new": 50}, rules=[rule], **BY)
    rollout = make_rollout(store)
    [entry] = await rollout.control.log()
    assert entry.plan.rules == (RollbackRule.parse(rule),)
    assert str(entry.plan.rules[0]) == f"{rule} after 20"
    assert (await rollout.run("go", user="ann")).output in {"1", "2"}
    assert (await rollout.control.kill(**BY)).number == 2


# Runs that cannot be read.


@pytest.mark.parametrize("error", [CorruptError("a line is gone"), TooNewError("format 9")], ids=repr)
def test_one_run_that_cannot_be_read_keeps_no_arm_from_being_rolled_back(error, caplog):
    """It counts for no arm, which is told once; the rules and the results count the others."""

    async def watch():
        clock = VirtualClock()
        store = MemoryStore(clock=clock)
        rollout = make_rollout(store, fails, clock=clock)
        await rollout.start({"old": 0, "new": 100}, rules=["failures 5%"], **BY)
        for number in range(21):
            await rollout.run("go", id=f"r{number}")
        read = store.read

        async def read_or_fail(run_id, *args, **options):
            if run_id == "r7":
                raise error
            return await read(run_id, *args, **options)

        store.read = read_or_fail
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(rollout.worker)
            await anyio.sleep(20)
            tasks.cancel_scope.cancel()
        return await rollout.control.newest(), await rollout.results()

    newest, results = run_virtual(watch)
    assert (newest.action, newest.reason) == ("auto_back", "failures 5% after 20: 20 of 20 runs are bad (100.0%)")
    assert [(each.arm, each.runs, each.failed) for each in results] == [("old", 0, 0), ("new", 20, 20)]
    told = [each.getMessage() for each in caplog.records if each.name == "agentfsm.releases" and "r7" in each.message]
    assert set(told) == {f"roll-out 'billing': run r7 cannot be read, and counts for no arm: {error}"}


# Changes and watchers that are stopped half-way.


async def test_a_start_that_was_stopped_half_way_is_started_again():
    """The releases are saved, and there is no entry: nobody has got another arm, and the next start is the first."""
    store = MemoryStore()
    rollout = make_rollout(store)
    write = store.write_record

    async def write_releases_only(kind, *args, **options):
        if kind != "release":
            raise StoreError("the power is out")
        return await write(kind, *args, **options)

    store.write_record = write_releases_only
    with pytest.raises(StoreError, match="the power is out"):
        await rollout.start({"old": 0, "new": 100}, **BY)
    store.write_record = write
    later = make_rollout(store)
    assert (await later.run("go", user="ann")).output == "1"
    assert (await later.start({"old": 0, "new": 100}, **BY)).number == 1
    assert (await later.run("go", user="ann")).output == "2"


def test_another_worker_takes_over_the_checks_of_a_dead_one():
    """Of two that check at once one does; when it is gone the other rolls back, once."""

    async def watch():
        clock = VirtualClock()
        store = MemoryStore(clock=clock)
        first, second = [make_rollout(store, fails, clock=clock) for _ in range(2)]
        await first.start({"old": 0, "new": 100}, rules=["failures 5%"], **BY)
        async with anyio.create_task_group() as living:
            async with anyio.create_task_group() as dying:
                dying.start_soon(first.worker)
                await anyio.sleep(1)
                living.start_soon(second.worker)
                await anyio.sleep(9)
                dying.cancel_scope.cancel()  # without a word to the other
            for _ in range(25):
                await second.submit("go")
            await anyio.sleep(30)
            living.cancel_scope.cancel()
        return await second.control.log()

    assert [each.action for each in run_virtual(watch)] == ["start", "auto_back"]


async def test_a_worker_ends_with_the_error_of_its_store(tmp_path):
    """As the worker of an agent does, and not with a group of errors."""
    store = SQLiteStore(tmp_path / "runs.db")
    rollout = make_rollout(store)
    await rollout.save_releases()
    await store.aclose()
    with pytest.raises(ClosedError):
        await rollout.worker(until_idle=True)


# Races.


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
async def test_of_two_processes_that_save_a_release_at_once(tmp_path, kind):
    """The same one is saved once; of two with other contents one is refused, whichever was slower."""
    store = MemoryStore() if kind == "memory" else SQLiteStore(tmp_path / "runs.db")
    agent = make_rollout(store).base
    same, other = Release.of(agent), Release.of(agent.with_(instructions="Be brief."))
    refused = []

    async def save(release):
        try:
            await save_release(store, release)
        except ConflictError as error:
            refused.append(str(error))

    async with anyio.create_task_group() as tasks:
        for release in (same, other, same, other):
            tasks.start_soon(save, release)
    assert len(refused) == 2
    assert all("was saved with other contents (prompts: " in each for each in refused)
    await store.aclose()


async def test_of_many_changes_at_once_each_is_an_entry_or_refused():
    """Whoever is refused reads the change that was faster, and nothing is lost between."""
    store = MemoryStore()
    await RolloutControl("x", store).start({"a": 100, "b": 0}, **BY)
    ended = []

    async def change(number):
        try:
            ended.append(
                (await RolloutControl("x", store).set_weights({"a": 99 - number, "b": 1 + number}, **BY)).number
            )
        except ConflictError as error:
            ended.append(str(error))

    async with anyio.create_task_group() as tasks:
        for number in range(8):
            tasks.start_soon(change, number)
    numbers = [each for each in ended if isinstance(each, int)]
    assert [each.number for each in await RolloutControl("x", store).log()] == [1, *sorted(numbers)]
    assert all("was changed at the same moment (" in each for each in ended if isinstance(each, str))


# Runs that a tool starts.


async def test_a_run_that_a_tool_starts_is_that_of_the_user_of_its_caller():
    """It has the arm of that user, and its id is derived from the call, so that a repeated call begins no other."""
    store = MemoryStore()
    rollout = make_rollout(store)
    await rollout.start({"old": 50, "new": 50}, **BY)

    @tool(idempotent=True)
    async def bill() -> str:
        """Bill."""
        run = await rollout.run("go")
        return f"{run.id} {run.header.user} {run.header.tenant} {run.output}"

    caller = Agent(
        ScriptedModel(say("", call("bill")), "done", say("", call("bill")), "done"), tools=[bill], store=store
    )
    for user in ("ann", "bob"):
        run = await caller.run("go", user=user, tenant="acme")
        run_id, *rest, output = run.messages[-2].content.split()
        assert rest == [user, "acme"]
        assert (await rollout.run("go", user=user, tenant="acme")).output == output
        assert (await rollout.resume(run_id)).output == output
        assert run_id.startswith(run.id)


# Rubbish.


@pytest.mark.parametrize("arm", ["", " ", 5])
async def test_an_arm_has_a_name(arm):
    """The log keeps it as text, so what is no text would come back as another arm."""
    control = RolloutControl("x", MemoryStore())
    with pytest.raises(MisuseError, match=r"weights=.*give a string that is not empty"):
        await control.start({"a": 50, arm: 50}, **BY)
    assert await control.log() == ()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"rules": ["failures 5%"]}, "an experiment without releases has none"),
        ({"releases": {"a": "1"}, "agent": "billing"}, "'b' has a weight or a release, but not both"),
        ({"weights": {"a": 50, "holdout": 50}}, "cannot be called 'holdout'"),
        ({"weights": {}}, "add up to"),
        ({"unit": "tenant"}, "give 'user', 'session' or 'run'"),
        ({"holdout": float("nan")}, "a number from 0 to 50"),
    ],
)
async def test_an_experiment_with_a_mistake_is_not_started(options, text):
    """And can be started without it afterwards."""
    control = RolloutControl("x", MemoryStore())
    with pytest.raises(MisuseError, match=text):
        await control.start(**{"weights": {"a": 50, "b": 50}, **BY, **options})
    assert (await control.start({"a": 50, "b": 50}, **BY)).number == 1


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda agent: Rollout("x", {"holdout": agent}), "cannot be called 'holdout'"),
        (lambda agent: Rollout("x", [agent]), "give the agents by arm"),
        (lambda agent: Rollout("x", {"a": "agent"}), "give the agents by arm"),
        (lambda agent: Rollout("x", {"a": agent}, evaluations={"b": None}), "there is no arm 'b'"),
        (lambda agent: Rollout("x/y", {"a": agent}), "a name of 1 to 200 letters"),
        (lambda agent: Experiment("x", agent.store, arms="ab"), "the names of the arms, each once"),
        (lambda agent: Experiment("x", agent.store, arms=["a", "a"]), "the names of the arms, each once"),
        (lambda agent: Experiment("x", agent.store, arms=["a", ""]), "not empty"),
        (lambda _agent: Experiment("x", "runs.db", arms=["a"]), "store='runs.db'"),
        (lambda agent: Release.of(agent, code=5), "code=5"),
        (lambda _agent: RollbackRule(signal="cost", share=0.1), "'cost' needs a limit"),
        (lambda _agent: RollbackRule(signal="failures", limit=3, share=0.1), "'failures' takes no limit"),
        (lambda _agent: RollbackRule(signal="failures", share=float("nan")), "a share from 0 to below 1"),
    ],
)
def test_roll_outs_and_experiments_that_make_no_sense_are_refused(make, text):
    """When they are made, before a store is asked."""
    with pytest.raises(MisuseError, match=text):
        make(make_rollout(MemoryStore()).base)


async def test_a_roll_out_chooses_the_release_itself():
    """One that the caller names would count for the arm of another."""
    rollout = make_rollout(MemoryStore())
    for start in (rollout.run, rollout.submit):
        with pytest.raises(MisuseError, match="leave release= out"):
            await start("go", release="2")


@pytest.mark.parametrize(
    ("unit", "given", "by"),
    [
        ("user", {"user": "ann", "session": "s", "run_id": "r"}, "user"),
        ("user", {"user": "", "session": "s"}, "session"),
        ("session", {"user": "ann", "session": "s"}, "session"),
        ("session", {"user": "ann", "run_id": "r"}, "run"),
        ("run", {"user": "ann", "session": "s", "run_id": "r"}, "run"),
        ("session", {"user": "ann"}, None),
        ("run", {"user": "ann", "session": "s"}, None),
    ],
)
async def test_a_unit_that_is_not_given_is_replaced_by_a_smaller_one(unit, given, by):
    """Never by a larger one, which would give all runs of a user one arm; without any it is refused."""
    for is_started in (False, True):
        experiment = Experiment("x", MemoryStore(), arms=("a", "b"), unit=unit)
        if is_started:
            await experiment.control.start({"a": 50, "b": 50}, unit=unit, **BY)
        if by is None:
            with pytest.raises(MisuseError, match=f"assigns arms by {unit}: give it"):
                await experiment.assign(**given)
        else:
            assert (await experiment.assign(**given)).unit == by


def test_a_release_lists_its_instructions_and_its_agents_below():
    """A function as its name; of two agents the changes by dimension."""
    agent = make_rollout(MemoryStore()).base

    def brief(_ctx):
        return "Be brief."

    release = Release.of(agent.with_(instructions=brief))
    assert release.prompts["instructions"].startswith("function ")
    assert "brief" in release.prompts["instructions"]
    assert list(Release.of(agent).diff(release)) == ["prompts"]
    assert Release.from_dict(release.to_dict()) == release
