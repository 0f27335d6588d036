"""The checks before an agent goes live: a table, and a function for each.

Source: document H, 8.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Awaitable, Callable, Iterator, Mapping
from datetime import UTC, date, datetime
from inspect import isawaitable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import anyio
import attrs

from agentfsm.context import Summarise, TrimResults
from agentfsm.core.errors import AgentError, MisuseError
from agentfsm.core.labels import Label
from agentfsm.core.sensitive_text import DataKind
from agentfsm.core.usage import Usage, format_usd
from agentfsm.core.value import Value
from agentfsm.flow import Flow
from agentfsm.guards.exit_rules import ExitFilter
from agentfsm.guards.reach import explain_idle_guards, find_labels, iter_rules, may_stop
from agentfsm.models.wrappers.router import Router
from agentfsm.models.wrappers.tiered import Tiered
from agentfsm.ports.store import Filter
from agentfsm.readiness.check_result import CheckFinding, CheckSource, CheckStatus
from agentfsm.readiness.evidence import (
    EVAL_FILE,
    LOAD_FILE,
    RESTORE_FILE,
    ROLLBACK_FILE,
    DrillReport,
    Evidence,
    LoadReport,
)
from agentfsm.readiness.probes import iter_models
from agentfsm.releases import RolloutChange
from agentfsm.releases.rollout_log import ROLLOUTS
from agentfsm.sandbox import find_isolation
from agentfsm.stores.memory import MemoryStore
from agentfsm.streaming.log import is_logged
from agentfsm.streaming.watch import RunTracer
from agentfsm.telemetry.costs import read_costs
from agentfsm.telemetry.measurements import COST, RUN_DURATION, RUNS
from agentfsm.telemetry.totals import name_follower, read_status

if TYPE_CHECKING:
    from agentfsm.agents.agent import Agent
    from agentfsm.tools.tool import Tool

# Minimum of cases of a suite, of the share of completed runs, and of their mean grade (document H, 8).
MIN_EVAL_CASES: Final = 50
MIN_COMPLETION: Final = 0.9
MIN_QUALITY: Final = 0.8
# Seconds within which a release has to be rolled back (document H, 8).
ROLLBACK_S: Final = 300.0
# Days for which a drill counts.
DRILL_DAYS: Final = 90
# Runs of a load test from which the 99th percentile can be read.
MIN_LOAD_RUNS: Final = 100
# Seconds for which a follower may have left a run unread: longer, and its process is gone.
MAX_LAG_S: Final = 3_600.0
# Seconds for promtool to check a file.
PROMTOOL_S: Final = 30.0
# Tokens that no run needs without a reason: five times the default.
MAX_TOKENS: Final = 1_000_000
# Number of measures against costs of which an agent has at least two (document H, 8).
MIN_COST_MEASURES: Final = 2
# Names of parameters that hold something to execute: not a description, a transcript, or what is encoded.
_CODE_PARAMETERS: Final = re.compile(
    r"(?<!en)(?<!de)(?<!post)(?<!bar)code|(?<!tran)script(?!ion)|command|cmd|shell|python|expression", re.IGNORECASE
)
# Name of the follower that exports traces.
OTLP_FOLLOWER: Final = "otlp"
# Files of a project that start its checks.
_CI_FILES: Final = (".github/workflows/*.y*ml", ".gitlab-ci.yml", ".ci/*", "Jenkinsfile", "Makefile", "tox.ini")

_PASS, _FAIL, _UNKNOWN = CheckStatus.PASS, CheckStatus.FAIL, CheckStatus.UNKNOWN


@attrs.frozen(kw_only=True)
class Subject(Value):
    """An agent with its project, as the checks see it."""

    agent: Agent[Any]
    """The agent."""

    evidence: Evidence
    """Files that other commands wrote."""

    project: Path
    """Folder of the project."""

    on: date
    """Day of the report."""

    probes: Mapping[str, CheckFinding]
    """Outcomes of the probes, by the id of the check."""

    @property
    def fingerprint(self) -> str:
        """Digest of the agent's fingerprint."""
        return self.agent.fingerprint.digest


