"""Where the engine appends to a journal: handlers return events, and few places commit them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import agentfsm
from agentfsm import TABLE, State
from agentfsm.core import effects
from agentfsm.engine.step import HANDLERS

PACKAGE = Path(agentfsm.__file__).parent
ENGINE = PACKAGE / "engine"
COMMITS = ("commit", "try_commit_final")
# Functions of the engine that commit, by file, and how often they do.
COMMIT_SITES = {
    ("step.py", "step"): 1,
    # What a handler returned, in the usual case: without a condition.
    ("step.py", "_commit"): 2,
    # The same with a condition or a scope; also for interruptions, parked runs and requests from the inbox.
    ("execution/open_calls.py", "record"): 1,
    # ACT, while it runs: a call's start and result have to be in the journal before what depends on them.
    ("deciders/judge.py", "ask_judge"): 1,
    # A judge that raises: the error passes through the handler, and what was paid for must not be lost with it.
    ("step.py", "run_steps"): 1,
    # The same for a request that is cut off with the execution, or fails by a mistake in code that it depends on.
    ("model_calls/request.py", "ask_model"): 1,
    # An attempt that fails counts before the next one.
    ("background_runs.py", "_record"): 1,
    # Between two steps: a background run has ended, or waits.
    ("execution/unattended.py", "_stop_and_release"): 1,
    # No handler runs: a request to cancel or pause is applied without an agent.
    ("driver.py", "_record_resumption"): 1,
    # Before the first step: a pause ends, or the agent has changed.
}


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Return the functions and methods of a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def calls_of(node: ast.AST, *names: str) -> int:
    """Return how often methods or functions of these names are called in a piece of code."""
    called = [each.func for each in ast.walk(node) if isinstance(each, ast.Call)]
    return len([func for func in called if isinstance(func, ast.Attribute) and func.attr in names])


def test_few_functions_commit():
    """The step commits what handlers return, ACT has one function that commits, and each exception has a reason."""
    found = {
        (path.relative_to(ENGINE).as_posix(), function.name): count
        for path in ENGINE.rglob("*.py")
        for function in functions(path)
        if (count := calls_of(function, *COMMITS))
    }
    assert found == COMMIT_SITES


def test_the_end_of_a_turn_is_recorded_in_one_place():
    """`ToolsReturned` is made once outside of the core, beside the commit of the last result."""
    makers = [
        (path.relative_to(PACKAGE).as_posix(), function.name)
        for path in PACKAGE.rglob("*.py")
        if not path.is_relative_to(PACKAGE / "core") and "ToolsReturned" in path.read_text(encoding="utf-8")
        for function in functions(path)
        for _ in range(calls_of(function, "ToolsReturned"))
    ]
    assert makers == [("engine/execution/open_calls.py", "record")]


def test_each_state_has_a_handler_of_its_name():
    """OBSERVE, THINK, ACT and REFLECT have a module and a coroutine of their name; the wait is the step's own."""
    states = [state.value for state in State if TABLE[state]]
    named = {kind: f"{each.__module__}.{each.__name__}" for kind, each in HANDLERS.items()}
    assert set(named) == set(effects.Effect.__args__)
    waiting = named.pop(effects.Wait)
    assert waiting == "agentfsm.engine.step._wait"
    assert sorted(named.values()) == sorted(f"agentfsm.engine.{state}.{state}" for state in states)
