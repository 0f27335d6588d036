"""A typed report, streamed to the terminal, with an overloaded model and a history larger than its context window.

A local HTTP server simulates both models, so no API key is needed. For real models, give their names and leave out
`base_url`.

    python examples/report.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import anyio

from agentfsm import Agent, CallDelta, ModelRetry, Run, StreamEvent, ToolEvent, ToolEventType, tool
from agentfsm.context import SlidingWindow, Summarise
from agentfsm.core.events import AnswerDrafted, Compacted, Continued, ToolsChosen
from agentfsm.models import Fallback, OpenAIChat
from agentfsm.testing import LocalServer, WireReply, call, say
from agentfsm.testing.models import Line

QUARTERS = ("2025-Q1", "2025-Q2", "2025-Q3", "2025-Q4", "2026-Q1", "2026-Q2")


@dataclass
class Finding:
    """Result of a quarter."""

    quarter: str
    revenue: int
    note: str


@dataclass
class Report:
    """Report on all quarters."""

    title: str
    findings: list[Finding]
    total: int


@tool(read_only=True)
async def read_quarter(quarter: str) -> str:
    """Read the accounts of a quarter, for example "2025-Q1": hundreds of bookings, and their sum."""
    number = QUARTERS.index(quarter) + 1
    bookings = "\n".join(f"{quarter} booking {line}: {number * line} EUR, paid by transfer" for line in range(1, 181))
    return f"{bookings}\nrevenue: {number * 16_290} EUR"


def check_total(report: Report) -> None:
    """Refuse a report that does not add up."""
    if (total := sum(finding.revenue for finding in report.findings)) != report.total:
        raise ModelRetry(f"the findings come to {total}, and the total says {report.total}")


class Models:
    """Simulates the models: the strong model is overloaded, the small model reads each quarter and then reports."""

    def __init__(self) -> None:
        revenues = {quarter: number * 16_290 for number, quarter in enumerate(QUARTERS, 1)}
        findings = [{"quarter": q, "revenue": r, "note": "more than ever before"} for q, r in revenues.items()]
        report = {"title": "Six quarters of growth", "findings": findings, "total": sum(revenues.values())}
        self.script = [
            *[say("", call("read_quarter", quarter=quarter)) for quarter in QUARTERS],
            say("", call("final_answer", **{**report, "total": 1})),
            say("", call("final_answer", **report)),
        ]
        self.summaries = 0

    def __call__(self, body: dict[str, Any]) -> Line | WireReply:
        """Answer a request."""
        if body["model"] == "strong":
            return WireReply(status=529, error="Overloaded")
        if not body.get("tools"):  # a request for a summary
            self.summaries += 1
            return say("Asked for a report of all quarters. Each quarter's revenue was read, one after the other.")
        return self.script.pop(0)


async def main() -> None:
    """Stream the report, and print the events of its run."""
    with LocalServer(Models()) as server:
        strong, small = (
            OpenAIChat(name, base_url=server.base_url, window_tokens=16_000) for name in ("strong", "small")
        )
        agent = Agent(
            Fallback(strong, small),
            tools=[read_quarter],
            output_type=Report,
            output_validators=[check_total],
            context=[Summarise(model=small, keep=1, least=0), SlidingWindow()],
        )
        async with agent:
            async with agent.stream("How did the business go, quarter by quarter?") as stream:
                async for event in stream:
                    show(event, stream.partial)
            if stream.run is not None:
                await print_report(agent, stream.run)


def show(event: StreamEvent, partial: Any) -> None:
    """Print finished calls, and the number of findings as the report streams."""
    if isinstance(event, ToolEvent) and event.type is ToolEventType.COMPLETED:
        print(f"{event.tool} ({event.call_id}) in turn {event.turn}")
    elif isinstance(event, CallDelta) and partial and partial.get("findings"):
        print(f"\r{partial['title']}: finding {len(partial['findings'])}", end="", flush=True)


async def print_report(agent: Agent[Report], run: Run[Report]) -> None:
    """Print the report, and compactions, refusals and models from the journal."""
    report, facts = run.output, await agent.history(run.id)
    print(f"\n{report.title}: {report.total:,} EUR in {len(report.findings)} quarters")
    for fact in facts:
        if isinstance(fact, Compacted):
            print(f"compacted by {', '.join(fact.policies)}: {fact.tokens_before:,} to {fact.tokens_after:,} tokens")
        if isinstance(fact, Continued) and fact.refused:
            print(fact.note)
    models = sorted({fact.model for fact in facts if isinstance(fact, ToolsChosen | AnswerDrafted)})
    print(f"{run.turn} turns, answered by: {', '.join(models)}")


if __name__ == "__main__":
    anyio.run(main)
