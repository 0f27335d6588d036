"""The image and the manifest in examples/production, as docs/containers.md shows them; neither is built or applied."""

import json
import re
from pathlib import Path

import pytest
import yaml

from agentfsm.cli.command_table import COMMANDS
from agentfsm.cli.parser import build_parser

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "examples" / "production"
PAGE = (ROOT / "docs" / "containers.md").read_text(encoding="utf-8")
MANIFEST = list(yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text(encoding="utf-8")))
DEPLOYMENTS = {each["metadata"]["name"]: each["spec"]["template"] for each in MANIFEST if each["kind"] == "Deployment"}


@pytest.mark.parametrize("name", ["Dockerfile", "kubernetes.yaml"])
def test_the_page_shows_the_files(name):
    """Each as it is in the folder."""
    [shown] = re.findall(rf"<!-- file: {name} -->\n```\w+\n(.*?)```", PAGE, re.DOTALL)
    assert shown == (FOLDER / name).read_text(encoding="utf-8")


def test_the_image():
    """Its user is a number that is not root, it is the first process, and what it copies exists."""
    text = (FOLDER / "Dockerfile").read_text(encoding="utf-8")
    lines = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)).splitlines()
    steps = [line.split(maxsplit=1) for line in lines if line.strip()]
    assert {name for name, _ in steps} <= {"FROM", "ENV", "WORKDIR", "RUN", "COPY", "USER", "ENTRYPOINT", "CMD"}
    given = dict(steps)
    assert all(int(number) > 0 for number in given["USER"].split(":"))
    for name, words in steps:
        assert name != "COPY" or (ROOT / words.split()[0]).exists()
    assert json.loads(given["ENTRYPOINT"]) == ["agentfsm"]
    assert build_parser(*COMMANDS).parse_args(json.loads(given["CMD"])).agent == "support:agent"
    extras = re.findall(r"\[([a-z,]+)\]", given["RUN"])[0].split(",")
    assert set(extras) <= set(re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE))


@pytest.mark.parametrize("name", ["gateway", "worker"])
def test_a_deployment(name):
    """Not root, nothing to write but /tmp, arguments that the command line takes, and time for the drain."""
    template = DEPLOYMENTS[name]
    spec, [container] = template["spec"], template["spec"]["containers"]
    assert spec["securityContext"]["runAsNonRoot"]
    assert not spec["automountServiceAccountToken"]
    rights = container["securityContext"]
    assert (rights["readOnlyRootFilesystem"], rights["allowPrivilegeEscalation"]) == (True, False)
    assert rights["capabilities"] == {"drop": ["ALL"]}
    mounts = {each["mountPath"]: each.get("readOnly", False) for each in container["volumeMounts"]}
    assert [path for path, is_read_only in mounts.items() if not is_read_only] == ["/tmp"]  # noqa: S108
    assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in spec["volumes"]}
    given = build_parser(*COMMANDS).parse_args(container["args"])
    before = container.get("lifecycle", {}).get("preStop", {"sleep": {"seconds": 0}})["sleep"]["seconds"]
    assert spec["terminationGracePeriodSeconds"] >= before + given.drain + 5
    assert template["metadata"]["labels"] == {"app": name}


def test_the_service_finds_the_gateway():
    """By its label, at the port that it listens on."""
    [service] = [each["spec"] for each in MANIFEST if each["kind"] == "Service"]
    assert service["selector"] == DEPLOYMENTS["gateway"]["metadata"]["labels"]
    [container] = DEPLOYMENTS["gateway"]["spec"]["containers"]
    [port] = container["ports"]
    assert service["ports"][0]["targetPort"] == port["name"]
    assert build_parser(*COMMANDS).parse_args(container["args"]).http.endswith(f":{port['containerPort']}")
