"""Bodies of requests: their fields, types and bounds. Unknown fields are refused."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final, Literal, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, model_validator

from agentfsm.agents.admission import MAX_PARTS, MAX_TEXT_CHARS
from agentfsm.core.messages import AudioPart, FilePart, ImagePart, Media, Part, TextPart

_Text = Annotated[str, Field(min_length=1, max_length=MAX_TEXT_CHARS)]
_Note = Annotated[str, Field(max_length=10_000)]
_Name = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f]*$")]


class RequestBody(BaseModel):
    """Base of the bodies."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)


class PartBody(RequestBody):
    """A part of a prompt: text, or an image, a recording or a file."""

    type: Literal["text", "image", "audio", "file"]
    """Kind of the part."""

    text: str = Field(default="", max_length=MAX_TEXT_CHARS)
    """The text, of a part of text."""

    url: str = Field(default="", max_length=4_000_000)
    """`data:TYPE;base64,...` with the content of any other part, or an https address that the provider fetches."""

    name: str = Field(default="", max_length=200)
    """Name of a file."""

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        if self.type == "text" and (not self.text or self.url or self.name):
            raise ValueError("a part of text has `text`, and neither `url` nor `name`")
        if self.type != "text" and (not self.url or self.text):
            raise ValueError("a part that is not text has `url`, and no `text`")
        return self

    def to_part(self) -> Part:
        """Return the part.

        Raises:
            MisuseError: when the URL is not one of this kind of part.
        """
        if self.type == "text":
            return TextPart(text=self.text)
        part = _KINDS[self.type](url=self.url)
        return FilePart(url=part.url, name=self.name) if isinstance(part, FilePart) else part


_KINDS: Final[dict[str, type[Media]]] = {"image": ImagePart, "audio": AudioPart, "file": FilePart}

PromptBody: TypeAlias = _Text | Annotated[list[PartBody], Field(min_length=1, max_length=MAX_PARTS)]
"""Text, or up to 20 parts."""


def read_prompt(body: PromptBody) -> str | tuple[Part, ...]:
    """Return the text or the parts of a prompt, as the client sends them.

    Raises:
        MisuseError: when a URL is not one of its kind of part.
    """
    return body if isinstance(body, str) else tuple([each.to_part() for each in body])


class StartBody(RequestBody):
    """A new run."""

    prompt: PromptBody
    """The task."""

    agent: _Name | None = None
    """Name of the agent; it may be left out if the server has one."""

    session: _Name | None = None
    """Name of a conversation of the caller, which the run continues."""

    metadata: dict[str, Any] = Field(default_factory=dict)
    """Data of the caller's own, stored with the run."""

    wait_s: float = Field(default=0, ge=0, le=60)
    """Seconds that the answer may wait for the end of the run."""


class InputBody(RequestBody):
    """Input for a run."""

    text: PromptBody
    """Text for the model, or parts."""

    key: _Name | None = None
    """Idempotency key: the run accepts one input for each key."""

    priority: Literal["high", "normal", "low"] = "normal"
    """Order in which waiting inputs are read."""


class ApproveBody(RequestBody):
    """Approval of a call."""

    call_id: _Name
    """`call_id` of the item in `pending` of `GET /v1/runs/{run_id}`."""

    run_id: _Name | None = None
    """`run_id` of that item; it may be left out if no two items have the same `call_id`."""

    digest: _Name
    """`digest` of the item in `pending` of `GET /v1/runs/{run_id}`, as the person saw it."""

    arguments: dict[str, Any] | None = None
    """Arguments that replace the model's."""

    allow: list[_Name] = Field(default_factory=list, max_length=100)
    """Names of arguments: later calls of the tool with the same values run without this question in this session."""


class RevokeBody(RequestBody):
    """End of an allowance."""

    allowance: Annotated[str, Field(min_length=1, max_length=1_000)]
    """`id` of the item in `GET /v1/runs/{run_id}/allowances`."""


class RejectBody(RequestBody):
    """Rejection of a call."""

    call_id: _Name
    """`call_id` of the item in `pending` of `GET /v1/runs/{run_id}`."""

    run_id: _Name | None = None
    """`run_id` of that item; it may be left out if no two items have the same `call_id`."""

    message: _Note = ""
    """The reason, for the model."""


class ShownCall(RequestBody):
    """A call as the person saw it: an item of `pending` of `GET /v1/runs/{run_id}`."""

    call_id: _Name
    """`call_id` of the item."""

    digest: _Name
    """`digest` of the item."""

    run_id: _Name | None = None
    """`run_id` of the item; it may be left out if no two items have the same `call_id`."""


class DecideBody(RequestBody):
    """Decisions on several calls. Calls in neither list go on waiting."""

    approve: list[ShownCall] = Field(default_factory=list, max_length=1_000)
    """Calls that may run."""

    reject: list[ShownCall] = Field(default_factory=list, max_length=1_000)
    """Calls that must not run."""

    message: _Note = ""
    """The reason of the rejections, for the model."""


class AnswerBody(RequestBody):
    """Answer to a question."""

    call_id: _Name
    """`call_id` of the item in `pending` of `GET /v1/runs/{run_id}`."""

    run_id: _Name | None = None
    """`run_id` of that item; it may be left out if no two items have the same `call_id`."""

    content: _Text | dict[str, Any] | None = None
    """The result, or the answer to a tool's questions."""

    digest: _Name | None = None
    """`digest` of that item, as the person saw it."""

    failed: bool = False
    """Whether a result is an error."""

    declined: bool = False
    """Whether the person declines to answer."""


class LoginBody(RequestBody):
    """Login of the user of a run. Without `key`, the answer has a link."""

    call_id: _Name
    """`call_id` of the item in `pending` of `GET /v1/runs/{run_id}`."""

    run_id: _Name | None = None
    """`run_id` of that item; it may be left out if no two items have the same `call_id`."""

    key: _Text | None = None
    """The user's key, for a server that takes one. It goes to the token store only."""


class SettleBody(RequestBody):
    """Outcome of a call whose worker died. One of `result`, `failed` and `rerun` is given."""

    call_id: _Name
    """`call_id` of the item in `pending` of `GET /v1/runs/{run_id}`."""

    run_id: _Name | None = None
    """`run_id` of that item; it may be left out if no two items have the same `call_id`."""

    result: _Text | None = None
    """Result of the call, if it succeeded."""

    failed: _Text | None = None
    """Error of the call, if it failed."""

    rerun: bool = False
    """Whether to run the call again, with the same idempotency key."""


class StopBody(RequestBody):
    """Reason of a pause or a cancellation."""

    message: _Note = ""
    """The reason, for people."""


class StreamTokenBody(RequestBody):
    """A token for the event stream of a run."""

    ttl_s: int = Field(default=300, ge=1, le=3_600)
    """Seconds for which it is valid."""


class ForkBody(RequestBody):
    """A run that begins with the first events of another. A worker executes it, with the effects of its calls."""

    at: int | None = Field(default=None, ge=0)
    """Number of events to copy; by default all, except the event that ended the run."""

    prompt: PromptBody | None = None
    """Replacement for the first message."""

    edit: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Replacements of copied events by version, each in the form of `GET .../journal`."""

    withhold: bool = False
    """Whether calls of tools that are not read-only are refused, so that the run only shows them."""


class FeedbackBody(RequestBody):
    """A person's opinion of a run."""

    rating: int = Field(ge=1, le=5)
    """From 1 (bad) to 5 (good)."""

    comment: _Note = ""
    """The reasons."""


class EmptyBody(RequestBody):
    """No fields."""
