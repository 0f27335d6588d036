"""The fields of messages, items and their parts in OpenAI's form: each is honoured, or refused with a reason.

Calls, results and reasoning of other turns are left out as a whole, and so are their fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import attrs

from agentfsm.core.value import Value
from agentfsm.serve.dialects.openai_fields import CHAT, RESPONSES, RefusedFieldError


@attrs.frozen(kw_only=True)
class ItemForm(Value):
    """The fields of a kind of message or part. Null is taken as if the field were left out."""

    api: str
    """Endpoint that knows it."""

    name: str
    """Role of the message, or type of the item or part."""

    honoured: tuple[str, ...]
    """Fields that are read; `image_url.url` is `url` in the object `image_url`."""

    echoed: tuple[str, ...] = ()
    """Fields of a reply that clients send back with it. They describe the reply, and change nothing in it."""

    refused: Mapping[str, str] = attrs.field(factory=dict)
    """Other fields of OpenAI's, with the reason for people."""


_BREAKPOINT: Final = {"prompt_cache_breakpoint": "the agent manages the caches of its provider"}
_FILE: Final = "files are not kept here: send the content"
_CHAT_FORMS: Final = (
    *[ItemForm(api=CHAT, name=role, honoured=("role", "content", "name")) for role in ("system", "developer", "user")],
    ItemForm(
        api=CHAT,
        name="assistant",
        honoured=("role", "content", "refusal", "name"),
        echoed=("annotations", "reasoning_content", "tool_calls", "function_call"),
        refused={"audio": "answers are texts"},
    ),
    ItemForm(api=CHAT, name="text", honoured=("type", "text"), refused=_BREAKPOINT),
    ItemForm(api=CHAT, name="refusal", honoured=("type", "refusal")),
    ItemForm(api=CHAT, name="image_url", honoured=("type", "image_url.url", "image_url.detail"), refused=_BREAKPOINT),
    ItemForm(
        api=CHAT, name="input_audio", honoured=("type", "input_audio.data", "input_audio.format"), refused=_BREAKPOINT
    ),
    ItemForm(
        api=CHAT,
        name="file",
        honoured=("type", "file.file_data", "file.filename"),
        refused={"file.file_id": _FILE, **_BREAKPOINT},
    ),
)
_RESPONSE_FORMS: Final = (
    *[
        ItemForm(api=RESPONSES, name=role, honoured=("type", "role", "content"), echoed=("id", "status"))
        for role in ("system", "developer", "user")
    ],
    ItemForm(api=RESPONSES, name="assistant", honoured=("type", "role", "content"), echoed=("id", "status", "phase")),
    ItemForm(api=RESPONSES, name="item_reference", honoured=("type", "id")),
    *[
        ItemForm(api=RESPONSES, name=kind, honoured=("type", "text"), refused=_BREAKPOINT)
        for kind in ("input_text", "text")
    ],
    ItemForm(api=RESPONSES, name="output_text", honoured=("type", "text"), echoed=("annotations", "logprobs")),
    ItemForm(api=RESPONSES, name="refusal", honoured=("type", "refusal")),
    ItemForm(
        api=RESPONSES,
        name="input_image",
        honoured=("type", "image_url", "detail"),
        refused={"file_id": _FILE, **_BREAKPOINT},
    ),
    ItemForm(
        api=RESPONSES,
        name="input_file",
        honoured=("type", "file_data", "file_url", "filename"),
        refused={"file_id": _FILE, "detail": "a file has no detail here: leave it out", **_BREAKPOINT},
    ),
)
ITEM_FORMS: Final = (*_CHAT_FORMS, *_RESPONSE_FORMS)
_BY_NAME: Final = {(form.api, form.name): form for form in ITEM_FORMS}


def check_message(api: str, path: str, message: Mapping[str, Any]) -> None:
    """Check the fields of a message and of its parts. Parts without a known type are left to who reads them.

    Args:
        api: Path of the endpoint.
        path: Path of the message in the request.
        message: The message.

    Raises:
        RefusedFieldError: when the role or a field is refused.
    """
    role = message.get("role")
    if (api, role) not in _BY_NAME:
        text = f"{path} is refused: the role {str(role)[:40]!r}: give system, developer, user or assistant"
        raise RefusedFieldError(path, text)
    check_item(api, path, str(role), message)
    content = message.get("content")
    for place, part in enumerate(content if isinstance(content, list) else ()):
        if isinstance(part, Mapping) and (api, kind := part.get("type")) in _BY_NAME:
            check_item(api, f"{path}.content[{place}]", str(kind), part)


def check_item(api: str, path: str, name: str, item: Mapping[str, Any]) -> None:
    """Check the fields of a message, an item or a part, without its own parts.

    Raises:
        RefusedFieldError: when a field is refused.
    """
    form = _BY_NAME[api, name]
    objects = {each.partition(".")[0] for each in form.honoured if "." in each}
    fields = {key: value for key, value in item.items() if key not in objects or not isinstance(value, Mapping)}
    for key in objects & item.keys() - fields.keys():
        fields |= {f"{key}.{each}": value for each, value in item[key].items()}
    known = {*form.honoured, *form.echoed, *objects}
    for key, value in fields.items():
        if key in known or (key in form.refused and value is None):
            continue
        why = form.refused.get(key, f"it is not a field of {name!r} that this server knows: leave it out")
        raise RefusedFieldError(f"{path}.{key}", f"{path}.{key} is refused: {why}")
