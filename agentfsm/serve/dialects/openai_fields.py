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


@attrs.frozen
class RequestField(Value):
    """A field, and what is done with it. Null is always taken as if the field were left out."""

    name: str
    """Its name, or its path in an object, such as `reasoning.effort`."""

    honoured: str = ""
    """Effect of the field, for the docs; empty if the server refuses all its values."""

    refused: str = ""
    """Values that are refused, why, and what to do, for people; empty if none is."""

    apis: tuple[str, ...] = attrs.field(default=(CHAT, RESPONSES), kw_only=True)
    """Endpoints that know it."""

    neutral: tuple[Any, ...] = attrs.field(default=(), kw_only=True)
    """Values that ask for what is done anyway."""

    setting: str = attrs.field(default="", kw_only=True)
    """Field of the `Settings` of the run that it sets."""

    is_kept: bool = attrs.field(default=False, kw_only=True)
    """Whether it is kept in the metadata of the run, under `openai_NAME`."""

    is_read: bool = attrs.field(default=False, kw_only=True)
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
_RUN: Final = "of the model, in this run"
_FITS: Final = "`text`; `json_object` and `json_schema` that each answer of the agent fits"
_THINKING: Final = "the thinking of the agent is not shown here"
_STREAMED: Final = "any other value: pieces are not padded"

