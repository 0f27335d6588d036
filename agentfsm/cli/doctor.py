"""`agentfsm doctor`: what is here, what is missing, and what an agent's tools leave unsaid. Nothing is changed."""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import re
import tempfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import anyio
import attrs

from agentfsm.cli.codes import Exit
from agentfsm.cli.place import store_path
from agentfsm.cli.target import load_agent
from agentfsm.core.errors import AgentError
from agentfsm.stores.sqlite import SQLiteStore
from agentfsm.stores.sqlite_file import connect_sqlite3

if TYPE_CHECKING:
    from agentfsm.cli.terminal import Terminal
    from agentfsm.engine.tools import Tool

VOCABULARY_URL: Final = "https://openaipublic.blob.core.windows.net/encodings/o200k_base.tiktoken"
# Where tiktoken fetches the usual vocabulary; it keeps the file under the SHA-1 of this address.
READING: Final = ("search_", "get_", "check_", "list_", "read_", "find_", "fetch_")
# Names of tools that as a rule change nothing.
CHANGING: Final = ("save_", "update_", "delete_", "send_", "write_", "create_", "pay_")
# Names of tools that as a rule do.


@attrs.frozen(kw_only=True)
class Finding:
    """One thing that was looked at."""

    name: str
    ok: bool
    # False where something needed is broken.
    detail: str


@attrs.frozen(kw_only=True)
class ToolReport:
    """A tool of the agent, and what might be wrong with its declaration."""

    name: str
    declared: tuple[str, ...]
    hints: tuple[str, ...]


def examine(args: argparse.Namespace, terminal: Terminal) -> Exit:
    """Look at everything, and say what was found.

    Returns:
        DONE, or FAILED when something needed is broken.
    """
    findings = list(_findings(store_path(args.store)))
    tools: list[ToolReport] = []
    if args.agent is not None:
        finding, tools = _examined(args.agent)
        findings.append(finding)
    ok = all(finding.ok for finding in findings)
    if terminal.json:
        checks, reports = [attrs.asdict(each) for each in findings], [attrs.asdict(each) for each in tools]
        terminal.document({"ok": ok, "checks": checks, "tools": reports})
    else:
        for line in _lines(findings, tools):
            terminal.out(line)
    return Exit.DONE if ok else Exit.FAILED


def _lines(findings: list[Finding], tools: list[ToolReport]) -> Iterator[str]:
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        yield f"{'ok' if finding.ok else 'BROKEN':<7} {finding.name:<{width}}  {finding.detail}"
    for report in tools:
        yield f"tool    {report.name}: {', '.join(report.declared) or 'nothing declared: runs alone, never repeated'}"
        yield from (f"        hint: {hint}" for hint in report.hints)


def _findings(path: str) -> Iterator[Finding]:
    yield Finding(name="python", ok=True, detail=f"{platform.python_version()} on {platform.system()}")
    yield _package("agentfsm")
    for name in _needed():
        yield _package(name)
    yield Finding(name="sqlite", ok=True, detail=_sqlite_version())
    yield _store(path)
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL"):
        yield Finding(name=name, ok=True, detail="set" if os.environ.get(name) else "not set")
    yield _vocabulary()
    yield _optional("rich", "the live tree", "plain lines are written; pip install 'agentfsm[cli]'")
    yield _optional("genai-prices", "Limits(usd=...)", "costs are not known; pip install 'agentfsm[prices]'")


def _needed() -> list[str]:
    """Return the packages that agentfsm cannot do without, as its own metadata says."""
    try:
        requirements = metadata.requires("agentfsm") or []
    except metadata.PackageNotFoundError:
        return []
    needed = [each for each in requirements if "extra ==" not in each]
    return [found[0] for each in needed if (found := re.match(r"[\w.-]+", each))]


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _package(name: str) -> Finding:
    version = _version(name)
    return Finding(name=name, ok=version is not None, detail=version or "not installed: pip install agentfsm")


def _optional(name: str, purpose: str, otherwise: str) -> Finding:
    version = _version(name)
    detail = f"{version}, for {purpose}" if version else f"not installed, so {otherwise}"
    return Finding(name=name, ok=True, detail=detail)


def _sqlite_version() -> str:
    db = connect_sqlite3(":memory:")
    try:
        return str(db.execute("SELECT sqlite_version()").fetchone()[0])
    finally:
        db.close()


def _store(path: str) -> Finding:
    """Open the store, if it is there; one that is not is not made."""
    if not Path(path).exists():
        return Finding(name="store", ok=True, detail=f"{path} is not there yet: the first run makes it")
    try:
        count = anyio.run(_count, SQLiteStore(path))
    except AgentError as error:
        return Finding(name="store", ok=False, detail=str(error))
    return Finding(name="store", ok=True, detail=f"{path} opens and holds {'runs' if count else 'no run'}")


async def _count(store: SQLiteStore) -> int:
    try:
        return len(await store.runs(limit=1))
    finally:
        await store.aclose()


def _vocabulary() -> Finding:
    """See whether tiktoken has its vocabulary; it is not fetched, and tiktoken is not loaded."""
    folder = os.environ.get("TIKTOKEN_CACHE_DIR", os.environ.get("DATA_GYM_CACHE_DIR"))
    place = Path(tempfile.gettempdir()) / "data-gym-cache" if folder is None else Path(folder)
    name = hashlib.sha1(VOCABULARY_URL.encode(), usedforsecurity=False).hexdigest()
    if folder != "" and (place / name).exists():  # "" tells tiktoken to keep nothing
        return Finding(name="vocabulary", ok=True, detail=f"o200k_base is in {place}")
    detail = f"o200k_base is not in {place}: it is fetched at the first need, else tokens are estimated"
    return Finding(name="vocabulary", ok=True, detail=detail)


# The agent.


def _examined(target: str) -> tuple[Finding, list[ToolReport]]:
    try:
        agent = load_agent(target)
    except AgentError as error:
        return Finding(name="agent", ok=False, detail=str(error)), []
    reports = [ToolReport(name=each.name, declared=_declared(each), hints=tuple(_hints(each))) for each in agent.tools]
    detail = f"{target}: {agent.name}, model {agent.model.name}, {len(reports)} tools"
    try:
        anyio.run(agent.aclose)
    except AgentError as error:
        return Finding(name="agent", ok=False, detail=f"{detail}; it does not close: {error}"), reports
    return Finding(name="agent", ok=True, detail=detail), reports


_DECLARATIONS: Final = ("read_only", "idempotent", "concurrency_safe", "requires_approval", "poll")


def _declared(tool: Tool[..., Any]) -> tuple[str, ...]:
    return tuple(name for name in _DECLARATIONS if getattr(tool, name))


def _hints(tool: Tool[..., Any]) -> Iterator[str]:
    return (text for applies, text in _HINTS if applies(tool))


_HINTS: Final[tuple[tuple[Callable[[Tool[..., Any]], bool], str], ...]] = (
    (
        lambda tool: tool.name.startswith(READING) and not tool.read_only,
        "by its name it only reads: @tool(read_only=True) lets it run beside others, and again after a crash",
    ),
    (
        lambda tool: tool.name.startswith(CHANGING) and tool.read_only,
        "by its name it changes something, and it is declared read_only: it may run beside others, and twice",
    ),
    (
        lambda tool: tool.name.startswith(CHANGING) and tool.concurrency_safe and not tool.read_only,
        "by its name it changes something, and it is declared concurrency_safe: it may overlap itself",
    ),
    (
        lambda tool: not tool.description.strip(),
        "it has no description: the model knows nothing of it but its name; give the function a docstring",
    ),
)
