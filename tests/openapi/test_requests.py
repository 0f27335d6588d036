"""Requests of tools that OpenAPI documents describe, against the tables of the specification (3.2.0)."""

import json
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import anyio
import attrs
import httpx2
import pytest

from agentfsm import Agent, MisuseError, Outcome
from agentfsm.openapi import tools_from_openapi
from agentfsm.testing import ScriptedModel, call, say
from tests.support.checks import HANG_S

FORM = "application/x-www-form-urlencoded"
MULTIPART = "multipart/form-data"
ARRAY = {"type": "array", "items": {"type": "string"}}
COLORS: dict[str, Any] = {
    "string": "blue",
    "array": ["blue", "black", "brown"],
    "object": {"R": 100, "G": 200, "B": 150},
}


def describe(operation: dict, *, path: str = "/x", method: str = "post", version: str = "3.1.0", **more: Any) -> dict:
    """Return a document with one operation."""
    operation = {"operationId": "op", **operation}
    servers = [{"url": "https://api.example.org/v1"}]
    return {"openapi": version, "servers": servers, "paths": {path: {method: operation}}, **more}


def with_parameter(place: str, **parameter: Any) -> dict:
    """Return a document with an operation that has one parameter, `color`."""
    given = {"name": "color", "in": place, "schema": {}, **({"required": True} if place == "path" else {}), **parameter}
    return describe({"parameters": [given]}, path="/x/{color}" if place == "path" else "/x", method="get")


def with_body(media_type: str, properties: dict, encoding: dict | None = None, **more: Any) -> dict:
    """Return a document with an operation that has a body."""
    content = {media_type: {"schema": {"type": "object", "properties": properties}, "encoding": encoding or {}}}
    return describe({"requestBody": {"content": content}}, **more)


@attrs.define
class Sent:
    """The request that a call sent, and the result that the model read."""

    request: Any
    outcome: Outcome
    text: str


async def send(
    document: dict | Path, arguments: dict, *, tool: str = "op", client: dict | None = None, **options: Any
) -> Sent:
    """Let an agent call the tool once."""
    seen = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        seen.append(request)
        return httpx2.Response(200, json={})

    async with httpx2.AsyncClient(transport=httpx2.MockTransport(answer), **(client or {})) as http:
        tools = tools_from_openapi(document, client=http, **options)
        model = ScriptedModel(say("", call(tool, **arguments)), "done")
        with anyio.fail_after(HANG_S):
            run = await Agent(model, tools=tools).run("go")
    return Sent(seen[0] if seen else None, run.calls[0].outcome, run.messages[-2].content)


# The table "Style Examples": style, explode, and the texts for a string, an array and an object. None: undefined.
STYLES = [
    ("path", "matrix", False, ";color=blue", ";color=blue,black,brown", ";color=R,100,G,200,B,150"),
    ("path", "matrix", True, ";color=blue", ";color=blue;color=black;color=brown", ";R=100;G=200;B=150"),
    ("path", "label", False, ".blue", ".blue,black,brown", ".R,100,G,200,B,150"),
    ("path", "label", True, ".blue", ".blue.black.brown", ".R=100.G=200.B=150"),
    ("path", "simple", False, "blue", "blue,black,brown", "R,100,G,200,B,150"),
    ("path", "simple", True, "blue", "blue,black,brown", "R=100,G=200,B=150"),
    ("header", "simple", False, "blue", "blue,black,brown", "R,100,G,200,B,150"),
    ("header", "simple", True, "blue", "blue,black,brown", "R=100,G=200,B=150"),
    ("query", "form", False, "color=blue", "color=blue,black,brown", "color=R,100,G,200,B,150"),
    ("query", "form", True, "color=blue", "color=blue&color=black&color=brown", "R=100&G=200&B=150"),
    ("query", "spaceDelimited", False, None, "color=blue%20black%20brown", "color=R%20100%20G%20200%20B%20150"),
    ("query", "pipeDelimited", False, None, "color=blue%7Cblack%7Cbrown", "color=R%7C100%7CG%7C200%7CB%7C150"),
    ("query", "deepObject", True, None, None, "color%5BR%5D=100&color%5BG%5D=200&color%5BB%5D=150"),
    ("cookie", "form", False, "color=blue", "color=blue,black,brown", "color=R,100,G,200,B,150"),
    ("cookie", "cookie", False, "color=blue", "color=blue,black,brown", "color=R,100,G,200,B,150"),
    ("cookie", "cookie", True, "color=blue", "color=blue; color=black; color=brown", "R=100; G=200; B=150"),
]
ROWS = [
    (place, style, explode, kind, text)
    for place, style, explode, *texts in STYLES
    for kind, text in zip(COLORS, texts, strict=True)
    if text is not None
]


