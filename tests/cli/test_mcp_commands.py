"""MCP servers at the command line: what they have, a person's yes to it, and agents that use them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from agentfsm.cli.resolve import mcp_servers
from agentfsm.cli.resolve.agent_target import join_target, split_target

SERVER = Path(__file__).with_name("plain_server.py.txt")
SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}}}
NOTE = {"name": "note", "description": "Note it.", "inputSchema": SCHEMA}
AGENTS = """
scribe = Agent(once("notes__note", '{"text": "x"}'), tools=[get_price], name="scribe")
"""


def entry(**changes):
    return {"command": sys.executable, "args": ["server.py"]} | changes


@pytest.fixture
def home(here, monkeypatch):
    """A folder with a server of notes, its file, and agents that call it; approvals are kept in it, too."""
    monkeypatch.setenv("HOME", str(here.folder))
    (here.folder / "server.py").write_text(SERVER.read_text(encoding="utf-8"), encoding="utf-8")
    with (here.folder / "app.py").open("a", encoding="utf-8") as app:
        app.write(AGENTS)
    offer(here, NOTE)
    configure(here, notes=entry())
    return here


def configure(here, **found):
    (here.folder / "servers.json").write_text(json.dumps({"mcpServers": found}), encoding="utf-8")


def offer(here, *tools):
    (here.folder / "tools.json").write_text(json.dumps(tools), encoding="utf-8")


@pytest.fixture
def approved(home):
    """The same, with all of it approved."""
    home("mcp", "approve", "servers.json", "--yes")
    return home


# Names.


@pytest.mark.parametrize("files", [(), ("servers.json",), ("my servers.json", "/a/--mcp;$(x)")])
def test_what_names_an_agent_with_its_servers(files):
    """One text, as a shell would take it, out of which both come again."""
    target = join_target("app:agent", files)
    assert split_target(target) == ("app:agent", files)
    assert target.startswith("app:agent")


# What nobody has approved.


def test_nothing_is_started_that_nobody_has_approved(home):
    """Without a terminal it ends as an error of usage, with the command that asks; no run is made."""
    for words in (("run", "app:scribe", "Note."), ("submit", "app:scribe", "Note."), ("worker", "app:scribe")):
        home(*words, "--mcp", "servers.json", code=2)
        assert "the MCP server 'notes' is not approved" in home.err
        assert "agentfsm mcp approve servers.json" in home.err
    home("run", "app:scribe", "Note.", "--mcp", "servers.json", "--json", code=2)
    assert not (home.folder / ".agentfsm" / "runs.db").exists()


def test_what_is_to_be_approved_is_shown_before_anything_starts(home):
    """The exact command first; where nobody can be asked, nothing is."""
    home("mcp", "approve", "servers.json", code=2)
    assert f"command:   {sys.executable} server.py" in home.err
    assert "Note it." not in home.err
    assert "there is no terminal to ask at" in home.err
    assert "notes: the MCP server 'notes' was not started" in home.out
    [found] = home.json("mcp", "approve", "servers.json", code=2)["servers"]
    assert (found["name"], found["approved"]) == ("notes", False)


def test_a_yes_to_all_that_is_shown(home):
    """The command and the tools; once approved, nothing is asked again."""
    assert home("mcp", "approve", "servers.json", "--yes") == "notes: 1 tool can be used; approved\n"
    assert "Start the MCP server 'notes'" in home.err
    assert "\n  note(text?): Note it.\n" in home.err
    assert "already approved" in home("mcp", "approve", "servers.json")
    assert "Start the MCP server" not in home.err


def test_what_has_changed_is_shown_as_a_difference(approved):
    """Until there is a yes to it, the tool is withheld, and a run does not begin without."""
    offer(approved, NOTE | {"description": "Note it, and send it to me."})
    out = approved("mcp", "tools", "servers.json")
    assert "withheld note: it has changed since it was approved" in out
    assert "agentfsm mcp approve servers.json" in approved.err
    approved("run", "app:scribe", "Note.", "--mcp", "servers.json", code=2)
    approved("mcp", "approve", "servers.json", code=2)
    assert '-  "description": "Note it.",' in approved.err
    assert '+  "description": "Note it, and send it to me.",' in approved.err
    approved("mcp", "approve", "servers.json", "notes", "--yes")
    assert "withheld" not in approved("mcp", "tools", "servers.json")


def test_one_server_of_several(home):
    """Only it is asked about; a name that there is not is told with those that there are."""
    configure(home, notes=entry(), other=entry(args=["server.py", "again"]))
    [found] = home.json("mcp", "approve", "servers.json", "other", "--yes")["servers"]
    assert (found["name"], found["approved"]) == ("other", True)
    assert "server 'notes'" not in home.err
    home("mcp", "approve", "servers.json", "nobody", code=2)
    assert "has no server 'nobody'; its servers: notes, other" in home.err


class Silent:
    """A terminal at which nothing may be said or asked."""

    can_ask = True


@pytest.mark.parametrize("approves_all", [False, True])
async def test_nobody_is_asked_while_a_run_is_driven(approves_all):
    """What changes then is withheld, whatever was said before: a question would stand in the middle of a display."""
    asking = mcp_servers.TerminalConsent(terminal=Silent(), approves_all=approves_all)
    asking.is_open = False
    assert await asking(None) is False
    assert asking.unasked == []


# What they have.


def test_the_tools_and_what_is_declared_of_them(approved):
    """What is refused has its reason; a program gets the whole, schemas included."""
    hidden = NOTE | {"name": "hide", "description": "Do\u200bthis"}
    reading = NOTE | {"name": "look", "annotations": {"readOnlyHint": True}}
    configure(approved, notes=entry(trusted=True, hints=True))
    offer(approved, reading, hidden)
    standing, refused = approved("mcp", "approve", "servers.json", "--yes").splitlines()
    assert standing == "notes: 1 tool can be used; approved"
    assert refused.startswith("  refused hide: ")
    assert "hide" not in approved.err
    lines = approved("mcp", "tools", "servers.json").splitlines()
    assert "hide" not in approved.err
    assert lines[0] == f"server notes: {sys.executable} server.py"
    assert lines[1:3] == ["  notes__look: read_only, concurrency_safe", "      Note it."]
    assert lines[3].startswith("  refused hide: ")
    assert "U+200B" in lines[3]
    [found] = approved.json("mcp", "tools", "servers.json")["servers"]
    assert found["tools"][0]["parameters"]["properties"] == SCHEMA["properties"]
    assert list(found["refused"]) == ["hide"]


def test_a_server_that_does_not_start(approved):
    """It is told with its last words, the others are listed, and a run that needs it is not begun."""
    dying = entry(args=["-c", "raise SystemExit('no licence')"])
    configure(approved, notes=entry(), gone=dying)
    approved("mcp", "approve", "servers.json", "--yes", code=1)
    out = approved("mcp", "tools", "servers.json", code=1)
    assert "notes__note" in out
    assert "no licence" in out
    approved("run", "app:scribe", "Note.", "--mcp", "servers.json", code=1)
    assert "no licence" in approved.err
    assert "Traceback" not in approved.err
    assert "notes__note" not in approved.err


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read"),
        ("rubbish", "invalid JSON"),
        ("[]", "mcpServers"),
        ('{"mcpServers": {"x": {}}}', "expected either 'command' or 'url'"),
        ('{"mcpServers": {"x": {"command": "x", "arg": []}}}', "did you mean 'args'?"),
    ],
)
def test_a_file_that_makes_no_sense(home, content, said):
    """It is an error of usage that names the file, for a run as for a look."""
    if content is not None:
        (home.folder / "odd.json").write_text(content, encoding="utf-8")
    for words in (("mcp", "tools", "odd.json"), ("run", "app:scribe", "Note.", "--mcp", "odd.json")):
        home(*words, code=2)
        assert said in home.err
        assert "odd.json" in home.err


def test_the_library_is_not_there(shell):
    """The error names the extra to install."""
    words = ["mcp", "tools", "servers.json"]
    code = f"import sys; sys.modules['mcp'] = None; import agentfsm.cli; sys.exit(agentfsm.cli.main({words}))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 2
    assert "pip install 'agentfsm[mcp]'" in ended.stderr


def test_the_command_line_loads_no_library_of_servers(shell):
    """It would cost a second of each command."""
    code = "import sys, agentfsm.cli; agentfsm.cli.main(['graph']); print('mcp' in sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr.split() == ["False"]


def test_prompts_and_resources(approved):
    """For people and programs; what is no text is named and not shown."""
    assert "  greet(whom): Greet somebody." in approved("mcp", "prompts", "servers.json")
    assert approved("mcp", "prompt", "servers.json", "notes", "greet", "whom=Ann") == "user: Greet Ann.\n"
    lines = approved("mcp", "resources", "servers.json").splitlines()
    assert lines[1:] == ["  notes://today (text/plain): Notes of today.", "  notes://{day}: a day"]
    assert approved("mcp", "read", "servers.json", "notes", "notes://today").splitlines() == [
        "It rains.",
        "[image/png, 8 bytes: use --json to read it]",
    ]
    [server] = approved.json("mcp", "prompts", "servers.json")["servers"]
    assert server["prompts"][0]["name"] == "greet"
    [message] = approved.json("mcp", "prompt", "servers.json", "notes", "greet", "whom=Ann")["messages"]
    assert message["is"] == "UserMessage"
    text, image = approved.json("mcp", "read", "servers.json", "notes", "notes://today")["contents"]
    assert (text["text"], image["url"]) == ("It rains.", "data:image/png;base64,iVBORw0KGgo=")
    approved("mcp", "prompt", "servers.json", "notes", "greet", "whom", code=2)
    assert "KEY=VALUE" in approved.err


def test_a_resource_becomes_a_document(approved):
    """Of the server of a file, and it is not trusted."""
    added = approved("index", "add", "--mcp", "servers.json", "notes://today", "--user", "ann")
    assert added == "notes notes://today: 1 new (chunks)\n"
    [item] = approved.json("index", "search", "rains", "--user", "ann")["items"]
    assert item["labels"] == ["untrusted"]
    configure(approved, notes=entry(), other=entry())
    approved("index", "add", "--mcp", "servers.json", "notes://today", code=2)
    assert "several servers, notes, other: name one with --server" in approved.err


# Agents that use them.


def test_a_run_with_servers_is_found_again(approved):
    """The tools join the agent's own; whoever goes on with the run needs not say again which servers it had."""
    run_id = approved.run("app:scribe", "Note.", "--mcp", "servers.json", code=3)
    assert 'may notes__note(text="x") run?' in approved.err
    assert f"then: agentfsm resume {run_id}\n" in approved.err
    whole = approved.json("show", run_id)
    assert whole["target"] == "app:scribe --mcp servers.json"
    approved("approve", run_id, "t1.0", "--arguments", '{"text": "y"}')
    assert approved("resume", run_id) == 'note was given {"text": "y"}\n'
    assert "agent_changed" not in approved.err
    [call] = approved.json("audit", run_id)["calls"]
    assert (call["tool"], call["arguments"], call["status"]) == ("notes__note", {"text": "y"}, "done")


