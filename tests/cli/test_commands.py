"""The subcommands, one by one: what each writes where, and how it ends."""

import json
import os
import re
import shlex
import stat
from importlib.metadata import version

import anyio
import pytest

from agentfsm import ImagePart, InputKind, MisuseError, TextPart
from agentfsm.cli.command_table import COMMANDS, GROUPS
from agentfsm.cli.render.progress import PlainView
from agentfsm.cli.render.text import format_events, format_prompt
from agentfsm.cli.resolve.agent_target import load_agent
from agentfsm.cli.resolve.store_location import create_store, open_existing_store
from agentfsm.cli.session import attended_run
from agentfsm.core.events import Observed
from agentfsm.core.header import Header
from agentfsm.core.inbox import Input
from agentfsm.core.run import begin_run
from agentfsm.stores import SQLiteStore


def test_run_writes_the_answer_alone_to_stdout(here):
    """Progress, and what the module and its tools print, go to stderr."""
    assert here("run", "app:shopper", "What does tea cost?") == "7\n"
    assert "app says hello" in here.err
    assert "the tool prints" in here.err
    assert '  t1.0 get_price(item="tea")' in here.err.splitlines()
    assert "done: 2 turns" in here.err


def test_the_id_comes_first(here):
    """The first line of the run is its id, so that whatever happens it can be gone on with."""
    here("run", "app:adder", "2 + 2", "--id", "sum")
    lines = [line for line in here.err.splitlines() if "hello" not in line]
    assert lines[0] == "run sum"


def test_run_as_json(here):
    """The final run is one document."""
    found = here.json("run", "app:shopper", "What does tea cost?")
    assert found["state"] == "done"
    assert found["stop_reason"] == "completed"
    assert found["output"] == "7"
    assert found["turns"] == 2
    assert found["pending"] == []
    assert found["resume"] is None
    assert found["usage"]["tokens"] == found["usage"]["input_tokens"] + found["usage"]["output_tokens"]
    assert [(call["name"], call["arguments"], call["outcome"]) for call in found["calls"]] == [
        ("get_price", {"item": "tea"}, "done"),
    ]


def test_show_prints_what_the_model_was_sent(here):
    """A turn by its parts, for people and as the document of the gateway; a turn that is not there is named."""
    here("run", "app:shopper", "What does tea cost?", "--id", "tea")
    found = here.json("show", "tea", "--request", "2")
    assert [part["name"] for part in found["parts"]][-3:] == ["user", "assistant", "result of get_price"]
    text = here("show", "tea", "--request", "2")
    assert "+ result of get_price: about" in text
    assert "= get_price: about" in text
    assert here("show", "tea", "--request", "9", code=2) == ""
    assert "its newest turn is 2" in here.err


def test_run_keeps_what_it_is_told(here):
    """Id, session, user and metadata are the run's."""
    words = (
        "--id",
        "first",
        "--session",
        "user-7",
        "--user",
        "ann",
        "--metadata",
        "team=red",
        "--metadata",
        "note=a=b",
    )
    here("run", "app:adder", "2 + 2", *words)
    found = here.json("show", "first")
    assert (found["session"], found["user"]) == ("user-7", "ann")
    assert found["metadata"] == {"team": "red", "note": "a=b"}
    assert found["target"] == "app:adder"
    assert found["prompt"] == "2 + 2"


def test_the_same_id_and_prompt_is_the_same_run(here):
    """A run that is over is told again, not run again; the same id for another prompt is refused."""
    here.run("app:adder", "2 + 2", "--id", "sum")
    assert here("run", "app:adder", "2 + 2", "--id", "sum") == "Four.\n"
    assert here.json("show", "sum")["turns"] == 1
    here("run", "app:adder", "3 + 3", "--id", "sum", code=1)
    assert "another prompt" in here.err


@pytest.mark.parametrize("word", ["run", "submit"])
def test_an_id_of_another_agents_run(here, word):
    """It is refused: neither is its answer passed off as this agent's, nor is it driven by this one."""
    here("submit", "app:payer", "Do it.", "--id", "job")
    here(word, "app:adder", "Do it.", "--id", "job", code=2)
    assert "run 'job' exists and belongs to app:payer, not to app:adder: choose another id" in here.err
    assert here.json("show", "job")["version"] == 0


