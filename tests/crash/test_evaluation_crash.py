"""An evaluation of a conversation whose process is killed at each commit."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest

from agentfsm import Agent, Limits, ToolResult, tool
from agentfsm.evals import Case, SimulatedUser, evaluate
from agentfsm.prompts import contains
from agentfsm.stores import SQLiteStore
from agentfsm.testing import FunctionModel, call, say
from agentfsm.testing.crash import connect, report


async def work(folder: str) -> None:
    """Evaluate one case: a text, an approval, a message, and a user who says three texts; report the result."""
    paid = Path(folder, "paid")

    @tool(requires_approval=True)
    def refund(order: int) -> str:
        with paid.open("a", encoding="utf-8") as file:
            print(order, file=file)
        return "refunded"

    def think(request):
        last = request.messages[-1]
        if isinstance(last, ToolResult):
            return "Done."
        return say("", call("refund", order=17)) if "refund" in last.text else f"heard {last.text}"

    def speak(request):
        said = len(request.messages) // 2
        return "[END]" if said > 5 else f"text {said}"

    user = SimulatedUser("chat", model=FunctionModel(speak))
    case = Case(turns=["refund it", {"approve": "refund"}, {"send": "quick"}, user], expect=[contains("heard text 5")])
    store = SQLiteStore(str(Path(folder, "runs.db")), connect=connect)
    async with Agent(FunctionModel(think), tools=[refund], limits=Limits(crashes=1_000), store=store) as agent:
        result = (await evaluate(agent, [case], runs=1)).results[0]
    report((result.grades["outcome"].value, result.grades["outcome"].reason, len(result.conversation)))


@pytest.mark.soak
def test_each_effect_comes_once(fork_server, tmp_path):
    """If the call itself was cut off, its outcome is not known: the case is then not scored, which is not a 0."""
    unscored = 0
    for at in count(1):
        folder = tmp_path / str(at)
        folder.mkdir()
        first = fork_server.run(work, str(folder), kill_at=("commit", at))
        if not first.killed:
            break
        [(value, reason, turns)] = fork_server.run(work, str(folder)).reports
        paid = (folder / "paid").read_text(encoding="utf-8") if (folder / "paid").exists() else ""
        assert paid in {"", "17\n"}
        if value is None:
            assert "a process died in the middle of run" in reason
            unscored += 1
        else:
            assert (value, turns, paid) == (1, 6, "17\n"), reason
    assert at > 20
    assert unscored <= 3
