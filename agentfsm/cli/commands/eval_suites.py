"""The subcommands of `agentfsm eval`: run suites, compare and gate the results, and make cases from runs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import anyio
import attrs

from agentfsm.agents.agent import Agent
from agentfsm.agents.runs import Runs
from agentfsm.cli.argument_types import parse_count, parse_output_file, parse_pair, parse_share, parse_since, parse_usd
from agentfsm.cli.arguments import AddParser, add_agent, add_command, add_group, add_run_id
from agentfsm.cli.codes import ExitCode
from agentfsm.cli.render.formatting import format_count
from agentfsm.cli.resolve.agent_target import is_target, load_target, look_in_current_folder
from agentfsm.cli.resolve.run_lookup import resolve_agent_or_rollout, run_in_store
from agentfsm.cli.resolve.store_location import open_existing_store
from agentfsm.cli.terminal import stdout_to_stderr
from agentfsm.core.errors import MisuseError
from agentfsm.core.usage import format_usd
from agentfsm.evals import (
    SCORERS,
    Evaluation,
    RubricJudge,
    Suite,
    add_case,
    calibrate,
    compare,
    evaluate,
    gate,
    grade_stored,
)
from agentfsm.evals.comparison import WORSE_BY, Conclusion, name_cases
from agentfsm.evals.evaluation_runner import PARALLEL as EVALUATIONS_PARALLEL
from agentfsm.evals.evaluation_runner import RUNS as EVALUATION_RUNS
from agentfsm.evals.evaluation_runner import EvaluationLimitError
from agentfsm.evals.release_gate import (
    GateDecision,
    append_history,
    check_floors,
    check_judges,
    find_creep,
    load_history,
)
from agentfsm.evals.report_files import find_interval, render_html, render_junit
from agentfsm.evals.rubric_judge import VOTES as JUDGE_VOTES
from agentfsm.evals.rubric_judge import JudgeCalibration
from agentfsm.evals.suite_files import describe_run, load_suite
from agentfsm.prompts.assertions import load_function

if TYPE_CHECKING:
    from agentfsm.cli.terminal import Terminal
    from agentfsm.evals import CaseResult, GateReport

# Exit codes of a gate. A wrong usage, such as a missing baseline, is USAGE.
_GATE_CODES: Final = {
    GateDecision.PASS: ExitCode.DONE,
    GateDecision.WORSE: ExitCode.FAILED,
    GateDecision.UNDECIDED: ExitCode.UNDECIDED,
}
_CONCLUSION_CODES: Final = {Conclusion.WORSE: ExitCode.FAILED, Conclusion.UNDECIDED: ExitCode.UNDECIDED}


def add_commands(add: AddParser) -> None:
    """Add the commands of this module."""
    sub = add_group(add, "eval")
    run_options = add_command(sub, run, text="run each case several times, and grade the runs")
    run_options.add_argument("suite", metavar="SUITE", help="a file .yaml, .json, .jsonl or .csv, or module:suite")
    add_agent(run_options)
    run_options.add_argument(
        "--runs",
        metavar="N",
        type=parse_count,
        default=EVALUATION_RUNS,
        help="runs of each case (default: %(default)s)",
    )
    run_options.add_argument(
        "--speed",
        choices=["live", "recorded", "replay"],
        default="live",
        help="recorded: tools answer from the recorded runs; replay: nothing is called (default: %(default)s)",
    )
    text = "function of the first run of a conversation that returns its dependencies, or an object (default: none)"
    run_options.add_argument("--deps", metavar="MODULE:NAME", help=text)
    run_options.add_argument(
        "--label", default="", help="distinguishes evaluations of one version; others are continued"
    )
    run_options.add_argument("--judge", metavar="MODEL", help="also grade answers with this model, of another family")
    compare = add_command(sub, compare_results, text="compare two results, case by case", name="compare")
    compare.add_argument("before", metavar="BEFORE", help="the baseline's result")
    compare.add_argument("after", metavar="AFTER", help="the candidate's result")
    text = "decide whether a result is worse than the baseline: exit 0 pass, 1 worse, 5 undecided"
    gate = add_command(sub, gate_result, text=text, name="gate")
    for takes in (run_options, gate):
        text = "lowest accepted mean, from 0 to 1: below it the exit code is 1"
        takes.add_argument("--floor", metavar="ASPECT=SHARE", type=parse_pair, action="append", default=[], help=text)
    gate.add_argument("--calibration", metavar="FILE", help="calibration of the judge, to gate what it grades")
    new = add_command(
        sub,
        make_case,
        text="make a case from a run, with the results of its tools and secrets masked, and append it to a suite",
        name="from-run",
    )
    add_run_id(new)
    text = "a file .yaml or .jsonl; created if there is none (default: %(default)s)"
    new.add_argument("suite", metavar="SUITE", nargs="?", default="regressions.yaml", help=text)
    text = "grade answers of stored runs with a judge, each once by a rubric, and record the grades as feedback"
    grade_options = add_command(sub, grade, text=text)
    grade_options.add_argument(
        "--judge", metavar="MODEL", required=True, help="the model that grades, of another family"
    )
    text = "a sentence that holds of a good answer; may be given several times (default: the judge's criteria)"
    grade_options.add_argument("--rubric", metavar="TEXT", action="append", help=text)
    grade_options.add_argument(
        "--votes", metavar="N", type=parse_count, default=JUDGE_VOTES, help="votes (default: %(default)s)"
    )
    grade_options.add_argument(
        "--own-family", action="store_true", help="allow a judge of the model family of the runs"
    )
    grade_options.add_argument(
        "--since", metavar="TIME", type=parse_since, default=0.0, help="runs that ended then or later, such as 1d"
    )
    grade_options.add_argument(
        "--sample", metavar="SHARE", type=parse_share, default=1.0, help="share of the runs, such as 5%% (default: all)"
    )
    grade_options.add_argument("--agent", metavar="NAME", help="only runs of the agent with this name")
    report_options = add_command(sub, report, text="show a result, and write it as JUnit or HTML")
    calibrate = add_command(
        sub, calibrate_judge, text="compare the grades of a judge with labels of people", name="calibrate"
    )
    calibrate.add_argument("--metric", default="judge", help="name of the judge (default: %(default)s)")
    calibrate.add_argument(
        "--out", metavar="FILE", type=parse_output_file, help="write the calibration as JSON, for the gate"
    )
    for takes in (run_options, grade_options):
        takes.add_argument(
            "--parallel",
            metavar="N",
            type=parse_count,
            default=EVALUATIONS_PARALLEL,
            help="runs at a time (default: %(default)s)",
        )
        text = "US dollars that all of it may cost" + ("; an estimate is shown first" if takes is run_options else "")
        takes.add_argument("--usd", metavar="AMOUNT", type=parse_usd, help=text)
        takes.add_argument("--out", metavar="FILE", help="write the result as JSON, for the other commands")
    for takes in (gate, report_options, calibrate):
        takes.add_argument("result", metavar="RESULT", help="a result that `eval run --out` wrote")
    calibrate.add_argument("labels", metavar="LABELS", help="JSON Lines with run and label, from 0 to 1")
    for takes in (run_options, gate, report_options):
        takes.add_argument("--against", metavar="FILE", required=takes is gate, help="the pinned baseline's result")
    for takes in (compare, gate):
        takes.add_argument("--metric", metavar="ASPECT", action="append", help="aspect to compare (default: outcome)")
    for takes in (run_options, compare, gate, report_options):
        takes.add_argument(
            "--worse-by", metavar="SHARE", type=float, default=WORSE_BY, help="relative loss not accepted (%(default)s)"
        )
    for takes in (gate, report_options):
        takes.add_argument("--history", metavar="FILE", help="history of versions; gate appends to it")
    for takes in (run_options, report_options):
        takes.add_argument("--junit", metavar="FILE", type=parse_output_file, help="write JUnit's XML")
        takes.add_argument("--html", metavar="FILE", type=parse_output_file, help="write a page of HTML")


def run(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Evaluate an agent, and compare it with a baseline if there is one."""
    look_in_current_folder()
    with stdout_to_stderr():
        deps = None if args.deps is None else load_function(args.deps, "--deps")
        suite = load_target(args.suite, Suite) if is_target(args.suite) else load_suite(args.suite)
    against = None if args.against is None else Evaluation.load(args.against)
    floors = _parse_floors(args.floor)
    target, _location = resolve_agent_or_rollout(args, terminal)
    scorers = SCORERS if args.judge is None else (*SCORERS, RubricJudge(args.judge))
    whole, done = len(suite) * (1 if args.speed == "replay" else args.runs), 0

    def show(result: CaseResult) -> None:
        nonlocal done
        done += 1
        grade = result.grades["outcome"]
        word = "passed" if result.passed else "not scored" if grade.value is None else "failed"
        why = f": {grade.reason}" if grade.reason else ""
        terminal.err(f"{done:>{len(str(whole))}}/{whole} {result.case} run {result.repeat} {word}{why}"[:300])

    def state(usd: float | None) -> None:
        limit = "" if args.usd is None else f", at most {format_usd(args.usd)}"
        terminal.err(f"estimate: {whole} runs of cases, {format_usd(usd, estimated=True)}{limit}")

    async def execute() -> Evaluation:
        async with AsyncExitStack() as opened:
            for agent in [target] if isinstance(target, Agent) else target.arms.values():
                await opened.enter_async_context(agent)
            return await evaluate(
                target,
                suite,
                runs=args.runs,
                scorers=scorers,
                speed=args.speed,
                deps=deps,
                label=args.label,
                parallel=args.parallel,
                usd=args.usd,
                on_estimate=state,
                on_result=show,
            )

    try:
        with stdout_to_stderr():  # stdout is reserved for the report
            found = anyio.run(execute)
    except EvaluationLimitError as error:
        if args.out is not None and error.evaluation is not None:
            error.evaluation.save(args.out)
        raise
    if kept := sum(each.is_kept for each in found.results):
        terminal.err(
            f"{kept} of {len(found.results)} runs are those of an earlier evaluation of this version. It does not see "
            "changes in the code of tools and functions: after one, give the agent another version, or --label NAME"
        )
    if args.out is not None:
        found.save(args.out)
    decided = None if against is None else gate(found, against, worse_by=args.worse_by, floors=floors)
    _write_files(args, found, decided)
    _report(terminal, found, decided)
    if decided is not None:
        return _GATE_CODES[decided.decision]
    check_judges(found, floors, None)
    checked = check_floors(found, floors)
    for _decision, reason in checked:
        terminal.err(reason)
    return min([_GATE_CODES[each] for each, _reason in checked], default=ExitCode.DONE)


