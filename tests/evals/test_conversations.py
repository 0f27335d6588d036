"""Cases of several turns: texts, decisions, messages and simulated users; for agents, roll-outs and functions."""

import json

import anyio
import anyio.lowlevel
import attrs
import pytest

from agentfsm import (
    Agent,
    AssistantMessage,
    ImagePart,
    Limits,
    MisuseError,
    ModelError,
    RunContext,
    TextPart,
    ToolResult,
    Usage,
    UserMessage,
    ask_user,
    tool,
)
from agentfsm.evals import SCORERS, Case, RubricJudge, SimulatedUser, Turn, evaluate, load_suite, not_called
from agentfsm.evals.results import Evaluation
from agentfsm.flow import Flow, agent_step, step
from agentfsm.memory import Memory, build_memory_tools
from agentfsm.ports import Filter, Reply
from agentfsm.prompts import contains, not_contains
from agentfsm.releases import Rollout
from agentfsm.stores import SQLiteStore
from agentfsm.testing import FunctionModel, ScriptedModel, call, fail, say


@tool(requires_approval=True)
def refund(ctx: RunContext[list], order: int) -> str:
    """Refund an order."""
    ctx.deps.append(order)
    return "refunded"


def make_clerk(asked=None, **fields):
    """Return an agent that refunds what it is asked to, and else repeats what it has heard."""

    def think(request):
        if asked is not None:
            asked.append(request)
        last = request.messages[-1]
        if isinstance(last, ToolResult):
            return f"Done: {last.content}."
        if "refund" in last.text:
            return say("", call("refund", order=17))
        return "heard: " + "; ".join(each.text for each in request.messages if isinstance(each, UserMessage))

    return Agent(FunctionModel(think), tools=[refund], **fields)


async def play(agent, *, runs=1, deps=None, **fields):
    """Return the result of one repeat of a case."""
    return (await evaluate(agent, [Case(**fields)], runs=runs, deps=deps)).results[0]


async def test_two_turns_of_a_known_user():
    """The second text continues the conversation of the first; both are runs of the user, with a score of each."""
    agent = make_clerk()
    result = await play(
        agent,
        turns=[Turn("I am Ann.", expect=[contains("Ann")]), Turn("Who am I?", expect=[contains("Bob")])],
        user="ann",
        roles=["vip"],
        tenant="acme",
        metadata={"plan": "gold"},
        session="s1",
    )
    assert [(each.said, each.grades["outcome"].value) for each in result.conversation] == [
        ("I am Ann.", 1),
        ("Who am I?", 0),
    ]
    assert result.grades["outcome"].reason == "turn 2: contains 'Bob': 'Bob' is missing"
    first, second = [await agent.load(each.run_id) for each in result.conversation]
    assert second.answer == "heard: I am Ann.; Who am I?"
    for run in (first, second):
        header = run.header
        assert (header.user, header.roles, header.tenant, header.metadata["plan"]) == ("ann", ("vip",), "acme", "gold")
        assert header.session.startswith("s1-eval-")
    assert (result.turns, result.run_id) == (2, second.id)


@pytest.mark.parametrize(
    ("turn", "answer", "paid"),
    [
        (Turn(approve="refund"), "Done: refunded.", [17]),
        (Turn(approve="refund", arguments={"order": 18}), "Done: refunded.", [18]),
        ({"reject": "refund", "message": "too late"}, "too late", []),
    ],
)
async def test_decisions(turn, answer, paid):
    """A call is approved, also with other arguments, or rejected, and the run goes on."""
    agent, ledger = make_clerk(), []
    result = await play(agent, input="Please refund it.", turns=[turn], expect=[contains(answer)], deps=ledger)
    assert (result.passed, ledger, result.stop_reason) == (True, paid, "completed")
    again = await play(agent, input="Please refund it.", turns=[turn], expect=[contains(answer)], deps=ledger)
    assert (again.passed, again.is_kept, ledger) == (True, True, paid)


async def test_a_decision_that_nothing_waits_for():
    """The agent has not asked where it should have: the case has failed, and says what the run waits for."""
    result = await play(make_clerk(), turns=["Hello.", {"approve": "refund"}])
    assert result.grades["outcome"].reason == "turn 2 (approves refund): the run is over"
    result = await play(make_clerk(), turns=["refund it", {"reject": "pay"}, "And?"], deps=[])
    assert result.grades["outcome"].reason == "turn 2 (rejects pay): the run waits for approval of refund"
    assert len(result.conversation) == 1


