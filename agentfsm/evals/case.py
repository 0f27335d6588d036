"""Cases of an evaluation: what a user says and decides, and the properties that a good run of an agent has."""

from __future__ import annotations

import json
import mimetypes
import os
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import attrs

from agentfsm.agents.extras import read_history
from agentfsm.agents.validation import as_roles, to_plain_json
from agentfsm.core.errors import MisuseError
from agentfsm.core.header import short_hash
from agentfsm.core.labels import Label
from agentfsm.core.messages import (
    JSON,
    AudioPart,
    ErrorType,
    FilePart,
    ImagePart,
    Message,
    Outcome,
    Part,
    TextPart,
    UserMessage,
)
from agentfsm.core.validation import COUNT, FUNCTION, NAME, POSITIVE, STRING, is_number, shorten_repr
from agentfsm.core.value import Value
from agentfsm.engine.deciders.answer_key import describe
from agentfsm.evals.run_checks import Expectation, as_expectations
from agentfsm.ports.model import to_mutable_json
from agentfsm.prompts.assertions import load_function

if TYPE_CHECKING:
    from agentfsm.core.run import Run
    from agentfsm.ports.model import Model

# Hexadecimal digits of the id of a case that was given none: enough to tell the inputs of a suite apart.
CASE_ID_DIGITS: Final = 8
_ADDRESS: Final = re.compile(r" at 0x[0-9a-fA-F]+")
# Hexadecimal digits of the digest of a case.
DIGEST_DIGITS: Final = 12


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


def _as_labels(given: Iterable[str]) -> tuple[Label, ...]:
    return tuple(map(Label, given))


@attrs.frozen(kw_only=True)
class ToolFixture(Value):
    """The result of a tool call, which the speed "recorded" gives in place of the tool."""

    tool: str = attrs.field(validator=NAME)
    """Name of the tool."""

    arguments: Mapping[str, JSON] = attrs.field(factory=dict)
    """Arguments of the call, all of them: another call has no result."""

    content: str = attrs.field(validator=STRING)
    """The result, as the model reads it."""

    outcome: Outcome = attrs.field(default=Outcome.DONE, converter=Outcome)
    """Outcome of the call."""

    error_type: ErrorType | None = attrs.field(default=None, converter=attrs.converters.optional(ErrorType))
    """Reason of a failure, for programs; None if there is none."""

    labels: tuple[Label, ...] = attrs.field(default=(), converter=_as_labels)
    """Labels of the result, for guards."""


def _as_fixtures(given: Iterable[ToolFixture | Mapping[str, Any]] | None) -> tuple[ToolFixture, ...] | None:
    if given is None:
        return None
    try:
        return tuple([each if isinstance(each, ToolFixture) else ToolFixture(**each) for each in given])
    except (TypeError, ValueError) as error:
        raise MisuseError(
            f'Case(fixtures=...): give results such as {{"tool": "look", "arguments": {{}}, "content": "7"}} ({error})'
        ) from None


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
    paths = []
    for path in given:
        if isinstance(path, str | Mapping) or not isinstance(path, Sequence):
            raise MisuseError(f"Case(paths=[{shorten_repr(path)}]): {_PATH_FORM}")
        groups: list[tuple[ExpectedCall, ...]] = []
        for group in path:
            match group:
                case {"any_order": [*calls], **rest} if not rest:
                    groups.append(tuple(map(_as_call, calls)))
                case set() | frozenset():
                    groups.append(tuple(map(_as_call, sorted(group, key=repr))))
                case tuple() if group:  # of a path that was converted before
                    groups.append(tuple(map(_as_call, group)))
                case _:
                    groups.append((_as_call(group),))
        paths.append(tuple(groups))
    return tuple(paths)


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
    found: WorldCheck | None = load_function(given, "Case(check")
    return found


def _as_input(given: str | Mapping[str, JSON]) -> str:
    return json.dumps(given, ensure_ascii=False) if isinstance(given, Mapping) else given


Rubric: TypeAlias = Mapping[str, Mapping[int, str]]
LOWEST: Final = 1
HIGHEST: Final = 5