@pytest.mark.parametrize(("place", "style", "explode", "kind", "text"), ROWS)
async def test_a_parameter_has_its_style(place, style, explode, kind, text):
    """Each row of the table, where it stands in a request."""
    sent = await send(with_parameter(place, style=style, explode=explode), {"color": COLORS[kind]})
    target = sent.request.url.raw_path.decode()
    if place in {"path", "query"}:
        assert target == (f"/v1/x/{text}" if place == "path" else f"/v1/x?{text}")
    else:
        assert sent.request.headers["color" if place == "header" else "Cookie"] == text


@pytest.mark.parametrize("value", [None, [], {}, [None]])
@pytest.mark.parametrize("place", ["query", "header", "cookie"])
async def test_what_is_undefined_is_left_out(place, value):
    """A null, and what has no members, is no text."""
    sent = await send(with_parameter(place), {"color": value})
    assert sent.request.url.raw_path == b"/v1/x"
    assert not {"color", "cookie"} & {*sent.request.headers}


@pytest.mark.parametrize(
    ("parameter", "value", "text"),
    [
        ({"explode": False}, ["a,b", "c&d=e"], "color=a%2Cb,c%26d%3De"),
        ({"allowReserved": True}, "a/b:c?%20+&#", "color=a/b:c?%20%2B%26%23"),
        ({"style": "deepObject"}, {"a": {"b": [1, {"c": True}]}}, "color[a][b][0]=1&color[a][b][1][c]=true"),
        ({"style": "deepObject"}, ["x", None], "color[0]=x"),
        ({"style": "deepObject"}, "", "color="),
        ({"schema": None, "content": {"application/json": {}}}, {"a": [None]}, 'color={"a":[null]}'),
        ({"schema": None, "content": {"text/plain": {}}}, "a b", "color=a%20b"),
    ],
)
async def test_what_a_query_has_beside_the_table(parameter, value, text):
    """Separators in values, reserved characters, nested objects as Stripe has them, and values in a media type."""
    parameter = {key: each for key, each in parameter.items() if each is not None}
    sent = await send(with_parameter("query", **parameter), {"color": value})
    query = sent.request.url.raw_path.decode().partition("?")[2]
    assert (query if "%" in text else unquote(query)) == text


@pytest.mark.parametrize(
    ("document", "value", "reason"),
    [
        (with_parameter("path", style="label"), ".", "'..' cannot be a part of a path"),
        (with_parameter("path", style="label"), "", "'.' cannot be a part of a path"),
        (with_parameter("path"), None, "null cannot be a part of a path"),
        (with_parameter("header"), "a\r\nX-Admin: 1", "printable ASCII characters only"),
        (with_parameter("cookie", style="cookie"), "a; admin=1", "and no semicolon"),
    ],
)
async def test_a_value_cannot_become_more_than_a_value(document, value, reason):
    """A text that would change the path, or add a header or a cookie, is refused, and nothing is sent."""
    sent = await send(document, {"color": value})
    assert (sent.request, sent.outcome is Outcome.DONE) == (None, False)
    assert reason in sent.text


DEEP = {"style": "deepObject", "explode": True}


@pytest.mark.parametrize(
    ("encoding", "value", "text"),
    [
        ({}, "a b", "v=a%20b"),
        ({}, True, "v=true"),
        ({}, ["u1", "u2"], "v=u1&v=u2"),
        ({}, {"a": 1}, 'v={"a":1}'),
        ({}, [{"a": 1}, ["b"]], 'v={"a":1}&v=["b"]'),
        ({}, None, ""),
        ({"contentType": "application/json"}, "a", 'v="a"'),
        ({"explode": False}, ["u1", "u2"], "v=u1,u2"),
        ({"style": "pipeDelimited"}, ["u1", "u2"], "v=u1|u2"),
        ({"style": "form"}, {"a": 1, "b": None}, "a=1"),
        ({"allowReserved": True}, "a/b", "v=a/b"),
        (DEEP, {"order": "1"}, "v[order]=1"),
        (DEEP, ["a"], "v[0]=a"),
        (DEEP, [{"price": "p", "quantity": 2}], "v[0][price]=p&v[0][quantity]=2"),
    ],
)
async def test_a_field_of_a_form_has_its_encoding(encoding, value, text):
    """Without one, an array is a field of the name for each item, and an object is JSON, as the specification says."""
    sent = await send(with_body(FORM, {"v": {}}, {"v": encoding}), {"body": {"v": value}})
    assert sent.request.headers["Content-Type"] == FORM
    body = sent.request.content.decode()
    assert (body if "%" in text else unquote(body)) == text


