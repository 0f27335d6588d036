"""What the official conformance suite says of our client and of our server, in both revisions."""

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.support import server_reaper, warm_python
from tests.support.mcp_conformance import (
    PACKAGE,
    REVISIONS,
    environment,
    lasting,
    run_client,
    run_clients,
    run_server,
    run_servers,
    wanted,
)
from tests.support.node_packages import program
from tests.support.port_servers import listening

EXTENSION = "it is an extension that the SDK's client does not have"
EVER = {
    "auth/dpop": f"Proof of possession: {EXTENSION}.",
    "auth/dpop-nonce": f"Proof of possession: {EXTENSION}.",
    "auth/wif-jwt-bearer": f"Federated workload identity: {EXTENSION}.",
}
# Why a check of our client fails, by revision.
CLIENT = {
    "2025-11-25": EVER,
    "2026-07-28": EVER,
}

LOGGING = "Logging over the protocol is deprecated since 2026-07-28, and left out."
SAMPLING = "Sampling is deprecated since 2026-07-28, and left out: a tool that needs a model brings its own."
ROOTS = "Roots are deprecated since 2026-07-28, and left out."
LONG = "A call that takes long is a task, also for a client that has none: it is told so."
FAULTS = "A tool that fails has a result; it makes no error of the protocol."
ASKED = "What a task asks, it asks once it has begun: its questions are in the journal."
# Why a check of our server fails, by revision.
SERVER = {
    "2025-11-25": {
        "logging-set-level": LOGGING,
        "server-sse-polling": "A stream that is cut is not taken up again: no events are stored.",
        "tools-call-sampling": SAMPLING,
        "tools-call-with-logging": LOGGING,
    },
    "2026-07-28": {
        "input-required-result-basic-list-roots": ROOTS,
        "input-required-result-basic-sampling": SAMPLING,
        "input-required-result-capability-check": SAMPLING,
        "input-required-result-multiple-input-requests": SAMPLING,
        "input-required-result-non-tool-request": "A prompt asks nobody.",
        "server-stateless:sep-2575-missing-capability-http-400": SAMPLING,
        "server-stateless:sep-2575-server-rejects-undeclared-capability": SAMPLING,
        "tasks-capability-negotiation:sep-2663-server-rejects-undeclared-client": LONG,
        "tasks-lifecycle:sep-2663-tasks-get-status-failed": FAULTS,
        "tasks-mrtr-composition:sep-2663-mrtr-synchronous-before-task-creation": ASKED,
    },
}


@pytest.fixture(scope="module")
def door(tmp_path_factory):
    """The socket where our client waits for the suite."""
    program(PACKAGE)
    path = tmp_path_factory.mktemp("c") / "door"
    script = Path(__file__).parent / "conformance_client.py"
    with subprocess.Popen([sys.executable, script, path], env=environment()) as client:
        try:
            server_reaper.await_that(
                lambda: path.exists() or client.poll() is not None, "our client waits for the suite"
            )
            assert client.poll() is None
            yield path
        finally:
            client.terminate()


@pytest.fixture(scope="module")
def address():
    """The address of our server, which speaks both revisions."""
    program(PACKAGE)
    script = Path(__file__).parent / "conformance_server.py"
    with listening(warm_python.MCP.command(str(script), "{port}"), environment()) as url:
        yield f"{url}/mcp"


@pytest.mark.parametrize("revision", REVISIONS)
def test_our_client_conforms(revision, door, tmp_path):
    """It passes every scenario of the revision but what is listed, for the reason given."""
    outcome = run_clients(revision, door, tmp_path / "all")
    required, others = wanted("client", revision)
    assert outcome.scenarios == required | others
    again = partial(_again, run_client, revision, door, tmp_path)
    assert lasting(outcome, CLIENT[revision], again) == {}


@pytest.mark.parametrize("revision", REVISIONS)
def test_our_server_conforms(revision, address, tmp_path):
    """It passes every scenario of the revision but what is listed, for the reason given."""
    outcome = run_servers(revision, address, tmp_path / "all")
    required, others = wanted("server", revision)
    assert outcome.scenarios == required | others
    again = partial(_again, run_server, revision, address, tmp_path)
    assert lasting(outcome, SERVER[revision], again) == {}


def _again(run, revision, target, folder, scenario):
    return run(scenario, revision, target, folder / "again" / scenario)
