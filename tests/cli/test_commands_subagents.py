"""Agents among the tools, as the command line shows them: how far they are, what they wait for, whom to answer."""

import json
import sys

import anyio
import pytest

from agentfsm import tool
from agentfsm.cli.resolve.agent_target import iter_agents, load_agent
from agentfsm.stores import SQLiteStore

HIDDEN = set("\x1b\x07\u202e\u202c\u200b\U000e0041")


def test_a_sub_agent_is_told_below_its_call(here):
    """It begins, it takes turns, it ends; its name is cleaned like any other text."""
    here("run", "app:market", "What does tea cost?", "--id", "m")
    lines = [line for line in here.err.splitlines() if line.startswith("  t1.0")]
    told = [line.replace("shopper red]0;title abc zero tag [/x] [bold]", "shopper") for line in lines]
    assert told[:4] == [
        '  t1.0 ask_shopper(query="Tea?")',
        "  t1.0   shopper started, run m.t1.0",
        "  t1.0   shopper, turn 1 of 3",
        "  t1.0   shopper, turn 2 of 3",
    ]
    assert told[4].startswith("  t1.0   shopper is done after ")
    assert told[5].startswith("  t1.0 done in ")
    assert not HIDDEN & set(here.err)


def test_show_names_the_run_of_a_sub_agent(here):
    """And what it came to; the run can be shown itself, and says whom it works for."""
    here.run("app:market", "--id", "m", "Tea?")
    text = here("show", "m")
    assert ", run m.t1.0: 2 turns, " in text
    assert ", called get_price" in text
    assert not HIDDEN & set(text)
    child = here("show", "m.t1.0").splitlines()
    assert "parent   m" in child
    assert '  t1.0 get_price(item="tea")' in child
    cost = here.json("show", "m")["tree"][0]["calls"][0]["child"]
    assert (cost["run_id"], cost["turns"], cost["tool_calls"]) == ("m.t1.0", 2, ["get_price"])
    assert here.json("show", "m.t1.0")["parent"] == "m"


def test_what_a_sub_agent_waits_for_is_decided_in_its_own_run(here):
    """The commands that are printed name its run to decide, and the caller's to go on; and those work."""
    here.run("app:bank", "--id", "b", "Pay Bob.", code=3)
    lines = here.err.splitlines()
    assert "  t1.0 waits for the approval of t1.0 of run b.t1.0" in lines
    digest = here.json("show", "b")["pending"][0]["digest"]
    assert [line.strip() for line in lines if "agentfsm " in line] == [
        f"agentfsm approve b.t1.0 t1.0 --digest {digest}",
        "agentfsm reject b.t1.0 t1.0 --message WHY",
        "then: agentfsm resume b",
    ]
    (asked,) = [line for line in lines if "may transfer" in line]
    may = 'may transfer(account="Bob", cents=5) run?'
    assert asked.startswith(f"  t1.0 of run b.t1.0: {may} Move 5 cents to Bob. red]0;title abc zero")
    said = here.json("approve", "b.t1.0", "t1.0", "--by", "ann")
    assert (said["id"], said["resume"]) == ("b.t1.0", "agentfsm resume b")
    assert "recorded for t1.0 of run b.t1.0. To continue: agentfsm resume b\n" in here.err
    assert here("resume", "b") == "moved 5 to Bob\n"
    assert (here.folder / "paid.txt").read_text(encoding="utf-8") == "Bob 5\n"


def test_a_run_that_waits_for_its_sub_agent(here):
    """It is shown as paused, with where the decision is due; for programs too."""
    here.run("app:bank", "--id", "b", "Pay Bob.", code=3)
    text = here("show", "b", "--events")
    assert "state    ACT, waits for the approval of t1.0 of run b.t1.0, version " in text
    assert "       paused\n       waits for the approval of t1.0 of run b.t1.0, transfer\n" in text
    may = 'may transfer(account="Bob", cents=5) run?'
    assert f"waits    t1.0 of run b.t1.0: {may} Move 5 cents to Bob." in text
    assert '  ToolPaused     {"call_id": "t1.0", "pending": ["the approval of t1.0 of run b.t1.0"]}' in text
    found = here.json("show", "b", "--events")
    (pending,) = found["pending"]
    assert (pending["run_id"], pending["call_id"], pending["tool"]) == ("b.t1.0", "t1.0", "transfer")
    assert pending["description"].startswith("Move 5 cents to Bob.")
    assert found["tree"][0]["calls"][0]["waits"] == [pending]
    assert found["resume"] == "agentfsm resume b"
    assert found["events"][-1]["is"] == "ToolPaused"