async def test_answers_and_messages():
    """A text or an answer answers a question; a message arrives while the agent works."""

    def think(request):
        last = request.messages[-1]
        if isinstance(last, ToolResult):
            return f"So {last.content}."
        if last.text == "ask":
            return say("", call("ask_user", question="Which one?"))
        return ", ".join(each.text for each in request.messages if isinstance(each, UserMessage))

    agent = Agent(FunctionModel(think), tools=[ask_user])
    for reply in ("the red one", {"answer": "the red one"}):
        result = await play(agent, turns=["ask", reply, "thanks"], expect=[contains("ask, thanks")])
        assert (result.passed, [each.run_id for each in result.conversation].count(result.run_id)) == (True, 1)
        assert (await agent.load(result.conversation[0].run_id)).answer == "So the red one."
    result = await play(agent, turns=["Book a flight", {"send": "and a hotel"}], expect=[contains("and a hotel")])
    assert (result.passed, result.turns) == (True, 2)


async def test_a_history_and_files(tmp_path):
    """Messages are those of chat completions; files are parts of the first text."""
    said = [{"role": "user", "content": "I am Ann."}, {"role": "assistant", "content": "Hi."}]
    agent = make_clerk()
    for fields in ({"messages": said, "input": "Who?"}, {"messages": [*said, {"role": "user", "content": "Who?"}]}):
        result = await play(agent, **fields)
        assert (await agent.load(result.run_id)).answer == "heard: I am Ann.; Who?"
    (tmp_path / "order.txt").write_text("17 apples", encoding="utf-8")
    result = await play(agent, input="Read it.", files=[tmp_path / "order.txt", TextPart(text="!")])
    assert (await agent.load(result.run_id)).answer == "heard: Read it.\norder.txt:\n17 apples\n!"


async def test_a_turn_is_graded_as_the_run_was_after_it():
    """What comes later in the same run is not its fault; when it is graded again, too."""
    agent = make_clerk()
    asks = Turn("refund it", expect=[not_contains("Done"), contains("approve refund"), not_called("refund")])
    asks, approves = (
        attrs.evolve(asks, paths=[["refund"]]),
        Turn(approve="refund", expect=[contains("Done")], paths=[[]]),
    )
    for _again in range(2):
        result = await play(agent, turns=[asks, approves], deps=[])
        assert (result.total, [{*each.grades} for each in result.conversation]) == (1, [{"outcome", "tool_path"}] * 2)
    result = await play(agent, turns=[asks], deps=[])
    assert result.grades["outcome"].reason == "the run waits for a person"
    result = await play(
        agent, turns=["Hello", Turn("refund it", paths=[["look"]]), approves], deps=[], paths=[["refund"]]
    )
    assert result.grades["tool_path"].value == pytest.approx(2 / 3)


async def test_a_conversation_with_a_run_that_failed():
    """It has failed, although the agent answers the next text."""
    agent = Agent(ScriptedModel(fail(ModelError("down")), "fine"), limits=Limits(model_retries=0))
    result = await play(agent, turns=["one", "two"])
    assert (result.passed, "model_error: " in result.grades["outcome"].reason) == (False, True)


@pytest.mark.parametrize("kind", ["memory", "world", "recorded"])
async def test_a_conversation_whose_world_is_lost_is_begun_again(kind):
    """It was begun before, and broken off: what it had done is in no world of this call, so it is a new run, once."""
    scope, said = anyio.CancelScope(), []

    async def think(request):
        text = next(each.text for each in reversed(request.messages) if isinstance(each, UserMessage))
        said.append(text)
        if isinstance(request.messages[-1], ToolResult):
            return request.messages[-1].content
        if text == "Read." and not scope.cancel_called:
            scope.cancel()
            await anyio.lowlevel.checkpoint()
        if kind == "memory":
            read = call("recall_memory", query="Volvo")
            return say("", call("remember", text="Ann drives a Volvo") if text == "Keep." else read)
        return say("", call("keep") if text == "Keep." else call("read"))

    @tool(idempotent=True)
    def keep(ctx: RunContext[list]) -> str:
        """Keep it."""
        ctx.deps.append("Volvo")
        return "kept"

    @tool(read_only=True)
    def read(ctx: RunContext[list]) -> str:
        """Read it."""
        return ctx.deps[-1]

    memory = Memory()
    agent = Agent(FunctionModel(think), memory=memory, tools=[*build_memory_tools(memory), keep, read])
    fixtures = [{"tool": "keep", "content": "kept"}, {"tool": "read", "content": "Volvo"}]
    more = {"memory": [], "user": "ann"} if kind == "memory" else {"user": "ann", "fixtures": fixtures}
    case = Case(turns=["Keep.", "Read."], expect=[contains("Volvo")], **more)
    options = {"speed": "recorded" if kind == "recorded" else "live", "runs": 1}
    options |= {"deps": lambda _run: []} if kind == "world" else {}
    with scope:
        await evaluate(agent, [case], **options)
    assert scope.cancelled_caught
    begun = len(await agent.runs.list(Filter(purpose="eval")))
    for again in range(2):
        [result] = (await evaluate(agent, [case], **options)).results
        assert (result.passed, result.is_kept, len(result.findings)) == (True, again == 1, 1)
        assert "was lost with its process: begun again" in result.findings[0]
    assert said.count("Keep.") == 4
    assert len(await agent.runs.list(Filter(purpose="eval"))) == begun + 2
    await memory.aclose()