@attrs.frozen
class Check(Value):
    """A check."""

    id: str
    """Id of the check."""

    area: str
    """Its area."""

    requirement: str
    """The requirement, in a few words."""

    source: CheckSource
    """Source of the status."""

    look: Callable[[Subject], CheckFinding | Awaitable[CheckFinding]]
    """Function that finds the status."""

    async def find(self, subject: Subject) -> CheckFinding:
        """Return what the check finds. An error of the package is the reason of a failure; of another, nothing is."""
        try:
            found = self.look(subject)
            return await found if isawaitable(found) else found
        except AgentError as error:
            return CheckFinding(_FAIL, str(error), "mend or remove what the error names")
        except Exception as error:  # noqa: BLE001  files of the project and code of the agent, which may raise anything
            return CheckFinding(_UNKNOWN, f"the check raised {type(error).__name__}: {error}"[:300], "see the reason")


def _is_old(subject: Subject, recorded: str, name: str, command: str) -> CheckFinding | None:
    if recorded == subject.fingerprint:
        return None
    then = recorded or "an unknown version"
    return CheckFinding(_FAIL, f"{name} is of {then}; the agent is {subject.fingerprint} now", command)


# Quality.

_RUN_EVALS: Final = f"agentfsm eval run SUITE module:agent --out FOLDER/{EVAL_FILE}"
_RUN_LOAD: Final = f"agentfsm load module:agent --prompts FILE --concurrency N --out FOLDER/{LOAD_FILE}"


def _check_cases(subject: Subject) -> CheckFinding:
    evaluation = subject.evidence.read_evaluation()
    if evaluation is None:
        return CheckFinding(_UNKNOWN, f"there is no {EVAL_FILE}", _RUN_EVALS)
    cases = len({each.case for each in evaluation.results})
    status = _PASS if cases >= MIN_EVAL_CASES else _FAIL
    return CheckFinding(
        status, f"{cases} cases in {evaluation.suite}", "" if status is _PASS else f"at least {MIN_EVAL_CASES}"
    )


def _check_grades(subject: Subject) -> CheckFinding:
    evaluation = subject.evidence.read_evaluation()
    if evaluation is None:
        return CheckFinding(_UNKNOWN, f"there is no {EVAL_FILE}", _RUN_EVALS)
    if (old := _is_old(subject, evaluation.fingerprint, EVAL_FILE, _RUN_EVALS)) is not None:
        return old
    completion = evaluation.mean() or 0.0
    totals = [each.total for each in evaluation.results if each.total is not None]
    quality = sum(totals) / len(totals) if totals else 0.0
    detail = f"{completion:.0%} of {len(evaluation.results)} runs completed, mean grade {quality:.2f}, {evaluation.at}"
    if completion > MIN_COMPLETION and quality > MIN_QUALITY:
        return CheckFinding(_PASS, detail)
    return CheckFinding(_FAIL, detail, f"more than {MIN_COMPLETION:.0%} and {MIN_QUALITY}: see agentfsm eval report")


def _get_probe(name: str) -> Callable[[Subject], CheckFinding]:
    skipped = CheckFinding(_UNKNOWN, "the probes were not run", "leave out --no-probes")
    return lambda subject: subject.probes.get(name, skipped)


def _check_effects(subject: Subject) -> CheckFinding:
    tools = list(subject.agent.tools)
    bare = [  # tools that do not say what happens to a call that a crash has interrupted
        each.name
        for each in tools
        if not (each.read_only or each.idempotent or each.external) and each.on_unknown == "ask"
    ]
    found = () if isinstance(subject.agent, Flow) else subject.agent.tools.check()  # no model chooses steps
    warnings = [f"{each.tool}: {each.message}" for each in found if each.severity == "warning"]
    if warnings:
        return CheckFinding(_FAIL, "; ".join(warnings), "see agentfsm doctor module:agent")
    if bare:
        names = ", ".join(bare)
        return CheckFinding(
            _FAIL,
            f"{names}: after a crash in mid-call, a person has to settle the outcome",
            "declare read_only=, idempotent= or on_unknown=, or waive this",
        )
    return CheckFinding(_PASS, f"{len(tools)} tools declare what may be repeated")


