"""The fields of requests in OpenAI's form: each is honoured, or refused with a reason; none is ignored.

What a served agent decides itself is refused: its tools, its output type and its limits. Settings of model requests,
such as the temperature, are those of the client for its run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import attrs

from agentfsm.core.errors import MisuseError
from agentfsm.core.settings import Settings
from agentfsm.core.value import Value

if TYPE_CHECKING:
    from agentfsm.agents.agent import Agent
    from agentfsm.engine.execution.output import OutputSpec

CHAT: Final = "/v1/chat/completions"
RESPONSES: Final = "/v1/responses"
# Largest whole number of JavaScript, which its schemas name as the bounds of every integer.
_MAX_SAFE_INTEGER: Final = 2**53 - 1
# Beginning of the keys under which fields are kept in the metadata of a run.
KEPT: Final = "openai_"


class RefusedFieldError(MisuseError):
    """A field of a request is refused.

    Attributes:
        param: Path of the field.
    """

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


@attrs.frozen(kw_only=True)
class RequestField(Value):
    """A field, and what is done with it. Null is always taken as if the field were left out."""

    name: str
    """Its name, or its path in an object, such as `reasoning.effort`."""

    apis: tuple[str, ...] = (CHAT, RESPONSES)
    """Endpoints that know it."""

    honoured: str = ""
    """What it does, for people; empty if each value is refused."""

    refused: str = ""
    """Values that are refused, why, and what to do, for people; empty if none is."""

    neutral: tuple[Any, ...] = ()
    """Values that ask for what is done anyway."""

    setting: str = ""
    """Field of the `Settings` of the run that it sets."""

    is_kept: bool = False
    """Whether it is kept in the metadata of the run, under `openai_NAME`."""

    is_read: bool = False
    """Whether the endpoint reads it itself."""


_C: Final = (CHAT,)
_R: Final = (RESPONSES,)
_TOOLS: Final = "the tools are the agent's: give it the tool, or leave it out"
_FORM: Final = "a form that the agent's `output_type` does not have: set it where the agent is defined"
_LIMITS: Final = "the agent has limits of its own"
_CACHE: Final = "the agent manages the caches of its provider"
_SAMPLING: Final = "any other value: there is no such setting of an agent"
_PRICE: Final = "any other value: the tier is the agent's"
_HERE: Final = "there is nothing like it here"
_KEPT: Final = "kept in the run's metadata as `openai_NAME`; user and tenant are those of the key"
_MAX: Final = "most tokens of each reply of the model, never more than the agent's own `max_tokens`"
_STREAMED: Final = "any other value: pieces are not padded"

FIELDS: Final = (
    RequestField(name="model", is_read=True, honoured="name of the agent", refused="names not in `/v1/models` (404)"),
    RequestField(
        name="messages",
        apis=_C,
        is_read=True,
        honoured="texts, images, recordings and files",
        refused="a last message that is not the user's; parts that the agent's model does not take",
    ),
    RequestField(
        name="input",
        apis=_R,
        is_read=True,
        honoured="a text, or items: messages with texts, images and files, and `item_reference` to an answer",
        refused="a last item that is not the user's; other items than messages, reasoning and calls",
    ),
    RequestField(name="instructions", apis=_R, is_read=True, honoured="words of the user before the prompt"),
    RequestField(name="stream", is_read=True, honoured="whether the answer comes as events"),
    RequestField(
        name="stream_options.include_usage", apis=_C, is_read=True, honoured="whether the stream ends with the usage"
    ),
    RequestField(name="stream_options.include_obfuscation", neutral=(False,), honoured="`false`", refused=_STREAMED),
    RequestField(
        name="metadata", is_read=True, honoured="stored with the run; `conversation` in it names the conversation"
    ),
    RequestField(
        name="conversation",
        apis=_R,
        is_read=True,
        honoured="name of the conversation, any that the client chooses; `input` has the new messages only",
        refused="together with `previous_response_id`",
    ),
    RequestField(
        name="previous_response_id",
        apis=_R,
        is_read=True,
        honoured="the run of this response goes on, or a new run goes on after it; `input` has the new messages only",
        refused="ids of responses that the caller did not start (400)",
    ),
    RequestField(
        name="background",
        apis=_R,
        is_read=True,
        honoured="`true` answers at once; `GET /v1/responses/{response_id}` has the state",
    ),
    RequestField(
        name="background_options.completion_window",
        apis=_R,
        neutral=("soonest",),
        honoured="`soonest`",
        refused="any other value: runs begin at once",
    ),
    RequestField(
        name="background_options.continuation_id", apis=_R, refused="name the response as `previous_response_id`"
    ),
    RequestField(name="temperature", setting="temperature", honoured="of the model, in this run"),
    RequestField(name="top_p", setting="top_p", honoured="of the model, in this run"),
    RequestField(name="seed", apis=_C, setting="seed", honoured="of the model, in this run"),
    RequestField(name="stop", apis=_C, setting="stop", honoured="ends each reply of the model"),
    RequestField(name="max_tokens", apis=_C, setting="max_tokens", honoured=_MAX),
    RequestField(name="max_completion_tokens", apis=_C, setting="max_tokens", honoured=_MAX),
    RequestField(name="max_output_tokens", apis=_R, setting="max_tokens", honoured=_MAX),
    RequestField(name="reasoning_effort", apis=_C, setting="reasoning_effort", honoured="of the model, in this run"),
    RequestField(name="reasoning.effort", apis=_R, setting="reasoning_effort", honoured="of the model, in this run"),
    RequestField(name="reasoning.context", apis=_R, neutral=("auto",), honoured="`auto`", refused=_SAMPLING),
    RequestField(name="reasoning.mode", apis=_R, neutral=("standard",), honoured="`standard`", refused=_SAMPLING),
    RequestField(name="reasoning.summary", apis=_R, refused="the thinking of the agent is not shown here"),
    RequestField(name="reasoning.generate_summary", apis=_R, refused="the thinking of the agent is not shown here"),
    RequestField(
        name="response_format",
        apis=_C,
        is_read=True,
        honoured="`text`; `json_object` and `json_schema` that each answer of the agent fits",
        refused=_FORM,
    ),
    RequestField(
        name="text.format",
        apis=_R,
        is_read=True,
        honoured="`text`; `json_object` and `json_schema` that each answer of the agent fits",
        refused=_FORM,
    ),
    RequestField(name="verbosity", apis=_C, neutral=("medium",), honoured="`medium`", refused=_SAMPLING),
    RequestField(name="text.verbosity", apis=_R, neutral=("medium",), honoured="`medium`", refused=_SAMPLING),
    RequestField(name="tools", neutral=([],), honoured="an empty list", refused=_TOOLS),
    RequestField(
        name="tool_choice",
        neutral=("auto", "none"),
        honoured="`auto` and `none`: no tool of the client is called",
        refused=_TOOLS,
    ),
    RequestField(
        name="parallel_tool_calls",
        neutral=(True, False),
        honoured="any: no tool of the client is called",
        refused="",
    ),
    RequestField(name="functions", apis=_C, neutral=([],), honoured="an empty list", refused=_TOOLS),
    RequestField(name="function_call", apis=_C, neutral=("auto", "none"), honoured="`auto` and `none`", refused=_TOOLS),
    RequestField(name="web_search_options", apis=_C, refused=_TOOLS),
    RequestField(name="max_tool_calls", apis=_R, refused=_LIMITS),
    RequestField(name="n", apis=_C, neutral=(1,), honoured="1", refused="more: a run has one answer"),
    RequestField(name="frequency_penalty", apis=_C, neutral=(0,), honoured="0", refused=_SAMPLING),
    RequestField(name="presence_penalty", apis=_C, neutral=(0,), honoured="0", refused=_SAMPLING),
    RequestField(name="logit_bias", apis=_C, neutral=({},), honoured="an empty object", refused=_SAMPLING),
    RequestField(name="logprobs", apis=_C, neutral=(False,), honoured="`false`", refused="`true`: they are not kept"),
    RequestField(name="top_logprobs", neutral=(0,), honoured="0", refused="more: they are not kept"),
    RequestField(
        name="modalities", apis=_C, neutral=(["text"],), honoured='`["text"]`', refused="audio: answers are texts"
    ),
    RequestField(name="audio", apis=_C, refused="answers are texts"),
    RequestField(name="prediction", apis=_C, refused="the requests of the model are the agent's"),
    RequestField(name="prompt", apis=_R, refused="the prompts are the agent's"),
    RequestField(
        name="include", apis=_R, neutral=([],), honoured="an empty list", refused="any entry: responses have texts only"
    ),
    RequestField(
        name="truncation",
        apis=_R,
        neutral=("auto",),
        honoured="`auto`: the agent keeps the window",
        refused="any other value: the agent keeps the window",
    ),
    RequestField(name="context_management", apis=_R, refused="the agent keeps the window"),
    RequestField(
        name="store",
        apis=_R,
        neutral=(True,),
        honoured="`true`",
        refused="`false`: each run is stored; delete it with `DELETE /v1/runs/{run_id}`",
    ),
    RequestField(
        name="store",
        apis=_C,
        neutral=(True, False),
        honoured="any: each run is stored, and none is used for training",
    ),
    RequestField(name="service_tier", neutral=("auto", "default"), honoured="`auto` and `default`", refused=_PRICE),
    RequestField(name="user", is_kept=True, honoured=_KEPT),
    RequestField(name="safety_identifier", is_kept=True, honoured=_KEPT),
    RequestField(name="prompt_cache_key", is_kept=True, honoured=_KEPT),
    RequestField(name="prompt_cache_options", refused=_CACHE),
    RequestField(name="prompt_cache_retention", refused=_CACHE),
    RequestField(name="moderation", refused="the guards are the agent's"),
    RequestField(name="image", apis=_R, refused=_HERE),
    RequestField(name="access_programs", apis=_R, refused=_HERE),
)
_BY_NAME: Final = {(api, each.name): each for each in FIELDS for api in each.apis}
# Fields whose value is an object with fields of its own.
_OBJECTS: Final = {(api, each.name.partition(".")[0]) for each in FIELDS for api in each.apis if "." in each.name}


@attrs.frozen(kw_only=True)
class RequestTerms(Value):
    """What a request asks for, beside its messages."""

    settings: Settings | None = None
    """Settings of the run; None if the request has none."""

    kept: dict[str, Any] = attrs.field(factory=dict)
    """Fields that are kept in the metadata of the run."""

    is_formed: bool = False
    """Whether the answer has to be JSON."""


def read_terms(api: str, agent: Agent[Any], body: Mapping[str, Any]) -> RequestTerms:
    """Return what a request asks for.

    Args:
        api: Path of the endpoint.
        agent: The agent that is asked.
        body: All fields of the request.

    Raises:
        RefusedFieldError: when a field is refused.
    """
    settings: dict[str, Any] = {}
    kept: dict[str, Any] = {}
    is_formed = False
    for name, value in _flatten(api, body).items():
        field = _BY_NAME.get((api, name))
        if field is None:
            raise RefusedFieldError(name, f"{name!r} is not a field of {api} that this server knows: leave it out")
        if value is None or value in field.neutral:
            continue
        if name in ("response_format", "text.format"):
            is_formed = check_format(agent, name, value)
        elif field.is_kept:
            kept[KEPT + name] = value
        elif field.setting:
            given: Any = [value] if field.setting == "stop" and isinstance(value, str) else value
            if field.setting in settings:
                raise RefusedFieldError(name, f"{name!r} repeats another field: leave one of them out")
            try:
                flaw = agent.model.unsupported_settings(Settings(**dict[str, Any]({field.setting: given})))
            except MisuseError as error:
                flaw = str(error)
            if flaw is not None:
                raise RefusedFieldError(name, f"{name} ({str(value)[:80]}) is refused: {flaw}")
            settings[field.setting] = given
        elif not field.is_read:
            shown = value if isinstance(value, str | int | float) else type(value).__name__
            raise RefusedFieldError(name, f"{name} ({str(shown)[:80]}) is refused: {field.refused}")
    own = agent.settings.max_tokens if isinstance(agent.settings, Settings) else None
    if own is not None and "max_tokens" in settings:
        settings["max_tokens"] = min(own, settings["max_tokens"])
    return RequestTerms(settings=Settings(**settings) if settings else None, kept=kept, is_formed=is_formed)


def _flatten(api: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a body by their paths."""
    flat: dict[str, Any] = {}
    for name, value in body.items():
        if (api, name) not in _OBJECTS:
            flat[name] = value
        elif isinstance(value, Mapping):
            flat |= {f"{name}.{key}": each for key, each in value.items()}
        elif value is not None:
            raise RefusedFieldError(name, f"{name!r} must be an object")
    return flat


