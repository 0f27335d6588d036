"""The error tree: the picture in the docstring is the classes, and each class says what a caller needs."""

import copy
import pickle

import pytest

from agentfsm import (
    AgentError,
    IllegalTransitionError,
    LimitError,
    MisuseError,
    ModelError,
    ModelReplyError,
    ModelUnavailableError,
    RefusedError,
    RunError,
    StepError,
    StoreError,
    ToolError,
    TransientError,
    Usage,
)
from agentfsm.core import errors
from agentfsm.core.errors import first_error
from tests.support.sample_runs import observing

# All are in `errors` but RunError, which needs `Run`.
MEMBERS = vars(errors) | {"RunError": RunError}
CLASSES = [value for value in MEMBERS.values() if isinstance(value, type) and issubclass(value, Exception)]

# One of each class that carries facts.
ERRORS = [
    IllegalTransitionError("done", "Observed", ()),
    LimitError("token_budget", "all used"),
    ModelUnavailableError("overloaded", 2.5),
    ModelReplyError("empty", Usage(input_tokens=5)),
    RunError("no output", observing()),
    TransientError("busy", 1.5),
    RefusedError("full", 0.5),
]


def drawn():
    """Return {class: its parent} as the indentation of the docstring's tree says."""
    tree, path = {}, {}
    for line in errors.__doc__.splitlines():
        depth, name = len(line) - len(line.lstrip()), line.split(" ")[(len(line) - len(line.lstrip()))]
        if name.isidentifier() and name in MEMBERS:
            path[depth] = name
            tree[name] = path.get(depth - 4)
    return tree


def test_the_picture_is_the_tree():
    """The tree drawn at the top of the file is the tree of classes."""
    assert drawn() == {kind.__name__: kind.__base__.__name__ for kind in CLASSES} | {"AgentError": None}


@pytest.mark.parametrize("kind", CLASSES)
def test_one_root(kind):
    """`except AgentError` catches each of them, and none is an event loop's cancellation."""
    assert issubclass(kind, AgentError)
    assert issubclass(kind, Exception)
    assert kind.__doc__


def test_branches_do_not_overlap():
    """What to do is read off the branch, so no class stands in two."""
    branches = (MisuseError, RunError, StepError, StoreError, ToolError)
    for kind in CLASSES:
        assert sum(issubclass(kind, branch) for branch in branches) == (kind is not AgentError)


def test_errors_carry_their_facts():
    """The facts are attributes, and the text stands alone."""
    run = observing()
    error = RunError("no output", run)
    assert (error.run, str(error)) == (run, "no output")
    assert ModelUnavailableError("overloaded").retry_after_s is None
    assert ModelUnavailableError("overloaded", 2.5).retry_after_s == 2.5
    assert ModelError("blocked").refusal is None
    assert ModelError("blocked", refusal="quota").refusal == "quota"
    assert ModelReplyError("empty").usage is None
    assert ModelReplyError("empty", Usage(input_tokens=5)).usage.tokens == 5
    assert TransientError("busy").retry_after_s is None
    assert RefusedError("busy", 1.5).retry_after_s == 1.5
    limit = LimitError("token_budget", "all used")
    assert (limit.reason, str(limit)) == ("token_budget", "all used")
    assert issubclass(ModelUnavailableError, ModelError)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors_survive_a_copy(error):
    """A copy of an error has its text and its facts."""
    twin = copy.copy(error)
    assert (str(twin), twin.args, twin.__dict__) == (str(error), error.args, error.__dict__)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors_cross_processes(error):
    """An error comes out of a process pool, or a test runner's worker, as it went in."""
    twin = pickle.loads(pickle.dumps(error))  # noqa: S301  our own bytes
    assert (str(twin), twin.__dict__) == (str(error), error.__dict__)


def test_the_first_error_of_a_group_is_none_itself():
    """However deep it lies."""
    first = ValueError("x")
    inner = ExceptionGroup("inner", [first, OSError("y")])
    assert first_error(BaseExceptionGroup("outer", [inner, KeyboardInterrupt()])) is first