# Performance.


def _read_current_load(subject: Subject) -> LoadReport | CheckFinding:
    """Return the load test of the present agent; else the finding that there is none."""
    report = subject.evidence.read_load()
    if report is None:
        return CheckFinding(_UNKNOWN, f"there is no {LOAD_FILE}", _RUN_LOAD)
    return _is_old(subject, report.fingerprint, LOAD_FILE, _RUN_LOAD) or report


def _check_latency(subject: Subject) -> CheckFinding:
    report = _read_current_load(subject)
    if isinstance(report, CheckFinding):
        return report
    times = f"P50 {report.p50_s:.2f} s, P95 {report.p95_s:.2f} s, P99 {report.p99_s:.2f} s"
    if report.runs < MIN_LOAD_RUNS:
        return CheckFinding(_FAIL, f"{times} over only {report.runs} runs", f"--runs {MIN_LOAD_RUNS}, for a P99")
    return CheckFinding(_PASS, f"{times} over {report.runs} runs, {report.at}")


def _check_load(subject: Subject) -> CheckFinding:
    report = _read_current_load(subject)
    if isinstance(report, CheckFinding):
        return report
    detail = f"{report.runs} runs, {report.concurrency} at a time: {report.failed} failed"
    if report.failed or report.concurrency < 2:
        return CheckFinding(_FAIL, detail, "no failed runs, at least 2 at a time")
    return CheckFinding(_PASS, detail)


def _check_tokens(subject: Subject) -> CheckFinding:
    limits = subject.agent.limits
    detail = f"{limits.tokens:,} tokens, {limits.tool_calls} calls and {limits.seconds:g} s for each run"
    if limits.tokens > MAX_TOKENS:
        return CheckFinding(_FAIL, detail, f"Limits(tokens=) of at most {MAX_TOKENS:,}, or waive this")
    return CheckFinding(_PASS, detail)


# Security.


def _check_input(subject: Subject) -> CheckFinding:
    rules = list(iter_rules(subject.agent.guards))
    trusted = frozenset(Label) - {Label.UNTRUSTED}
    knowing = [
        each
        for each in rules
        if each.fences([Label.UNTRUSTED])
        or bool(getattr(each, "screens", ()))
        or any(
            may_stop(each, tool.traits, Label) and not may_stop(each, tool.traits, trusted)
            for tool in subject.agent.tools
        )
    ]
    if not knowing:
        return CheckFinding(_FAIL, "no guard reads or marks untrusted text", "guards=[Guard.default()]")
    if idle := explain_idle_guards(subject.agent.guards, subject.agent.tools):
        return CheckFinding(
            _FAIL,
            idle,
            "declare labels, see docs/tools.md#labels; or waive this, if they come with prompts and inputs",
        )
    return CheckFinding(_PASS, f"{len(rules)} rules: {', '.join(map(str, subject.agent.guards))}"[:300])


def _check_output(subject: Subject) -> CheckFinding:
    agent = subject.agent
    ways = [
        *(["guards filter the answers"] if any(each.filters_texts() for each in agent.guards) else []),
        *([f"answers are {agent.output_type}"] if agent.output_type not in (None, str) else []),
        *(["validators check the answers"] if agent.output_validators else []),
    ]
    if ways:
        return CheckFinding(_PASS, "; ".join(ways))
    return CheckFinding(
        _FAIL, "nothing checks the answers", "guards=[Guard(exit_filter())], output_type= or output_validators="
    )


