"""Comparisons and gates: their conclusions, and cases that mislead a comparison of means."""

import random
from itertools import pairwise

import attrs
import pytest

from agentfsm import Agent, MisuseError
from agentfsm.evals import Case, Conclusion, GateDecision, Grade, JudgeCalibration, calibrate, compare, evaluate, gate
from agentfsm.evals.release_gate import append_history, find_creep, load_history
from agentfsm.evals.report_files import find_interval
from agentfsm.testing import FunctionModel

GOOD = JudgeCalibration(labels=60, spearman=0.8, kappa=0.7, false_passes=1, false_fails=2)


@pytest.fixture
def sample(make_evaluation):
    """Return a function that samples the outcomes of runs of an agent."""

    def draw(seed, cases, rate=0.9, runs=5, drop=0.0, **fields):
        generator, easy = random.Random(seed), random.Random(0)
        rates = [min(1.0, rate + easy.uniform(-0.1, 0.1)) * (1 - drop) for _ in range(cases)]
        return make_evaluation(*[[generator.random() < each for _ in range(runs)] for each in rates], **fields)

    return draw


@pytest.mark.parametrize(
    ("before", "after", "conclusion"),
    [
        ([[1] * 5] * 40, [[1] * 5] * 25 + [[0] * 5] * 15, Conclusion.WORSE),
        ([[1] * 5] * 25 + [[0] * 5] * 15, [[1] * 5] * 40, Conclusion.BETTER),
        ([[1] * 5] * 73, [[1] * 5] * 73, Conclusion.NOT_WORSE),
        ([[1] * 50] * 72, [[1] * 50] * 72, Conclusion.UNDECIDED),  # repeats are no further cases
        ([[1] * 5] * 10, [[1] * 5] * 10, Conclusion.UNDECIDED),  # nothing differs, in too few cases to say much
        ([[1] * 5] * 9, [[0] * 5] * 9, Conclusion.WORSE),
        ([[1] * 3] * 2, [[0] * 3] * 2, Conclusion.WORSE),  # of few cases, the runs decide about these alone
        ([[1] * 3] * 2, [[1] * 3] * 2, Conclusion.UNDECIDED),
        ([[1] * 37] * 2, [[1] * 37] * 2, Conclusion.NOT_WORSE),
        ([[0.5] * 40] * 2, [[0.5] * 40] * 2, Conclusion.UNDECIDED),  # grades between are no rates
        ([[0] * 5] * 20, [[0] * 5] * 20, Conclusion.NOT_WORSE),  # nothing can be lost
        ([[1]] * 50, [[1]] * 47 + [[0]] * 3, Conclusion.UNDECIDED),  # 6 % less, by three runs
    ],
)
def test_conclusions(make_evaluation, before, after, conclusion):
    """A conclusion needs an interval that excludes no difference, or the loss that is not accepted."""
    found = compare(make_evaluation(*before), make_evaluation(*after))
    assert found.conclusion is conclusion
    assert (found.missing > 0) == (conclusion is Conclusion.UNDECIDED)
    assert str(found).startswith(f"outcome: {conclusion}")


def test_few_cases_are_decided_by_their_runs(make_evaluation):
    """The comparison names the number of runs with which two agents with the same rates pass."""
    few = compare(make_evaluation([1] * 3, [1] * 3), make_evaluation([1] * 3, [1] * 3))
    assert (few.is_about_these_cases, few.needed_runs) == (True, 37)
    assert str(few).endswith("71 more cases would settle a loss of 5.0%, or 37 runs of each for these cases alone")
    assert compare(make_evaluation([1] * 37), make_evaluation([1] * 37)).needed_runs == 53
    loses = compare(make_evaluation([1] * 100), make_evaluation([1] * 95 + [0] * 5))
    assert (loses.conclusion, loses.needed_runs) == (Conclusion.UNDECIDED, 102)


