"""Suites in files of YAML, JSON, JSON Lines or CSV, cases made from real runs, and the tests of a prompt as cases."""

from __future__ import annotations

import csv
import io
import json
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs

from agentfsm._lib.plugins import require_extra
from agentfsm._lib.shared_files import change_file
from agentfsm.agents.extras import resolve_model
from agentfsm.core.calls import parse_arguments
from agentfsm.core.errors import MisuseError
from agentfsm.core.json_text import build_object, map_leaves
from agentfsm.core.messages import Outcome, TextPart
from agentfsm.core.run import Run
from agentfsm.core.sensitive_text import mask_sensitive
from agentfsm.core.validation import SHARE, shorten_repr
from agentfsm.evals.case import Case, Suite
from agentfsm.evals.evaluation_runner import PARALLEL, RUNS, evaluate
from agentfsm.evals.recorded_agents import list_results
from agentfsm.evals.rubric_judge import GOOD, RubricJudge
from agentfsm.evals.scorers import OutcomeScorer, RunScorer, add_usd
from agentfsm.prompts import PromptReport, PromptTemplate, PromptTestResult
from agentfsm.prompts.evaluation import PASS_RATE
from agentfsm.prompts.template import RenderedPrompt

if TYPE_CHECKING:
    from agentfsm.agents.agent import Agent
    from agentfsm.evals.results import CaseResult
    from agentfsm.ports.model import Model

_FIELDS: Final = attrs.fields_dict(Case)
# Columns of CSV whose cells are numbers, and those that are lists of words.
_NUMBERS: Final = frozenset({"max_steps", "max_tokens", "max_usd", "max_seconds"})
_WORDS: Final = frozenset({"roles", "tags", "files"})


def load_suite(path: str | Path) -> Suite:
    """Read a suite: YAML or JSON with `cases` and optionally `name`, JSON Lines with a case in each line, or CSV.

    The first row of a CSV names fields of a case; a column `metadata.NAME` is one value of its metadata. Cells that
    begin with a bracket are JSON, and lists of words are separated by commas. Paths of `files` are those in the folder
    of the suite and below it. A column or a key that is there twice is refused.

    Raises:
        MisuseError: if the file cannot be read, or a case is wrong; the message names it.
        MissingExtraError: if it is YAML, and the extra `evals` is not installed.
    """
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise MisuseError(f"the suite {file} cannot be read: {error}") from None
    return _parse_suite(text, file)


def _parse_suite(text: str, file: Path) -> Suite:
    """Return the suite that the text of a file describes."""
    name, kind = file.stem, file.suffix
    try:
        if kind in {".yaml", ".yml"}:
            name, cases = _read_cases(_parse_yaml(text, file), file)
        elif kind == ".json":
            name, cases = _read_cases(json.loads(text, object_pairs_hook=build_object), file)
        elif kind == ".jsonl":
            lines = enumerate(text.split("\n"), 1)
            cases = [_parse_json(line, f"line {number}") for number, line in lines if line.strip()]
        elif kind == ".csv":
            rows = csv.DictReader(io.StringIO(text), strict=True)
            build_object([(f"column {each.strip()}", None) for each in rows.fieldnames or ()])
            cases = [_parse_row(row, f"line {rows.line_num}") for row in rows]
        else:
            raise MisuseError(
                f"the suite {file}: give a file .yaml, .json, .jsonl or .csv, or module:suite for one in Python"
            )
    except (ValueError, RecursionError) as error:
        raise MisuseError(f"the suite {file} has a value that is not JSON: {error}") from None
    except csv.Error as error:
        raise MisuseError(f"the suite {file} is not CSV: {error}") from None
    return Suite([_build_case(each, file, number) for number, each in enumerate(cases, 1)], name=name)


def _parse_yaml(text: str, file: Path) -> Any:
    with require_extra("a suite in YAML", "evals", "yaml"):
        import yaml  # type: ignore[import-untyped]  # noqa: PLC0415  an extra

    class Loader(yaml.SafeLoader):  # type: ignore[misc]  # yaml has no types
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            build_object([(str(key.value), None) for key, _value in node.value])  # YAML would keep the second one
            found: dict[Any, Any] = super().construct_mapping(node, deep)
            return found

    try:
        return yaml.load(text, Loader)  # noqa: S506  a safe loader
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise MisuseError(f"the suite {file} is not YAML: {error}") from None


def _parse_json(text: str, place: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=build_object)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None


def _read_cases(data: Any, file: Path) -> tuple[str, Sequence[Any]]:
    match data:
        case {"cases": [*cases], **rest} if rest.keys() <= {"name"}:
            return str(rest.get("name") or file.stem), cases
        case [*cases] if file.suffix == ".json":
            return file.stem, cases
    raise MisuseError(f"the suite {file}: give a list of cases below `cases:`, and nothing else but `name:`")


