"""Serve resources, which the client's program reads, and prompts, which its user picks."""

from __future__ import annotations

import base64
import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from inspect import isawaitable, iscoroutinefunction
from typing import Any, Final, TypeAlias, TypeVar

import anyio
import attrs
import mcp.types as m
from mcp import MCPError
from mcp.shared.path_security import contains_path_traversal, is_absolute_path
from mcp.shared.uri_template import InvalidUriTemplate, UriTemplate

from agentfsm._lib.concurrency import start_in_thread
from agentfsm.core.errors import MisuseError
from agentfsm.core.messages import AssistantMessage, ImagePart, TextPart, UserMessage, read_inline_data
from agentfsm.core.value import Value
from agentfsm.tools.queue.result_text import describe_error, render_text

T = TypeVar("T")

# Seconds that reading a resource or rendering a prompt may take, as for a tool call.
TIMEOUT_S: Final = 30.0

# Completion values in one answer; the protocol allows no more.
MAX_COMPLETIONS: Final = 100

ReadFunction: TypeAlias = Callable[..., Any]
# Takes the text typed so far and the arguments that are already filled in; returns proposed texts, best first.
CompletionFunction: TypeAlias = Callable[[str, Mapping[str, str]], Any]
RenderedPrompt: TypeAlias = "str | Sequence[UserMessage | AssistantMessage]"


def _parse_template(resource: Resource) -> UriTemplate:
    uri = resource.uri
    if "://" not in uri:
        raise MisuseError(f"a resource cannot have the URI {uri!r}: begin with a scheme, such as project://{uri}")
    try:
        return UriTemplate.parse(uri)
    except InvalidUriTemplate as error:
        raise MisuseError(f"a resource cannot have the URI {uri!r}: {error}") from None


def _check_completions(offer: Resource | Prompt, _attribute: object, given: Mapping[str, CompletionFunction]) -> None:
    if unknown := [name for name in given if name not in offer.parameter_names]:
        names = ", ".join(offer.parameter_names) or "none"
        raise MisuseError(f"{offer.name!r} has complete= for {unknown[0]!r}, which it does not take; it takes: {names}")


@attrs.frozen(kw_only=True)
class Resource(Value):
    """Data that clients can read: `Resource(uri="project://tasks/summary", name="summary", read=summary)`.

    Raises:
        MisuseError: when the URI is invalid, or `complete` names an unknown variable.
    """

    uri: str
    """URI with a scheme, or a URI template (RFC 6570) such as "project://tasks/{task_id}". The variables of a template
    are passed to `read` as texts. Values with "..", an absolute path or a zero byte are refused.
    """

    name: str
    """Name that clients show."""

    read: ReadFunction = attrs.field(repr=False)
    """Function that returns the contents: text, bytes, or a JSON value. It takes the template's variables by name. A
    plain function runs in a thread; an async one is awaited.
    """

    description: str = ""
    """Description that clients show; empty: none is sent."""

    mime_type: str | None = None
    """MIME type of the contents. None: text/plain for text, application/octet-stream for bytes, application/json for
    other values.
    """

    complete: Mapping[str, CompletionFunction] = attrs.field(factory=dict, repr=False, validator=_check_completions)
    """Functions that propose values for the template's variables, by variable. A plain function runs in a thread; an
    async one is awaited.
    """

    _template: UriTemplate = attrs.field(
        init=False, repr=False, eq=False, default=attrs.Factory(_parse_template, takes_self=True)
    )

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """The names of the template's variables."""
        return tuple(self._template.variable_names)

    @property
    def is_template(self) -> bool:
        """Whether the URI is a template."""
        return bool(self._template.variables)

    def match(self, uri: str) -> Mapping[str, Any] | None:
        """Return the variables in a URI, or None if the URI does not match.

        Raises:
            MCPError: when a variable holds an unsafe path.
        """
        if (found := self._template.match(uri)) is None:
            return None
        for name, value in found.items():
            each = value if isinstance(value, list) else [value]
            if any("\0" in text or contains_path_traversal(text) or is_absolute_path(text) for text in each):
                raise MCPError(m.INVALID_PARAMS, f"the resource was not read: {name!r} has a path that is not allowed")
        return found

    def to_mcp(self) -> m.Resource:
        """Return the resource in the protocol's form."""
        return m.Resource(uri=self.uri, name=self.name, description=self.description or None, mime_type=self.mime_type)

    def to_mcp_template(self) -> m.ResourceTemplate:
        """Return the template in the protocol's form."""
        return m.ResourceTemplate(
            uri_template=self.uri, name=self.name, description=self.description or None, mime_type=self.mime_type
        )

    async def load_contents(self, uri: str, variables: Mapping[str, Any]) -> m.ReadResourceResult:
        """Read the contents.

        Raises:
            MCPError: when `read` fails or times out.
        """
        value = await call_user_function(partial(self.read, **variables), f"the resource {uri} could not be read")
        if isinstance(value, bytes | bytearray):
            blob, kind = base64.b64encode(value).decode(), self.mime_type or "application/octet-stream"
            return m.ReadResourceResult(contents=[m.BlobResourceContents(uri=uri, blob=blob, mime_type=kind)])
        kind = self.mime_type or ("text/plain" if isinstance(value, str) else "application/json")
        return m.ReadResourceResult(contents=[m.TextResourceContents(uri=uri, text=render_text(value), mime_type=kind)])


@attrs.frozen
class Argument(Value):
    """Argument of a prompt, which the user fills in."""

    name: str
    """Name of the parameter of `render` that receives the value."""

    description: str = ""
    """Description that clients show; empty: none is sent."""

    required: bool = True
    """Whether the prompt cannot be rendered without a value."""


def _as_tuple(arguments: Iterable[Argument]) -> tuple[Argument, ...]:
    return tuple(arguments)


