"""Key of the answer cache: a hash of all that an answer may depend on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dis import get_instructions
from enum import Enum
from functools import partial
from hashlib import sha256
from inspect import isbuiltin, isclass, isfunction
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, Final

import attrs

from agentfsm.core.labels import Label, join_labels
from agentfsm.core.messages import TextPart
from agentfsm.engine.execution.tool_access import build_context
from agentfsm.engine.model_calls.view import build_view
from agentfsm.ports.guards import describe_guard
from agentfsm.ports.model import Model, identify_model, to_mutable_json
from agentfsm.tools.tool import Tool

if TYPE_CHECKING:
    from agentfsm.engine.execution.answer_cache import AnswerCache
    from agentfsm.engine.execution.config import EngineConfig
    from agentfsm.engine.execution.execution import Execution

# Version of the form of keys and records: another form finds none of the old answers.
_FORM: Final = 3
# White space that does not count at the ends of a prompt.
_BLANKS: Final = " \t\r\n"
# Fields of a tool that are code, and not options.
_CODE: Final = frozenset({"function", "bind", "to_namespace", "inner_agent", "start_rule", "end_task"})


async def hash_question(execution: Execution, cache: AnswerCache) -> str:
    """Return the key of a run: runs with the same key may be given the same answer."""
    config, run = execution.config, execution.journal.run
    header = run.header
    view = build_view(execution)
    offered = [[each.name, each.description, each.parameters, each.strict] for each in view.tools]
    parts = {
        "form": _FORM,
        "scope": cache.scope,
        "prompt": [part.text.strip(_BLANKS) for part in header.prompt if isinstance(part, TextPart)],
        "user": header.user if cache.scope == "user" else None,
        "tenant": header.tenant,
        "roles": sorted(header.roles),
        "clearance": header.clearance,
        "metadata": header.metadata,
        "labels": join_labels(run.labels.keys() - {Label.USER_DATA}),
        "release": header.release,
        "arms": header.arms,
        "agent": [header.agent, header.agent_version],
        "reminder": "" if config.reminder is None else str(await config.reminder(run, build_context(execution))),
        "offered": offered,
        "settings": attrs.asdict(attrs.evolve(view.settings, stream=False)),
        **describe_agent(config),
    }
    text = json.dumps(to_mutable_json(parts), sort_keys=True, default=str)
    return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def describe_agent(config: EngineConfig) -> dict[str, Any]:
    """Return, as JSON, what determines the answers of all runs of an agent; functions by their names and their code."""
    output = config.output_spec
    guards = [
        describe_guard(each) if type(each).__str__ is not object.__str__ else describe(each) for each in config.guards
    ]
    return {
        "fingerprint": attrs.asdict(config.fingerprint),
        "model": identify_model(config.model),
        "instructions": config.own_instructions,
        "tools": [describe(tool) for tool in config.registry],
        "permissions": repr(config.permissions),
        "policies": [guards, *map(describe, (config.context, config.selector, config.judge, config.planner))],
        "output": None if output is None or output.output_form is None else output.output_form.schema,
        "validators": None if output is None else describe(output.validators),
    }


def describe(value: Any) -> Any:
    """Return a value as JSON for the key: attrs classes by their fields, functions by their names and their code.

    Other objects count by their text. Without a `__repr__` of its own, that is an object of this process.
    """
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): describe(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [describe(each) for each in value]
    if isinstance(value, set | frozenset):
        return sorted([json.dumps(describe(each), sort_keys=True) for each in value])
    if isfunction(value):
        return [f"{value.__module__}.{value.__qualname__}", _describe_function(value, set())]
    if isbuiltin(value) or isclass(value):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, partial):
        return [describe(each) for each in (value.func, value.args, value.keywords)]
    if Model in type(value).__mro__:
        return identify_model(value)
    if attrs.has(type(value)):
        skipped = _CODE if isinstance(value, Tool) else ()
        names = [field.name for field in attrs.fields(type(value)) if field.init and field.name not in skipped]
        return [type(value).__qualname__, {name: describe(getattr(value, name)) for name in names}]
    return str(value)


def _describe_function(function: FunctionType, seen: set[object]) -> Any:
    """Return the code of a function with the values that it was made with, as far as these cannot change.

    What it calls counts by its name, unless it is a function that stands in it, or that it was made with.
    """
    seen.add(function)

    def read(value: Any) -> Any:
        if isinstance(value, CodeType):
            return [value.co_code.hex(), value.co_names, [*map(read, value.co_consts)]]
        if isinstance(value, FunctionType):
            return None if value in seen else _describe_function(value, seen)
        if isinstance(value, tuple):
            return [*map(read, value)]
        if isinstance(value, frozenset):
            return sorted(map(repr, value))
        is_fixed = value is None or isinstance(value, str | bytes | int | float | complex | Enum)
        return repr(value) if is_fixed else type(value).__qualname__

    code, cells = function.__code__, list[Any]()
    changed = {each.argval for each in get_instructions(code) if each.opname == "STORE_DEREF"}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            cells.append(None if name in changed else read(cell.cell_contents))
        except ValueError:  # it has no value yet
            cells.append(None)
    given = [*(function.__defaults__ or ()), *sorted((function.__kwdefaults__ or {}).items())]
    return [read(code), cells, [*map(read, given)]]
