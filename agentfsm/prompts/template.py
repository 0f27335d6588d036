"""A prompt: text with variables, parsed once. Values are inserted and never read as a template again.

Source: document F, 2, 5 and 6.1.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any, Final, Self, TypeAlias

import attrs

from agentfsm.core.errors import MisuseError
from agentfsm.core.header import short_hash
from agentfsm.core.text_safety import fence_untrusted
from agentfsm.core.validation import COUNT, COUNT_OR_ZERO, NAME, STRING, require_type, shorten_repr
from agentfsm.core.value import Value
from agentfsm.prompts.assertions import ReplyCheck, as_checks

_VERSION: Final = re.compile(r"v?(\d{1,9}(?:\.\d{1,9}){0,2})(?:-([0-9A-Za-z-]+(?:\.[0-9A-Za-z-]+)*))?", re.ASCII)
VERSION_EXAMPLES: Final = "'1.4.0', '2.0' or '2.0.0-rc.1'"

# Sorts as the version does: the numbers, whether it is a release, and the parts of the pre-release.
VersionKey: TypeAlias = tuple[tuple[int, ...], bool, tuple[tuple[bool, int, str], ...]]


def is_version(text: str) -> bool:
    """Return whether the text is a version, with or without a leading "v"."""
    return _VERSION.fullmatch(text) is not None


def version_key(text: str) -> VersionKey:
    """Return the sort key of a version. Equal versions, such as "1.0" and "v1.0.0", have equal keys.

    Raises:
        MisuseError: if the text is not a version.
    """
    found = _VERSION.fullmatch(text)
    if found is None:
        raise MisuseError(f"version {text[:50]!r}: give one such as {VERSION_EXAMPLES}")
    numbers = [int(number) for number in found[1].split(".")]
    before = found[2].split(".") if found[2] else []
    parts = tuple((not part.isdigit(), int(part) if part.isdigit() else 0, part) for part in before)
    return (*numbers, *[0] * (3 - len(numbers))), not before, parts


# Hexadecimal digits of a digest.
DIGEST_CHARS: Final = 12
# Placeholder of the examples, which are part of the prompt and not a variable.
EXAMPLES: Final = "examples"
# Tokens that shrinking leaves of an elastic layer (document F, 2.3).
MIN_TOKENS: Final = 100

# An escaped pair of braces, a placeholder, or a pair of braces that is neither.
_BRACES: Final = re.compile(r"\\\{\{|\{\{\s*([A-Za-z_]\w*)\s*\}\}|\{\{", re.ASCII)
_IDENTIFIER: Final = re.compile(r"[A-Za-z_]\w*", re.ASCII)


def list_placeholders(text: str) -> list[str]:
    """Return the names of the variables that a text uses, in order, without the examples."""
    names = [found[1] for found in _BRACES.finditer(text) if found[1] and found[1] != EXAMPLES]
    return [*dict.fromkeys(names)]


class LayerKind(StrEnum):
    """Layer of a prompt, in reading order. Only CONTEXT is elastic, all others are fixed: they are never shortened."""

    SYSTEM = "system"
    """Identity, rules and output format."""

    CONTEXT = "context"
    """Knowledge for this run: documents, facts, the history's summary."""

    USER = "user"
    """The request."""

    CONSTRAINTS = "constraints"
    """Limits and the reminders for this turn; last, because a model follows the end best."""


def as_layer_kind(value: LayerKind | str) -> LayerKind:
    """Convert the name of a layer.

    Raises:
        MisuseError: if there is not such a layer.
    """
    if value not in list(LayerKind):
        raise MisuseError(
            f"layer {shorten_repr(value)}: give one of {', '.join(repr(str(kind)) for kind in LayerKind)}"
        )
    return LayerKind(value)


class VariableKind(StrEnum):
    """Type of a variable, which decides how its value is inserted."""

    TEXT = "text"
    """A string from your own code, inserted as it is."""

    JSON = "json"
    """Any JSON value, inserted as indented JSON."""

    UNTRUSTED = "untrusted"
    """A string from outside, such as a user's message or a web page, inserted between marks as data."""


@attrs.frozen(kw_only=True)
class Variable(Value):
    """A variable of a prompt."""

    name: str
    """Name of the variable, an identifier."""

    kind: VariableKind = VariableKind.TEXT
    """Type of the value."""

    default: Any = None
    """Value if `render` gets none. None: the variable is required."""

    @property
    def is_required(self) -> bool:
        """Whether `render` has to get a value."""
        return self.default is None

    def format_value(self, value: object) -> str:
        """Return a value as it stands in the rendered prompt.

        Raises:
            MisuseError: if it is not of the variable's kind.
        """
        if self.kind is VariableKind.JSON:
            try:
                return json.dumps(value, ensure_ascii=False, indent=2, allow_nan=False)
            except (TypeError, ValueError, RecursionError) as error:
                raise MisuseError(f"{self.name}={shorten_repr(value)}: give a JSON value ({error})") from None
        if not isinstance(value, str):
            hint = f"give a string, or declare {self.name} as json"
            raise MisuseError(f"{self.name}={shorten_repr(value)}: {hint}")
        return fence_untrusted(value) if self.kind is VariableKind.UNTRUSTED else value


