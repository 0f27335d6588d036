"""`agentfsm doctor`: what is here, what is missing, what could be better about an agent's tools.

It changes nothing, but that a store on a server makes its tables when it is first reached.
"""

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
from typing import TYPE_CHECKING, Final

import anyio
import attrs

from agentfsm.cli.codes import ExitCode
from agentfsm.cli.render.formatting import list_declarations
from agentfsm.cli.resolve.agent_target import load_agent
from agentfsm.cli.resolve.mcp_servers import join_servers
from agentfsm.cli.resolve.store_location import is_url, open_existing_store, resolve_location
from agentfsm.core.errors import AgentError, MisuseError
from agentfsm.core.value import Value
from agentfsm.stores.loading import mask_password
from agentfsm.stores.sqlite.file import connect_sqlite3
from agentfsm.tools.lint import Finding

if TYPE_CHECKING:
    from agentfsm.agent import Agent
    from agentfsm.cli.terminal import Terminal
    from agentfsm.ports.store import Store

# Where tiktoken fetches the usual vocabulary; it keeps the file under the SHA-1 of this address.
VOCABULARY_URL: Final = "https://openaipublic.blob.core.windows.net/encodings/o200k_base.tiktoken"


@attrs.frozen(kw_only=True)
class DoctorCheck(Value):
    """One thing that was looked at."""

    name: str
    ok: bool
    """False where something needed is broken."""

    detail: str


@attrs.frozen(kw_only=True)
class ToolReport(Value):
    """A tool of the agent, and what it declares."""

    name: str
    declared: tuple[str, ...]