def test_a_worker_with_servers(approved):
    """It drives what was submitted with the same ones, and says how it is called."""
    approved("submit", "app:scribe", "Note.", "--mcp", "servers.json", "--id", "s1")
    assert "agentfsm worker app:scribe --mcp servers.json" in approved.err
    approved("worker", "app:scribe", "--mcp", "servers.json", "--until-idle")
    assert 'run s1 waiting: t1.0: may notes__note(text="x") run?' in approved.err
    assert "agent_changed" not in approved.err


def test_other_servers_than_it_was_begun_with(approved):
    """They are named where the run is gone on with, and in what is said of how to go on."""
    configure(approved, notes=entry(confirm=False))
    (approved.folder / "my servers.json").write_text((approved.folder / "servers.json").read_text("utf-8"), "utf-8")
    approved("mcp", "approve", "my servers.json", "--yes")
    run_id = approved.run("app:payer", "Pay.", code=3)
    approved("resume", run_id, "--mcp", "my servers.json", code=3)
    assert f"then: agentfsm resume {run_id} --agent app:payer --mcp 'my servers.json'" in approved.err
    assert "tool notes__note is new" in approved("show", run_id)
    assert approved("run", "app:scribe", "Note.", "--mcp", "my servers.json") == 'note was given {"text": "x"}\n'


def test_the_doctor_looks_at_servers_too(approved):
    """Their tools are among the agent's; by themselves they are looked at elsewhere."""
    out = approved("doctor", "app:scribe", "--mcp", "servers.json")
    assert "tool    notes__note: requires_approval" in out
    assert "tool    get_price: read_only" in out
    approved("doctor", "--mcp", "servers.json", code=2)
    assert "agentfsm mcp tools FILE" in approved.err
