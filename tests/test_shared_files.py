"""Files that several processes read, change and write: no change is lost, and none that was removed comes back."""

import json
import multiprocessing
import os
import stat
import threading
from pathlib import Path

import anyio
import attrs
import pytest

from agentfsm import MisuseError
from agentfsm._lib.pins import ApprovedText, StandingApprovals
from agentfsm._lib.shared_files import change_file, open_log
from agentfsm.evals import Evaluation, GateDecision, add_case, load_suite
from agentfsm.evals.release_gate import append_history, load_history
from agentfsm.journal.seals import Seal, SealFile
from agentfsm.mcp import Pin, PinFile, TokenFile
from agentfsm.mcp.oauth.stored_login import LoginStorage
from agentfsm.mcp.trust.consent import ConsentGate
from agentfsm.prompts import PromptReport, Prompts
from agentfsm.serve import APIKeys, Caller
from agentfsm.serve.access import add_key, remove_keys

TIMES = 6
PIN = Pin(start=ApprovedText("run"))
EVALUATION = Evaluation(suite="s", agent="a", version="1", model="m", at="2026-11-26T00:00:00", runs=1, results=())


def caller(user):
    return Caller(user=user, tenant="t", scopes={"run"})


def change_keys(folder, number):
    add_key(folder / "keys.json", caller(f"u{number}"))


def count_keys(folder):
    return len(APIKeys(folder / "keys.json").callers)


def change_pins(folder, number):
    gate = ConsentGate(server="a", pins=PinFile(folder / "pins.json"), consent=None, origin=None)
    gate.add_standing(tool=f"hash {number}")


def count_pins(folder):
    return len(PinFile(folder / "pins.json").read()["a"].standing.tools)


def change_tokens(folder, number):
    TokenFile(folder / "tokens.json").write(f"server {number}", "{}")


def count_tokens(folder):
    return len(json.loads((folder / "tokens.json").read_text())["servers"])


def change_suite(folder, number):
    add_case(folder / "suite.jsonl", {"id": f"c{number}", "input": "x"})


def count_cases(folder):
    return len(load_suite(folder / "suite.jsonl").cases)


def change_history(folder, number):
    append_history(folder / "history.jsonl", attrs.evolve(EVALUATION, version=f"{number}"), GateDecision.PASS)


def count_history(folder):
    return len({each.version for each in load_history(folder / "history.jsonl")})


def change_seals(folder, number):
    seals = SealFile(folder / "seals.jsonl", key=b"k" * 32)
    seals._append(Seal(run=f"r{number}", version=1, hash="h", at=0.0))


def count_seals(folder):
    return len([*SealFile(folder / "seals.jsonl", key=b"k" * 32).read()])


def change_results(folder, number):
    prompts = Prompts(folder)
    prompts.record(PromptReport(name="billing", version="1.0", digest=f"{number}", model="", at="", tests=()))


def count_results(folder):
    return len({json.loads(line)["digest"] for line in (folder / "results.jsonl").read_text().splitlines()})


KINDS = [
    pytest.param(change_keys, count_keys, id="keys"),
    pytest.param(change_pins, count_pins, id="pins"),
    pytest.param(change_tokens, count_tokens, id="tokens"),
    pytest.param(change_suite, count_cases, id="suite"),
    pytest.param(change_history, count_history, id="history"),
    pytest.param(change_seals, count_seals, id="seals"),
    pytest.param(change_results, count_results, id="results"),
]


