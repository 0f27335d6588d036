"""An agent with two tools, and evaluations with given grades."""

import pytest

from agentfsm import Agent, ToolResult, tool
from agentfsm.evals import CaseResult, Evaluation, Grade
from agentfsm.testing import FunctionModel, call, say


@tool(read_only=True)
def get_stock_price(symbol: str) -> str:
    """Look up the price of a share."""
    return "400"


@tool(read_only=True)
def calculator(expression: str) -> str:
    """Evaluate an expression."""
    return "40000"


@pytest.fixture
def make_agent():
    """Return a function that builds an agent which makes these calls, one in a turn, and then answers."""

    def make(*names, answer="The value is $40,000.", counted=None, **fields):
        arguments = {"get_stock_price": {"symbol": "TSLA"}, "calculator": {"expression": "100 * 400"}}

        def think(request):
            if counted is not None:
                counted.append(request)
            done = sum(isinstance(each, ToolResult) for each in request.messages)
            return say("", call(names[done], **arguments[names[done]])) if done < len(names) else answer

        return Agent(FunctionModel(think), tools=[get_stock_price, calculator], **fields)

    return make


@pytest.fixture
def make_evaluation():
    """Return a function that builds an evaluation from the outcomes of the runs of each case."""

    def make(*cases, metric="outcome", **fields):
        results = [
            CaseResult(
                case=f"case {number}",
                repeat=repeat,
                run_id=f"run-{number}-{repeat}",
                grades={metric: Grade(None if value is None else float(value))},
                total=None if value is None else float(value),
            )
            for number, values in enumerate(cases, 1)
            for repeat, value in enumerate(values, 1)
        ]
        return Evaluation(suite="suite", agent="agent", runs=len(cases[0]), results=tuple(results), **fields)

    return make
