"""Random requests made of the OpenAPI document: no answer is a server error, and the server goes on."""

import json
import random
import subprocess
import time
from urllib.parse import quote

import anyio
import httpx
import pytest

from agentfsm import Agent, UserMessage, tool
from agentfsm.serve import Caller, serve
from agentfsm.stores import MemoryStore, SQLiteStore
from agentfsm.testing import FunctionModel, call, say
from tests.support.gateways import serving
from tests.support.schemathesis_program import schemathesis

# Seconds of each of the two long runs.
LONG_S = 300
TEXTS = [
    "",
    "x",
    "\x00",
    "\ud800",
    "\u202e",
    "é" * 300,
    "a:1",
    "99999999999999999999",
    "-1",
    "nan",
    "1e999",
    "null",
    "../..",
    "plan",
]
VALUES = [*TEXTS, None, True, 0, -1, 5, 2**70, 1.5, [], {}, ["x"], {"\x00": "\ud800"}, {"a": {"b": [1, None]}}]
VALUES_BY_TYPE = {
    "string": TEXTS,
    "integer": [0, 1, 2, 5, -1, 2**70],
    "number": [0, 1, -1, 1.5, 1e300],
    "boolean": [True, False],
    "null": [None],
}
# Right values by the name of their field, so that requests get beyond the validation.
KNOWN = {
    "agent": "shop",
    "call_id": "t1.0",
    "content": "x",
    "digest": "d",
    "messages": [{"role": "user", "content": "x"}],
    "model": "shop",
    "prompt": "p",
    "rating": 3,
    "runId": "r",
    "text": "t",
    "threadId": "t",
}


@tool(requires_approval=True)
async def pay(amount: int) -> str:
    """Pay an amount."""
    return f"paid {amount}"


def answer(request):
    return say("", call("pay", amount=1)) if isinstance(request.messages[-1], UserMessage) else "done"