async def test_an_upload_has_its_files():
    """A field that the document declares as bytes is a file with a name, as text or as Base64; others are parts."""
    binary = {"type": "string", "format": "binary", "description": "A table."}
    fields = {
        "table": {"$ref": "#/components/schemas/File"},
        "picture": {},
        "more": ARRAY | {"items": {"type": "string", "contentMediaType": "application/octet-stream"}},
        "note": {"type": "string"},
        "meta": {"type": "object", "properties": {"any": {}}, "additionalProperties": {}},
        "tags": ARRAY,
    }
    encoding = {"picture": {"contentType": "image/png, image/jpeg"}, "tags": {"style": "form", "explode": False}}
    document = with_body(MULTIPART, fields, encoding, components={"schemas": {"File": binary}})
    [tool] = tools_from_openapi(document)
    file = tool.parameters["$defs"]["File"]
    assert (file["required"], file["description"]) == (["filename", "content"], "A table.")
    assert tool.parameters["properties"]["body"]["properties"]["meta"] == fields["meta"]
    value = {
        "table": {"filename": "a.csv", "content": "1,2"},
        "picture": {"filename": "b.jpg", "content": "aGk=", "base64": True},
        "more": [{"filename": "c", "content": "3"}, {"filename": "d", "content": "4"}],
        "note": "n",
        "meta": {"k": [1]},
        "tags": ["x", "y"],
    }
    sent = await send(document, {"body": value})
    assert sent.request.headers["Content-Type"].startswith(f"{MULTIPART}; boundary=")
    parts = [part.partition("\r\n\r\n")[::2] for part in sent.request.content.decode().split("--")]
    assert [(head.partition("form-data; ")[2], text.strip()) for head, text in parts if text] == [
        ('name="table"; filename="a.csv"\r\nContent-Type: text/csv', "1,2"),
        ('name="picture"; filename="b.jpg"\r\nContent-Type: image/jpeg', "hi"),
        ('name="more"; filename="c"\r\nContent-Type: application/octet-stream', "3"),
        ('name="more"; filename="d"\r\nContent-Type: application/octet-stream', "4"),
        ('name="note"', "n"),
        ('name="meta"\r\nContent-Type: application/json', '{"k":[1]}'),
        ('name="tags"', "x,y"),
    ]
    refused = await send(document, {"body": {"picture": {"filename": "b", "content": "?", "base64": True}}})
    assert "body.picture: the content is not valid Base64" in refused.text
    assert refused.request is None


def with_servers(**servers: Any) -> dict:
    """Return a document in which a path and an operation may have servers of their own."""
    document = describe({"servers": servers.get("operation", [])}, method="get")
    document["paths"]["/x"]["servers"] = servers.get("path", [])
    document["servers"] += servers.get("document", [])
    return document


UPLOAD = [{"url": "https://upload.example.org/api"}]


@pytest.mark.parametrize(
    ("document", "options", "url"),
    [
        (with_servers(path=UPLOAD), {}, "https://upload.example.org/api/x"),
        (with_servers(operation=UPLOAD), {}, "https://upload.example.org/api/x"),
        (
            with_servers(path=[{"url": "https://other.example.org"}], operation=UPLOAD),
            {},
            "https://upload.example.org/api/x",
        ),
        (with_servers(path=[{"url": "/v2"}]), {"auth": "t"}, "https://api.example.org/v2/x"),
        (with_servers(path=UPLOAD), {"auth": "t", "hosts": ["upload.example.org"]}, "https://upload.example.org/api/x"),
        (
            with_servers(path=UPLOAD),
            {"headers": {"X-Key": "k"}, "hosts": ["*.example.org"]},
            "https://upload.example.org/api/x",
        ),
        (
            with_servers(path=[{"url": "https://{region}.example.org", "variables": {"region": {"default": "eu"}}}]),
            {},
            "https://eu.example.org/x",
        ),
        (
            with_servers(path=[{"url": "https://eu.example.org"}], document=[{"url": "https://eu.example.org"}]),
            {"auth": "t"},
            "https://eu.example.org/x",
        ),
        (
            with_servers(path=[{"url": "https://api.example.org/v1"}]),
            {"auth": "t", "base_url": "https://proxy.example.org"},
            "https://proxy.example.org/x",
        ),
    ],
)
async def test_a_request_goes_to_the_server_that_the_document_names(document, options, url):
    """The operation's before the path's before the document's, which `base_url` replaces."""
    sent = await send(document, {}, **options)
    assert sent.request.url == url
    assert sent.request.headers.get("Authorization") == ("Bearer t" if "auth" in options else None)


