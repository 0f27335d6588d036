"""Tools of an OpenAPI document, against a real HTTP server."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, urlsplit

import anyio
import attrs
import pytest

from agentfsm import Agent, MisuseError, Outcome
from agentfsm.guards import Guard
from agentfsm.openapi import tools_from_openapi
from agentfsm.testing import ScriptedModel, call, say
from tests.support.checks import HANG_S

HEAD = {"openapi": "3.1.0", "servers": [{"url": "https://example.org"}]}


@attrs.define
class Api:
    """A running API: its document, and the requests that it got."""

    document: dict
    seen: list[dict] = attrs.field(factory=list)
    answers: dict = attrs.field(factory=dict)


@pytest.fixture
def api() -> Iterator[Api]:
    """An API of pets on this machine."""

    class Handler(BaseHTTPRequestHandler):
        def handle_one(self) -> None:
            url = urlsplit(self.path)
            body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
            key = f"{self.command} {url.path}"
            api.seen.append(
                {"request": key, "query": parse_qsl(url.query), "body": body, "headers": dict(self.headers.items())}
            )
            status, headers, content = api.answers.get(key, (200, {"Content-Type": "application/json"}, '{"ok": true}'))
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content.encode())))
            self.end_headers()
            self.wfile.write(content.encode())

        do_GET = do_POST = do_PUT = do_DELETE = handle_one  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    api = Api(describe(f"http://127.0.0.1:{server.server_port}/v1"))
    yield api
    server.shutdown()
    server.server_close()


def describe(url: str) -> dict:
    """Return the document of the API."""
    pet = {
        "type": "object",
        "required": ["id", "name"],
        "properties": {
            "id": {"type": "integer", "readOnly": True},
            "name": {"type": "string", "example": "Rex"},
            "age": {"type": "integer", "nullable": True, "minimum": 0, "exclusiveMinimum": True},
            "owner": {"$ref": "#/components/schemas/Owner"},
        },
    }
    return {
        "openapi": "3.0.3",
        "servers": [{"url": url}],
        "paths": {
            "/pets": {
                "get": {
                    "operationId": "listPets",
                    "summary": "List pets.",
                    "tags": ["pets"],
                    "parameters": [
                        {"name": "filter[kind]", "in": "query", "schema": {"type": "string"}},
                        {"name": "ids", "in": "query", "schema": {"type": "array", "items": {"type": "integer"}}},
                        {
                            "name": "near",
                            "in": "query",
                            "style": "deepObject",
                            "explode": True,
                            "schema": {"type": "object", "properties": {"lat": {"type": "number"}}},
                        },
                        {"name": "fields", "in": "query", "explode": False, "schema": {"type": "array", "items": {}}},
                        {"name": "X-Trace", "in": "header", "schema": {"type": "string"}},
                    ],
                },
                "post": {
                    "operationId": "create pet!",
                    "description": "Create a pet.",
                    "requestBody": {
                        "required": True,
                        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Pet"}}},
                    },
                },
            },
            "/pets/{id}": {
                "parameters": [{"$ref": "#/components/parameters/Id"}],
                "get": {"description": "Read a pet."},
                "delete": {"operationId": "deletePet"},
            },
            "/pets/{id}/photo": {
                "parameters": [{"$ref": "#/components/parameters/Id"}],
                "put": {"operationId": "setPhoto", "requestBody": {"content": {"image/png": {}}}},
            },
        },
        "components": {
            "parameters": {"Id": {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}},
            "schemas": {
                "Pet": pet,
                "Owner": {"type": "object", "properties": {"friend": {"$ref": "#/components/schemas/Owner"}}},
            },
        },
    }


def make_tools(api: Api, **options) -> dict:
    """Return the tools by name."""
    return {each.name: each for each in tools_from_openapi(api.document, **options)}


async def run_call(api: Api, name: str, arguments: dict, **options) -> tuple[Outcome, str]:
    """Let an agent make one call; return its outcome and what the model read."""
    model = ScriptedModel(say("", call(name, **arguments)), say("done"))
    with anyio.fail_after(HANG_S):
        run = await Agent(model, tools=list(make_tools(api, **options).values())).run("go")
    assert run.output == "done"
    return run.calls[0].outcome, run.messages[-2].content


def test_an_operation_becomes_a_tool(api):
    """GET is read-only, the worst is assumed of the others; what has no text body is left out."""
    tools = make_tools(api)
    assert set(tools) == {"listPets", "create_pet", "get_pets_id", "deletePet"}
    assert [name for name, each in tools.items() if each.read_only] == ["listPets", "get_pets_id"]
    assert not any(each.idempotent for each in tools.values())
    assert tools["listPets"].tags == {"pets"}
    assert tools["get_pets_id"].description == "Read a pet."


def test_schemas_become_json_schema(api):
    """Read-only properties, `nullable`, boolean bounds and references are converted; a schema may refer to itself."""
    schema = make_tools(api)["create_pet"].parameters
    assert schema["properties"]["body"] == {"$ref": "#/$defs/Pet"}
    assert schema["$defs"]["Pet"] == {
        "type": "object",
        "required": ["name"],
        "properties": {
            "name": {"type": "string"},
            "age": {"type": ["integer", "null"], "exclusiveMinimum": 0},
            "owner": {"$ref": "#/$defs/Owner"},
        },
    }
    assert schema["$defs"]["Owner"]["properties"]["friend"] == {"$ref": "#/$defs/Owner"}


async def test_a_request_has_its_parameters(api):
    """Each where and how the document says; the credentials are the program's."""
    outcome, text = await run_call(
        api,
        "listPets",
        {"filter_kind": "dog", "ids": [1, 2], "near": {"lat": 1.5}, "fields": ["a", "b"], "X-Trace": "t"},
        auth="secret",
        headers={"X-Key": "k"},
    )
    assert (outcome, json.loads(text)) == (Outcome.DONE, {"ok": True})
    [seen] = api.seen
    assert seen["request"] == "GET /v1/pets"
    assert seen["query"] == [
        ("filter[kind]", "dog"),
        ("ids", "1"),
        ("ids", "2"),
        ("near[lat]", "1.5"),
        ("fields", "a,b"),
    ]
    headers = seen["headers"]
    assert (headers["X-Trace"], headers["X-Key"], headers["Authorization"]) == ("t", "k", "Bearer secret")
    assert "Idempotency-Key" not in headers


