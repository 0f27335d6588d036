"""Reports of an evaluation as files: JUnit for CI servers, and one page of HTML without scripts or other files."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from html import escape
from statistics import NormalDist, fmean
from typing import TYPE_CHECKING, Final
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from agentfsm.core.text_safety import strip_unsafe
from agentfsm.core.usage import format_usd
from agentfsm.evals.comparison import MIN_CASES, name_cases
from agentfsm.evals.results import PASSED, CaseResult, Evaluation
from agentfsm.evals.scorers import MAX_REASON_CHARS, Grade
from agentfsm.evals.statistics import CONFIDENCE, bootstrap_interval

if TYPE_CHECKING:
    from agentfsm.evals.release_gate import GateReport, HistoryEntry

_STYLE: Final = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1b1f24}"
    "table{border-collapse:collapse;width:100%}"
    "th,td{text-align:left;padding:.3rem .6rem;border-bottom:1px solid #d8dee4}"
    "td.n{text-align:right;font-variant-numeric:tabular-nums}small{color:#57606a}"
)
_GOOD, _BAD, _NONE = "#1a7f37", "#cf222e", "#8c959f"
# Characters that a document of XML 1.0 cannot have, not even as references.
_NOT_XML: Final = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
# Width of a bar and of the line of a history, and height of both, in pixels.
_WIDTH, _HEIGHT = 240, 48


def find_interval(evaluation: Evaluation, metric: str) -> tuple[float, float] | None:
    """Return the interval of a mean over the cases, with a confidence of 95 %; None for fewer than 10 cases.

    If all cases have one mean, it is Wilson's, of cases that pass or fail.
    """
    means = [fmean(each) for each in evaluation.by_case(metric).values()]
    if (number := len(means)) < MIN_CASES:
        return None
    low, high = bootstrap_interval(means)
    if max(means) == min(means):
        mean, z = means[0], NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
        half = z * math.sqrt(mean * (1 - mean) / number + z * z / (4 * number * number))
        low, high = [(mean + z * z / (2 * number) + side * half) / (1 + z * z / number) for side in (-1, 1)]
    return max(0.0, low), min(1.0, high)


def render_junit(evaluation: Evaluation) -> str:
    """Return the results as JUnit's XML: a test case for each run."""
    failed = [each for each in evaluation.results if _outcome(each).value not in (1, None)]
    skipped = [each for each in evaluation.results if _outcome(each).value is None]
    root = Element(
        "testsuite",
        name=evaluation.suite,
        tests=str(len(evaluation.results)),
        failures=str(len(failed)),
        skipped=str(len(skipped)),
        time=f"{sum(each.seconds for each in evaluation.results):.3f}",
    )
    for each in evaluation.results:
        case = SubElement(
            root,
            "testcase",
            classname=f"{evaluation.suite}.{each.case}",
            name=f"run {each.repeat}",
            time=f"{each.seconds:.3f}",
        )
        grade = _outcome(each)
        if grade.value != 1:
            SubElement(case, "skipped" if grade.value is None else "failure", message=_shorten(grade.reason))
        SubElement(case, "system-out").text = f"agentfsm show {each.run_id}"
    indent(root)
    return (
        '<?xml version="1.0" encoding="utf-8"?>\n'
        + _NOT_XML.sub("\N{REPLACEMENT CHARACTER}", tostring(root, "unicode"))
        + "\n"
    )


def render_html(evaluation: Evaluation, decided: GateReport | None = None, history: Sequence[HistoryEntry] = ()) -> str:
    """Return the results as one page.

    Args:
        evaluation: The evaluation.
        decided: Decision of a gate on it; None for none.
        history: Earlier evaluations, oldest first.
    """
    title = f"{evaluation.suite}: {evaluation.agent} {evaluation.version}".strip()
    about = f"{evaluation.model}, {evaluation.speed}, {evaluation.runs} runs of each case, {evaluation.at}"
    parts = [f"<h1>{escape(title)}</h1>", f"<p><small>{escape(about)}</small></p>"]
    if decided is not None:
        reasons = "".join(f"<li>{escape(each)}</li>" for each in decided.reasons)
        parts.append(f"<h2>Gate: {escape(decided.decision)}</h2><ul>{reasons}</ul><p>{escape(str(decided))}</p>")
    parts += [
        "<h2>Aspects</h2>",
        build_table(("aspect", "mean", "95 % interval"), map(_metric_row(evaluation), evaluation.metrics)),
    ]
    if unscored := evaluation.find_all_unscored():
        lines = [
            (escape(name), escape(_shorten(f"{name_cases([*lost])} not scored: {next(iter(lost.values()))}")))
            for name, lost in unscored.items()
        ]
        parts += ["<h2>Not scored</h2>", build_table(("aspect", "cases"), lines)]
    costs = (("runs", evaluation.usd), ("simulated users", evaluation.user_usd), ("judges", evaluation.judge_usd))
    shown = [(name, format_usd(usd, estimated=evaluation.estimated)) for name, usd in costs if usd != 0]
    parts += ["<h2>Costs</h2>", build_table(("of", "cost"), shown)] if shown else []
    tags = sorted({tag for each in evaluation.results for tag in each.tags})
    if tags:
        rows = [(escape(tag), *_number_cells(evaluation.mean(tag=tag))) for tag in tags]
        parts += ["<h2>Tags</h2>", build_table(("tag", "passed"), rows)]
    parts += ["<h2>Cases</h2>", build_table(("case", "runs", "first failure"), _case_rows(evaluation))]
    if history:
        parts += ["<h2>History</h2>", _draw_history(history)]
    return build_page(title, parts)


