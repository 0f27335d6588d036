"""Cases from real runs, and the speeds that make no call: replay, and recorded tools."""

import json

import pytest

from agentfsm import Agent, MisuseError, ToolResult, tool
from agentfsm.evals import Case, Grade, add_case, evaluate, load_suite
from agentfsm.evals.suite_files import describe_run
from agentfsm.testing import FunctionModel, call, say

MASKED = "sk-proj-abcdefghijklmnopqrstuvwxyz0123456789"


@pytest.fixture
def shop():
    """Return an agent that looks up prices of an item and pays, with the effects and requests that it makes."""
    paid, asked = [], []

    @tool(read_only=True)
    def look(item: str) -> str:
        """Look up a price."""
        if item == "gold":
            raise ValueError("not for sale")
        return str(7 + len(paid))

    @tool(requires_approval=True)
    def pay(cents: int) -> str:
        """Pay."""
        paid.append(cents)
        return "paid"

    def think(request):
        asked.append(request)
        done = [each.content for each in request.messages if isinstance(each, ToolResult)]
        steps = [call("look", item="tea"), call("look", item="gold"), call("pay", cents=7)]
        return say("", steps[len(done)]) if len(done) < len(steps) else f"Done: {done[0]}, {done[2]}. {MASKED}"

    agent = Agent(FunctionModel(think), tools=[look, pay], name="shop")
    return agent, paid, asked


async def record(agent):
    """Return a run of the agent that is over."""
    run = await agent.run(f"Buy tea with {MASKED}.", id="real")
    await agent.approve(run.id, run.pending[0].call_id)
    return await agent.resume(run.id)


async def test_a_case_of_a_run(shop, tmp_path):
    """It has the input, the calls and the answer, without secrets, and can be added to a suite once."""
    agent, _paid, _asked = shop
    data = describe_run(await record(agent))
    assert data["paths"] == [["look", "look", "pay"]]
    assert (data["id"], data["recorded"], data["max_steps"]) == ("real", "real", 4)
    assert data["input"].startswith("Buy tea with [")
    assert data["answer"].startswith("Done: 7, paid. [")
    for name in ("suite.yaml", "suite.jsonl"):
        assert len(add_case(tmp_path / name, data)) == 1
        assert [case.id for case in add_case(tmp_path / name, {**data, "id": "second"})] == ["real", "second"]
        before = (tmp_path / name).read_text(encoding="utf-8")
        assert MASKED not in before
        with pytest.raises(MisuseError, match="two cases with the id 'second'"):
            add_case(tmp_path / name, {**data, "id": "second"})
        assert (tmp_path / name).read_text(encoding="utf-8") == before


async def test_a_run_that_is_not_over_makes_no_case(shop):
    """Its path is not known."""
    agent, _paid, _asked = shop
    with pytest.raises(MisuseError, match="is not over"):
        describe_run(await agent.run("Buy tea."))


async def test_a_case_has_its_fixtures(shop, tmp_path):
    """So a suite is evaluated without the run and its store: conversation, user and results are in the file."""
    agent, paid, _asked = shop
    chat = agent.with_(model=FunctionModel(lambda _request: "Hello."))
    first = await chat.run(f"I am Ann, and my key is {MASKED}.", session="s", user="ann", roles=["buyer"])
    run = await agent.run("Buy tea.", session="s", user="ann", roles=["buyer"], id="real")
    await agent.approve(run.id, run.pending[0].call_id)
    data = describe_run(await agent.resume(run.id))
    assert (first.answer, data["user"], data["roles"]) == ("Hello.", "ann", ["buyer"])
    assert [each["role"] for each in data["messages"]] == ["user", "assistant"]
    assert data["fixtures"][0] == {"tool": "look", "arguments": {"item": "tea"}, "content": "7", "outcome": "done"}
    add_case(tmp_path / "s.yaml", data)
    assert MASKED not in (tmp_path / "s.yaml").read_text(encoding="utf-8")
    [case] = load_suite(tmp_path / "s.yaml")
    elsewhere = Agent(agent.model, tools=agent.tools, name="shop")
    found = await evaluate(elsewhere, [case], runs=1, speed="recorded")
    assert (found.mean(), found.mean("tool_path"), found.results[0].findings) == (1, 1, ())
    assert paid == [7]
    played = await elsewhere.load(found.results[0].run_id)
    assert [each.outcome for each in played.calls] == ["done", "failed", "done"]
    assert played.messages[0].text.startswith("I am Ann, and my ")
    with pytest.raises(MisuseError, match=r"Case\(fixtures=\.\.\.\): give results such as"):
        Case(input="a", fixtures=[{"tool": "look"}])


