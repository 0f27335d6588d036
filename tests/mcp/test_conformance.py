"""What the official conformance suite says of our client and of our server, in both revisions."""

import subprocess
import sys
from pathlib import Path

import keeper
import pytest
from node import program
from suite import PACKAGE, REVISIONS, environment, run_client, run_clients, wanted

EXTENSION = "it is an extension that the SDK's client does not have"
CLIENT = {
    "auth/dpop": f"Proof of possession: {EXTENSION}.",
    "auth/dpop-nonce": f"Proof of possession: {EXTENSION}.",
    "auth/wif-jwt-bearer": f"Federated workload identity: {EXTENSION}.",
    "json-schema-2020-12-preservation:json-schema-2020-12-client-$schema-preserved": (
        "A tool's schema is obeyed with its $schema, but models are told it without: it says nothing to them."
    ),
}
# Why a check of our client fails; none of them is required by a revision.

MOST_ALONE = 3
# Scenarios that are tried once more; where more fail it is not for the crowd.


@pytest.fixture(scope="module")
def door(tmp_path_factory):
    """The socket where our client waits for the suite."""
    program(PACKAGE)
    path = tmp_path_factory.mktemp("c") / "door"
    script = Path(__file__).parent / "conformance_client.py"
    with subprocess.Popen([sys.executable, script, path], env=environment()) as client:
        try:
            keeper.await_that(lambda: path.exists() or client.poll() is not None, "our client waits for the suite")
            assert client.poll() is None
            yield path
        finally:
            client.terminate()


@pytest.mark.parametrize("revision", REVISIONS)
def test_our_client_conforms(revision, door, tmp_path):
    """It passes every required scenario of the revision, and fails only what is listed, for the reason given."""
    outcome = run_clients(revision, door, tmp_path / "all")
    required, others = wanted("client", revision)
    assert outcome.scenarios == required | others
    assert not {name.partition(":")[0] for name in CLIENT} & required
    unlike = outcome.unlike(CLIENT)
    failed = {name.partition(":")[0] for name in unlike if name in outcome.failures}
    if len(failed) <= MOST_ALONE:
        # All run at once, and some look at the clock: what fails in the crowd is tried once more by itself.
        for scenario in failed:
            assert run_client(scenario, revision, door, tmp_path / "alone" / scenario).failures == {}
        unlike = {name: said for name, said in unlike.items() if name.partition(":")[0] not in failed}
    assert unlike == {}