async def test_a_user_or_a_world_that_is_broken():
    """A function that says nothing at first, that never ends, or a world that cannot be made: not scored, and named."""
    agent, endless = make_clerk(), lambda _run: "Go on."
    result = await play(agent, turns=lambda _run: None)
    assert result.grades["outcome"].reason == "the user ended the conversation before it began"
    result = await play(agent, input="Hi.", turns=endless)
    assert (len(result.conversation), result.passed) == (101, False)
    assert result.grades["outcome"].reason == "the function of the user has not returned None in 100 turns"
    result = await play(agent, input="Hi.", deps=lambda _run: 1 / 0)
    assert result.grades["outcome"].reason == "the function of deps= raised ZeroDivisionError: division by zero"
    result = await play(lambda text: None if text == "a" else text, input="a")
    assert "the function returned NoneType: return the answer as a text" in result.grades["outcome"].reason


@pytest.mark.parametrize("kind", ["sub-agent", "flow"])
async def test_the_memory_of_the_case_reaches_the_agents_below(tmp_path, kind):
    """A sub-agent, an agent as a step, and their tools read and write it, and never that of the real user."""
    heard = []

    def think(request):
        if not isinstance(request.messages[-1], ToolResult):
            return say("", call("remember", text="Ann drives a Volvo"), call("recall_memory", query="Ann secret tea"))
        heard.append(str(request))
        return "done"

    memory = Memory(tmp_path / "memory.db")
    await memory.for_(user="ann").remember("Ann has a SECRET", importance=1.0)
    tools = build_memory_tools(Memory(tmp_path / "memory.db"))  # the same file, opened a second time
    clerk = Agent(FunctionModel(think), name="clerk", memory=memory, tools=tools)
    if kind == "flow":
        target = Flow([agent_step(clerk, prompt=lambda text: text)])
    else:
        calls = ScriptedModel(say("", call("clerk", query="What do you know?")), "done")
        target = Agent(calls, tools=[clerk.as_tool()])
    asked = {"text": "What do you know?"}
    assert (await play(target, input=asked, user="ann", memory=["Ann likes tea"])).passed
    assert [("SECRET" in each, "likes tea" in each) for each in heard] == [(False, True)]
    assert [each.item.text for each in await memory.for_(user="ann").recall("Ann Volvo")] == ["Ann has a SECRET"]
    await memory.aclose()


async def test_a_stored_session_is_continued_and_left_as_it_is():
    """The case branches off after its last run."""
    agent = make_clerk()
    await agent.run("I am Ann.", session="s1")
    result = await play(agent, turns=["Who?", "And now?"], session="s1", runs=2)
    assert (await agent.load(result.run_id)).answer == "heard: I am Ann.; Who?; And now?"
    run = await agent.run("Still there?", session="s1")
    assert run.answer == "heard: I am Ann.; Still there?"


