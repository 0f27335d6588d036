"""What callers hand to an agent, looked at where it comes in: what is wrong is said there, and not where it is used."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from agentfsm.core.errors import MisuseError
from agentfsm.core.json_text import encode_json
from agentfsm.core.limits import Limits
from agentfsm.core.machine import State
from agentfsm.core.messages import Message, replace_surrogates
from agentfsm.core.run import Run
from agentfsm.core.settings import Settings
from agentfsm.ports.context import Context
from agentfsm.ports.store import Filter
from agentfsm.stores.rules import check_run_id
from agentfsm.tools.permission import Permissions

if TYPE_CHECKING:
    from agentfsm.ports.context import ContextPolicy

# Characters of a run's id: what any store takes as a key, also with the calls of a chain of agents behind it.
MAX_ID_CHARS: Final = 200

Predicate = Callable[[Any], bool]


def _is_instance_of(*kinds: type) -> Predicate:
    return lambda value: isinstance(value, kinds)


def _has_members(*names: str) -> Predicate:
    """Return a test of what some port asks for; a class has the names, too, and is none."""
    return lambda value: not isinstance(value, type) and all(hasattr(value, name) for name in names)


def _is_name(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _are_functions(value: object) -> bool:
    return isinstance(value, Sequence) and all(map(callable, value))


_is_store: Final = _has_members("create", "append", "post", "read", "subscribe", "aclose")
_STORE_WANTED: Final = "a store, for example SQLiteStore('runs.db')"

# What a field of an agent has to be, and what to give where it is something else.
_AGENT_FIELDS: Final[Mapping[str, tuple[Predicate, str]]] = {
    "instructions": (_is_instance_of(str), "one text, '' for none"),
    "permissions": (
        _is_instance_of(Permissions, type(None)),
        "Permissions(...), for example Permissions(level='write')",
    ),
    "selector": (_has_members("wants", "select", "find"), "a ToolSelector, for example AutoSelect()"),
    "name": (_is_name, "a text that is not empty: a worker finds the agent's runs by it"),
    "version": (_is_instance_of(str), "a text"),
    "limits": (_is_instance_of(Limits), "Limits(...), for example Limits(turns=3)"),
    "settings": (
        lambda value: isinstance(value, Settings) or callable(value),
        "Settings(...), for example Settings(temperature=0), or a function of the run that returns such",
    ),
    "output_validators": (_are_functions, "a list of functions, also where it is one: [check]"),
    "reflector": (
        lambda value: value is None or _has_members("model", "answer_tokens", "wants", "judge")(value),
        "Reflector(model=...) of agentfsm.reflection, or a Judge of your own",
    ),
    "clock": (_has_members("now", "monotonic"), "a Clock, for example SystemClock()"),
    "store": (_is_store, _STORE_WANTED),
    "durability": (lambda value: value in ("full", "normal"), "'full' or 'normal'"),
    "new_id": (callable, "a function that makes ids"),
    "target": (_is_instance_of(str), "'module:attribute'"),
}


def check_agent(agent: object) -> None:
    """Refuse an agent of which a field is not what it has to be.

    Raises:
        MisuseError: naming the first, and what to give.
    """
    for name, (fits, wanted) in _AGENT_FIELDS.items():
        value = getattr(agent, name)
        if not fits(value):
            raise MisuseError(f"Agent({name}={_shorten_repr(value)}): give {wanted}")


def check_store(store: object) -> None:
    """Refuse an object that is not a store.

    Raises:
        MisuseError: naming it, and what to give.
    """
    if not _is_store(store):
        raise MisuseError(f"Runs({_shorten_repr(store)}): give {_STORE_WANTED}")


def _shorten_repr(value: object) -> str:
    text = value.__name__ if isinstance(value, type) else repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."  # noqa: PLR2004  the width of a line


def as_context(context: Context | ContextPolicy | Iterable[ContextPolicy]) -> Context:
    """Return the policies of an agent, given as one, as several, or put together already.

    Raises:
        MisuseError: when there is one that is none.
    """
    if isinstance(context, Context):
        return context
    return Context(context if isinstance(context, Iterable) else (context,))


def as_states(states: Iterable[State]) -> frozenset[State]:
    """Return states, which may be given by their names.

    Raises:
        MisuseError: when there is one that is none, or that a run does not go on from.
    """
    try:
        chosen = frozenset(State(state) for state in states)
    except (TypeError, ValueError):
        there = ", ".join(sorted(set(State) - {State.DONE, State.ERROR}))
        raise MisuseError(f"pause_before={_shorten_repr(states)}: give a set of states, out of {there}") from None
    if final := chosen & {State.DONE, State.ERROR}:
        raise MisuseError(f"pause_before={sorted(final)}: a run that is over does not go on; give other states")
    return chosen


def check_new_id(run_id: str, parent: str | None) -> str:
    """Return the id of a new run; where an agent works for another it is the caller's and more.

    Raises:
        MisuseError: when it is none that a store takes, or a person could type.
    """
    most = MAX_ID_CHARS + len(parent or "")
    if not isinstance(run_id, str):
        raise MisuseError(f"a run's id is a text, and this is a {type(run_id).__name__}: give str(...) of it")
    if not 1 <= len(run_id) <= most or not run_id.isprintable():
        raise MisuseError(f"a run's id has 1 to {most} printable characters, unlike {run_id[:50]!r}")
    return run_id


def to_plain_json(value: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Return an object as it is stored.

    Raises:
        MisuseError: when it is no plain JSON.
    """
    try:
        return dict(json.loads(replace_surrogates(encode_json(dict(value)))))
    except (TypeError, ValueError, RecursionError) as error:
        raise MisuseError(f"{what} must be plain JSON, since they are stored with the run: {error}") from None


