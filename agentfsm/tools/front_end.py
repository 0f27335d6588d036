"""The front end of a run: tools that its client carries out, a state that both share, and what the client shows.

They are facts of the run, in its metadata, so that every worker offers the same tools after a crash. A call of such a
tool waits for its result from outside, as that of any external tool.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import attrs

from agentfsm.core.calls import parse_arguments
from agentfsm.core.errors import MisuseError
from agentfsm.core.header import FRONT_END
from agentfsm.core.messages import AssistantMessage, Outcome, SystemMessage, ToolResult
from agentfsm.core.text_safety import fence_untrusted
from agentfsm.core.value import Value
from agentfsm.tools.tool import Tool, make_tool

if TYPE_CHECKING:
    from agentfsm.core.messages import Message, ToolCall
    from agentfsm.core.run import Run

# Name of the tool with which the model changes the shared state.
UPDATE_STATE: Final = "update_state"
# Maximum of tools, and of characters of the whole as JSON.
MAX_TOOLS: Final = 64
MAX_CHARS: Final = 200_000
_CHANGE_START: Final = "The page has changed: "
_UPDATE_DESCRIPTION: Final = (
    "Change the state that you share with the page of the user, who sees it at once. Give only the fields that change, "
    "each with its whole new value."
)
_UPDATE_PARAMETERS: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {"changes": {"type": "object", "description": "New values by the name of the field."}},
    "required": ["changes"],
    "additionalProperties": False,
}


@attrs.frozen(kw_only=True)
class Page(Value):
    """What a front end shares with a run."""

    state: Mapping[str, Any] | None = None
    """The shared state, a JSON object; None if there is none."""

    context: tuple[Any, ...] | None = None
    """Values that the front end shows the model, each with a description; None if it says nothing of them."""

    def changes_to(self, later: Page) -> dict[str, Any]:
        """Return what differs in a later page, as JSON: fields of the state that are set or removed, and the context.

        A later page without a state or a context leaves it as it is.
        """
        changes: dict[str, Any] = {}
        if later.state is not None:
            old = self.state or {}
            missing = object()
            changes["state"] = {name: each for name, each in later.state.items() if old.get(name, missing) != each}
            changes["removed"] = [name for name in old if name not in later.state]
        if later.context is not None and later.context != (self.context or ()):
            changes["context"] = list(later.context)
        return {name: each for name, each in changes.items() if each or name == "context"}

    def changed(self, changes: Mapping[str, Any]) -> Page:
        """Return the page after such changes."""
        state = self.state
        if "state" in changes or "removed" in changes:
            removed = changes.get("removed", ())
            merged = {**(state or {}), **changes.get("state", {})}
            state = {name: each for name, each in merged.items() if name not in removed}
        context = changes.get("context")
        return Page(state=state, context=self.context if context is None else tuple(context))


def read_front_end(
    metadata: Mapping[str, Any], *, has_begun: bool = False
) -> tuple[tuple[Tool[..., Any], ...], Page] | None:
    """Return the tools and the page that the metadata of a run have; None if they have none.

    Args:
        metadata: Metadata of a run.
        has_begun: Whether the run has begun, so that only what changes is limited.

    Raises:
        MisuseError: if they are not valid, or too many.
    """
    given = metadata.get(FRONT_END)
    if given is None:
        return None
    if not isinstance(given, Mapping) or given.keys() - {"tools", "state", "context"}:
        raise MisuseError(f"the metadata {FRONT_END!r} must be an object with tools, state and context, and no more")
    tools, state, context = given.get("tools", []), given.get("state"), given.get("context")
    if not isinstance(tools, list | tuple) or len(tools) > MAX_TOOLS:
        raise MisuseError(f"the tools of a front end must be a list of {MAX_TOOLS} at most: leave out some")
    if not isinstance(state, Mapping | None) or not isinstance(context, list | tuple | None):
        raise MisuseError("the state of a front end must be a JSON object, and its context a list")
    if not has_begun and (size := _measure(given)) > MAX_CHARS:
        raise MisuseError(
            f"tools, state and context have {MAX_CHARS:,} characters at most when a run begins, not {size:,} "
            f"(the state {_measure(state):,}). Send a smaller state, fewer tools or less context, or begin another "
            "conversation; the state of this one stays in its runs"
        )
    built = _build_tools(json.dumps(tools, default=dict), has_state=state is not None)
    return built, Page(state=state, context=None if context is None else tuple(context))


def _measure(value: object) -> int:
    return len(json.dumps(value, ensure_ascii=False, default=dict))


@lru_cache(maxsize=128)
def _build_tools(definitions: str, *, has_state: bool) -> tuple[Tool[..., Any], ...]:
    tools: list[Tool[..., Any]] = []
    for each in json.loads(definitions):
        if not isinstance(each, dict) or not isinstance(each.get("name"), str):
            raise MisuseError("each tool of a front end must be an object with a name")
        parameters = each.get("parameters") or {}
        if not isinstance(parameters, dict):
            raise MisuseError(f"the parameters of the tool {each['name']!r} must be a JSON Schema")
        tool = make_tool(
            _carry_out,
            name=each["name"],
            description=each.get("description") or "",
            parameters=parameters,
            external=True,
            reads_untrusted=True,  # nobody knows what a page makes its results of
        )
        tools.append(tool)
    if has_state:
        tool = make_tool(
            _update_state,
            name=UPDATE_STATE,
            description=_UPDATE_DESCRIPTION,
            parameters=_UPDATE_PARAMETERS,
            read_only=True,  # the journal has the state: nothing else changes
            reads_untrusted=False,
        )
        tools.append(tool)
    names = [tool.name for tool in tools]
    if taken := {name for name in names if names.count(name) > 1}:
        raise MisuseError(f"two tools of the front end are called {min(taken)!r}: rename one")
    return tuple(tools)


def _carry_out(**arguments: Any) -> str:
    raise AssertionError(arguments)  # external tools are never called


async def _update_state(changes: dict[str, Any]) -> str:
    return f"changed: {', '.join(changes)}" if changes else "nothing changed"


def describe_page(page: Page) -> str:
    """Return what a front end shows as a part of the instructions: data, and not instructions; empty for nothing."""
    shown = Page().changes_to(page) if page.state or page.context else {}
    text = json.dumps(shown, ensure_ascii=False, default=dict)
    return f"What the page of the user had when this run began:\n{fence_untrusted(text)}" if shown else ""


def find_excess(run: Run, call: ToolCall, tool: Tool[..., Any]) -> str | None:
    """Return why a call of `update_state` would make the state too large; None if it would not, or is another call.

    A conversation goes on with a new run that begins with the state, so this has the limit of the begin of a run.
    """
    if tool.function is not _update_state:
        return None
    page, given = read_page(run), run.header.metadata[FRONT_END]
    for entry in run.open:  # the calls of one turn overlap
        if entry.call.name == UPDATE_STATE and entry.result is None:
            page = _change_state(page, parse_arguments(entry.call))
        if entry.call.id == call.id:
            break
    after = {**given, "state": page.state, "context": given.get("context") if page.context is None else page.context}
    size = _measure(after)
    if size <= MAX_CHARS:
        return None
    return (
        f"the state was not changed: tools, state and context of the page would have {size:,} characters, and "
        f"{MAX_CHARS:,} is the most. Set smaller values, or make other fields smaller in the same call"
    )


def read_page(run: Run) -> Page:
    """Return what the front end of a run shares with it now: as the run began, and what both have changed since."""
    found = read_front_end(run.header.metadata)
    page, calls = Page() if found is None else found[1], dict[str, Mapping[str, Any]]()
    for message in run.messages[run.own_start :]:
        page = _follow(page, message, calls)
    for entry in run.open:
        if entry.result is not None:
            page = _follow(page, entry.result, {entry.call.id: parse_arguments(entry.call)})
    return page


def _follow(page: Page, message: Message, calls: dict[str, Mapping[str, Any]]) -> Page:
    """Return a page after a message; `calls` has the arguments of the calls so far, which are added."""
    if isinstance(message, AssistantMessage):
        calls |= {call.id: parse_arguments(call) for call in message.calls if call.name == UPDATE_STATE}
    elif isinstance(message, ToolResult) and message.tool == UPDATE_STATE and message.outcome is Outcome.DONE:
        return _change_state(page, calls.get(message.call_id, {}))
    elif isinstance(message, SystemMessage):
        for line in message.text.splitlines():
            if line.startswith(_CHANGE_START):
                page = page.changed(json.loads(line.removeprefix(_CHANGE_START)))
    return page


def _change_state(page: Page, arguments: Mapping[str, Any]) -> Page:
    changes = arguments.get("changes")  # an agent's own tool of the name `update_state` may have others
    return page.changed({"state": changes}) if isinstance(changes, Mapping) else page


def describe_change(changes: Mapping[str, Any]) -> str:
    """Return changes of a page, from `Page.changes_to`, as an input of its run, from which `read_page` reads them.

    Raises:
        MisuseError: if they are too large.
    """
    if (size := _measure(changes)) > MAX_CHARS:
        raise MisuseError(
            f"changes of state and context have {MAX_CHARS:,} characters at most, not {size:,}: send them in parts, "
            "each with a message; the run goes on with what it had"
        )
    return f"{_CHANGE_START}{json.dumps(changes)}"
