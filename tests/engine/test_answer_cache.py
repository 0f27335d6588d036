"""The answer cache: whose answers are repeated, whose never, and what happens when many ask at once."""

import json
from collections import Counter
from functools import partial

import anyio
import attrs
import pytest

from agentfsm import (
    Agent,
    AnswerCache,
    Label,
    Limits,
    MisuseError,
    ModelRetry,
    Permissions,
    Rule,
    RunContext,
    Settings,
    State,
    StoreError,
    TextDelta,
    Usage,
    tool,
)
from agentfsm.context import Summarise, TrimResults
from agentfsm.core.events import AnswerDrafted
from agentfsm.guards import Guard, ask, exit_filter
from agentfsm.logins import APIKey, Login, MemoryTokens
from agentfsm.memory import Memory
from agentfsm.ports import FinishReason
from agentfsm.reflection import Reflector
from agentfsm.stores import MemoryStore
from agentfsm.testing import FunctionModel, ScriptedModel, call, say

QUESTION = "When does the office open?"
PATIENT = Limits(seconds=1e6)
FOR_ANN = {"user": "ann", "roles": ["staff"], "tenant": "acme", "release": "r1", "arms": {"tone": "a"}}


@tool(read_only=True, cacheable=True)
async def opening_hours() -> str:
    """Look up the opening hours."""
    return "9 to 17"


@tool(read_only=True, cacheable=True, reads_private=True)
async def calendar() -> str:
    """Read the user's calendar."""
    return "Dentist at 9."


@tool(read_only=True)
async def share_price() -> str:
    """Look up the price of the share, which changes all the time."""
    return "17"


class Office(FunctionModel):
    """Looks something up, and then says how often it was asked."""

    name = "office"

    def __init__(self, looked_up="opening_hours"):
        self.answers = 0
        super().__init__(self.answer)
        self.looked_up = looked_up

    def answer(self, request):
        if len(request.messages) == 1 and self.looked_up:
            return say("", call(self.looked_up))
        self.answers += 1
        return f"Answer {self.answers}."


def office(looked_up="opening_hours", *, store=None, cache=None, **more):
    return Agent(
        Office(looked_up),
        tools=[opening_hours, calendar, share_price],
        store=store or MemoryStore(),
        answer_cache=cache or AnswerCache(),
        **more,
    )


async def test_the_same_question_is_answered_without_the_model(store):
    """The hit is a run of its own, in its own journal, with the answer's source; it costs nothing."""
    agent = office(store=store)
    first = await agent.run(QUESTION, **FOR_ANN)
    again = await agent.run(f"  {QUESTION}\n", **FOR_ANN)
    assert first.output == again.output == "Answer 1."
    assert (first.answered_from, again.answered_from.run_id) == (None, first.id)
    assert again.answered_from.at == first.updated_at
    assert (again.usage, again.turn, again.calls) == (Usage(), 1, ())
    loaded = await agent.load(again.id)
    assert (loaded.answered_from, loaded.state) == (again.answered_from, State.DONE)
    assert (await agent.replay(again.id)).is_faithful
    third = await agent.run(QUESTION, **FOR_ANN)
    assert third.answered_from.run_id == first.id


async def test_a_reader_of_the_stream_gets_the_answer():
    """The text comes in one piece."""
    agent = office()
    await agent.run(QUESTION, **FOR_ANN)
    async with agent.stream(QUESTION, **FOR_ANN) as stream:
        text = [event.text async for event in stream if isinstance(event, TextDelta)]
    assert (text, stream.run.output) == (["Answer 1."], "Answer 1.")


@pytest.mark.parametrize("scope", ["user", "tenant"])
@pytest.mark.parametrize(
    ("other", "shared"),
    [
        ({"user": "bob"}, "tenant"),
        ({"user": None}, "tenant"),
        ({"tenant": "globex"}, None),
        ({"tenant": None}, None),
        ({"roles": ["staff", "admin"]}, None),
        ({"roles": []}, None),
        ({"clearance": "internal"}, None),
        ({"release": "r2"}, None),
        ({"arms": {"tone": "b"}}, None),
        ({"metadata": {"shop": 7}}, None),
        ({"labels": ["untrusted"]}, None),
        ({"settings": Settings(temperature=0)}, None),
        ({"session": "s1"}, None),
    ],
    ids=str,
)
async def test_nothing_leaks_to_other_runs(scope, other, shared):
    """One fact of the run that differs, and the model is asked; users of a tenant share only if that is declared."""
    agent = office(cache=AnswerCache(scope=scope))
    first = await agent.run(QUESTION, **FOR_ANN)
    run = await agent.run(QUESTION, **{**FOR_ANN, **other})
    assert (run.answered_from is not None) == (shared == scope)
    assert (await agent.run(QUESTION, **FOR_ANN)).answered_from.run_id == first.id


