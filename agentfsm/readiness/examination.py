"""Carry out the checks on an agent."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio.to_thread

from agentfsm.readiness.check_result import CheckResult, CheckStatus, ReadinessReport, Waiver
from agentfsm.readiness.checks import CHECKS, Subject, check_ids
from agentfsm.readiness.evidence import Evidence
from agentfsm.readiness.probes import run_probes

if TYPE_CHECKING:
    from agentfsm.agents.agent import Agent


async def examine_readiness(
    agent: Agent[Any],
    *,
    evidence: str | Path = "evidence",
    project: str | Path = ".",
    waivers: Mapping[str, Waiver] | None = None,
    probes: bool = True,
    on: date | None = None,
) -> ReadinessReport:
    """Check whether an agent is ready for production.

    Args:
        agent: The agent, with the store that it has in production.
        evidence: Folder of the files that `agentfsm eval run`, `agentfsm load` and drills wrote.
        project: Folder of the project, in which files of CI and alerts are looked for.
        waivers: Waivers by the id of their check, from `load_waivers`.
        probes: Whether to run the agent with a scripted model, in a thread of its own.
        on: Day of the report, which decides on waivers. None: today, in UTC.

    Raises:
        MisuseError: if a waiver names an unknown check.
    """
    waivers, on = waivers or {}, on or datetime.now(UTC).date()
    check_ids(waivers)
    found = await anyio.to_thread.run_sync(run_probes, agent) if probes else {}
    subject = Subject(agent=agent, evidence=Evidence(Path(evidence)), project=Path(project), on=on, probes=found)
    results: list[CheckResult] = []
    for check in CHECKS:
        finding, waiver = await check.find(subject), waivers.get(check.id)
        status = finding.status
        if status is not CheckStatus.PASS and waiver is not None and on <= waiver.until:
            status = CheckStatus.WAIVED
        results.append(
            CheckResult(
                id=check.id,
                area=check.area,
                requirement=check.requirement,
                source=check.source,
                status=status,
                detail=finding.detail,
                remedy=finding.remedy,
                waiver=waiver,
            )
        )
    return ReadinessReport(
        agent=agent.name,
        version=agent.version,
        fingerprint=agent.fingerprint.digest,
        on=on,
        checks=tuple(results),
    )