def _write_files(args: argparse.Namespace, found: Evaluation, decided: GateReport | None) -> None:
    history = load_history(args.history) if getattr(args, "history", None) else ()
    if args.junit is not None:
        Path(args.junit).write_text(render_junit(found), encoding="utf-8")
    if args.html is not None:
        Path(args.html).write_text(render_html(found, decided, history), encoding="utf-8")


def _report(terminal: Terminal, found: Evaluation, decided: GateReport | None) -> None:
    unscored = found.find_all_unscored()
    if terminal.json:
        means = {name: found.mean(name) for name in found.metrics}
        terminal.document(
            {
                "means": means,
                "unscored": unscored,
                **found.to_dict(),
                "gate": None if decided is None else _as_json(decided),
            }
        )
        return
    for line in _format_evaluation(found):
        terminal.out(line)
    for name, cases in unscored.items():
        terminal.out(f"  {name}: {name_cases([*cases])} not scored: {next(iter(cases.values()))}"[:300])
    for line in () if decided is None else (*decided.reasons, str(decided)):
        terminal.out(line)


def _format_evaluation(found: Evaluation) -> Iterator[str]:
    yield f"{found.suite}: {found.agent} {found.version}".strip() + f", {found.model}, {found.runs} runs of each case"
    for name in found.metrics:
        interval = find_interval(found, name)
        shown = "" if interval is None else f" (95 %: {interval[0]:.1%} to {interval[1]:.1%})"
        yield f"  {name:<10} {found.mean(name):7.1%}{shown}"
    yield f"  pass^{found.runs}     {found.pass_hat(found.runs):7.1%}"
    yield f"  tokens     {sum(each.tokens for each in found.results):7,}"
    for name, usd in (("cost", found.usd), ("users", found.user_usd), ("judges", found.judge_usd)):
        if usd != 0:
            yield f"  {name:<10} {format_usd(usd, estimated=found.estimated)}"
    for each in found.results:
        for finding in each.findings:
            yield f"  {each.case} run {each.repeat}: {finding}"


