"""Reports of the checks as text, Markdown, SARIF and JUnit's XML."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final
from xml.etree.ElementTree import Element, SubElement, indent, tostring

import attrs

from agentfsm.core.text_safety import strip_unsafe
from agentfsm.readiness.check_result import CheckResult, CheckStatus, ReadinessReport
from agentfsm.readiness.checks import AREAS

_MARKS: Final = {
    CheckStatus.PASS: "pass",
    CheckStatus.FAIL: "FAIL",
    CheckStatus.UNKNOWN: "UNKNOWN",
    CheckStatus.WAIVED: "waived",
}


def describe_counts(report: ReadinessReport) -> str:
    """Return the number of checks of each status, in one line."""
    return ", ".join(f"{report.count(each)} {each}" for each in CheckStatus if report.count(each))


def format_lines(report: ReadinessReport) -> Iterator[str]:
    """Return the lines of the report for a terminal."""
    width = max(len(each.id) for each in report.checks)
    for area in AREAS:
        yield f"{area}:"
        for each in report.checks:
            if each.area != area:
                continue
            yield f"  {_MARKS[each.status]:<8} {each.id:<{width}}  {strip_unsafe(each.detail)}"
            if each.status is not CheckStatus.PASS and each.remedy:
                yield f"  {'':<8} {'':<{width}}  -> {each.remedy}"
            if each.waiver is not None:
                yield f"  {'':<8} {'':<{width}}  {describe_waiver(each)}"
    yield f"{report.agent} {report.version or '(no version)'} {report.fingerprint}: {describe_counts(report)}"


def describe_waiver(result: CheckResult) -> str:
    """Return the waiver of a check in words."""
    waiver = result.waiver
    if waiver is None:
        return ""
    if result.status is CheckStatus.PASS:
        return strip_unsafe(f"the waiver by {waiver.by} is not needed any more")
    verb = "waived" if result.status is CheckStatus.WAIVED else "the waiver has expired:"
    return strip_unsafe(f"{verb} by {waiver.by} until {waiver.until}: {waiver.reason}")


def render_json(report: ReadinessReport) -> dict[str, Any]:
    """Return the report as a JSON document."""

    def write(_instance: Any, _field: Any, value: Any) -> Any:
        return value.isoformat() if hasattr(value, "isoformat") else value

    return {"ready": report.is_ready, **attrs.asdict(report, value_serializer=write)}


def render_markdown(report: ReadinessReport) -> str:
    """Return the report as a page in Markdown."""
    lines = [
        f"# Readiness of {report.agent} {report.version}".rstrip(),
        "",
        f"{report.on}, fingerprint `{report.fingerprint}`: {describe_counts(report)}.",
    ]
    for area in AREAS:
        lines += [
            "",
            f"## {area.capitalize()}",
            "",
            "| check | requirement | status | found | by |",
            "|---|---|---|---|---|",
        ]
        for each in report.checks:
            if each.area == area:
                notes = [each.detail, each.remedy if each.status is not CheckStatus.PASS else "", describe_waiver(each)]
                found = "<br>".join(_escape_cell(note) for note in notes if note)
                lines.append(f"| `{each.id}` | {each.requirement} | **{each.status}** | {found} | {each.source} |")
    return "\n".join(lines) + "\n"


def _escape_cell(text: str) -> str:
    return strip_unsafe(text).replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


_LEVELS: Final = {CheckStatus.FAIL: "error", CheckStatus.UNKNOWN: "warning", CheckStatus.WAIVED: "note"}


def render_sarif(report: ReadinessReport) -> str:
    """Return the checks that did not pass as SARIF 2.1.0, for tools that show the findings of analysers."""
    rules = [
        {"id": each.id, "shortDescription": {"text": each.requirement}, "properties": {"area": each.area}}
        for each in report.checks
    ]
    results: list[dict[str, Any]] = []
    for each in report.checks:
        if each.status is CheckStatus.PASS:
            continue
        text = f"{each.detail} -> {each.remedy}" if each.remedy else each.detail
        result: dict[str, Any] = {"ruleId": each.id, "level": _LEVELS[each.status], "message": {"text": text}}
        if each.status is CheckStatus.WAIVED:
            result["suppressions"] = [{"kind": "external", "justification": describe_waiver(each)}]
        results.append(result)
    driver = {"name": "agentfsm doctor --production", "rules": rules}
    document = {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "results": results}],
    }
    return json.dumps(document, indent=1) + "\n"


def render_junit(report: ReadinessReport) -> str:
    """Return the report as JUnit's XML, for CI servers: unmet checks are failures, waived ones are skipped."""
    unmet = [each for each in report.checks if not each.is_met]
    root = Element(
        "testsuite",
        name=f"readiness of {report.agent}",
        tests=str(len(report.checks)),
        failures=str(len(unmet)),
        skipped=str(report.count(CheckStatus.WAIVED)),
    )
    for each in report.checks:
        case = SubElement(root, "testcase", classname=f"readiness.{each.area}", name=each.id)
        text = strip_unsafe(f"{each.detail} {each.remedy}".strip())
        if each.status is CheckStatus.WAIVED:
            SubElement(case, "skipped", message=describe_waiver(each))
        elif not each.is_met:
            SubElement(case, "failure", message=text)
    indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + tostring(root, encoding="unicode") + "\n"
