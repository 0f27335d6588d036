"""What servers return, of every kind and in every state of disrepair: it is told in a text, and never raised."""

from __future__ import annotations

import json
import sys
from base64 import b64encode
from types import SimpleNamespace

import mcp.types as m
import pytest

from agentfsm import Agent, AudioPart, FilePart, ImagePart, Outcome, TextPart
from agentfsm.mcp import MCPServer
from agentfsm.mcp.client.content import convert_block, convert_resource, convert_result
from agentfsm.testing import ScriptedModel, call, say
from tests.support import warm_python
from tests.support.checks import results_of

PNG = b"\x89PNG\r\n\x1a\n" + b"\0" * 37
WAV = b"RIFF\0\0\0\0WAVE"
PDF = b"%PDF-1.7 ..."
USER = m.Annotations(audience=["user"])


def of(data: bytes) -> str:
    """Return data as a server sends it."""
    return b64encode(data).decode()


def content(*blocks, **fields):
    """Return what is made of a result with these blocks."""
    return convert_result(m.CallToolResult(content=list(blocks), **fields))


def blob(data: bytes, mime_type: str | None, uri: str = "file:///a/b.bin") -> m.EmbeddedResource:
    """Return data as an embedded resource."""
    return m.EmbeddedResource(resource=m.BlobResourceContents(uri=uri, blob=of(data), mime_type=mime_type))


# Of every kind


def test_text_is_text():
    """Each block begins a line."""
    assert content(m.TextContent(text="a"), m.TextContent(text="b\nc")) == ("a\nb\nc", ())


def test_images_and_recordings_are_parts():
    """Named at their place."""
    text, parts = content(
        m.TextContent(text="So:"),
        m.ImageContent(data=of(PNG), mime_type="image/png"),
        m.AudioContent(data=of(WAV), mime_type="audio/wav"),
    )
    assert text == "So:\n[image 1: image/png, 45 bytes]\n[recording 2: audio/wav, 12 bytes]"
    assert parts == (ImagePart.of(PNG), AudioPart.of(WAV))


def test_an_embedded_text_has_its_address_as_a_heading():
    """With its media type, where the server says that."""
    resource = m.TextResourceContents(uri="file:///a.md", text="# A", mime_type="text/markdown")
    assert content(m.EmbeddedResource(resource=resource)) == ("[resource file:///a.md, text/markdown]\n# A", ())
    bare = m.TextResourceContents(uri="file:///a.md", text="# A")
    assert content(m.EmbeddedResource(resource=bare))[0] == "[resource file:///a.md]\n# A"


@pytest.mark.parametrize(
    ("data", "kind", "shown", "parts"),
    [
        (PNG, "image/png", "[image 1: image/png, 45 bytes]", (ImagePart.of(PNG),)),
        (PNG, "image/unheard-of", "[image 1: image/png, 45 bytes]", (ImagePart.of(PNG),)),
        (WAV, "audio/wav", "[recording 1: audio/wav, 12 bytes]", (AudioPart.of(WAV),)),
        (
            PDF,
            "application/pdf",
            "[file 1: b.bin, application/pdf, 12 bytes]",
            (FilePart.of(PDF, name="b.bin"),),
        ),
        (b"a,b", "text/csv; charset=utf-8", "a,b", ()),
        (b'{"a": 1}', "application/ld+json", '{"a": 1}', ()),
        (b"<svg/>", "image/svg+xml", "<svg/>", ()),
        (b"\xff", "text/csv", "[file left out, text/csv, 1 bytes: its data is not UTF-8 in base64]", ()),
    ],
)
def test_embedded_data_goes_by_its_media_type(data, kind, shown, parts):
    """Text is shown as text, and what a model can look at as a part."""
    text, found = content(blob(data, kind))
    heading, rest = text.split("\n")
    assert heading.startswith("[resource file:///a/b.bin, ")
    assert (rest, found) == (shown, parts)


@pytest.mark.parametrize("kind", ["application/zip", "application/octet-stream", None, "", "x" * 500, "a/b\n[c]", "/"])
def test_other_data_is_noted(kind):
    """With its size, and what could be shown."""
    text, parts = content(blob(b"PK..", kind))
    assert text.endswith(", 4 bytes: models accept only text, images, audio and PDF]")
    assert (parts, text.count("\n")) == ((), 1)
    assert len(text) < 600


