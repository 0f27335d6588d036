"""Required form of an answer: the output modes, parsing of the text, and user validation.

A run stores the answer as the model's text and parses it when the value is read.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

import attrs
import jiter
from pydantic import Field
from typing_extensions import TypedDict

from agentfsm.core.claimed_calls import LONG_CHARS
from agentfsm.core.claims import Claim, Claims
from agentfsm.core.errors import ArgumentsError, MisuseError, ModelRetry
from agentfsm.core.json_text import JSON_BLANKS
from agentfsm.core.messages import JSON
from agentfsm.core.value import Value
from agentfsm.ports.model import OutputForm, OutputMode, ToolDefinition
from agentfsm.streaming.stream import CallDelta, TextDelta
from agentfsm.tools.run_context import RunContext
from agentfsm.tools.schema.arguments import read_object
from agentfsm.tools.schema.introspection import find_context_parameter, read_parameters
from agentfsm.tools.schema.signature import CompiledType, compile_type
from agentfsm.tools.schema.strict import build_strict_schema
from agentfsm.tools.tool import Tool, make_tool

if TYPE_CHECKING:
    from agentfsm.ports.model import Model

# Name of the output tool, whose arguments are the answer, and of the form.
FINAL_ANSWER: Final = "final_answer"
FINAL_ANSWER_DESCRIPTION: Final = "Give the final answer. Call it once, alone, when the work is done."
CALLED_TOO_EARLY: Final = (
    "Not yet: the other calls of this turn come first. Read their results, then give the final answer alone."
)
JSON_INSTRUCTIONS: Final = (
    "Your final answer is one JSON object that fits this JSON Schema, with nothing around it:\n{schema}"
)

# Maximum of claims of an answer, which are compared with all calls of their tools.
MAX_CLAIMS: Final = 100


class ClaimedCall(TypedDict):
    """A call that did what the result says."""

    tool: str
    arguments: dict[str, Any]


_CLAIMS_HINT: Final = Annotated[
    list[ClaimedCall],
    Field(
        description="Each act that the result says was done: the tool that did it, and the arguments of its call, "
        f"unchanged; those of {LONG_CHARS} or more characters may be left out. Empty if the result says of none.",
        max_length=MAX_CLAIMS,
    ),
]

Validator: TypeAlias = Callable[..., Awaitable[object] | object]


@attrs.frozen(kw_only=True)
class _OutputValidator(Value):
    """A user's function that validates an answer."""

    function: Validator
    takes_context: bool