def test_runs_of_few_cases_seldom_mislead(sample):
    """Of two cases with 60 runs: an equal agent is called worse in 5 % at most, and one that lost half is found."""
    equal = [gate(sample(seed, 2, runs=60), sample(seed + 5_000, 2, runs=60)).decision for seed in range(300)]
    assert equal.count(GateDecision.WORSE) <= 15
    worse = [gate(sample(seed, 2, runs=60, drop=0.5), sample(seed + 5_000, 2, runs=60)).decision for seed in range(50)]
    assert worse.count(GateDecision.WORSE) >= 49


@pytest.mark.parametrize(("cases", "runs"), [(10, 20), (12, 20), (20, 5), (40, 5)])
def test_repeats_of_a_case_are_no_further_cases(make_evaluation, cases, runs):
    """An agent that fails in all runs of 10 % of the kinds of cases does not pass because they are repeated."""
    before, generator = make_evaluation(*[[1] * runs] * cases), random.Random(cases)
    passed = 0
    for _ in range(12):
        after = make_evaluation(*[[generator.random() >= 0.1] * runs for _ in range(cases)])
        passed += gate(after, before).decision is GateDecision.PASS
    assert passed == 0


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([[1]] * 2, [[0]] * 2),
        ([[1] * 5] * 40, [[0] * 5] * 40),
        ([[1]] * 65, [[1]] * 65),
        ([[0] * 5] * 20, [[0] * 5] * 20),
    ],
)
def test_an_interval_contains_the_difference(make_evaluation, before, after):
    """And equal grades do not make it a point, unless nothing can be lost."""
    found = compare(make_evaluation(*before), make_evaluation(*after))
    low, high = found.interval
    assert -1 <= low <= found.difference <= high <= 1
    assert (low < high) == (found.margin > 0)


def test_the_interval_of_a_mean(make_evaluation):
    """10 passes of 10 do not show that all pass."""
    for cases, wanted in ([[1]] * 10, (0.722, 1)), ([[0]] * 10, (0, 0.278)), ([[0.5]] * 10, (0.237, 0.763)):
        assert find_interval(make_evaluation(*cases), "outcome") == pytest.approx(wanted, abs=1e-3)
    low, high = find_interval(make_evaluation(*[[1]] * 8, [0], [0]), "outcome")
    assert low < 0.6
    assert high == 1


def test_what_a_decision_would_cost(make_evaluation):
    """The report of a gate names the further cases, and their price."""
    found = make_evaluation(*[[1] * 5] * 12)
    paid = attrs.evolve(found, results=tuple(attrs.evolve(each, usd=0.02, user_usd=0.01) for each in found.results))
    asked = gate(paid, found)
    assert (asked.missing, asked.missing_usd) == (61, pytest.approx(61 * 5 * 0.03))
    assert str(asked) == "gate: undecided; 61 more cases would decide (about $9.15)"
    assert gate(found, found).missing_usd is None


def test_the_number_of_cases_that_would_settle_it(sample):
    """With it, a loss of 10 % is found, and equal agents pass, nearly always."""
    asked = compare(sample(1, 12), sample(2, 12))
    assert asked.conclusion is Conclusion.UNDECIDED
    assert f"{asked.missing} more cases would settle a loss of {asked.margin:.1%}" in str(asked)
    cases = asked.cases + asked.missing
    pairs = [(sample(seed, cases), sample(seed + 500, cases, drop=0.1)) for seed in range(100, 104)]
    assert [gate(after, before).decision for before, after in pairs].count(GateDecision.WORSE) >= 3
    equal = [gate(sample(seed, cases), sample(seed + 500, cases)).decision for seed in range(200, 204)]
    assert GateDecision.WORSE not in equal
    assert equal.count(GateDecision.PASS) >= 3


@pytest.mark.soak
def test_gates_at_the_size_that_was_asked_for(sample):
    """The same 400 times."""
    cases = compare(sample(1, 12), sample(2, 12)).needed
    worse = [gate(sample(seed + 500, cases, drop=0.1), sample(seed, cases)).decision for seed in range(1_000, 1_400)]
    assert worse.count(GateDecision.WORSE) >= 380
    equal = [gate(sample(seed + 500, cases), sample(seed, cases)).decision for seed in range(2_000, 2_400)]
    assert equal.count(GateDecision.WORSE) <= 20