def as_rubric(given: Any) -> Rubric:
    """Return criteria with their anchors; a sentence is a criterion that holds, holds in part, or does not.

    Raises:
        MisuseError: if it has another form.
    """
    if isinstance(given, str):
        given = [given]
    if isinstance(given, Sequence) and given and all(isinstance(each, str) and each.strip() for each in given):
        return {
            f"criterion {number}" if len(given) > 1 else "criterion": {
                LOWEST: f"this does not hold: {text}",
                3: "it holds in part",
                HIGHEST: "it holds",
            }
            for number, text in enumerate(given, 1)
        }
    criteria: Any = given
    try:
        found = {str(name): {int(score): str(text) for score, text in each.items()} for name, each in criteria.items()}
    except (AttributeError, TypeError, ValueError):
        found = {}
    if not found or not all(len(each) > 1 and {*each} <= {*range(LOWEST, HIGHEST + 1)} for each in found.values()):
        raise MisuseError(
            f'rubric={shorten_repr(given)}: give anchors by criterion, {{"tone": {{1: "rude", 5: "friendly"}}}}, or '
            "sentences that hold of a good answer"
        )
    return found


@attrs.frozen(kw_only=True)
class Turn(Value):
    """One thing that the user of a case does: exactly one of `input`, `send`, `approve`, `reject` and `answer`.

    Raises:
        MisuseError: if it is none or several of them.
    """

    input: str = attrs.field(default="", converter=_as_input, validator=STRING, kw_only=False)
    """Text that the user writes. It begins the next run of the conversation, or answers the question that its run waits
    with.
    """

    send: str = attrs.field(default="", validator=STRING)
    """Text that arrives in the inbox of a run while the agent works on the turn before, or while it waits."""

    approve: str = attrs.field(default="", validator=STRING)
    """Tool whose waiting call is approved; "plan" for a plan."""

    reject: str = attrs.field(default="", validator=STRING)
    """Tool whose waiting call is rejected; "plan" for a plan."""

    answer: str | Mapping[str, JSON] = ""
    """Answer to the question that the run waits with: a text, or an object that fits its schema."""

    arguments: Mapping[str, JSON] | None = None
    """With `approve`: arguments in place of the model's. None: the model's."""

    message: str = attrs.field(default="", validator=STRING)
    """With `reject`: the reason, which the model reads."""

    expect: tuple[Expectation, ...] = attrs.field(default=(), converter=as_expectations)
    """Checks of the answer and the calls of this turn, as `Case.expect`."""

    paths: tuple[CallPath, ...] | None = attrs.field(default=None, converter=_as_paths)
    """Valid paths of the tool calls of this turn, as `Case.paths`. None: they are not scored by themselves."""

    rubric: Rubric | None = attrs.field(default=None, converter=attrs.converters.optional(as_rubric))
    """Criteria of judges for what the user gets after this turn, as `Case.rubric`: an answer, or a question or a call
    that the run then waits with. The judge reads the conversation up to it. None: judges do not grade this turn.
    """

    def __attrs_post_init__(self) -> None:
        names = ("input", "send", "approve", "reject", "answer")
        if len([name for name in names if getattr(self, name)]) != 1:
            raise MisuseError(f"{shorten_repr(self)}: give exactly one of {', '.join(names)}")

    def __str__(self) -> str:
        if self.approve or self.reject:
            return f"(approves {self.approve})" if self.approve else f"(rejects {self.reject}) {self.message}".rstrip()
        answer = self.answer if isinstance(self.answer, str) else json.dumps(self.answer, ensure_ascii=False)
        return self.input or self.send or answer


@attrs.frozen(kw_only=True)
class SimulatedUser(Value):
    """A model that plays the user of a case, as the last of its `turns`.

    It reads the answers of the agent, and writes the next text, until its stop rule holds. If the agent waits for an
    approval or an answer, it decides. Each reply is a run in the agent's store, so none is made twice.
    """

    goal: str = attrs.field(validator=NAME, kw_only=False)
    """Description of the simulated user: the goal, the facts that the user knows, and the manner."""

    model: Model | str
    """Model that plays the user, or its name. A cheap one will do."""

    stop: str = attrs.field(default="the goal is reached, or clearly cannot be reached", validator=NAME)
    """When the user ends the conversation, in words."""

    max_turns: int = attrs.field(default=8, validator=COUNT)
    """Turns of the user after which the conversation ends in any case. Default 8."""


