"""What callers hand to an agent, looked at where it comes in: what is wrong is said there, and not where it is used."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from agentfsm.core.errors import MisuseError
from agentfsm.core.limits import Limits
from agentfsm.core.messages import Message, encodable
from agentfsm.core.run import Run
from agentfsm.core.settings import Settings
from agentfsm.engine.tools.permission import Permissions

if TYPE_CHECKING:
    from agentfsm.agent import Agent

Test = Callable[[Any], bool]


def _is(*kinds: type) -> Test:
    return lambda value: isinstance(value, kinds)


def _has(*names: str) -> Test:
    """Return a test of what some port asks for; a class has the names, too, and is none."""
    return lambda value: not isinstance(value, type) and all(hasattr(value, name) for name in names)


def _is_name(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _are_functions(value: object) -> bool:
    return isinstance(value, Sequence) and all(map(callable, value))


# What a field of an agent has to be, and what to give where it is something else.
_FIELDS: Final[Mapping[str, tuple[Test, str]]] = {
    "instructions": (_is(str), "one text, '' for none"),
    "permissions": (_is(Permissions, type(None)), "Permissions(...), for example Permissions(level='write')"),
    "selector": (_has("wants", "select"), "a ToolSelector, for example AutoSelect()"),
    "name": (_is_name, "a text that is not empty: a worker finds the agent's runs by it"),
    "version": (_is(str), "a text"),
    "limits": (_is(Limits), "Limits(...), for example Limits(turns=3)"),
    "settings": (
        lambda value: isinstance(value, Settings) or callable(value),
        "Settings(...), for example Settings(temperature=0), or a function of the run that returns such",
    ),
    "output_validators": (_are_functions, "a list of functions, also where it is one: [check]"),
    "reflector": (
        lambda value: value is None or _has("model", "answer_tokens", "wants", "judge")(value),
        "Reflector(model=...) of agentfsm.reflection, or a Judge of your own",
    ),
    "clock": (_has("now", "monotonic"), "a Clock, for example SystemClock()"),
    "store": (_has("create", "append", "post", "read", "aclose"), "a store, for example SQLiteStore('runs.db')"),
    "new_id": (callable, "a function that makes ids"),
    "target": (_is(str), "'module:attribute'"),
}


def check_agent(agent: Agent[Any]) -> None:
    """Refuse an agent of which a field is not what it has to be.

    Raises:
        MisuseError: naming the first, and what to give.
    """
    for name, (fits, wanted) in _FIELDS.items():
        value = getattr(agent, name)
        if not fits(value):
            raise MisuseError(f"Agent({name}={_shown(value)}): give {wanted}")


def _shown(value: object) -> str:
    text = value.__name__ if isinstance(value, type) else repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."  # noqa: PLR2004  the width of a line


def check_start(user: object, session: object, settings: object, after: object) -> None:
    """Refuse what begins no run; for what is left out, nothing is called: this is on the way of each run.

    Raises:
        MisuseError: naming it, and what to give.
    """
    if user is not None and not isinstance(user, str):
        raise MisuseError(f"user={_shown(user)}: give a text, for example {str(user)!r}")
    if session is not None and not _is_name(session):
        raise MisuseError(f"session={_shown(session)}: give a text that is not empty, or None for no session")
    if settings is not None and not isinstance(settings, Settings):
        raise MisuseError(f"settings={_shown(settings)}: give Settings(...), for example Settings(temperature=0)")
    if after is not None and not isinstance(after, Run):
        raise MisuseError(f"after={_shown(after)}: give the run itself, for example await agent.load({str(after)!r})")


def roles_of(roles: Iterable[str]) -> tuple[str, ...]:
    """Return roles as they are kept.

    Raises:
        MisuseError: when it is one text, whose letters would be taken for roles, or holds what is no text.
    """
    given = (roles,) if isinstance(roles, str) else tuple(roles)
    if isinstance(roles, str) or not all(isinstance(role, str) for role in given):
        raise MisuseError(f"roles are several names, not {_shown(roles)}: write roles=[{', '.join(map(repr, given))}]")
    return given


def messages_of(messages: Iterable[Message] | None) -> tuple[Message, ...]:
    """Return a history as it is kept; None is none.

    Raises:
        MisuseError: when it is no sequence; whether it holds messages is for `check_history` to see.
    """
    if messages is None:
        return ()
    if isinstance(messages, str) or not isinstance(messages, Iterable):
        raise MisuseError(f"messages={_shown(messages)}: give a list of messages, for example run.messages")
    return tuple(messages)


def check_run(run: object, rung: str) -> None:
    """Refuse what is no run.

    Raises:
        MisuseError: when it is none; it says how to get one.
    """
    if not isinstance(run, Run):
        raise MisuseError(f"agent.{rung} takes a Run, not {_shown(run)}: write agent.{rung}(agent.start('...'))")


def text_of(text: object, what: str) -> str:
    """Return what a person has said, as any wire takes it.

    Raises:
        MisuseError: when it is no text.
    """
    if not isinstance(text, str):
        raise MisuseError(f"{what}={_shown(text)}: give a text")
    return encodable(text)
