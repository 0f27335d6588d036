"""Alerts of a night: rules repair what is known, an agent finds causes, and a person decides what is left.

    python examples/aiops.py

Duplicates are dropped and alerts are graded by a table of rules, which names the repair of the minor ones (P3 and P4).
The agent reads logs and releases for the others, and its answer is checked against the known causes. Where it finds
one, the repair is as automatic as before; where it finds none, the run waits for a person, who names the cause or
rejects the repair. Without OPENAI_API_KEY, a script replaces the model.
"""

from __future__ import annotations

import os
from typing import Any

import anyio

from agentfsm import Agent, RunContext, tool
from agentfsm.flow import Flow, agent_step, each, step
from agentfsm.ports import ProposedCall, Reply, Request, Store
from agentfsm.stores import MemoryStore
from agentfsm.testing.models import FunctionModel

Alert = dict[str, Any]
ALERTS: list[Alert] = [
    {"id": "a1", "host": "db-1", "metric": "disk_used", "value": 91},
    {"id": "a2", "host": "db-1", "metric": "disk_used", "value": 93},  # the same again
    {"id": "a3", "host": "web-2", "metric": "cpu", "value": 97},
    {"id": "a4", "host": "shop", "metric": "error_rate", "value": 12},
    {"id": "a5", "host": "mail", "metric": "queue_age", "value": 4_000},
]
# Metric, threshold, grade and repair; None if the cause has to be found.
RULES = [
    ("disk_used", 85, "P4", "clean_logs"),
    ("cpu", 90, "P3", "scale_up"),
    ("error_rate", 5, "P1", None),
    ("queue_age", 600, "P2", None),
]
REPAIRS = {"bad_release": "roll_back", "full_queue": "restart_workers"}  # by cause
UNKNOWN = "unknown"


class Operations:
    """The systems that are repaired, and a record of the repairs by idempotency key."""

    def __init__(self) -> None:
        self.done: dict[str, str] = {}

    def act(self, key: str, what: str) -> None:
        """Do something once for a key."""
        self.done.setdefault(key, what)


@step(read_only=True)
def grade(alerts: list[Alert]) -> list[Alert]:
    """Drop duplicates, and grade the others by the rules."""
    first = {(alert["host"], alert["metric"]): alert for alert in reversed(alerts)}
    rules = {metric: (threshold, level, repair) for metric, threshold, level, repair in RULES}
    found = [(alert, *rules.get(alert["metric"], (0, "P2", None))) for alert in reversed(first.values())]
    return [{**alert, "level": level, "repair": fix} for alert, limit, level, fix in found if alert["value"] > limit]


@step(idempotent=True, when=lambda alert: alert["repair"] is not None)
def repair_known(ctx: RunContext[Operations], alert: Alert) -> str:
    """Carry out the repair that the rules name."""
    ctx.deps.act(ctx.idempotency_key, f"{alert['repair']} on {alert['host']}")
    return str(alert["repair"])


@tool(read_only=True)
async def read_releases(host: str) -> list[str]:
    """Return the releases of the last hour on a host."""
    return ["shop 4.2, 02:55"] if host == "shop" else []


def look(request: Request) -> Reply:
    """Play a model that looks at releases before it answers."""
    if len(request.messages) == 1:
        host = request.messages[0].text.split()[-1]
        return Reply(calls=(ProposedCall(id="c1", name="read_releases", arguments=f'{{"host": "{host}"}}'),))
    return Reply(text="bad_release" if "shop 4.2" in request.messages[-1].text else "Hard to say from here.")


@step(depends_on=["grade", "causes"], read_only=True)
def decide(grade: list[Alert], causes: list[str | None]) -> list[Alert]:
    """Return the incidents that are left, each with its cause."""
    return [{**alert, "cause": cause} for alert, cause in zip(grade, causes, strict=True) if cause is not None]


@step(idempotent=True, requires_approval=lambda arguments: arguments.incident["cause"] == UNKNOWN)
def repair(ctx: RunContext[Operations], incident: Alert) -> str:
    """Repair the cause of an incident. If it is unknown, a person is asked first, and names it."""
    fix = REPAIRS[incident["cause"]]
    ctx.deps.act(ctx.idempotency_key, f"{fix} on {incident['host']}")
    return fix


@step(depends_on=["repaired", "repairs"], idempotent=True)
def notify(ctx: RunContext[Operations], repaired: list[str | None], repairs: list[str]) -> str:
    """Tell the person on call about all repairs."""
    text = f"repaired: {', '.join([*filter(None, repaired), *repairs])}"
    ctx.deps.act(ctx.idempotency_key, text)
    return text


def build_flow(store: Store) -> Flow:
    """Return the flow."""
    model = "openai:gpt-5.4-mini" if os.environ.get("OPENAI_API_KEY") else FunctionModel(look)
    agent = Agent(model, name="diagnose", tools=[read_releases], instructions="Find the cause of an alert.")
    cause = agent_step(
        agent,
        lambda alert: (
            f"One of {', '.join(REPAIRS)} or {UNKNOWN}: {alert['metric']} {alert['value']} on {alert['host']}"
        ),
        name="cause",
        when=lambda alert: alert["repair"] is None,
        validate={*REPAIRS, UNKNOWN},
        fallback=UNKNOWN,
    )
    by_id = {"key": lambda alert: alert["id"]}
    repaired = each(repair_known, over=grade, name="repaired", **by_id)
    causes = each(cause, over=grade, name="causes", **by_id)
    repairs = each(repair, over=decide, name="repairs", fallback="left to a person", **by_id)
    return Flow([grade, repaired, causes, decide, repairs, notify], name="aiops", store=store)


async def main() -> None:
    """Work on the alerts of a night; a person names the cause that the agent did not find."""
    operations = Operations()
    async with build_flow(MemoryStore()) as flow:
        run = await flow.run({"alerts": ALERTS}, deps=operations)
        print("done:", *operations.done.values(), sep="\n  ")
        (question,) = run.pending
        incident = question.arguments["incident"]
        print(f"waits for a person: {incident['id']}, {incident['level']}, cause {incident['cause']}")
        answer = {"incident": {**incident, "cause": "full_queue"}}
        await flow.approve(question.run_id, question.call_id, by="ann", arguments=answer)
        run = await flow.resume(run.id, deps=operations)
        print(run.stop_reason, run.output)


if __name__ == "__main__":
    anyio.run(main)