# Takes the newest run of the conversation, None before the first, and returns the next turn, or None at the end.
NextTurn: TypeAlias = Callable[["Run[Any] | None"], "Turn | str | Awaitable[Turn | str | None] | None"]


def _as_turns(given: Iterable[object] | SimulatedUser | NextTurn | str) -> tuple[Turn | SimulatedUser | NextTurn, ...]:
    if isinstance(given, str) or callable(given):
        return (load_function(given, "Case(turns"),)
    if isinstance(given, SimulatedUser | Mapping) or not isinstance(given, Iterable):
        return (_as_turn(given),)
    return tuple(map(_as_turn, given))


def _as_turn(given: Any) -> Turn | SimulatedUser | NextTurn:
    match given:
        case str():
            return Turn(given)
        case Mapping():
            kind: Any = SimulatedUser if "goal" in given else Turn
            if unknown := next((name for name in given if name not in attrs.fields_dict(kind)), None):
                raise MisuseError(f"Case(turns=...): a {kind.__name__} has no field {unknown!r}")
            if kind is SimulatedUser and "model" not in given:
                raise MisuseError(
                    f"Case(turns=[{shorten_repr(given)}]): a simulated user needs a model, such as "
                    "{'goal': ..., 'model': 'openai:gpt-5.4-mini'}"
                )
            try:
                made: Turn | SimulatedUser = kind(**given)
            except TypeError as error:
                raise MisuseError(f"Case(turns=[{shorten_repr(given)}]): {error}") from None
            return made
    if isinstance(given, Turn | SimulatedUser):
        return given
    if callable(given):
        user: NextTurn = given  # pyright: ignore[reportAssignmentType]  its result is checked when it is called
        return user
    raise MisuseError(f"Case(turns=[{shorten_repr(given)}]): give texts, turns, and at the end a user or a function")


def _as_files(given: Iterable[str | os.PathLike[str] | Part]) -> tuple[Part, ...]:
    """Return files as parts of a prompt: an image, a recording, a PDF, or else a text."""
    if isinstance(given, str | os.PathLike | Mapping):
        raise MisuseError(f"Case(files={shorten_repr(given)}): give a list of paths")
    parts: list[Part] = []
    for each in given:
        if not isinstance(each, str | os.PathLike):
            parts.append(each)
            continue
        path = Path(each)
        kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
        try:
            data = path.read_bytes()
            if kind.startswith("image/"):
                parts.append(ImagePart.of(data, kind))
            elif kind.startswith("audio/"):
                parts.append(AudioPart.of(data, kind))
            elif kind == "application/pdf":
                parts.append(FilePart.of(data, kind, path.name))
            else:
                parts.append(TextPart(text=f"{path.name}:\n{data.decode()}"))
        except (OSError, UnicodeDecodeError) as error:
            raise MisuseError(
                f"Case(files=...): {path} cannot be read: {error}; a part of a message may be given"
            ) from None
    return tuple(parts)


def _as_history(given: Sequence[Message] | Sequence[Mapping[str, Any]]) -> tuple[Message, ...]:
    return read_history(given) if given else ()


def _as_metadata(given: Mapping[str, Any]) -> Mapping[str, Any]:
    return to_plain_json(given, "metadata")


def _as_memory(given: Iterable[str | Mapping[str, Any]] | None) -> tuple[str | Mapping[str, Any], ...] | None:
    if isinstance(given, str | Mapping):
        raise MisuseError(f"Case(memory={shorten_repr(given)}): give a list of texts, or of arguments of `remember`")
    return None if given is None else tuple(given)


def hash_facts(facts: Any, digits: int) -> str:
    """Return a hash of what `describe` returned, which is the same in each process: no addresses of objects count."""
    return short_hash(_ADDRESS.sub("", json.dumps(to_mutable_json(facts), sort_keys=True, default=str)), digits)


