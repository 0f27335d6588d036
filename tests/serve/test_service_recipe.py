"""The recipe in examples/service, command by command, with a PostgreSQL: two workers and a gateway deliver an order."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import agentfsm

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "examples" / "service"


def list_commands():
    """Return the commands of the recipe, without the installation."""
    text = (RECIPE / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```console\n(.*?)```", text, re.DOTALL)
    lines = [line.removeprefix("$ ") for block in blocks for line in block.splitlines()]
    return [line for line in lines if not line.startswith("pip ")]


@pytest.fixture
def postgres_database(shared_postgres, postgres_desk):
    """Return the URL of a database of its own."""
    postgres_desk.execute("CREATE DATABASE recipe")
    url = urlsplit(shared_postgres)
    yield url._replace(path="/recipe").geturl()
    postgres_desk.execute("DROP DATABASE recipe WITH (FORCE)")


def free_port():
    """Return a port that no program listens on."""
    with socket.create_server(("127.0.0.1", 0)) as bound:
        return bound.getsockname()[1]


@pytest.mark.skipif(shutil.which("curl") is None, reason="the recipe uses curl")
def test_the_recipe_delivers(tmp_path, postgres_database):
    """Each command succeeds; the run was approved by another person, and one of the workers executed it."""
    shutil.copy(RECIPE / "orders.py", tmp_path)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("AGENTFSM_", "PYTHON"))}
    env = {
        **kept,
        "DATABASE": postgres_database,
        "PORT": str(free_port()),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{Path(agentfsm.__file__).parents[1]}:{tmp_path}",
    }
    with ExitStack() as stack:
        processes = []
        for command in list_commands():
            if command.endswith(" &"):
                process = subprocess.Popen(
                    ["sh", "-c", f"exec {command.removesuffix(' &')}"], cwd=tmp_path, env=env, stderr=subprocess.DEVNULL
                )
                stack.callback(process.wait)
                stack.callback(process.kill)
                processes.append(process)
            else:
                done = subprocess.run(
                    ["sh", "-c", command], check=False, cwd=tmp_path, env=env, capture_output=True, encoding="utf-8"
                )
                assert done.returncode == 0, (command, done.stderr)
        assert [process.poll() for process in processes] == [None] * 3
        for process in processes:
            process.send_signal(signal.SIGTERM)
        assert [process.wait(timeout=60) for process in processes[2:]] == [0]
    run = json.loads((tmp_path / "done.json").read_text())
    assert (run["id"], run["status"], run["user"]) == ((tmp_path / "run.id").read_text().strip(), "done", "ann")
    assert run["output"] == "Your order: book delivered."
    [call] = json.loads((tmp_path / "audit.json").read_text())["calls"]
    assert (call["tool"], call["approved_by"], call["status"]) == ("deliver", "eve", "done")
