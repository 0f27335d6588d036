"""What becomes of the open runs of an agent under another release: a report, before the release is deployed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import attrs

from agentfsm.agents.runs import Runs
from agentfsm.core.errors import AgentError, RunNotFoundError
from agentfsm.core.text_safety import strip_unsafe
from agentfsm.core.value import Value
from agentfsm.ports.store import Filter
from agentfsm.releases.upgrade_check import ORDER, RunUpgrade, UpgradeChange, UpgradeVerdict, compare_run

if TYPE_CHECKING:
    from agentfsm.agents.runnable_agent import RunnableAgent
    from agentfsm.ports.store import RunSummary

# What follows from a verdict, for people.
VERDICTS: Final[Mapping[UpgradeVerdict, str]] = {
    UpgradeVerdict.SAME: "go on as they would have",
    UpgradeVerdict.DIFFERS: "go on, with other requests, tools or settings",
    UpgradeVerdict.ATTENTION: "go on, and a person is asked about a call, or a call or step is not carried out",
    UpgradeVerdict.REFUSED: "are refused: they wait for the release that began them",
}
# Runs that a report lists unless told otherwise.
LISTED_RUNS: Final = 20


@attrs.frozen(kw_only=True)
class UpgradeReport(Value):
    """The open runs of an agent under another release."""

    agent: str
    """Name of the agent."""

    release: str
    """Version of the agent that was checked; empty if it has none."""

    runs: tuple[RunUpgrade, ...] = ()
    """The open runs, newest first."""

    @property
    def verdicts(self) -> Mapping[UpgradeVerdict, int]:
        """Number of runs by verdict, the worst last."""
        counted = Counter(run.verdict for run in self.runs)
        return {verdict: counted[verdict] for verdict in UpgradeVerdict}

    @property
    def releases(self) -> Mapping[str, int]:
        """Number of runs by the release of a roll-out that they belong to, runs without one left out."""
        return Counter(run.release for run in self.runs if run.release)

    @property
    def changed(self) -> tuple[RunUpgrade, ...]:
        """The runs with a difference, the worst first."""
        found = [run for run in self.runs if run.changes]
        return tuple(sorted(found, key=lambda run: -ORDER.index(run.verdict)))

    @property
    def is_smooth(self) -> bool:
        """Whether each run goes on by itself, and no call or step of it is dropped."""
        counted = self.verdicts
        return not (counted[UpgradeVerdict.ATTENTION] or counted[UpgradeVerdict.REFUSED])

    def count_changes(self) -> list[tuple[UpgradeChange, int]]:
        """Return each difference as the newest run has it, with the number of runs that have it, the worst first."""
        first: dict[tuple[str, str], UpgradeChange] = {}
        counted = Counter[tuple[str, str]]()
        for run in self.runs:
            own = {(each.kind, each.text): each for each in reversed(run.changes)}
            first = own | first
            counted.update(own.keys())
        found = [(first[key], number) for key, number in counted.most_common()]
        return sorted(found, key=lambda each: -ORDER.index(each[0].verdict))

    def to_dict(self, *, limit: int | None = LISTED_RUNS, offset: int = 0) -> dict[str, Any]:
        """Return the report as JSON values, with `limit` of its changed runs from `offset` on; None for all of them."""
        listed = self.changed[offset:] if limit is None else self.changed[offset : offset + limit]
        return {
            "agent": self.agent,
            "release": self.release,
            "open": len(self.runs),
            "verdicts": {str(verdict): number for verdict, number in self.verdicts.items()},
            "releases": dict(self.releases),
            "changes": [
                {"kind": each.kind, "verdict": str(each.verdict), "text": each.text, "runs": number}
                for each, number in self.count_changes()
            ],
            "changed": len(self.changed),
            "runs": [
                {
                    "id": run.id,
                    "verdict": str(run.verdict),
                    "release": run.release,
                    "checked": run.checked,
                    "changes": [attrs.asdict(each) | {"verdict": str(each.verdict)} for each in run.changes],
                }
                for run in listed
            ],
        }

    def to_markdown(self, *, limit: int | None = LISTED_RUNS, offset: int = 0) -> str:
        """Return the report as Markdown, with the runs that `to_dict` lists."""
        report = self.to_dict(limit=limit, offset=offset)
        name = f"{self.agent} {self.release}".strip()
        lines = [
            f"# Upgrade of open runs to {_write_cell(name)}",
            "",
            "| runs | verdict | they |",
            "| ---: | --- | --- |",
        ]
        lines += [f"| {number:,} | {verdict} | {VERDICTS[verdict]} |" for verdict, number in self.verdicts.items()]
        if report["changes"]:
            lines += ["", "| runs | verdict | kind | difference |", "| ---: | --- | --- | --- |"]
            lines += [
                f"| {each['runs']:,} | {each['verdict']} | {each['kind']} | {_write_cell(each['text'])} |"
                for each in report["changes"]
            ]
            lines += [
                "",
                f"Runs {offset + 1:,} to {offset + len(report['runs']):,} of {report['changed']:,} with a difference:",
            ]
            lines += ["", "| run | verdict | where | difference |", "| --- | --- | --- | --- |"]
            lines += [
                f"| {_write_cell(run['id'])} | {each['verdict']} | {_write_cell(describe_place(run['id'], each))} "
                f"| {_write_cell(each['text'])} |"
                for run in report["runs"]
                for each in run["changes"]
            ]
        return "\n".join(lines) + "\n"


def describe_place(run_id: str, change: Mapping[str, Any]) -> str:
    """Return where in a run a difference lies: the sub-agent's run, the call or the version of the reply."""
    below = "" if change["run_id"] == run_id else change["run_id"]
    where = change["call_id"] or (f"version {change['version']}" if change["version"] else "")
    return " ".join([each for each in (below, where) if each])