@pytest.mark.parametrize(
    ("servers", "options"),
    [
        (UPLOAD, {"auth": "t"}),
        (UPLOAD, {"headers": {"X-Key": "k"}}),
        (UPLOAD, {"client": {"auth": ("u", "p")}}),
        (UPLOAD, {"client": {"headers": {"X-Key": "k"}}}),
        (UPLOAD, {"client": {"cookies": {"session": "s"}}}),
        (UPLOAD, {"client": {"params": {"key": "k"}}}),
        (UPLOAD, {"auth": "t", "hosts": ["other.example.org", "example.org"]}),
        (UPLOAD, {"auth": "t", "base_url": "https://proxy.example.org"}),
        ([{"url": "http://api.example.org/v1"}], {"auth": "t"}),
        ([{"url": "https://api.example.org:8443"}], {"auth": "t"}),
    ],
)
async def test_credentials_are_sent_to_hosts_that_the_user_allowed(servers, options):
    """Another host, port or scheme is refused, with what to do; the other operations work."""
    options = dict(options)
    client = httpx2.AsyncClient(**options.pop("client", {}))
    document = with_servers(path=servers)
    document["paths"]["/y"] = {"get": {"operationId": "other"}}
    async with client:
        tools = tools_from_openapi(document, client=client, **options)
        assert [each.name for each in tools] == ["other"]
        assert "give hosts=['" in tools.skipped["op"]
        with pytest.raises(MisuseError, match="no tool can be made of GET /x: the document sends it to"):
            tools_from_openapi(document, client=client, include=["op"], **options)


def test_wrong_hosts_are_refused():
    """So is plain HTTP to one of them, and a URL with a query, to which no path can be appended."""
    with pytest.raises(MisuseError, match=r"plain HTTP to upload\.example\.org"):
        tools_from_openapi(with_servers(path=[{"url": "http://upload.example.org"}]), auth="t", hosts=["*.example.org"])
    with pytest.raises(MisuseError, match="which is not a host"):
        tools_from_openapi(describe({}), hosts=["https://x.example.org"])
    with pytest.raises(MisuseError, match="without a query and a fragment"):
        tools_from_openapi(describe({}), base_url="https://x.example.org/?key=1")


async def test_a_header_of_the_program_replaces_that_of_the_model():
    """In whatever case it is written: two headers of a name would leave the choice to the server."""
    document = describe(
        {"parameters": [{"name": "x-tenant", "in": "header", "schema": {"type": "string"}}]}, method="get"
    )
    sent = await send(document, {"x-tenant": "theirs"}, headers={"X-Tenant": "ours"})
    assert sent.request.headers.get_list("X-Tenant") == ["ours"]


async def test_a_path_may_have_a_query_and_a_fragment():
    """Documents tell operations of one URL apart by fragments, which are not sent."""
    operation = {"parameters": [{"name": "q", "in": "query", "schema": {"type": "string"}}]}
    sent = await send(describe(operation, path="/x?beta=true#two", method="get"), {"q": "1"})
    assert sent.request.url == "https://api.example.org/v1/x?beta=true&q=1"


async def test_the_parameters_of_a_client_are_sent_as_well():
    """They join the query, and replace a parameter of their name, which the model could have written."""
    parameters = [{"name": name, "in": "query", "explode": False, "schema": ARRAY} for name in ("ids", "key")]
    document = describe({"parameters": parameters}, method="get")
    sent = await send(document, {"ids": ["a,b", "c"], "key": ["theirs"]}, client={"params": {"key": "ours"}})
    assert sent.request.url.raw_path == b"/v1/x?ids=a%2Cb,c&key=ours"