def test_only_shared_cases_count(make_evaluation):
    """A case that one of the two has not scored is left out; without any other, there is nothing to compare."""
    before, after = make_evaluation(*[[1]] * 12), make_evaluation(*[[1]] * 10, [None], [None])
    assert compare(before, after).cases == 10
    with pytest.raises(
        MisuseError, match="no case has a grade of 'judge' in both evaluations; scored aspects: outcome"
    ):
        compare(before, after, metric="judge")


@pytest.mark.parametrize("lost", ["missing", "one run", "all runs", "half of the suite"])
def test_a_gate_is_not_passed_by_cases_that_do_not_count(make_evaluation, lost):
    """Cases that the candidate lacks, or has not scored in full, leave it undecided; it is worse if the others are."""
    before = make_evaluation(*[[1] * 5] * 80)
    rows = {"missing": [], "one run": [[1, 1, 1, 1, None]], "all runs": [[None] * 5], "half of the suite": []}[lost]
    good, bad = [[1] * 5] * (40 if lost == "half of the suite" else 79), [[0] * 5] * 79
    found = gate(make_evaluation(*good, *rows), before, floors={"outcome": 0.9})
    assert found.decision is GateDecision.UNDECIDED
    assert found.unscored[-1] == "case 80"
    assert "missing or not scored" in str(found)
    assert gate(make_evaluation(*bad, *rows), before).decision is GateDecision.WORSE
    assert gate(make_evaluation(*good, [1] * 5, *[[1] * 5] * 40), before).decision is GateDecision.PASS


def test_what_should_be_scored(make_evaluation):
    """A grade without a value that says why, also one of the baseline; and not what no case asks for."""
    both = make_evaluation(*[[1] * 5] * 60)
    last = both.results[-1]

    def replace(reason):
        return attrs.evolve(
            both, results=(*both.results[:-1], attrs.evolve(last, grades={"outcome": Grade(None, reason)}))
        )

    broken = replace("the simulated user broke")
    assert broken.find_unscored() == broken.find_unscored("total") == {"case 60": "the simulated user broke"}
    assert broken.find_unscored("tool_path") == replace("").find_unscored() == {}
    assert gate(both, broken).decision is GateDecision.UNDECIDED
    whole = attrs.evolve(both, cases={each.case: "0" for each in both.results} | {"other": "1"})
    assert whole.find_unscored() == {"other": "0 of 5 runs were made"}
    partly = attrs.evolve(both, results=both.results[1:], cases=dict.fromkeys(["case 1"], "0"))
    assert partly.find_unscored() == {"case 1": "4 of 5 runs were made"}


async def test_other_cases_are_not_compared(make_evaluation):
    """The same ids with another input or expectation, another suite, or tools of another kind."""
    agent = Agent(FunctionModel(lambda request: request.messages[-1].text))

    async def evaluate_texts(*texts, **fields):
        return await evaluate(agent, [Case(id=f"c{n}", input=text, **fields) for n, text in enumerate(texts)], runs=1)

    before = await evaluate_texts("hard", "harder")
    assert compare(before, await evaluate_texts("hard", "harder", tags=["new"])).cases == 2
    with pytest.raises(MisuseError, match=r"1 case \(c1\) is not the same in both evaluations"):
        compare(before, await evaluate_texts("hard", "easy"))
    with pytest.raises(MisuseError, match=r"2 cases \(c0, c1\) are not the same"):
        compare(before, await evaluate_texts("hard", "harder", expect=[lambda _answer: True]))
    both = make_evaluation(*[[1]] * 12)
    with pytest.raises(MisuseError, match="the speeds 'live' and 'recorded'"):
        compare(both, attrs.evolve(both, speed="recorded"))
    with pytest.raises(MisuseError, match="the suites 'suite' and 'other'"):
        compare(both, attrs.evolve(both, suite="other"))


def test_mcnemar_needs_single_runs(make_evaluation):
    """With one run of each case, the exact p-value is reported."""
    before, after = make_evaluation(*[[1]] * 12), make_evaluation(*[[1]] * 7, *[[0]] * 5)
    assert compare(before, after).p_value == pytest.approx(0.0625)
    assert compare(make_evaluation(*[[1, 1]] * 12), after).p_value is None