async def test_a_write_has_a_body_and_a_key(api):
    """The key is that of the call, for servers that know it."""
    await run_call(api, "create_pet", {"body": {"name": "Rex", "age": None}})
    [seen] = api.seen
    assert json.loads(seen["body"]) == {"name": "Rex", "age": None}
    assert seen["headers"]["Content-Type"] == "application/json"
    assert seen["headers"]["Idempotency-Key"]


@pytest.mark.parametrize(("value", "path"), [("a/../b", "/v1/pets/a%2F..%2Fb"), ("x?y#z", "/v1/pets/x%3Fy%23z")])
async def test_a_value_stays_in_its_part_of_the_path(api, value, path):
    """Whatever a model writes there."""
    await run_call(api, "get_pets_id", {"id": value})
    assert api.seen[0]["request"] == f"GET {path}"


async def test_a_value_that_would_change_the_path_is_refused(api):
    """Nothing is sent."""
    outcome, text = await run_call(api, "deletePet", {"id": ".."})
    assert outcome is not Outcome.DONE
    assert "cannot be a part of a path" in text
    assert api.seen == []


async def test_a_refusal_is_an_error_that_the_model_reads(api):
    """With the status and the text of the server."""
    api.answers["DELETE /v1/pets/7"] = (409, {"Content-Type": "text/plain"}, "the pet is on a walk")
    outcome, text = await run_call(api, "deletePet", {"id": "7"})
    assert outcome is Outcome.FAILED
    assert "409 Conflict: the pet is on a walk" in text


async def test_a_busy_api_is_asked_again_for_what_is_read_only(api):
    """A 503 is transient; a write is never repeated."""
    api.answers |= {f"{method} /v1/pets/7": (503, {"Retry-After": "0"}, "busy") for method in ("GET", "DELETE")}
    await run_call(api, "get_pets_id", {"id": "7"})
    assert len(api.seen) > 1
    api.seen.clear()
    await run_call(api, "deletePet", {"id": "7"})
    assert len(api.seen) == 1


async def test_a_redirect_is_not_followed(api):
    """It could lead the credentials to another host."""
    api.answers["GET /v1/pets/7"] = (302, {"Location": "https://evil.example/"}, "")
    outcome, text = await run_call(api, "get_pets_id", {"id": "7"}, auth="secret")
    assert outcome is Outcome.FAILED
    assert "redirects to https://evil.example/" in text
    assert len(api.seen) == 1


async def test_content_that_is_no_text_is_named(api):
    """Its type and size, in place of the bytes."""
    api.answers["GET /v1/pets/7"] = (200, {"Content-Type": "image/png"}, "1234")
    assert await run_call(api, "get_pets_id", {"id": "7"}) == (
        Outcome.DONE,
        "200 OK: 4 bytes of image/png, which are not shown",
    )


async def test_a_private_host_is_refused_unless_allowed(api):
    """The address counts: a name that resolves to this machine is private, where the URL does not say so."""
    with pytest.raises(MisuseError, match=r"plain HTTP to 192\.168\.0\.9"):
        tools_from_openapi(api.document, base_url="http://192.168.0.9/")
    outcome, text = await run_call(api, "listPets", {}, base_url="https://10.0.0.1/")
    assert outcome is Outcome.FAILED
    assert "not public" in text