async def test_methods_of_version_3_2():
    """QUERY only reads; other methods have names of their own."""
    document = describe({"requestBody": {"content": {"application/json": {}}}}, method="query", version="3.2.0")
    document["paths"]["/x"]["additionalOperations"] = {"COPY": {"operationId": "copy"}}
    tools = tools_from_openapi(document)
    assert [(each.name, each.read_only) for each in tools] == [("op", True), ("copy", False)]
    sent = await send(document, {}, tool="copy")
    assert sent.request.method == "COPY"


YAML = """
openapi: 3.1.0
info: {title: t, version: 2024-01-01}
servers: [&main {url: "https://api.example.org"}]
paths:
  /x:
    servers: [*main]
    get:
      operationId: op
      parameters:
        - {name: country, in: query, schema: {enum: [no, 007, 2024-01-01, 1.5, true, ~]}}
      responses: {200: {description: ok}}
"""


async def test_a_document_in_yaml(tmp_path):
    """It is YAML 1.2: the country NO is no boolean, and a date no object; keys are texts."""
    file = tmp_path / "api.yaml"
    file.write_text(YAML, encoding="utf-8")
    [tool] = tools_from_openapi(file)
    assert tool.parameters["properties"]["country"]["enum"] == ["no", "007", "2024-01-01", 1.5, True, None]
    sent = await send(file, {"country": "no"})
    assert sent.request.url == "https://api.example.org/x?country=no"
    file.write_text("a: [", encoding="utf-8")
    with pytest.raises(MisuseError, match="is not YAML"):
        tools_from_openapi(file)


def test_what_cannot_be_a_tool_is_left_out(caplog):
    """With the reason by name, in `skipped` and in the log; the other operations work."""
    body = {"requestBody": {"content": {"application/json": {"schema": {"type": "nonsense"}}}}}
    document = describe({}, method="get")
    document["paths"] |= {
        "/binary": {"put": {"operationId": "binary", "requestBody": {"content": {"image/png": {}}}}},
        "/schema": {"post": {"operationId": "schema", **body}},
        "/outside": {"$ref": "paths.yaml#/outside"},
        "/reference": {"get": {"operationId": "reference", "parameters": [{"$ref": "#/nothing"}]}},
        "/place": {"get": {"operationId": "place", "parameters": [{"name": "a", "in": "body"}]}},
        "/{missing}": {"get": {"operationId": "missing"}},
    }
    tools = tools_from_openapi(document)
    assert [each.name for each in tools] == ["op"]
    reasons = {
        "binary": "its body is image/png",
        "schema": "its JSON Schema is invalid",
        "outside": "bundle it",
        "reference": "leads to nothing",
        "place": "a parameter 'a' in 'body'",
        "missing": "its path has {missing}",
    }
    assert tools.skipped.keys() == reasons.keys()
    assert all(reason in tools.skipped[name] for name, reason in reasons.items())
    assert "6 of 7 operations are left out, see .skipped: binary, schema" in caplog.text
    assert tools_from_openapi(document, include=lambda each: each.path != "/place").skipped.keys() == reasons.keys() - {
        "place"
    }
    del document["paths"]["/x"]
    with pytest.raises(MisuseError, match="no tool can be made of the 6 operations; of binary because its body"):
        tools_from_openapi(document)


FILTERS = {"type": "array", "items": {"anyOf": [{"type": "string"}, {"$recursiveRef": "#"}]}}
NODE = {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}}


@pytest.mark.parametrize(
    ("schema", "components"),
    [
        (
            {"$ref": "#/components/schemas/Node"},
            {"Node": {**NODE, "properties": {"next": {"$ref": "#/components/schemas/Node"}}}},
        ),
        ({"$ref": "#/components/schemas/A%20b"}, {"A b": {**NODE, "properties": {"next": {"$recursiveRef": "#"}}}}),
        ({**NODE, "$recursiveAnchor": True, "properties": {"next": {"$recursiveRef": "#"}}}, {}),
        ({**NODE, "$dynamicAnchor": "node", "properties": {"next": {"$dynamicRef": "#node"}}}, {}),
        (
            {"$ref": "#/components/schemas/A/properties/b"},
            {
                "A": {
                    "properties": {
                        "b": {**NODE, "properties": {"next": {"$ref": "#/components/schemas/A/properties/b"}}}
                    }
                }
            },
        ),
    ],
)
def test_schemas_may_be_recursive(schema, components):
    """By whichever keyword, and wherever the schema stands; each level is checked."""
    content = {"application/json": {"schema": schema}}
    [tool] = tools_from_openapi(describe({"requestBody": {"content": content}}, components={"schemas": components}))
    tool.bind(json.dumps({"body": {"name": "a", "next": {"name": "b", "next": {"name": "c"}}}}))
    with pytest.raises(Exception, match="name"):
        tool.bind(json.dumps({"body": {"name": "a", "next": {"name": "b", "next": {}}}}))