def test_a_session_goes_on(here):
    """The second run of a session goes on from the first."""
    here.run("app:adder", "2 + 2", "--session", "s")
    here.run("app:adder", "And again?", "--session", "s")
    found = here.json("runs", "--session", "s")["runs"]
    assert len(found) == 2
    assert here.json("runs", "--session", "other") == {"runs": []}


def test_a_failed_run_says_why(here):
    """ERROR ends with 1, with the reason and the message, and nothing on stdout."""
    assert here("run", "app:failing", "Try.", code=1) == ""
    assert "failed, model_error: the model is out of order" in here.err
    found = here.json("run", "app:failing", "Try.", code=1)
    assert (found["state"], found["stop_reason"], found["output"]) == ("error", "model_error", None)
    assert "out of order" in found["stop_message"]


def test_a_limit_has_a_code_of_its_own(here):
    """A run that a larger limit would have let go on ends with 4."""
    here("run", "app:limited", "Go on and on.", code=4)
    assert "failed, max_turns: 2 of 2 turns used" in here.err


def test_calls_of_one_tool_are_decided_on_together(here):
    """A run that waits prints one command for all of them; the digests are those shown, or nothing is approved."""
    run_id = here.run("app:cashier", code=3)
    [command] = [line.split() for line in here.err.splitlines() if "approve" in line and "t1.1 t1.2" in line]
    assert command[:6] == ["agentfsm", "approve", run_id, "t1.0", "t1.1", "t1.2"]
    assert f"  all 3 calls of pay:\n    {' '.join(command)}\n" in here.err
    here(*command[1:-1], "0123", code=1)
    assert "t1.2 was not approved: it has changed since it was shown" in here.err
    here(*command[1:-2], code=2)
    assert "--digest is given 2 times for 3 calls" in here.err
    said = here.json("reject", run_id, "t1.0", "t1.2", "--message", "no", "--by", "ann")
    assert (said["decision"], said["call_ids"], said["by"]) == ("reject", ["t1.0", "t1.2"], "ann")
    here(*command[1:], code=1)
    assert "t1.0 was rejected already by 'ann'" in here.err
    here("approve", run_id, "t1.1")
    here("resume", run_id)
    assert [call["status"] for call in here.json("audit", run_id)["calls"]] == ["rejected", "done", "rejected"]


def test_a_rule_for_the_session_is_shown_then_allowed_listed_and_revoked(here):
    """Without a digest `approve --allow` only shows the rule, with the command that approves and allows it."""
    run_id = here.run("app:payer", code=3)
    here("approve", run_id, "t1.0", "--allow", "account", code=3)
    rule = 'allow(pay, account="17\\u202e")'
    assert (
        f"nothing is approved yet; this would be allowed:\n{rule}\nEach later call of pay with this value" in here.err
    )
    [command] = [
        shlex.split(line.partition("allow this: ")[2]) for line in here.err.splitlines() if "allow this:" in line
    ]
    assert command[:6] == ["agentfsm", "approve", run_id, "t1.0", "--allow", "account"]
    here("allowances", run_id)
    assert f"nothing is allowed in the session of run {run_id}" in here.err
    here(*command[1:], "--by", "ann")
    [found] = here.json("allowances", run_id)["allowances"]
    assert (found["rule"], found["by"], found["used"], found["revoked_by"]) == (rule, "ann", 0, None)
    assert f"{found['id']}  {rule}  0 calls  by ann" in here(
        "allowances", run_id, "--revoke", found["id"], "--by", "eve"
    )
    assert here.json("allowances", run_id)["allowances"][0]["revoked_by"] == "eve"


def test_without_a_terminal_approvals_wait(here):
    """Nobody is there to ask: 3, with the very commands that decide and go on; and those work."""
    run_id = here.run("app:payer", code=3)
    assert '  t1.0: may pay(account="17\\u202e", cents=5) run? (no answer until ' in here.err
    commands = [line.strip() for line in here.err.splitlines() if "agentfsm " in line]
    digest = here.json("show", run_id)["pending"][0]["digest"]
    assert commands == [
        f"agentfsm approve {run_id} t1.0 --digest {digest}",
        f"agentfsm reject {run_id} t1.0 --message WHY",
        f"then: agentfsm resume {run_id}",
    ]
    here("approve", run_id, "t1.0", "--digest", "0123456789abcdef", code=1)
    assert "t1.0 was not approved: it has changed since it was shown" in here.err
    here("approve", run_id, "t1.0", "--digest", digest, "--by", "ann")
    assert f"agentfsm resume {run_id}" in here.err
    assert here("resume", run_id) == "paid 5 to 17\n"
    assert (here.folder / "paid.txt").read_text(encoding="utf-8") == "17\u202e 5\n"


