"""Document C's story: a coordinator asks its specialists, together where that is safe, and puts their answers together.

The specialists are agents of their own. The one that keeps memories writes, so it works alone, in its place in the
order; all others only read (document C, 2.1 and 7).
"""

from __future__ import annotations

import json
from collections.abc import Callable

import anyio
import attrs
import pytest

from agentfsm import (
    COORDINATION,
    Agent,
    AgentEvent,
    Limits,
    ModelUnavailableError,
    Outcome,
    Run,
    State,
    ToolEvent,
    Usage,
    tool,
)
from agentfsm.core.labels import ToolKind
from agentfsm.ports import Model, Reply, Request
from agentfsm.testing import FunctionModel, ScriptedModel, call, fail, say
from agentfsm.testing.models import Line
from tests.support.checks import newest, results_of, sound, starts_of, texts, valid_history, virtually

QUESTION = "我 30 岁, 硕士, 想移民香港, 请评估并记住。"
ANSWER = "您适合高才通 B 类, 评分 75。"
# US dollars per token, document C, 10.3.
IN, OUT = 0.003 / 1_000, 0.015 / 1_000


class Sonnet(ScriptedModel):
    """A script with the prices of document C."""

    name = "sonnet"

    def cost_usd(self, usage: Usage) -> float:
        """US dollars for this usage."""
        return usage.input_tokens * IN + usage.output_tokens * OUT


@attrs.define
class Office:
    """Whoever works for the coordinator, and what they did, with the times."""

    began: dict[str, float] = attrs.field(factory=dict)
    ended: dict[str, float] = attrs.field(factory=dict)
    memories: list[str] = attrs.field(factory=list)

    def overlap(self, one: str, other: str) -> bool:
        """Whether two of them were at work at the same time."""
        return self.began[one] < self.ended[other] and self.began[other] < self.ended[one]

    def worker(self, name: str, seconds: float, *lines: Line | str, tools: tuple = (), **limits: int) -> Agent:
        """A specialist whose first reply takes so many seconds."""
        first, *rest = [say(line) if isinstance(line, str) else line for line in lines]
        office = self

        class Timed(Sonnet):
            async def reply(self, request: Request, emit=None) -> Reply:
                office.began.setdefault(name, anyio.current_time())
                try:
                    return await super().reply(request, emit)
                finally:
                    office.ended[name] = anyio.current_time()

        script = [attrs.evolve(first, delay_s=seconds), *rest]
        return Agent(Timed(*script), tools=tools, name=name, instructions=f"你是 {name}。", limits=Limits(**limits))

    def specialists(self) -> list:
        """The tools of document C, 2.1, as far as its examples call them."""

        @tool
        async def save_user_memory(fact: str) -> str:
            """Save a fact about the user."""
            self.memories.append(fact)
            return "saved"

        @tool(read_only=True)
        async def search_knowledge(query: str) -> str:
            """Search."""
            return f"{query}: B 类要求百强大学学位"

        policy = self.worker(
            "invoke_policy_expert",
            3.0,
            say("", call("search_knowledge", query="高才通")),
            "高才通 B 类要求百强大学学位。",
            tools=(search_knowledge,),
        )
        case = self.worker("invoke_case_analyst", 2.0, "类似案例: 张先生, 已获批。")
        memory = self.worker(
            "invoke_memory_manager",
            2.0,
            say("", call("save_user_memory", fact="30 岁, 硕士")),
            "已保存用户信息。",
            tools=(save_user_memory,),
        )
        assessment = self.worker("invoke_assessment_expert", 4.0, "评估结果: 75 分。")
        return [each.as_tool() for each in (policy, case, memory, assessment)]


def coordinator(model: Model, tools: list, store, clock) -> Agent:
    """The coordinator, told what to do about errors."""
    return Agent(model, tools=tools, name="coordinator", instructions=COORDINATION, store=store, clock=clock)


ORDER = ("invoke_policy_expert", "invoke_case_analyst", "invoke_memory_manager", "invoke_assessment_expert")


def asking(*order: str, expect: str | Callable | None = None) -> ScriptedModel:
    """The coordinator's model: asks in this order, then answers."""
    return Sonnet(say("我来查一下。", *[call(name, query=QUESTION) for name in order]), say(ANSWER, expect=expect))


def test_the_reading_work_together_and_the_writing_alone():
    """Document C, 7: policy and case together, then memory alone, then the assessment; results in call order."""

    async def story(store, clock) -> tuple[Run, Office]:
        office = Office()
        agent = coordinator(asking(*ORDER), office.specialists(), store, clock)
        runs = [each async for each in agent.steps(agent.start(QUESTION, id="mine"))]
        run = runs[-1]
        assert [each.state for each in runs] == ["think", "act", "reflect", "observe", "think", "done"]
        await sound(agent, run)
        for n in range(4):
            await sound(agent, await agent.load(f"mine.t1.{n}"))
        return run, office

    run, office = virtually(story)
    policy, case, memory, assessment = ORDER
    assert run.output == ANSWER
    assert office.overlap(policy, case)
    for other in (policy, case, assessment):
        assert not office.overlap(memory, other)
    assert office.ended[memory] <= office.began[assessment]
    assert office.memories == ["30 岁, 硕士"]
    assert run.duration_s == pytest.approx(3 + 2 + 4)
    assert [result.content for result in results_of(run.messages)] == [
        "高才通 B 类要求百强大学学位。",
        "类似案例: 张先生, 已获批。",
        "已保存用户信息。",
        "评估结果: 75 分。",
    ]
    valid_history(run.messages)


