"""Servers of the studio for its tests, and journals that its pages have to show."""

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import attrs
import httpx

import agentfsm
from agentfsm import AssistantMessage, Label, Outcome, Purpose, TextPart, ToolCall, ToolResult, Usage
from agentfsm.core import events as e
from agentfsm.core.claims import Claim
from agentfsm.core.events import AnswerSource
from agentfsm.core.header import Header
from agentfsm.core.recalled_items import RecalledItem
from agentfsm.core.usage import Spending, TierChoice
from agentfsm.guards import GuardVerdict
from agentfsm.stores import SQLiteStore

AGENTS = Path(__file__).parents[1] / "studio" / "studio_agents.py.txt"
TARGETS = [f"agents:{name}" for name in ("shop", "courier", "clerk", "planner", "payroll", "chatter", "desk", "booker")]
HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)> \u202egnp.exe\u202c \x1b[31m\u200b{{7*7}} 你好"
LONG_TURNS = 1_666


def in_thread(function, *args):
    """Call a function in a thread of its own, since Playwright has its event loop in this one."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(function, *args).result()


@contextmanager
def serving(folder, *words):
    """Run a command of `agentfsm` that serves, and return the process and the line that has the URL of the studio."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("AGENTFSM_", "PYTHON"))}
    process = subprocess.Popen(
        [sys.executable, "-m", "agentfsm", *words],
        cwd=folder,
        env={**kept, "PYTHONPATH": str(Path(agentfsm.__file__).parents[1])},
        stderr=subprocess.PIPE,
        encoding="utf-8",
    )
    try:
        lines = [process.stderr.readline(), process.stderr.readline()]
        found = re.search(r"studio: (http://\S+)", "".join(lines))
        assert found, "".join(lines) + process.stderr.read()
        yield process, found[1]
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


@attrs.frozen
class StudioServer:
    """The server that most tests share."""

    url: str
    """URL of the studio, without a page."""
    folder: Path
    runs: dict
    """Ids of runs by what they show."""

    def request(self, method, path, **options):
        """Send a request to the gateway, and return the document."""
        response = httpx.request(method, self.url.replace("/studio/", path), timeout=60, **options)
        assert response.is_success, response.text
        return response.json()

    def start(self, agent, prompt="Settle my invoices", **options):
        """Start a run, and return its id once it waits or is over."""
        run = self.request("POST", "/v1/runs", json={"prompt": prompt, "agent": agent, "wait_s": 30} | options)
        return run["id"]


def decide(studio, run_id, verb, **values):
    """Decide on what a run waits for, and wait until it waits again or is over."""
    [item] = studio.request("GET", f"/v1/runs/{run_id}")["pending"]
    digest = {"digest": item["digest"]} if verb == "approve" else {}
    studio.request("POST", f"/v1/runs/{run_id}/{verb}", json={"call_id": item["call_id"], **digest, **values})
    return studio.request("GET", f"/v1/runs/{run_id}?wait_s=30")


async def write_journals(path):
    """Write a run whose every field is hostile, one of 10,000 events, an escalated answer, and its repetition."""
    store = SQLiteStore(path)
    call = ToolCall(id="t1.0", name="search", arguments=json.dumps({"query": HOSTILE}), key="k")
    item = RecalledItem(
        id="m1", kind="fact", text="Ann pays by card", score=0.75, valid_from=90.0, labels=(Label.PRIVATE,)
    )
    hostile = [
        e.Observed(at=100.0, took_s=0.1),
        e.Recalled(at=100.0, query=HOSTILE, items=(item,)),
        e.ToolsChosen(at=101.0, took_s=1.0, message=AssistantMessage(text=HOSTILE, thinking=HOSTILE, calls=(call,))),
        e.Guarded(at=101.0, call_id="t1.0", verdict=GuardVerdict.ALLOW, rule="no(untrusted)", reason="it is allowed"),
        e.ToolFinished(at=102.0, took_s=1.0, result=build_result("t1.0", HOSTILE, 101.0)),
        e.ToolsReturned(at=102.0),
        e.Continued(at=102.0, note=HOSTILE),
        e.Paused(at=103.0, by=HOSTILE, message=HOSTILE),
    ]
    header = Header(id="hostile", prompt=(TextPart(text=HOSTILE),), created_at=100.0, agent="shop", user=HOSTILE)
    plain = attrs.evolve(header, user="ann", prompt=(TextPart(text="The capital of Italy?"),))
    small = Spending(
        purpose=Purpose.ROUTING, usage=Usage(input_tokens=60, output_tokens=2, cost_usd=0.01), model="mini"
    )
    large = Usage(input_tokens=100, output_tokens=20, cost_usd=0.5)
    tier = TierChoice(name="large", reason="classifier", spent=(small,))
    answer = e.AnswerGiven(at=101.0, took_s=1.0, message=AssistantMessage(text="Rome."))
    lie = Claim(tool="pay", arguments={"to": HOSTILE}, fault="no call of this tool is done")
    claimed = e.AnswerDrafted(at=101.0, message=answer.message, claims=(lie,))
    source = AnswerSource(run_id="tiered", at=101.0)
    journals = {
        "hostile": (header, hostile),
        "long": (plain, list(long_journal())),
        "tiered": (
            plain,
            [e.Observed(at=100.0), attrs.evolve(answer, usage=small.usage + large, model="max", tier=tier)],
        ),
        "evaluated": (
            attrs.evolve(plain, purpose="eval", session="a case"),
            [e.Observed(at=100.0), claimed, e.Accepted(at=101.0)],
        ),
        "repeated": (plain, [e.Observed(at=100.0), attrs.evolve(answer, answered_from=source)]),
    }
    for run_id, (each, events) in journals.items():
        _, lease = await store.create(attrs.evolve(each, id=run_id), events=events)
        await store.release(lease).wait()
    await store.aclose()


def long_journal():
    """Yield 10,000 events: turns of six, a pause, and an answer."""
    usage = Usage(input_tokens=100, output_tokens=20)
    yield e.Observed(at=1_000.0)
    for turn in range(1, LONG_TURNS + 1):
        at, call_id = 1_000.0 + turn, f"t{turn}.0"
        call = ToolCall(id=call_id, name="search", arguments=json.dumps({"query": f"page {turn}"}), key=call_id)
        yield e.ToolsChosen(at=at, took_s=0.5, message=AssistantMessage(text="Next.", calls=(call,)), usage=usage)
        yield e.ToolStarted(at=at, call_id=call_id, repeatable=True, read_only=True)
        yield e.ToolFinished(at=at + 0.4, took_s=0.4, result=build_result(call_id, f"page {turn}", at))
        yield e.ToolsReturned(at=at + 0.4)
        yield e.Continued(at=at + 0.4)
        yield e.Observed(at=at + 0.5, took_s=0.1)
    yield e.Paused(at=at + 1)
    yield e.Resumed(at=at + 1)
    yield e.AnswerGiven(at=at + 2, took_s=1.0, message=AssistantMessage(text="That was the last page."), usage=usage)


def build_result(call_id, content, started_at):
    return ToolResult(
        call_id=call_id, tool="search", outcome=Outcome.DONE, content=content, started_at=started_at, duration_s=0.4
    )
