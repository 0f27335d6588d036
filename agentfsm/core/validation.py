"""Validate values where they enter the package. A `ValueRule` tests a value and describes the valid ones.

The same rules check fields of classes (as attrs validators), arguments of functions, options of tools and of the
command line, so that the same mistake always gets the same message.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from typing import Any, Final

import attrs

from agentfsm.core.errors import MisuseError
from agentfsm.core.shortening import shorten
from agentfsm.core.value import Value

# Characters of a value that an error message shows: the width of a line.
_MAX_REPR_CHARS: Final = 80


@attrs.frozen(kw_only=True)
class ValueRule(Value):
    """A test of a value, and a description of the values that pass it; an attrs validator."""

    fits: Callable[[Any], bool]
    """Returns whether a value passes; it takes any object, and never raises."""

    wanted: str
    """Completes the sentence "give ...": "a whole number, 1 or more"."""

    def check(self, place: str, name: str, value: object) -> None:
        """Check one argument.

        Args:
            place: Name of the class or function that takes the argument, for example "Limits".
            name: Name of the argument.
            value: Value of the argument.

        Raises:
            MisuseError: if the value does not fit.
        """
        if not self.fits(value):
            raise MisuseError(f"{place}({name}={shorten_repr(value)}): give {self.wanted}")

    def __call__(self, instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
        """Check a field, as an attrs validator."""
        self.check(type(instance).__name__, attribute.alias or attribute.name, value)

    def or_none(self) -> ValueRule:
        """Return a rule that also accepts None."""
        fits = self.fits
        return ValueRule(fits=lambda value: value is None or fits(value), wanted=f"{self.wanted}, or None")


def shorten_repr(value: object) -> str:
    """Return the repr of a value for an error message, or the name of a class."""
    text = value.__name__ if isinstance(value, type) else repr(value)
    return shorten(text, _MAX_REPR_CHARS)


def require_type(*kinds: type, wanted: str) -> ValueRule:
    """Return a rule for instances of these classes."""
    return ValueRule(fits=lambda value: isinstance(value, kinds), wanted=wanted)


def require_tuple(*kinds: type, wanted: str) -> ValueRule:
    """Return a rule for tuples of instances of these classes."""
    return ValueRule(
        fits=lambda value: isinstance(value, tuple) and all(isinstance(each, kinds) for each in value), wanted=wanted
    )


def require_choice(*choices: str) -> ValueRule:
    """Return a rule for these strings."""
    *most, last = [repr(str(each)) for each in choices]
    return ValueRule(
        fits=lambda value: isinstance(value, str) and value in choices, wanted=f"{', '.join(most)} or {last}"
    )


def require_members(*names: str, wanted: str) -> ValueRule:
    """Return a rule for objects that have these members. A class is refused: only its instances fit."""
    return ValueRule(
        fits=lambda value: not isinstance(value, type) and all(hasattr(value, name) for name in names), wanted=wanted
    )


def require_whole_number(low: int) -> ValueRule:
    """Return a rule for int of at least `low`. A bool is refused."""
    return ValueRule(fits=lambda value: type(value) is int and value >= low, wanted=f"a whole number, {low} or more")


def require_between(low: float, high: float) -> ValueRule:
    """Return a rule for numbers from `low` to `high`, both included."""
    return ValueRule(
        fits=lambda value: is_number(value) and low <= value <= high, wanted=f"a number from {low:g} to {high:g}"
    )


def is_number(value: object) -> bool:
    """Return whether a value is an int or a float, which may be infinite or NaN; a bool is not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


STRING: Final = require_type(str, wanted="a string")
NAME: Final = ValueRule(
    fits=lambda value: isinstance(value, str) and bool(value.strip()), wanted="a string that is not empty"
)
BOOL: Final = require_type(bool, wanted="True or False")
FUNCTION: Final = ValueRule(fits=callable, wanted="a function")
COUNT: Final = require_whole_number(1)
COUNT_OR_ZERO: Final = require_whole_number(0)
POSITIVE: Final = ValueRule(
    fits=lambda value: is_number(value) and 0 < value < math.inf, wanted="a finite number above 0"
)
NOT_NEGATIVE: Final = ValueRule(
    fits=lambda value: is_number(value) and 0 <= value < math.inf, wanted="a finite number, 0 or more"
)
SHARE: Final = ValueRule(
    fits=lambda value: is_number(value) and 0 < value <= 1, wanted="a share, above 0 and up to 1; 0.8 is four fifths"
)
SECONDS: Final = ValueRule(
    fits=lambda value: is_number(value) and 0 < value < math.inf, wanted="a finite number of seconds above 0"
)


def suggest_fields(cls: type[Any], **foreign_names: str) -> None:
    """Let the constructor of an attrs class name the field that was probably meant by an unknown one.

    Args:
        cls: The class. Its constructor raises TypeError for an unknown name, as before.
        **foreign_names: Field of the class by the name that other packages give to it.
    """
    init: Any = cls.__init__
    init.__qualname__ = f"{cls.__qualname__}.__init__"  # for Python's own errors, if a base class has the fields
    known = [field.alias for field in attrs.fields(cls)]

    @wraps(init)
    def init_or_suggest(self: object, *args: object, **values: object) -> None:
        try:
            init(self, *args, **values)
        except TypeError:
            unknown = next((name for name in values if name not in known), None)
            if unknown is None:
                raise
            import difflib  # noqa: PLC0415  needed only for an error

            near = foreign_names.get(unknown) or next(iter(difflib.get_close_matches(unknown[:100], known, n=1)), None)
            hint = f"; did you mean {near!r}?" if near else f"; its fields are {', '.join(known)}"
            raise TypeError(f"{cls.__name__}() has no field {unknown!r}{hint}") from None

    cls.__init__ = init_or_suggest
