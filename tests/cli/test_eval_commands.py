"""`agentfsm eval`: from a real run to a case, results, comparisons, gates and reports."""

import json
import re
import sys
from xml.etree.ElementTree import fromstring

import pytest
from attrs import evolve

from agentfsm.evals import CaseResult, Evaluation, Grade
from agentfsm.testing import LocalServer, say

SUITE = """
name: prices
cases:
  - id: tea
    input: What does tea cost?
    paths: [[get_price]]
    expect: [contains: "7"]
    max_steps: 2
    tags: [prices]
"""


@pytest.fixture
def results(here):
    """Write results of 80 cases: `base.json`, `same.json`, `worse.json` with half of the passes, and `few.json`."""

    def write(name, cases, passes):
        grades = [[float(passes(case, repeat)) for repeat in range(5)] for case in range(cases)]
        found = [
            CaseResult(
                case=f"<case {case}>",
                repeat=repeat,
                run_id=f"run-{case}-{repeat}",
                grades={"outcome": Grade(value, "" if value else "wrong & <b>"), "judge": Grade(value)},
                total=value,
                tags=("odd",) if case % 2 else (),
            )
            for case, values in enumerate(grades)
            for repeat, value in enumerate(values)
        ]
        result = Evaluation(suite="s", agent="a", version=name, at="2026-01-01", runs=5, results=tuple(found))
        result.save(here.folder / f"{name}.json")

    write("base", 80, lambda case, repeat: True)
    write("same", 80, lambda case, repeat: True)
    write("worse", 80, lambda case, repeat: case % 2)
    write("few", 12, lambda case, repeat: True)


def test_a_suite_is_run(here):
    """Progress goes to stderr, means to stdout; the result is written, and a second time nothing is run again."""
    (here.folder / "suite.yaml").write_text(SUITE, encoding="utf-8")
    words = ("eval", "run", "suite.yaml", "app:shopper", "--runs", "3", "--out", "result.json", "--store", "e.db")
    out = here(*words)
    assert sorted(re.findall(r"([1-3])/3 tea run [1-3] passed", here.err)) == ["1", "2", "3"]
    assert "  outcome     100.0%" in out
    assert "  pass^3      100.0%" in out
    found = Evaluation.load(here.folder / "result.json")
    assert (len(found.results), found.mean("tool_path"), found.mean("steps")) == (3, 1, 1)
    ids = [each.run_id for each in found.results]
    assert "earlier evaluation" not in here.err
    assert here.json(*words)["means"] == {"outcome": 1, "tool_path": 1, "steps": 1}
    assert "3 of 3 runs are those of an earlier evaluation of this version" in here.err
    assert [each.run_id for each in Evaluation.load(here.folder / "result.json").results] == ids
    assert here.json("runs", "--store", "e.db")["runs"] == []
    assert len(here.json("runs", "--store", "e.db", "--purpose", "eval")["runs"]) == 3
    here(*words, "--against", "result.json", code=5)
    assert "usage" not in here.err
    assert "estimate: 3 runs of cases, unknown price" in here.err


def test_the_functions_of_a_suite_are_those_of_the_current_folder(here, monkeypatch):
    """Its check, and the world of each conversation (`--deps`), which the check gets."""
    (here.folder / "shop_world.py").write_text(
        "def new_shop(run):\n    return {'fresh': run.header.purpose}\n\n"
        "def is_fresh(run, shop):\n    return shop == {'fresh': 'eval'}\n",
        encoding="utf-8",
    )
    case = {"id": "tea", "input": "What does tea cost?", "check": "shop_world:is_fresh"}
    (here.folder / "world.json").write_text(json.dumps([case]), encoding="utf-8")
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each != str(here.folder)])
    words = ("eval", "run", "world.json", "app:shopper", "--runs", "1")
    assert here.json(*words, "--deps", "shop_world:new_shop")["means"]["outcome"] == 1
    here(*words, "--deps", "shop_world:nothing", code=2)
    assert "--deps='shop_world:nothing' cannot be loaded" in here.err


