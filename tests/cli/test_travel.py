"""Time travel: forks, replays, differences, and a run as one file."""

import json
from datetime import datetime

import anyio
import pytest

from agentfsm.cli.resolve.agent_target import load_agent
from agentfsm.stores import SQLiteStore


def test_what_stopped_tells_how_to_try_again(here):
    """ERROR is final: the report and the document name the fork, which begins right before the end and goes on."""
    run_id = here.run("app:shaky", code=1)
    assert here.err.splitlines()[-1] == f"To try again from right before that: agentfsm fork {run_id}"
    assert here.json("resume", run_id, code=1)["fork"] == f"agentfsm fork {run_id}"
    (here.folder / "mended").touch()
    new_id = here("fork", run_id).strip()
    assert f"forked from {run_id} at version 1. To continue: agentfsm resume {new_id}\n" in here.err
    assert here("resume", new_id) == "Mended.\n"
    assert f"forked   from {run_id} at version 1\n" in here("show", new_id)
    found = here.json("show", new_id)
    assert (found["forked_from"], found["forked_at"], found["fork"]) == (run_id, 1, None)
    assert here.json("show", run_id)["state"] == "error"


def test_a_fork_elsewhere(here):
    """At any version, with another prompt and an id of one's own; it stands beside the run, which it leaves alone."""
    run_id = here.run("app:shopper", "Tea?")
    made = here.json("fork", run_id, "--at", "3", "--prompt", "Coffee?", "--id", "other")
    assert (made["id"], made["version"], made["forked_at"], made["resume"]) == ("other", 3, 3, "agentfsm resume other")
    assert here("resume", "other") == "7\n"
    assert here.json("show", "other")["prompt"] == "Coffee?"
    here("fork", run_id, "--id", "other", code=1)
    here("fork", run_id, "--at", "99", code=2)
    assert "its versions are 0 to" in here.err
    here("fork", run_id, "--at", str(here.json("show", run_id)["version"]), code=2)
    assert "is over" in here.err


def test_a_fork_says_whether_it_acts(here):
    """A fork calls its tools with their effects; one with `--withhold` shows the calls that it would make."""
    here.run("app:payer", "--id", "paid", "Pay.", code=3)
    here("fork", "paid", "--at", "1", "--id", "acts")
    assert "The fork acts: its tools are called with their effects." in here.err
    here("resume", "acts", code=3)
    made = here.json("fork", "paid", "--at", "1", "--id", "shows", "--withhold")
    assert made["withhold"]
    assert "The fork withholds calls of tools that are not read-only" in here.err
    here("resume", "shows")
    assert "withheld calls of tools that are not read-only" in here("show", "shows").splitlines()
    found = here.json("show", "shows")
    assert (found["withhold"], found["tree"][0]["calls"][0]["status"]) == (True, "skipped")
    assert not here.json("show", "acts")["withhold"]


def test_a_fork_of_an_open_call_asks_what_became_of_it(here):
    """It may have had its effect in the run that was forked, and the line says so."""
    run_id = here.run("app:payer", code=3)
    new_id = here("fork", run_id).strip()
    here("resume", new_id, code=3)
    assert "t1.0: pay was running when its worker died or was stopped, or when the run was forked; how" in here.err


def test_a_fork_of_a_run_begun_in_python(here):
    """Its agent has to be named, and is known from there on."""
    agent = load_agent("app:shopper").with_(store=SQLiteStore("runs.db"))
    run_id = agent.run_sync("Tea?").id
    anyio.run(agent.aclose)
    words = ("--store", "runs.db")
    here("fork", run_id, *words, code=2)
    assert "name it with --agent module:name" in here.err
    new_id = here("fork", run_id, "--agent", "app:shopper", *words).strip()
    assert f"To continue: agentfsm resume {new_id} --store runs.db\n" in here.err
    assert here("resume", new_id, *words) == "7\n"


def test_a_fork_in_a_store_that_only_the_agent_can_open(here):
    """The commands name the agent."""
    run_id = here.run("app:shelved", code=3)
    new_id = here("fork", run_id, "--agent", "app:shelved").strip()
    assert f"To continue: agentfsm resume {new_id} --agent app:shelved\n" in here.err
    here("resume", new_id, "--agent", "app:shelved", code=3)


def test_a_fork_of_a_sub_agents_run(here):
    """It would stand for itself, so its agent has to be named; none is offered where it stopped."""
    here.run("app:bank", "--id", "b", "Pay Bob.", code=3)
    here("fork", "b.t1.0", code=2)
    assert "belongs to run b: fork that one" in here.err
    assert here("fork", "b.t1.0", "--agent", "app:teller", "--id", "own") == "own\n"
    here("resume", "own", code=3)
    here("cancel", "b")
    assert here.json("show", "b.t1.0")["fork"] is None
    assert here.json("show", "b")["fork"] == "agentfsm fork b"


def test_a_replay_that_asks_the_same(here):
    """No model and no tool is called: nothing is printed by either."""
    run_id = here.run("app:payer", code=3)
    here("approve", run_id, "t1.0")
    here("resume", run_id)
    assert here("replay", run_id) == "2 requests checked, 0 of them would differ now\n"
    assert here.json("replay", run_id) == {"id": run_id, "checked": 2, "divergences": []}
    assert len((here.folder / "paid.txt").read_text(encoding="utf-8").splitlines()) == 1