@attrs.define(eq=False, repr=False, kw_only=True)
class OutputSpec:
    """Requirements for an agent's answers."""

    form: CompiledType | None
    """Compiled type of the answer; None for plain text."""

    validators: tuple[_OutputValidator, ...]
    claims: Claims | None = None
    """Requirement for the claims of answers; None if answers have no claims."""

    whole: CompiledType | None = None
    """Compiled type of an answer with its claims; None if it has none."""

    output_form: OutputForm | None = None
    """Output form for the request, in the modes SCHEMA and JSON."""

    tool_definition: ToolDefinition | None = None
    """Definition of the output tool, whose arguments are the answer, in the mode TOOL."""

    tool: Tool[..., Any] | None = None
    """Tool that answers a premature call of the output tool."""

    instructions: str = ""
    """Text appended to the agent's instructions, in the modes JSON and PROMPT."""

    @property
    def requires_tool_call(self) -> bool:
        """Whether an answer is always a call."""
        form = self.form if self.whole is None else self.whole
        return self.tool_definition is not None and form is not None and not form.takes_text

    @property
    def correction_hint(self) -> str:
        """Instruction to the model on how to correct a refused answer."""
        return "Give a corrected one." if self.tool is None else f"Call {FINAL_ANSWER} with a corrected one."

    def parse(self, text: str) -> Any:
        """Return the value of an answer's text.

        Raises:
            ArgumentsError: if it does not fit the form; the message lists all problems.
        """
        return text if self.form is None else self.form.parse(text)

    def split(self, text: str) -> tuple[str, tuple[Claim, ...]] | None:
        """Return the text of an answer without its claims, and these; None if the model has not sent both."""
        assert self.whole is not None  # noqa: S101  only answers with claims are split
        whole = self.whole

        def read(found: str) -> tuple[str, dict[str, Any]]:
            whole.parse(found)
            return _find_member(found, "result"), json.loads(found)

        try:
            own, values = read_object(text, read)
        except ArgumentsError:
            return None
        claims = tuple([Claim(tool=each["tool"], arguments=each["arguments"]) for each in values["claims"]])
        if self.form is None:
            return values["result"], claims
        return f'{{"result": {own}}}' if self.form.is_wrapped else own, claims

    def parse_partial(self, deltas: Iterable[TextDelta | CallDelta]) -> Any:
        """Return the part of an answer that the deltas of a reply contain so far, as JSON values; None for nothing."""
        pieces, is_answer = [], False
        for delta in deltas:
            if isinstance(delta, CallDelta):
                is_answer = delta.name == FINAL_ANSWER if delta.name else is_answer
                pieces.append(delta.arguments if is_answer else "")
            elif self.tool is None:
                pieces.append(delta.text)
        text = "".join(pieces)
        if self.whole is not None and self.tool is None and self.form is None:  # the answer alone is passed on
            return text or None
        begun = text[text.find("{") :] if "{" in text else ""
        try:
            values = jiter.from_json(begun.encode(), partial_mode="trailing-strings") if begun else None
        except ValueError:  # such as text behind the object
            try:
                values = read_object(text, json.loads)
            except ArgumentsError:
                return None
        is_wrapped = (self.form is not None and self.form.is_wrapped) or (
            self.whole is not None and self.tool is not None
        )
        return values.get("result") if is_wrapped and isinstance(values, dict) else values

    async def check(self, text: str, context: RunContext[Any], *, is_split: bool = True) -> str | None:
        """Return the reason for the model why an answer is refused, or None if it is accepted.

        Exceptions of the user's functions other than `ModelRetry` propagate.

        Args:
            text: The answer.
            context: Context for the validators.
            is_split: Whether it is without its claims, if it has to have some.

        Raises:
            MisuseError: if a function returns a verdict, such as False, instead of raising it.
        """
        try:
            if self.whole is not None and not is_split:
                self.whole.parse(text)
            value = self.parse(text)
            for each in self.validators:
                found = each.function(context, value) if each.takes_context else each.function(value)
                if inspect.isawaitable(found):
                    found = await found
                if found is not None and type(found) is not type(value):
                    raise _build_return_error(each.function, found)
        except (ArgumentsError, ModelRetry) as error:
            return str(error)
        return None


def _find_member(text: str, name: str) -> str:
    """Return the text of a member of a strict JSON object, so that its numbers keep their digits."""
    decoder, place = json.JSONDecoder(), text.index("{") + 1
    while True:
        key, place = decoder.raw_decode(text, _skip_blanks(text, place))
        start = _skip_blanks(text, text.index(":", place) + 1)
        _, place = decoder.raw_decode(text, start)
        if key == name:
            return text[start:place]
        place = text.index(",", place) + 1


def _skip_blanks(text: str, place: int) -> int:
    return len(text) - len(text[place:].lstrip(JSON_BLANKS))


def _build_return_error(function: Validator, found: object) -> MisuseError:
    """Build the error for a validator that returns a verdict, which would be ignored."""
    name = getattr(function, "__name__", repr(function))
    return MisuseError(
        f"the output validator {name!r} returned {found!r}: raise ModelRetry('why, for the model') to refuse an "
        "answer, and return nothing to accept it"
    )