FIELDS: Final = (
    RequestField("model", "name of the agent", "names not in `/v1/models` (404)", is_read=True),
    RequestField(
        "messages",
        "texts, images, recordings and files",
        "a last message that is not the user's; parts that the agent's model does not take",
        apis=_C,
        is_read=True,
    ),
    RequestField(
        "input",
        "a text, or items: messages with texts, images and files, and `item_reference` to an answer",
        "a last item that is not the user's; other items than messages, reasoning and calls",
        apis=_R,
        is_read=True,
    ),
    RequestField("instructions", "words of the user before the prompt", apis=_R, is_read=True),
    RequestField("stream", "whether the answer comes as events", is_read=True),
    RequestField("stream_options.include_usage", "whether the stream ends with the usage", apis=_C, is_read=True),
    RequestField("stream_options.include_obfuscation", "`false`", _STREAMED, neutral=(False,)),
    RequestField("metadata", "stored with the run; `conversation` in it names the conversation", is_read=True),
    RequestField(
        "conversation",
        "name of the conversation, any that the client chooses; `input` has the new messages only",
        "together with `previous_response_id`",
        apis=_R,
        is_read=True,
    ),
    RequestField(
        "previous_response_id",
        "the run of this response goes on, or a new run goes on after it; `input` has the new messages only",
        "ids of responses that the caller did not start (400)",
        apis=_R,
        is_read=True,
    ),
    RequestField(
        "background", "`true` answers at once; `GET /v1/responses/{response_id}` has the state", apis=_R, is_read=True
    ),
    RequestField(
        "background_options.completion_window",
        "`soonest`",
        "any other value: runs begin at once",
        apis=_R,
        neutral=("soonest",),
    ),
    RequestField("background_options.continuation_id", "", "name the response as `previous_response_id`", apis=_R),
    RequestField("temperature", _RUN, setting="temperature"),
    RequestField("top_p", _RUN, setting="top_p"),
    RequestField("seed", _RUN, apis=_C, setting="seed"),
    RequestField("stop", "ends each reply of the model", apis=_C, setting="stop"),
    RequestField("max_tokens", _MAX, apis=_C, setting="max_tokens"),
    RequestField("max_completion_tokens", _MAX, apis=_C, setting="max_tokens"),
    RequestField("max_output_tokens", _MAX, apis=_R, setting="max_tokens"),
    RequestField("reasoning_effort", _RUN, apis=_C, setting="reasoning_effort"),
    RequestField("reasoning.effort", _RUN, apis=_R, setting="reasoning_effort"),
    RequestField("reasoning.context", "`auto`", _SAMPLING, apis=_R, neutral=("auto",)),
    RequestField("reasoning.mode", "`standard`", _SAMPLING, apis=_R, neutral=("standard",)),
    RequestField("reasoning.summary", "", _THINKING, apis=_R),
    RequestField("reasoning.generate_summary", "", _THINKING, apis=_R),
    RequestField("response_format", _FITS, _FORM, apis=_C, is_read=True),
    RequestField("text.format", _FITS, _FORM, apis=_R, is_read=True),
    RequestField("verbosity", "`medium`", _SAMPLING, apis=_C, neutral=("medium",)),
    RequestField("text.verbosity", "`medium`", _SAMPLING, apis=_R, neutral=("medium",)),
    RequestField("tools", "an empty list", _TOOLS, neutral=([],)),
    RequestField("tool_choice", "`auto` and `none`: no tool of the client is called", _TOOLS, neutral=("auto", "none")),
    RequestField("parallel_tool_calls", "any: no tool of the client is called", neutral=(True, False)),
    RequestField("functions", "an empty list", _TOOLS, apis=_C, neutral=([],)),
    RequestField("function_call", "`auto` and `none`", _TOOLS, apis=_C, neutral=("auto", "none")),
    RequestField("web_search_options", "", _TOOLS, apis=_C),
    RequestField("max_tool_calls", "", _LIMITS, apis=_R),
    RequestField("n", "1", "more: a run has one answer", apis=_C, neutral=(1,)),
    RequestField("frequency_penalty", "0", _SAMPLING, apis=_C, neutral=(0,)),
    RequestField("presence_penalty", "0", _SAMPLING, apis=_C, neutral=(0,)),
    RequestField("logit_bias", "an empty object", _SAMPLING, apis=_C, neutral=({},)),
    RequestField("logprobs", "`false`", "`true`: they are not kept", apis=_C, neutral=(False,)),
    RequestField("top_logprobs", "0", "more: they are not kept", neutral=(0,)),
    RequestField("modalities", '`["text"]`', "audio: answers are texts", apis=_C, neutral=(["text"],)),
    RequestField("audio", "", "answers are texts", apis=_C),
    RequestField("prediction", "", "the requests of the model are the agent's", apis=_C),
    RequestField("prompt", "", "the prompts are the agent's", apis=_R),
    RequestField("include", "an empty list", "any entry: responses have texts only", apis=_R, neutral=([],)),
    RequestField(
        "truncation",
        "`auto`: the agent keeps the window",
        "any other value: the agent keeps the window",
        apis=_R,
        neutral=("auto",),
    ),
    RequestField("context_management", "", "the agent keeps the window", apis=_R),
    RequestField(
        "store",
        "`true`",
        "`false`: each run is stored; delete it with `DELETE /v1/runs/{run_id}`",
        apis=_R,
        neutral=(True,),
    ),
    RequestField("store", "any: each run is stored, and none is used for training", apis=_C, neutral=(True, False)),
    RequestField("service_tier", "`auto` and `default`", _PRICE, neutral=("auto", "default")),
    RequestField("user", _KEPT, is_kept=True),
    RequestField("safety_identifier", _KEPT, is_kept=True),
    RequestField("prompt_cache_key", _KEPT, is_kept=True),
    RequestField("prompt_cache_options", "", _CACHE),
    RequestField("prompt_cache_retention", "", _CACHE),
    RequestField("moderation", "", "the guards are the agent's"),
    RequestField("image", "", _HERE, apis=_R),
    RequestField("access_programs", "", _HERE, apis=_R),
)
_BY_NAME: Final = {(api, each.name): each for each in FIELDS for api in each.apis}
# Fields whose value is an object with fields of its own.
_OBJECTS: Final = {(api, each.name.partition(".")[0]) for each in FIELDS for api in each.apis if "." in each.name}


@attrs.frozen(kw_only=True)
class RequestTerms(Value):
    """What the fields of a request ask for: settings, data to keep, and whether the answer is JSON."""

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
        is_bool = isinstance(value, bool)  # True is not 1
        if value is None or any(value == each and is_bool == isinstance(each, bool) for each in field.neutral):
            continue
        if name == "metadata" and isinstance(value, Mapping) and any(str(key).startswith(KEPT) for key in value):
            raise RefusedFieldError(
                name, f"metadata is refused: names that begin with {KEPT!r} are those of other fields"
            )
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
            why = field.refused or "it is true or false"
            raise RefusedFieldError(name, f"{name} ({str(shown)[:80]}) is refused: {why}")
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
    if kind == "text" and len(asked) == 1:
        return False
    if kind not in ("json_object", "json_schema"):
        raise RefusedFieldError(name, f"{name} must have the type text, alone, or json_object or json_schema")
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
        if more := {*asked, *given} - {"type", "json_schema", "name", "description", "strict", "schema"}:
            raise RefusedFieldError(name, f"{name} is refused: it has no field {min(map(str, more))[:40]!r}")
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
    if kind == "json_object" and len(asked) > 1:
        raise RefusedFieldError(name, f"{name} is refused: the type json_object stands alone")
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
