"""The recipe in examples/production, command by command: at its end the agent is ready for production."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import agentfsm
from tests.support.command_line import write_warm_command
from tests.support.port_servers import free_port

EXAMPLE = Path(__file__).parents[2] / "examples" / "production"


@pytest.mark.skipif(shutil.which("curl") is None, reason="the recipe uses curl")
def test_the_recipe_ends_with_an_agent_that_is_ready(tmp_path):
    """Each command succeeds, without a collector of traces, and no check is unmet."""
    folder = shutil.copytree(EXAMPLE, tmp_path / "production")
    warm = write_warm_command(tmp_path / "bin")
    blocks = re.findall(r"```console\n(.*?)```", (EXAMPLE / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    lines = [line.removeprefix("$ ") for block in blocks for line in block.splitlines()]
    script = "\n".join(["set -e", *(line for line in lines if not line.startswith("pip ")), "kill $!", "wait $!"])
    script = script.replace("localhost:4318", "127.0.0.1:9").replace("PORT=8000", f"PORT={free_port()}")
    env = {name: value for name, value in os.environ.items() if not name.startswith(("AGENTFSM_", "PYTHON", "OTEL"))}
    env |= {
        "OTEL_EXPORTER_OTLP_TIMEOUT": "1",  # seconds that a process tries at its end
        "PATH": f"{warm}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{Path(agentfsm.__file__).parents[1]}:{folder}",
    }
    done = subprocess.run(
        ["bash", "-c", script], check=False, cwd=folder, env=env, capture_output=True, encoding="utf-8", timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "33 pass" in done.stdout
    assert "FAIL" not in (folder / "readiness.md").read_text(encoding="utf-8")