async def test_a_memory_of_the_case(tmp_path):
    """It is apart from that of the agent, for recalls and for the tools of the memory, and its user is known."""

    def think(request):
        last = request.messages[-1]
        if isinstance(last, UserMessage) and "keep" in last.text:
            return say("", call("remember", text="Ann likes tea"))
        return request.instructions + str([each.text for each in request.messages if hasattr(each, "text")])

    noted = []

    @tool
    def remember(note: str) -> str:
        """Note something elsewhere: a tool of one's own that has the name of one of the memory."""
        noted.append(note)
        return "noted"

    memory = Memory(tmp_path / "memory.db")
    agent = Agent(FunctionModel(think), memory=memory, tools=build_memory_tools(memory))
    await memory.for_(user="ann").remember("Ann lives in Faro", slot="home town")
    known = [{"text": "Ann lives in Lagos", "slot": "home town"}]
    result = await play(agent, turns=["keep it", "Where does Ann live?"], user="ann", memory=known)
    answer = (await agent.load(result.run_id)).answer
    assert ("Lagos" in answer, "Faro" in answer) == (True, False)
    result = await play(agent, input="Where does Ann live?", user="ann")
    assert "Faro" in (await agent.load(result.run_id)).answer
    assert [each.item.text for each in await memory.for_(user="ann").recall("tea Ann")] == ["Ann lives in Faro"]
    agent = agent.with_(tools=[remember], model=ScriptedModel(say("", call("remember", note="a")), "done"))
    assert (await play(agent, input="Keep a.", user="ann", memory=[])).calls == ("remember",)
    assert noted == ["a"]
    with pytest.raises(MisuseError, match=r"has memory=, and the agent 'agent' has no Memory"):
        await play(make_clerk(), input="Who?", user="ann", memory=[])
    await memory.aclose()


async def test_a_simulated_user():
    """A model plays the user until its stop rule holds; it sees the answers, and what waits for its approval."""
    ledger = []

    def read_all(request):
        asked, decided, told = [each.text for each in request.messages[-3:]]
        return asked.startswith("(asks you to approve refund") and (decided, told) == (
            "(approves refund)",
            "Done: refunded.",
        )

    script = ScriptedModel(
        say("I am Ann.", expect=lambda request: "goal: get a refund" in request.instructions),
        say("refund it", expect="heard: I am Ann."),
        say("[APPROVE]", expect="asks you to approve refund"),
        say("[END]", expect=read_all),
    )
    user = SimulatedUser("get a refund of order 17", model=script)
    agent = make_clerk()
    result = await play(agent, turns=user, expect=[contains("refunded")], deps=ledger)
    assert [each.said for each in result.conversation] == ["I am Ann.", "refund it", "(approves refund)"]
    assert (result.passed, ledger, result.user_usd) == (True, [17], None)
    again = await play(agent, turns=[user], expect=[contains("refunded")], deps=ledger)
    assert (again.conversation, again.is_kept) == (result.conversation, True)
    script.assert_done()
    endless = SimulatedUser("talk", model=FunctionModel(lambda _request: "Go on."), max_turns=3)
    assert len((await play(agent, turns=["Hi.", endless])).conversation) == 4


async def test_a_function_as_user():
    """It gets the newest run, and is asked once for each turn; what it raises is no fault of the agent."""
    asked = []

    def next_turn(run):
        asked.append(run)
        return None if run is not None and run.header.after else "First." if run is None else Turn("Second.")

    agent = make_clerk()
    for _ in range(2):
        result = await play(agent, turns=next_turn)
        assert [each.said for each in result.conversation] == ["First.", "Second."]
    assert len(asked) == 3

    async def broken(_run):
        raise ValueError("no idea")

    result = await play(agent, turns=["Hi.", broken])
    assert result.grades["outcome"].value is None
    assert result.grades["outcome"].reason == "the function of the user raised ValueError: no idea"


async def test_a_conversation_that_was_killed(tmp_path):
    """It goes on in another process, wherever it was stopped: no text, decision or effect comes twice."""
    user = SimulatedUser("chat", model=FunctionModel(lambda request: "[END]" if len(request.messages) > 9 else "More."))
    case = Case(turns=["refund 17", {"approve": "refund"}, {"send": "quick"}, "Thanks.", user])
    ledger, whole = [], []

    class StoppedError(BaseException):
        pass

    def make(stop_at=0):
        seen = []

        def watch(request):
            seen.append(request)
            if len(seen) == stop_at:
                raise StoppedError

        agent = make_clerk(store=SQLiteStore(tmp_path / "evals.db"))
        inner = agent.model.reply

        async def reply(request, emit=None):
            watch(request)
            return await inner(request, emit)

        agent.model.reply = reply
        return agent, seen

    stop_at = 1
    while not whole:
        agent, seen = make(stop_at=2)
        async with agent:
            try:
                found = await evaluate(agent, [case], runs=1, deps=ledger, parallel=1)
                whole.append(found.results[0])
            except BaseExceptionGroup:
                assert len(seen) == 2
        stop_at += 1
        assert stop_at < 20
    [result] = whole
    assert ledger == [17]
    assert [each.said for each in result.conversation] == [
        "refund 17",
        "(approves refund)",
        "quick",
        "Thanks.",
        "More.",
    ]
    async with make()[0] as agent:
        assert [run.state async for run in agent.runs.iterate()].count("done") == 6