def _describe_turn(turn: Turn | SimulatedUser | NextTurn) -> list[Any] | str:
    """Return a turn as JSON that is the same in each process: a model and a function by their names."""
    if isinstance(turn, Turn):
        names = ("input", "send", "approve", "reject", "answer", "arguments", "message")
        return [getattr(turn, name) for name in names]
    if isinstance(turn, SimulatedUser):
        return [turn.goal, turn.stop, turn.max_turns, getattr(turn.model, "name", turn.model)]
    return str(getattr(turn, "__qualname__", type(turn).__qualname__))


def _name_case(case: Case) -> str:
    turns = [json.dumps(_describe_turn(each)) for each in case.turns]
    said = [json.dumps(attrs.asdict(each), default=str) for each in case.messages]
    return short_hash("\n".join([str(case.input), *turns, *said]), CASE_ID_DIGITS)


@attrs.frozen(kw_only=True)
class Case(Value):
    """One case: the messages of a user, and the properties of a good run. Properties that are not given are not scored.

    It begins with `input`, the first of `turns`, or the last of `messages`.

    Raises:
        MisuseError: if a field has the wrong form.
    """

    input: str = attrs.field(default="", converter=_as_input, validator=STRING)
    """The task, as a user writes it; for a flow, its inputs as a mapping."""

    turns: tuple[Turn | SimulatedUser | NextTurn, ...] = attrs.field(default=(), converter=_as_turns)
    """Further turns of the user: texts, a `Turn` for a decision or a message, and optionally at the end a
    `SimulatedUser`, or a function, plain or async, that takes the newest run and returns the next turn, or None.
    """

    messages: tuple[Message, ...] = attrs.field(default=(), converter=_as_history)
    """Conversation that the case continues, oldest first: messages, or dicts as in chat completions. Without an input,
    the last one, of the user, is the input.
    """

    id: str = attrs.field(default=attrs.Factory(_name_case, takes_self=True), validator=NAME)
    """Name of the case, unique in its suite. Default: a hash of what the user says."""

    user: str | None = attrs.field(default=None, validator=NAME.or_none())
    """User on whose behalf the runs work; None for none."""

    session: str | None = attrs.field(default=None, validator=NAME.or_none())
    """Session in the agent's store whose conversation the case continues, if there is one. The runs are in a session of
    their own, whose name begins with this one, so it stays as it is. None: no session.
    """

    roles: tuple[str, ...] = attrs.field(default=(), converter=as_roles)
    """Roles of the user."""

    tenant: str | None = attrs.field(default=None, validator=NAME.or_none())
    """Tenant of the user; None for none."""

    metadata: Mapping[str, Any] = attrs.field(factory=dict, converter=_as_metadata)
    """Metadata of the runs, as plain JSON."""

    memory: tuple[str | Mapping[str, Any], ...] | None = attrs.field(default=None, converter=_as_memory)
    """Items that the memory of the user has at the beginning: texts, or arguments of `Memory.remember`. The runs read
    and write a memory of their own, with nothing else in it. None: the agent's memory as it is.
    """

    files: tuple[Part, ...] = attrs.field(default=(), converter=_as_files)
    """Files that the user attaches to the first text: paths, or parts of a message. A text file is read as text."""

    paths: tuple[CallPath, ...] | None = attrs.field(default=None, converter=_as_paths)
    """Valid paths of tool calls, over all turns; they are compared with the nearest. The calls of a path have an order,
    except those of a set. `[]` is the path without calls. None: calls are not scored.
    """

    expect: tuple[Expectation, ...] = attrs.field(default=(), converter=as_expectations)
    """Checks of the last answer, as in tests of prompts: `contains("42")`, `not_contains("sorry")`, `fits_schema(...)`,
    or a function of it that returns True, or False or a reason; and of all runs: `not_called("refund")` and
    `no_question()`.
    """

    check: WorldCheck | None = attrs.field(default=None, converter=_as_world_check, validator=FUNCTION.or_none())
    """Check of the world at the end: a function, plain or async, or its name as "module:function". It takes the last
    run and its dependencies, and returns True, or False or the reason why the effect is not the expected one.
    """

    answer: str = attrs.field(default="", validator=STRING)
    """Expected answer, for judges; empty if there is none. It is compared by meaning, never as text."""

    rubric: Rubric | None = attrs.field(default=None, converter=attrs.converters.optional(as_rubric))
    """Criteria of judges for this case, in place of those of the judge: a sentence that holds of a good answer, or
    several, or anchors by criterion, as `RubricJudge.rubric` has them. None: those of the judge.
    """

    max_steps: int | None = attrs.field(default=None, validator=COUNT.or_none())
    """Turns of the model that a good run needs at most. None: steps are not scored."""

    max_tokens: int | None = attrs.field(default=None, validator=COUNT.or_none())
    """Input and output tokens that a good run uses at most. None: tokens are not scored."""

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

    fixtures: tuple[ToolFixture, ...] | None = attrs.field(default=None, converter=_as_fixtures)
    """Results of tools for the speed "recorded"; equal calls get theirs in order. So the suite needs no run in the
    store. None: those of the run `recorded`.
    """

    def __attrs_post_init__(self) -> None:
        first, *rest = self.all_turns or (None,)
        if first is None:
            raise MisuseError("Case(...) says nothing: give input=, turns=, or messages= that end with the user's")
        if isinstance(first, Turn) and not first.input:
            raise MisuseError(f"Case(turns=[{shorten_repr(first)}, ...]): the first turn is a text")
        if any(not isinstance(each, Turn) for each in (first, *rest)[:-1]):
            raise MisuseError("Case(turns=...): a simulated user goes on to the end, so it is the last of the turns")
        if self.memory is not None and self.user is None:
            raise MisuseError("Case(memory=...): give user=, whose memory it is")
        if self.messages and self.session is not None:
            raise MisuseError(
                "Case(messages=..., session=...): both are a conversation to go on from: give one of them"
            )

    @property
    def all_turns(self) -> tuple[Turn | SimulatedUser | NextTurn, ...]:
        """The turns, the input among them."""
        if self.input:
            return (Turn(self.input), *self.turns)
        last = self.messages[-1] if self.messages else None
        return (Turn(last.text), *self.turns) if isinstance(last, UserMessage) else self.turns

    @property
    def history(self) -> tuple[Message, ...]:
        """The messages before the first turn."""
        is_input = not self.input and self.messages and isinstance(self.messages[-1], UserMessage)
        return self.messages[:-1] if is_input else self.messages

    def list_facts(self) -> list[Any]:
        """Return what the runs depend on, as JSON: functions by their code, and nothing of what is expected."""
        turns = [_describe_turn(each) for each in self.all_turns]
        functions = [describe(each) for each in self.all_turns if not isinstance(each, Turn | SimulatedUser)]
        about = [self.user, self.session, list(self.roles), self.tenant, dict(self.metadata), self.memory]
        said = [[json.dumps(attrs.asdict(each), default=str) for each in part] for part in (self.history, self.files)]
        return [turns, functions, about, said]

    @property
    def digest(self) -> str:
        """Hash of all that the case says and expects, without its id and tags: 12 hexadecimal digits."""
        names = [each for each in attrs.fields_dict(Case) if each not in {"id", "tags"}]
        content = {name: describe(getattr(self, name)) for name in names}
        return hash_facts(content, DIGEST_DIGITS)


def _as_cases(given: Iterable[Case]) -> tuple[Case, ...]:
    cases = tuple(given)
    if not cases or not all(isinstance(each, Case) for each in cases):
        raise MisuseError("Suite(cases=...): give one Case or more")
    ids = [case.id for case in cases]
    if twice := next((each for each in ids if ids.count(each) > 1), None):
        if all(case.id == _name_case(case) for case in cases if case.id == twice):
            first = next(case.all_turns[0] for case in cases if case.id == twice)
            raise MisuseError(
                f"two cases of the suite begin with {str(first)[:80]!r} and say the same: give each an id"
            )
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