def build_page(title: str, parts: Iterable[str]) -> str:
    """Return a page of HTML from its parts."""
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n' + "\n".join(parts) + "\n</body></html>\n"


def _outcome(result: CaseResult) -> Grade:
    return result.grades.get(PASSED, Grade(None, "the outcome was not scored"))


def _shorten(reason: str) -> str:
    return strip_unsafe(reason)[:MAX_REASON_CHARS]


def build_table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table. A cell that begins with a tag of its own is taken as it is."""
    top = "".join(f"<th>{each}</th>" for each in head)
    body = "".join(
        f"<tr>{''.join(each if each.startswith('<td') else f'<td>{each}</td>' for each in row)}</tr>" for row in rows
    )
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def _number_cells(mean: float | None) -> tuple[str, ...]:
    return (f'<td class="n">{"-" if mean is None else f"{mean:.1%}"}</td>',)


def _metric_row(evaluation: Evaluation) -> Callable[[str], tuple[str, ...]]:
    def build(metric: str) -> tuple[str, ...]:
        mean = evaluation.mean(metric) or 0.0
        interval = find_interval(evaluation, metric)
        low, high = interval or (mean, mean)
        text = f"{low:.1%} to {high:.1%}" if interval else "too few cases"
        bar = (
            f'<svg width="{_WIDTH}" height="14" role="img" aria-label="{text}">'
            f'<line x1="0" y1="7" x2="{_WIDTH}" y2="7" stroke="#d8dee4"/>'
            f'<line x1="{low * _WIDTH:.1f}" y1="7" x2="{high * _WIDTH:.1f}" y2="7" stroke="{_GOOD}" stroke-width="5"/>'
            f'<circle cx="{mean * _WIDTH:.1f}" cy="7" r="5" fill="{_GOOD}"/></svg> {text}'
        )
        return (escape(metric), *_number_cells(mean), bar)

    return build


def _case_rows(evaluation: Evaluation) -> Iterable[tuple[str, ...]]:
    by_case: dict[str, list[CaseResult]] = {}
    for each in evaluation.results:
        by_case.setdefault(each.case, []).append(each)
    for case, results in by_case.items():
        grades = [_outcome(each) for each in results]
        colours = [_NONE if each.value is None else _GOOD if each.value == 1 else _BAD for each in grades]
        squares = "".join(
            f'<rect x="{16 * at}" width="12" height="12" rx="2" fill="{colour}">'
            f"<title>{escape(result.run_id)}</title></rect>"
            for at, (colour, result) in enumerate(zip(colours, results, strict=True))
        )
        passed = f"{sum(each.passed for each in results)} of {len(results)} passed"
        image = f'<svg width="{16 * len(results)}" height="12" role="img" aria-label="{passed}">{squares}</svg>'
        reason = next((each.reason for each in grades if each.value != 1), "")
        findings = [finding for each in results for finding in each.findings]
        yield escape(case), f"{image} <small>{passed}</small>", escape(_shorten(reason or "; ".join(findings)))


def _draw_history(history: Sequence[HistoryEntry]) -> str:
    """Return a line of the means of the outcome, with a table of the versions."""
    means = [each.means.get(PASSED, 0.0) for each in history]
    step = _WIDTH * 2 / max(1, len(means) - 1)
    points = " ".join(f"{at * step + 4:.1f},{(1 - mean) * _HEIGHT + 4:.1f}" for at, mean in enumerate(means))
    text = f"passed: {', '.join(f'{mean:.0%}' for mean in means)}"
    line = (
        f'<svg width="{_WIDTH * 2 + 8}" height="{_HEIGHT + 8}" role="img" aria-label="{text}">'
        f'<polyline points="{points}" fill="none" stroke="{_GOOD}" stroke-width="2"/></svg>'
    )
    rows = [
        (escape(each.at), escape(each.version or "-"), escape(each.model), *_number_cells(mean), escape(each.decision))
        for each, mean in zip(history, means, strict=True)
    ]
    return line + build_table(("time", "version", "model", "passed", "gate"), rows)
