"""An evaluation that is killed with `kill -9` goes on in another process."""

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path

import anyio
import pytest

from agentfsm import Agent
from agentfsm.evals import Evaluation, GateDecision, gate
from agentfsm.ports import Filter
from agentfsm.stores import SQLiteStore
from agentfsm.testing import FunctionModel
from agentfsm.testing.fake_llm.server import LocalServer

SCRIPT = """
import os, sys
import anyio
from agentfsm import Agent
from agentfsm.evals import Case, evaluate
from agentfsm.stores import SQLiteStore
from agentfsm.testing.models import FunctionModel

def think(request):
    with open("asked.txt", "a") as file:
        print(request.messages[0].text, file=file)
    return "done"

def kill_at(result):
    with open("graded.txt", "a") as file:
        print(result.run_id, file=file)
    if sys.argv[1] == "die" and len(open("graded.txt").readlines()) == 4:
        os.kill(os.getpid(), 9)

async def answer(text, request):
    return think(request)

async def main():
    store = SQLiteStore("evals.db")
    async with Agent(FunctionModel(think), store=store) as agent:
        cases = [Case(input=f"case {number}", check=lambda run, deps: True) for number in range(3)]
        target, options = (agent, {}) if sys.argv[2] == "agent" else (answer, {"store": store})
        found = await evaluate(target, cases, runs=3, parallel=1, on_result=kill_at, **options)
        print(found.mean(), found.pass_hat(3))

anyio.run(main)
"""


@pytest.mark.soak
@pytest.mark.parametrize("target", ["agent", "function"])
def test_a_killed_evaluation_goes_on(tmp_path: Path, target):
    """Each run is made once, before the kill or after it, and all of them are graded; for an agent or any function."""

    def start(word):
        command = [sys.executable, "-c", SCRIPT, word, target]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)

    assert start("die").returncode == -signal.SIGKILL
    assert len((tmp_path / "asked.txt").read_text(encoding="utf-8").splitlines()) == 4
    done = start("go on")
    assert done.stdout == "1.0 1.0\n", done.stderr
    asked = (tmp_path / "asked.txt").read_text(encoding="utf-8").splitlines()
    assert sorted(asked) == sorted(f"case {number}" for number in range(3) for _ in range(3))


TALKS = """
import os, sys
import anyio
from agentfsm import Agent
from agentfsm.evals import Case, SimulatedUser, evaluate
from agentfsm.prompts import contains
from agentfsm.stores import SQLiteStore

def kill_at(result):
    with open("over.txt", "a") as file:
        print(result.case, file=file)
    if len(open("over.txt").readlines()) == int(sys.argv[1]):
        os.kill(os.getpid(), 9)

async def main():
    async with Agent("openai:gpt-4o", store=SQLiteStore("evals.db")) as agent:
        cases = [
            Case(id=f"<{number}>", turns=SimulatedUser(f"You are <{number}>.", model="openai:gpt-4o-mini"),
                 user=f"user {number}", expect=[contains(f"<{number}>")])
            for number in range(60)
        ]
        (await evaluate(agent, cases, runs=1, parallel=16, on_result=kill_at)).save("found.json")

anyio.run(main)
"""


def talk(body):
    """Return the third text of a user, or the answer to one, which names the user."""
    said = [str(message["content"]) for message in body["messages"]]
    if body["model"] == "gpt-4o":
        return f"You are {said[-1].split()[-1]}"
    name = said[0].split("You are ")[1].split(".")[0]
    return "[END]" if len(said) > 7 else f"text {len(said) // 2} of {name}"


@pytest.mark.soak
def test_a_suite_of_conversations_is_killed_twice(tmp_path: Path):
    """60 simulated users, 16 at once: no request of a case that was over is sent again, and the result gates."""
    with LocalServer(talk) as server:
        given = {"OPENAI_API_KEY": "none-needed", "OPENAI_BASE_URL": server.base_url, "PATH": ""}
        for kill_at in (15, 40, 0):
            over = (tmp_path / "over.txt").read_text(encoding="utf-8").split() if kill_at != 15 else []
            before = len(server.requests)
            command = [sys.executable, "-c", TALKS, str(kill_at)]
            ended = subprocess.run(
                command, cwd=tmp_path, env=given, capture_output=True, text=True, check=False, timeout=300
            )
            assert ended.returncode == (-signal.SIGKILL if kill_at else 0), ended.stderr
            texts = [str(each.body) for each in server.requests[before:]]
            assert not [name for name in over if any(name in text for text in texts)]
    found = Evaluation.load(tmp_path / "found.json")
    assert (found.mean(), len(found.results)) == (1, 60)
    assert {len(each.conversation) for each in found.results} == {3}
    assert gate(found, found, worse_by=0.1).decision is GateDecision.PASS


@pytest.mark.soak
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
async def test_killed_grading_goes_on(tmp_path: Path, number):
    """`eval grade`, killed while a judge is asked: only votes that had not come are asked for again, each once."""
    agent = Agent(FunctionModel(lambda request: f"<{request.messages[0].text}>"), store=SQLiteStore(tmp_path / "r.db"))
    for name in "abcde":
        await agent.run(name, id=f"run-{name}")
    asked, is_reached, may_go = [], threading.Event(), threading.Event()

    def judge(body):
        said = json.loads(body["messages"][-1]["content"])["answer"]
        asked.append(said)
        if len(asked) in {8, 9}:  # the second and third votes of the third run
            is_reached.set()
            may_go.wait(60)
        return json.dumps({"criterion": {"reason": "it is polite", "score": 5}})

    with LocalServer(judge) as server:
        words = ["eval", "grade", "--judge", "openai:gpt-4o", "--rubric", "It is polite.", "--store", "r.db"]
        command = [sys.executable, "-m", "agentfsm", *words, "--parallel", "1", "--json"]
        given = {"OPENAI_API_KEY": "none-needed", "OPENAI_BASE_URL": server.base_url, "PATH": ""}
        options = {"cwd": tmp_path, "env": given, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        process = subprocess.Popen(command, **options)  # noqa: ASYNC220  its end is awaited below
        try:
            assert await anyio.to_thread.run_sync(is_reached.wait, 60), process.communicate()
            while len(await agent.runs.list(Filter(purpose="eval", over=True))) < 7:  # noqa: ASYNC110  other process
                await anyio.sleep(0.01)
            process.send_signal(number)
            assert process.wait(60) != 0
        finally:
            process.kill()
            process.communicate()
            may_go.set()
        assert [len(await agent.runs.list_feedback(f"run-{name}")) for name in "edcba"] == [1, 1, 0, 0, 0]
        done = await anyio.to_thread.run_sync(lambda: subprocess.run(command, check=True, timeout=120, **options))
    assert (json.loads(done.stdout)["mean"], len(json.loads(done.stdout)["results"])) == (1, 3)
    assert [len(await agent.runs.list_feedback(f"run-{name}")) for name in "abcde"] == [1] * 5
    assert {name: asked.count(f"<{name}>") for name in "edcba"} == {"e": 3, "d": 3, "c": 5, "b": 3, "a": 3}
    assert len(await agent.runs.list(Filter(purpose="eval"))) == 15
    await agent.aclose()