def test_a_case_is_made_of_a_run(here):
    """And replayed, and evaluated with recorded tools."""
    run_id = here.run("app:shopper", "What does tea cost?")
    assert here("eval", "from-run", run_id, "suite.jsonl").startswith("suite.jsonl has 1 case; look at ")
    assert json.loads((here.folder / "suite.jsonl").read_text(encoding="utf-8"))["paths"] == [["get_price"]]
    assert here("eval", "from-run", run_id).startswith("regressions.yaml has 1 case")
    words = ("eval", "run", "regressions.yaml", "app:shopper", "--speed", "recorded", "--store", "other.db")
    assert here.json(*words)["means"] == {"outcome": 1, "tool_path": 1, "steps": 1}
    for speed in ("replay", "recorded"):
        words = ("eval", "run", "suite.jsonl", "app:shopper", "--speed", speed, "--runs", "2")
        assert here.json(*words)["means"] == {"outcome": 1, "tool_path": 1, "steps": 1}
    here("eval", "from-run", run_id, "suite.jsonl", code=2)
    assert "two cases with the id" in here.err


@pytest.mark.parametrize(
    ("name", "code", "word"), [("same", 0, "pass"), ("worse", 1, "worse"), ("few", 5, "undecided")]
)
def test_a_gate_has_three_answers(here, results, name, code, word):
    """As words and as exit codes; each is appended to the history."""
    against = "few.json" if name == "few" else "base.json"
    words = ("eval", "gate", f"{name}.json", "--against", against, "--history", "history.jsonl")
    out = here(*words, code=code)
    more = "; 61 more cases would decide (unknown price)" if code == 5 else ""
    assert out.splitlines()[-1] == f"gate: {word}{more}"
    assert here.json(*words, code=code)["missing"] == (61 if more else 0)
    here("eval", "gate", f"{name}.json", "--against", "nowhere.json", code=2)
    here("eval", "gate", f"{name}.json", "--agianst", "base.json", code=2)
    assert here.json(*words, code=code)["decision"] == word
    assert len((here.folder / "history.jsonl").read_text(encoding="utf-8").splitlines()) == 3


def test_what_was_not_scored_is_said(here, results):
    """In the report, as JSON, in the page and by the exit code: cases without a grade are no passes."""
    found = Evaluation.load(here.folder / "base.json")
    lost = [evolve(each, grades={"outcome": Grade(None, "the check raised")}) for each in found.results[:100]]
    evolve(found, results=(*lost, *found.results[100:])).save(here.folder / "half.json")
    words = ("eval", "gate", "half.json", "--against", "base.json", "--floor", "outcome=0.9")
    out = here(*words, code=5)
    named = "20 cases (<case 0>, <case 1>, <case 2>, ...) are"
    assert out.splitlines()[-1] == f"gate: undecided; {named} missing or not scored"
    assert f"outcome: {named} not scored, so the floor of 90.0% is not shown to hold" in out
    assert here.json(*words, code=5)["unscored"][0] == "<case 0>"
    out = here("eval", "report", "half.json", "--html", "half.html")
    assert f"  outcome: {named} not scored: the check raised\n" in out
    assert "the check raised" in (here.folder / "half.html").read_text(encoding="utf-8")
    assert here.json("eval", "report", "half.json")["unscored"]["outcome"]["<case 7>"] == "the check raised"
    here("eval", "compare", "base.json", "few.json", code=5)
    here("eval", "gate", "few.json", "--against", "base.json", code=5)
    (here.folder / "suite.yaml").write_text(f"{SUITE}    check: 'operator:truediv'\n", encoding="utf-8")
    words = ("eval", "run", "suite.yaml", "app:shopper", "--runs", "1", "--floor", "steps=0.5")
    assert "outcome: 1 case (tea) is not scored: the check raised TypeError" in here(*words, code=0)


def test_a_limit_in_dollars_has_a_code_of_its_own(here):
    """It is no loss; the cases that are over are written, and pass no gate."""
    (here.folder / "suite.yaml").write_text(SUITE, encoding="utf-8")
    (here.folder / "priced.py").write_text(
        "from agentfsm import Agent\nfrom agentfsm.testing.models import FunctionModel\n"
        "class Priced(FunctionModel):\n    name = 'priced'\n    cost_usd = lambda self, usage: 0.5\n"
        "agent = Agent(Priced(lambda request: '7'))\n",
        encoding="utf-8",
    )
    words = ("eval", "run", "suite.yaml", "priced:agent", "--runs", "9", "--parallel", "1", "--usd", "3.2")
    here(*words, "--out", "some.json", code=4)
    assert "6 of 9 cases cost $3.00" in here.err
    found = Evaluation.load(here.folder / "some.json")
    assert [each.repeat for each in found.results] == [1, 2, 3, 4, 5, 6]
    here("eval", "gate", "some.json", "--against", "some.json", code=5)


