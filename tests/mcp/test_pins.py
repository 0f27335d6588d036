"""What was approved, in a file: kept for other processes, private, and never overwritten when it is not understood."""

import json
import stat
import threading

import pytest

from agentfsm._lib.pins import ApprovedText
from agentfsm.mcp import MemoryPins, Pin, PinFile, PinsError

PIN = Pin(start=ApprovedText("run"), items={"tool a": ApprovedText.from_json({"name": "a"})})


@pytest.mark.parametrize("make", [lambda _: MemoryPins(), lambda path: PinFile(path / "deep" / "pins.json")])
def test_what_is_written_is_read(tmp_path, make):
    """Pins of several servers are kept side by side; the newest of each counts."""
    pins = make(tmp_path)
    assert dict(pins.read()) == {}
    pins.write("a", Pin())
    pins.write("a", PIN)
    pins.write("b", Pin())
    assert dict(pins.read()) == {"a": PIN, "b": Pin()}


def test_only_its_owner_reads_the_file(tmp_path):
    """It holds how servers are started, so nobody else may read it; nothing but the file and its lock is left."""
    PinFile(tmp_path / "pins.json").write("a", PIN)
    found = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert found == {"pins.json": 0o600, "pins.json.lock": 0o600}


@pytest.mark.parametrize(
    "spoil",
    [
        lambda _: "",
        lambda _: "[]",
        lambda text: text[:-20],
        lambda text: text.replace('"version": 1', '"version": 2'),
        lambda text: text.replace('"text": "run"', '"text": "rm"'),
        lambda text: text.replace('"items"', '"things"'),
        lambda _: '{"version": 1, "servers": {"a": 5}}',
    ],
)
def test_a_file_that_is_not_understood(tmp_path, spoil):
    """It is told what is wrong and what to do, and the file stays as it is."""
    pins = PinFile(tmp_path / "pins.json")
    pins.write("a", PIN)
    pins.path.write_text(spoiled := spoil(pins.path.read_text()))
    for attempt in (pins.read, lambda: pins.write("b", PIN)):
        with pytest.raises(PinsError, match="Nothing was overwritten"):
            attempt()
    assert pins.path.read_text() == spoiled


def test_writers_at_once_lose_nothing(tmp_path):
    """Each of several writers, with an object of its own as another process has it, finds the others' pins there."""
    path = tmp_path / "pins.json"
    threads = [threading.Thread(target=PinFile(path).write, args=(f"s{n}", PIN)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(PinFile(path).read()) == {f"s{n}" for n in range(8)}


def test_a_file_that_cannot_be_written(tmp_path):
    """A folder that is none is told."""
    (tmp_path / "file").write_text("")
    with pytest.raises(PinsError, match="cannot be stored"):
        PinFile(tmp_path / "file" / "pins.json").write("a", PIN)


def test_the_hash_stands_beside_the_text(tmp_path):
    """What is pinned is SHA-256 of the text that was read."""
    PinFile(tmp_path / "pins.json").write("a", PIN)
    entry = json.loads((tmp_path / "pins.json").read_text())["servers"]["a"]["start"]
    assert entry == {"sha256": "acba25512100f80b56fc3ccd14c65be55d94800cda77585c5f41a887e398f9be", "text": "run"}
