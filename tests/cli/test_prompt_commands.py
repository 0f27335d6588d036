"""`agentfsm prompts` and `agentfsm doctor --prompts`."""

import pytest

FRONT = """+++
author = "ann"
changes = "routes, and does not answer"
[variables]
tools = "json"
request = {kind = "untrusted", default = "none"}
[[tests]]
name = "json"
values = {tools = []}
checks = ["json_valid"]
+++
"""


@pytest.fixture
def prompts(here):
    """Two versions of a prompt in the folder `prompts`."""
    folder = here.folder / "prompts" / "router"
    folder.mkdir(parents=True)
    (folder / "1.0.md").write_text(FRONT + "Route with {{tools}}: {{request}}", encoding="utf-8")
    (folder / "2.0.md").write_text(FRONT + "Route with {{tools}}, or refuse: {{request}}", encoding="utf-8")
    return folder


def test_list_activate_and_roll_back(here, prompts):
    """The star follows the activations."""
    lines = here("prompts", "list").splitlines()
    assert [line[:12] for line in lines] == ["  router@1.0", "* router@2.0"]
    assert lines[0].endswith("not tested")
    here("prompts", "activate", "router", "1.0", "--by", "ann", "--why", "2.0 fails")
    assert "there are no test results for this version" in here.err
    assert here.json("prompts", "activate", "router", "2.0", "--why", "mended")["version"] == "2.0"
    assert "router@1.0 is in use" in here("prompts", "rollback", "router", "--by", "bob", "--why", "worse")
    assert [row["in_use"] for row in here.json("prompts", "list")["prompts"]] == [True, False]
    shown = here("prompts", "show", "router")
    assert "rolled back to 1.0 by bob: worse" in shown
    assert "variable request: untrusted, default 'none'" in shown
    assert shown.endswith("Route with {{tools}}: {{request}}\n")


def test_a_decision_needs_a_reason(here, prompts):
    """As it is written in the log."""
    assert "--why" in here("prompts", "activate", "router", "1.0", code=2) + here.err


def test_render(here, prompts):
    """Text as given, JSON as JSON, and the versions."""
    made = here.json("prompts", "render", "router@1.0", 'tools=["a"]', "request={{tools}}")
    assert made["text"].startswith('Route with [\n  "a"\n]: (data from outside')
    assert "{{tools}}" in made["text"]
    assert made["sources"][0].startswith("router@1.0#")
    assert "is not JSON" in here("prompts", "render", "router", "tools=a", code=2) + here.err
    assert "values are missing for tools" in here("prompts", "render", "router", code=2) + here.err


def test_diff(here, prompts):
    """A unified diff, with the digests."""
    lines = here("prompts", "diff", "router", "1.0").splitlines()
    assert lines[0].startswith("--- router@1.0#")
    assert "+Route with {{tools}}, or refuse: {{request}}" in lines
    here("prompts", "diff", "router", "2.0")
    assert "no difference" in here.err


def test_the_tests_of_a_prompt(here, prompts, monkeypatch):
    """With a model on a server; the results are kept, with the digest."""
    from agentfsm.testing import LocalServer, say  # noqa: PLC0415

    replies = iter(["{}", "not JSON"] + ["{}"] * 3)
    with LocalServer(lambda _body: say(next(replies))) as server:
        monkeypatch.setenv("OPENAI_API_KEY", "none-needed")
        monkeypatch.setenv("OPENAI_BASE_URL", server.base_url)
        out = here("prompts", "test", "router@1.0", "--model", "openai:gpt-4o", code=1)
    assert out.startswith("FAILED json: 4 of 5 passed (95 %: 38% to 96%)\n       1 times json_valid: not JSON")
    assert "cost: a price is unknown" in out
    [old, new] = here.json("prompts", "list")["prompts"]
    assert (old["passed"], new["passed"]) == (False, None)


def test_a_matrix(here, prompts, monkeypatch):
    """Versions times models, as a table of pass rates with their intervals."""
    from agentfsm.testing import LocalServer, say  # noqa: PLC0415

    with LocalServer(lambda body: say("{}" if body["model"] == "gpt-4o" else "no")) as server:
        monkeypatch.setenv("OPENAI_API_KEY", "none-needed")
        monkeypatch.setenv("OPENAI_BASE_URL", server.base_url)
        models = ("--model", "openai:gpt-4o", "--model", "openai:other")
        words = ("prompts", "test", "router@1.0", "router@1.0.0", *models, "--runs", "4")
        lines = here(*words, code=1).splitlines()
        assert here.json(*words, code=1)["passed"] is False
    assert lines[0] == "router@1.0 with gpt-4o"
    assert lines[-2].split() == ["gpt-4o", "other"]
    assert lines[-1].split() == ["router@1.0", "100%", "(51%", "to", "100%)", "0%", "(0%", "to", "49%)"]


def test_the_doctor_reads_prompts(here, prompts):
    """Findings are advice; a folder that cannot be read is broken."""
    report = here.json("doctor", "--prompts", "prompts")
    assert report["ok"]
    assert any("no version was activated" in each["message"] for each in report["prompts"])
    assert "prompt  router 2.0: warning: there are no test results" in here("doctor", "--prompts", "prompts")
    (prompts / "3.0.md").write_text("no front matter")
    assert "BROKEN  prompts" in here("doctor", "--prompts", "prompts", code=1)


def test_an_invalid_file_concerns_its_prompt_only(here, prompts):
    """The list shows the other prompts and the fault; whoever uses the prompt gets the fault."""
    (prompts.parent / "greeting").mkdir()
    (prompts.parent / "greeting" / "1.0.md").write_text("+++\n+++\nHello.")
    (prompts / "3.0.md").write_text("no front matter")
    assert here("prompts", "list", code=1).startswith("* greeting@1.0")
    assert "3.0.md: it has no front matter" in here.err
    assert here("prompts", "render", "greeting") == "Hello.\n"
    here("prompts", "render", "router", code=2)
    assert "3.0.md: it has no front matter" in here.err


@pytest.mark.parametrize("word", ["other", "router@9.0"])
def test_what_is_not_there(here, prompts, word):
    """The error names what there is."""
    assert "router" in here("prompts", "show", word, code=2) + here.err


def test_a_run_shows_the_versions_of_its_prompts(here, prompts):
    """`show` of one run, and `diff` of two."""
    (here.folder / "shop.py").write_text(
        "from agentfsm import Agent\n"
        "from agentfsm.prompts import Prompts\n"
        "from agentfsm.testing import ScriptedModel\n"
        "prompts = Prompts('prompts')\n"
        "def agent():\n"
        "    chosen = lambda header: prompts['router'].render(tools=[])\n"
        "    return Agent(ScriptedModel('done'), instructions=chosen)\n",
        encoding="utf-8",
    )
    here("run", "shop:agent", "Hi", "--id", "r2")
    here("prompts", "activate", "router", "1.0", "--by", "ann", "--why", "2.0 fails")
    here("run", "shop:agent", "Hi", "--id", "r1")
    assert "prompts  router@2.0#" in here("show", "r2")
    assert here.json("show", "r1")["prompts"]["router"].startswith("1.0#")
    assert "prompt router 2.0#" in here("diff", "r2", "r1")
