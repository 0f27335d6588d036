"""Check results against the tool's output schema: offline, with bounded work, by the validator for our own arguments.

The SDK's validator does unbounded work, and its errors look like errors of the connection.
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
    """Compiled output schema of a tool."""

    tool: str
    schema: dict[str, Any] = attrs.field(repr=False)
    is_valid: Callable[[Any], bool] = attrs.field(repr=False)
    work: ValidationCost = attrs.field(repr=False)

    @classmethod
    def from_schema(cls, schema: Mapping[str, Any], tool: str) -> OutputCheck:
        """Compile the schema of a tool's results.

        Raises:
            MisuseError: when it is invalid or too large, has an external reference, or could require unbounded work.
        """
        plain = normalise_schema(schema, tool)
        return cls(tool=tool, schema=plain, is_valid=compile_schema(plain, tool), work=compute_cost(plain, tool))

    def explain_mismatch(self, result: m.CallToolResult) -> str | None:
        """Return how a result violates its schema, or None. An error result is not checked."""
        if result.is_error:
            return None
        value = result.structured_content
        if value is None and "structured_content" not in result.model_fields_set:
            return f"the server declared an output schema for {self.tool}, but returned no structured content"
        if reason := self.work.check_value(json.dumps(value), value):
            return f"the result of {self.tool} cannot be checked: {reason}"
        return None if self.is_valid(value) else self._describe_mismatch(value)

    def _describe_mismatch(self, value: Any) -> str:
        known = {"properties": self.schema.get("properties", {})}
        text = format_problems(f"the result of {self.tool} does", find_problems(self.schema, value), value, known)
        return text.rpartition("\n")[0]  # its last line is about arguments