def test_operations_are_selected(api):
    """By id, by method and path, or by a function."""
    assert set(make_tools(api, include=["listPets", "DELETE /pets/{id}"])) == {"listPets", "deletePet"}
    assert set(make_tools(api, include=lambda each: "pets" in each.tags)) == {"listPets"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"include": ["nothing"]}, "has no operation 'nothing'; it has create_pet, deletePet"),
        ({"include": "listPets"}, r"give a collection: \['listPets'\]"),
        ({"include": ["setPhoto"]}, "no tool can be made of PUT /pets/{id}/photo: its body is image/png"),
        ({"base_url": 3}, "give a URL"),
        ({"base_url": "ftp://x"}, "not a URL of an API"),
    ],
)
def test_wrong_arguments_are_refused(api, options, message):
    """With the right ones."""
    with pytest.raises(MisuseError, match=message):
        tools_from_openapi(api.document, **options)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({}, "no 'openapi' version"),
        ({"swagger": "2.0"}, "Swagger '2.0': convert it to OpenAPI 3 first, for example with `npx swagger2openapi"),
        (
            {"openapi": "3.1.0", "paths": {"/x": {"$ref": "other.yaml#/x"}}, "servers": [{"url": "https://x"}]},
            "bundle it",
        ),
        ({"openapi": "3.1.0", "paths": {}, "servers": [{"url": "/v1"}]}, "give base_url="),
        (
            {"openapi": "3.1.0", "paths": {"/x": {"$ref": "#/nothing"}}, "servers": [{"url": "https://x"}]},
            "leads to nothing",
        ),
        (3, "the path of a file in JSON or YAML"),
        ("nothing.json", "cannot be read"),
    ],
)
def test_wrong_documents_are_refused(document, message):
    """With the reason."""
    with pytest.raises(MisuseError, match=message):
        tools_from_openapi(document)


def test_a_document_can_be_a_file(api, tmp_path):
    """JSON is read; a file that is not JSON may be YAML."""
    path = tmp_path / "api.json"
    path.write_text(json.dumps(api.document))
    assert {each.name for each in tools_from_openapi(path)} == set(make_tools(api))
    path.write_text("openapi: 3.0.3")
    with pytest.raises(MisuseError, match=r"a file in YAML is named \.yaml"):
        tools_from_openapi(str(path))


@pytest.mark.parametrize("trusted", [True, False])
def test_the_results_of_an_api_are_untrusted_unless_declared(api, trusted):
    """Strangers can write what most APIs return."""
    tools = make_tools(api, trusted=trusted).values()
    assert {each.labels for each in tools if each.read_only} == {() if trusted else ("untrusted",)}
    assert {each.reads_untrusted for each in tools} == {not trusted}
    assert {each.traits.gives_away for each in tools if each.read_only} == {not trusted}
    own = make_tools(api, labels={"*": {"sends_out": False}}).values()
    assert not any(each.traits.gives_away for each in own)


PETS = {
    **HEAD,
    "paths": {
        "/pets": {"get": {"operationId": "listPets"}, "post": {"operationId": "create_pet"}},
        "/pets/{id}": {
            "parameters": [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}],
            "get": {"operationId": "get_pets_id"},
            "delete": {"operationId": "deletePet"},
        },
    },
}


def test_operations_that_may_change_something_are_effects():
    """A GET is not; rules by name, by operation or by glob have the last word, of several the last one."""
    effects = {each.name: each.effect_labels for each in tools_from_openapi(PETS)}
    both = ("sends_out", "irreversible")
    assert effects == {"listPets": (), "create_pet": both, "get_pets_id": (), "deletePet": both}
    rules = {
        "DELETE *": {"sends_out": False, "reads_private": True},
        "deletePet": {"reads_private": False},
        "create_pet": {"read_only": True},
        "listPets": {"irreversible": True},
    }
    ruled = {each.name: each for each in tools_from_openapi(PETS, labels=rules)}
    effects = {name: each.effect_labels for name, each in ruled.items() if each.effect_labels}
    assert effects == {"listPets": both, "deletePet": ("irreversible",)}
    assert [name for name, each in ruled.items() if each.read_only] == ["create_pet", "get_pets_id"]
    assert not any(each.reads_private for each in ruled.values())


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"pay": {"sends_out": True}}, "matches no operation of the document: create_pet"),
        ({"deletePet": {"destroys": True}}, "the declarations are: read_only"),
        (["deletePet"], "a mapping of tools to declarations"),
    ],
)
def test_wrong_rules_about_labels(rules, message):
    """They are refused when the tools are made: a rule on no tool guards nothing."""
    with pytest.raises(MisuseError, match=message):
        tools_from_openapi(PETS, labels=rules)


async def test_a_guard_asks_about_an_effect_of_an_api_after_its_text(api):
    """Text that the API returned is untrusted, and a DELETE that follows waits for a person."""
    model = ScriptedModel(say("", call("listPets")), say("", call("deletePet", id="7")), "done")
    async with Agent(model, tools=list(make_tools(api).values()), guards=[Guard.default()]) as agent:
        run = await agent.run("go")
    assert [each.tool for each in run.pending] == ["deletePet"]