@pytest.mark.parametrize(
    "change",
    [
        {"version": "2"},
        {"instructions": "Be polite."},
        {"limits": Limits(turns=9)},
        {"permissions": Permissions(deny=(Rule("share_price"),))},
        {"tools": [opening_hours]},
        {"reminder": "No jokes."},
        {"name": "clerk"},
        {"context": [TrimResults(), Summarise(keep=2)]},
        {"output_validators": [str.upper]},
    ],
    ids=lambda change: next(iter(change)),
)
async def test_another_version_of_the_agent_answers_itself(change):
    """An answer is that of one version; two agents that share a store do not share answers."""
    agent = office()
    await agent.run(QUESTION, **FOR_ANN)
    assert (await agent.with_(**change).run(QUESTION, **FOR_ANN)).answered_from is None


@pytest.mark.parametrize(
    "options",
    [
        {"cacheable": False},
        {"fresh_s": 1e-9},
        {"requires_approval": True},
        {"requires_approval": lambda _: False},
        {"cost_usd": 0.5},
        {"timeout_s": 5},
        {"tags": ["slow"]},
    ],
    ids=str,
)
async def test_other_options_of_a_tool_are_another_question(options):
    """An approval, a cost or an age that is declared now holds for the next run, also if it was not declared before."""
    agent = office()
    await agent.run(QUESTION, **FOR_ANN)
    for _ in range(2):  # the same declarations, made again
        same = tool(read_only=True, cacheable=True)(opening_hours.function)
        run = await agent.with_(tools=[same, calendar, share_price]).run(QUESTION, **FOR_ANN)
        assert run.answered_from is not None
    changed = tool(read_only=True, **{"cacheable": True, **options})(opening_hours.function)
    run = await agent.with_(tools=[changed, calendar, share_price]).run(QUESTION, **FOR_ANN)
    assert run.answered_from is None
    assert bool(run.pending) == (options.get("requires_approval") is True)


@pytest.mark.parametrize("uses", [{"gone": 1e12}, {"share_price": 1e12}, {"payroll": 1e12}, {"weather": 1.0}], ids=str)
async def test_the_tools_of_an_answer_are_checked_again(uses):
    """Whatever the key says: an answer of a tool that is gone, not cacheable, to be approved, or stale, is replaced."""
    payroll = tool(read_only=True, cacheable=True, requires_approval=True, name="payroll")(opening_hours.function)
    weather = tool(read_only=True, cacheable=True, fresh_s=60, name="weather")(opening_hours.function)
    agent = office(None).with_(tools=[share_price, payroll, weather])
    first = await agent.run(QUESTION, **FOR_ANN)
    assert (await agent.run(QUESTION, **FOR_ANN)).answered_from.run_id == first.id
    [record] = await agent.store.list_records("answer_cache")
    value = {**record.value, "uses": uses}
    await agent.store.write_record("answer_cache", record.key, value, revision=record.revision)
    second = await agent.run(QUESTION, **FOR_ANN)
    assert second.answered_from is None
    assert (await agent.run(QUESTION, **FOR_ANN)).answered_from.run_id == second.id


async def test_an_answer_that_is_rejected_now_is_not_repeated():
    """Validators see a repeated answer as they see a new one; the next answer takes its place."""
    banned = set()

    def check(text):
        if text in banned:
            raise ModelRetry("not that one")

    agent = office(output_validators=[check])
    first = await agent.run(QUESTION, **FOR_ANN)
    assert (await agent.run(QUESTION, **FOR_ANN)).answered_from.run_id == first.id
    banned.add(first.output)
    second = await agent.run(QUESTION, **FOR_ANN)
    assert (second.output, second.answered_from) == ("Answer 2.", None)
    assert (await agent.run(QUESTION, **FOR_ANN)).answered_from.run_id == second.id


