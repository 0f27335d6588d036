"""Types of the inputs and results of steps, from their type hints.

What is not known is left alone: a parameter without a hint, and a hint that JSON Schema cannot express.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cached_property, lru_cache
from typing import Annotated, Any, Final, get_args, get_origin

import attrs
from pydantic import BeforeValidator, ValidationError

from agentfsm.core.errors import ArgumentsError, MisuseError
from agentfsm.core.messages import JSON
from agentfsm.tools.result_schema import RESULT_KEY, build_result_schema
from agentfsm.tools.run_context import RunContext
from agentfsm.tools.schema.introspection import read_return_hint
from agentfsm.tools.schema.matching import declared_types, expand_branches
from agentfsm.tools.schema.signature import FunctionSignature, build_value_signature, read_hints

# A value of each type of JSON that is neither an array nor null.
_SAMPLES: Final[Mapping[str, JSON]] = {"string": "text", "integer": 7, "number": 7.5, "boolean": True, "object": {}}
# Levels of lists whose items are compared.
_LEVELS: Final = 3
# Keys of a schema that say nothing of the type.
_NOTES: Final = frozenset({"description", "default"})


@attrs.define(eq=False, repr=False, slots=False)
class ParameterTypes:
    """Type hints of the parameters of one function."""

    hints: Mapping[str, Any]
    """The hints by name, of the parameters that have one."""

    @cached_property
    def signature(self) -> FunctionSignature:
        """The signature of values with these hints, compiled once for all flows."""
        return build_value_signature(self.hints, name="the flow", noun="inputs")

    def refuses(self, name: str, samples: Iterable[JSON]) -> bool:
        """Return whether a parameter refuses each of the values for its type, whatever else it checks."""
        samples = list(samples)
        for sample in samples:
            try:
                self.signature.validate(json.dumps({name: sample}))
            except ValidationError as error:
                kinds = [problem["type"] for problem in error.errors(include_url=False, include_context=False)]
                if all(kind.endswith("_type") or kind == "none_required" for kind in kinds):
                    continue
            except Exception:  # noqa: BLE001, S110  of a validator of the user's: the value is wrong, perhaps not the type
                pass
            return False
        return bool(samples)


def read_parameter_types(function: Callable[..., Any], name: str) -> tuple[ParameterTypes, ...]:
    """Return the type hints of a function's parameters, as those of a step; none if they cannot be read."""
    try:
        return (ParameterTypes(read_hints(function, context_type=RunContext, name=name)),)
    except (MisuseError, TypeError, ValueError):
        return ()


def select_types(types: Iterable[ParameterTypes], names: Collection[str]) -> tuple[ParameterTypes, ...]:
    """Return the type hints of the parameters with these names."""
    return tuple([ParameterTypes({name: hint for name, hint in each.hints.items() if name in names}) for each in types])


def read_result_hint(function: Callable[..., Any]) -> Any:
    """Return the type hint of what a function returns; `Any` if it is not known."""
    return Any if inspect.isclass(function) else read_return_hint(function)


def build_list_hint(item: Any) -> Any:
    """Return the type hint of a list of items. Null is none: the step of the list was skipped."""
    return Annotated[list[item], BeforeValidator(_to_list)]


def _to_list(value: Any) -> Any:
    return [] if value is None else value