def test_a_link_is_a_line():
    """With all that the server says of what it leads to."""
    link = m.ResourceLink(
        uri="file:///a.md", name="a.md", title="A", description="All of\nA.", mime_type="text/markdown", size=12_345
    )
    told = "[link to a resource: file:///a.md, a.md, A, All of A., text/markdown, 12,345 bytes]"
    assert content(link) == (told, ())
    assert content(m.ResourceLink(uri="x:y", name="y", size=-1, description=" "))[0] == "[link to a resource: x:y, y]"


# Outside of results


@pytest.mark.parametrize(
    ("data", "kind", "part"),
    [
        (PDF, "application/pdf", FilePart.of(PDF, name="b.bin")),
        (PNG, "image/jpeg", ImagePart.of(PNG)),
        (b"a,b", "text/csv", TextPart(text="a,b")),
        (b"hi", "image/png", TextPart(text="[image left out, image/png, 2 bytes: its data is not image/png]")),
    ],
)
def test_what_is_read_becomes_a_part(data, kind, part):
    """What a result would not hold, a message does not hold either."""
    resource = blob(data, kind).resource
    assert convert_resource([resource]) == (part,)
    assert convert_block(m.EmbeddedResource(resource=resource))[1:] == (part,)


def test_half_a_pair_in_a_resource_is_mended():
    """No store takes it."""
    assert convert_resource([m.TextResourceContents(uri="x:y", text="a\ud800b")]) == (TextPart(text="a\ufffdb"),)


# Structured content


@pytest.mark.parametrize(
    ("texts", "value"),
    [
        (['{"a": 1, "b": [2]}'], {"b": [2], "a": 1}),
        (['{\n  "a": 1\n}'], {"a": 1}),
        (["3"], {"result": 3}),
        (["hi"], {"result": "hi"}),
        (["22"], {"result": "22"}),
        (["a", "b"], {"result": ["a", "b"]}),
        (['{"x": 1}', '{"x": 2}'], {"result": [{"x": 1}, {"x": 2}]}),
        (["[1, 2]"], [1, 2]),
        (["Two found:", '{"n": 2}'], {"n": 2}),
    ],
)
def test_structured_content_is_not_shown_twice(texts, value):
    """A server should send it as text also, for those that do not know it."""
    blocks = [m.TextContent(text=text) for text in texts]
    assert content(*blocks, structured_content=value) == ("\n".join(texts), ())


def test_structured_content_is_shown_where_no_text_says_it():
    """As JSON, behind what else there is."""
    assert content(structured_content={"a": "ä"}) == ('{"a":"ä"}', ())
    assert content(structured_content={"result": []})[0] == '{"result":[]}'
    assert content(m.TextContent(text="Found."), structured_content={"n": 2})[0] == 'Found.\n{"n":2}'
    assert content(m.TextContent(text="[" * 100_000), structured_content=[1])[0].endswith("\n[1]")
    image = m.ImageContent(data=of(PNG), mime_type="image/png")
    assert content(image, structured_content={"n": 2})[0] == '[image 1: image/png, 45 bytes]\n{"n":2}'


# For whom


def test_what_is_for_the_user_alone_is_noted():
    """The model learns that there is something, and not what."""
    text, parts = content(
        m.TextContent(text="secret", annotations=USER),
        m.ImageContent(data=of(PNG), mime_type="image/png", annotations=USER),
        m.TextContent(text="both", annotations=m.Annotations(audience=["user", "assistant"])),
        m.TextContent(text="nobody said", annotations=m.Annotations(audience=[])),
    )
    assert text.split("\n") == [
        "[text for the user alone: not shown]",
        "[image for the user alone: not shown]",
        "both",
        "nobody said",
    ]
    assert parts == ()
    hidden = m.TextContent(text='{"a": 1}', annotations=USER)
    assert content(hidden, structured_content={"a": 1})[0] == "[text for the user alone: not shown]"


# In disrepair


def test_nothing_is_said():
    """A result without content has a text all the same, which says how it ended."""
    assert content() == ("(done, no output)", ())
    assert content(m.TextContent(text=" \n")) == ("(done, no output)", ())
    assert content(is_error=True) == ("(failed; the server gave no reason)", ())


@pytest.mark.parametrize(
    ("data", "kind", "why"),
    [
        ("a!", "image/png", "its data is not base64"),
        ("ä", "image/png", "its data is not base64"),
        ("", "image/png", "it is empty"),
        (" \n", "image/png", "it is empty"),
        (of(b"<html>"), "image/png", "its data is not image/png"),
        (of(b"BM"), "image/bmp", "PNG, JPEG, GIF and WebP only"),
        (of(b"BM"), "text/html", "PNG, JPEG, GIF and WebP only"),
        (of(b"BM"), "", "PNG, JPEG, GIF and WebP only"),
        ("A" * 20_000_000, "image/png", "15,000,000 bytes are the most"),
    ],
)
def test_an_image_that_cannot_be_shown_is_noted(data, kind, why):
    """With why, and the other blocks are shown."""
    text, parts = content(m.ImageContent(data=data, mime_type=kind), m.TextContent(text="but"))
    assert why in text
    assert text.endswith("]\nbut")
    assert (parts, len(text) < 300) == ((), True)


