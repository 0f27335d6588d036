"""Load the agent that a target such as "module:agent" names."""

from __future__ import annotations

import inspect
import shlex
import sys
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from agentfsm.agents.agent import Agent
from agentfsm.agents.subagent import find_inner_agent
from agentfsm.cli.terminal import stdout_to_stderr
from agentfsm.core.errors import AgentError, MisuseError
from agentfsm.tools.queue.result_text import describe_error
from agentfsm.tools.tool import Tool

# Separates the name of an agent from the files of its MCP servers in a target.
MCP_OPTION: Final = "--mcp"
TARGET_FORM: Final = "name an agent as module:name, for example app:agent"


def join_target(target: str, files: Sequence[str]) -> str:
    """Join a target and the files of its MCP servers: "app:agent --mcp servers.json"."""
    return shlex.join([target, *[word for file in files for word in (MCP_OPTION, file)]]) if files else target


def split_target(target: str) -> tuple[str, tuple[str, ...]]:
    """Split a joined target into the target of the agent and the files of its MCP servers."""
    if MCP_OPTION not in target:
        return target, ()
    name, *words = shlex.split(target)
    return name, tuple(words[1::2])


def load_agent(target: str) -> Agent:
    """Return the agent that a target names: an `Agent`, or the result of a function without parameters.

    Raises:
        MisuseError: if the target has the wrong form, cannot be imported, or is something else.
    """
    agent: Agent = load_target(target, Agent)
    return agent


def load_target(target: str, *kinds: type) -> Any:
    """Return the object that a target names, or the result of a function without parameters.

    Args:
        target: Module and attribute, as in "app:agent".
        kinds: Classes of which the object must be an instance.

    Raises:
        MisuseError: as for `load_agent`.
    """
    name, _, path = target.partition(":")
    if not is_target(target):
        raise MisuseError(
            f"{target!r} does not name an agent: {TARGET_FORM}"
            if Agent in kinds
            else f"{target!r} does not name {_list_kinds(kinds)}: name one as module:name, for example app:learner"
        )
    with stdout_to_stderr():
        module = _import_target(name)
        found: Any = module
        for part in path.split("."):
            try:
                found = getattr(found, part)
            except AttributeError:
                names = [name for name, value in vars(module).items() if isinstance(value, kinds)]
                what = "its agents" if Agent in kinds else "it has"
                known = f"{what}: {', '.join(names)}" if names else f"it contains no {_join_kinds(kinds)}"
                raise MisuseError(f"the module {module.__name__!r} has no attribute {path!r}; {known}") from None
        if callable(found) and not isinstance(found, type):
            found = _call_factory(found, target)
    if isinstance(found, kinds):
        return found
    actual = f"the class {found.__name__}" if isinstance(found, type) else f"of type {type(found).__name__}"
    if inspect.iscoroutine(found):
        found.close()
        actual = "a coroutine: the function must not be async"
    kind = _list_kinds(kinds)
    raise MisuseError(f"{target!r} is not {kind}, but {actual}: name {kind}, or a function that returns one")


def iter_agents(agent: Agent) -> Iterator[Agent]:
    """Yield the agent and all of its subagents, at any depth."""
    known: list[Agent] = []
    found = deque([agent])
    while found:
        if (each := found.popleft()) not in known:
            known.append(each)
            yield each
            found += [inner for tool in each.tools if (inner := find_wrapped_agent(tool)) is not None]


def find_wrapped_agent(tool: Tool[..., Any]) -> Agent | None:
    """Return the agent behind a tool that `Agent.as_tool` made."""
    found = find_inner_agent(tool)
    return found if isinstance(found, Agent) else None


def is_target(text: str) -> bool:
    """Whether a text has the form of a target, "module:attribute"."""
    name, colon, path = text.partition(":")
    return bool(colon) and all(part.isidentifier() for part in (*name.split("."), *path.split(".")))


def look_in_current_folder() -> str:
    """Let modules be looked up in the current folder first, as `python -m` does, and return it."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    return here


def _import_target(name: str) -> ModuleType:
    here = look_in_current_folder()
    try:
        return import_module(name)
    except AgentError:
        raise  # its message is complete
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise MisuseError(
                f"there is no module {name!r} in {here} or among the installed packages: change to the folder that "
                "contains it, or install it",
            ) from None
        raise MisuseError(f"the module {name!r} cannot be imported: {_describe_error(error)}") from error
    except (Exception, SystemExit) as error:
        raise MisuseError(f"the module {name!r} cannot be imported: {_describe_error(error)}") from error


def _join_kinds(kinds: tuple[type, ...]) -> str:
    return " or ".join(each.__name__ for each in kinds)


def _list_kinds(kinds: tuple[type, ...]) -> str:
    names = _join_kinds(kinds)
    return f"{'an' if names.startswith('A') else 'a'} {names}"


def _call_factory(factory: Any, target: str) -> Any:
    try:
        inspect.signature(factory).bind()
    except TypeError as error:
        raise MisuseError(
            f"{target!r} cannot be called without arguments ({error}): name a function without parameters, or an Agent",
        ) from None
    except ValueError:  # no readable signature: the call itself reports wrong arguments
        pass
    try:
        return factory()
    except AgentError:
        raise
    except (Exception, SystemExit) as error:
        raise MisuseError(f"{target!r} failed: {_describe_error(error)}") from error


def _describe_error(error: BaseException) -> str:
    """Format an error with the line of code that raised it."""
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error}"  # the message contains file and line
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{describe_error(error)}{where}"