async def test_replay_calls_nothing(shop):
    """It grades the recorded run; if the agent would ask differently, the run is a finding and has no grade."""
    agent, paid, asked = shop
    case = Case(**describe_run(await record(agent)))
    calls = len(asked)
    found = await evaluate(agent, [case], speed="replay")
    assert (found.runs, found.mean(), found.mean("tool_path")) == (1, 1, 1)
    assert found.results[0].run_id == "real"
    other = await evaluate(agent.with_(instructions="Be brief."), [case], speed="replay")
    assert other.mean() is None
    assert other.results[0].findings[0].startswith("turn 1 would ask differently: the agent: its model, instructions")
    assert (len(asked), paid) == (calls, [7])


async def test_recorded_tools_have_no_effect(shop):
    """The model is asked again, and its calls get the results that they had, failures too, without an approval."""
    agent, paid, asked = shop
    case = Case(**describe_run(await record(agent)))
    calls = len(asked)
    found = await evaluate(agent, [case], runs=2, speed="recorded")
    assert (found.mean(), found.mean("tool_path")) == (1, 1)
    assert len(asked) == calls + 2 * 4
    assert paid == [7]
    run = await agent.load(found.results[0].run_id)
    assert run.answer == f"Done: 7, paid. {MASKED}"
    assert [each.outcome for each in run.calls] == ["done", "failed", "done"]


async def test_a_call_that_was_not_recorded(shop):
    """It has no result, no effect, and is a finding; also when the results are read again from the store."""
    agent, paid, _asked = shop
    case = Case(**describe_run(await record(agent)))

    def think(request):
        done = [each for each in request.messages if isinstance(each, ToolResult)]
        return "Done." if done else say("", call("pay", cents=70_000))

    hasty = agent.with_(model=FunctionModel(think), version="hasty")
    for _ in range(2):
        found = await evaluate(hasty, [case], runs=1, speed="recorded")
        assert found.results[0].findings == ('pay({"cents": 70000}) was not recorded',)
        assert found.mean("tool_path") == pytest.approx(2 / 4)
        why = "a call of pay was not recorded, and may have an effect"
        assert found.results[0].grades["outcome"] == Grade(0.0, why)
    assert paid == [7]
    curious = agent.with_(
        model=FunctionModel(
            lambda r: "Done." if isinstance(r.messages[-1], ToolResult) else say("", call("look", item="x"))
        )
    )
    found = await evaluate(curious, [case], runs=1, speed="recorded")
    assert (found.mean(), found.results[0].findings) == (1, ('look({"item": "x"}) was not recorded',))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("s.yaml", "cases: [", "is not YAML"),
        ("s.yaml", "- input: a", "give a list of cases below `cases:`"),
        ("s.yaml", "cases:\n  - {input: a}\n  - {inptu: b}", r"s\.yaml, case 2 has the unknown field 'inptu'"),
        (
            "s.yaml",
            "cases:\n  - {input: a, path: []}",
            "case 1 has the unknown field 'path'; fields: input, turns, messages",
        ),
        ("s.yaml", "cases:\n  - {input: a, max_steps: none}", "case 1: Case"),
        ("s.jsonl", '{"input": "a"}\n{', "line 2: Expecting property name"),
        ("s.jsonl", "", "one Case or more"),
        ("s.yaml", "cases:\n  - {user: ann}", r"case 1: Case\(\.\.\.\) says nothing: give input="),
        ("s.yaml", "cases:\n  - go", "case 1: 'go' is not a case"),
        ("s.yaml", "cases:\n  - {turns: [a, {aprove: pay}]}", "case 1: Case.*a Turn has no field 'aprove'"),
        ("s.json", '{"cases": 1}', "give a list of cases"),
        ("s.csv", "input,inptu\na,b\n", "case 1 has the unknown field 'inptu'"),
        ("s.csv", "input\na,b\n", r"is not CSV: line 2 has more cells"),
        ("s.csv", "input,paths\na,[\n", "is not JSON"),
        ("s.txt", "", "give a file .yaml, .json, .jsonl or .csv"),
    ],
)
def test_a_file_that_is_wrong(tmp_path, name, text, message):
    """The error names the case."""
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(MisuseError, match=message):
        load_suite(tmp_path / name)
    with pytest.raises(MisuseError, match="cannot be read"):
        load_suite(tmp_path / "gone.yaml")


def test_one_suite_in_two_forms(tmp_path):
    """YAML and JSON Lines say the same."""
    case = {"input": "Go.", "paths": [["a", {"any_order": ["b", "c"]}]], "expect": ["json_valid", {"contains": "x"}]}
    (tmp_path / "one.jsonl").write_text(json.dumps(case), encoding="utf-8")
    text = "cases:\n  - input: Go.\n    paths: [[a, any_order: [b, c]]]\n    expect: [json_valid, contains: x]\n"
    (tmp_path / "two.yaml").write_text(f"name: one\n{text}", encoding="utf-8")
    assert load_suite(tmp_path / "one.jsonl") == load_suite(tmp_path / "two.yaml")