def _check_sandbox(subject: Subject) -> CheckFinding:
    tools = list(subject.agent.tools)
    sandboxed = [each.name for each in tools if each.sandbox is not None]
    executing = [each.name for each in tools if each.sandbox is None and _takes_code(each)]
    if executing:
        names = ", ".join(executing)
        return CheckFinding(_FAIL, f"{names} take something to execute, without a sandbox", "@tool(sandbox=Sandbox())")
    if sandboxed and find_isolation().isolation is None:
        return CheckFinding(_FAIL, f"{', '.join(sandboxed)}: {find_isolation().description}", "see docs/sandbox.md")
    limit = subject.agent.limits.tool_timeout_s
    detail = f"{len(sandboxed)} of {len(tools)} tools in a sandbox; each call ends after {limit:g} s or its own limit"
    return CheckFinding(_PASS, detail)


def _takes_code(tool: Tool[..., Any]) -> bool:
    names: Any = tool.parameters.get("properties", {})
    return any(_CODE_PARAMETERS.search(each) for each in names)


def _check_approvals(subject: Subject) -> CheckFinding:
    risky = [
        each
        for each in subject.agent.tools
        if each.irreversible or each.sends_out or not (each.read_only or each.harmless)
    ]
    permissions = subject.agent.permissions
    guards, labels = subject.agent.guards, find_labels(subject.agent.tools, subject.agent.guards)
    open_tools = [
        each.name
        for each in risky
        if each.requires_approval is False
        and not each.external
        and not any(may_stop(guard, each.traits, labels) for guard in guards)
        and (permissions is None or permissions.may_offer(each, ()))
    ]
    if open_tools:
        return CheckFinding(
            _FAIL,
            f"{', '.join(open_tools)}: calls with effects that no person, guard or permission can stop",
            "requires_approval=True, permissions=, or guards= and labels that they act on; or read_only=, if it is so",
        )
    return CheckFinding(_PASS, f"{len(risky)} tools have effects; approvals, guards or permissions decide on each")


def _check_personal_data(subject: Subject) -> CheckFinding:
    kinds = {kind for rule in iter_rules(subject.agent.guards) if isinstance(rule, ExitFilter) for kind in rule.kinds}
    if missing := [each.value for each in (DataKind.EMAIL, DataKind.PHONE, DataKind.BANK_CARD) if each not in kinds]:
        return CheckFinding(
            _FAIL, f"answers are not filtered for: {', '.join(missing)}", "guards=[Guard(exit_filter())]"
        )
    return CheckFinding(_PASS, f"answers are filtered for: {', '.join(sorted(kinds))}")


# Cost.


def _check_price(subject: Subject) -> CheckFinding:
    model = subject.agent.model
    model.prepare()
    usage = Usage(input_tokens=1_000_000, output_tokens=1_000_000)
    cost = model.cost_usd(usage)
    if cost is None:
        return CheckFinding(
            _FAIL, f"the price of {model.name} is unknown", "pip install 'agentfsm[prices]', or prices="
        )
    return CheckFinding(_PASS, f"{model.name}: {format_usd(cost)} for a million tokens in and a million out")


def _check_run_cost(subject: Subject) -> CheckFinding:
    usd = subject.agent.limits.usd
    if usd is None:
        return CheckFinding(_FAIL, "a run may cost any amount", "limits=Limits(usd=...)")
    return CheckFinding(_PASS, f"{format_usd(usd)} for each run")


def _check_spend(subject: Subject) -> CheckFinding:
    limits = [each for each in subject.agent.spend if not each.purpose]  # others are not about production
    days = [each for each in limits if each.per == "day" and each.scope == "agent"]
    if not days:
        others = f": {'; '.join(map(str, limits))} bounds none" if limits else ""
        return CheckFinding(_FAIL, f"a day may cost any amount{others}", 'spend=[Spend(per="day", usd=...)]')
    return CheckFinding(_PASS, f"{format_usd(min(each.usd for each in days))} a day")


