"""The server that the official suite talks to: its fixtures, built on our server half.

Usage: `conformance_server.py PORT`. Names, texts and contents are the suite's.
"""

from __future__ import annotations

import sys
from base64 import b64decode
from typing import Any, Final

import anyio

from agentfsm import (
    Agent,
    AudioPart,
    FilePart,
    ImagePart,
    InputRequired,
    Question,
    RunContext,
    TextPart,
    ToolRegistry,
    UserMessage,
    tool,
)
from agentfsm.mcp import MCPService, Prompt, Resource
from agentfsm.mcp.server.served_runs import ServedRuns
from agentfsm.stores import MemoryStore
from agentfsm.testing import ScriptedModel
from agentfsm.tools.tool import make_tool

# One red pixel.
PNG: Final = b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8DwHwAFBQIAX8jx0gAAAABJRU5ErkJggg=="
)
WAV: Final = b64decode("UklGRiYAAABXQVZFZm10IBAAAAABAAEAQB8AAAB9AAACABAAZGF0YQIAAAA=")
IMAGE: Final = ImagePart.of(PNG)
FILE: Final = FilePart.of(b'{"test": "data", "value": 123}', "application/json", name="mixed.json")
SCHEMA_2020_12: Final[dict[str, Any]] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "$defs": {
        "address": {
            "$anchor": "addressDef",
            "type": "object",
            "properties": {"street": {"type": "string"}, "city": {"type": "string"}},
        }
    },
    "properties": {
        "name": {"type": "string"},
        "address": {"$ref": "#/$defs/address"},
        "contactMethod": {"type": "string", "enum": ["phone", "email"]},
        "phone": {"type": "string"},
        "email": {"type": "string"},
    },
    "allOf": [{"anyOf": [{"required": ["phone"]}, {"required": ["email"]}]}],
    "if": {"properties": {"contactMethod": {"const": "phone"}}, "required": ["contactMethod"]},
    "then": {"required": ["phone"]},
    "else": {"required": ["email"]},
    "additionalProperties": False,
}
HEADERS: Final = {
    "type": "object",
    "properties": {"region": {"type": "string", "x-mcp-header": "Region"}},
    "required": ["region"],
}


@tool(read_only=True)
def test_simple_text() -> str:
    """Return a text."""
    return "This is a simple text response for testing."


@tool(read_only=True)
def test_image_content() -> ImagePart:
    """Return a picture."""
    return IMAGE


@tool(read_only=True)
def test_audio_content() -> AudioPart:
    """Return a recording."""
    return AudioPart.of(WAV)


@tool(read_only=True)
def test_embedded_resource() -> FilePart:
    """Return a file."""
    return FILE


@tool(read_only=True)
def test_multiple_content_types() -> list[Any]:
    """Return a text, a picture and a file."""
    return ["Multiple content types test:", IMAGE, FILE]


@tool(read_only=True)
async def test_tool_with_progress(ctx: RunContext[None]) -> str:
    """Tell how far it is."""
    for share in (0, 50, 100):
        ctx.progress(f"Completed step {share} of 100")
        await anyio.sleep(0.05)
    return "done"


@tool(read_only=True)
def test_error_handling() -> str:
    """Fail."""
    raise RuntimeError("This tool intentionally returns an error for testing")


@tool(read_only=True)
def test_logging_tool() -> str:
    """Return a text, without a log message."""
    return "done"


def _asking(*rounds: Question, says: str = "Answered: {}") -> Any:
    """Return a function that asks these, one after another."""

    def ask(ctx: RunContext[None]) -> str:
        asked = ctx.state or 0
        if asked < len(rounds):
            raise InputRequired(rounds[asked], state=asked + 1)
        return says.format(dict(ctx.answers))

    return ask


def _form(key: str, message: str, **properties: Any) -> Question:
    return Question(key=key, message=message, schema={"properties": properties, "required": list(properties)})


@tool
def test_trigger_tool_change() -> str:
    """Bring a tool, or take it away."""
    if "passing" in REGISTRY:
        REGISTRY.unregister("passing")
    else:
        REGISTRY.register(make_tool(_any, name="passing", description="It comes and goes.", parameters=HEADERS))
    return "changed"


def _titled(what: str) -> list[dict[str, str]]:
    return [{"const": f"value{n}", "title": f"{nth} {what}"} for n, nth in enumerate(["First", "Second", "Third"], 1)]


STRING: Final = {"type": "string"}
NAME: Final = _form("user_name", "What is your name?", name=STRING)
# By tool: what it asks.
ASKING: Final = {
    "test_input_required_result_elicitation": _asking(NAME, says="Hello, {}!"),
    "test_input_required_result_request_state": _asking(
        _form("confirm", "Please confirm", ok={"type": "boolean"}), says="state-ok: {}"
    ),
    "test_input_required_result_multi_round": _asking(
        _form("step1", "Step 1: What is your name?", name=STRING),
        _form("step2", "Step 2: What is your favorite color?", color=STRING),
    ),
    "test_streaming_elicitation": _asking(NAME),
    "test_elicitation_sep1034_defaults": _asking(
        _form(
            "q",
            "Defaults",
            name={"type": "string", "default": "John Doe"},
            age={"type": "integer", "default": 30},
            score={"type": "number", "default": 95.5},
            status={"type": "string", "enum": ["active", "inactive", "pending"], "default": "active"},
            verified={"type": "boolean", "default": True},
        )
    ),
    "test_elicitation_sep1330_enums": _asking(
        _form(
            "q",
            "Choices",
            untitledSingle={"type": "string", "enum": ["option1", "option2", "option3"]},
            titledSingle={"type": "string", "oneOf": _titled("Option")},
            legacyEnum={
                "type": "string",
                "enum": ["opt1", "opt2", "opt3"],
                "enumNames": ["Option One", "Option Two", "Option Three"],
            },
            untitledMulti={"type": "array", "items": {"type": "string", "enum": ["option1", "option2", "option3"]}},
            titledMulti={"type": "array", "items": {"anyOf": _titled("Choice")}},
        )
    ),
}