async def test_an_answer_is_repeated_under_the_same_judge_only():
    """It was accepted by its rubric; another rubric might not accept it."""
    scores = {name: {"score": 5} for name in ("completeness", "correctness", "format")}
    judgement = json.dumps({"evaluation": scores, "action": "accept"})
    model = FunctionModel(lambda _: judgement)
    agent = office(None, reflector=Reflector(model=model))
    first = await agent.run(QUESTION, **FOR_ANN)
    assert first.state is State.DONE
    same = agent.with_(reflector=Reflector(model=model))
    assert (await same.run(QUESTION, **FOR_ANN)).answered_from.run_id == first.id
    stricter = agent.with_(reflector=Reflector(model=model, rubric={"format": "Is it in verse?"}))
    assert (await stricter.run(QUESTION, **FOR_ANN)).answered_from is None


async def test_a_refusal_is_not_repeated():
    """The model may answer the next time."""
    model = FunctionModel(lambda _: say("I cannot say.", finish_reason=FinishReason.REFUSAL))
    agent = Agent(model, answer_cache=AnswerCache())
    for _ in range(2):
        run = await agent.run(QUESTION, user="ann")
        assert (run.state, run.answered_from) == (State.DONE, None)


async def test_a_deleted_run_gives_no_more_answers(store):
    """Erasure includes the copy in the cache; the next run answers in its place."""
    agent = office(store=store)
    first = await agent.run(QUESTION, **FOR_ANN)
    assert (await agent.run(QUESTION, **FOR_ANN)).answered_from.run_id == first.id
    await agent.runs.delete(first.id)
    second = await agent.run(QUESTION, **FOR_ANN)
    assert (second.output, second.answered_from) == ("Answer 2.", None)
    assert (await agent.run(QUESTION, **FOR_ANN)).answered_from.run_id == second.id


@pytest.mark.parametrize("other", ["a\fb", "a\x1cb", "a\u2028b", "a \nb", "a\r\nb", "\u00e9", "a\nb\x00"], ids=ascii)
async def test_only_blanks_at_the_ends_do_not_count(other):
    """What a model reads differently is another question."""
    agent = office(None)
    for prompt in ("a\nb", "e\u0301"):
        await agent.run(prompt, **FOR_ANN)
        assert (await agent.run(f" \t{prompt}\r\n", **FOR_ANN)).answered_from is not None
    assert (await agent.run(other, **FOR_ANN)).answered_from is None


async def test_another_server_with_the_same_model_name_answers_itself():
    """A name says nothing about the model behind another address."""
    near, far, same = Office(""), Office(""), Office("")
    near.base_url = same.base_url = "https://near.example"
    far.base_url = "https://far.example"
    agent = office(None).with_(model=near)
    await agent.run(QUESTION, **FOR_ANN)
    assert (await agent.with_(model=same).run(QUESTION, **FOR_ANN)).answered_from is not None
    assert (await agent.with_(model=far).run(QUESTION, **FOR_ANN)).answered_from is None


@attrs.frozen
class Hours:
    """A typed answer."""

    opens: int


async def test_a_typed_answer_is_repeated_as_its_type():
    """Another type is another question."""
    model = FunctionModel(lambda _: '{"opens": 9}')
    agent = Agent(model, output_type=Hours, output_mode="prompt", answer_cache=AnswerCache())
    first, again = [await agent.run(QUESTION, user="ann") for _ in range(2)]
    assert (first.output, again.output) == (Hours(9), Hours(9))
    assert again.answered_from.run_id == first.id
    other = agent.with_(output_type=dict[str, int])
    assert (await other.run(QUESTION, user="ann")).answered_from is None


async def test_private_data_stays_with_its_user():
    """An answer with private data is kept for its user, and not for a tenant."""
    shared, own = office("calendar", cache=AnswerCache(scope="tenant")), office("calendar")
    for agent, is_kept in ((shared, False), (own, True)):
        await agent.run(QUESTION, **FOR_ANN)
        run = await agent.run(QUESTION, **FOR_ANN)
        assert (run.answered_from is not None) == is_kept
        assert Label.PRIVATE in run.labels  # a hit as well: its answer has read what the other run has read
    for label in ("private", "confidential", "restricted"):
        await shared.run("Another one", labels=[label], **FOR_ANN)
        assert (await shared.run("Another one", labels=[label], **FOR_ANN)).answered_from is None