def test_three_readers_take_as_long_as_the_slowest():
    """Document C, 10.1, scenario 2: four seconds in place of eight."""

    async def story(store, clock) -> Run:
        office = Office()
        times = {"invoke_assessment_expert": 4.0, "invoke_case_analyst": 2.0, "invoke_strategist": 2.0}
        tools = [office.worker(name, seconds, "好。").as_tool() for name, seconds in times.items()]
        return await coordinator(asking(*times), tools, store, clock).run(QUESTION)

    assert virtually(story).duration_s == pytest.approx(4.0)


def test_each_specialist_reads_its_input_as_json():
    """Document C, 6: the first message is the input, so that it can be of any shape."""

    async def story(store, clock) -> Request:
        model = Sonnet("好。")
        expert = Agent(model, name="invoke_policy_expert", instructions="你是政策专家。")
        await coordinator(asking("invoke_policy_expert"), [expert.as_tool()], store, clock).run(QUESTION)
        return model.requests[0]

    request = virtually(story)
    assert json.loads(newest(request)) == {"query": QUESTION}
    assert request.instructions == "你是政策专家。"


def test_one_that_is_down_does_not_spoil_the_rest():
    """Document C, 9.2: the others' answers stand, and the coordinator goes on with them, by its instructions."""

    async def story(store, clock) -> tuple[Run, Agent]:
        office = Office()
        down = Agent(
            Sonnet(fail(ModelUnavailableError("529 overloaded"))),
            name="invoke_policy_expert",
            limits=Limits(model_retries=0, errors=1),
        )
        slow = Agent(FunctionModel(never), name="invoke_strategist")
        case = office.worker("invoke_case_analyst", 2.0, "类似案例: 张先生, 已获批。")

        def sees_all(request: Request) -> bool:
            text = texts(request)
            return "529 overloaded" in text and "timed_out" in text and "张先生" in text

        order = ("invoke_policy_expert", "invoke_case_analyst", "invoke_strategist")
        tools = [down.as_tool(), case.as_tool(), slow.as_tool(timeout_s=15.0)]
        agent = coordinator(asking(*order, expect=sees_all), tools, store, clock)
        return await agent.run(QUESTION), agent

    run, _ = virtually(story)
    assert (run.state, run.output) == (State.DONE, ANSWER)
    assert [result.outcome for result in results_of(run.messages)] == [
        Outcome.FAILED,
        Outcome.DONE,
        Outcome.TIMED_OUT,
    ]
    assert run.consecutive_errors == 0
    assert run.duration_s == pytest.approx(15.0)


async def never(_request: Request) -> str:
    """Never answer."""
    await anyio.sleep_forever()
    return "never"


def test_the_front_end_is_told_what_document_c_lists():
    """Every event of `QueueEvent`, with its fields; agents between the start and the end of their calls."""

    async def story(store, clock) -> list[AgentEvent | ToolEvent]:
        office = Office()
        agent = coordinator(asking(*ORDER[:3]), office.specialists(), store, clock)
        async with agent.stream(QUESTION, id="mine") as stream:
            return [event async for event in stream if isinstance(event, AgentEvent | ToolEvent)]

    told = virtually(story)
    for n, name in enumerate(ORDER[:3]):
        own = [event for event in told if (event.run_id, event.call_id) == ("mine", f"t1.{n}")]
        kinds = [event.type.value for event in own if event.type.value != "agent_progress"]
        assert kinds == ["tool_queued", "tool_started", "agent_started", "agent_completed", "tool_completed"]
        assert {event.kind for event in own if isinstance(event, ToolEvent)} == {ToolKind.AGENT}
        turns = [(event.turn, event.limit) for event in own if event.type.value == "agent_progress"]
        assert turns == ([(1, 3)] if n == 1 else [(1, 3), (2, 3)])
        done = next(event for event in own if event.type.value == "agent_completed").to_dict()
        assert (done["agent"], done["success"], done["child_id"]) == (name, True, f"mine.t1.{n}")
        assert done["duration_s"] == pytest.approx([3.0, 2.0, 2.0][n])
    assert told[-1].type.value == "queue_drained"


def test_the_bill_lists_every_specialist():
    """Document C, 10.3: per agent, tokens, dollars, turns and time; and the coordinator's own on top."""

    async def story(store, clock) -> tuple[Run, Agent]:
        office = Office()
        agent = coordinator(asking(*ORDER), office.specialists(), store, clock)
        return await agent.run(QUESTION, id="mine"), agent

    run, agent = virtually(story)
    cost = agent.cost(run)
    assert [(each.agent, each.turns, each.tool_calls) for each in cost.children] == [
        ("invoke_policy_expert", 2, ("search_knowledge",)),
        ("invoke_case_analyst", 1, ()),
        ("invoke_memory_manager", 2, ("save_user_memory",)),
        ("invoke_assessment_expert", 1, ()),
    ]
    assert [each.duration_s for each in cost.children] == [pytest.approx(s) for s in (3.0, 2.0, 2.0, 4.0)]
    reply = 10 * IN + 5 * OUT
    assert [each.usd for each in cost.children] == [pytest.approx(reply * n) for n in (2, 1, 2, 1)]
    assert cost.usd == pytest.approx(reply * 8)
    assert (cost.usage, cost.usage.tokens) == (run.usage, 15 * 8)
    assert (cost.turns, cost.tool_calls) == (2, ORDER)


def test_the_journal_says_which_agents_were_called():
    """Each call of an agent is marked as started, since its run is begun, also if its tools change nothing."""

    async def story(store, clock) -> list[int]:
        agent = coordinator(asking(*ORDER), Office().specialists(), store, clock)
        await agent.run(QUESTION, id="mine")
        events = await agent.history("mine")
        return [starts_of(events, f"t1.{n}") for n in range(4)]

    assert virtually(story) == [1, 1, 1, 1]