# The form of the answer.


def check_format(agent: Agent[Any], name: str, asked: Any) -> bool:
    """Return whether the answer has to be JSON. A form that not every answer of the agent fits is refused.

    Raises:
        RefusedFieldError: when it is refused.
    """
    kind = asked.get("type") if isinstance(asked, Mapping) else None
    if kind == "text":
        return False
    if kind not in ("json_object", "json_schema"):
        raise RefusedFieldError(name, f"{name} must have the type text, json_object or json_schema")
    spec: OutputSpec | None = agent.driver.config.output_spec
    form = None if spec is None else spec.form
    if form is None or form.takes_text:
        raise RefusedFieldError(
            name,
            f"{name} ({kind}) is refused: {agent.name} answers with text, and a form is set where the agent is "
            "defined, as output_type=; leave it out, or ask for an agent with this output_type",
        )
    own = form.schema["properties"]["result"] if form.is_wrapped else form.schema  # type: ignore[index,call-overload]
    if kind == "json_object":
        fits = isinstance(own, Mapping) and own.get("type") == "object"
        schema: Any = {"type": "object"}
    else:
        given = asked.get("json_schema", asked)
        schema = given.get("schema") if isinstance(given, Mapping) else None
        if not isinstance(schema, Mapping):
            raise RefusedFieldError(name, f"{name} has no schema")
        try:
            fits = _Cover(asked_root=schema, own_root=form.schema).covers(schema, own)
        except RecursionError:
            fits = False
    if not fits:
        raise RefusedFieldError(
            name,
            f"{name} ({kind}) is refused: not every answer of {agent.name} fits it, and its form is set where the "
            "agent is defined, as output_type=; leave it out, or send the schema of that type",
        )
    return True