async def test_what_a_user_sees_with_a_login_stays_with_that_user():
    """An answer made with the account of one user is not kept for others of the tenant."""
    login = Login("http://127.0.0.1:9", APIKey(tokens=MemoryTokens()), allow_private=True)
    await login.store_key("a-key", tenant="acme", user="ann")

    @tool(read_only=True, cacheable=True, login=login)
    async def inbox() -> str:
        """Read the mail."""
        return "Dentist at 9."

    for scope, is_kept in (("tenant", False), ("user", True)):
        agent = office("inbox", cache=AnswerCache(scope=scope)).with_(tools=[inbox])
        await agent.run(QUESTION, **FOR_ANN)
        assert ((await agent.run(QUESTION, **FOR_ANN)).answered_from is not None) == is_kept


async def refuse():
    raise ValueError("closed")


@pytest.mark.parametrize(
    "looked_up",
    [share_price, tool(read_only=True, cacheable=True, name="broken")(refuse)],
    ids=["not cacheable", "failed"],
)
async def test_answers_with_such_calls_are_not_kept(looked_up):
    """A tool that does not say so may change at any time; and an apology for a failure is not repeated."""
    agent = office(looked_up.name).with_(tools=[looked_up])
    for _ in range(2):
        run = await agent.run(QUESTION, **FOR_ANN)
        assert (run.state, run.answered_from) == (State.DONE, None)


async def test_answers_in_which_people_had_a_part_are_not_kept():
    """An approval of one run is not an approval of the next; nor is an answer that took a second input."""
    agent = office(guards=[Guard(ask("opening_hours"))])
    for _ in range(2):
        run = await agent.run(QUESTION, **FOR_ANN)
        assert run.pending
        await agent.approve(run.id, "t1.0", by="bob")
        run = await agent.resume(run.id)
        assert (run.state, run.answered_from) == (State.DONE, None)
    agent = office()
    for _ in range(2):
        run = agent.start(QUESTION, **FOR_ANN)
        run = await agent.step(run)
        await agent.runs.send(run.id, "And on Sundays?")
        run = await agent.resume(run.id)
        assert (run.state, run.answered_from) == (State.DONE, None)


async def test_a_run_that_waits_lets_others_go_on():
    """Its answer may take days: the next run with the question does not wait for it."""
    agent = office(guards=[Guard(ask("opening_hours"))], cache=AnswerCache(wait_s=1e9))
    first = await agent.run(QUESTION, **FOR_ANN)
    second = await agent.run(QUESTION, **FOR_ANN)
    assert first.pending
    assert second.pending


@attrs.define(eq=False)
class SetClock:
    """A clock that stands until it is set."""

    time: float = 1_000_000.0

    def now(self):
        return self.time

    def monotonic(self):
        return self.time


async def test_an_answer_is_repeated_as_long_as_its_data_are_fresh():
    """The shortest of the times of the cache and of the tools counts, from the start of the call."""
    clock = SetClock()
    weather = tool(read_only=True, cacheable=True, fresh_s=60, name="weather")(opening_hours.function)
    agent = office("weather", store=MemoryStore(clock=clock), clock=clock).with_(tools=[weather])
    first = await agent.run(QUESTION, **FOR_ANN)
    clock.time += 59
    assert (await agent.run(QUESTION, **FOR_ANN)).answered_from.run_id == first.id
    clock.time += 1
    renewed = await agent.run(QUESTION, **FOR_ANN)
    assert renewed.answered_from is None
    plain = office(store=MemoryStore(clock=clock), clock=clock, cache=AnswerCache(ttl_s=10))
    await plain.run(QUESTION, **FOR_ANN)
    clock.time += 10
    assert (await plain.run(QUESTION, **FOR_ANN)).answered_from is None


async def run_many(agents, **start):
    """Ask all agents the question at once; return how many answered themselves."""
    runs = []

    async def one(agent):
        runs.append(await agent.run(QUESTION, **{**FOR_ANN, **start}))

    async with anyio.create_task_group() as tasks:
        for agent in agents:
            tasks.start_soon(one, agent)
    assert {run.state for run in runs} == {State.DONE}
    return Counter(run.answered_from is None for run in runs)[True]