def test_what_waits_is_in_the_document(here):
    """A program finds what is asked, of what, and how to go on."""
    found = here.json("run", "app:payer", "Pay.", code=3)
    (pending,) = found["pending"]
    assert pending["kind"] == "approval"
    assert pending["call_id"] == "t1.0"
    assert pending["tool"] == "pay"
    assert pending["arguments"] == {"account": "17\u202e", "cents": 5}
    assert found["resume"] == f"agentfsm resume {found['id']}"
    assert found["output"] is None


def test_a_rejected_call_does_not_run(here):
    """The model is told why."""
    run_id = here.run("app:payer", code=3)
    here("reject", run_id, "t1.0", "--message", "too much")
    assert "too much" in here("resume", run_id)
    assert not (here.folder / "paid.txt").exists()


def test_the_first_decision_stands(here):
    """A second, other decision is refused and told the first; the same by the same person is fine."""
    run_id = here.run("app:payer", code=3)
    said = here.json("approve", run_id, "t1.0", "--by", "ann")
    assert (said["decision"], said["call_id"], said["by"]) == ("approve", "t1.0", "ann")
    here("approve", run_id, "t1.0", "--by", "ann")
    for words in (("reject",), ("approve", "--by", "bob")):
        here(words[0], run_id, "t1.0", *words[1:], code=1)
        assert "t1.0 was approved already by 'ann'" in here.err


def test_a_decision_that_no_worker_has_taken_up_is_shown(here):
    """It is in the inbox, and not in the journal; also where the run was cancelled before a worker came."""
    run_id = here.run("app:payer", code=3)
    assert "posted" not in here("show", run_id)
    here("approve", run_id, "t1.0", "--by", "ann")
    assert "posted   t1.0: approved by ann; a worker, or resume, executes it" in here("show", run_id)
    [posted] = here.json("show", run_id)["posted"]
    assert (posted["call_id"], posted["decision"], posted["by"]) == ("t1.0", "approved", "ann")
    here("cancel", run_id)
    assert "posted   t1.0: approved by ann; not executed, because the run ended first" in here("show", run_id)
    assert "posted" not in here("show", run_id, "--at", "1")


@pytest.mark.parametrize("words", [("approve",), ("reject",), ("settle", "--rerun")])
def test_deciding_what_is_not_asked(here, words):
    """A call that nobody asks about is a mistake of the caller's, and the error tells what is asked."""
    run_id = here.run("app:payer", code=3)
    here(words[0], run_id, "t9.9", *words[1:], code=2)
    assert "it waits for: approval of t1.0" in here.err


def test_cancel_ends_a_run(here):
    """A run that waits is over at once; of one that had ended by itself it is refused."""
    run_id = here.run("app:payer", code=3)
    found = here.json("cancel", run_id, "--by", "ann", "--message", "changed my mind")
    assert (found["state"], found["stop_reason"]) == ("error", "cancelled")
    assert found["stop_message"] == "cancelled by ann: changed my mind"
    here("cancel", run_id)
    assert f"run {run_id} is over (cancelled)\n" in here.err
    here("cancel", here.run("app:adder"), code=1)
    assert "is over (completed)" in here.err


def test_resume_of_a_finished_run_tells_it_again(here):
    """Nothing is run, and the agent's module need not even be there."""
    run_id = here.run("app:adder")
    (here.folder / "app.py").unlink()
    assert here("resume", run_id) == "Four.\n"
    assert f"run {run_id} is over" in here.err
    failed = here.json("resume", run_id)
    assert failed["output"] == "Four."


def test_resume_of_a_run_without_a_target(here):
    """A run begun from Python does not say whose it is: the error says so, and `--agent` names it."""
    store = SQLiteStore("runs.db")
    agent = load_agent("app:payer").with_(store=store)
    run = agent.run_sync("Pay.")
    anyio.run(store.aclose)
    here("resume", run.id, "--store", "runs.db", code=2)
    assert "name it with --agent module:name" in here.err
    here("resume", run.id, "--store", "runs.db", "--agent", "app:number", code=2)
    here("resume", run.id, "--store", "runs.db", "--agent", "app:payer", code=3)
    assert f"then: agentfsm resume {run.id} --store runs.db --agent app:payer" in here.err