def build_output_spec(
    output_type: Any,
    validators: Iterable[Validator],
    mode: OutputMode | str | None,
    model: Model,
    names: Iterable[str],
    *,
    claims: Claims | None,
) -> OutputSpec | None:
    """Return the requirements for an agent's answers; None if any text is accepted.

    Args:
        output_type: A type with a JSON form; None and `str` stand for plain text.
        validators: Functions of the value, or of the RunContext and the value, plain or async; plain ones run in the
            event loop and must be quick. They raise ModelRetry to refuse the value.
        mode: Output mode; None for the best mode that the model has and that can express the type.
        model: The agent's model.
        names: The names of the agent's tools.
        claims: Requirement for the claims of answers; None if answers have no claims.

    Raises:
        MisuseError: if the type has no JSON Schema, the model does not have this mode, a validator has other
            parameters, or a tool has the name of the output tool.
    """
    checks = tuple([_build_validator(function) for function in validators])
    is_text = output_type is None or output_type is str
    if is_text and claims is None:
        if mode is not None:
            raise MisuseError(
                "output_mode has no effect without output_type: pass output_type as well, or leave output_mode out"
            )
        return OutputSpec(form=None, validators=checks) if checks else None
    if FINAL_ANSWER in names:
        option = "an output_type" if claims is None else "claims"
        raise MisuseError(f"with {option}, {FINAL_ANSWER!r} names the tool that gives the answer: rename yours")
    form = None if is_text else compile_type(output_type)
    whole = None if claims is None else compile_type(str if is_text else output_type, {"claims": _CLAIMS_HINT})
    sent = form if whole is None else whole
    assert sent is not None  # noqa: S101  one of both is there
    has = model.output_modes
    if claims is not None:  # which have objects with any keys
        if mode == OutputMode.SCHEMA:
            raise MisuseError('claims need the output_mode "tool", "json" or "prompt": leave output_mode out')
        has = tuple([each for each in has if each is not OutputMode.SCHEMA])
    chosen, schema = _choose_mode(sent, mode, model, has)
    fields = _MODE_BUILDERS[chosen](sent.schema if schema is None else schema)
    return OutputSpec(form=form, validators=checks, claims=claims, whole=whole, **fields)


def _build_validator(function: Validator) -> _OutputValidator:
    name = getattr(function, "__name__", repr(function))
    parameters = read_parameters(function, name)
    context = find_context_parameter(parameters, RunContext, name)
    if len(parameters) - (context is not None) != 1:
        raise MisuseError(f"the output validator {name!r} takes one value, and a RunContext before it if need be")
    return _OutputValidator(function=function, takes_context=context is not None)


def _choose_mode(
    form: CompiledType, mode: OutputMode | str | None, model: Model, has: Sequence[OutputMode]
) -> tuple[OutputMode, Mapping[str, JSON] | None]:
    """Return the mode, of those that the model has for it, and the strict schema if that is sent."""
    if mode is not None and mode not in has:
        raise MisuseError(f"{model.name} has no output_mode {str(mode)!r}; it has: {', '.join(has)}")
    for each in has if mode is None else [OutputMode(mode)]:
        if each is not OutputMode.SCHEMA:
            return each, None
        try:
            return each, _build_strict_schema(form, model)
        except MisuseError:
            if mode is not None or len(has) == 1:
                raise
    return OutputMode.PROMPT, None


def _build_strict_schema(form: CompiledType, model: Model) -> Mapping[str, JSON]:
    schema = build_strict_schema(form.schema, FINAL_ANSWER)
    if (why := model.unsupported_schema(schema)) is not None:
        raise MisuseError(f"{model.name} cannot be held to the output_type: {why}; leave output_mode out")
    return schema


def _build_schema_mode(schema: Mapping[str, JSON]) -> dict[str, Any]:
    return {"output_form": OutputForm(name=FINAL_ANSWER, schema=schema)}


def _build_tool_mode(schema: Mapping[str, JSON]) -> dict[str, Any]:
    about = schema.get("description")
    description = f"{FINAL_ANSWER_DESCRIPTION}\n{about}" if about else FINAL_ANSWER_DESCRIPTION
    definition = ToolDefinition(name=FINAL_ANSWER, description=description, parameters=schema)
    anything: dict[str, JSON] = {"type": "object"}
    tool = make_tool(
        _reject_early_answer,
        name=FINAL_ANSWER,
        description=FINAL_ANSWER_DESCRIPTION,
        parameters=anything,
        read_only=True,
    )
    return {"tool_definition": definition, "tool": tool}


def _build_json_mode(schema: Mapping[str, JSON]) -> dict[str, Any]:
    return {"output_form": OutputForm(name=FINAL_ANSWER, schema=None)} | _build_prompt_mode(schema)


def _build_prompt_mode(schema: Mapping[str, JSON]) -> dict[str, Any]:
    return {"instructions": JSON_INSTRUCTIONS.format(schema=json.dumps(schema, ensure_ascii=False))}


_MODE_BUILDERS: Final[Mapping[OutputMode, Callable[[Mapping[str, JSON]], dict[str, Any]]]] = {
    OutputMode.SCHEMA: _build_schema_mode,
    OutputMode.TOOL: _build_tool_mode,
    OutputMode.JSON: _build_json_mode,
    OutputMode.PROMPT: _build_prompt_mode,
}


async def _reject_early_answer(**_answer: Any) -> str:
    raise ModelRetry(CALLED_TOO_EARLY)