async def _check_forecast(subject: Subject) -> CheckFinding:
    """Return the costs of a day and of a month: those of the store if it has a day of them, else of the load test."""
    agent, load = subject.agent, subject.evidence.read_load()
    costs = await read_costs(agent.store, where=Filter(agent=agent.name))
    if costs.usd_per_day is not None:
        day, basis = costs.usd_per_day, f"{costs.days:.1f} days of the store, {costs.runs:,} runs"
    elif load is None or load.usd is None or load.runs_per_day is None or load.fingerprint != subject.fingerprint:
        why = f"the store has none, since {costs.forecast_gap}, and {LOAD_FILE} has no cost for this version and number"
        return CheckFinding(_UNKNOWN if load is None else _FAIL, why, f"{_RUN_LOAD} --runs-per-day N")
    else:
        day = load.usd / load.runs * load.runs_per_day
        basis = f"{load.runs_per_day:,} runs a day, each as the mean of {load.runs:,} in {LOAD_FILE}"
    limits = [each.usd for each in agent.spend if each.per == "day" and each.scope == "agent" and not each.purpose]
    detail = f"{format_usd(day, estimated=True)} a day, {format_usd(30 * day, estimated=True)} in 30 days: {basis}"
    if limits and day > min(limits):
        limit = f"more than the limit of {format_usd(min(limits))} a day"
        return CheckFinding(_FAIL, f"{detail}: {limit}", "a higher Spend, or a cheaper agent")
    return CheckFinding(_PASS, detail)


def _check_cost_measures(subject: Subject) -> CheckFinding:
    agent = subject.agent
    policies = agent.context.policies
    measures = {
        "tiers": any(isinstance(each, Router | Tiered) for each in iter_models(agent.model)),
        "cache": agent.answer_cache is not None,
        "compression": any(isinstance(each, Summarise) for each in policies),
        "truncation": any(isinstance(each, TrimResults) for each in policies),
    }
    used = [name for name, is_used in measures.items() if is_used]
    if len(used) >= MIN_COST_MEASURES:
        return CheckFinding(_PASS, ", ".join(used))
    missing = ", ".join(name for name in measures if name not in used)
    return CheckFinding(
        _FAIL, f"only {used[0]}" if used else "none", f"at least {MIN_COST_MEASURES}: also one of {missing}"
    )


# Observability.


async def _check_traces(subject: Subject) -> CheckFinding:
    if any(isinstance(each.watcher, RunTracer) for each in subject.agent.watch):
        return CheckFinding(_PASS, "runs are traced live")
    remedy = "watch=[Telemetry()], or agentfsm export otlp --follow"
    return await _judge_follower(subject, OTLP_FOLLOWER, "exports the traces", remedy)


async def _check_metrics(subject: Subject) -> CheckFinding:
    status = await read_status(subject.agent.store)
    name = "" if status is None else name_follower(status.generation)
    remedy = "agentfsm serve, and read its /metrics"
    return await _judge_follower(subject, name, "counts the runs of the store", remedy)


async def _judge_follower(subject: Subject, name: str, does: str, remedy: str) -> CheckFinding:
    """Return whether the store has a follower that works: its position stays when its process has ended."""
    store = subject.agent.store
    found = next((each for each in await store.followers() if each.name == name), None)
    if found is None:
        return CheckFinding(_FAIL, f"nothing {does}", remedy)
    if found.waiting_since is not None and await store.now() - found.waiting_since > MAX_LAG_S:
        since = datetime.fromtimestamp(found.waiting_since, UTC).isoformat(timespec="seconds")
        return CheckFinding(_FAIL, f"the follower {name!r} has read nothing since {since}: {found.lag:,} runs", remedy)
    return CheckFinding(_PASS, f"a follower {does}")