def test_a_loss_that_is_certain_and_small(make_evaluation):
    """It is worse, and accepted."""
    before = make_evaluation(*[[1] * 20] * 180)
    after = make_evaluation(*[[1] * 19 + [n % 3 > 0] for n in range(180)])
    assert compare(before, after).conclusion is Conclusion.WORSE
    assert gate(after, before).decision is GateDecision.PASS


def test_floors(make_evaluation):
    """They hold whatever the baseline has."""
    poor = make_evaluation(*[[1, 1, 1, 0]] * 100)
    assert gate(poor, poor, floors={"outcome": 0.75}).decision is GateDecision.PASS
    found = gate(poor, poor, floors={"outcome": 0.9})
    assert found.decision is GateDecision.WORSE
    assert found.reasons[-1] == "outcome: 75.0% is below the floor of 90.0%"
    with pytest.raises(MisuseError, match="numbers from 0 to 1"):
        gate(poor, poor, floors={"outcome": 90})
    with pytest.raises(MisuseError, match="no case has a grade of 'tool_path'"):
        gate(poor, poor, floors={"tool_path": 0.9})


def test_a_slow_loss_is_found(make_evaluation, tmp_path):
    """Three releases that each lose 4 % pass against the one before, and not against the pinned baseline."""
    versions = [
        make_evaluation(*[[n >= lost] * 5 for n in range(100)], version=str(lost), at=f"2026-01-{lost + 1:02}")
        for lost in (0, 4, 8, 12)
    ]
    assert all(gate(b, a).decision is not GateDecision.WORSE for a, b in pairwise(versions))
    assert gate(versions[-1], versions[0]).decision is GateDecision.WORSE
    for each in versions:
        history = append_history(tmp_path / "history.jsonl", each, GateDecision.PASS)
    assert load_history(tmp_path / "history.jsonl") == history
    assert [entry.means["outcome"] for entry in history] == [1, 0.96, 0.92, 0.88]
    assert find_creep(history) == ("outcome: 88.0%, and it was 100.0% in version 0 at 2026-01-01",)
    assert find_creep(history[:2]) == ()
    (tmp_path / "other.jsonl").write_text("{}\n", encoding="utf-8")
    with pytest.raises(MisuseError, match="is not a history of evaluations"):
        load_history(tmp_path / "other.jsonl")


@pytest.mark.parametrize(
    ("labels", "agreement", "message"),
    [(49, 0.9, "calibrated with 49 labels"), (60, 0.59, "does not agree with people"), (60, 0.6, None)],
)
def test_a_judge_has_to_be_calibrated(make_evaluation, labels, agreement, message):
    """Fewer than 50 labels or less than 0.6 decide nothing."""
    found = make_evaluation(*[[0.9] * 5] * 100, metric="judge")
    with pytest.raises(MisuseError, match="not calibrated"):
        gate(found, found, metrics=["judge"])
    made = JudgeCalibration(labels=labels, spearman=0.9, kappa=agreement, false_passes=0, false_fails=0)
    if message is None:
        assert gate(found, found, metrics=["judge"], calibration=made).decision is GateDecision.PASS
        return
    with pytest.raises(MisuseError, match=message):
        gate(found, found, metrics=["judge"], calibration=made)


def test_a_calibration():
    """It counts where a judge and people differ; answers that were not scored are not 0."""
    labels = [each % 5 / 4 for each in range(60)]
    assert calibrate(labels, labels) == JudgeCalibration(labels=60, spearman=1, kappa=1, false_passes=0, false_fails=0)
    kind = calibrate([None, None, *[min(1, each + 0.25) for each in labels[2:]]], labels)
    assert (kind.labels, kind.unscored, kind.false_passes, kind.false_fails) == (58, 2, 12, 0)
    assert calibrate([1.0] * 60, labels).find_doubt().startswith("the judge does not agree")
    with pytest.raises(MisuseError, match="one label for each grade"):
        calibrate([1.0], labels)
    with pytest.raises(MisuseError, match="no answer has both"):
        calibrate([None], [1.0])
