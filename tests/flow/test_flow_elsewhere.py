"""Flows are evaluated, traced and served as agents are."""

import json

import pytest

from agentfsm.evals import Case, evaluate
from agentfsm.flow import Flow, step
from agentfsm.stores import MemoryStore
from agentfsm.telemetry import trace_of
from tests.support.gateways import named, serving


@step(read_only=True)
async def extract(day: str) -> list[int]:
    """Extract."""
    return [len(day), 37]


@step(depends_on=[extract], when=lambda extract: sum(extract) > 100)
async def alarm(extract: list[int]) -> str:
    """Alarm."""
    return str(extract)


@step(depends_on=[extract], read_only=True)
async def total(extract: list[int]) -> int:
    """Add."""
    return sum(extract)


FLOW = Flow([extract, alarm, total], name="totals")


async def test_a_flow_is_evaluated():
    """A case has its inputs as JSON, and its path are the steps that ran."""
    case = Case(input='{"day": "today"}', paths=[["extract", "total"], ["extract", "alarm", "total"]])
    report = await evaluate(FLOW.with_(store=MemoryStore()), [case], runs=2)
    assert report.mean() == 1
    assert {each.grades["tool_path"].value for each in report.results} == {1.0}


async def test_a_flow_is_traced():
    """Each step is a span below that of the run, also one that was skipped."""
    flow = FLOW.with_(store=MemoryStore())
    run = await flow.run({"day": "today"})
    names = [span.name for span in trace_of(run.header, await flow.runs.history(run.id))]
    assert {"invoke_agent totals", "execute_tool extract", "execute_tool alarm", "execute_tool total"} <= set(names)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])  # uvicorn
async def test_a_flow_is_served():
    """The prompt of a request is the inputs as JSON; inputs that are missing are an error of the client."""
    async with serving(FLOW.with_(store=MemoryStore())) as client:
        answer = await client.post("/v1/runs", json={"prompt": '{"day": "today"}', "wait_s": 30}, headers=named())
        wrong = await client.post("/v1/runs", json={"prompt": '{"month": "May"}'}, headers=named())
    assert json.loads(answer.json()["output"]) == {"total": 42}
    assert wrong.status_code == 400
    assert "the flow needs the input 'day'" in wrong.text
