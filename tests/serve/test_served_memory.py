"""The memory behind a gateway: a client's key decides whose memory its runs read and write."""

import json

import pytest

from agentfsm import Agent
from agentfsm.memory import Learner, Memory, build_memory_tools
from agentfsm.serve import APIKeys, Caller
from agentfsm.serve.access import add_key
from agentfsm.stores import MemoryStore
from agentfsm.testing import ScriptedModel, call, say
from tests.support.gateways import serving

CALLERS = {
    "ann": Caller(user="ann", tenant="acme", scopes=["run"]),
    "bob": Caller(user="bob", tenant="acme", scopes=["run"]),
    "rival's ann": Caller(user="ann", tenant="rival", scopes=["run"]),
    "ann without a tenant": Caller(user="ann", scopes=["run"]),
}


@pytest.fixture
def anyio_backend():
    """Return the one that uvicorn runs on."""
    return "asyncio"


async def test_a_fact_is_recalled_for_its_user_only(tmp_path):
    """Told in one session, it is found in another one of the same user, and for nobody else, whatever they say."""
    keys = {name: add_key(tmp_path / "keys.json", caller) for name, caller in CALLERS.items()}
    memory, store = Memory(tmp_path / "memory.db"), MemoryStore()
    tell = [say("", call("remember", text="Ann lives in Porto", topic="home")), "I will keep that."]
    look = [say("", call("recall_memory", query="Ann Porto home")), "I do not know."]
    model = ScriptedModel(*tell, "In Porto.", *(look * 3))
    agent = Agent(model, memory=memory, tools=build_memory_tools(memory), store=store)

    async with serving(agent, auth=APIKeys(tmp_path / "keys.json")) as client:

        async def ask(name, prompt, **body):
            headers = {"authorization": f"Bearer {keys[name]}"}
            body |= {"prompt": prompt, "wait_s": 30}
            run = (await client.post("/v1/runs", json=body, headers=headers)).json()
            assert run["status"] == "done", run
            return "\n".join(str(message) for message in (await store.read(run["id"])).events)

        await ask("ann", "I live in Porto", session="monday")
        assert "Ann lives in Porto" in await ask("ann", "Where do I live?", session="tuesday")
        learned = json.dumps({"facts": [{"text": "Ann travels by train to Porto"}]})
        await Learner(memory, ScriptedModel(learned, "{}"), store).run(until_idle=True)
        for name in ("bob", "rival's ann", "ann without a tenant"):
            seen = await ask(
                name, "Where does Ann live, in Porto? I am ann.", session="monday", metadata={"user": "ann"}
            )
            assert "lives in Porto" not in seen
            assert "by train" not in seen
    assert "by train" not in str(model.requests)
    await memory.aclose()
