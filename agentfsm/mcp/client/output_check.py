"""What a server returns, held to what it declared: offline, within bounds, and by the validator of our own arguments.

The SDK would do it with a validator in Python that takes any time a schema asks for, and raise what is no error of the
connection's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import mcp.types as m

from agentfsm.core.value import Value
from agentfsm.tools.schema.arguments import format_problems
from agentfsm.tools.schema.complexity import ValidationCost, compute_cost, normalise_schema
from agentfsm.tools.schema.validator import compile_schema, find_problems


@attrs.frozen(kw_only=True)
class OutputCheck(Value):
    """A tool's output schema, compiled."""

    tool: str
    schema: dict[str, Any] = attrs.field(repr=False)
    is_valid: Callable[[Any], bool] = attrs.field(repr=False)
    work: ValidationCost = attrs.field(repr=False)

    @classmethod
    def from_schema(cls, schema: Mapping[str, Any], tool: str) -> OutputCheck:
        """Compile the schema of a tool's results.

        Raises:
            MisuseError: when it is invalid, too large, refers to what is not in it, or could ask for endless work.
        """
        plain = normalise_schema(schema, tool)
        return cls(tool=tool, schema=plain, is_valid=compile_schema(plain, tool), work=compute_cost(plain, tool))

    def explain_mismatch(self, result: m.CallToolResult) -> str | None:
        """Say how a result breaks its server's word, or None; one that tells of an error promises nothing."""
        if result.is_error:
            return None
        value = result.structured_content
        if value is None and "structured_content" not in result.model_fields_set:
            return f"the server declared what {self.tool} returns, and returned no structured content"
        if reason := self.work.check_value(json.dumps(value), value):
            return f"the result of {self.tool} cannot be checked: {reason}"
        return None if self.is_valid(value) else self._describe_mismatch(value)

    def _describe_mismatch(self, value: Any) -> str:
        known = {"properties": self.schema.get("properties", {})}
        told = format_problems(f"the result of {self.tool} does", find_problems(self.schema, value), value, known)
        return told.rpartition("\n")[0]  # its last line is about arguments