def test_the_run_of_a_sub_agent_is_not_resumed_by_itself(here):
    """The error names the run that drives it; so does whatever shows it."""
    here.run("app:bank", "--id", "b", "Pay Bob.", code=3)
    here("resume", "b.t1.0", code=2)
    assert "run b.t1.0 belongs to run b: resume that one with agentfsm resume b\n" in here.err
    assert here.json("show", "b.t1.0")["resume"] == "agentfsm resume b"
    assert here.json("cancel", "b.t1.0")["state"] == "error"
    assert "cancelled" in here("resume", "b")


def test_agents_of_agents(here):
    """What is due two levels down is decided there, and the uppermost run goes on."""
    here.run("app:boss", "--id", "r", "Pay Bob.", code=3)
    assert "agentfsm approve r.t1.0.t1.0 t1.0" in here.err
    assert here.json("show", "r.t1.0.t1.0")["resume"] == "agentfsm resume r"
    here("approve", "r.t1.0.t1.0", "t1.0", "--arguments", '{"account": "Ann"}', code=2)
    assert "cents: required, but missing" in here.err
    here("approve", "r.t1.0.t1.0", "t1.0", "--arguments", '{"account": "Ann", "cents": 1}')
    assert here("resume", "r") == "moved 1 to Ann\n"
    below = here("show", "r").splitlines()
    at = next(n for n, line in enumerate(below) if line.startswith("       bank, run r.t1.0: 2 turns, "))
    assert below[at + 1].startswith("         teller, run r.t1.0.t1.0: 2 turns, ")


def test_cancel_ends_the_agents_below(here):
    """Down to the last, so that none is left waiting for an answer that nobody would hear."""
    here.run("app:boss", "--id", "r", "Pay Bob.", code=3)
    here("cancel", "r", "--by", "ann")
    found = here.json("runs", "--all")["runs"]
    assert {run["id"]: run["stop_reason"] for run in found} == dict.fromkeys(
        ["r", "r.t1.0", "r.t1.0.t1.0"], "cancelled"
    )
    here("approve", "r.t1.0.t1.0", "t1.0", code=1)
    assert "by its caller" in here.json("show", "r.t1.0.t1.0")["stop_message"]


def test_agents_are_found_once(here):
    """Also where one is, in the end, among its own tools."""
    boss = load_agent("app:boss")
    assert [agent.name for agent in iter_agents(boss)] == ["agent", "bank", "teller"]
    boss.tools.register(boss.as_tool(name="ask_me"))
    boss.tools.register(tool(kind="agent")(len_of))
    assert [agent.name for agent in iter_agents(boss)] == ["agent", "bank", "teller"]


def len_of(text: str) -> int:
    """Measure a text."""
    return len(text)


def test_the_description_stands_with_the_question(here):
    """In the list of calls, below it and in the journal; nothing hidden in it gets to the screen."""
    here.run("app:teller", "--id", "t", "Pay Bob.", code=3)
    text = here("show", "t", "--events")
    assert "       asked: Move 5 cents to Bob. red]0;title abc zero tag [/x] [bold]\n" in text
    assert 'waits    t1.0: may transfer(account="Bob", cents=5) run? Move 5 cents to Bob. red]0;title' in text
    assert '"description": "Move 5 cents to Bob.' in text
    assert not HIDDEN & set(text + here.err)


def test_a_person_may_change_the_arguments(here):
    """They are what runs, and the run shows who changed what."""
    here.run("app:teller", "--id", "t", "Pay Bob.", code=3)
    said = here.json("approve", "t", "t1.0", "--arguments", '{"account": "Ann", "cents": 4}', "--by", "eve")
    assert said["arguments"] == {"account": "Ann", "cents": 4}
    assert here("resume", "t") == "moved 4 to Ann\n"
    text = here("show", "t", "--events")
    assert '  t1.0 transfer(account="Ann", cents=4)\n       done in ' in text
    assert "       approved by eve\n" in text
    assert '       arguments of the model before the edit: account="Bob", cents=5\n' in text
    assert '"by": "eve", "arguments": {"account": "Ann", "cents": 4}, "key": "' in text
    call = here.json("show", "t")["tree"][0]["calls"][0]
    assert (call["approved_by"], call["proposed"]) == ("eve", {"account": "Bob", "cents": 5})
    assert call["arguments"] == {"account": "Ann", "cents": 4}