def test_results_are_compared(here, results):
    """Aspect by aspect, with the interval and the number of cases that is missing."""
    out = here("eval", "compare", "base.json", "worse.json", "--metric", "outcome", "--metric", "judge", code=1)
    assert out.splitlines()[0].startswith("outcome: worse, 100.0% to 50.0% in 80 cases, difference -50.0% [-")
    assert out.splitlines()[1].startswith("judge: worse")
    found = here.json("eval", "compare", "few.json", "few.json", code=5)["comparisons"][0]
    assert (found["conclusion"], found["missing"]) == ("undecided", 61)


def test_floors_and_judges_of_a_gate(here, results):
    """A judge decides only with a calibration that allows it."""
    words = ("eval", "gate", "same.json", "--against", "base.json")
    assert here(*words, "--floor", "outcome=0.9").endswith("gate: pass\n")
    here(*words, "--floor", "outcome=high", code=2)
    assert "give a number from 0 to 1" in here.err
    here(*words, "--metric", "judge", code=2)
    assert "a judge that is not calibrated decides nothing" in here.err
    labels = [{"run": f"run-{case}-0", "label": case % 2} for case in range(60)]
    for number, code, words_of in ((60, 0, "60 labels: Spearman 1.00, kappa 1.00"), (40, 1, "40 labels")):
        text = "\n".join(map(json.dumps, labels[:number]))
        (here.folder / "labels.jsonl").write_text(text, encoding="utf-8")
        out = here("eval", "calibrate", "worse.json", "labels.jsonl", "--out", f"{number}.json", code=code)
        assert out.startswith(words_of)
    assert here(*words, "--metric", "judge", "--calibration", "60.json").endswith("gate: pass\n")
    here(*words, "--metric", "judge", "--calibration", "40.json", code=2)
    assert "calibrated with 40 labels: collect 50 or more" in here.err
    here("eval", "calibrate", "base.json", "suite.yaml", code=2)
    assert "give labels from 0 to 1 in lines such as" in here.err


def test_reports(here, results):
    """JUnit has each run; the page needs nothing else, and shows text of a model as text."""
    here("eval", "gate", "worse.json", "--against", "base.json", "--history", "h.jsonl", code=1)
    files = ("--junit", "r.xml", "--html", "r.html", "--against", "base.json", "--history", "h.jsonl")
    here("eval", "report", "worse.json", *files)
    suite = fromstring((here.folder / "r.xml").read_text(encoding="utf-8"))  # noqa: S314  written by us
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("400", "200", "0")
    assert suite[0].find("failure").get("message") == "wrong & <b>"
    page = (here.folder / "r.html").read_text(encoding="utf-8")
    assert "wrong &amp; &lt;b&gt;" in page
    assert "<b>" not in page
    assert "&lt;case 1&gt;" in page
    assert "<h2>Gate: worse</h2>" in page
    assert page.count("<polyline") == 1
    assert "<td>runs</td><td>unknown price</td>" in page
    here("eval", "report", "few.json", "--html", "few.html", "--against", "few.json")
    assert "61 more cases would decide" in (here.folder / "few.html").read_text(encoding="utf-8")
    assert "http" not in page
    assert "<script" not in page


def test_stored_runs_are_graded(here, monkeypatch):
    """With a rubric in words; the grades are feedback, and a second time there is nothing to grade."""
    run_id = here.run("app:shopper", "What does tea cost?")
    vote = json.dumps({"criterion": {"reason": "a bare number", "score": 3}})
    with LocalServer(lambda _body: say(vote)) as server:
        monkeypatch.setenv("OPENAI_API_KEY", "none-needed")
        monkeypatch.setenv("OPENAI_BASE_URL", server.base_url)
        words = (
            "eval",
            "grade",
            "--judge",
            "openai:judging",
            "--rubric",
            "It is kind.",
            "--votes",
            "1",
            "--since",
            "1d",
        )
        out = here(*words, "--sample", "100%", "--out", "graded.json")
        assert out.startswith("1 run graded, mean 50.0%, ")
        assert here.err == f"{run_id} 50%: criterion: a bare number\n"
        assert here.json(*words)["results"] == []
    assert "feedback 3/5 by judge:judging:" in here("show", run_id)
    assert Evaluation.load(here.folder / "graded.json").mean("judge") == 0.5
    here(*words, "--sample", "120%", code=2)
    assert "'120' is not valid: give a share" in here.err
