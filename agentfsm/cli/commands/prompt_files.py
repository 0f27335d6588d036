"""The subcommands of `agentfsm prompts`: prompts of a folder, their versions, activations and tests."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from difflib import unified_diff
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import attrs

from agentfsm.agents.agent import Agent
from agentfsm.cli.argument_types import parse_count, parse_pair
from agentfsm.cli.arguments import AddParser, add_command, add_group
from agentfsm.cli.codes import ExitCode
from agentfsm.cli.resolve.agent_target import look_in_current_folder
from agentfsm.cli.terminal import user_name
from agentfsm.core.errors import MisuseError
from agentfsm.evals import RubricJudge, evaluate_prompts
from agentfsm.evals.evaluation_runner import RUNS as EVALUATION_RUNS
from agentfsm.prompts import Prompts, lint_prompt
from agentfsm.prompts.template import VariableKind

if TYPE_CHECKING:
    from agentfsm.cli.terminal import Terminal
    from agentfsm.prompts import Activation, PromptReport, PromptTemplate


def add_commands(add: AddParser) -> None:
    """Add the commands of this module."""
    sub = add_group(add, "prompts")
    plain = partial(add_command, sub, has_store=False)
    lists = plain(list, text="list the prompts with their versions; * is the version in use")
    shows = plain(show, text="show a version of a prompt, with its activations, results and findings")
    renders = plain(render, text="print a prompt with values for its variables")
    tests = plain(test, text="run the tests of a prompt with a model, and record the results beside the prompts")
    activates = plain(activate, text="make a version the one in use")
    rolls_back = plain(rollback, text="return to the version that was in use before")
    diffs = plain(diff, text="compare two versions of a prompt")
    for takes in (lists, shows, renders, tests, activates, rolls_back, diffs):
        takes.add_argument("--folder", default="prompts", help="folder of the prompts (default: %(default)s)")
    for takes in (shows, renders):
        takes.add_argument("prompt", metavar="NAME[@VERSION]", help="the prompt (default: the version in use)")
    renders.add_argument(
        "values", metavar="VARIABLE=VALUE", type=parse_pair, nargs="*", help="text; for a json variable, JSON"
    )
    text = "prompts, or versions of one, each of which is tested with each model"
    tests.add_argument("prompts", metavar="NAME[@VERSION]", nargs="+", help=text)
    text = "a model, for example openai:gpt-5.4-mini; may be given several times"
    tests.add_argument("--model", required=True, action="append", help=text)
    tests.add_argument("--judge", metavar="MODEL", help="the model that judges tests with a rubric")
    tests.add_argument(
        "--runs",
        metavar="N",
        type=parse_count,
        default=EVALUATION_RUNS,
        help="runs of each test (default: %(default)s)",
    )
    for takes in (activates, rolls_back, diffs):
        takes.add_argument("prompt", metavar="NAME", help="name of the prompt")
    activates.add_argument("version", metavar="VERSION", help="the version")
    for takes in (activates, rolls_back):
        takes.add_argument("--why", required=True, help="the reason, for the log")
        takes.add_argument("--by", metavar="WHO", default=None, help="who decides (default: your user name)")
    diffs.add_argument("before", metavar="VERSION", help="the first version")
    diffs.add_argument("after", metavar="VERSION", nargs="?", help="the second version (default: the one in use)")


def list(args: argparse.Namespace, terminal: Terminal) -> ExitCode:  # noqa: A001  the name of the command
    """List the prompts."""
    prompts = Prompts(args.folder)
    rows = [
        {
            "name": name,
            "version": prompt.version,
            "digest": prompt.digest,
            "in_use": prompt == prompts[name],
            "tests": len(prompt.tests),
            "passed": reports[-1].passed if (reports := prompts.results(prompt)) else None,
        }
        for name in prompts.names
        if name not in prompts.faults
        for prompt in prompts.versions(name)
    ]
    faults = [fault for each in prompts.faults.values() for fault in each]
    if terminal.json:
        terminal.document({"prompts": rows, "faults": faults})
    for row in () if terminal.json else rows:
        result = "not tested" if row["passed"] is None else "passed" if row["passed"] else "failed"
        terminal.out(f"{'*' if row['in_use'] else ' '} {row['name']}@{row['version']}  {row['digest']}  {result}")
    for fault in faults:
        terminal.err(fault)
    return ExitCode.FAILED if faults else ExitCode.DONE


def show(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Show a version of a prompt."""
    prompts = Prompts(args.folder)
    prompt = _find(prompts, args.prompt)
    reports, findings = prompts.results(prompt), lint_prompt(prompt, results=prompts.results(prompt))
    history = [each for each in prompts.history(prompt.name) if each.digest == prompt.digest]
    if terminal.json:
        terminal.document(
            {
                "name": prompt.name,
                "version": prompt.version,
                "digest": prompt.digest,
                "author": prompt.author,
                "changes": prompt.changes,
                "variables": [attrs.asdict(each) for each in prompt.declared],
                "text": prompt.text,
                "history": [attrs.asdict(each) for each in history],
                "results": [each.to_dict() for each in reports],
                "findings": [attrs.asdict(each) for each in findings],
            }
        )
        return ExitCode.DONE
    for line in (prompt.reference, *_format_about(prompt), *map(_format_activation, history)):
        terminal.out(line)
    for line in _format_report(reports[-1]) if reports else ():
        terminal.out(line)
    for finding in findings:
        terminal.out(f"{finding.severity}: {finding.message}")
    terminal.out(f"\n{prompt.text}")
    return ExitCode.DONE