def _as_json(value: Any) -> dict[str, Any]:
    data: dict[str, Any] = attrs.asdict(value)
    return data


def compare_results(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Compare two results by one aspect or several."""
    before, after = Evaluation.load(args.before), Evaluation.load(args.after)
    found = [compare(before, after, metric=name, worse_by=args.worse_by) for name in _list_metrics(args)]
    if terminal.json:
        terminal.document({"comparisons": [{**_as_json(each), "missing": each.missing} for each in found]})
    for each in () if terminal.json else found:
        terminal.out(str(each))
    codes = [_CONCLUSION_CODES.get(each.conclusion, ExitCode.DONE) for each in found]
    return min((code for code in codes if code is not ExitCode.DONE), default=ExitCode.DONE)


def _list_metrics(args: argparse.Namespace) -> list[str]:
    return args.metric or ["outcome"]


def gate_result(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Decide whether a candidate may replace the pinned baseline."""
    candidate, against = Evaluation.load(args.result), Evaluation.load(args.against)
    decided = gate(
        candidate,
        against,
        metrics=_list_metrics(args),
        worse_by=args.worse_by,
        floors=_parse_floors(args.floor),
        calibration=None if args.calibration is None else _load_calibration(args.calibration),
    )
    history = () if args.history is None else append_history(args.history, candidate, decided.decision)
    creep = find_creep(history, args.worse_by) if history else ()
    if terminal.json:
        terminal.document({**_as_json(decided), "creep": creep})
    for line in () if terminal.json else (*decided.reasons, *creep, str(decided)):
        terminal.out(line)
    return _GATE_CODES[decided.decision]


def _parse_floors(given: Iterable[tuple[str, str]]) -> dict[str, float]:
    try:
        return {name: float(value) for name, value in given}
    except ValueError as error:
        raise MisuseError(f"--floor: {error}; give a number from 0 to 1, as outcome=0.9") from None


def _load_calibration(path: str) -> JudgeCalibration:
    try:
        return JudgeCalibration(**json.loads(Path(path).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise MisuseError(f"{path} is not a calibration (agentfsm eval calibrate): {error}") from None


def make_case(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Make a case from a run, and append it to a suite."""
    store = open_existing_store(args.store)
    look_in_current_folder()  # for the functions that the suite names
    data = describe_run(run_in_store(store, lambda: Runs(store).load(args.id)))
    suite = add_case(args.suite, data)
    if terminal.json:
        terminal.document({"suite": args.suite, "cases": len(suite), "case": data})
    else:
        terminal.out(
            f"{args.suite} has {format_count(len(suite), 'case')}; look at {data['id']}: its path is that of the run"
        )
    return ExitCode.DONE


def grade(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Grade stored runs with a judge, and record the grades as feedback."""
    rubric = {} if args.rubric is None else {"rubric": args.rubric}
    judge = RubricJudge(args.judge, votes=args.votes, own_family=args.own_family, **rubric)
    store = open_existing_store(args.store)

    def show(result: CaseResult) -> None:
        found = result.grades[judge.name]
        value = "not scored" if found.value is None else f"{found.value:.0%}"
        terminal.err(f"{result.run_id} {value}{f': {found.reason}' if found.reason else ''}"[:300])

    found = run_in_store(
        store,
        lambda: grade_stored(
            store,
            judge,
            since=args.since,
            sample=args.sample,
            agent=args.agent,
            usd=args.usd,
            parallel=args.parallel,
            on_result=show,
        ),
    )
    if args.out is not None:
        found.save(args.out)
    mean, interval = found.mean(judge.name), find_interval(found, judge.name)
    if terminal.json:
        terminal.document({"mean": mean, **found.to_dict()})
        return ExitCode.DONE
    about = "" if mean is None else f", mean {mean:.1%}"
    about += "" if interval is None else f" (95 %: {interval[0]:.1%} to {interval[1]:.1%})"
    terminal.out(f"{format_count(len(found.results), 'run')} graded{about}, {format_usd(found.judge_usd)}")
    return ExitCode.DONE


def report(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Show a result, and write it as JUnit or HTML."""
    found = Evaluation.load(args.result)
    decided = None if args.against is None else gate(found, Evaluation.load(args.against), worse_by=args.worse_by)
    _write_files(args, found, decided)
    _report(terminal, found, decided)
    return ExitCode.DONE


def calibrate_judge(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Compare the grades of a judge with labels of people.

    Returns:
        DONE, or FAILED if the judge may decide nothing.
    """
    found, labels = Evaluation.load(args.result), _load_labels(args.labels)
    grades = {each.run_id: each.grades[args.metric].value for each in found.results if args.metric in each.grades}
    if unknown := next((run_id for run_id in labels if run_id not in grades), None):
        raise MisuseError(f"{args.labels}: {args.result} has no grade {args.metric!r} of a run {unknown!r}")
    judges = {each.grades[args.metric].judge for each in found.results if args.metric in each.grades} - {""}
    if len(judges) > 1:
        raise MisuseError(f"{args.result}: {args.metric!r} is of several judges: calibrate each by its own result")
    made = calibrate([grades[run_id] for run_id in labels], [*labels.values()], judge="".join(judges))
    if args.out is not None:
        Path(args.out).write_text(json.dumps(attrs.asdict(made)) + "\n", encoding="utf-8")
    if terminal.json:
        terminal.document({**_as_json(made), "doubt": made.find_doubt()})
    else:
        terminal.out(
            f"{made.labels} labels: Spearman {made.spearman:.2f}, kappa {made.kappa:.2f}, {made.false_passes} false "
            f"passes, {made.false_fails} false fails, {made.unscored} unscored"
        )
    if (why := made.find_doubt()) is not None:
        terminal.err(why)
    return ExitCode.DONE if why is None else ExitCode.FAILED


def _load_labels(path: str) -> dict[str, float]:
    """Read labels in JSON Lines: {"run": "RUN", "label": 0.75}."""
    try:
        lines = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
        return {str(line["run"]): float(line["label"]) for line in lines}
    except (OSError, ValueError, KeyError, TypeError) as error:
        wanted = '{"run": "RUN", "label": 0.75}'
        raise MisuseError(f"{path}: give labels from 0 to 1 in lines such as {wanted} ({error!r})") from None