def test_a_store_that_only_the_agent_can_open(here):
    """The agent keeps it, and what is printed does not pretend that another command could open it."""
    run_id = here.run("app:shelved", code=3)
    assert "from Python, with agent.approve" in here.err
    assert f"agentfsm resume {run_id} --agent app:shelved" in here.err
    assert "agentfsm approve" not in here.err
    here("resume", run_id, "--agent", "app:shelved", code=3)


def test_an_agent_with_a_store_of_its_own_keeps_it(here):
    """The printed commands name that store."""
    run_id = here.run("app:own", code=3)
    store = here.folder / "own.db"
    assert f"agentfsm resume {run_id} --store {store}" in here.err
    assert here.json("show", run_id, "--store", "own.db")["state"] == "act"


def test_the_store_is_where_it_is_said_to_be(here, monkeypatch):
    """An option, else the environment, else the usual place; folders are made; commands name what is unusual."""
    here("run", "app:payer", "Pay.", "--store", "deep/er/runs.db", code=3)
    assert "--store deep/er/runs.db" in here.err
    monkeypatch.setenv("AGENTFSM_STORE", "by env/runs.db")
    here("run", "app:payer", "Pay.", code=3)
    assert "--store 'by env/runs.db'" in here.err
    assert not (here.folder / ".agentfsm").exists()
    assert len(here.json("runs")["runs"]) == 1


def test_the_usual_store_is_kept_out_of_git(here):
    """What the command leaves is under `.agentfsm/`, which ignores itself."""
    here.run("app:adder")
    assert (here.folder / ".agentfsm" / ".gitignore").read_text(encoding="ascii") == "*\n"


def test_others_of_the_machine_read_nothing(here):
    """What the command makes is its owner's alone, under the usual umask; a folder that is there keeps its mode."""
    (here.folder / "shared").mkdir(mode=0o755)
    before = os.umask(0o022)
    try:
        here("run", "app:payer", "Pay.", code=3)
        here("run", "app:payer", "Pay.", "--store", "shared/runs.db", code=3)
    finally:
        os.umask(before)
    places = [".agentfsm", ".agentfsm/runs.db", "shared", "shared/runs.db"]
    modes = [stat.S_IMODE((here.folder / place).stat().st_mode) for place in places]
    assert modes == [0o700, 0o600, 0o755, 0o600]


def test_a_store_that_cannot_be_made(here):
    """The error says which folder, and what to do."""
    (here.folder / "file").write_text("x", encoding="ascii")
    with pytest.raises(MisuseError, match=r"cannot create the folder .* --store"):
        create_store("file/runs.db")
    here("run", "app:adder", "2 + 2", "--store", "file/runs.db", code=2)


@pytest.mark.parametrize(
    "words",
    [("runs",), ("show", "x"), ("resume", "x"), ("approve", "x", "t1.0"), ("cancel", "x")],
)
def test_looking_makes_no_store(here, words):
    """Where there is no store, the commands that only look say so and leave none behind."""
    here(*words, code=2)
    assert "there is no store at .agentfsm/runs.db: start a run first" in here.err
    assert not (here.folder / ".agentfsm").exists()
    with pytest.raises(MisuseError):
        open_existing_store(".agentfsm/runs.db")


@pytest.mark.parametrize(
    "words",
    [("show", "x"), ("resume", "x"), ("approve", "x", "t1.0"), ("settle", "x", "t1.0", "--rerun"), ("cancel", "x")],
)
def test_an_unknown_run(here, words):
    """It is named, as an error of usage; as JSON too."""
    here.run("app:adder")
    here(*words, code=2)
    assert "holds no run 'x'" in here.err
    assert here.json(*words, code=2)["error"]["type"] == "RunNotFoundError"