def test_data_may_be_broken_into_lines():
    """As encoders for mail do."""
    lines = "\r\n".join([of(PNG)[:40], of(PNG)[40:]])
    assert content(m.ImageContent(data=lines, mime_type="IMAGE/PNG"))[1] == (ImagePart.of(PNG),)


def test_what_is_vast_is_bounded():
    """Names, addresses and descriptions of any length; thousands of pictures; half a surrogate pair."""
    vast = "x" * 1_000_000
    link = m.ResourceLink(uri=vast, name=vast, title=vast, description=vast, mime_type=vast, size=10**400)
    assert len(content(link)[0]) < 2_000
    text, parts = content(*[m.ImageContent(data=of(PNG), mime_type="image/png")] * 1_000)
    assert (len(parts), text.count("left out")) == (20, 980)
    content(m.TextContent(text="a\ud800"))[0].encode()


def test_an_unknown_kind_is_noted():
    """A later revision may bring one, and the SDK of that day hand it over."""
    block = SimpleNamespace(type="video", annotations=None)
    result = m.CallToolResult.model_construct(content=[block], structured_content=None, is_error=False)
    told = "[a block of the unknown type 'video': not shown]"
    assert convert_result(result) == (told, ())


# Through a real server

TORN = """
import json, sys
CONTENT = [{"type": "text", "text": "hi"}, {"type": "video", "data": "x"}, {"type": "image", "data": 5}]
ANSWERS = {
    "initialize": {
        "protocolVersion": "2025-11-25", "capabilities": {"tools": {}}, "serverInfo": {"name": "x", "version": "1"}
    },
    "tools/list": {"tools": [{"name": "look", "inputSchema": {"type": "object"}}]},
    "tools/call": {"content": CONTENT},
}
for line in sys.stdin:
    question = json.loads(line)
    if "id" in question:
        answer = ANSWERS.get(question["method"])
        told = {"error": {"code": -32601, "message": "no"}} if answer is None else {"result": answer}
        print(json.dumps({"jsonrpc": "2.0", "id": question["id"], **told}), flush=True)
"""


async def test_what_the_sdk_cannot_read_is_noted_and_the_rest_is_shown(tmp_path):
    """From the process to the request."""
    path = tmp_path / "server.py"
    path.write_text(TORN)
    model = ScriptedModel(say("", call("demo__look")), "done")
    async with Agent(model, tools=[MCPServer.stdio(sys.executable, [str(path)], name="demo", confirm=False)]) as agent:
        run = await agent.run("go")
    [result] = results_of(model.requests[1].messages)
    assert result.content == (
        "hi\n[a block of the unknown type 'video': not shown]\n[a block of the unknown type 'image': not shown]"
    )
    assert (result.outcome, run.output) == (Outcome.DONE, "done")


SERVER = """
from mcp.server import MCPServer
from mcp.server.mcpserver import Image
server = MCPServer("demo")
@server.tool()
def shoot() -> list:
    "Take a picture."
    return ["So:", Image(data=bytes.fromhex("PNG_HEX"), format="png")]
@server.tool()
def weigh() -> dict[str, int]:
    "Weigh it."
    return {"grams": 7}
server.run()
"""


async def test_a_model_is_shown_the_picture_of_a_server(tmp_path):
    """From the process to the request."""
    path = tmp_path / "server.py"
    path.write_text(SERVER.replace("PNG_HEX", PNG.hex()))
    python, *words = warm_python.MCP.command(str(path))
    server = MCPServer.stdio(python, words, name="demo", confirm=False)
    model = ScriptedModel(say("", call("demo__shoot"), call("demo__weigh")), "done")
    async with Agent(model, tools=[server]) as agent:
        await agent.run("go")
    shot, weight = results_of(model.requests[1].messages)
    assert (shot.outcome, shot.content) == (Outcome.DONE, "So:\n[image 1: image/png, 45 bytes]")
    assert shot.parts == (ImagePart.of(PNG),)
    assert (json.loads(weight.content), weight.parts) == ({"grams": 7}, ())