def test_who_approved_is_shown(here):
    """Also where nothing was changed, and where nobody gave a name."""
    for name in ("eve", ""):
        here.run("app:teller", "--id", f"t{name}", "Pay Bob.", code=3)
        assert "arguments" not in here.json("approve", f"t{name}", "t1.0", "--by", name)
        here("resume", f"t{name}")
    assert "       approved by eve\n" in here("show", "teve")
    assert "       approved by an unnamed person\n" in here("show", "t")
    assert "which were changed" not in here.out


@pytest.mark.parametrize(("target", "run_id"), [("app:teller", "r"), ("app:bank", "r.t1.0")])
@pytest.mark.parametrize(
    ("arguments", "explanation"),
    [
        ('{"account": "Ann", "cents": "many"}', "cents: should be a valid integer"),
        ('{"account": "Ann"}', "cents: required, but missing"),
        ('{"account": "Ann", "cents": 4, "when": "now"}', "when: unknown"),
    ],
)
def test_arguments_that_do_not_fit(here, target, run_id, arguments, explanation):
    """The tool's own explanation, as an error of usage; the call still waits, whoever's tool it is."""
    here.run(target, "--id", "r", "Pay Bob.", code=3)
    here("approve", run_id, "t1.0", "--arguments", arguments, code=2)
    assert "t1.0 was not approved: the arguments of transfer do not fit" in here.err
    assert explanation in here.err
    assert here.json("approve", run_id, "t1.0")["pending"]


@pytest.mark.parametrize(
    "arguments", ["{", "", "[1]", "5", "null", '{"cents": NaN}', '{"cents": 1, "cents": 2}', '{"cents": 1} and more']
)
def test_arguments_that_are_no_json_object(here, arguments):
    """Refused before anything is looked at."""
    here("approve", "t", "t1.0", "--arguments", arguments, code=2)
    assert "is not a JSON object" in here.err


def test_arguments_for_a_run_that_does_not_say_whose_it_is(here):
    """They are taken, that is said, and they are checked when the call runs: a misfit is asked about again."""
    agent = load_agent("app:teller").with_(store=SQLiteStore("python.db"))
    agent.run_sync("Pay Bob.", id="p")
    anyio.run(agent.aclose)
    words = ("--store", "python.db")
    here("approve", "p", "t1.0", "--arguments", '{"account": "Ann", "cents": "many"}', *words)
    assert "the arguments are checked when the call runs" in here.err
    here("resume", "p", "--agent", "app:teller", *words, code=3)
    for text in (here.err, here("show", "p", *words)):
        lines = [line.strip() for line in text.splitlines()]
        [at] = [n for n, line in enumerate(lines) if line.startswith("not run as approved by")]
        assert lines[at].endswith(": the arguments of transfer do not fit:")
        assert lines[at + 1].startswith("- cents: ")
        assert lines[at + 2].startswith("Parameters: ")
    assert not (here.folder / "paid.txt").exists()


def test_deciding_needs_neither_the_agents_module_nor_a_key(here):
    """Approve, reject, pause, cancel and delete work where the agent cannot be loaded; arguments are checked later."""
    for run_id in ("a", "b", "c"):
        here("run", "app:payer", "Pay.", "--id", run_id, code=3)
    (here.folder / "app.py").rename(here.folder / "gone.py")
    sys.modules.pop("app")
    here("approve", "a", "t1.0", "--by", "ann")
    here("approve", "b", "t1.0", "--arguments", "{}")
    assert "there is no module 'app'" in here.err
    assert "the arguments are checked when the call runs" in here.err
    here("pause", "c")
    assert here.json("cancel", "c", "--by", "ann")["state"] == "error"
    assert here("delete", "c") == "removed run c\n"
    (here.folder / "gone.py").rename(here.folder / "app.py")
    assert here("resume", "a") == "paid 5 to 17\n"
    here("resume", "b", code=3)
    assert "do not fit" in here.err


def test_tools_that_were_chosen_are_told(here):
    """Among many, those that the model is offered: while it runs, and in the journal."""
    here("run", "app:library", "Get me the book about 7.", "--id", "l")
    lines = here.err.splitlines()
    (told,) = [line for line in lines if "tools offered" in line]
    assert told.startswith("  20 tools offered: get_book_")
    assert lines.index("turn 1") < lines.index(told)
    assert '  ToolsOffered   {"how": "similarity", "tools": ["get_book_' in here("show", "l", "--events")
    assert json.loads(here("show", "l", "--events", "--json"))["events"][1]["how"] == "similarity"
