"""Cases of an evaluation: an input, and the properties that a good run of an agent has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import attrs

from agentfsm.core.errors import MisuseError
from agentfsm.core.header import short_hash
from agentfsm.core.messages import JSON
from agentfsm.core.validation import COUNT, FUNCTION, NAME, POSITIVE, STRING, is_number, shorten_repr
from agentfsm.core.value import Value
from agentfsm.prompts import ReplyCheck
from agentfsm.prompts.assertions import as_checks

if TYPE_CHECKING:
    from agentfsm.core.run import Run

# Hexadecimal digits of the id of a case that was given none: enough to tell the inputs of a suite apart.
CASE_ID_DIGITS: Final = 8


@attrs.frozen(kw_only=True)
class ExpectedCall(Value):
    """A call that a path of tools has."""

    tool: str = attrs.field(validator=NAME)
    """Name of the tool."""

    arguments: Mapping[str, JSON] | None = None
    """Arguments that the call must have; it may have others beside them. None: any arguments."""

    def matches(self, tool: str, arguments: Mapping[str, JSON]) -> bool:
        """Return whether a call is the expected one."""
        wanted = self.arguments or {}
        return tool == self.tool and all(name in arguments and arguments[name] == wanted[name] for name in wanted)


# A path: groups of calls in their order. The calls of one group may come in any order.
CallPath: TypeAlias = tuple[tuple[ExpectedCall, ...], ...]
# Takes a run and its dependencies, and returns True, or False or the reason why its effect is not the expected one.
WorldCheck: TypeAlias = Callable[["Run[Any]", Any], bool | str]

_PATH_FORM: Final = (
    "a path is a list such as ['search', {'tool': 'pay', 'arguments': {'cents': 5}}, {'any_order': ['mail', 'log']}]"
)


def _as_paths(given: Iterable[Iterable[object]] | None) -> tuple[CallPath, ...] | None:
    if given is None:
        return None
    if isinstance(given, str | Mapping):
        raise MisuseError(f"Case(paths={shorten_repr(given)}): give a list of paths; {_PATH_FORM}")
    return tuple(map(_as_path, given))


def _as_path(given: object) -> CallPath:
    if isinstance(given, str | Mapping) or not isinstance(given, Sequence):
        raise MisuseError(f"Case(paths=[{shorten_repr(given)}]): {_PATH_FORM}")
    return tuple(map(_as_group, given))


def _as_group(given: object) -> tuple[ExpectedCall, ...]:
    match given:
        case {"any_order": [*calls], **rest} if not rest:
            return tuple(map(_as_call, calls))
        case set() | frozenset():
            return tuple(map(_as_call, sorted(given, key=repr)))
        case tuple() if given and all(isinstance(each, ExpectedCall) for each in given):
            return given
        case _:
            return (_as_call(given),)


def _as_call(given: object) -> ExpectedCall:
    match given:
        case ExpectedCall():
            return given
        case str():
            return ExpectedCall(tool=given)
        case {"tool": str() as tool, **rest} if rest.keys() <= {"arguments"}:
            arguments = rest.get("arguments")
            if arguments is None or isinstance(arguments, Mapping):
                return ExpectedCall(tool=tool, arguments=arguments)
    raise MisuseError(f"{shorten_repr(given)} is not a call of a path: {_PATH_FORM}")


def _as_weights(given: Mapping[str, float]) -> Mapping[str, float]:
    if not isinstance(given, Mapping) or not all(is_number(each) and each >= 0 for each in given.values()):
        raise MisuseError(f"Case(weights={shorten_repr(given)}): give numbers, 0 or more, by the name of a scorer")
    return MappingProxyType(dict(given))


def _as_tags(given: Iterable[str]) -> tuple[str, ...]:
    if isinstance(given, str):
        raise MisuseError(f"Case(tags={given!r}): give a list, [{given!r}]")
    return tuple(given)


def _as_world_check(given: WorldCheck | str | None) -> WorldCheck | None:
    if not isinstance(given, str):
        return given
    module, colon, name = given.partition(":")
    if not colon:
        raise MisuseError(f"Case(check={given!r}): name a function as module:function")
    try:
        found: WorldCheck = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise MisuseError(f"Case(check={given!r}) cannot be loaded: {error}") from error
    return found


@attrs.frozen(kw_only=True)
class Case(Value):
    """An input, and the properties that a good run has. A property that is not given is not scored.

    Raises:
        MisuseError: if a field has the wrong form.
    """

    input: str = attrs.field(validator=NAME)
    """The task, as a user writes it."""

    id: str = attrs.field(
        default=attrs.Factory(lambda case: short_hash(str(case.input), CASE_ID_DIGITS), takes_self=True),
        validator=NAME,
    )
    """Name of the case, unique in its suite. Default: a hash of the input."""

    paths: tuple[CallPath, ...] | None = attrs.field(default=None, converter=_as_paths)
    """Valid paths of tool calls; the run is compared with the nearest. The calls of a path have an order, except those
    of a set. `[]` is the path without calls. None: calls are not scored.
    """

    expect: tuple[ReplyCheck, ...] = attrs.field(default=(), converter=as_checks)
    """Checks of the answer: `json_valid()`, `contains("42")`, ..., as in tests of prompts."""

    check: WorldCheck | None = attrs.field(default=None, converter=_as_world_check, validator=FUNCTION.or_none())
    """Check of the world after the run: a function, plain or async, or its name as "module:function". It takes the run
    and its dependencies, and returns True, or False or the reason why the effect is not the expected one.
    """

    answer: str = attrs.field(default="", validator=STRING)
    """Expected answer, for judges; empty if there is none. It is compared by meaning, never as text."""

    max_steps: int | None = attrs.field(default=None, validator=COUNT.or_none())
    """Turns that a good run needs at most. None: steps are not scored."""

    max_usd: float | None = attrs.field(default=None, validator=POSITIVE.or_none())
    """US dollars that a good run costs at most. None: cost is not scored."""

    max_seconds: float | None = attrs.field(default=None, validator=POSITIVE.or_none())
    """Seconds of active time that a good run needs at most. None: latency is not scored."""

    weights: Mapping[str, float] = attrs.field(factory=dict, converter=_as_weights)
    """Weights of the scorers in the total of a run, by their names; 1 for those that are not named."""

    tags: tuple[str, ...] = attrs.field(default=(), converter=_as_tags)
    """Tags, by which results are also reported."""

    recorded: str = attrs.field(default="", validator=STRING)
    """Id of the run that the case was made from, for the speeds "replay" and "recorded"; empty if there is none."""


def _as_cases(given: Iterable[Case]) -> tuple[Case, ...]:
    cases = tuple(given)
    if not cases or not all(isinstance(each, Case) for each in cases):
        raise MisuseError("Suite(cases=...): give one Case or more")
    ids = [case.id for case in cases]
    if twice := next((each for each in ids if ids.count(each) > 1), None):
        raise MisuseError(f"the suite has two cases with the id {twice!r}: give each an id of its own")
    return cases


@attrs.frozen
class Suite(Value):
    """Cases that are evaluated together. `load_suite` reads one from a file.

    Raises:
        MisuseError: if there is no case, or two have the same id.
    """

    cases: tuple[Case, ...] = attrs.field(converter=_as_cases)
    """The cases."""

    name: str = attrs.field(default="suite", validator=NAME, kw_only=True)
    """Name of the suite, for reports."""

    def __iter__(self) -> Iterator[Case]:
        return iter(self.cases)

    def __len__(self) -> int:
        return len(self.cases)
