"""`agentfsm doctor`: check the installation and the store, and advise on the tools of an agent.

It changes nothing, except that a store on a server creates its tables at the first connection.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
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
from agentfsm.core.errors import AgentError, MisuseError, RunNotFoundError
from agentfsm.core.header import FORMAT
from agentfsm.core.machine import State
from agentfsm.core.value import Value
from agentfsm.guards.reach import explain_idle_guards
from agentfsm.journal.load import load_run
from agentfsm.models.profiles import ModelProfile
from agentfsm.ports.store import Filter
from agentfsm.prompts import PromptFinding, Prompts, lint_prompts
from agentfsm.sandbox import find_isolation
from agentfsm.stores.loading import mask_password
from agentfsm.stores.sqlite.file import connect_sqlite3
from agentfsm.tools.lint import Finding

if TYPE_CHECKING:
    from agentfsm.agents.agent import Agent
    from agentfsm.cli.terminal import Terminal
    from agentfsm.ports.store import RunSummary, Store

# Source of tiktoken's usual vocabulary. tiktoken names its cached file by the SHA-1 of this URL.
VOCABULARY_URL: Final = "https://openaipublic.blob.core.windows.net/encodings/o200k_base.tiktoken"


@attrs.frozen(kw_only=True)
class DoctorCheck(Value):
    """Result of one check."""

    name: str
    ok: bool
    """Whether the checked part works, or is optional."""

    detail: str


@attrs.frozen(kw_only=True)
class ToolReport(Value):
    """A tool of the agent with its declarations."""

    name: str
    declared: tuple[str, ...]


@attrs.frozen(kw_only=True)
class DoctorReport(Value):
    """Results of all checks. Findings are advice and do not make the report fail."""

    checks: tuple[DoctorCheck, ...]
    tools: tuple[ToolReport, ...] = ()
    findings: tuple[Finding, ...] = ()
    prompts: tuple[PromptFinding, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether all checks passed."""
        return all(check.ok for check in self.checks)


