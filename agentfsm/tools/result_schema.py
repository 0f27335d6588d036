"""The JSON Schema of what a function returns, from its return hint."""

from __future__ import annotations

from typing import Any, Final, get_type_hints

import attrs
from pydantic import ConfigDict, TypeAdapter
from pydantic.errors import PydanticInvalidForJsonSchema
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import core_schema
from typing_extensions import TypedDict

from agentfsm.core.messages import AudioPart, FilePart, ImagePart, TextPart
from agentfsm.tools.run_context import ToolReturn
from agentfsm.tools.schema.signature import drop_titles

# Key of a result in its schema, since a result need not be an object.
RESULT_KEY: Final = "result"
# Classes whose values are rendered as messages and not as JSON.
_MESSAGE_CLASSES: Final = (TextPart, ImagePart, AudioPart, FilePart, ToolReturn)
# Called with types known only at run time, which a type checker cannot follow.
_TYPED_DICT: Any = TypedDict


def build_result_schema(hint: Any) -> dict[str, Any]:
    """Return the schema of an object with a value of the hint, as results are written, under the key "result".

    Raises:
        Exception: if the hint has no JSON Schema; pydantic, typing and the user's own types raise any error.
    """
    shape = _TYPED_DICT("Result", {RESULT_KEY: hint})
    shape.__pydantic_config__ = ConfigDict(arbitrary_types_allowed=True)
    found: dict[str, Any] = drop_titles(
        TypeAdapter(shape).json_schema(mode="serialization", schema_generator=_ResultSchemaGenerator)
    )
    return found


class _ResultSchemaGenerator(GenerateJsonSchema):
    """Pydantic's JSON Schema generator, with attrs classes as results render them: by the names of all fields."""

    _open: frozenset[type] = frozenset()
    """Classes whose fields are being described, which ends the recursion of a class that contains itself."""

    def is_instance_schema(self, schema: core_schema.IsInstanceSchema) -> dict[str, Any]:
        """Describe an attrs class; refuse any other class."""
        cls = schema["cls"]
        if not attrs.has(cls) or issubclass(cls, _MESSAGE_CLASSES):
            return self.handle_invalid_for_json_schema(schema, "a class without a JSON Schema")
        if cls in self._open:
            return {"type": "object"}
        before, self._open = self._open, self._open | {cls}
        hints = get_type_hints(cls, include_extras=True)
        names = [field.name for field in attrs.fields(cls)]
        shape = _TYPED_DICT(cls.__name__, {name: hints.get(name, Any) for name in names})
        shape.__pydantic_config__, shape.__doc__ = ConfigDict(arbitrary_types_allowed=True), cls.__doc__
        described = self.generate_inner(TypeAdapter(shape).core_schema)
        self._open = before
        return described

    def emit_warning(self, kind: str, detail: str) -> None:
        """Refuse a union branch that cannot be expressed; a default is only omitted."""
        if kind == "skipped-choice":
            raise PydanticInvalidForJsonSchema(detail)