def test_a_replay_by_another_agent(here):
    """It tells which requests would not be the same, and in what; that is a failure."""
    run_id = here.run("app:shopper")
    lines = here("replay", run_id, "--agent", "app:payer", code=1).splitlines()
    assert lines[0] == "2 requests checked, 2 of them would differ now"
    assert lines[1] == "  turn 1, version 2: the agent: its model, instructions, tools, settings or planner"
    found = here.json("replay", run_id, "--agent", "app:payer", code=1)
    assert [each["turn"] for each in found["divergences"]] == [1, 2]


def test_a_replay_of_a_sub_agents_run(here):
    """By the agent that it is of, among the tools of its caller's."""
    here.run("app:market", "--id", "m", "Tea?")
    assert here.json("replay", "m.t1.0") == {"id": "m.t1.0", "checked": 2, "divergences": []}


def test_the_difference_of_two_versions(here):
    """What came in between, a line each; of the newest one where `--to` names none."""
    run_id = here.run("app:shopper", "Tea?")
    lines = here("diff", run_id, "--at", "1", "--to", "2").splitlines()
    assert "  version: 1 -> 2" in lines
    assert "  call t1.0: - -> intended" in lines
    lines = here("diff", run_id, "--at", "2").splitlines()
    assert "  state: act -> done" in lines
    assert "+ assistant: '7'" in lines
    found = here.json("diff", run_id, "--at", "2")
    assert found["changed"]["state"] == ["act", "done"]
    assert found["calls"] == {"t1.0": ["intended", None]}
    assert [message["is"] for message in found["added"]] == ["AssistantMessage", "ToolResult", "AssistantMessage"]
    assert here("diff", run_id, "--at", "2", "--to", "2") == ""
    assert "no difference" in here.err


def test_the_difference_of_two_runs(here):
    """A run and its fork, each as it stands, or at a version."""
    run_id = here.run("app:shopper", "Tea?")
    here("fork", run_id, "--at", "1", "--id", "f", "--prompt", "Coffee?")
    lines = here("diff", run_id, "f").splitlines()
    assert "  state: done -> think" in lines
    assert "- user: 'Tea?'" in lines
    assert "+ user: 'Coffee?'" in lines
    assert "  version: 1 -> 0" in here("diff", run_id, "f", "--at", "1", "--to", "0").splitlines()


def test_one_version_is_nothing_to_compare(here):
    """The error says what to name."""
    run_id = here.run("app:shopper")
    here("diff", run_id, code=2)
    assert f"name another run, or a version of {run_id} with --at" in here.err
    here("diff", run_id, "--at", "99", code=2)
    assert "its versions are 0 to" in here.err


@pytest.mark.parametrize("words", [("--json",), ()])
def test_an_export_is_the_whole_run(here, words):
    """Entry 0, each event with version and date as the journal holds it, and the messages; always JSON."""
    run_id = here.run("app:shopper", "Tea?", "--metadata", "team=red")
    found = json.loads(here("export", run_id, *words))
    journal = anyio.run(events_of, here.folder, run_id)
    assert found["header"]["id"] == run_id
    assert found["header"]["metadata"] == {"team": "red"}
    assert [event["version"] for event in found["events"]] == list(range(1, len(journal) + 1))
    for event, held in zip(found["events"], journal, strict=True):
        assert datetime.fromisoformat(event["date"]).timestamp() == pytest.approx(held.at, abs=1e-5)
        assert {name: event[name] for name in event if name not in ("version", "date")} == held.to_dict()
    assert [message["is"] for message in found["messages"]] == [
        "UserMessage",
        "AssistantMessage",
        "ToolResult",
        "AssistantMessage",
    ]
    assert found["messages"][2]["content"] == "7"
    shown = here.json("show", run_id, "--events")
    assert shown.pop("posted") == shown.pop("feedback") == []  # beside the journal
    assert (shown.pop("status"), shown.pop("standstill")) == ("done", None)
    assert {name: found[name] for name in shown} == shown


async def events_of(folder, run_id):
    store = SQLiteStore(folder / ".agentfsm" / "runs.db")
    try:
        return (await store.read(run_id)).events
    finally:
        await store.aclose()


def test_messages_go_out_and_in_as_openai_has_them(here):
    """What one run said is what another goes on from, and a file that holds no messages is refused by its name."""
    run_id = here.run("app:shopper", "Tea?")
    written = here("export", run_id, "--messages")
    messages = json.loads(written)["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"]
    for said in (written, json.dumps(messages)):
        (here.folder / "said.json").write_text(said)
        here("run", "app:adder", "And two?", "--messages", "said.json", "--id", "more")
        assert [each["role"] for each in json.loads(here("export", "more", "--messages"))["messages"]] == [
            *[message["role"] for message in messages],
            "user",
            "assistant",
        ]
        here("delete", "more")


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (None, "cannot read said.json: No such file"),
        ("Tea?", "said.json is not valid JSON: "),
        ('{"role": "user"}', "said.json: a history is a list of messages, not dict"),
        ('[{"role": "bot"}]', r"said.json: messages[0]: the role 'bot': give system, developer"),
    ],
)
def test_a_file_without_messages_is_refused(here, said, words):
    """Before a run is begun; the error names the file, and the message where there is one."""
    if said is not None:
        (here.folder / "said.json").write_text(said)
    here("run", "app:adder", "And two?", "--messages", "said.json", code=2)
    assert f"agentfsm: {words}" in here.err
    assert not (here.folder / ".agentfsm" / "runs.db").exists()