def at_once(*functions):
    """Call functions in threads that begin together. Each has its own lock, as if it were another process."""
    gate, errors = threading.Barrier(len(functions)), []

    def act(function):
        gate.wait()
        try:
            function()
        except Exception as error:  # noqa: BLE001  the test looks at it
            errors.append(error)

    threads = [threading.Thread(target=act, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


@pytest.fixture
def slow_reads(monkeypatch):
    """Let others run between the reading of a file and its writing."""
    read = Path.read_text

    def read_slowly(self, *args, **options):
        text = read(self, *args, **options)
        os.sched_yield()
        threading.Event().wait(0.002)
        return text

    monkeypatch.setattr(Path, "read_text", read_slowly)


@pytest.mark.usefixtures("slow_reads")
@pytest.mark.parametrize(("change", "count"), KINDS)
def test_no_change_is_lost(tmp_path, change, count):
    """Each of several writers finds what the others wrote."""
    assert at_once(*(lambda number=number: change(tmp_path, number) for number in range(TIMES))) == []
    assert count(tmp_path) == TIMES


@pytest.mark.usefixtures("slow_reads")
def test_what_was_removed_stays_removed(tmp_path):
    """A key, and a standing approval, beside writers that read the file before it was removed."""
    keys, pins = tmp_path / "keys.json", PinFile(tmp_path / "pins.json")
    for _ in range(3):
        add_key(keys, caller("evil"))
        add = [lambda number=number: add_key(keys, caller(f"u{number}")) for number in range(3)]
        assert at_once(*add, lambda: remove_keys(keys, "evil", "t"), *add) == []
        assert "evil" not in [each.user for each in APIKeys(keys).callers]
        pins.write("a", attrs.evolve(PIN, standing=StandingApprovals(reading=True)))
        gates = [ConsentGate(server="a", pins=pins, consent=None, origin=None) for _ in range(3)]
        clear = [gates[0].clear_standing]
        at_once(*clear, *(lambda gate=gate: gate.add_standing(tool="hash") for gate in gates[1:]))
        assert pins.read()["a"].standing.reading is False


def _add_keys(path, start):
    start.wait()
    for number in range(3):
        add_key(path, caller(f"{os.getpid()} {number}"))


def test_what_a_killed_process_has_left_is_removed(tmp_path):
    """A process that is killed before it replaces the file leaves its whole content beside it, with its tokens."""

    def copy_folder(_file):
        fresh = [path for path in tmp_path.iterdir() if path.name not in {"tokens.json", "tokens.json.lock"}]
        copies.extend((path, path.read_bytes()) for path in fresh)

    copies = []
    tokens = TokenFile(tmp_path / "tokens.json")
    tokens.write("a", '"secret-token"')
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", copy_folder)
        tokens.write("a", '"secret-token"')
    [(left, content)] = copies
    left.write_bytes(content)
    assert b"secret-token" in content
    tokens.write("a", None)
    assert not [path for path in tmp_path.iterdir() if b"secret-token" in path.read_bytes()]


def test_processes_wait_for_each_other(tmp_path):
    """The lock holds between processes, and not only between threads."""
    context = multiprocessing.get_context("fork")
    path, start = tmp_path / "keys.json", context.Event()
    processes = [context.Process(target=_add_keys, args=(path, start)) for _ in range(3)]
    for each in processes:
        each.start()
    start.set()
    for each in processes:
        each.join()
    assert len(APIKeys(path).callers) == 9


async def test_a_login_that_was_removed_is_not_written_back(tmp_path):
    """A renewal that began before ends first; the next one finds no login."""
    here, there = (LoginStorage(TokenFile(tmp_path / "tokens.json"), "server", None) for _ in range(2))
    await here.save(expires_at=5.0)
    done = []

    async def log_out():
        done.append(await there.delete())

    async with anyio.create_task_group() as tasks, here.renewal():
        tasks.start_soon(log_out)
        await anyio.wait_all_tasks_blocked()
        await here.save(challenge=None)
    assert done == [True]
    assert TokenFile(tmp_path / "tokens.json").read("server") is None


@pytest.fixture
def prompts(tmp_path):
    for version in ("1.0", "2.0", "3.0"):
        (tmp_path / "billing").mkdir(exist_ok=True)
        (tmp_path / "billing" / f"{version}.md").write_text(f'+++\nversion = "{version}"\n+++\nHello {version}.\n')
    return Prompts(tmp_path)


def test_activations_are_decided_under_the_lock(prompts, monkeypatch):
    """Two roll-backs at one moment are one; one that meets another activation is refused, and names it."""
    who = {"by": "ann", "why": "x"}
    for version in ("1.0", "2.0", "3.0"):
        prompts.activate("billing", version, **who)
    other = Prompts(prompts.folder)
    acts = []

    def act_first(path):
        while acts:
            acts.pop()()
        return open_log(path)

    monkeypatch.setattr("agentfsm.prompts.folder.open_log", act_first)
    acts.append(lambda: other.roll_back("billing", by="bob", why="y"))
    assert prompts.roll_back("billing", **who).by == "bob"
    assert prompts["billing"].version == "2.0"
    acts.append(lambda: other.activate("billing", "3.0", by="bob", why="y"))
    with pytest.raises(MisuseError, match=r"was not rolled back: bob has activated version 3\.0 meanwhile"):
        prompts.roll_back("billing", **who)
    acts.append(lambda: other.activate("billing", "1.0", by="bob", why="y"))
    assert prompts.activate("billing", "1.0", **who).by == "bob"
    assert [each.by for each in prompts.history("billing")] == ["ann"] * 3 + ["bob"] * 3


def test_a_change_is_whole_or_did_not_happen(tmp_path, monkeypatch):
    """The file keeps its mode, a link stays one, and after an error there is neither a change nor a draft."""
    path, link = tmp_path / "keys.json", tmp_path / "link.json"
    add_key(path, caller("ann"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o640)
    link.symlink_to(path)
    add_key(link, caller("bob"))
    assert link.is_symlink()
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    before = path.read_text()

    def fail(*_args):
        raise OSError("no space")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="no space"):
        change_file(path, lambda _text: "other")
    assert path.read_text() == before
    assert sorted(each.name for each in tmp_path.iterdir()) == ["keys.json", "keys.json.lock", "link.json"]
    assert remove_keys(path, "eve", "t") == 0  # nothing is written


def test_keys_of_one_size_and_one_time(tmp_path):
    """A running server sees the change of a file whose time and size are those of the one before."""
    path = tmp_path / "keys.json"
    add_key(path, caller("ann"))
    keys, before = APIKeys(path), path.stat()
    change_file(path, lambda text: text.replace('"ann"', '"bob"'))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert [each.user for each in keys.callers] == ["bob"]