def _write_cell(text: str) -> str:
    return (
        strip_unsafe(text)
        .replace("\n", " ")
        .replace("\\", "\\\\")
        .replace("|", "\\|")
        .replace("<", "&lt;")
        .replace("`", "\\`")
    )


async def check_upgrade(agent: RunnableAgent, *, deps: Any = None) -> UpgradeReport:
    """Compare each open run of an agent in its store, and the runs below it, with the agent as it is here.

    No model is asked, no tool is called, no lease is taken and nothing is written. The tools of MCP servers are listed.
    The functions of the agent that a request needs, such as its settings and `enabled`, are called.

    Args:
        agent: The agent as it would be deployed, with the store of the runs.
        deps: Dependencies for the tools' `enabled` functions, which decide the tools of a request.

    Raises:
        StoreError: if the store cannot list the runs.
    """
    config = agent.driver.config
    if config.registry.sources:
        await config.registry.refresh()
    where = Filter(agent=agent.name, parent="", over=False, purpose="")
    found = [await _compare(agent, each, deps) async for each in Runs(agent.store).iterate(where)]
    runs = tuple([each for each in found if each is not None])
    return UpgradeReport(agent=agent.name, release=agent.version, runs=runs)


async def _compare(agent: RunnableAgent, summary: RunSummary, deps: Any) -> RunUpgrade | None:
    """Return what becomes of a run; None if it has been deleted, or has ended meanwhile."""
    if summary.is_too_new:
        text = f"its records have format {summary.format}, which a newer agentfsm has written"
        return _refuse(summary, "format", text)
    try:
        return await compare_run(agent.driver.config, agent.store, summary.id, deps)
    except RunNotFoundError:
        return None
    except AgentError as error:
        return _refuse(summary, "unreadable", f"it cannot be compared: {error}")
    except Exception as error:  # noqa: BLE001  of the agent's functions, such as its settings: the other runs count
        return _refuse(summary, "unreadable", f"it cannot be compared, since the agent raised {type(error).__name__}")


def _refuse(summary: RunSummary, kind: str, text: str) -> RunUpgrade:
    change = UpgradeChange(kind=kind, text=text, run_id=summary.id)
    return RunUpgrade(id=summary.id, release=summary.release, changes=(change,))