def _format_about(prompt: PromptTemplate) -> Iterator[str]:
    yield from [f"author: {prompt.author}"] if prompt.author else []
    yield from [f"changes: {prompt.changes}"] if prompt.changes else []
    for each in prompt.declared:
        yield f"variable {each.name}: {each.kind}{'' if each.is_required else f', default {each.default!r}'}"


def _format_activation(made: Activation) -> str:
    done = {"activate": "activated", "roll_back": "rolled back to"}[made.action]
    return f"{made.at} {done} {made.version} by {made.by}: {made.why}"


def render(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Print a prompt with values for its variables."""
    prompt = _find(Prompts(args.folder), args.prompt)
    text = prompt.render(**{name: _parse_value(prompt, name, value) for name, value in args.values})
    if terminal.json:
        terminal.document({"text": text, "sources": text.sources})
    else:
        terminal.out(text)
    return ExitCode.DONE


def _parse_value(prompt: PromptTemplate, name: str, value: str) -> Any:
    if name not in prompt.variables or prompt.variables[name].kind is not VariableKind.JSON:
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise MisuseError(f"{name}={value[:80]}: the variable is json, and this is not JSON: {error}") from None


def test(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Run the tests of prompts with models, and record the results.

    Returns:
        DONE, or FAILED if a test is below its pass rate.
    """
    look_in_current_folder()  # for the functions that tests name
    prompts = Prompts(args.folder)
    tested = [_find(prompts, word) for word in args.prompts]
    judge = None if args.judge is None else RubricJudge(args.judge)

    async def run_tests() -> tuple[PromptReport, ...]:
        async with Agent(args.model[0]) as agent:
            return await evaluate_prompts(agent, tested, args.model, runs=args.runs, judge=judge)

    reports = anyio.run(run_tests)
    for report in reports:
        prompts.record(report)
    passed = all(report.passed for report in reports)
    if terminal.json:
        terminal.document({"passed": passed, "reports": [each.to_dict() | {"passed": each.passed} for each in reports]})
        return ExitCode.DONE if passed else ExitCode.FAILED
    for report in reports:
        for line in (*_format_head(report, len(reports)), *_format_report(report)):
            terminal.out(line)
    for line in _format_matrix(reports) if len(reports) > 1 else ():
        terminal.out(line)
    return ExitCode.DONE if passed else ExitCode.FAILED


def _format_head(report: PromptReport, reports: int) -> Iterator[str]:
    if reports > 1:
        yield f"{report.name}@{report.version} with {report.model}"


def _format_matrix(reports: Sequence[PromptReport]) -> Iterator[str]:
    """Yield a table of pass rates with their intervals: a row for each prompt, a column for each model."""
    cells: dict[str, dict[str, str]] = {}
    for each in reports:
        low, high = each.interval
        cells.setdefault(f"{each.name}@{each.version}", {})[each.model] = f"{each.rate:.0%} ({low:.0%} to {high:.0%})"
    models = [*dict.fromkeys(each.model for each in reports)]
    first, width = max(map(len, cells)), max(20, *map(len, models))
    yield "  ".join([" " * first, *[f"{model:>{width}}" for model in models]])
    for name, row in cells.items():
        yield "  ".join([f"{name:<{first}}", *[f"{row[model]:>{width}}" for model in models]])


def _format_report(report: PromptReport) -> Iterator[str]:
    for each in report.tests:
        low, high = each.interval
        mark = "ok    " if each.rate >= report.pass_rate else "FAILED"
        yield f"{mark} {each.name}: {each.passed} of {each.runs} passed (95 %: {low:.0%} to {high:.0%})"
        for failure, number in each.failures.items():
            yield f"       {number} times {failure}"
    yield "cost: a price is unknown" if report.usd is None else f"cost: ${report.usd:.4f}"


def activate(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Make a version the one in use. Findings of the linter go to stderr."""
    prompts = Prompts(args.folder)
    made = prompts.activate(args.prompt, args.version, by=args.by or user_name(), why=args.why)
    prompt = prompts[args.prompt]
    for finding in lint_prompt(prompt, results=prompts.results(prompt)):
        terminal.err(f"{finding.severity}: {finding.message}")
    return _report_activation(made, terminal)


def rollback(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Return to the version that was in use before."""
    made = Prompts(args.folder).roll_back(args.prompt, by=args.by or user_name(), why=args.why)
    return _report_activation(made, terminal)


def _report_activation(made: Activation, terminal: Terminal) -> ExitCode:
    if terminal.json:
        terminal.document(attrs.asdict(made))
    else:
        terminal.out(f"{made.name}@{made.version} is in use; runs in flight keep their version")
    return ExitCode.DONE


def diff(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Compare the files of two versions."""
    prompts = Prompts(args.folder)
    before = prompts[args.prompt, args.before]
    after = prompts[args.prompt] if args.after is None else prompts[args.prompt, args.after]
    old, new = ([*_format_about(each), "", *each.text.splitlines()] for each in (before, after))
    lines = [*unified_diff(old, new, before.reference, after.reference, lineterm="")]
    if terminal.json:
        terminal.document({"before": before.reference, "after": after.reference, "diff": lines})
    for line in () if terminal.json else lines:
        terminal.out(line)
    if not lines:
        terminal.err("no difference")
    return ExitCode.DONE


def _find(prompts: Prompts, word: str) -> PromptTemplate:
    """Return the prompt that a command names: NAME, or NAME@VERSION."""
    name, _, version = word.partition("@")
    return prompts[name, version] if version else prompts[name]
