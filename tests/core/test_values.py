"""Every record of the core is a value: frozen, and made by naming its fields."""

from importlib import import_module
from pathlib import Path

import attrs
import pytest

from agentfsm import core

MODULES = [import_module(f"agentfsm.core.{path.stem}") for path in Path(core.__file__).parent.glob("[a-z]*.py")]
VALUES = sorted(
    {v for module in MODULES for v in vars(module).values() if isinstance(v, type) and attrs.has(v)},
    key=lambda kind: kind.__qualname__,
)


@pytest.mark.parametrize("kind", VALUES)
def test_values_are_frozen_and_named(kind):
    """No field can be set again, each is given by name, and equal fields make equal values."""
    value = object.__new__(kind)
    for field in attrs.fields(kind):
        assert field.kw_only
        assert field.eq or field.name == "decoder"  # the agent's, and no part of the run
        with pytest.raises(attrs.exceptions.FrozenInstanceError):
            setattr(value, field.name, None)
    assert "__eq__" in vars(kind)


def test_there_are_values():
    """The search above finds them."""
    assert {"Run", "Header", "ToolCall", "Observed", "Limits", "DetectedLoop"} <= {kind.__name__ for kind in VALUES}
