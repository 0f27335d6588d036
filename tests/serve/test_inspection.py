"""Runs explained over HTTP: versions, messages, requests, calls, differences, replays and forks with edits."""

import copy
import json

import pytest

from agentfsm import Agent, Claims, Limits, Settings, difference, tool
from agentfsm.agents.run_reports import describe_run
from agentfsm.core.codec import message_to_json
from agentfsm.core.usage import Usage
from agentfsm.engine.sent_request import read_sent_request
from agentfsm.journal.run_status import RunStatus
from agentfsm.stores import MemoryStore
from agentfsm.testing import ScriptedModel, call, say
from tests.support.gateway_client import named, paying, serving


@pytest.fixture
def anyio_backend():
    """Return the one that uvicorn runs on."""
    return "asyncio"


@tool
async def look(city: str) -> str:
    """Look up the weather."""
    return f"rain in {city}"


def looking():
    return Agent(
        ScriptedModel(say("", call("look", city="Rome")), say("take a coat"), *[say("no")] * 9),
        tools=[look],
        name="weather",
        store=MemoryStore(),
    )


async def test_each_version_is_shown_as_the_library_has_it():
    """The journal in pages, the run and its messages at each version, and what the model was shown in each turn."""
    agent = looking()
    async with serving(agent) as client:
        made = (await client.post("/v1/runs", json={"prompt": "weather?", "wait_s": 30})).json()
        path, newest = f"/v1/runs/{made['id']}", made["version"]
        events, after = [], 0
        while after is not None:
            page = (await client.get(f"{path}/journal", params={"after": after, "limit": 2})).json()
            events, after = events + page["events"], page["after"]
        assert [each["event"] for each in events] == [each.to_dict() for each in await agent.history(made["id"])]
        assert [each["version"] for each in events] == list(range(1, newest + 1))
        for version in range(newest + 1):
            run = await agent.load(made["id"], at=version)
            shown = (await client.get(path, params={"at": version})).json()
            assert (shown["version"], shown["state"], shown["turn"]) == (version, str(run.state), run.turn)
            messages = (await client.get(f"{path}/messages", params={"at": version})).json()
            assert messages["messages"] == json.loads(json.dumps([message_to_json(each) for each in run.messages]))
        request = (await client.get(f"{path}/request", params={"turn": 2})).json()
        assert [each["is"] for each in request["messages"]] == ["UserMessage", "AssistantMessage", "ToolResult"]
        assert request["hash"] == events[request["version"] - 1]["event"]["request"]
        [record] = (await client.get(f"{path}/audit")).json()["calls"]
        assert (record["tool"], record["arguments"], record["status"]) == ("look", {"city": "Rome"}, "done")
        replay = (await client.get(f"{path}/replay")).json()
        assert replay == {"id": made["id"], "checked": 2, "divergences": []}
        for wrong in ("journal?after=x", "messages?at=99", "request?turn=9", "request", "diff?at=99"):
            assert (await client.get(f"{path}/{wrong}")).status_code == 400, wrong


async def test_what_an_answer_says_was_done():
    """The run has the mark, and the audit each claim with its call."""
    named = [{"tool": "look", "arguments": {"city": city}} for city in ("Rome", "Oslo")]
    model = ScriptedModel(say("", call("look", city="Rome")), say("", call("final_answer", result="so", claims=named)))
    agent = looking().with_(model=model, claims=Claims(), limits=Limits(answer_retries=0))
    async with serving(agent) as client:
        made = (await client.post("/v1/runs", json={"prompt": "weather?", "wait_s": 30})).json()
        found = (await client.get(f"/v1/runs/{made['id']}/audit")).json()
    assert (made["output"], found["unclaimed"]) == ("so", [])
    assert [each["call_id"] for each in found["claims"]] == ["t1.0", ""]
    assert made["not_done"] == found["claims"][1:]
    report = describe_run(await agent.load(made["id"]), RunStatus.DONE, "")
    assert report["not_done"] == 'look({"city":"Oslo"}): the call t1.0 differs in city'


class PricedModel(ScriptedModel):
    """A model whose tokens have a price; those from the cache cost a tenth."""

    def cost_usd(self, usage):
        fresh = usage.input_tokens - usage.cached_tokens
        return fresh * 1e-6 + usage.cached_tokens * 1e-7 + usage.output_tokens * 1e-5


@pytest.fixture
def dear():
    """Return an agent whose third request has a large result, and a cache that has read a part."""
    usage = Usage(input_tokens=10_000, output_tokens=100, cached_tokens=2_000)
    script = say("", call("look", city="Rome")), say("", call("look", city="Bonn " * 2_000)), say("ok", usage=usage)
    return Agent(
        PricedModel(*script),
        tools=[look],
        name="weather",
        instructions="Be brief.",
        settings=Settings(temperature=0.5, extra_body={"account": "a17"}),
        store=MemoryStore(),
    )