class Requests:
    """Makes requests of the operations of a document."""

    def __init__(self, document, chance):
        self.schemas, self.chance = document["components"]["schemas"], chance
        self.operations = [
            (method.upper(), path, operation)
            for path, methods in document["paths"].items()
            for method, operation in methods.items()
        ]

    def make(self, ids):
        """Return the method, the path, the query, the headers and the content of a request."""
        chance = self.chance
        method, path, operation = chance.choice(self.operations)
        run_id, query, headers = chance.choice(ids), {}, {}
        for parameter in operation["parameters"]:
            name = parameter["name"]
            if parameter["in"] == "path":
                text = run_id if name == "run_id" else quote(chance.choice(["shop", *TEXTS]), safe="", errors="replace")
                path = path.replace(f"{{{name}}}", text)
            elif name == "after" and path.endswith(("/events", "/ag-ui")):
                query[name] = chance.choice(["x", "unknown:1", "9" * 12, "%00:1", f"{run_id}:{'9' * 5_000}"])
            elif name != "wait_s" and chance.random() < 0.5:
                query[name] = chance.choice([*TEXTS, "1", "2"]).encode("utf-8", "replace").decode()
        if chance.random() < 0.3:
            headers["idempotency-key"] = chance.choice(["k", "k2", "x" * 300, "a b", "\t"])
        content = b""
        if "requestBody" in operation:
            schema = operation["requestBody"]["content"]["application/json"]["schema"]
            headers["content-type"] = "application/json"
            content = json.dumps(self.fill(schema)).encode()
            if chance.random() < 0.05:
                content = content[: len(content) // 2]
        return method, path, query, headers, content

    def fill(self, schema, name=""):
        """Return a value for a schema, sometimes a wrong one."""
        chance = self.chance
        if chance.random() < 0.05:
            return chance.choice(VALUES)
        if name in KNOWN and chance.random() < 0.7:
            return KNOWN[name]
        if "$ref" in schema:
            return self.fill(self.schemas[schema["$ref"].rpartition("/")[2]])
        if choices := schema.get("anyOf") or schema.get("oneOf"):
            return self.fill(chance.choice(choices))
        if choices := schema.get("enum") or ([schema["const"]] if "const" in schema else []):
            return chance.choice(choices)
        if schema.get("type") == "object":
            return self.fill_object(schema)
        if schema.get("type") == "array":
            return [self.fill(schema.get("items", {})) for _ in range(chance.choice([0, 1, 1, 2, 30]))]
        return chance.choice(VALUES_BY_TYPE.get(schema.get("type"), VALUES))

    def fill_object(self, schema):
        chance, wanted = self.chance, schema.get("required", ())
        fields = schema.get("properties", {})
        made = {
            name: self.fill(own, name)
            for name, own in fields.items()
            if chance.random() < (0.95 if name in wanted else 0.3)
        }
        if isinstance(schema.get("additionalProperties"), dict) or chance.random() < 0.03:
            made[chance.choice(TEXTS)] = chance.choice(VALUES)
        return made


async def send_requests(seed, store, count=400):
    """Send random requests to a gateway with an agent whose calls wait for an approval."""
    chance = random.Random(seed)
    agent = Agent(FunctionModel(answer), tools=[pay], name="shop", store=store)
    scopes = [["run"], ["approve"], ["admin"], ["run", "approve"]]
    gateway = serve([agent], auth=lambda _request: Caller(user="ann", scopes=chance.choice(scopes)))
    transport = httpx.ASGITransport(gateway, raise_app_exceptions=False)
    seen = set()
    async with gateway.lifespan(), httpx.AsyncClient(transport=transport, base_url="http://here") as client:
        requests = Requests((await client.get("/openapi.json")).json(), chance)
        ids = ["unknown", "%00", "%ff", "%F0%9F%98%80", "x" * 5_000, (await agent.submit("p", user="ann")).id]
        for number in range(count):
            made = method, path, query, headers, content = requests.make(ids[-6:])
            with anyio.move_on_after(0.1) as left:  # a stream of a run that goes on is left by its client
                response = await client.request(method, path, params=query, content=content, headers=headers)
            if left.cancelled_caught:
                continue
            assert response.status_code < 500, (seed, number, made, response.text)
            seen.add(response.status_code)
            is_json = response.headers.get("content-type") == "application/json"
            if response.status_code in {200, 201} and is_json and "id" in response.json():
                ids.append(response.json()["id"])
        assert (await client.get("/readyz")).status_code == 200
    await store.aclose()
    return seen


@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
@pytest.mark.parametrize("store", ["memory", "sqlite"])
async def test_no_request_is_a_server_error(store, tmp_path, anyio_backend):
    """Each operation with random ids, queries, headers and bodies; some are accepted and some are refused."""
    is_memory = store == "memory"
    seen = await send_requests(int(is_memory), MemoryStore() if is_memory else SQLiteStore(tmp_path / "runs.db"))
    assert {200, 201, 202, 400, 404, 422} <= seen


@pytest.mark.soak
async def test_no_request_of_many_is_a_server_error(tmp_path, anyio_backend):
    """The same for minutes."""
    ends_at, seed = time.monotonic() + LONG_S / 2, 2
    while time.monotonic() < ends_at:
        await send_requests(seed, MemoryStore() if seed % 2 else SQLiteStore(tmp_path / f"{seed}.db"))
        seed += 1


@pytest.mark.soak
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_schemathesis_finds_no_server_error(tmp_path, anyio_backend):
    """Its phases of examples, boundaries and random cases; it knows nothing of this server but the document.

    Streams that do not end are left out; the requests above have them.
    """
    agent = Agent(FunctionModel(answer), tools=[pay], name="shop", store=SQLiteStore(tmp_path / "runs.db"))
    async with serving(agent) as client:
        url = str(client.base_url).rstrip("/")
        command = [str(schemathesis()), "run", f"{url}/openapi.json", "--checks", "not_a_server_error"]
        command += ["--exclude-path-regex", "(events|ag-ui)$", "--max-time", str(LONG_S), "--no-color"]
        command += ["--header", "x-caller: root//admin", "--generation-database", "none", "--request-timeout", "70"]
        done = await anyio.run_process(command, check=False, stderr=subprocess.STDOUT, cwd=tmp_path)
        assert done.returncode == 0, done.stdout.decode()[-4_000:]
        assert (await client.get("/readyz")).status_code == 200
    await agent.aclose()
