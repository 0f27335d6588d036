"""Many clients that follow one run are one reader of its journal, and each of them gets what it may see."""

import json

import anyio
import pytest

from agentfsm import Agent, JournalEvent, Limits, tool
from agentfsm.core.messages import NativeReply
from agentfsm.ports import ProposedCall, Reply
from agentfsm.serve import journal_feeds
from agentfsm.stores import MemoryStore
from agentfsm.testing import FunctionModel, ScriptedModel, call, say
from tests.support.checks import HANG_S
from tests.support.gateway_client import events_of, named, paying, serving

STREAMS = 12
TURNS = 6


@pytest.fixture
def anyio_backend():
    """Return the one that uvicorn runs on."""
    return "asyncio"


class CountingStore(MemoryStore):
    """Counts the reads of journals, and the appends."""

    reads = 0
    appends = 0

    async def read(self, run_id, after=0):
        """Count, and read."""
        self.reads += 1
        return await super().read(run_id, after)

    def append(self, *args, **options):
        """Count, and append."""
        self.appends += 1
        return super().append(*args, **options)


async def follow_together(client, run_id, gate, count=STREAMS):
    """Follow a run by many streams, open the gate once all have seen a call start, and return what each has got."""
    found, begun = [], 0

    async def follow():
        nonlocal begun
        events = []
        async with client.stream("GET", f"/v1/runs/{run_id}/events") as response:
            async for line in response.aiter_lines():
                if line.startswith('data: {"run_id"'):
                    events.append(json.loads(line[6:]))
                    begun += events[-1]["event"]["is"] == "ToolStarted"  # the first one, as long as the gate is closed
                    if begun == count:
                        gate()
        found.append(events)

    with anyio.fail_after(HANG_S):
        async with anyio.create_task_group() as tasks:
            for _ in range(count):
                tasks.start_soon(follow)
    return found


async def test_streams_of_a_run_read_its_journal_and_encode_its_events_together(monkeypatch):
    """So that the work of the server does not grow with the viewers."""
    store, opened, before, encoded = CountingStore(), anyio.Event(), 0, []

    @tool
    async def look() -> str:
        """Look, once all watch."""
        await opened.wait()
        return "seen"

    def open_gate():
        nonlocal before
        before = store.reads - store.appends
        opened.set()

    to_dict = JournalEvent.to_dict
    monkeypatch.setattr(JournalEvent, "to_dict", lambda item: encoded.append(item.version) or to_dict(item))
    script = [say("", call("look")) for _ in range(TURNS)]
    agent = Agent(ScriptedModel(*script, "done"), tools=[look], store=store, limits=Limits(turns=TURNS + 1))
    async with serving(agent) as client:
        run = (await client.post("/v1/runs", json={"prompt": "go"})).json()
        found = await follow_together(client, run["id"], open_gate)
        version = (await client.get(f"/v1/runs/{run['id']}")).json()["version"]
    assert [each["version"] for each in found[0]] == list(range(1, version + 1))
    assert all(each == found[0] for each in found)
    assert sorted(encoded) == list(range(1, version + 1))
    assert store.reads - store.appends - before < STREAMS


async def test_the_form_of_the_provider_is_shown_to_administrators_only():
    """Also if both follow the same run at the same time."""
    native = NativeReply(provider="function", content='{"text": "as the provider has it"}')

    async def think(request):
        if len(request.messages) == 1:
            return Reply(text="", calls=(ProposedCall(id="a", name="pay", arguments='{"amount": 5}'),), native=native)
        return Reply(text="done", native=native)

    agent = paying().with_(model=FunctionModel(think))
    found = {}
    async with serving(agent) as client:
        run = (await client.post("/v1/runs", json={"prompt": "pay", "wait_s": 30}, headers=named())).json()

        async def follow(name, headers):
            found[name] = await events_of(client, run["id"], headers=headers)

        async with anyio.create_task_group() as tasks:
            for number in range(3):
                tasks.start_soon(follow, f"user {number}", named())
                tasks.start_soon(follow, f"admin {number}", named("root", "", "admin"))
            await events_of(client, run["id"], until="ApprovalAsked")
            [item] = run["pending"]
            body = {"call_id": item["call_id"], "digest": item["digest"]}
            await client.post(f"/v1/runs/{run['id']}/approve", json=body)
    for name, events in found.items():
        assert events[-1][1]["event"]["is"] == "AnswerGiven"
        assert ("as the provider has it" in json.dumps(events)) == name.startswith("admin"), name


@pytest.mark.parametrize(("kept", "batch"), [(1, 1), (2, 3)])
async def test_a_stream_that_lags_behind_reads_what_is_not_kept(monkeypatch, kept, batch):
    """From any position it gets every event once, while others are at the end."""
    monkeypatch.setattr(journal_feeds, "MAX_KEPT", kept)
    monkeypatch.setattr("agentfsm.serve.event_stream.MAX_BATCH", batch)
    async with serving(paying()) as client:
        run = (await client.post("/v1/runs", json={"prompt": "pay", "wait_s": 30})).json()
        rest = {}

        async def follow(version):
            rest[version] = await events_of(client, run["id"], after=str(version) if version else "")

        async with anyio.create_task_group() as tasks:
            for version in range(run["version"], -1, -1):  # the first one is at the end
                tasks.start_soon(follow, version)
            await events_of(client, run["id"], until="ApprovalAsked")
            [item] = run["pending"]
            body = {"call_id": item["call_id"], "digest": item["digest"]}
            await client.post(f"/v1/runs/{run['id']}/approve", json=body)
        whole = await events_of(client, run["id"])
    assert [data["version"] for _, data in whole] == list(range(1, len(whole) + 1))
    for version, events in rest.items():
        assert events == whole[version:]


async def test_the_stream_that_waits_for_all_may_leave():
    """Then another one waits, and gets what comes."""
    async with serving(paying()) as client:
        run = (await client.post("/v1/runs", json={"prompt": "pay", "wait_s": 30})).json()
        url, found = f"/v1/runs/{run['id']}/events", []

        async def follow():
            found.append(await events_of(client, run["id"], after=str(run["version"] - 1)))

        async with anyio.create_task_group() as tasks:
            async with client.stream("GET", url) as first:
                async for line in first.aiter_lines():
                    if "ApprovalAsked" in line:
                        break
                for _ in range(3):
                    tasks.start_soon(follow)
                await events_of(client, run["id"], until="ApprovalAsked")
            [item] = run["pending"]
            body = {"call_id": item["call_id"], "digest": item["digest"]}
            await client.post(f"/v1/runs/{run['id']}/approve", json=body)
    assert [[data["event"]["is"] for _, data in each][-1] for each in found] == ["AnswerGiven"] * 3


async def test_a_new_run_is_answered_without_reading_it():
    """Its document follows from its start."""
    store = CountingStore()
    async with serving(Agent(ScriptedModel(say("x")), store=store), parallel=0) as client:
        made = await client.post("/v1/runs", json={"prompt": "hi"})
        assert (made.status_code, made.json()["status"], made.json()["version"]) == (201, "queued", 0)
        assert store.reads == 0
        assert (await client.get(f"/v1/runs/{made.json()['id']}")).json() == made.json()