def _parse_row(row: Mapping[str | None, Any], place: str) -> dict[str, Any]:
    """Return the fields of a case from a row of CSV; an empty cell is a field that is not given."""
    case: dict[str, Any] = {}
    if row.get(None):
        raise csv.Error(f"{place} has more cells than the first one: {shorten_repr(row[None])}")
    for column, cell in row.items():
        if not cell or column is None:
            continue
        name, _, key = column.strip().partition(".")
        is_json = cell[0] in "[{" or name in _NUMBERS
        value = _parse_json(cell, f"{place}, column {column!r}, {shorten_repr(cell)}") if is_json else cell
        if name in _WORDS and isinstance(value, str):
            value = [word.strip() for word in value.split(",")]
        if key:
            case.setdefault(name, {})[key] = value
        else:
            case[name] = value
    return case


def _build_case(data: object, file: Path, number: int) -> Case:
    place = f"{file}, case {number}"
    if not isinstance(data, Mapping):
        raise MisuseError(f"{place}: {shorten_repr(data)} is not a case: give its fields by name")
    if unknown := next((name for name in data if name not in _FIELDS), None):
        raise MisuseError(f"{place} has the unknown field {unknown!r}; fields: {', '.join(_FIELDS)}")
    given = dict(data)
    empty = [name for name, each in given.items() if each is None and _FIELDS[name].default is not None]
    if empty:
        raise MisuseError(f"{place}: the field {empty[0]!r} is empty: give it a value, or leave it out")
    if isinstance(files := given.get("files"), list):
        folder = file.parent.resolve()
        given["files"] = [folder / each if isinstance(each, str) else each for each in files]
        for each in given["files"]:
            if isinstance(each, Path) and not each.resolve().is_relative_to(folder):
                raise MisuseError(f"{place}: the file {str(each)!r} is not in the folder of the suite, or below it")
    try:
        return Case(**given)
    except (MisuseError, TypeError, ValueError, AttributeError) as error:  # a value of another type than the field's
        raise MisuseError(f"{place}: {error}") from None


def describe_run(run: Run[Any]) -> dict[str, Any]:
    """Return a case made from a run, as plain data, with likely secrets masked.

    It has the conversation that the run continues, its input, user, roles and tenant, its calls and turns as the path
    and the maximum, its answer, and the results of its tools as fixtures. A run with a plan has no fixtures.

    Raises:
        MisuseError: if the run is not over, or its input or a result is more than a text.
    """
    header = run.header
    if not run.is_over:
        raise MisuseError(f"run {run.id} is not over: make a case of a run that is")
    texts = [part.text for part in header.prompt if isinstance(part, TextPart)]
    results = list_results(run) if run.plan is None else []
    if len(texts) != len(header.prompt) or any(result.parts for _call, result in results):
        raise MisuseError(f"the input or a result of run {run.id} is not only text: write the case in Python")
    before = run.messages[: run.own_start]
    who = {"user": header.user, "roles": [*header.roles], "tenant": header.tenant}
    fixtures = [
        {
            "tool": call.name,
            "arguments": parse_arguments(call),
            "content": result.content,
            "outcome": str(result.outcome),
            "error_type": result.error_type and str(result.error_type),
            "labels": [*map(str, result.labels)],
        }
        for call, result in results
    ]
    case = {
        "id": run.id,
        **({"messages": import_module("agentfsm.models.openai.conversion").to_openai(before)} if before else {}),
        "input": "\n".join(texts),
        **{name: value for name, value in who.items() if value},
        "paths": [[call.name for call in run.calls if call.outcome is not Outcome.SKIPPED]],
        "max_steps": max(run.turn, 1),
        **({"answer": run.answer} if run.stop_reason == "completed" and run.answer else {}),
        "recorded": run.id,
        **(
            {}
            if run.plan
            else {"fixtures": [{k: v for k, v in each.items() if v or k == "content"} for each in fixtures]}
        ),
    }
    names = {"id", "recorded", "paths"}  # of the store and of the program, which are no personal data
    masked: dict[str, Any] = {name: value if name in names else _mask(value) for name, value in case.items()}
    return masked


def _mask(value: Any) -> Any:
    return map_leaves(value, lambda leaf, _name: mask_sensitive(leaf) if isinstance(leaf, str) else leaf)


def add_case(path: str | Path, data: Mapping[str, Any]) -> Suite:
    """Append a case to a suite's file, which is created if there is none, and return the suite.

    Raises:
        MisuseError: as `load_suite`, also if the case has an id of the suite; the file is then unchanged.
    """
    file = Path(path)
    if file.suffix not in {".yaml", ".yml", ".jsonl"}:
        raise MisuseError(f"the suite {file}: a case is appended to a file .yaml or .jsonl")
    suites: list[Suite] = []

    def add(content: str | None) -> str:
        before = content or ""
        if file.suffix == ".jsonl":
            text = f"{before.rstrip()}\n{json.dumps(data, ensure_ascii=False)}\n".lstrip()
        else:
            text = f"{before.rstrip() or 'cases:'}\n{_format_item(data, before)}"
        suites.append(_parse_suite(text, file))
        return text

    change_file(file, add, mode=0o666)
    return suites[-1]


