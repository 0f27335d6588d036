"""Evaluations: cases, their scorers, repeats, and what is kept of them."""

import attrs
import pytest

from agentfsm import Agent, Limits, MisuseError, RunContext, ToolResult, tool
from agentfsm.evals import Case, Evaluation, ExpectedCall, Suite, evaluate
from agentfsm.evals.evaluation_runner import EvaluationLimitError
from agentfsm.prompts import json_valid
from agentfsm.stores import SQLiteStore
from agentfsm.testing import FunctionModel, ScriptedModel, call, say

TESLA = Case(
    id="tesla",
    input="Look up the price of Tesla's shares, and how much 100 of them are worth.",
    paths=[["get_stock_price", "calculator"], ["get_stock_price"]],
    max_steps=3,
    tags=["finance"],
)


async def grade_once(agent, **fields):
    """Return the grades of one run of a case, by scorer."""
    found = await evaluate(agent, [Case(input="Go.", **fields)], runs=1)
    return {name: grade.value for name, grade in found.results[0].grades.items()}, found.results[0]


@pytest.mark.parametrize("path", [("get_stock_price", "calculator"), ("get_stock_price",)])
async def test_several_paths_are_valid(make_agent, path):
    """The example of document H: with the calculator, or by mental arithmetic."""
    found = await evaluate(make_agent(*path), [TESLA], runs=2)
    assert found.mean("tool_path") == 1
    assert found.mean("steps") == 1
    assert found.mean() == 1
    assert found.results[0].calls == path


@pytest.mark.parametrize(
    ("made", "paths", "value"),
    [
        ("bbaa", ["ab"], 2 / 6),  # as a set, this would be 1
        ("baaa", ["ab"], 2 / 6),
        ("ab", ["ab"], 1),
        ("ba", ["ab"], 2 / 4),
        ("aab", ["ab"], 4 / 5),  # a repeat costs
        ("acb", ["ab"], 4 / 5),  # so does a wrong call
        ("a", ["ab"], 2 / 3),
        ("", ["ab"], 0),
        ("", ["ab", ""], 1),
        ("", [""], 1),
        ("a", [""], 0),
        ("a", [], 0),
        ("", [], 1),
        ("ba", [[{"any_order": ["a", "b"]}]], 1),
        ("abc", [[{"b", "a"}, "c"]], 1),
        ("acb", [[{"b", "a"}, "c"]], 4 / 6),
        ("aa", [[{"any_order": ["a", "b"]}]], 2 / 4),
        ("aabab", [["a", {"any_order": ["b", "a", "a"]}, "b"]], 1),
    ],
)
async def test_calls_are_aligned(made, paths, value):
    """Order counts where a path has one, and each missing, wrong or repeated call costs."""
    tools = [make_plain_tool(name) for name in "abc"]
    script = [say("", *[call(name) for name in made]), "Done."] if made else ["Done."]
    agent = Agent(ScriptedModel(*script), tools=tools)
    grades, _ = await grade_once(agent, paths=[list(path) for path in paths])
    assert grades["tool_path"] == pytest.approx(value)


def make_plain_tool(name):
    def function() -> str:
        """Return nothing of interest."""
        return "ok"

    function.__name__ = name
    return function


@pytest.mark.parametrize(
    ("wanted", "value"),
    [({"symbol": "TSLA"}, 1), ({}, 1), ({"symbol": "AAPL"}, 0), ({"symbol": "TSLA", "day": None}, 0)],
)
async def test_arguments_of_a_path(make_agent, wanted, value):
    """They are compared if a path has some."""
    path = [{"tool": "get_stock_price", "arguments": wanted}]
    grades, _ = await grade_once(make_agent("get_stock_price"), paths=[path])
    assert grades["tool_path"] == value


async def test_a_group_is_matched_as_a_whole():
    """A call that fits two places does not take the only one that another fits."""
    tools = [make_search()]
    script = [say("", call("search", query="a"), call("search", query="b")), "Done."]
    path = [(ExpectedCall(tool="search"), ExpectedCall(tool="search", arguments={"query": "a"}))]
    grades, _ = await grade_once(Agent(ScriptedModel(*script), tools=tools), paths=[path])
    assert grades["tool_path"] == 1


def make_search():
    def search(query: str) -> str:
        """Search."""
        return query

    return search


async def test_a_word_is_no_failure(make_agent):
    """An answer that speaks of an error completes its case like any other."""
    grades, _ = await grade_once(make_agent(answer="The error rate fell to 3 %; 失败 none."))
    assert grades["outcome"] == 1


async def test_a_check_of_the_answer(make_agent):
    """Those of tests of prompts, with the reason."""
    grades, result = await grade_once(make_agent(), expect=[json_valid()])
    assert grades["outcome"] == 0
    assert result.grades["outcome"].reason.startswith("json_valid: not JSON")
    assert not result.passed


