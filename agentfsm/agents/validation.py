"""Validate arguments at the public boundary, so that mistakes are reported to the caller and not deep in the engine."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from inspect import iscoroutinefunction
from types import NoneType
from typing import TYPE_CHECKING, Any, Final

import attrs

from agentfsm.core.claims import Claims
from agentfsm.core.errors import MisuseError
from agentfsm.core.json_text import encode_json
from agentfsm.core.labels import DATA_LEVELS, ToolKind, matches_tool
from agentfsm.core.limits import Limits, Spend
from agentfsm.core.machine import State
from agentfsm.core.messages import Message, replace_surrogates
from agentfsm.core.run import Run
from agentfsm.core.run_ids import DerivedId, find_caller, find_reserved_form
from agentfsm.core.settings import Settings
from agentfsm.core.stops import StopCondition
from agentfsm.core.trace_context import is_traceparent
from agentfsm.core.validation import (
    BOOL,
    NAME,
    STRING,
    ValueRule,
    require_members,
    require_type,
    shorten_repr,
)
from agentfsm.ports.context import Context
from agentfsm.ports.guards import CallGuard, check_guard
from agentfsm.ports.store import DURABILITY, STORE, Filter
from agentfsm.stores.rules import check_run_id
from agentfsm.tools.permission import Permissions
from agentfsm.tools.registry import ToolRegistry

if TYPE_CHECKING:
    from agentfsm.ports.context import ContextPolicy

# Maximum characters of a run id, so that every store accepts it as a key, with the call ids of a chain of sub-agents.
MAX_ID_CHARS: Final = 200

_RUN: Final = require_type(Run, wanted="the run itself, for example await agent.load(run_id)")
CLOCK: Final = require_members("now", "monotonic", wanted="a Clock, for example SystemClock()")

_AGENT_RULES: Final[Mapping[str, ValueRule]] = {
    "instructions": ValueRule(
        fits=lambda value: (
            not isinstance(value, type) and (isinstance(value, str) or callable(value) or hasattr(value, "current"))
        ),
        wanted="one string, '' for none, a prompt of agentfsm.prompts, or a function of the header or a RunContext",
    ),
    "reminder": ValueRule(
        fits=lambda value: (
            not isinstance(value, type) and (isinstance(value, str) or callable(value) or hasattr(value, "current"))
        ),
        wanted="one string, '' for none, a prompt of agentfsm.prompts, or a function of the run or a RunContext",
    ),
    "permissions": require_type(
        Permissions, NoneType, wanted="Permissions(...), for example Permissions(level='write')"
    ),
    "selector": require_members("wants", "select", "find", wanted="a ToolSelector, for example AutoSelect()"),
    "name": attrs.evolve(NAME, wanted=f"{NAME.wanted}: a worker finds the agent's runs by it"),
    "version": STRING,
    "limits": require_type(Limits, wanted="Limits(...), for example Limits(turns=3)"),
    "settings": ValueRule(
        fits=lambda value: isinstance(value, Settings) or (callable(value) and not isinstance(value, type)),
        wanted="Settings(...), for example Settings(temperature=0), or a function of the run that returns them",
    ),
    "output_validators": ValueRule(
        fits=lambda value: isinstance(value, Sequence) and all(map(callable, value)),
        wanted="a list of functions, for example [check]",
    ),
    "claims": require_type(Claims, NoneType, wanted="Claims(), or None"),
    "reflector": require_members(
        *("model", "answer_tokens", "wants", "judge"),
        wanted="Reflector(model=...) of agentfsm.reflection, or a Judge of your own",
    ).or_none(),
    "memory": require_members(
        *("wants", "recall_for"), wanted="Memory(...) of agentfsm.memory, or a RunMemory of your own"
    ).or_none(),
    "planner": require_members(
        *("wants", "plan", "review", "replan", "max_steps", "mode"), wanted="Planner(...) of agentfsm.planning"
    ).or_none(),
    "last_answer": BOOL,
    "clock": CLOCK,
    "store": STORE,
    "durability": DURABILITY,
    "new_id": ValueRule(fits=callable, wanted="a function that returns a new id"),
    "target": require_type(str, wanted="'module:attribute'"),
    "log_prompts": BOOL,
}

# Rule for the field `tools` of `Runs`.
TOOLS_BY_AGENT: Final = ValueRule(
    fits=lambda value: isinstance(value, Mapping) and all(isinstance(each, ToolRegistry) for each in value.values()),
    wanted="a mapping from the name of an agent to its ToolRegistry, for example {agent.name: agent.tools}",
)


def check_agent(agent: object) -> None:
    """Check the fields of an agent.

    Raises:
        MisuseError: naming the first field that is invalid, with a valid value.
    """
    for name, rule in _AGENT_RULES.items():
        rule.check("Agent", name, getattr(agent, name))


def as_context(context: Context | ContextPolicy | Iterable[ContextPolicy]) -> Context:
    """Convert a policy, several policies or a `Context` to a `Context`.

    Raises:
        MisuseError: when an object is not a policy.
    """
    if isinstance(context, Context):
        return context
    return Context(context if isinstance(context, Iterable) else (context,))


def as_guards(guards: Iterable[CallGuard] | CallGuard) -> tuple[CallGuard, ...]:
    """Convert guards, or one, to a tuple.

    Raises:
        MisuseError: when an object is not a guard.
    """
    given = tuple(guards) if isinstance(guards, Iterable) else (guards,)
    for each in given:
        check_guard("Agent(guards=...)", each)
    return given


def as_stop_conditions(conditions: Iterable[StopCondition]) -> tuple[StopCondition, ...]:
    """Convert stop conditions to a tuple.

    Raises:
        MisuseError: when it is no list of functions, or one is async.
    """
    given = tuple(conditions) if isinstance(conditions, Iterable) else ()
    if not isinstance(conditions, Iterable) or any(not callable(each) or iscoroutinefunction(each) for each in given):
        raise MisuseError(
            f"Agent(stop_when={shorten_repr(conditions)}): give a list of functions of the run, not async, such as "
            '[stop_after_tool("submit")]'
        )
    return given


def as_spending_limits(limits: Iterable[Spend] | Spend) -> tuple[Spend, ...]:
    """Convert spending limits, or one of them, to a tuple.

    Raises:
        MisuseError: when one is not a `Spend`, or two are about the same window.
    """
    if limits == ():
        return ()
    given = (limits,) if isinstance(limits, Spend) else tuple(limits) if isinstance(limits, Iterable) else (limits,)
    seen = set()
    for each in given:
        if not isinstance(each, Spend):
            raise MisuseError(f'Agent(spend={shorten_repr(limits)}): give Spend(per="day", usd=20), or a list of them')
        window = (each.per, each.scope, each.tz, each.purpose)
        if window in seen:
            raise MisuseError(
                f"Agent(spend=...) has two limits for each {each.scope} per {each.per} in {each.tz}: keep the lower one"
            )
        seen.add(window)
    return given


def warn_of_unreachable_rules(guards: Iterable[CallGuard], tools: ToolRegistry) -> None:
    """Log each rule of the guards that never asks, or is about a tool that there is not, once in this process."""
    traits = [tool.traits for tool in tools]
    for text in [text for guard in guards for text in guard.find_unreachable(traits)]:
        warn_once(text)
    if tools.sources or any(tool.kind is ToolKind.AGENT for tool in tools):
        return  # the rules are also about tools that are not known here
    known = [each.name for each in traits]
    named = [name for guard in guards for name in guard.list_tools()]
    for name in [name for name in named if not any(matches_tool(name, each) for each in known)]:
        close = "".join([f": did you mean {each}?" for each in get_close_matches(name, known, 1)])
        warn_once(f"a guard has a rule about {name}, and the agent has no tool of that name{close}")


def warn_of_undescribed_tools(tools: ToolRegistry) -> None:
    """Log each tool of which the model knows only the name, once in this process."""
    for tool in tools:
        if not tool.description.strip():
            warn_once(
                f"tool {tool.name} has no description, so the model knows only its name: give the function a "
                "docstring, or description=",
                logger="agentfsm",
            )


@cache
def warn_once(text: str, logger: str = "agentfsm.guards") -> None:
    """Log a warning, once in this process; on stderr if the application has not configured logging."""
    logging.getLogger(logger).warning(text, extra={"notice": f"agentfsm: {text}"})


def as_states(states: Iterable[State]) -> frozenset[State]:
    """Convert states, or their names, to a set of states in which a run can pause.

    Raises:
        MisuseError: when a state is unknown, or is one in which a run is over.
    """
    try:
        chosen = frozenset(State(state) for state in states)
    except (TypeError, ValueError):
        valid = ", ".join(sorted(set(State) - {State.DONE, State.ERROR}))
        raise MisuseError(
            f"pause_before={shorten_repr(states)}: expected a set of states; valid values: {valid}"
        ) from None
    if final := chosen & {State.DONE, State.ERROR}:
        raise MisuseError(f"pause_before={sorted(final)}: a run that is over cannot pause; give other states")
    return chosen


def check_new_id(run_id: str, parent: str | None, caller: str | None = None) -> str:
    """Return the id of a new run. A run that another run has started has a longer id, which begins with that one's.

    Args:
        run_id: The id.
        parent: Id of the run that calls the agent as a tool; None if none does.
        caller: Run and call, as `Header.caller`, whose function starts the run; None if none does.

    Raises:
        MisuseError: when it is not a string, is too long, has characters that cannot be printed, or has a form that is
            reserved for ids that agentfsm derives, and is not one of them.
    """
    if not isinstance(run_id, str):
        raise MisuseError(f"a run's id must be a string, not {type(run_id).__name__}: give str(...) of it")
    call = None
    if not run_id.isalnum():  # nearly all are random, and each reserved form has a sign
        call = None if parent is not None else find_caller(run_id)
        is_own = isinstance(run_id, DerivedId) or (call is not None and caller == f"{call.run_id}/{call.call_id}")
        if not is_own and (form := find_reserved_form(run_id)) is not None:
            raise MisuseError(
                f"{run_id[:50]!r} has the form of the ids of {form}, which agentfsm derives: choose another id; if "
                "that run exists, go on with it by agent.resume(id)"
            )
    most = MAX_ID_CHARS + len((call.run_id if call is not None else parent) or "")
    if not 1 <= len(run_id) <= most or not run_id.isprintable():
        raise MisuseError(f"a run's id must have 1 to {most} printable characters, unlike {run_id[:50]!r}")
    return str(run_id)


def to_plain_json(value: Mapping[str, Any], argument: str) -> dict[str, Any]:
    """Convert an object to plain JSON values, as it is stored.

    Raises:
        MisuseError: when it is not plain JSON; `argument` names it in the message.
    """
    if not isinstance(value, Mapping):
        raise MisuseError(f"{argument}={shorten_repr(value)}: give a dict")
    try:
        return dict(json.loads(replace_surrogates(encode_json(dict(value)))))
    except (TypeError, ValueError, RecursionError) as error:
        raise MisuseError(f"{argument} must be plain JSON, because the run stores it: {error}") from None


_USER: Final = STRING.or_none()
_SESSION: Final = NAME.or_none()
_SETTINGS: Final = require_type(Settings, NoneType, wanted="Settings(...), for example Settings(temperature=0)")


def check_start_options(user: object, session: object, settings: object, after: object, parent: object) -> None:
    """Check the optional arguments of `Agent.start`. Arguments that are None are skipped, to keep starts fast.

    Raises:
        MisuseError: naming the argument that is invalid, with a valid value.
    """
    if user is not None:
        _USER.check("start", "user", user)
    if session is not None:
        _SESSION.check("start", "session", session)
    if settings is not None:
        _SETTINGS.check("start", "settings", settings)
    if after is not None:
        _RUN.check("start", "after", after)
    if parent is not None:
        _RUN.check("start", "parent", parent)


_TENANT: Final = NAME.or_none()
PURPOSE: Final = ValueRule(
    fits=lambda value: isinstance(value, str) and value.isidentifier() and value.islower(),
    wanted="a word in small letters, such as 'eval'; nothing for production",
)
_CLEARANCE: Final = ValueRule(fits=lambda value: value in ("", *DATA_LEVELS), wanted=f"one of {', '.join(DATA_LEVELS)}")
_ARMS: Final = ValueRule(
    fits=lambda value: (
        isinstance(value, Mapping) and all(isinstance(each, str) for pair in value.items() for each in pair)
    ),
    wanted="a dict of names of experiments and arms, for example {'prompt': 'b'}",
)
_TRACEPARENT: Final = ValueRule(
    fits=lambda value: isinstance(value, str) and (not value or is_traceparent(value)),
    wanted="the value of the W3C header, for example '00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01'",
)
_IDENTITY_RULES: Final[Mapping[str, ValueRule]] = {
    "tenant": _TENANT,
    "clearance": _CLEARANCE,
    "release": STRING,
    "arms": _ARMS,
    "traceparent": _TRACEPARENT,
    "purpose": PURPOSE,
}


def check_identity(fields: Mapping[str, object]) -> dict[str, Any]:
    """Return the tenant, clearance, release, arms, trace and purpose of a new run that were given.

    Raises:
        MisuseError: naming the argument that is invalid, with a valid value.
    """
    given = {name: value for name, value in fields.items() if value}
    for name, value in given.items():
        _IDENTITY_RULES[name].check("start", name, value)
    return {**given, "arms": dict(given["arms"])} if "arms" in given else given  # type: ignore[call-overload]


def as_roles(roles: Iterable[str]) -> tuple[str, ...]:
    """Convert roles to a tuple.

    Raises:
        MisuseError: when the argument is a single string, whose letters would become roles, or an item is not a string.
    """
    if roles == ():  # most runs have none
        return ()
    given: tuple[Any, ...] = tuple(roles) if isinstance(roles, Iterable) and not isinstance(roles, str) else (roles,)
    if isinstance(roles, str) or not all(isinstance(role, str) for role in given):
        names = ", ".join(repr(role) for role in given if role is not None)
        raise MisuseError(f"roles must be a list of strings, not {shorten_repr(roles)}: write roles=[{names}]")
    return given


def as_messages(messages: Iterable[Message] | None) -> tuple[Message, ...]:
    """Convert a history to a tuple; None becomes an empty one. `check_history` checks the messages.

    Raises:
        MisuseError: when it is not a sequence.
    """
    if messages is None:
        return ()
    if isinstance(messages, str) or not isinstance(messages, Iterable):
        raise MisuseError(f"messages={shorten_repr(messages)}: give a list of messages, for example run.messages")
    return tuple(messages)


def check_run(run: object, method: str) -> None:
    """Check that an argument of `Agent` is a run.

    Raises:
        MisuseError: when it is not; the message says how to get one.
    """
    if not isinstance(run, Run):
        raise MisuseError(
            f"agent.{method} takes a Run, not {shorten_repr(run)}: write agent.{method}(agent.start('...')) for a new "
            f"run, or agent.{method}(await agent.load(run_id))"
        )


def check_call_id(run_id: object, call_id: object) -> None:
    """Check that the id of a run and the id of a call are strings.

    Raises:
        MisuseError: when one is not.
    """
    check_run_id(run_id)
    if not isinstance(call_id, str):
        raise MisuseError(
            f"call_id must be a string, not {shorten_repr(call_id)}: give the call_id of an item of run.pending"
        )


FILTER: Final = require_type(Filter, wanted="a Filter, for example Filter(user='ann')")


def as_text(text: object, argument: str) -> str:
    """Return a string with its lone surrogates replaced, which model APIs and databases refuse.

    Raises:
        MisuseError: when it is not a string; `argument` names it in the message.
    """
    if not isinstance(text, str):
        raise MisuseError(f"{argument}={shorten_repr(text)}: give a string")
    return replace_surrogates(text)