async def test_a_request_is_shown_part_by_part(dear):
    """Tools as sent, what is new, how often it was sent, and shares that add up; instructions for admins only."""
    async with serving(dear) as client:
        made = (await client.post("/v1/runs", json={"prompt": "go", "wait_s": 30}, headers=named())).json()
        path = f"/v1/runs/{made['id']}/request"
        first, third = [(await client.get(path, params={"turn": turn}, headers=named())).json() for turn in (1, 3)]
        whole = (await client.get(path, params={"turn": 3})).json()
        assert (await client.get(path, params={"turn": 3}, headers=named("bob"))).status_code == 404
    [declared] = [part for part in third["parts"] if part["kind"] == "tools"]
    assert (declared["name"], declared["text"]) == ("look", "Look up the weather.")
    assert declared["schema"] == json.loads(json.dumps(dict(look.definition.parameters)))
    assert (third["is_as_sent"], third["gap"]) == (True, "")
    names = ["look", "instructions", "user", "assistant", "result of look", "assistant", "result of look"]
    assert [part["name"] for part in third["parts"]] == names
    assert [part["turns"] for part in third["parts"]] == [0, 0, 3, 2, 2, 1, 1]
    assert [part["is_new"] for part in third["parts"]] == [False] * 5 + [True] * 2
    assert not any(part["is_new"] for part in first["parts"])
    assert (third["removed"], third["changed_settings"], third["cache"]["broken_at"]) == ([], [], None)
    assert {third["parts"][index]["name"] for index in third["largest"][:2]} == {"assistant", "result of look"}
    assert sum(each["share"] for each in third["shares"]) == pytest.approx(1)
    assert sum(each["usd"] for each in third["shares"]) == pytest.approx(third["usage"]["cost_usd"])
    assert sum(part["cached_tokens"] for part in third["parts"]) == pytest.approx(2_000, abs=5)
    assert (third["settings"]["temperature"], whole["settings"]["extra_body"]) == (0.5, {"account": "a17"})
    assert "extra_body" not in third["settings"]
    assert [part["text"] for part in third["parts"] if part["kind"] == "instructions"] == [None]
    assert [part["text"] for part in whole["parts"] if part["kind"] == "instructions"] == ["Be brief."]


async def test_a_request_says_what_is_not_certain(dear):
    """Of an agent that was changed since, the tools are marked; without an agent, only the messages are known."""
    run = await dear.run("go")
    changed = dear.with_(instructions="Be long.")
    for config, is_as_sent, count in ((changed.driver.config, False, 7), (None, None, 5)):
        found = await read_sent_request(dear.store, run.id, config=config)
        assert (found.turn, found.is_as_sent, len(found.parts)) == (3, is_as_sent, count)
        assert ("was changed" if config else "not known here") in found.gap


async def test_versions_and_runs_are_compared():
    """Two versions of a run, a run and its fork with an edited event, and not with a run that the caller cannot see."""
    agent = looking()
    async with serving(agent) as client:
        made = (await client.post("/v1/runs", json={"prompt": "weather?", "wait_s": 30}, headers=named())).json()
        path, newest = f"/v1/runs/{made['id']}", made["version"]
        found = (await client.get(f"{path}/diff", params={"at": 1, "to": newest}, headers=named())).json()
        own = difference(await agent.load(made["id"], at=1), await agent.load(made["id"]))
        assert found["shared"] == own.shared
        assert [each["is"] for each in found["added"]] == [type(each).__name__ for each in own.added]
        events = (await client.get(f"{path}/journal", headers=named())).json()["events"]
        changed = next(each for each in events if "rain in Rome" in json.dumps(each))
        event = json.loads(json.dumps(changed["event"]).replace("rain in Rome", "sun in Rome"))
        body = {"at": newest - 1, "edit": {str(changed["version"]): event}}
        fork = await client.post(f"{path}/fork", json=body, headers=named())
        assert fork.status_code == 201, fork.text
        again = (await client.get(f"/v1/runs/{fork.json()['id']}", params={"wait_s": 30}, headers=named())).json()
        assert again["output"] == "no"
        both = (await client.get(f"{path}/diff", params={"other": again["id"]}, headers=named())).json()
        assert "sun in Rome" in json.dumps(both["added"])
        assert "rain in Rome" in json.dumps(both["removed"])
        other = (await client.post("/v1/runs", json={"prompt": "x", "wait_s": 30}, headers=named("bob"))).json()
        hidden = await client.get(f"{path}/diff", params={"other": other["id"]}, headers=named())
        assert hidden.status_code == 404