def _as_sentences(given: str | Sequence[str]) -> tuple[str, ...]:
    sentences = (given,) if isinstance(given, str) else tuple(given)
    if not all(isinstance(each, str) and each.strip() for each in sentences):
        raise MisuseError(f"rubric={shorten_repr(given)}: give a sentence that holds of a good reply, or several")
    return sentences


@attrs.frozen(kw_only=True)
class PromptTest(Value):
    """A test of a prompt: values for its variables, and checks of the reply."""

    name: str = attrs.field(validator=NAME)
    """Name of the test."""

    values: Mapping[str, Any] = attrs.field(factory=dict)
    """Values of the variables."""

    input: str = attrs.field(default="", validator=STRING)
    """User message that follows the prompt; empty: the prompt itself is sent as user message."""

    checks: tuple[ReplyCheck, ...] = attrs.field(default=(), converter=as_checks)
    """Checks that the reply has to pass: made by functions such as `contains`, or functions of the reply."""

    rubric: tuple[str, ...] = attrs.field(default=(), converter=_as_sentences)
    """Sentences that hold of a good reply, for a judge; empty: no judge is asked."""

    def __attrs_post_init__(self) -> None:
        if not self.checks and not self.rubric:
            raise MisuseError(f"the test {self.name!r} has neither checks nor a rubric: add one")


class RenderedPrompt(str):
    """Text of a rendered prompt: a string that knows the versions of the prompts that it was made of."""

    __slots__ = ("sources",)

    sources: tuple[str, ...]
    """References of the prompts, such as "billing@1.4.0#0123456789ab"."""

    def __new__(cls, text: str, sources: Sequence[str] = ()) -> Self:
        """Make the text."""
        made = super().__new__(cls, text)
        made.sources = tuple(sources)
        return made


def _as_variables(given: Mapping[str, object]) -> Mapping[str, Variable]:
    return {name: _as_variable(name, each) for name, each in dict(given).items()}


def _as_variable(name: str, given: object) -> Variable:
    """Convert the declaration of a variable: a kind, or a table with `kind` and `default`."""
    if isinstance(given, Variable):
        return given
    table: Mapping[str, Any] = given if isinstance(given, Mapping) else {"kind": given}
    if not _IDENTIFIER.fullmatch(name) or name == EXAMPLES:
        raise MisuseError(f"variable {name[:50]!r}: give a name of letters, digits and _, other than {EXAMPLES!r}")
    if not set(table) <= {"kind", "default"} or table.get("kind") not in list(VariableKind):
        kinds = ", ".join(repr(str(kind)) for kind in VariableKind)
        raise MisuseError(f"variable {name!r}: give its kind, one of {kinds}, or a table with kind and default")
    made = Variable(name=name, **{**table, "kind": VariableKind(table["kind"])})
    if not made.is_required:
        made.format_value(made.default)
    return made


def _as_tests(given: Sequence[PromptTest | Mapping[str, Any]]) -> tuple[PromptTest, ...]:
    return tuple(each if isinstance(each, PromptTest) else PromptTest(**each) for each in given)


