"""Measures the peers and agentfsm by the same rows, and puts them into one table.

agentfsm has two columns: one with a tool that declares `read_only=True`, one with a bare `@tool` as the peers' are.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.measure import Row, machine, short
from benchmarks.one import chosen, entries
from benchmarks.peers import environments

OUT = Path(".agentfsm/bench-peers.json")
PAGE = Path("docs/benchmarks.md")
MARKED = re.compile(r"(?<=<!-- peers -->\n).*(?=<!-- /peers -->)", re.DOTALL)
# Those of ours, by their modules.
OURS = ("ours", "bare")

# What one contender came to, by the id of the row.
Entries = dict[str, dict[str, Any]]


def measured(name: str, rows: list[Row]) -> Iterator[dict[str, Any]]:
    """Measure one contender, and give what each row came to."""
    if name in OURS:
        yield from entries(f"benchmarks.{name}", rows)
        return
    try:
        python = environments.python(name)
    except (OSError, subprocess.CalledProcessError) as error:
        yield from ({"row": row.id, "failed": f"its environment could not be made: {error}"} for row in rows)
    else:
        yield from entries(f"benchmarks.peers.{name}", rows, str(python))


def value(row: Row, entry: dict[str, Any]) -> float | None:
    """Return what is compared in this row, less being better; None where there is no figure."""
    figure: float | None = entry.get("own" if row.absolute else "ratio")
    return figure


def told(row: Row, entry: dict[str, Any]) -> str:
    """Return that as a text."""
    figure = value(row, entry)
    if figure is None:
        return "none" if "not_offered" in entry else "fails"
    return short(figure) + (f" {row.unit}" if row.absolute and row.unit != "x" else "x")


def name_of(name: str, found: Entries) -> str:
    """Return a contender's name as in the table; its module's where it never said it."""
    return next((entry["contender"] for entry in found.values() if "contender" in entry), name)


def table(rows: list[Row], results: dict[str, Entries]) -> str:
    """Return the table in Markdown: the best of each row in bold, and below it who is ahead of us and who has none."""
    names = {name: name_of(name, found) for name, found in results.items()}
    lines = [
        "| row | what | floor | " + " | ".join(names.values()) + " |",
        "|---|---|--:|" + "--:|" * len(names),
    ]
    ahead: dict[str, list[str]] = {own: [] for own in OURS}
    reasons: list[str] = []
    for row in rows:
        found = {name: results[name][row.id] for name in names}
        values = {name: figure for name, entry in found.items() if (figure := value(row, entry)) is not None}
        best = min(values.values(), default=None)
        cells: list[str] = []
        for name, entry in found.items():
            text = told(row, entry)
            cells.append(f"**{text}**" if values.get(name) == best is not None else text)
            if why := entry.get("failed") or entry.get("not_offered"):
                reasons.append(f"- {row.id}, {names[name]}: {why.replace(str(Path.home()), '~')}")
        floors = [entry["floor"] for entry in found.values() if "floor" in entry]
        floor = f"{short(floors[0])} {row.unit}" if floors else ""
        lines.append(f"| {row.id} | {row.what} | {floor} | " + " | ".join(cells) + " |")
        peers = {name: figure for name, figure in values.items() if name not in OURS}
        for own in OURS:
            bar = values.get(own, float("inf"))
            ahead[own] += [f"{row.id}, {names[name]}" for name, figure in peers.items() if figure < bar]
    verdicts = [f"Ahead of {names[own]}: {'; '.join(rows_of) or 'nobody'}." for own, rows_of in ahead.items()]
    paragraphs = ["\n".join(lines), *verdicts]
    if reasons:
        paragraphs.append("Where there is no figure:\n\n" + "\n".join(reasons))
    return "\n\n".join(paragraphs)


def versions(results: dict[str, Entries]) -> str:
    """Return the packages of each, with their versions."""
    texts: list[str] = []
    for name, found in results.items():
        packages: dict[str, str] = next((entry["versions"] for entry in found.values() if "versions" in entry), {})
        texts.append(
            f"{name_of(name, found)}: " + (", ".join(" ".join(each) for each in packages.items()) or "unknown")
        )
    return "; ".join(texts)


def main(*words: str) -> int:
    """Measure, and write."""
    peers = [name for name in environments.PACKAGES if name in words] or list(environments.PACKAGES)
    rows = [row for row in chosen([word for word in words if word not in environments.PACKAGES]) if row.peers]
    about = machine()
    OUT.parent.mkdir(exist_ok=True)
    results: dict[str, Entries] = {}
    for name in (*OURS, *peers):
        results[name] = {}
        for entry in measured(name, rows):
            results[name][entry["row"]] = entry
            print(json.dumps(entry), file=sys.stderr, flush=True)
        # After each, since all of them take more than an hour.
        OUT.write_text(json.dumps({**about, "contenders": results}, indent=2) + "\n")
    origin = f"`{about['command']}`, {about['date'][:10]}, Python {about['python']}, {about['processor']}"
    page = f"{origin}. {versions(results)}.\n\n{table(rows, results)}\n"
    print(page)
    print(f"written to {OUT}")
    if not words:
        PAGE.write_text(MARKED.sub(lambda _: page, PAGE.read_text()))
    return int(any("failed" in entry for own in OURS for entry in results[own].values()))