def examine(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Run all checks and report them.

    Returns:
        DONE, or FAILED if a check failed.

    Raises:
        MisuseError: if `--mcp` is given without an agent.
    """
    if args.mcp and args.agent is None:
        raise MisuseError(
            "--mcp adds servers to an agent: name the agent, or list the servers with `agentfsm mcp tools FILE`"
        )
    report = DoctorReport(checks=tuple(_run_checks(resolve_location(args.store))))
    if args.agent is not None:
        report = _add_agent(args.agent, report, lambda agent: join_servers(agent, args.mcp, terminal))
    if args.prompts is not None:
        report = _add_prompts(args.prompts, report)
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
        yield f"tool    {tool.name}: {', '.join(tool.declared) or 'nothing declared: runs alone, is never repeated'}"
        yield from _format_findings(report, tool.name)
    yield from _format_findings(report, None)
    for finding in report.prompts:
        yield f"prompt  {finding.prompt}: {finding.severity}: {finding.message}"


def _format_findings(report: DoctorReport, tool: str | None) -> Iterator[str]:
    indent = "" if tool is None else " " * 8
    return (f"{indent}{each.severity}: {each.message}" for each in report.findings if each.tool == tool)


def _run_checks(place: str) -> Iterator[DoctorCheck]:
    yield DoctorCheck(name="python", ok=True, detail=f"{platform.python_version()} on {platform.system()}")
    yield _check_package("agentfsm")
    for extra, name, _ in _parse_requirements():
        if not extra:
            yield _check_package(name)
    with closing(connect_sqlite3(":memory:")) as db:
        version = str(db.execute("SELECT sqlite_version()").fetchone()[0])
    yield DoctorCheck(name="sqlite", ok=True, detail=version)
    yield _check_store(place)
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL"):
        yield DoctorCheck(name=name, ok=True, detail="set" if os.environ.get(name) else "not set")
    yield _check_vocabulary()
    yield DoctorCheck(name="sandbox", ok=True, detail=find_isolation().description)
    try:
        extras = metadata.metadata("agentfsm").get_all("Provides-Extra") or []
    except metadata.PackageNotFoundError:
        extras = []
    for extra in extras:
        yield _check_extra(extra)


def _parse_requirements() -> list[tuple[str, str, tuple[str, ...]]]:
    """Return each requirement in the metadata of agentfsm: its extra or "", the package, the extras of the package."""
    try:
        requirements = metadata.requires("agentfsm") or []
    except metadata.PackageNotFoundError:
        return []
    return [
        (found["extra"] or "", found["name"], tuple(re.findall(r"[\w.-]+", found["own"] or "")))
        for each in requirements
        if (found := _REQUIREMENT.match(each))
    ]


# A requirement of a package's metadata: its name, its extras in brackets, and the extra that its marker names.
_REQUIREMENT: Final = re.compile(
    r"""(?P<name>[\w.-]+)\s*(?:\[(?P<own>[^]]*)\])?(?:.*\bextra\s*==\s*["'](?P<extra>[^"']+))?"""
)


def _list_packages(extra: str) -> list[str]:
    """Return the packages of an extra, including those of the extras that it combines."""
    packages: list[str] = []
    for of, name, own in _parse_requirements():
        if of == extra:
            packages += [name] if name != "agentfsm" else [each for inner in own for each in _list_packages(inner)]
    return packages


def _check_extra(extra: str) -> DoctorCheck:
    """Check whether the packages of an extra are installed; their versions are not compared."""
    versions = {name: _installed_version(name) for name in _list_packages(extra)}
    missing = [name for name, version in versions.items() if version is None]
    if missing:
        effect = f", so {_EFFECTS[extra]}" if extra in _EFFECTS else ""
        detail = f"{', '.join(missing)} not installed{effect}: pip install 'agentfsm[{extra}]'"
    else:
        detail = ", ".join(f"{name} {version}" for name, version in versions.items())
    return DoctorCheck(name=f"extra {extra}", ok=True, detail=detail)


# Effects of a missing extra that no error reports.
_EFFECTS: Final = {"cli": "progress is plain lines", "prices": "the cost of runs is unknown"}


def _installed_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _check_package(name: str) -> DoctorCheck:
    version = _installed_version(name)
    return DoctorCheck(name=name, ok=version is not None, detail=version or "not installed: install agentfsm again")


def _check_store(place: str) -> DoctorCheck:
    """Open the store if it exists, and report its durability. A missing file is not created."""
    if not is_url(place) and not Path(place).exists():
        return DoctorCheck(name="store", ok=True, detail=f"{place} does not exist yet: the first run creates it")
    try:
        runs, orphans, durability = anyio.run(_query_store, open_existing_store(place))
    except AgentError as error:
        return DoctorCheck(name="store", ok=False, detail=str(error))
    if orphans:
        detail = f"the runs that called these runs of agents are over or gone, and these are open: {', '.join(orphans)}"
        return DoctorCheck(name="store", ok=False, detail=f"{detail}; end them with `agentfsm cancel RUN`")
    newest = max([run.format for run in runs if run.is_too_new], default=0)
    content = "runs" if runs else "no runs"
    if newest:
        content += f", some of format {newest}, which only a newer agentfsm reads and executes (this one: {FORMAT})"
    return DoctorCheck(
        name="store", ok=True, detail=f"{mask_password(place)} opens and contains {content}; {durability}"
    )


async def _query_store(store: Store) -> tuple[tuple[RunSummary, ...], list[str], str]:
    """Return the newest runs of the store, the orphans, and its durability. Redis reports its own, from its settings.

    Orphans are the ids of open runs of sub-agents whose caller is over, among the newest open runs in each state.
    """
    try:
        runs = await store.runs()
        states = (State.OBSERVE, State.THINK, State.ACT, State.REFLECT)
        found = [each for state in states for each in await store.runs(Filter(state=state), limit=_OPEN_RUNS)]
        below = [(each.id, each.parent) for each in found if each.parent is not None and not each.is_too_new]
        over = {caller: await _is_over(store, caller) for caller in {caller for _, caller in below}}
        orphans = [run_id for run_id, caller in below if over[caller]]
        ask = getattr(store, "describe_durability", None)
        return runs, orphans, _DURABILITY[type(store).__name__] if ask is None else await ask()
    finally:
        await store.aclose()


async def _is_over(store: Store, run_id: str) -> bool:
    """Return whether a run is over, or is not in the store any more."""
    try:
        return (await load_run(store, run_id)).is_over
    except RunNotFoundError:
        return True


# Open runs in each state that are looked at for runs of sub-agents without their caller.
_OPEN_RUNS: Final = 1_000


# Durability by class of the store.
_DURABILITY: Final = {
    "SQLiteStore": 'acknowledged events survive a power cut with durability "full", the default, and the death of the '
    'process with "normal"',
    "PostgresStore": 'acknowledged events survive a crash of the server with durability "full", the default; with '
    '"normal", a crash may lose the last second',
}


def _check_vocabulary() -> DoctorCheck:
    """Check whether the vocabulary of tiktoken is cached. It is not downloaded, and tiktoken is not imported."""
    folder = os.environ.get("TIKTOKEN_CACHE_DIR", os.environ.get("DATA_GYM_CACHE_DIR"))
    place = Path(tempfile.gettempdir()) / "data-gym-cache" if folder is None else Path(folder)
    name = hashlib.sha1(VOCABULARY_URL.encode(), usedforsecurity=False).hexdigest()
    if folder != "" and (place / name).exists():  # "" turns the cache of tiktoken off
        return DoctorCheck(name="vocabulary", ok=True, detail=f"o200k_base is in {place}")
    detail = f"o200k_base is not in {place}: tiktoken downloads it when needed; without it, tokens are estimated"
    return DoctorCheck(name="vocabulary", ok=True, detail=detail)


# The agent.


def _add_agent(target: str, report: DoctorReport, equip: Callable[[Agent], Agent]) -> DoctorReport:
    """Add an agent to the report. `equip` adds the MCP servers to it."""
    missing: dict[str, DoctorCheck] = {}
    try:
        while True:
            try:
                agent = equip(load_agent(target))
                break
            except AgentError as error:
                check, key = DoctorCheck(name="agent", ok=False, detail=str(error)), _KEY.search(str(error))
                if key is None or os.environ.get(key[0]):
                    return attrs.evolve(report, checks=(*report.checks, *missing.values(), check))
                missing[key[0]] = attrs.evolve(check, name=key[0])
                os.environ[key[0]] = "missing"  # so that the rest can be checked; no request is sent
    finally:
        for name in missing:
            del os.environ[name]
    kept = [check for check in report.checks if check.name not in missing]
    report = attrs.evolve(report, checks=(*kept, *missing.values()))
    tools = tuple(ToolReport(name=each.name, declared=list_declarations(each)) for each in agent.tools)
    detail = f"{target}: {agent.name}, model {agent.model.name}, {len(tools)} tools"
    if isinstance(profile := getattr(agent.model, "profile", None), ModelProfile):
        detail = f"{detail}; {profile.describe()}"
    check = DoctorCheck(name="agent", ok=True, detail=detail)
    try:
        anyio.run(agent.aclose)
    except AgentError as error:
        check = DoctorCheck(name="agent", ok=False, detail=f"{detail}; closing it failed: {error}")
    findings = agent.tools.check()
    if idle := explain_idle_guards(agent.guards, agent.tools):
        findings += (Finding(tool=None, severity="warning", message=idle),)
    return attrs.evolve(report, checks=(*report.checks, check), tools=tools, findings=findings)


# Variable that an error of a model names if it is not set.
_KEY: Final = re.compile(r"\b[A-Z][A-Z0-9_]*_API_KEY\b")


# The prompts.


def _add_prompts(folder: str, report: DoctorReport) -> DoctorReport:
    """Add the prompts of a folder to the report."""
    try:
        prompts = Prompts(folder)
        findings = lint_prompts(prompts)
    except AgentError as error:
        check = DoctorCheck(name="prompts", ok=False, detail=str(error))
        return attrs.evolve(report, checks=(*report.checks, check))
    check = DoctorCheck(name="prompts", ok=True, detail=f"{folder}: {', '.join(prompts.names) or 'none'}")
    return attrs.evolve(report, checks=(*report.checks, check), prompts=findings)