async def test_what_the_runs_of_a_case_are_known_by():
    """What the user says and attaches, in any process: models and functions by their names, files by their content."""

    def make(**fields):
        user = SimulatedUser("chat", model=FunctionModel(lambda _request: "[END]"))
        return Case(
            turns=[
                "Hi.",
                user,
            ],
            **fields,
        )

    assert make().id == make().id
    assert make(user="ann").list_facts() == make(user="ann").list_facts() != make().list_facts()
    images = [ImagePart.of(bytes([0] * 500 + [number])) for number in range(2)]
    one, two = [Case(input="Look.", files=[each]) for each in images]
    assert one.list_facts() != two.list_facts()
    assert Case(input="Look.").list_facts() == Case(turns=["Look."]).list_facts()


async def test_any_function_is_evaluated():
    """It gets the text, or also the request with the conversation and the user; what it raises fails its case."""

    async def app(text):
        if text == "fail":
            raise ValueError("down")
        return text.upper()

    def chat(text, request):
        heard = [each.text for each in request.messages if isinstance(each, AssistantMessage)]
        return f"{request.run.header.user} {len(heard)} {text}"

    found = await evaluate(app, [Case(input="a", expect=[contains("A")]), Case(input="fail")], runs=1)
    assert [each.passed for each in found.results] == [True, False]
    assert "the function raised ValueError: down" in found.results[1].grades["outcome"].reason
    assert (found.agent, found.model) == ("app", "function")
    found = await evaluate(chat, [Case(turns=["a", "b"], user="ann", expect=[contains("ann 1 b")])], runs=1)
    assert found.mean() == 1
    with pytest.raises(MisuseError, match=r"give an agent, a flow, a Rollout, or a function"):
        await evaluate("app", [Case(input="a")])


async def test_a_flow_and_a_roll_out():
    """A flow takes its inputs as a mapping; a roll-out chooses the arm by the user of the case."""

    @step
    def double(number: int) -> int:
        """Double it."""
        return 2 * number

    found = await evaluate(Flow([double]), [Case(input={"number": 4}, expect=[contains("8")])], runs=1)
    assert found.mean() == 1
    agents = {
        name: Agent(FunctionModel(lambda _request, n=name: n), name="bot", version=name) for name in ("one", "two")
    }
    rollout = Rollout("r", agents)
    await rollout.start({"one": 0, "two": 100}, by="ann", reason="test")
    found = await evaluate(rollout, [Case(turns=["a", "b"], user="ann", expect=[contains("two")])], runs=1)
    assert (found.mean(), found.version) == (1, "one, two")
    assert (await rollout.base.runs.header(found.results[0].run_id)).release == "two"


def test_suites_in_json_and_csv(tmp_path):
    """They say the same as one in Python; paths of files are beside the suite."""
    (tmp_path / "a.txt").write_text("text", encoding="utf-8")
    case = {"id": "a", "input": "Go, now.", "user": "ann", "tags": ["x", "y"], "metadata": {"plan": "gold"}}
    case |= {"turns": ["more", {"approve": "pay"}], "max_steps": 3, "files": ["a.txt"], "expect": [{"contains": "1"}]}
    (tmp_path / "one.json").write_text(json.dumps({"cases": [case]}), encoding="utf-8")
    (tmp_path / "one.csv").write_text(
        "id,input,user,tags,metadata.plan,turns,max_steps,files,expect,answer\n"
        'a,"Go, now.",ann,"x, y",gold,"[""more"", {""approve"": ""pay""}]",3,a.txt,"[{""contains"": ""1""}]",\n',
        encoding="utf-8",
    )
    one = load_suite(tmp_path / "one.json")
    assert one == load_suite(tmp_path / "one.csv")
    assert [str(each) for each in one.cases[0].all_turns] == ["Go, now.", "more", "(approves pay)"]
    assert one.cases[0].files == (TextPart(text="a.txt:\ntext"),)