def _as_examples(given: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    for each in given:
        if not isinstance(each, Mapping) or set(each) != {"input", "output"}:
            raise MisuseError(f"the example {shorten_repr(each)}: give a table with input and output")
    return tuple(given)


@attrs.frozen(kw_only=True)
class PromptTemplate(Value):
    r"""A version of a prompt. `{{name}}` in its text is a variable; all else, such as JSON, stands as it is written.

    Two braces that are not a variable are written as a backslash before them: `\{{`.

    Raises:
        MisuseError: if the text uses a variable that is not declared, or a declaration is invalid.
    """

    name: str = attrs.field(validator=NAME)
    """Name of the prompt."""

    version: str = attrs.field()
    """Version, such as "1.4.0"."""

    text: str = attrs.field(validator=STRING)
    """Text with variables."""

    variables: Mapping[str, Variable] = attrs.field(factory=dict, converter=_as_variables)
    """Variables by name. Given as kinds: `{"question": "untrusted"}`, or as tables with `kind` and `default`."""

    examples: tuple[Mapping[str, Any], ...] = attrs.field(default=(), converter=_as_examples)
    """Examples for the model (few-shot), tables of `input` and `output`. They stand at `{{examples}}` in the text. Use
    them to show style or granularity, as of a plan. An output format is better given as a schema.
    """

    layer: LayerKind = attrs.field(default=LayerKind.SYSTEM, converter=as_layer_kind)
    """Layer of the prompt, for `compose`."""

    priority: int = attrs.field(default=0, validator=require_type(int, wanted="a whole number"))
    """Priority among elastic layers: the lowest is shortened first."""

    max_tokens: int | None = attrs.field(default=None, validator=COUNT.or_none())
    """Maximum tokens of the rendered text; None for no maximum of its own."""

    min_tokens: int = attrs.field(default=MIN_TOKENS, validator=COUNT_OR_ZERO)
    """Tokens that shortening leaves, for an elastic layer."""

    author: str = attrs.field(default="", validator=STRING)
    """Author of this version."""

    changes: str = attrs.field(default="", validator=STRING)
    """Changes since the version before, and the reason."""

    tests: tuple[PromptTest, ...] = attrs.field(default=(), converter=_as_tests)
    """Tests of the prompt."""

    parts: tuple[str | Variable, ...] = attrs.field(init=False, repr=False, eq=False)
    """Text as literals and variables, in reading order."""

    digest: str = attrs.field(init=False)
    """Hash of the text, the variables and the examples: 12 hexadecimal digits."""

    _find_current: Callable[[], PromptTemplate] | None = attrs.field(default=None, repr=False, eq=False)
    """Returns the version in use now; None if this prompt is one fixed version."""

    def __attrs_post_init__(self) -> None:
        """Parse the text."""
        version_key(self.version)
        object.__setattr__(self, "parts", tuple(self._parse()))
        declared = [[each.name, each.kind, each.default] for each in self.declared]
        content = json.dumps([self.text, declared, self.examples], sort_keys=True, default=str)
        object.__setattr__(self, "digest", short_hash(content, DIGEST_CHARS))

    @property
    def declared(self) -> tuple[Variable, ...]:
        """Variables, sorted by name."""
        return tuple(self.variables[name] for name in sorted(self.variables))

    @property
    def version_key(self) -> VersionKey:
        """Sort key of the version."""
        return version_key(self.version)

    @property
    def reference(self) -> str:
        """Name, version and digest: "billing@1.4.0#0123456789ab"."""
        return f"{self.name}@{self.version}#{self.digest}"

    @property
    def is_fixed(self) -> bool:
        """Whether this is one fixed version, not the version in use."""
        return self._find_current is None

    def current(self) -> PromptTemplate:
        """Return the version in use now. A prompt that was chosen by its version returns itself."""
        return self if self._find_current is None else self._find_current()

    def render(self, /, **values: Any) -> RenderedPrompt:
        """Return the text with the values of the variables.

        Raises:
            MisuseError: if a value is missing, is of a wrong type, or belongs to no variable.
        """
        missing = [each.name for each in self.declared if each.is_required and each.name not in values]
        unknown = [name for name in values if name not in self.variables]
        if missing or unknown:
            faults = [f"values are missing for {', '.join(missing)}"] if missing else []
            faults += [f"unknown variables {', '.join(unknown)}"] if unknown else []
            known = f"its variables are {', '.join(sorted(self.variables))}" if self.variables else "it has none"
            raise MisuseError(f"prompt {self.name} {self.version}: {'; '.join(faults)}; {known}")
        try:
            texts = [
                each if isinstance(each, str) else each.format_value(values.get(each.name, each.default))
                for each in self.parts
            ]
        except MisuseError as error:
            raise MisuseError(f"prompt {self.name} {self.version}: {error}") from None
        return RenderedPrompt("".join(texts), [self.reference])

    def _parse(self) -> Iterator[str | Variable]:
        """Yield the literals and variables of the text.

        Raises:
            MisuseError: if a placeholder has no variable, or two braces are not a placeholder.
        """
        end = 0
        for found in _BRACES.finditer(self.text):
            yield self.text[end : found.start()]
            end = found.end()
            yield self._resolve(found)
        yield self.text[end:]
        if self.examples and f"{{{{{EXAMPLES}}}}}" not in re.sub(r"\s", "", self.text):
            raise MisuseError("it has examples: write {{examples}} where they stand in the text")

    def _resolve(self, found: re.Match[str]) -> str | Variable:
        name, line = found[1], self.text.count("\n", 0, found.start()) + 1
        if found[0].startswith("\\"):
            return "{{"
        if name is None:
            raise MisuseError(
                f"line {line} of the text: '{{{{' opens no variable: write {{{{name}}}}, or \\{{{{ for two braces"
            )
        if name == EXAMPLES and self.examples:
            return "\n\n".join(_format_example(*each) for each in enumerate(self.examples, 1))
        if name not in self.variables:
            hint = f'declare it in the front matter: [variables], {name} = "text"'
            raise MisuseError(f"line {line} of the text: {{{{{name}}}}} is not a declared variable: {hint}")
        return self.variables[name]


def _format_example(number: int, example: Mapping[str, Any]) -> str:
    texts = [
        each if isinstance(each, str) else json.dumps(each, ensure_ascii=False, indent=2)
        for each in (example["input"], example["output"])
    ]
    return f"## Example {number}\nInput: {texts[0]}\nOutput: {texts[1]}"