@attrs.frozen(kw_only=True)
class Prompt(Value):
    """Prompt template that a user picks in a client: `Prompt(name="standup", render=standup)`."""

    name: str
    """Name by which clients list and request the prompt."""

    render: Callable[..., RenderedPrompt | Awaitable[RenderedPrompt]] = attrs.field(repr=False)
    """Function that takes the arguments by name, as texts, and returns the user's text or a list of messages. A plain
    function runs in a thread; an async one is awaited.
    """

    description: str = ""
    """Description that clients show; empty: none is sent."""

    arguments: tuple[Argument, ...] = attrs.field(
        default=attrs.Factory(lambda prompt: _read_arguments(prompt.render), takes_self=True), converter=_as_tuple
    )
    """Arguments of the prompt. Default: the parameters of `render`, where those without a default are required."""

    complete: Mapping[str, CompletionFunction] = attrs.field(factory=dict, repr=False, validator=_check_completions)
    """Functions that propose values for the arguments, by argument. A plain function runs in a thread; an async one is
    awaited.
    """

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """The names of the arguments."""
        return tuple([each.name for each in self.arguments])

    def to_mcp(self) -> m.Prompt:
        """Return the prompt in the protocol's form."""
        arguments = [
            m.PromptArgument(name=each.name, description=each.description or None, required=each.required)
            for each in self.arguments
        ]
        return m.Prompt(name=self.name, description=self.description or None, arguments=arguments or None)

    async def build_messages(self, given: Mapping[str, str]) -> m.GetPromptResult:
        """Render the prompt.

        Raises:
            MCPError: when an argument is missing or unknown, or `render` fails or times out.
        """
        missing = [each.name for each in self.arguments if each.required and each.name not in given]
        unknown = sorted(given.keys() - {*self.parameter_names})
        if missing or unknown:
            wrong = f"needs {', '.join(missing)}" if missing else f"has no {', '.join(unknown)}"
            takes = ", ".join(self.parameter_names) or "nothing"
            raise MCPError(m.INVALID_PARAMS, f"the prompt {self.name!r} {wrong}; it takes: {takes}")
        made = await call_user_function(
            partial(self.render, **given), f"the prompt {self.name!r} could not be rendered"
        )
        messages = [UserMessage(parts=(TextPart(text=made),))] if isinstance(made, str) else made
        return m.GetPromptResult(
            description=self.description or None,
            messages=[piece for each in messages for piece in _to_prompt_messages(each)],
        )


async def propose_completions(offer: Resource | Prompt, params: m.CompleteRequestParams) -> m.CompleteResult:
    """Propose values for an argument or variable; the result is empty if it has no completion function.

    Raises:
        MCPError: when the offer has no parameter of that name, or the completion function fails.
    """
    name = params.argument.name
    if name not in offer.parameter_names:
        names = ", ".join(offer.parameter_names) or "none"
        raise MCPError(m.INVALID_PARAMS, f"{offer.name!r} takes no {name[:100]!r}; it takes: {names}")
    known = {} if params.context is None else params.context.arguments or {}
    propose = offer.complete.get(name)
    values: list[str] = []
    if propose is not None:
        failure = f"no values could be proposed for {name!r} of {offer.name!r}"
        found = await call_user_function(partial(propose, params.argument.value, known), failure)
        values = [str(value) for value in found or ()]
    shown = m.Completion(values=values[:MAX_COMPLETIONS], total=len(values), has_more=len(values) > MAX_COMPLETIONS)
    return m.CompleteResult(completion=shown)


def _read_arguments(render: Callable[..., Any]) -> tuple[Argument, ...]:
    parameters = inspect.signature(render).parameters.values()
    return tuple(Argument(each.name, required=each.default is each.empty) for each in parameters)


def _to_prompt_messages(message: UserMessage | AssistantMessage) -> list[m.PromptMessage]:
    """Convert a message to the protocol's form: one prompt message for each part."""
    if isinstance(message, AssistantMessage):
        return [m.PromptMessage(role="assistant", content=m.TextContent(text=message.text))]
    return [m.PromptMessage(role="user", content=to_content_block(part)) for part in message.parts]


def to_content_block(part: Any) -> m.ContentBlock:
    """Convert a part to the protocol's form: its data if it is inline, else a link."""
    if isinstance(part, TextPart):
        return m.TextContent(text=part.text)
    carried = read_inline_data(part)
    if carried is None:
        return m.ResourceLink(uri=part.url, name=getattr(part, "name", "") or part.url)
    kind, data = carried
    if isinstance(part, ImagePart):
        return m.ImageContent(data=data, mime_type=kind)
    if kind.startswith("audio/"):
        return m.AudioContent(data=data, mime_type=kind)
    blob = m.BlobResourceContents(uri=f"attachment:{getattr(part, 'name', '') or 'file'}", blob=data, mime_type=kind)
    return m.EmbeddedResource(resource=blob)


async def call_user_function(function: Callable[[], Any], failure: str) -> Any:
    """Call a function of the application, plain (in a thread) or async.

    Args:
        function: The function, without parameters.
        failure: Beginning of the error message if the function fails.

    Raises:
        MCPError: when the function fails or times out.
    """
    inner = getattr(function, "func", function)
    with anyio.move_on_after(TIMEOUT_S):
        try:
            value = function() if iscoroutinefunction(inner) else await start_in_thread(function).wait()
            return await value if isawaitable(value) else value
        except MCPError:
            raise
        except Exception as error:  # the client gets the reason: the failing code is the application's own
            raise MCPError(m.INTERNAL_ERROR, f"{failure}: {describe_error(error)}") from error
    raise MCPError(m.INTERNAL_ERROR, f"{failure} within {TIMEOUT_S:g} s")