def test_runs_lists_the_newest_first(here):
    """A line a run: id, how it stands, when, and the prompt."""
    ids = [here.run("app:adder", f"sum {number}", "--id", f"r{number}") for number in range(3)]
    here.run("app:payer", "--id", "waits", "Pay.", code=3)
    lines = here("runs").splitlines()[1:]
    assert [line.split()[0] for line in lines] == ["waits", *reversed(ids)]
    assert "waits  waiting  " in lines[0]
    assert "r2     done  " in lines[1]
    assert lines[1].endswith("sum 2")
    assert len(here("runs", "--limit", "2").splitlines()) == 3
    assert [run["id"] for run in here.json("runs")["runs"]] == ["waits", *reversed(ids)]
    here("runs", "--limit", "0", code=2)


def test_show_tells_the_tree_of_turns(here):
    """Header, turns, calls with arguments and outcome, usage, how it ended."""
    run_id = here.run("app:shopper", "What does tea cost?")
    lines = here("show", run_id).splitlines()
    assert lines[0] == f"run      {run_id}"
    assert "agent    agent (app:shopper)" in lines
    assert "prompt   What does tea cost?" in lines
    assert any(line.startswith("state    DONE (completed), version ") for line in lines)
    at = lines.index("turn 1")
    assert lines[at + 1] == '  t1.0 get_price(item="tea")'
    assert lines[at + 2].startswith("       done in ")
    assert lines[at + 3 : at + 5] == ["turn 2", "  | 7"]
    assert any(line.startswith("used     ") for line in lines)


def test_show_tells_what_is_open(here):
    """An open call stands in the tree, and what the run waits for below it."""
    run_id = here.run("app:payer", code=3)
    text = here("show", run_id)
    assert "state    ACT, waits for the approval of t1.0, version 3" in text
    assert '  t1.0 pay(account="17", cents=5)\n       asked\n' in text
    assert 'waits    t1.0: may pay(account="17\\u202e", cents=5) run?' in text


def test_show_of_an_earlier_version(here):
    """`--at` folds the journal up to there, and no further."""
    run_id = here.run("app:shopper")
    found = here.json("show", run_id, "--at", "2", "--events")
    assert (found["state"], found["version"], len(found["events"])) == ("act", 2, 2)
    assert found["tree"][0]["calls"][0]["status"] == "intended"
    here("show", run_id, "--at", "99", code=2)
    assert "its versions are 0 to" in here.err


def test_show_lists_the_journal(here):
    """One line an entry, numbered by version; as JSON the entries themselves."""
    run_id = here.run("app:shopper")
    lines = here("show", run_id, "--events").splitlines()
    kinds = [line.split()[3] for line in lines if line.strip()[:1].isdigit()]
    assert kinds[:3] == ["Observed", "ToolsChosen", "ToolFinished"]
    assert kinds[-1] == "AnswerGiven"
    assert [event["is"] for event in here.json("show", run_id, "--events")["events"]] == kinds


@pytest.mark.parametrize(
    ("form", "start"),
    [("mermaid", "stateDiagram-v2"), ("dot", "digraph"), ("text", "OBSERVE  -> THINK")],
)
def test_graph_draws_the_table(here, form, start):
    """In each form; Mermaid unless said otherwise."""
    drawn = here("graph", "--format", form)
    assert drawn.startswith(start)
    assert here.json("graph", "--format", form) == {"format": form, "graph": drawn.rstrip("\n")}
    assert here("graph").startswith("stateDiagram-v2")


def test_hostile_text_is_stripped(here):
    """Whatever a model or a tool says, the terminal gets nothing to act on and nothing hidden, on stdout or stderr."""
    run_id = here.run("app:hostile")
    shown = here.out + here.err + here("show", run_id, "--events") + here("runs") + here.err
    shown += here("run", "app:failing", "Try.", code=1) + here.err
    assert "red]0;title abc zero tag [/x] [bold]" in shown
    assert not set(shown) & set("\x1b\x07\u202e\u202c\u200b\U000e0041")


def test_json_hides_nothing_and_does_nothing(here):
    """The document has the text as it is, in ASCII."""
    text = here("run", "app:hostile", "Shout.", "--json")
    assert text.isascii()
    assert "\x1b" not in text
    assert "\u202e" in json.loads(text)["output"]


def test_a_fault_in_the_model_is_told_whole(here):
    """It is no error of ours to explain: the traceback is shown, cleaned, with how to go on."""
    run_id = here.run("app:buggy", code=1)
    assert "Traceback" in here.err
    assert "ZeroDivisionError: red]0;title abc" in here.err
    assert f"To continue: agentfsm resume {run_id}" in here.err
    assert here.json("resume", run_id, code=1)["error"]["type"] == "ZeroDivisionError"


