"""The report of what-if runs for people: as Markdown, and as one page of HTML without scripts or other files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING, Final

import attrs

from agentfsm.core.text_safety import one_line
from agentfsm.core.usage import format_usd
from agentfsm.core.value import Value
from agentfsm.evals.report_files import build_page, build_table
from agentfsm.evals.what_if_report import ASPECTS, Trial

if TYPE_CHECKING:
    from agentfsm.evals.what_if_report import ActionDifference, AspectVerdict, Change, WhatIfReport

# Lines of a table, runs that a line names, and characters of a cell.
MAX_LINES: Final = 50
NAMED_RUNS: Final = 3
MAX_CHARS: Final = 200


@attrs.frozen(kw_only=True)
class Section(Value):
    """A table of a report."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def title_of(report: WhatIfReport) -> str:
    """Return the title of a report."""
    name = f"{report.agent} {report.version}".strip()
    return f"What if: {name} with {report.model} in {len({each.run_id for each in report.trials})} runs"


def list_sections(report: WhatIfReport) -> tuple[Section, ...]:
    """Return the tables of a report, without empty ones."""
    trials = report.trials
    sections = [
        Section(
            title="Verdict",
            head=("aspect", "verdict", "runs that differ", "noise floor", "beyond it, 95 %"),
            rows=tuple([_verdict_row(report.judge(aspect)) for aspect in ASPECTS]),
        ),
        Section(
            title="Effects (none was performed)",
            head=("difference", "calls", "runs", "such as", "in"),
            rows=tuple(_action_rows(trials, lambda trial: trial.effects)),
        ),
        Section(
            title="Reads",
            head=("difference", "calls", "runs", "such as", "in"),
            rows=tuple(_action_rows(trials, lambda trial: trial.reads)),
        ),
        Section(
            title="Outside the evidence",
            head=("what", "calls", "runs", "such as", "in"),
            rows=tuple(_outside_rows(trials)),
        ),
        Section(
            title="Ends",
            head=("record", "now", "runs", "in"),
            rows=tuple(_end_rows(trials)),
        ),
        Section(
            title="Cost of a run",
            head=("measure", "control" if report.control else "record", "now", "difference, 95 %", "settled"),
            rows=tuple([_change_row(each) for each in report.measure()]),
        ),
        Section(
            title="Changes of the agent since the runs",
            head=("change", "runs"),
            rows=tuple([(change, str(count)) for change, count in report.count_changes().items()]),
        ),
    ]
    return tuple([each for each in sections if each.rows])


def render_markdown(report: WhatIfReport) -> str:
    """Return a report as Markdown."""
    parts = [f"# {title_of(report)}", f"**{report.verdict}**. {describe_trials(report)}"]
    for each in list_sections(report):
        lines = [each.head, tuple(["---"] * len(each.head)), *each.rows]
        table = "\n".join(f"| {' | '.join(_cell(cell) for cell in line)} |" for line in lines)
        parts += [f"## {each.title}", table]
    return "\n\n".join(parts) + "\n"


def render_html(report: WhatIfReport) -> str:
    """Return a report as one page."""
    title = title_of(report)
    parts = [
        f"<h1>{escape(title)}</h1>",
        f"<p><strong>{escape(report.verdict)}</strong>. {escape(describe_trials(report))}</p>",
    ]
    for each in list_sections(report):
        rows = [[escape(one_line(cell, MAX_CHARS)) for cell in row] for row in each.rows]
        parts += [f"<h2>{escape(each.title)}</h2>", build_table(each.head, rows)]
    return build_page(title, parts)


def describe_trials(report: WhatIfReport) -> str:
    """Return what was tried, as a sentence."""
    number = len(report.trials) + len(report.control)
    control = f", {len(report.control)} of them the control" if report.control else ", without a control"
    usd = format_usd(report.usd, estimated=False)
    lost = f" {len(report.unreadable)} runs were left out: what they continue is gone." if report.unreadable else ""
    return f"{number} trials{control}, {report.repeats} of each run, reads {report.read}, {usd}, {report.at}.{lost}"


def _cell(text: str) -> str:
    return one_line(text, MAX_CHARS).replace("|", "\\|")


def _verdict_row(found: AspectVerdict) -> tuple[str, ...]:
    more = f", {found.needed} more runs" if found.needed else ""
    noise = "-" if found.noise is None else f"{found.noise:.1%}"
    shown = "-" if found.interval is None else f"{found.interval[0]:+.1%} to {found.interval[1]:+.1%}"
    return found.aspect, f"{found.verdict}{more}", f"{found.rate:.1%}", noise, shown


def _action_rows(trials: Sequence[Trial], read: Callable[[Trial], ActionDifference]) -> Iterator[tuple[str, ...]]:
    """Yield the differences by kind and tool, with the first one of each."""
    groups: dict[str, list[tuple[str, Trial]]] = {}
    for trial in trials:
        found = read(trial)
        for each in found.other:
            groups.setdefault(f"{each.tool}: other {', '.join(each.fields)}", []).append((str(each), trial))
        for word, actions in (("more", found.more), ("fewer", found.fewer)):
            for action in actions:
                groups.setdefault(f"{action.tool}: {word}", []).append((str(action), trial))
    if same := sum(read(trial).same for trial in trials):
        yield "the same", str(same), str(len({trial.run_id for trial in trials if read(trial).same})), "", ""
    yield from _group_rows(groups)


def _outside_rows(trials: Sequence[Trial]) -> Iterator[tuple[str, ...]]:
    groups: dict[str, list[tuple[str, Trial]]] = {}
    for trial in trials:
        for action in trial.outside:
            groups.setdefault(f"{action.tool}: no result", []).append((str(action), trial))
        for word, number in (
            ("reads that were made", trial.live),
            ("searches of the memory", trial.unrecalled),
            ("flows that ended at a withheld step", trial.is_cut_short),
            ("inputs that had not arrived at the end", trial.unread_inputs),
        ):
            groups.setdefault(word, []).extend([("", trial)] * number)
    yield from _group_rows(groups)


def _group_rows(groups: dict[str, list[tuple[str, Trial]]]) -> Iterator[tuple[str, ...]]:
    found = sorted([(name, each) for name, each in groups.items() if each], key=lambda pair: -len(pair[1]))
    for name, examples in found[:MAX_LINES]:
        runs = dict.fromkeys(trial.run_id for _text, trial in examples)
        yield name, str(len(examples)), str(len(runs)), examples[0][0], _name_runs(runs)


def _name_runs(runs: Iterable[str]) -> str:
    ids = [*runs]
    return ", ".join(ids[:NAMED_RUNS]) + (", ..." if len(ids) > NAMED_RUNS else "")


def _end_rows(trials: Sequence[Trial]) -> Iterator[tuple[str, ...]]:
    groups: dict[tuple[str, str], dict[str, None]] = {}
    for trial in trials:
        groups.setdefault((trial.before_end, trial.after_end), {})[trial.run_id] = None
    for (before, after), runs in groups.items():
        if before != after:
            yield before, after, str(len(runs)), _name_runs(runs)


def _change_row(change: Change) -> tuple[str, ...]:
    def show(value: float, sign: str = "") -> str:
        return f"{value:{sign}.6f}" if change.name == "usd" else f"{value:{sign},.1f}"

    interval = change.interval
    shown = "-" if interval is None else f"{show(interval[0], '+')} to {show(interval[1], '+')}"
    needed = f"undecided: {change.needed} more runs" if change.needed else "yes" if interval else "too few runs"
    return change.name, show(change.before), show(change.after), shown, needed