def _format_item(data: Mapping[str, Any], before: str) -> str:
    """Return a case as an item of YAML, as far indented as the items before it."""
    with require_extra("a suite in YAML", "evals", "yaml"):
        import yaml  # noqa: PLC0415  an extra
    first = next((line for line in before.splitlines() if line.lstrip().startswith("- ")), "  - ")
    item: str = yaml.safe_dump([dict(data)], sort_keys=False, allow_unicode=True, width=100)
    return textwrap.indent(item, first[: len(first) - len(first.lstrip())])


async def evaluate_prompt(
    agent: Agent[Any],
    prompt: PromptTemplate,
    *,
    runs: int = RUNS,
    pass_rate: float = PASS_RATE,
    judge: RubricJudge | None = None,
    label: str = "",
    parallel: int = PARALLEL,
) -> PromptReport:
    """Run all tests of a prompt with an agent, each several times, as `evaluate` does.

    Args:
        agent: The agent. Its instructions are replaced: by the prompt, if the test has an `input`; else they are empty,
            and the prompt is the user message.
        prompt: The prompt.
        runs: Runs of each test, 1 or more; replies of models vary.
        pass_rate: Pass rate that each test needs, above 0 and up to 1.
        judge: Judge of the tests that have a rubric; a grade of 0.75 or more passes. None: no test may have one.
        label: As in `evaluate`: tests with the same agent, prompt and label are not run again.
        parallel: Maximum of runs at a time, 1 or more.

    Raises:
        MisuseError: if the prompt has no tests, or a test lacks a value or a judge; nothing was run.
        AgentError: as `evaluate`.
    """
    SHARE.check("evaluate_prompt", "pass_rate", pass_rate)
    texts = _render_tests(prompt, judge)
    tests, at, costs = [], "", list[float | None]()
    for test, text in zip(prompt.tests, texts, strict=True):
        rubric = test.rubric or None
        case = Case(id=test.name, input=test.input or str(text), expect=test.checks, rubric=rubric)
        scorers: list[RunScorer] = [OutcomeScorer()] if rubric is None or judge is None else [OutcomeScorer(), judge]
        tested = agent.with_(instructions=text if test.input else "")
        found = await evaluate(
            tested, [case], runs=runs, scorers=scorers, label=f"{label}{prompt.reference}", parallel=parallel
        )
        reasons = [_find_reason(each) for each in found.results]
        failures = Counter(reason for reason in reasons if reason is not None)
        passed = reasons.count(None)
        tests.append(PromptTestResult(name=test.name, runs=runs, passed=passed, failures=dict(failures)))
        at = found.at
        costs += [found.usd, found.judge_usd]
    return PromptReport(
        name=prompt.name,
        version=prompt.version,
        digest=prompt.digest,
        model=agent.model.name,
        at=at,
        tests=tuple(tests),
        pass_rate=pass_rate,
        usd=add_usd(costs),
    )


def _render_tests(prompt: PromptTemplate, judge: RubricJudge | None) -> list[RenderedPrompt]:
    """Return the texts of all tests of a prompt, before the first request."""
    place = f"prompt {prompt.name} {prompt.version}"
    if not prompt.tests:
        raise MisuseError(f"{place} has no tests: add [[tests]] to its front matter")
    if judge is None and (graded := next((test.name for test in prompt.tests if test.rubric), None)):
        raise MisuseError(f"{place}: the test {graded!r} has a rubric: give judge=RubricJudge(...), or --judge MODEL")
    return [prompt.render(**test.values) for test in prompt.tests]


def _find_reason(result: CaseResult) -> str | None:
    """Return the reason why a run fails its test, by a check or the judge; None if it passes."""
    for grade in result.grades.values():
        if grade.value is None or grade.value < GOOD:
            return grade.reason or "it is not good enough"
    return None


async def evaluate_prompts(
    agent: Agent[Any],
    prompts: Iterable[PromptTemplate],
    models: Iterable[Model | str],
    **options: Any,
) -> tuple[PromptReport, ...]:
    """Run the tests of several prompts, or versions of one, with several models each, as `evaluate_prompt` does.

    Args:
        agent: The agent, with which the models take turns.
        prompts: The prompts.
        models: The models, or their names.
        options: Further arguments of `evaluate_prompt`.

    Returns:
        A report for each prompt and model: all models of the first prompt, then those of the next.

    Raises:
        MisuseError: as `evaluate_prompt`; if any prompt is wrong, nothing was run.
        AgentError: as `evaluate`.
    """
    given, resolved = tuple(prompts), [resolve_model(model) for model in models]
    if not given or not resolved:
        raise MisuseError("evaluate_prompts(agent, prompts, models): give one prompt and one model or more")
    for prompt in given:
        _render_tests(prompt, options.get("judge"))
    return tuple(
        [await evaluate_prompt(agent.with_(model=model), prompt, **options) for prompt in given for model in resolved]
    )
