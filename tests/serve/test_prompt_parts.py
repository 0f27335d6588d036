"""Prompts of clients: parts with their types, hidden characters, and pages of other origins."""

import json

import pytest

from agentfsm import Agent, FilePart, ImagePart, MisuseError
from agentfsm.core.messages import data_url
from agentfsm.serve import serve
from agentfsm.stores import MemoryStore
from agentfsm.testing import ScriptedModel, say
from tests.support.gateway_client import paying, read_caller, serving

PNG = b"\x89PNG\r\n\x1a\n" + b"\x00" * 20


@pytest.fixture
def anyio_backend():
    """Return the one that uvicorn runs on."""
    return "asyncio"


def image(data=PNG, kind="image/png", **more):
    return {"type": "image", "url": data_url(data, kind), **more}


def file(data, kind, name="f"):
    return {"type": "file", "url": data_url(data, kind), "name": name}


async def test_images_and_files_reach_the_model():
    """As parts of the prompt and of an input; the type of an image is that of its data."""
    agent = Agent(ScriptedModel(say("seen"), say("again")), store=MemoryStore())
    async with serving(agent) as client:
        prompt = [{"type": "text", "text": "look"}, image(kind="image/gif"), file(b"%PDF-1.7 x", "application/pdf")]
        made = await client.post("/v1/runs", json={"prompt": prompt, "wait_s": 30})
        assert made.status_code == 201, made.text
        text, picture, paper = (await agent.load(made.json()["id"])).header.prompt
        assert text.text == "look"
        assert (type(picture), picture.url[:15]) == (ImagePart, "data:image/png;")
        assert (type(paper), paper.name) == (FilePart, "f")
    async with serving(paying()) as client:
        run = (await client.post("/v1/runs", json={"prompt": "pay", "wait_s": 30})).json()
        sent = await client.post(f"/v1/runs/{run['id']}/input", json={"text": [image()]})
        assert sent.status_code == 202, sent.text


@pytest.mark.parametrize(
    ("parts", "status"),
    [
        ([image(b"MZ is a program")], 400),
        ([image(b"<svg/>", "image/svg+xml")], 400),
        ([{"type": "image", "url": "data:image/png;base64,%%%"}], 400),
        ([{"type": "image", "url": "http://internal/secret"}], 400),
        ([{"type": "image", "url": "file:///etc/passwd"}], 400),
        ([file(b"MZ", "application/x-msdownload")], 400),
        ([file(b"no pdf", "application/pdf")], 400),
        ([file(b"\xff\xfe", "text/plain")], 400),
        ([{"type": "image"}], 422),
        ([{"type": "text"}], 422),
        ([{"type": "text", "text": "x", "url": "y"}], 422),
        ([{"type": "video", "url": "x"}], 422),
        ([image()] * 21, 422),
        ([], 422),
    ],
    ids=range(14),
)
async def test_parts_that_are_refused(parts, status):
    """Data of another type than declared, unknown types and schemes, too many parts."""
    async with serving(Agent(ScriptedModel(say("x")), store=MemoryStore())) as client:
        response = await client.post("/v1/runs", json={"prompt": parts})
        assert response.status_code == status, response.text
        assert (await client.get("/v1/runs")).json()["runs"] == []


async def test_a_part_that_the_model_does_not_take():
    """Is refused before a run begins, and so is an input."""

    class Blind(ScriptedModel):
        def unsupported_part(self, part):
            return "it has no eyes" if isinstance(part, ImagePart) else None

    agent = paying().with_(model=Blind(say("x")))
    async with serving(agent) as client:
        refused = await client.post("/v1/runs", json={"prompt": [image()]})
        assert refused.status_code == 400
        assert "no eyes" in refused.text
        run = (await client.post("/v1/runs", json={"prompt": "x"})).json()
        assert (await client.post(f"/v1/runs/{run['id']}/input", json={"text": [image()]})).status_code == 400


async def test_hidden_characters_are_written_out():
    """Controls, marks that reorder text and tags are escaped, not removed; an emoji stays as it is."""
    agent = Agent(ScriptedModel(say("x"), say("y")), store=MemoryStore())
    async with serving(agent) as client:
        hidden = "a\u202eb\U000e0041\x1b[31m\x00 \U0001f469\u200d\U0001f467"
        for prompt in (hidden, [{"type": "text", "text": hidden}]):
            made = await client.post("/v1/runs", json={"prompt": prompt, "wait_s": 30})
            text = (await agent.load(made.json()["id"])).header.prompt[0].text
            assert text == "a\\u202eb\\udb40\\udc41\\u001b[31m\\u0000 \U0001f469\u200d\U0001f467"
        lone = json.dumps({"prompt": "\ud800"})
        refused = await client.post("/v1/runs", content=lone, headers={"content-type": "application/json"})
        assert refused.status_code == 422


async def test_pages_of_other_origins():
    """A browser may read the answers for an allowed origin only."""
    origin = "https://app.example.org"
    async with serving(Agent(ScriptedModel(say("x")), store=MemoryStore()), origins=[origin]) as client:
        asked = {"origin": origin, "access-control-request-method": "POST"}
        before = await client.options("/v1/runs", headers=asked | {"access-control-request-headers": "authorization"})
        assert before.status_code == 200
        assert before.headers["access-control-allow-origin"] == origin
        found = await client.get("/v1/runs", headers={"origin": origin})
        assert found.headers["access-control-allow-origin"] == origin
        other = await client.get("/v1/runs", headers={"origin": "https://evil.example"})
        assert "access-control-allow-origin" not in other.headers
    for wrong in ("*", "app.example.org", "https://app.example.org/x"):
        with pytest.raises(MisuseError, match="origin"):
            serve([Agent(ScriptedModel(say("x")), store=MemoryStore())], auth=read_caller, origins=[wrong])