async def test_a_resumed_run_is_answered_from_the_cache(store):
    """A worker that finds a run before its first request searches the cache, as the first one would have."""
    first = await office(store=store).run(QUESTION, **FOR_ANN)
    agent = office(store=store)
    run = await agent.step(agent.start(QUESTION, **FOR_ANN))
    assert (await office(store=store).resume(run.id)).answered_from.run_id == first.id


async def test_runs_whose_answers_are_not_kept_do_not_queue():
    """Once the first has ended, all go on together, and the next ones at once."""
    store = MemoryStore()
    agents = [office("share_price", store=store) for _ in range(4)]
    assert await run_many(agents) == 4
    [record] = await store.list_records("answer_cache")
    assert record.value == {}


async def test_a_run_that_is_cut_off_leaves_the_question_to_another(store):
    """Its claim is withdrawn: the run that waits takes it over without waiting for it to expire."""
    started, waiting = anyio.Event(), anyio.Event()

    async def never(_):
        started.set()
        await anyio.sleep_forever()

    cache, results = AnswerCache(wait_s=1e9), []
    slow = Agent(FunctionModel(never), store=store, answer_cache=cache)
    quick = Agent(FunctionModel(lambda _: "quick"), store=store, answer_cache=cache)
    scope = anyio.CancelScope()

    async def cut_off():
        with scope:
            await slow.run(QUESTION, user="ann")

    async def wait():
        run = await quick.step(quick.start(QUESTION, user="ann"))
        waiting.set()
        results.append(await quick.finish(run))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(cut_off)
        await started.wait()
        tasks.start_soon(wait)
        await waiting.wait()
        scope.cancel()
    assert (results[0].output, results[0].answered_from) == ("quick", None)


async def test_a_claim_of_a_dead_worker_expires():
    """Nobody has withdrawn it; when its time is up, the next run answers, and its answer is kept."""
    clock = SetClock()
    store = MemoryStore(clock=clock)
    agent = office(store=store, clock=clock, cache=AnswerCache(wait_s=0))
    await agent.run(QUESTION, **FOR_ANN)
    [record] = await store.list_records("answer_cache")
    claim = {"claimed_by": "a dead run"}
    await store.write_record("answer_cache", record.key, claim, revision=record.revision, expires_at=clock.time + 30)
    assert (await agent.run(QUESTION, **FOR_ANN)).answered_from is None
    assert (await store.read_record("answer_cache", record.key)).value == claim
    clock.time += 30
    second = await agent.run(QUESTION, **FOR_ANN)
    assert (await agent.run(QUESTION, **FOR_ANN)).answered_from.run_id == second.id


@pytest.mark.parametrize("is_claimed", [False, True])
async def test_an_answer_that_took_long_is_kept(is_claimed):
    """Its claim has expired by then; it is kept all the same, unless another run has claimed the question since."""
    clock = SetClock()
    store = MemoryStore(clock=clock)

    async def think_long(_):
        clock.time += 100
        if is_claimed:
            [key] = [record.key for record in store_claims]
            await store.write_record("answer_cache", key, {"claimed_by": "another"}, revision=0)
        return "At last."

    agent = Agent(FunctionModel(think_long), store=store, clock=clock, answer_cache=AnswerCache(), limits=PATIENT)
    run = await agent.step(agent.start(QUESTION, user="ann"))
    store_claims = []

    async def remember(kind, key, value, **more):
        record = await MemoryStore.write_record(store, kind, key, value, **more)
        store_claims[:] = [record]
        return record

    store.write_record = remember
    run = await agent.finish(run)
    assert run.output == "At last."
    [record] = await store.list_records("answer_cache")
    assert record.value.get("answer") == (None if is_claimed else "At last.")


async def test_changed_and_huge_texts_are_not_kept():
    """A text that guards have changed is that of its run; and a record has a largest size."""
    mail = Agent(FunctionModel(lambda _: "Mail ann@example.org"), answer_cache=AnswerCache(), guards=[exit_filter()])
    huge = Agent(FunctionModel(lambda _: "x" * 1_100_000), answer_cache=AnswerCache())
    for agent in (mail, huge):
        for _ in range(2):
            run = await agent.run(QUESTION, user="ann")
            assert (run.state, run.answered_from) == (State.DONE, None)