def check_start_options(user: object, session: object, settings: object, after: object, parent: object) -> None:
    """Refuse what begins no run; for what is left out, nothing is called: this is on the way of each run.

    Raises:
        MisuseError: naming it, and what to give.
    """
    if user is not None and not isinstance(user, str):
        raise MisuseError(f"user={_shorten_repr(user)}: give a text, for example {str(user)!r}")
    if session is not None and not _is_name(session):
        raise MisuseError(f"session={_shorten_repr(session)}: give a text that is not empty, or None for no session")
    if settings is not None and not isinstance(settings, Settings):
        raise MisuseError(
            f"settings={_shorten_repr(settings)}: give Settings(...), for example Settings(temperature=0)"
        )
    if after is not None and not isinstance(after, Run):
        raise MisuseError(
            f"after={_shorten_repr(after)}: give the run itself, for example await agent.load({str(after)!r})"
        )
    if parent is not None and not isinstance(parent, Run):
        raise MisuseError(f"parent={_shorten_repr(parent)}: give the run itself, whose tool this one is")


def as_roles(roles: Iterable[str]) -> tuple[str, ...]:
    """Return roles as they are kept.

    Raises:
        MisuseError: when it is one text, whose letters would be taken for roles, or holds what is no text.
    """
    if roles == ():  # most runs have none
        return ()
    given: tuple[Any, ...] = tuple(roles) if isinstance(roles, Iterable) and not isinstance(roles, str) else (roles,)
    if isinstance(roles, str) or not all(isinstance(role, str) for role in given):
        names = ", ".join(repr(role) for role in given if role is not None)
        raise MisuseError(f"roles are several names, not {_shorten_repr(roles)}: write roles=[{names}]")
    return given


def as_messages(messages: Iterable[Message] | None) -> tuple[Message, ...]:
    """Return a history as it is kept; None is none.

    Raises:
        MisuseError: when it is no sequence; whether it holds messages is for `check_history` to see.
    """
    if messages is None:
        return ()
    if isinstance(messages, str) or not isinstance(messages, Iterable):
        raise MisuseError(f"messages={_shorten_repr(messages)}: give a list of messages, for example run.messages")
    return tuple(messages)


def check_run(run: object, method: str) -> None:
    """Refuse what is no run.

    Raises:
        MisuseError: when it is none; it says how to get one.
    """
    if not isinstance(run, Run):
        raise MisuseError(
            f"agent.{method} takes a Run, not {_shorten_repr(run)}: write agent.{method}(agent.start('...')) for a new "
            "one, or "
            f"agent.{method}(await agent.load(run_id))"
        )


def check_call_id(run_id: object, call_id: object) -> None:
    """Refuse what names no call of a run.

    Raises:
        MisuseError: when it does not.
    """
    check_run_id(run_id)
    if not isinstance(call_id, str):
        raise MisuseError(
            f"this takes a call's id, a text: give the call_id out of run.pending, not {_shorten_repr(call_id)}"
        )


def check_audit_query(where: object, since: object) -> None:
    """Refuse what chooses no runs.

    Raises:
        MisuseError: naming it, and what to give.
    """
    if not isinstance(where, Filter):
        raise MisuseError(f"audits(where={_shorten_repr(where)}): give a Filter, for example Filter(user='ann')")
    if not isinstance(since, int | float):
        raise MisuseError(
            f"audits(since={_shorten_repr(since)}): give seconds since 1970, for example moment.timestamp()"
        )


def check_count(name: str, count: object) -> None:
    """Refuse what is no number of things, 1 or more.

    Raises:
        MisuseError: naming it.
    """
    if type(count) is not int or count < 1:
        raise MisuseError(f"{name}={_shorten_repr(count)}: give a whole number, 1 or more")


def check_version(version: object) -> None:
    """Refuse what is no version of a run, 0 or more.

    Raises:
        MisuseError: naming what was given.
    """
    if type(version) is not int or version < 0:
        raise MisuseError(f"after={_shorten_repr(version)}: give the version of a run, 0 or more")


def check_seconds(name: str, time_s: object) -> None:
    """Refuse what is no time, more than 0.

    Raises:
        MisuseError: naming it.
    """
    if not isinstance(time_s, int | float) or not time_s > 0:
        raise MisuseError(f"{name}={_shorten_repr(time_s)}: give seconds, more than 0")


def as_text(text: object, what: str) -> str:
    """Return what a person has said, as any wire takes it.

    Raises:
        MisuseError: when it is no text.
    """
    if not isinstance(text, str):
        raise MisuseError(f"{what}={_shorten_repr(text)}: give a text")
    return replace_surrogates(text)