def test_keywords_beside_a_reference_count_from_version_3_1_on():
    """Before, they are ignored; a pattern that takes more than linear time is left to the server."""
    name = {"$ref": "#/components/schemas/Name", "description": "The new one."}
    components = {"schemas": {"Name": {"type": "string", "pattern": "^(?!no$)", "$id": "https://example.org/name"}}}
    for version, shown in (("3.0.4", {}), ("3.1.1", {"description": "The new one."})):
        body = {"content": {"application/json": {"schema": {"properties": {"name": name}}}}}
        [tool] = tools_from_openapi(describe({"requestBody": body}, version=version, components=components))
        found = tool.parameters["properties"]["body"]["properties"]["name"]
        assert found == {"$ref": "#/$defs/Name", **shown}
        assert tool.parameters["$defs"]["Name"] == {"type": "string"}


async def test_an_agent_has_1222_tools():
    """As of GitHub's document: the model is offered few of them, and finds and calls another."""
    paths = {
        f"/r{number}/{{id}}": {
            "get": {
                "operationId": f"things{number}/read-thing",
                "summary": f"Read the thing {number} of a shelf",
                "description": "Details of its use. " * 5,
                "parameters": [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}],
            }
        }
        for number in range(1222)
    }
    document = {"openapi": "3.0.3", "servers": [{"url": "https://api.example.org"}], "paths": paths}
    seen = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        seen.append(str(request.url))
        return httpx2.Response(200, json={})

    model = ScriptedModel(
        '["things7_read-thing"]',
        say("", call("find_tools", query="thing 1044")),
        say("", call("things1044_read-thing", id="a")),
        "done",
    )
    async with httpx2.AsyncClient(transport=httpx2.MockTransport(answer)) as client:
        agent = Agent(model, tools=tools_from_openapi(document, client=client))
        assert (await agent.run("Read the thing 7")).output == "done"
    assert seen == ["https://api.example.org/r1044/a"]
    choice, *requests = model.requests
    assert len(choice.messages[-2].text) < 42_000
    assert [{each.name for each in request.tools} >= {"things7_read-thing", "find_tools"} for request in requests] == [
        True
    ] * 3
    assert max(len(request.tools) for request in requests) <= 11


def find_places(value: Any, place: tuple = ()) -> list[tuple]:
    """Return the keys that lead to each part of a JSON value."""
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, each in members for found in ((*place, key), *find_places(each, (*place, key)))]


def test_a_spoilt_operation_does_not_lose_the_document():
    """Whichever part of it is of the wrong kind, the other operations are tools."""
    schema = {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer", "nullable": True}}}
    upload = {"schema": {"allOf": [schema, {"$ref": "#/components/schemas/S"}]}, "encoding": {"f": {"style": "form"}}}
    spoilt = {
        "servers": [{"url": "https://{a}.example.org", "variables": {"a": {"default": "x"}}}],
        "parameters": [{"name": "q", "in": "query", "style": "form", "schema": {"enum": ["a"]}}],
        "post": {
            "tags": ["t"],
            "parameters": [{"name": "j", "in": "header", "content": {"application/json": {"schema": schema}}}],
            "requestBody": {"required": True, "content": {MULTIPART: upload}},
        },
    }
    components = {"schemas": {"S": {"properties": {"f": {"format": "binary"}}}}}
    assert len(tools_from_openapi(describe({}, components=components, path="/y"))) == 1
    for keys in find_places(spoilt):
        for value in (None, 3, "x", [3], {"$ref": "#/nothing"}, {"a": None}):
            document = describe({}, path="/y", components=components)
            document["paths"]["/x"] = part = json.loads(json.dumps(spoilt))
            for key in keys[:-1]:
                part = part[key]
            part[keys[-1]] = value
            tools = tools_from_openapi(document)
            assert "op" in {each.name for each in tools}
            assert all(tools.skipped.values())