async def _check_alerts(subject: Subject) -> CheckFinding:
    import yaml  # type: ignore[import-untyped]  # noqa: PLC0415  an extra

    write = "agentfsm alerts rules > alerts.yml, and load it"
    for path in _iter_yaml_files(subject.project):
        text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""  # not a link to nowhere
        if "agentfsm_" not in text or "alert:" not in text:
            continue
        name = path.relative_to(subject.project)
        try:
            document = yaml.safe_load(text)
            rules = [rule for group in document.get("spec", document)["groups"] for rule in group["rules"]]
            alerts = [str(rule["expr"]) for rule in rules if "alert" in rule]
        except (yaml.YAMLError, AttributeError, KeyError, TypeError) as error:
            return CheckFinding(_FAIL, f"{name} is not a file of rules: {type(error).__name__}: {error}"[:300], write)
        topics = {"errors": RUNS.name, "latency": RUN_DURATION.name, "costs": COST.name}
        if missing := [topic for topic, metric in topics.items() if not any(metric in each for each in alerts)]:
            return CheckFinding(_FAIL, f"no alert in {name} is about {' or '.join(missing)}", write)
        promtool = shutil.which("promtool")
        if promtool is None or "spec" in document:  # an object of Kubernetes, which the operator checks
            return CheckFinding(_PASS, f"{len(alerts)} alerts in {name}, not checked with promtool")
        with anyio.fail_after(PROMTOOL_S):
            checked = await anyio.run_process([promtool, "check", "rules", str(path)], check=False)
        if checked.returncode:
            said = (checked.stderr or checked.stdout).decode(errors="replace")
            return CheckFinding(_FAIL, f"promtool refuses {name}: {' '.join(said.split())}"[:300], "mend what it names")
        return CheckFinding(_PASS, f"{len(alerts)} alerts in {name}, checked with promtool")
    return CheckFinding(_FAIL, "no file of the project has alerts", write)


def _iter_yaml_files(project: Path) -> Iterator[Path]:
    """Yield the YAML files of a project, without those in environments and other hidden folders."""
    for folder, inner, names in os.walk(project):
        inner[:] = [name for name in inner if not name.startswith(".") and name != "node_modules"]
        yield from (
            Path(folder, name) for name in names if not name.startswith(".") and name.endswith((".yml", ".yaml"))
        )


def _check_logs(subject: Subject) -> CheckFinding:  # noqa: ARG001  the package's own logs
    if not is_logged(logging.WARNING):
        return CheckFinding(_FAIL, "nothing reads the logger agentfsm", "logging.basicConfig(level=logging.INFO)")
    return CheckFinding(_PASS, "each record of agentfsm has the run's id, and its trace's if it is traced")


# Release.


def _check_version(subject: Subject) -> CheckFinding:
    if not subject.agent.version:
        return CheckFinding(_FAIL, "the agent has no version", 'Agent(version="1.0.0")')
    return CheckFinding(_PASS, f"{subject.agent.version}, fingerprint {subject.fingerprint}")


def _check_prompts(subject: Subject) -> CheckFinding:
    run = subject.agent.start("check")
    prompts = run.header.fingerprint.prompts
    if not prompts:
        return CheckFinding(_FAIL, "the instructions have no version", 'instructions=Prompts("prompts")["name"]')
    return CheckFinding(_PASS, ", ".join(f"{name} {version}" for name, version in prompts.items()))


async def _check_rollout(subject: Subject) -> CheckFinding:
    agent = subject.agent
    remedy = "agentfsm rollout start module:rollout old=95 new=5 --back-if 'failures 5%' --reason TEXT"
    newest: dict[str, RolloutChange] = {}
    after = ""
    while page := await agent.store.list_records(ROLLOUTS, after=after):
        newest |= {each.key.rpartition("/")[0]: RolloutChange.from_dict(each.value) for each in page}
        after = page[-1].key
    own = {name: each for name, each in newest.items() if each.plan.agent == agent.name and not each.is_killed}
    if not own:
        return CheckFinding(_FAIL, "the store has no roll-out of the agent in progress", remedy)
    for name, change in own.items():
        if agent.version not in change.plan.releases.values() or len(change.plan.releases) < 2:
            continue
        if not change.plan.rules:
            return CheckFinding(_FAIL, f"roll-out {name!r} has no rule by which it is rolled back", remedy)
        weights = ", ".join(f"{arm} {weight:g} %" for arm, weight in change.plan.weights.items())
        return CheckFinding(_PASS, f"{name}: {weights}; back if {'; '.join(map(str, change.plan.rules))}")
    return CheckFinding(_FAIL, f"{', '.join(own)}: no other release beside {agent.version or 'this one'}", remedy)