def test_a_fault_in_a_tool_is_told_with_its_place(here):
    """The model reads what went wrong, whoever wrote the tool also where."""
    here("run", "app:hostile", "Shout.")
    (told,) = [line for line in here.err.splitlines() if "event=tool_raised" in line]
    line = (here.folder / "app.py").read_text(encoding="utf-8").splitlines().index("    raise ValueError(HOSTILE)") + 1
    assert told.startswith("warning: event=tool_raised run=")
    assert told.endswith(f"tool=shout: ValueError: red]0;title abc zero tag [/x] [bold] (app.py:{line})")


def test_a_display_that_breaks_does_not_break_the_run(here, monkeypatch):
    """Plain lines take its place."""

    class Broken(PlainView):
        def on_event(self, event, run):
            raise RuntimeError("no pixels [/x]")

    monkeypatch.setattr(attended_run, "choose_view", lambda terminal: Broken(terminal=terminal))
    assert here("run", "app:shopper", "Shop.") == "7\n"
    assert here.err.count("the display failed (RuntimeError: no pixels [/x])") == 1
    assert "  t1.0 done in" in here.err


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("fly",),
        ("run", "app:adder"),
        ("run", "app:adder", "x", "--metadata", "novalue"),
        ("run", "app:adder", "x", "--id=-x"),
        ("settle", "a", "b"),
    ],
)
def test_usage_errors_are_two(here, words):
    """What argparse refuses ends like any other error of usage, as JSON too."""
    here(*words, code=2)
    assert here.err.startswith("agentfsm: ")
    assert "\nusage: agentfsm" in here.err
    assert here.json(*words, code=2)["error"]["type"] == "MisuseError"


def test_an_empty_prompt_is_refused(here):
    """The error says what to write, and no run is made."""
    here("run", "app:adder", "  ", code=2)
    assert "the text is empty" in here.err


def test_the_version_is_that_of_the_package(here):
    """It is printed, and nothing else is done."""
    assert here("--version") == f"agentfsm {version('agentfsm')}\n"


def test_help_names_every_command(here):
    """In groups, with the exit codes; each command takes `--json` and says what it does."""
    text = here("--help")
    assert re.findall(r"^  ([a-z]+)(?=  |$)", text, re.MULTILINE) == [*COMMANDS]
    assert re.findall(r"^([a-z ]+):$", text, re.MULTILINE) == [*GROUPS, "options"]
    assert "3 waiting for a person or for input" in " ".join(text.split())
    for name in COMMANDS:
        page = here(name, "--help")
        below = re.findall(r"^    ([a-z-]+)(?=  |$)", page, re.MULTILINE)
        for each in [page] if not below else [here(name, inner, "--help") for inner in below]:
            assert "  --json " in each


def test_parts_of_results_are_named_and_never_printed(here):
    """A reader sees what a call returned beside text; the data is in the journal, for programs."""
    here("run", "app:camera", "Look.", "--id", "r1")
    assert "iVBOR" not in here.err
    told = here("show", "r1", "--events")
    assert "       with [image: image/png, 45 bytes]" in told.splitlines()
    assert "iVBOR" not in told
    found = here.json("show", "r1")
    assert found["tree"][0]["calls"][0]["parts"] == ["[image: image/png, 45 bytes]"]
    assert "iVBOR" not in json.dumps(found)
    result = here.json("export", "r1")["messages"][2]
    assert result["parts"][0]["url"].startswith("data:image/png;base64,iVBOR")


def test_a_line_of_the_journal_shows_no_data():
    """Of what was sent to a run, its type is enough; what stands behind it in the line is seen, too."""
    image = ImagePart(url="data:image/png;base64,iVBOR", detail="low")
    sent = Input(kind=InputKind.USER, parts=(image, TextPart(text="what is it?")))
    [line] = format_events([Observed(inputs=(sent,))])
    assert '"url": "data:image/png;base64,...", "detail": "low"' in line
    assert "what is it?" in line
    header = Header(id="r1", prompt=sent.parts, created_at=0.0)
    assert format_prompt(begin_run(header)) == "[image: image/png, 3 bytes]\nwhat is it?"