# Keywords that change nothing of what fits, or that `_Cover` reads.
_READ_KEYWORDS: Final = frozenset(
    {"title", "description", "default", "examples", "$schema", "$id", "$comment", "$defs", "definitions", "$ref"}
    | {"type", "const", "enum", "properties", "required", "additionalProperties", "items", "anyOf", "oneOf"}
)


@attrs.frozen(kw_only=True)
class _Cover(Value):
    """Compares the schema that a client asks for with that of the agent, whose answers have all their properties."""

    asked_root: Mapping[str, Any]
    own_root: Mapping[str, Any]
    compared: dict[tuple[int, int], tuple[Any, Any, bool]] = attrs.field(factory=dict, eq=False)
    """Pairs that were compared, with the result; true while they are, so that a schema may contain itself."""

    def covers(self, asked: Any, own: Any) -> bool:
        """Return whether each value that fits `own` fits `asked`. False if that is not certain."""
        asked, own = _resolve(asked, self.asked_root), _resolve(own, self.own_root)
        if asked is True or asked == {}:
            return True
        if not isinstance(asked, Mapping) or not isinstance(own, Mapping) or "$ref" in {*asked, *own}:
            return False
        pair = id(asked), id(own)
        if pair not in self.compared:
            self.compared[pair] = asked, own, True
            self.compared[pair] = asked, own, self._covers_branches(asked, own)
        return self.compared[pair][2]

    def _covers_branches(self, asked: Mapping[str, Any], own: Mapping[str, Any]) -> bool:
        if branches := own.get("anyOf") or own.get("oneOf"):
            return all(self.covers(asked, each) for each in branches)
        if branches := asked.get("anyOf") or asked.get("oneOf"):
            return any(self.covers(each, own) for each in branches)
        if isinstance(own.get("type"), list):
            return all(self.covers(asked, {**own, "type": each}) for each in own["type"])
        return self._covers_value(asked, own)

    def _covers_value(self, asked: Mapping[str, Any], own: Mapping[str, Any]) -> bool:
        values = [own["const"]] if "const" in own else own.get("enum")
        wanted = [asked["const"]] if "const" in asked else asked.get("enum")
        if wanted is not None and (values is None or not all(each in wanted for each in values)):
            return False
        types = asked.get("type", [])
        types = types if isinstance(types, list) else [types]
        kind = own.get("type")
        if types and kind not in types and not (kind == "integer" and "number" in types):
            return False
        for keyword, bound in asked.items():
            is_no_bound = isinstance(bound, int | float) and abs(bound) >= _MAX_SAFE_INTEGER
            if keyword not in _READ_KEYWORDS and not is_no_bound and own.get(keyword) != bound:
                return False
        if "items" in asked and kind == "array" and not self.covers(asked["items"], own.get("items")):
            return False
        if kind != "object":
            return True
        properties, more = own.get("properties", {}), own.get("additionalProperties")
        known, others = asked.get("properties", {}), asked.get("additionalProperties", True)
        if not properties and others is not True and not (more is False or self.covers(others, more)):
            return False
        return set(asked.get("required", ())) <= set(properties) and all(
            self.covers(known.get(name, others), each) for name, each in properties.items()
        )


def _resolve(schema: Any, root: Mapping[str, Any]) -> Any:
    """Follow the references of a schema; a reference that leads nowhere is returned as it is."""
    for _ in range(100):
        if not isinstance(schema, Mapping) or not isinstance(name := schema.get("$ref"), str):
            break
        found: Any = root
        for key in name.removeprefix("#").strip("/").split("/") if name != "#" else ():
            found = found.get(key) if isinstance(found, Mapping) else None
        if found is None:
            return None
        schema = found
    return schema