def _check_rollback(subject: Subject) -> CheckFinding:
    drill = subject.evidence.read_drill(ROLLBACK_FILE)
    if drill is None:
        return CheckFinding(_UNKNOWN, f"there is no {ROLLBACK_FILE}", "agentfsm drill rollback ROLL-OUT")
    if (drill.kind, drill.subject) != ("rollback", subject.agent.name):
        return CheckFinding(_FAIL, f"that is a {drill.kind} of {drill.subject}", "agentfsm drill rollback ROLL-OUT")
    if drill.failure:
        return _tell_failure(drill)
    if drill.seconds > ROLLBACK_S:
        return CheckFinding(_FAIL, _describe_drill(drill), f"at most {ROLLBACK_S:.0f} s")
    return _judge_drill(subject, drill)


def _judge_drill(subject: Subject, drill: DrillReport) -> CheckFinding:
    age_days = drill.find_age_days(subject.on)
    if age_days < -1:  # it may be tomorrow elsewhere
        return CheckFinding(_FAIL, f"{_describe_drill(drill)}: that is in the future", "record the time of its end")
    if age_days > DRILL_DAYS:
        return CheckFinding(_FAIL, _describe_drill(drill), f"practise it again: a drill counts for {DRILL_DAYS} days")
    return CheckFinding(_PASS, _describe_drill(drill))


def _tell_failure(drill: DrillReport) -> CheckFinding:
    remedy = "mend what the drill has found, and practise it again"
    return CheckFinding(_FAIL, f"failed on {drill.at}, by {drill.by}: {drill.failure}", remedy)


def _describe_drill(drill: DrillReport) -> str:
    return f"{drill.seconds:g} s, {drill.at}, by {drill.by}: {drill.note}".removesuffix(": ")


def _check_ci(subject: Subject) -> CheckFinding:
    files = [path for pattern in _CI_FILES for path in sorted(subject.project.glob(pattern)) if path.is_file()]
    for path in files:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        if any("eval run" in line.partition("#")[0] for line in lines):
            return CheckFinding(_PASS, f"{path.relative_to(subject.project)} runs agentfsm eval")
    return CheckFinding(_FAIL, "no file of CI runs agentfsm eval", "run and gate the suite in CI: agentfsm eval gate")


# The store.


async def _check_store(subject: Subject) -> CheckFinding:
    agent = subject.agent
    name = type(agent.store).__name__
    if isinstance(agent.store, MemoryStore):
        return CheckFinding(_FAIL, "runs are in the memory of the process", "store=PostgresStore(...), or another one")
    await agent.store.runs(limit=1)
    describe = getattr(agent.store, "describe_durability", None)
    detail = f"{name}, durability {agent.durability!r}" + ("" if describe is None else f": {await describe()}")
    if agent.durability != "full":
        return CheckFinding(_FAIL, f"{detail}: a crash of the server may lose acknowledged events", 'durability="full"')
    return CheckFinding(_PASS, detail)


def _check_restore(subject: Subject) -> CheckFinding:
    drill = subject.evidence.read_drill(RESTORE_FILE)
    if drill is None:
        return CheckFinding(_UNKNOWN, f"there is no {RESTORE_FILE}", "agentfsm drill restore BACKUP")
    if drill.kind != "restore":
        return CheckFinding(_FAIL, f"that is a {drill.kind} of {drill.subject}", "agentfsm drill restore BACKUP")
    if drill.failure:
        return _tell_failure(drill)
    if (name := subject.agent.name) not in drill.agents:
        others = ", ".join(drill.agents) or "an unknown agent"
        return CheckFinding(_FAIL, f"that backup has runs of {others}, none of {name}", "agentfsm drill restore BACKUP")
    return _judge_drill(subject, drill)