@attrs.define(eq=False, repr=False, slots=False)
class InputTypes:
    """The types of the inputs of a flow."""

    required: tuple[str, ...]
    """Names of the inputs that a run needs."""

    optional: tuple[str, ...]
    """Names of the inputs that have a default."""

    takers: tuple[tuple[str, ParameterTypes], ...]
    """Names of steps, each with the type hints of a function of it."""

    kinds: dict[str, dict[str, tuple[str, ParameterTypes]]] = attrs.field(init=False)
    """The different schemas of each input, as text, with the first step that has it."""

    def __attrs_post_init__(self) -> None:
        """Compare the hints of each input.

        Raises:
            MisuseError: if those of two steps contradict each other.
        """
        self.kinds = {name: {} for name in (*self.required, *self.optional)}
        for step, types in self.takers:
            root: Any = types.signature.parameters
            for name in types.hints.keys() & self.kinds.keys():
                schema = root["properties"][name]
                text = json.dumps([_drop_notes(schema), root.get("$defs")])
                if text in (known := self.kinds[name]):
                    continue
                samples = _list_samples(schema, root)
                for other, found in known.values():
                    base: Any = found.signature.parameters
                    if types.refuses(name, _list_samples(base["properties"][name], base)) or found.refuses(
                        name, samples
                    ):
                        raise MisuseError(
                            f"the steps {other!r} and {step!r} take the input {name!r}, as {_show(found.hints[name])} "
                            f"and as {_show(types.hints[name])}: change one of the type hints, or rename a parameter"
                        )
                known[text] = (step, types)

    @cached_property
    def schema(self) -> Mapping[str, JSON]:
        """JSON Schema of the inputs, of type "object"."""
        # Compiled together, so that each definition has a name of its own.
        hints = {
            f"{name} {at}": types.hints[name]
            for name, known in self.kinds.items()
            for at, (_, types) in enumerate(known.values())
        }
        described: Any = build_value_signature(hints, name="the flow", noun="inputs").parameters
        properties: dict[str, JSON] = {}
        for name, known in self.kinds.items():
            found = [described["properties"][f"{name} {at}"] for at in range(len(known))]
            parts = list({json.dumps(_drop_notes(part)): part for part in reversed(found) if part}.values())[::-1]
            properties[name] = parts[0] if len(parts) == 1 else {"allOf": parts} if parts else {}
        shape: dict[str, JSON] = {
            "type": "object",
            "properties": properties,
            "required": list(self.required),
            "additionalProperties": False,
        }
        return shape | ({"$defs": described["$defs"]} if "$defs" in described else {})

    def find_flaw(self, values: Mapping[str, Any]) -> str | None:
        """Return why the inputs do not fit the type hints, by field; None if they do.

        Args:
            values: The inputs by name, JSON values.
        """
        for _, types in self.takers:
            own = {name: values[name] for name in types.hints if name in self.kinds and name in values}
            try:
                types.signature.bind(json.dumps(own))
            except ArgumentsError as error:
                first, *rest = str(error).partition("\nParameters:")[0].split("\n")
                return " ".join([first, "; ".join([line.removeprefix("- ") for line in rest])]).strip()
        return None


def _drop_notes(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema without what says nothing of the type of a value, or of the items of a list."""
    items = schema.get("items")
    kept = {key: schema[key] for key in schema if key not in _NOTES}
    return {**kept, "items": _drop_notes(items)} if isinstance(items, Mapping) else kept


def check_results(step: str, takes: Iterable[ParameterTypes], results: Mapping[str, Any]) -> None:
    """Check that a step can take the results of others: that their type hints do not contradict its own.

    Args:
        step: Name of the step.
        takes: Type hints of its parameters.
        results: Type hints of results, by the names of their steps.

    Raises:
        MisuseError: if those of a result and of the parameter that takes it do.
    """
    for types in takes:
        for name in types.hints.keys() & results.keys():
            hint = results[name]
            try:
                samples = _sample_results(hint)
            except TypeError:  # it has no hash
                samples = _sample_results.__wrapped__(hint)
            if types.refuses(name, samples):
                raise MisuseError(
                    f"step {step!r} takes the result of {name!r} as {_show(types.hints[name])}, and {name!r} returns "
                    f"{_show(hint)}: change one of the type hints"
                )


@lru_cache(maxsize=256)
def _sample_results(hint: Any) -> list[JSON]:
    """Return a value of each type of JSON that a result of this hint has; none if it is not known."""
    if hint is Any:
        return []
    try:
        root = build_result_schema(hint)
    except Exception:  # noqa: BLE001  pydantic, typing and the user's own types raise any error for a hint
        return []
    return _list_samples(root["properties"][RESULT_KEY], root)


def _list_samples(schema: Any, root: Mapping[str, Any], levels: int = _LEVELS) -> list[JSON]:
    """Return a value of each type that a schema allows; none if it allows any, or it is not known which."""
    found = list[JSON]()
    for leaf in expand_branches(schema, root):
        kinds = declared_types(leaf) if isinstance(leaf, Mapping) else ()
        if not kinds:
            return []
        for kind in kinds:
            if kind == "array":
                items = _list_samples(leaf.get("items", True), root, levels - 1) if levels else []
                found += [[item] for item in items] or [[]]
            else:
                found.append(_SAMPLES.get(kind))
    return found


def _show(hint: Any) -> str:
    while get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    if hint is type(None):
        return "None"
    return hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint).replace("typing.", "")