@tool
def test_elicitation(ctx: RunContext[None], message: str) -> str:
    """Ask what it is told to."""
    if not ctx.answers:
        raise InputRequired(_form("q", message, username=STRING, email=STRING))
    return f"User response: {ctx.answers['q']}"


def _any(**arguments: Any) -> str:
    return str(arguments)


def _pictured() -> list[UserMessage]:
    return [UserMessage(parts=(IMAGE, TextPart(text="Please analyze the image above.")))]


def _embedded(resourceUri: str) -> list[UserMessage]:  # noqa: N803  the suite's name
    return [UserMessage(parts=(FILE, TextPart(text=f"Please process {resourceUri} above.")))]


TOOLS: Final = (
    test_simple_text,
    test_image_content,
    test_audio_content,
    test_embedded_resource,
    test_multiple_content_types,
    test_tool_with_progress,
    test_error_handling,
    test_logging_tool,
    test_elicitation,
    test_trigger_tool_change,
    *[make_tool(ask, name=name, description="It asks.") for name, ask in ASKING.items()],
    make_tool(_any, name="json_schema_2020_12_tool", description="Any schema.", parameters=SCHEMA_2020_12),
    make_tool(_any, name="test_headers", description="A mirrored argument.", parameters=HEADERS),
    # Its question is whether it may run: that it is asked, and how, is what the suite looks at.
    make_tool(
        _any,
        name="test_input_required_result_tampered_state",
        description="It asks first.",
        parameters={"type": "object"},
        requires_approval=True,
    ),
)
RESOURCES: Final = (
    Resource(
        uri="test://static-text",
        name="text",
        mime_type="text/plain",
        read=lambda: "This is the content of the static text resource.",
    ),
    Resource(uri="test://static-binary", name="binary", mime_type="image/png", read=lambda: PNG),
    Resource(uri="test://watched-resource", name="watched", read=lambda: "Watched resource content"),
    Resource(
        uri="test://template/{id}/data",
        name="template",
        read=lambda id: {"id": id, "templateTest": True, "data": f"Data for ID: {id}"},  # noqa: A006  the suite's name
    ),
)
PROMPTS: Final = (
    Prompt(name="test_simple_prompt", description="A text.", render=lambda: "This is a simple prompt for testing."),
    Prompt(
        name="test_prompt_with_arguments",
        description="A text with two blanks.",
        render=lambda arg1, arg2: f"Prompt with arguments: arg1='{arg1}', arg2='{arg2}'",
        complete={"arg1": lambda text, _known: [each for each in ("testing", "paris") if each.startswith(text)]},
    ),
    Prompt(name="test_prompt_with_embedded_resource", description="A file.", render=_embedded),
    Prompt(name="test_prompt_with_image", description="A picture.", render=_pictured),
)


YES: Final = {"type": "boolean"}
BOTH: Final = {"name": {"type": "string"}, "confirm": YES}


@tool(read_only=True)
def greet(name: str) -> str:
    """Greet."""
    return f"Hello, {name}!"


@tool(background=True)
async def slow_compute(seconds: float, label: str) -> str:
    """Compute for a while."""
    await anyio.sleep(seconds)
    return f"computed {label}"


@tool(background=True)
def failing_job() -> str:
    """Fail."""
    raise RuntimeError("This job fails")


@tool(background=True)
def confirm_delete(ctx: RunContext[None], filename: str) -> str:
    """Ask once."""
    if "sure" not in ctx.answers:
        raise InputRequired(_form("sure", f"Delete {filename}?", confirm=YES))
    return f"deleted {filename}"


@tool(background=True)
def multi_input(ctx: RunContext[None]) -> str:
    """Ask two things at once."""
    if not ctx.answers:
        raise InputRequired(_form("a", "One?", **BOTH), _form("b", "Two?", **BOTH))
    return f"got {dict(ctx.answers)}"


LONG: Final = Agent(
    ScriptedModel(), name="jobs", tools=[slow_compute, failing_job, confirm_delete, multi_input], store=MemoryStore()
)
REGISTRY: Final = ToolRegistry.of([*TOOLS, greet, *LONG.driver.config.registry])
SERVICE: Final = MCPService(
    REGISTRY, name="conformance", resources=RESOURCES, prompts=PROMPTS, runs=ServedRuns(agent=LONG)
)

if __name__ == "__main__":
    anyio.run(SERVICE.http, "127.0.0.1", int(sys.argv[1]))
