"""Resources and prompts of a server, as the SDK's own client sees them."""

import base64
import json

import anyio
import pytest
from mcp import Client, MCPError
from mcp.types import PromptReference, ResourceTemplateReference

from agentfsm import AssistantMessage, AudioPart, FilePart, ImagePart, MisuseError, TextPart, UserMessage
from agentfsm.mcp import Argument, MCPService, Prompt, Resource
from agentfsm.mcp.server import resources as serve_offers

MODES = pytest.mark.parametrize("mode", ["auto", "legacy"])


async def note(name):
    return f"about {name}"


def fails():
    raise OSError("disk gone")


RESOURCES = (
    Resource(uri="notes://all", name="all", description="All of them.", read=lambda: {"notes": ["é"]}),
    Resource(uri="notes://logo", name="logo", mime_type="image/png", read=lambda: b"\x89PNG"),
    Resource(uri="notes://bytes", name="bytes", read=lambda: b"1"),
    Resource(uri="notes://broken", name="broken", read=fails),
    Resource(uri="notes://one/{name}", name="one", mime_type="text/markdown", read=note),
)


def standup(who, day="today"):
    return f"What did {who} do {day}?"


async def talk():
    return [
        UserMessage(
            parts=(
                TextPart(text="see"),
                ImagePart.of(b"\x89PNG", "image/png"),
                AudioPart.of(b"RIFF", "audio/wav"),
                FilePart.of(b"%PDF", name="a.pdf"),
                ImagePart(url="https://example.org/a.png"),
            )
        ),
        AssistantMessage(text="I see"),
    ]


PROMPTS = (
    Prompt(name="standup", description="Ask.", render=standup),
    Prompt(name="talk", render=talk),
    Prompt(name="fixed", render=lambda **given: given["a"], arguments=(Argument("a", "the text"),)),
    Prompt(name="broken", render=fails),
)


@pytest.fixture
def service():
    return MCPService([], name="demo", resources=RESOURCES, prompts=PROMPTS)


@MODES
async def test_resources_and_templates_are_listed(service, mode):
    """What has a URI of its own is a resource, what stands for many is a template."""
    async with Client(service.server, mode=mode) as client:
        listed = (await client.list_resources()).resources
        templates = (await client.list_resource_templates()).resource_templates
        assert client.server_capabilities.tools is None
    assert [each.uri for each in listed] == ["notes://all", "notes://logo", "notes://bytes", "notes://broken"]
    assert listed[0].description == "All of them."
    assert [(each.uri_template, each.mime_type) for each in templates] == [("notes://one/{name}", "text/markdown")]


@MODES
async def test_prompts_are_not_said_to_change(service, mode):
    """Nobody would announce it, in either revision; resources and tools may come and go."""
    async with Client(service.server, mode=mode) as client:
        assert client.server_capabilities.prompts.list_changed is False
        assert client.server_capabilities.resources.list_changed is True


@MODES
async def test_what_is_read_is_text_bytes_or_json(service, mode):
    """The MIME type is the one that was given, else the one that fits."""
    async with Client(service.server, mode=mode) as client:
        read = {
            uri: (await client.read_resource(uri)).contents[0]
            for uri in ("notes://all", "notes://logo", "notes://bytes", "notes://one/a%20b")
        }
    assert json.loads(read["notes://all"].text) == {"notes": ["é"]}
    assert read["notes://all"].mime_type == "application/json"
    assert base64.b64decode(read["notes://logo"].blob) == b"\x89PNG"
    assert read["notes://logo"].mime_type == "image/png"
    assert read["notes://bytes"].mime_type == "application/octet-stream"
    one = read["notes://one/a%20b"]
    assert (one.text, one.mime_type, one.uri) == ("about a b", "text/markdown", "notes://one/a%20b")


@MODES
@pytest.mark.parametrize(
    ("uri", "words"),
    [
        ("notes://none", "unknown resource 'notes://none'"),
        ("notes://broken", "could not be read: OSError: disk gone"),
        ("notes://one/..%2F..%2Fetc", "a path that is not allowed"),
        ("notes://one/%2Fetc%2Fpasswd", "a path that is not allowed"),
        ("notes://one/a%00b", "a path that is not allowed"),
        ("notes://" + "x" * 5_000, "unknown resource"),
    ],
)
async def test_what_cannot_be_read_says_why(service, uri, words, mode):
    """Unknown, broken, and a template whose variable would leave its place."""
    async with Client(service.server, mode=mode) as client:
        with pytest.raises(MCPError) as caught:
            await client.read_resource(uri)
    assert words in str(caught.value)
    assert len(str(caught.value)) < 400 or "xxx" not in str(caught.value)


async def test_a_reader_that_hangs_is_given_up(monkeypatch):
    """The client hears that it took too long."""
    monkeypatch.setattr(serve_offers, "TIMEOUT_S", 0.01)
    slow = Resource(uri="a://b", name="slow", read=anyio.sleep_forever)
    async with Client(MCPService([], name="demo", resources=(slow,)).server) as client:
        with pytest.raises(MCPError, match=r"could not be read within 0\.01 s"):
            await client.read_resource("a://b")


@MODES
async def test_a_page_that_there_is_not_is_refused(service, mode):
    """A cursor of nobody's is an error, and not the first page again."""
    async with Client(service.server, mode=mode) as client:
        for listing in (client.list_resources, client.list_resource_templates, client.list_prompts):
            with pytest.raises(MCPError, match="invalid cursor 'runs:nan'"):
                await listing(cursor="runs:nan")