_AGENT, _STORE, _PROBE = CheckSource.AGENT, CheckSource.STORE, CheckSource.PROBE
_EVIDENCE, _PROJECT = CheckSource.EVIDENCE, CheckSource.PROJECT

CHECKS: Final = (
    Check("eval-cases", "quality", f"a suite of at least {MIN_EVAL_CASES} cases", _EVIDENCE, _check_cases),
    Check("eval-grades", "quality", "the suite passes with this version", _EVIDENCE, _check_grades),
    Check("edge-inputs", "quality", "inputs at the edge are answered or refused", _PROBE, _get_probe("edge-inputs")),
    Check("tool-failures", "quality", "tools that hang or fail do no harm", _PROBE, _get_probe("tool-failures")),
    Check("model-fallback", "quality", "another model takes over", _PROBE, _get_probe("model-fallback")),
    Check("empty-reply", "quality", "empty replies end a run", _PROBE, _get_probe("empty-reply")),
    Check("effects-declared", "quality", "tools declare what may be repeated", _AGENT, _check_effects),
    Check("latency-baseline", "performance", "P50, P95 and P99 are known", _EVIDENCE, _check_latency),
    Check("turn-limit", "performance", "a run without end is ended", _PROBE, _get_probe("turn-limit")),
    Check("load-test", "performance", "runs at the same time all succeed", _EVIDENCE, _check_load),
    Check("token-budget", "performance", "a run has a budget of tokens", _AGENT, _check_tokens),
    Check("input-guard", "security", "guards know untrusted text", _AGENT, _check_input),
    Check("output-guard", "security", "answers are checked", _AGENT, _check_output),
    Check("tool-sandbox", "security", "tools that execute code are in a sandbox", _AGENT, _check_sandbox),
    Check("approvals", "security", "calls with effects are decided on", _AGENT, _check_approvals),
    Check("personal-data", "security", "answers hold no personal data", _AGENT, _check_personal_data),
    Check("prompt-leak", "security", "answers do not hold the instructions", _PROBE, _get_probe("prompt-leak")),
    Check("prices", "cost", "the price of the model is known", _AGENT, _check_price),
    Check("run-cost", "cost", "a run has a limit of costs", _AGENT, _check_run_cost),
    Check("daily-cost", "cost", "a day has a limit of costs", _AGENT, _check_spend),
    Check("cost-forecast", "cost", "the costs of a day and a month are forecast", _EVIDENCE, _check_forecast),
    Check("cost-measures", "cost", "costs are kept low", _AGENT, _check_cost_measures),
    Check("traces", "observability", "runs are traced", _AGENT, _check_traces),
    Check("metrics", "observability", "runs are counted", _STORE, _check_metrics),
    Check("alerts", "observability", "alerts are set", _PROJECT, _check_alerts),
    Check("logs", "observability", "logs name the run", _AGENT, _check_logs),
    Check("version", "release", "the agent has a version", _AGENT, _check_version),
    Check("prompt-versions", "release", "prompts have versions", _AGENT, _check_prompts),
    Check("rollout", "release", "a roll-out can begin with few users", _STORE, _check_rollout),
    Check("rollback-drill", "release", "a roll-back was practised", _EVIDENCE, _check_rollback),
    Check("evals-in-ci", "release", "CI evaluates each change", _PROJECT, _check_ci),
    Check("store", "release", "runs survive a crash", _STORE, _check_store),
    Check("restore-drill", "release", "a backup was restored", _EVIDENCE, _check_restore),
)
"""All checks, by area."""

AREAS: Final = tuple(dict.fromkeys(each.area for each in CHECKS))
"""The areas, in the order of the report."""


def check_ids(names: Mapping[str, object]) -> None:
    """Check that all keys are ids of checks.

    Raises:
        MisuseError: if one is not.
    """
    known = [each.id for each in CHECKS]
    if unknown := sorted(names.keys() - set(known)):
        raise MisuseError(f"there is no check {unknown[0]!r}; the checks are: {', '.join(known)}")