class Broken(MemoryStore):
    """A store whose records fail, or hang."""

    def __init__(self, fault, after=0):
        super().__init__()
        self.fault, self.left = fault, after

    async def _fail(self):
        if self.left:
            self.left -= 1
        elif self.fault == "fails":
            raise StoreError("away")
        elif self.fault == "hangs":
            await anyio.sleep_forever()

    async def read_record(self, kind, key):
        await self._fail()
        return await super().read_record(kind, key)

    async def write_record(self, kind, key, value, *, revision, expires_at=None):
        await self._fail()
        return await super().write_record(kind, key, value, revision=revision, expires_at=expires_at)


@pytest.mark.parametrize("after", [0, 1, 2])
@pytest.mark.parametrize("fault", ["fails", "hangs"])
async def test_without_its_store_a_run_goes_on(fault, after, monkeypatch, caplog):
    """Each operation of the store may fail or never end: the run is answered by the model, and the log says it."""
    monkeypatch.setattr("agentfsm.engine.execution.answer_cache.STORE_TIMEOUT_S", 0.01)
    agent = office(cache=AnswerCache(store=Broken(fault, after)))
    run = await agent.run(QUESTION, **FOR_ANN)
    assert (run.output, run.answered_from) == ("Answer 1.", None)
    assert "answer_cache_failed" in caplog.text


async def test_a_record_of_another_program_is_left_alone():
    """It is neither an answer nor a claim."""
    agent = office()
    first = await agent.run(QUESTION, **FOR_ANN)
    [record] = await agent.store.list_records("answer_cache")
    for value in (["x"], {**record.value, "labels": ["secret"]}):
        record = await agent.store.write_record("answer_cache", record.key, value, revision=record.revision)
        run = await agent.run(QUESTION, **FOR_ANN)
        assert (run.output != first.output, run.answered_from) == (True, None)


class Busy(MemoryStore):
    """A store in which an input for a run arrives while its answer is read from the cache."""

    send = None

    async def read_record(self, kind, key):
        if self.send is not None:
            await self.send()
        return await super().read_record(kind, key)


async def test_input_that_forestalls_the_end_is_answered():
    """The repeated answer is then a draft: the run goes on with the new input, and the model is asked."""
    store = Busy()
    agent = office(store=store)
    await agent.run(QUESTION, **FOR_ANN)
    run = agent.start(QUESTION, **FOR_ANN)
    store.send = partial(agent.runs.send, run.id, "And on Sundays?")
    run = await agent.finish(run)
    assert (run.output, run.answered_from) == ("Answer 2.", None)
    [drafted] = [each for each in await agent.history(run.id) if isinstance(each, AnswerDrafted)]
    assert drafted.answered_from is not None


def test_misuse_is_said_at_once():
    """Before a run."""
    with pytest.raises(MisuseError, match="exclude each other"):
        office(memory=Memory(":memory:"))
    with pytest.raises(MisuseError, match="an AnswerCache"):
        Agent(ScriptedModel(), answer_cache=True)
    with pytest.raises(MisuseError, match="'user' or 'tenant'"):
        AnswerCache(scope="all")
    with pytest.raises(MisuseError, match="read-only"):
        tool(cacheable=True)(refuse)
    with pytest.raises(MisuseError, match="cacheable=True"):
        tool(read_only=True, fresh_s=5)(refuse)


@tool(read_only=True, cacheable=True)
async def profile(ctx: RunContext[None]) -> str:
    """Read the profile of the user."""
    ctx.add_labels(Label.USER_DATA)
    return "Ann"


async def test_data_of_the_user_is_no_reason_to_keep_no_answer():
    """The label is ignored: an answer that used it is repeated in its scope, and brings no such label along."""
    agent = office("profile", cache=AnswerCache(scope="tenant"))
    agent = agent.with_(tools=[profile])
    first = await agent.run(QUESTION, **FOR_ANN)
    again = await agent.run(QUESTION, **{**FOR_ANN, "user": "bob"})
    assert Label.USER_DATA in first.labels
    assert (again.answered_from.run_id, dict(again.labels)) == (first.id, {})