@tool
def book(ctx: RunContext[list], cents: int) -> str:
    """Book an amount."""
    ctx.deps.append(cents)
    return "booked"


class Ledger(list):
    """The world of a run: the amounts that were booked."""

    def __init__(self, _run):
        super().__init__()


def make_booker(**fields):
    def think(request):
        return "Done." if isinstance(request.messages[-1], ToolResult) else say("", call("book", cents=5))

    return Agent(FunctionModel(think), tools=[book], **fields)


async def test_a_check_of_the_world():
    """It gets the dependencies with which the run was executed, of its own, and is made once."""
    checked = []

    def check(run, ledger):
        checked.append(run.id)
        return ledger == [5] or f"booked: {ledger}"

    agent, case = make_booker(), Case(input="Book 5 cents.", check=check)
    for _ in range(2):
        found = await evaluate(agent, [case], runs=3, deps=Ledger)
        assert [result.grades["outcome"].value for result in found.results] == [1, 1, 1]
    assert len(checked) == len(set(checked)) == 3


async def test_a_world_that_is_gone():
    """A run that another process had begun is not scored by a world that was made anew; one that lasts is checked."""
    agent = make_booker()
    case = Case(input="Book 5 cents.")
    [first] = (await evaluate(agent, [case], runs=1, deps=Ledger)).results
    checked = attrs.evolve(case, check=lambda _run, ledger: ledger == [5])
    [found] = (await evaluate(agent, [checked], runs=1, deps=Ledger)).results
    assert found.run_id == first.run_id
    assert found.grades["outcome"].value is None
    assert "its world is gone: evaluate with another label" in found.grades["outcome"].reason
    assert (await evaluate(agent, [checked], runs=1, deps=Ledger, label="again")).mean() == 1
    assert (await evaluate(agent, [checked], runs=1, deps=[5])).mean() == 1


async def test_another_check_has_a_verdict_of_its_own(make_agent):
    """The same one is made once; a check that is changed, or raised before, is made anew on the runs that are kept."""
    agent, made, fixed = make_agent(), [], []

    def broken(run, _deps):
        made.append(run.id)
        return True if fixed else fixed[0]

    def strict(wanted):
        return lambda run, _deps: run.answer == wanted or f"it is not {wanted}"

    async def check(by):
        [result] = (await evaluate(agent, [Case(id="c", input="x", check=by)], runs=1)).results
        return result.grades["outcome"].value

    assert [await check(each) for each in (lambda _run, _deps: True, lambda _run, _deps: False)] == [1, 0]
    assert [await check(strict(each)) for each in ("other", "The value is $40,000.", "other")] == [0, 1, 0]
    assert await check(broken) is None
    fixed.append(True)
    assert [await check(broken), await check(broken), len(made)] == [1, 1, 2]


@pytest.mark.parametrize(
    ("check", "value", "reason"),
    [
        (lambda _run, _deps: True, 1, ""),
        (lambda _run, _deps: False, 0, "the check of the world failed"),
        (lambda _run, _deps: "no refund was booked", 0, "no refund was booked"),
        (lambda _run, _deps: None, None, "the check returned NoneType: return True, False or a reason"),
        (lambda _run, deps: deps["gone"], None, "the check raised TypeError: 'NoneType' object is not subscriptable"),
    ],
)
async def test_results_of_a_check(make_agent, check, value, reason):
    """A check that is broken leaves the run unscored, which is not a 0."""
    _, result = await grade_once(make_agent(), check=check)
    assert (result.grades["outcome"].value, result.grades["outcome"].reason) == (value, reason)


async def test_a_run_without_an_answer(make_agent):
    """It failed, and says by what; nothing is checked."""
    agent = make_agent("calculator", "calculator", "calculator", answer="never")
    agent = agent.with_(limits=Limits(turns=2))
    grades, result = await grade_once(agent, check=lambda _run, _deps: True)
    assert grades["outcome"] == 0
    assert result.grades["outcome"].reason.startswith("failed, max_turns")


async def test_limits_of_a_case(make_agent):
    """The efficiency of steps is the limit by the actual number; an unknown price is unscored."""
    agent = make_agent("get_stock_price", "calculator")
    grades, result = await grade_once(agent, max_steps=2, max_usd=0.01, max_seconds=1e-9)
    assert grades["steps"] == pytest.approx(2 / 3)
    assert grades["cost"] is None
    assert result.grades["cost"].reason == "the price of function is unknown"
    assert 0 < grades["latency"] < 1


async def test_weights_and_tags(make_agent):
    """The total is the weighted mean of what is scored; tags select cases."""
    cases = [
        Case(id="a", input="A.", paths=[["calculator"]], weights={"tool_path": 3}, tags=["x"]),
        Case(id="b", input="B.", tags=["y"]),
    ]
    found = await evaluate(make_agent(), Suite(cases), runs=1)
    assert found.by_case("total") == {"a": [1 / 4], "b": [1]}
    assert found.mean("total", tag="x") == 1 / 4
    assert found.mean("judge") is None
    assert found.metrics == ("outcome", "tool_path")