@attrs.frozen(kw_only=True)
class DoctorReport(Value):
    """All that was found. Findings are advice: they break nothing."""

    checks: tuple[DoctorCheck, ...]
    tools: tuple[ToolReport, ...] = ()
    findings: tuple[Finding, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing that is needed is broken."""
        return all(check.ok for check in self.checks)


def examine(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Look at everything, and say what was found.

    Returns:
        DONE, or FAILED when something needed is broken.

    Raises:
        MisuseError: when there are servers, and no agent for them to join.
    """
    if args.mcp and args.agent is None:
        raise MisuseError("--mcp adds servers to an agent, so name one; `agentfsm mcp tools FILE` looks at them alone")
    report = DoctorReport(checks=tuple(_run_checks(resolve_location(args.store))))
    if args.agent is not None:
        report = _add_agent(args.agent, report, lambda agent: join_servers(agent, args.mcp, terminal))
    if terminal.json:
        terminal.document({"ok": report.ok, **attrs.asdict(report)})
    else:
        for line in _format_report(report):
            terminal.out(line)
    return ExitCode.DONE if report.ok else ExitCode.FAILED


def _format_report(report: DoctorReport) -> Iterator[str]:
    width = max(len(check.name) for check in report.checks)
    for check in report.checks:
        yield f"{'ok' if check.ok else 'BROKEN':<7} {check.name:<{width}}  {check.detail}"
    for tool in report.tools:
        yield f"tool    {tool.name}: {', '.join(tool.declared) or 'nothing declared: runs alone, never repeated'}"
        yield from _format_findings(report, tool.name)
    yield from _format_findings(report, None)


def _format_findings(report: DoctorReport, tool: str | None) -> Iterator[str]:
    indent = "" if tool is None else " " * 8
    return (f"{indent}{each.severity}: {each.message}" for each in report.findings if each.tool == tool)


def _run_checks(place: str) -> Iterator[DoctorCheck]:
    yield DoctorCheck(name="python", ok=True, detail=f"{platform.python_version()} on {platform.system()}")
    yield _check_package("agentfsm")
    for name in _required_packages():
        yield _check_package(name)
    yield DoctorCheck(name="sqlite", ok=True, detail=_sqlite_version())
    yield _check_store(place)
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL"):
        yield DoctorCheck(name=name, ok=True, detail="set" if os.environ.get(name) else "not set")
    yield _check_vocabulary()
    yield _check_optional("rich", "the live tree", "plain lines are written; pip install 'agentfsm[cli]'")
    yield _check_optional("genai-prices", "what runs cost", "costs are not known; pip install 'agentfsm[prices]'")


def _required_packages() -> list[str]:
    """Return the packages that agentfsm cannot do without, as its own metadata says."""
    try:
        requirements = metadata.requires("agentfsm") or []
    except metadata.PackageNotFoundError:
        return []
    needed = [each for each in requirements if "extra ==" not in each]
    return [found[0] for each in needed if (found := re.match(r"[\w.-]+", each))]


def _installed_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _check_package(name: str) -> DoctorCheck:
    version = _installed_version(name)
    return DoctorCheck(name=name, ok=version is not None, detail=version or "not installed: pip install agentfsm")


def _check_optional(name: str, purpose: str, otherwise: str) -> DoctorCheck:
    version = _installed_version(name)
    detail = f"{version}, for {purpose}" if version else f"not installed, so {otherwise}"
    return DoctorCheck(name=name, ok=True, detail=detail)


def _sqlite_version() -> str:
    db = connect_sqlite3(":memory:")
    try:
        return str(db.execute("SELECT sqlite_version()").fetchone()[0])
    finally:
        db.close()


def _check_store(place: str) -> DoctorCheck:
    """Open the store, if it is there, and say what it promises; a file that is not there is not made."""
    if not is_url(place) and not Path(place).exists():
        return DoctorCheck(name="store", ok=True, detail=f"{place} is not there yet: the first run makes it")
    try:
        count, promise = anyio.run(_query_store, open_existing_store(place))
    except AgentError as error:
        return DoctorCheck(name="store", ok=False, detail=str(error))
    holds = "runs" if count else "no run"
    return DoctorCheck(name="store", ok=True, detail=f"{mask_password(place)} opens and holds {holds}; {promise}")


async def _query_store(store: Store) -> tuple[int, str]:
    """Return whether the store holds a run, and what it promises: Redis, whose settings decide, is asked."""
    try:
        count = len(await store.runs(limit=1))
        ask = getattr(store, "describe_durability", None)
        return count, _DURABILITY_PROMISES[type(store).__name__] if ask is None else await ask()
    finally:
        await store.aclose()


# By the store's kind: what it promises by itself.
_DURABILITY_PROMISES: Final = {
    "SQLiteStore": 'what is acknowledged survives a power cut with durability "full", which is the default, and the '
    'death of the process with "normal"',
    "PostgresStore": 'what is acknowledged survives a crash of the server with durability "full", which is the '
    'default; with "normal" that may cost the last second',
}


def _check_vocabulary() -> DoctorCheck:
    """See whether tiktoken has its vocabulary; it is not fetched, and tiktoken is not loaded."""
    folder = os.environ.get("TIKTOKEN_CACHE_DIR", os.environ.get("DATA_GYM_CACHE_DIR"))
    place = Path(tempfile.gettempdir()) / "data-gym-cache" if folder is None else Path(folder)
    name = hashlib.sha1(VOCABULARY_URL.encode(), usedforsecurity=False).hexdigest()
    if folder != "" and (place / name).exists():  # "" tells tiktoken to keep nothing
        return DoctorCheck(name="vocabulary", ok=True, detail=f"o200k_base is in {place}")
    detail = f"o200k_base is not in {place}: it is fetched at the first need, else tokens are estimated"
    return DoctorCheck(name="vocabulary", ok=True, detail=detail)


# The agent.


def _add_agent(target: str, report: DoctorReport, equip: Callable[[Agent], Agent]) -> DoctorReport:
    """Add an agent to the report, with the servers that join it."""
    try:
        agent = equip(load_agent(target))
    except AgentError as error:
        return attrs.evolve(report, checks=(*report.checks, DoctorCheck(name="agent", ok=False, detail=str(error))))
    tools = tuple(ToolReport(name=each.name, declared=list_declarations(each)) for each in agent.tools)
    detail = f"{target}: {agent.name}, model {agent.model.name}, {len(tools)} tools"
    check = _check_agent_closes(agent, detail)
    return attrs.evolve(report, checks=(*report.checks, check), tools=tools, findings=agent.tools.check())


def _check_agent_closes(agent: Agent, detail: str) -> DoctorCheck:
    try:
        anyio.run(agent.aclose)
    except AgentError as error:
        return DoctorCheck(name="agent", ok=False, detail=f"{detail}; it does not close: {error}")
    return DoctorCheck(name="agent", ok=True, detail=detail)
