"""Built-in tools of the engine. A user's tool with the same name replaces them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import attrs

from agentfsm.core.errors import ModelRetry
from agentfsm.core.inbox import Cancel, Input
from agentfsm.core.labels import Label, Level
from agentfsm.core.messages import TextPart
from agentfsm.core.notes import MAX_KEY_CHARS, MAX_NOTE_CHARS, NOTE_TOOL
from agentfsm.core.pending import PendingKind
from agentfsm.tools.run_context import RunContext
from agentfsm.tools.tool import Tool, make_tool

if TYPE_CHECKING:
    from agentfsm.core.messages import Media
    from agentfsm.core.run import Run
    from agentfsm.ports.model import ToolDefinition
    from agentfsm.tools.schema.binding import Arguments

ASK_USER: Final = "ask_user"
READ_RESULT: Final = "read_result"
FIND_TOOLS: Final = "find_tools"
BACKGROUND_TOOLS: Final = frozenset({"message_run", "cancel_run"})
# Characters of a page: about 3,000 tokens of usual text.
PAGE_CHARS: Final = 12_000
# Maximum of bytes of a page, and so of its tokens: a page is not cut again.
PAGE_BYTES: Final = 4 * PAGE_CHARS


@cache
def read_result() -> Tool[..., Any]:
    """Return the tool that reads the omitted part of a long result.

    It is built on first use, since that imports pydantic.
    """
    return make_tool(
        _read_result,
        name=READ_RESULT,
        description=_READ_RESULT_DESCRIPTION,
        read_only=True,
        reads_untrusted=False,  # the result that it reads on has its own labels
        shown_tokens=PAGE_BYTES,
        shown_bytes=2 * PAGE_BYTES,
    )


# Maximum of seconds of a wait: 30 days. A longer wait needs another run.
MAX_WAIT_S: Final = 30 * 86_400
# Maximum of characters of an unknown id, quoted to the model.
MAX_ID_CHARS: Final = 40
_READ_RESULT_DESCRIPTION: Final = "Read on in an earlier result of which only the beginning and the end were shown."


async def _read_result(ctx: RunContext[Any], result: str, start: int = 0) -> str | list[str | Media]:
    """Return a page of a result; the last one with the pictures and files of the result.

    Args:
        ctx: Context of the call, which has the results of the run.
        result: The id that the note in the result names, such as "t3.0".
        start: Index of the first character to read, from 0.
    """
    whole = ctx.find_result_text(result)
    if whole is None:
        shown = repr(result[:MAX_ID_CHARS])
        raise ModelRetry(f"there is no result {shown} in this run; take the id from the note in the result")
    if not 0 <= start < len(whole):
        raise ModelRetry(f"result {result} has the characters 0 to {len(whole) - 1}: start among them")
    end = min(start + PAGE_CHARS, len(whole))
    more = f"\n[... {len(whole) - end} more characters: go on from character {end} ...]" if end < len(whole) else ""
    page = whole[start:end] + more
    parts = () if more else ctx.find_result_parts(result)
    return [page, *parts] if parts else page


@cache
def find_tools() -> Tool[..., Any]:
    """Return the tool that finds tools not offered to the model."""
    return make_tool(_find_tools, name=FIND_TOOLS, read_only=True, reads_untrusted=False)


def build_find_tools_definition(hidden: int) -> ToolDefinition:
    """Return the definition of that tool for this number of hidden tools, 1 or more."""
    more = "There is 1 more tool" if hidden == 1 else f"There are {hidden} more tools"
    return attrs.evolve(find_tools().definition, description=f"{more} that you do not see. {_FIND_TOOLS_HINT}")


_FIND_TOOLS_HINT: Final = (
    "Search them if none of your tools fits. You may call the tools that are found from your next turn on."
)


async def _find_tools(ctx: RunContext[Any], query: str) -> str:
    """Find tools by their purpose.

    Args:
        ctx: Context of the call, which searches the tools of the run.
        query: Purpose of the tool, in words that its name or description may have.
    """
    return await ctx.find_tools(query)


@cache
def ask_user() -> Tool[..., Any]:
    """Return the tool with which a model asks the user: the call waits, and the answer is its result."""
    return make_tool(_ask_user, name=ASK_USER, external=True, reads_untrusted=False, permission=Level.READ)


def _ask_user(question: str) -> str:
    """Ask the user a question, and wait for the answer.

    Ask only for information that you cannot find yourself, and for one thing at a time.

    Args:
        question: The question, so that a person who has not seen your work can answer it.
    """
    raise AssertionError(question)  # external tools are never called


@cache
def wait() -> Tool[..., Any]:
    """Return the tool with which a model waits until a message arrives or the time is up."""
    return make_tool(
        _wait,
        name="wait",
        external=True,
        reads_untrusted=False,
        permission=Level.READ,
        waits_for=PendingKind.INPUT,
        answer_expires_s=lambda a: a.seconds,
        validate=lambda a: None if 0 < a.seconds <= MAX_WAIT_S else f"seconds: above 0 and up to {MAX_WAIT_S}",
        poll=True,
    )


def _wait(seconds: float, reason: str) -> str:
    """Wait until a message, an event or a timer arrives, or the time is up.

    Args:
        seconds: The longest wait, above 0 and up to 2592000 (30 days).
        reason: Reason for the wait, for people who look at the run.
    """
    raise AssertionError(seconds, reason)  # external tools are never called


@cache
def message_run() -> Tool[..., Any]:
    """Return the tool with which a model sends a message to a background run."""
    return make_tool(_message_run, name="message_run", **_OF_BACKGROUND)


@cache
def cancel_run() -> Tool[..., Any]:
    """Return the tool with which a model cancels a background run."""
    return make_tool(_cancel_run, name="cancel_run", **_OF_BACKGROUND)


_OF_BACKGROUND: Final[Mapping[str, Any]] = {
    "idempotent": True,
    "reads_untrusted": False,
    "permission": Level.READ,
    "harmless": "it reaches only runs that this run has begun",
}


async def _message_run(ctx: RunContext[Any], run: str, text: str) -> str:
    """Send a message to a background run, which reads it before it ends, and answers in its result.

    Args:
        ctx: Context of the call.
        run: Id of the background run, such as "t1.0".
        text: The message.
    """
    labels = (*ctx.labels, Label.USER_DATA)  # a model has written it: it is no order of the user
    sent: str = await ctx.parent.post(run, Input(parts=(TextPart(text=text),), labels=labels))
    return sent


async def _cancel_run(ctx: RunContext[Any], run: str, reason: str) -> str:
    """Cancel a background run. What it has done until then comes as a message.

    Args:
        ctx: Context of the call.
        run: Id of the background run, such as "t1.0".
        reason: Reason, for people who look at the run.
    """
    sent: str = await ctx.parent.post(run, Cancel(by="its caller", message=reason))
    return sent


def asks_only(tool: Tool[..., Any]) -> bool:
    """Return whether a tool is one of the two above, whose calls only wait: `ask_user` and `wait`."""
    return tool.function in {_ask_user, _wait}


def is_own(tool: Tool[..., Any]) -> bool:
    """Return whether a tool reaches nothing but its run, and the runs that this one has begun."""
    return tool.function in {_read_result, _find_tools, _message_run, _cancel_run, _note}


@cache
def note() -> Tool[..., Any]:
    """Return the tool with which a model makes notes for itself, which no compaction takes from it."""
    return make_tool(_note, name=NOTE_TOOL, read_only=True, reads_untrusted=False, validate=_find_flaw)


async def _note(key: str, value: str) -> str:
    """Keep a finding that later steps need, such as an id, a figure or a decision. You see your notes until the end.

    Args:
        key: Short name of the finding, up to 100 characters. A note with the same key is replaced.
        value: The finding, up to 300 characters; empty to remove the note.
    """
    return f"noted: {key}" if value.strip() else f"removed: {key}"


def _find_flaw(arguments: Arguments) -> str | None:
    if not 0 < len(arguments.key.strip()) <= len(arguments.key) <= MAX_KEY_CHARS:
        return f"key: 1 to {MAX_KEY_CHARS} characters"
    if len(arguments.value) > MAX_NOTE_CHARS:
        return f"value: {len(arguments.value)} characters, and {MAX_NOTE_CHARS} are the most; note only what you need"
    return None


def find_builtin(run: Run, name: str) -> Tool[..., Any] | None:
    """Return the built-in tool of that name if the engine offers it in this run, else None."""
    if name == FIND_TOOLS and run.offered is not None:
        return find_tools()
    return read_result() if name == READ_RESULT and run.has_cut else None