async def test_an_evaluation_goes_on(make_agent, tmp_path):
    """After it was stopped, in another process: no run that is over costs anything again."""
    counted = []
    seen = []

    class StoppedError(Exception):
        pass

    def stop_at_three(result):
        seen.append(result)
        if len(seen) == 3:
            raise StoppedError

    def make():
        return make_agent("calculator", counted=counted, store=SQLiteStore(tmp_path / "evals.db"))

    cases = [Case(input="A."), Case(input="B.")]
    async with make() as agent:
        with pytest.raises(ExceptionGroup):
            await evaluate(agent, cases, runs=3, parallel=1, on_result=stop_at_three)
    assert len(counted) == 3 * 2
    async with make() as agent:
        found = await evaluate(agent, cases, runs=3)
        assert len(counted) == 6 * 2
        assert len({result.run_id for result in found.results}) == 6
        again = await evaluate(agent, [Case(input="A.", paths=[["calculator"]]), cases[1]], runs=3)
        assert len(counted) == 6 * 2  # other expectations are graded from the journals
        assert again.mean("tool_path") == 1
        await evaluate(agent, cases, runs=1, label="tonight")
        await evaluate(agent.with_(instructions="Be brief."), cases, runs=1)
        assert len(counted) == 10 * 2


def test_pass_hat(make_evaluation):
    """C(c, k) / C(n, k), as the mean over the cases."""
    found = make_evaluation([1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0])
    assert found.mean() == found.pass_hat(1) == 0.5
    assert found.pass_hat(2) == pytest.approx((1 + 1 / 6) / 3)
    assert found.pass_hat(4) == pytest.approx(1 / 3)
    with pytest.raises(MisuseError, match=r"pass\^5 of 4 runs"):
        found.pass_hat(5)


def test_the_file_of_an_evaluation(make_evaluation, tmp_path):
    """It is the same after it was read; something else is refused."""
    found = make_evaluation([1, None], [0, 1])
    found.save(tmp_path / "result.json")
    assert type(found).load(tmp_path / "result.json") == found
    for text in ("[]", "{}", '{"format": 1}', "no"):
        (tmp_path / "other.json").write_text(text, encoding="utf-8")
        with pytest.raises(MisuseError, match=r"other\.json is not the result of an evaluation"):
            type(found).load(tmp_path / "other.json")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"paths": "search"}, "give a list of paths"),
        ({"paths": ["search"]}, "a path is a list such as"),
        ({"paths": [[{"tool": "a", "argument": {}}]]}, "is not a call of a path"),
        ({"weights": {"judge": -1}}, "0 or more"),
        ({"tags": "one"}, r"give a list, \['one'\]"),
        ({"check": "nowhere"}, "name a function as module:function"),
        ({"check": "nowhere:check"}, "cannot be loaded"),
        ({"expect": ["valid"]}, "'json_valid'"),
        ({"max_steps": 0}, "1 or more"),
    ],
)
def test_a_case_that_is_wrong(fields, message):
    """It is refused when it is made."""
    with pytest.raises(MisuseError, match=message):
        Case(input="Go.", **fields)


async def test_a_suite_that_is_wrong(make_agent):
    """Two cases with one id, none, and cases without a recording where one is needed."""
    with pytest.raises(MisuseError, match="two cases of the suite begin with"):
        Suite([Case(input="Go."), Case(input="Go.")])
    with pytest.raises(MisuseError, match="one Case or more"):
        Suite([])
    with pytest.raises(MisuseError, match='speed="replay" needs cases made from runs'):
        await evaluate(make_agent(), [Case(input="Go.")], speed="replay")
    with pytest.raises(MisuseError, match="give 'live', 'recorded' or 'replay'"):
        await evaluate(make_agent(), [Case(input="Go.")], speed="fast")


async def test_a_limit_reckons_with_the_dearest_case(tmp_path):
    """A dear case is not forgotten because many cheap ones follow; what there is can be saved, and passes no gate."""

    class Priced(FunctionModel):
        name = "priced"

        def cost_usd(self, _usage):
            return 0.5 if len(asked) == 1 else 0.001

    asked = []

    def think(request):
        asked.append(request)
        return "Done."

    agent, cases = Agent(Priced(think)), [Case(id=f"c{n}", input=f"{n}") for n in range(40)]
    with pytest.raises(EvaluationLimitError, match=r"2 of 40 cases cost \$0\.501") as caught:
        await evaluate(agent, cases, runs=1, parallel=1, usd=1.0)
    found = caught.value.evaluation
    found.save(tmp_path / "some.json")
    assert Evaluation.load(tmp_path / "some.json") == found
    assert (len(found.results), len(found.find_unscored())) == (2, 38)