@MODES
async def test_prompts_are_listed_and_filled_in(service, mode):
    """Blanks are the function's parameters or what is given, and messages may hold every kind of part."""
    async with Client(service.server, mode=mode) as client:
        listed = {each.name: each.arguments for each in (await client.list_prompts()).prompts}
        asked = await client.get_prompt("standup", {"who": "alice"})
        parts = await client.get_prompt("talk")
        fixed = await client.get_prompt("fixed", {"a": "b"})
    assert [(each.name, each.required) for each in listed["standup"]] == [("who", True), ("day", False)]
    assert listed["talk"] is None
    assert [(each.name, each.description) for each in listed["fixed"]] == [("a", "the text")]
    assert [(each.role, each.content.text) for each in asked.messages] == [("user", "What did alice do today?")]
    assert asked.description == "Ask."
    assert [(each.role, each.content.type) for each in parts.messages] == [
        ("user", "text"),
        ("user", "image"),
        ("user", "audio"),
        ("user", "resource"),
        ("user", "resource_link"),
        ("assistant", "text"),
    ]
    assert fixed.messages[0].content.text == "b"


@MODES
@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("standup", {}, "the prompt 'standup' needs who; it takes: who, day"),
        ("standup", {"who": "a", "x": "y"}, "the prompt 'standup' has no x; it takes: who, day"),
        ("none", {}, "unknown prompt 'none'; available: standup, talk, fixed, broken"),
        ("broken", {}, "the prompt 'broken' could not be rendered: OSError: disk gone"),
    ],
)
async def test_a_prompt_that_cannot_be_made_says_why(service, name, arguments, words, mode):
    """What is missing, what is too much, and what there is."""
    async with Client(service.server, mode=mode) as client:
        with pytest.raises(MCPError) as caught:
            await client.get_prompt(name, arguments)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Resource(uri="x://{", name="x", read=str), "a resource cannot have the URI"),
        (lambda: Resource(uri="tasks", name="x", read=str), "begin with a scheme, such as project://tasks"),
        (lambda: MCPService([], name="demo", resources=RESOURCES[:1] * 2), "two resources are called 'notes://all'"),
        (lambda: MCPService([], name="demo", prompts=PROMPTS[:1] * 2), "two prompts are called 'standup'"),
    ],
)
def test_what_makes_no_sense_is_refused(make, words):
    """When the server is made, and not when a client asks."""
    with pytest.raises(MisuseError, match=words):
        make()


async def test_only_what_there_is_is_declared():
    """A server without resources and prompts declares neither."""
    async with Client(MCPService([], name="demo", instructions="Be brief.").server) as client:
        declared = client.server_capabilities
        assert (declared.resources, declared.prompts) == (None, None)
        assert declared.logging is None
        assert client.instructions == "Be brief."


# Completion.


def cities(text, known):
    every = ("Paris", "Parma") if known.get("country") != "Italy" else ("Parma",)
    return [city for city in every if city.startswith(text)]


async def numbers(_text, _known):
    return range(150)


COMPLETING = MCPService(
    [],
    name="demo",
    prompts=(Prompt(name="go", render=lambda city, country="": city, complete={"city": cities}), PROMPTS[-1]),
    resources=(
        Resource(uri="n://{n}/{m}", name="n", read=note, complete={"n": numbers, "m": lambda _text, _known: fails()}),
    ),
)


@MODES
async def test_values_are_proposed_for_what_is_filled_in(mode):
    """By what is typed and what else is filled in, as many as the protocol allows; none where none are known."""
    prompt, template = PromptReference(name="go"), ResourceTemplateReference(uri="n://{n}/{m}")
    async with Client(COMPLETING.server, mode=mode) as client:
        assert client.server_capabilities.completions is not None
        both = await client.complete(prompt, {"name": "city", "value": "Par"})
        one = await client.complete(prompt, {"name": "city", "value": "Par"}, context_arguments={"country": "Italy"})
        none = await client.complete(prompt, {"name": "country", "value": ""})
        many = await client.complete(template, {"name": "n", "value": "1"})
    assert (both.completion.values, one.completion.values, none.completion.values) == (
        ["Paris", "Parma"],
        ["Parma"],
        [],
    )
    assert (many.completion.values[-1], many.completion.total, many.completion.has_more) == ("99", 150, True)
    assert (both.completion.total, both.completion.has_more) == (2, False)


@pytest.mark.parametrize(
    ("ref", "name", "words"),
    [
        (PromptReference(name="gone"), "city", "unknown prompt 'gone'; available: go, broken"),
        (PromptReference(name="go"), "town", "takes no 'town'; it takes: city, country"),
        (ResourceTemplateReference(uri="n://{x}"), "x", "unknown resource"),
        (ResourceTemplateReference(uri="n://{n}/{m}"), "m", "disk gone"),
    ],
)
async def test_what_cannot_be_completed_is_an_error(ref, name, words):
    """It says what there is, or what went wrong."""
    async with Client(COMPLETING.server) as client:
        with pytest.raises(MCPError, match=words):
            await client.complete(ref, {"name": name, "value": ""})


async def test_completion_is_declared_where_there_is_any(service):
    """A server that proposes nothing does not say that it could."""
    async with Client(service.server) as client:
        assert client.server_capabilities.completions is None


def test_nothing_is_completed_that_is_not_taken():
    """A misspelt blank is found when the offer is made."""
    with pytest.raises(MisuseError, match="'town', which it does not take; it takes: city"):
        Prompt(name="go", render=lambda city: city, complete={"town": cities})
    with pytest.raises(MisuseError, match="it takes: none"):
        Resource(uri="n://all", name="all", read=fails, complete={"n": numbers})