@pytest.mark.parametrize(
    "edit",
    [
        {"x": {}},
        {"1": {}},
        {"1": {"is": "Observed", "other": 1}},
        {"99": {"is": "Resumed", "at": 0.0}},
        {"2": {"is": "InputGiven", "at": 0.0, "call_id": "t1.0", "by": "eve", "answers": {}}},
        {"2": {"is": "ApprovalGiven", "at": 0.0, "call_id": "t1.0", "by": "root", "digest": "d"}},
    ],
    ids=range(6),
)
async def test_wrong_edits_are_refused(edit):
    """Versions that do not exist, values that are no events, and approvals that nobody gave."""
    async with serving(paying()) as client:
        made = (await client.post("/v1/runs", json={"prompt": "pay", "wait_s": 30})).json()
        response = await client.post(f"/v1/runs/{made['id']}/fork", json={"at": 2, "edit": edit})
        assert response.status_code == 400, response.text
        assert len((await client.get("/v1/runs")).json()["runs"]) == 1


async def test_edits_keep_labels_and_names():
    """An edit may change a result, but neither drop its labels nor speak for another person."""

    @tool(read_only=True, reads_untrusted=True)
    async def fetch() -> str:
        """Fetch a page."""
        return "rain"

    @tool(external=True)
    async def ask() -> str:
        """Ask a person."""
        raise AssertionError

    turns = [say("", call("fetch"), call("ask")), *[say("end")] * 3]
    agent = Agent(ScriptedModel(*turns), tools=[fetch, ask], name="shop", store=MemoryStore())
    async with serving(agent) as client:
        run = (await client.post("/v1/runs", json={"prompt": "go", "wait_s": 30}, headers=named())).json()
        path, [item] = f"/v1/runs/{run['id']}", run["pending"]
        await client.post(
            f"{path}/answer", json={"call_id": item["call_id"], "content": "42"}, headers=named("eve", "", "approve")
        )
        run = (await client.get(path, params={"wait_s": 30}, headers=named())).json()
        rows = (await client.get(f"{path}/journal", headers=named())).json()["events"]
        finished = [row for row in rows if row["event"]["is"] == "ToolFinished"]
        [fetched] = [row for row in finished if row["event"]["result"]["tool"] == "fetch"]
        [answered] = [row for row in finished if row["event"]["result"]["tool"] == "ask"]
        assert (fetched["event"]["result"]["labels"], answered["event"]["by"]) == (["untrusted"], "eve")

        async def fork(row, result, **fields):
            event = row["event"] | {"result": row["event"]["result"] | result} | fields
            body = {"at": run["version"] - 1, "edit": {str(row["version"]): event}}
            return await client.post(f"{path}/fork", json=body, headers=named())

        for row, result, fields, why in (
            (fetched, {"content": "sun", "labels": []}, {}, "untrusted"),
            (fetched, {"content": "sun", "labels": ["private"]}, {}, "untrusted"),
            (fetched, {"content": "sun"}, {"by": "eve"}, "'ann'"),
            (answered, {"content": "43"}, {}, "'ann'"),
            (answered, {"content": "43"}, {"by": ""}, "'ann'"),
        ):
            refused = await fork(row, result, **fields)
            assert refused.status_code == 400, refused.text
            assert why in refused.json()["error"]["message"]
        assert len((await client.get("/v1/runs")).json()["runs"]) == 1
        for row, result, fields in (
            (fetched, {"content": "sun", "labels": ["untrusted", "private"]}, {}),
            (answered, {"content": "43"}, {"by": "ann"}),
            (answered, {}, {}),
        ):
            made = await fork(row, result, **fields)
            assert made.status_code == 201, made.text


async def test_an_edit_gives_neither_words_nor_an_approval_to_another_person():
    """An input of a fork is by its editor, and an approval stays that of the call as it was."""
    async with serving(paying()) as client:
        run = (await client.post("/v1/runs", json={"prompt": "pay", "wait_s": 30}, headers=named())).json()
        path, [item] = f"/v1/runs/{run['id']}", run["pending"]
        shown = {"call_id": item["call_id"], "digest": item["digest"]}
        assert (await client.post(f"{path}/approve", json=shown, headers=named("eve", "", "approve"))).is_success
        await client.get(path, params={"wait_s": 30}, headers=named())
        rows = {
            row["event"]["is"]: row for row in (await client.get(f"{path}/journal", headers=named())).json()["events"]
        }

        async def fork(row, event):
            body = {"at": rows["ToolFinished"]["version"], "edit": {str(row["version"]): event}}
            return await client.post(f"{path}/fork", json=body, headers=named())

        said = {"kind": "user", "parts": [{"is": "TextPart", "text": "pay more"}], "by": "eve"}
        first, chosen = rows["Observed"], rows["ToolsChosen"]
        changed = copy.deepcopy(chosen["event"])
        changed["message"]["calls"][0]["arguments"] = '{"amount": 6}'
        for row, event, why in (
            (first, first["event"] | {"inputs": [said]}, "'ann'"),
            (chosen, changed, "approved as it was"),
        ):
            refused = await fork(row, event)
            assert refused.status_code == 400, refused.text
            assert why in refused.json()["error"]["message"]
