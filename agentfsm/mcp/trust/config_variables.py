"""Fill in the variables of a configuration: environment, folders, inputs of a person, and files of variables."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Final, TypeAlias

import attrs

from agentfsm.core.errors import MisuseError
from agentfsm.core.validation import shorten_repr
from agentfsm.core.value import Value

# Prefix of the environment variables that answer inputs: AGENTFSM_INPUT_API_KEY is the value of the input "api-key".
INPUT_PREFIX: Final = "AGENTFSM_INPUT_"

# The last branch matches unsupported forms.
_VARIABLE: Final = re.compile(
    r"\$\{input:([^}]+)\}|\$\{(?:env:)?([A-Za-z_/][A-Za-z0-9_]*)(?::-([^}]*))?\}|\$\{[^}]*\}?"
)
_BARE_VARIABLE: Final = re.compile(r"\$([A-Za-z_][A-Za-z0-9_]*)")
_ENV_LINE: Final = re.compile(r"\s*(?:export\s+)?([A-Za-z_][A-Za-z0-9_.]*)\s*=\s*(.*?)\s*")
_QUOTED: Final = re.compile(r"""(?P<quote>["'])(?P<text>.*)(?P=quote)(?:\s+#.*)?""")
_MAX_ENV_FILE_BYTES: Final = 100_000


@attrs.frozen(kw_only=True)
class InputField(Value):
    """Value that a configuration leaves to its user, such as a key: `${input:id}`."""

    id: str
    """Name of the input in the file."""

    description: str = ""
    """Text of the file for the person who gives the value."""

    is_secret: bool = False
    """Whether the value must not be shown while it is typed."""

    default: str | None = None
    """Value without an answer. None: there is no default."""

    choices: tuple[str, ...] = ()
    """Permitted values; none if any text is permitted."""

    is_required: bool = True
    """Whether the server cannot be used without a value. False: a missing value is left out."""

    is_list: bool = False
    """Whether the value stands for several arguments, separated as in PATH."""

    @property
    def variable(self) -> str:
        """Name of the environment variable that gives the value."""
        return INPUT_PREFIX + re.sub(r"\W", "_", self.id, flags=re.ASCII).upper()


NO_VARIABLES: Final[Mapping[str, str]] = MappingProxyType({})

AskInput: TypeAlias = Callable[[InputField], "str | None"]
"""Function that gives the value of an input; None if there is no answer."""


@attrs.define(eq=False, repr=False, kw_only=True)
class ConfigVariables:
    """Values of the variables in one configuration file."""

    environment: Mapping[str, str] | None
    """Environment variables. None: the file is foreign, and only its inputs and folders are filled in."""

    answers: Mapping[str, str] = attrs.field(factory=dict)
    """Environment variables that answer inputs, see `InputField.variable`."""

    folders: Mapping[str, str] = attrs.field(factory=dict)
    """Variables of hosts that name folders, such as `workspaceFolder`."""

    inputs: Mapping[str, InputField] = attrs.field(factory=dict)
    """Inputs that the file describes, by id."""

    ask: AskInput | None = None
    """Function that gives the values of inputs. None: only the environment and defaults do."""

    _answers: dict[str, str | None] = attrs.field(factory=dict, init=False)
    """Values of inputs by id: one that is used twice is asked for once."""

    def expand(self, text: str, *, bare: bool = False, own: Mapping[str, str] = NO_VARIABLES) -> str:
        """Replace the variables in a text by their values.

        Args:
            text: The text.
            bare: Whether `$NAME` is a variable, as Gemini's command line reads it.
            own: Variables of the server itself, which go before those of the environment.

        Raises:
            MisuseError: when a variable has no value, or its form is not supported.
        """
        if bare:
            text = _BARE_VARIABLE.sub(r"${\1}", text)
        return _VARIABLE.sub(partial(self._resolve, own), text)

    def expand_all(
        self, texts: Iterable[str], *, bare: bool = False, own: Mapping[str, str] = NO_VARIABLES
    ) -> list[str]:
        """Replace the variables in arguments. An input that is a list becomes several, or none."""
        expanded: list[str] = []
        for text in texts:
            found = _VARIABLE.fullmatch(text)
            field = self.inputs.get(found[1]) if found is not None and found[1] is not None else None
            if field is not None and (field.is_list or not field.is_required):
                value = self._resolve_input(field.id)
                parts = value.split(os.pathsep) if field.is_list else [value]
                expanded += [part for part in parts if part]
            else:
                expanded.append(self.expand(text, bare=bare, own=own))
        return expanded

    def _resolve(self, own: Mapping[str, str], found: re.Match[str]) -> str:
        input_id, name, default = found.groups()
        if input_id is not None:
            return self._resolve_input(input_id)
        if name in own:
            return own[name]
        if name in self.folders:
            return self.folders[name]
        if name is None or self.environment is None:
            hint = "variables are not expanded here" if self.environment is None else "use ${NAME} or ${NAME:-default}"
            raise MisuseError(f"unsupported variable {shorten_repr(found[0])}: {hint}")
        value = self.environment.get(name)
        if default is not None:
            return value or default
        if value is None:
            raise MisuseError(f"the variable {name} is not set: set it, or write ${{{name}:-default}} for a default")
        return value

    def _resolve_input(self, input_id: str) -> str:
        field = self.inputs.get(input_id) or InputField(id=input_id)
        if input_id not in self._answers:
            self._answers[input_id] = self._find_answer(field)
        value = self._answers[input_id]
        if value is not None:
            return value
        if field.is_required:
            raise MisuseError(f"its input {input_id!r} has no value: set the variable {field.variable}")
        return ""

    def _find_answer(self, field: InputField) -> str | None:
        given = self.answers.get(field.variable)
        if given is None and self.ask is not None:
            given = self.ask(field)
        if given is None:
            given = field.default
        if given is not None and field.choices and given not in field.choices:
            raise MisuseError(f"its input {field.id!r} must be one of {', '.join(map(repr, field.choices))}")
        return given


def read_env_file(path: Path) -> dict[str, str]:
    """Read a file of variables, as VS Code's `envFile`: lines of NAME=value, with quotes and comments.

    Raises:
        MisuseError: when it cannot be read, or a line has another form.
    """
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_ENV_FILE_BYTES + 1)
        text = content.decode("utf-8-sig")
    except (OSError, UnicodeError) as error:
        raise MisuseError(f"its envFile {str(path)!r} cannot be read: {error}") from error
    if len(content) > _MAX_ENV_FILE_BYTES:
        raise MisuseError(f"its envFile {str(path)!r} must not be larger than {_MAX_ENV_FILE_BYTES:,} bytes")
    found: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        if (parts := _ENV_LINE.fullmatch(line)) is None:
            raise MisuseError(f"line {number} of its envFile {str(path)!r} must be NAME=value")
        found[parts[1]] = _unquote(parts[2])
    return found


def _unquote(text: str) -> str:
    if (found := _QUOTED.fullmatch(text)) is None:
        return re.sub(r"(^|\s+)#.*", "", text)
    return found["text"].replace("\\n", "\n").replace('\\"', '"') if found["quote"] == '"' else found["text"]