async def test_a_conversation_in_the_file_of_an_evaluation(tmp_path):
    """Its turns and their grades are read as they were written."""
    found = await evaluate(make_clerk(), [Case(turns=["a", Turn("b", paths=[[]])])], runs=1)
    assert found.results[0].conversation[1].grades["tool_path"].value == 1
    found.save(tmp_path / "found.json")
    assert attrs.asdict(Evaluation.load(tmp_path / "found.json")) == attrs.asdict(found)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "says nothing"),
        ({"turns": [{"approve": "pay"}]}, "the first turn is a text"),
        ({"turns": [{"input": "a", "send": "b"}]}, "give exactly one of input, send, approve"),
        ({"turns": [SimulatedUser("a", model="x"), "b"]}, "the last of the turns"),
        ({"turns": [1]}, "give texts, turns"),
        ({"turns": "nowhere"}, "name a function as module:function"),
        ({"input": "a", "memory": []}, "give user="),
        ({"input": "a", "memory": "b", "user": "ann"}, "give a list of texts"),
        ({"input": "a", "files": "b"}, "give a list of paths"),
        ({"input": "a", "files": ["nowhere.txt"]}, "cannot be read"),
        ({"input": "a", "messages": [{"role": "user", "content": "a"}], "session": "s"}, "give one of them"),
    ],
)
def test_a_conversation_that_is_wrong(fields, message):
    """It is refused when it is made."""
    with pytest.raises(MisuseError, match=message):
        Case(**fields)


async def test_judges_grade_turns():
    """Each by its rubric and by what the user had got until then, so a turn may end with a question; each vote once."""
    asked = []

    def vote(request):
        asked.append(json.loads(request.messages[-1].text))
        score = 1 if "rude" in request.instructions else 5
        reply = json.dumps({"criterion": {"reason": "as it reads", "score": score}})
        return Reply(text=reply, usage=Usage(input_tokens=9, output_tokens=1, cost_usd=0.01))

    judge = RubricJudge(FunctionModel(vote), rubric="It is short.", votes=1, own_family=True)
    turns = [
        Turn("Please refund it.", rubric="It asks before it refunds."),
        {"approve": "refund", "rubric": ["It says what was done."]},
        Turn("Thanks.", rubric="It is rude."),
        "Bye.",
    ]
    agent, ledger = make_clerk(), []
    for _ in range(2):  # the second time all of it is over
        found = await evaluate(agent, [Case(turns=turns)], runs=1, scorers=[*SCORERS, judge], deps=ledger)
        [result] = found.results
        grades = [[(name, grade.value) for name, grade in turn.grades.items()] for turn in result.conversation]
        assert grades == [[("judge", 1)], [("judge", 1)], [("judge", 0)], []]
        assert (result.grades["judge"].value, result.judge_usd) == (1, pytest.approx(0.04))
    whole, first, second, third = asked
    assert first["task"] == "Please refund it."
    assert first["answer"] == '(asks you to approve refund {"order": 17})'
    assert [*first["conversation"][-1]] == ["calls"]
    assert (second["task"], second["answer"]) == ("(approves refund)", "Done: refunded.")
    assert [each.get("result_of") for each in second["conversation"]] == [None, None, "refund", None]
    assert third["conversation"] == whole["conversation"][:-2]


async def test_a_function_whose_evaluation_was_stopped(tmp_path):
    """With a store, another process goes on: turns that are over are not repeated, and the one in progress is."""
    asked = []

    class StoppedError(BaseException):
        pass

    def ask(text):
        asked.append(text)
        if len(asked) == 4:
            raise StoppedError
        return f"heard {text}"

    async def run(target=ask, **fields):
        store = SQLiteStore(tmp_path / "runs.db")
        cases = [Case(turns=[f"{name} 1", f"{name} 2"], expect=[contains("2")]) for name in "abc"]
        try:
            return await evaluate(target, cases, runs=1, parallel=1, store=store, **fields)
        finally:
            await store.aclose()

    with pytest.raises((StoppedError, BaseExceptionGroup)):
        await run()
    found = await run()
    assert (found.mean(), asked) == (1, ["a 1", "a 2", "b 1", "b 2", "b 2", "c 1", "c 2"])
    assert [each.is_kept for each in found.results] == [True, False, False]
    await run(label="again")
    assert len(asked) == 13
    with pytest.raises(MisuseError, match="give a def or a class"):
        await run(lambda text: text)
    with pytest.raises(MisuseError, match="is for functions"):
        await run(make_clerk())
