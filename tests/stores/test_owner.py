"""What can be known of another owner of a lease."""

import os
import subprocess
import sys
from pathlib import Path

import attrs
import pytest

from agentfsm._lib.concurrency import boot_clock
from agentfsm.stores.threaded import owner as owners
from agentfsm.stores.threaded.owner import OwnerIdentity


def test_an_owner_is_text_and_back():
    """What is stored of an owner is enough to know it again; two stores are two owners."""
    here = OwnerIdentity.generate()
    assert OwnerIdentity.parse(str(here)) == here
    assert OwnerIdentity.generate() != here


def test_this_process_is_alive():
    """Whoever can ask is not dead."""
    assert not OwnerIdentity.generate().is_dead
    assert OwnerIdentity.generate().is_current_boot


def test_a_living_process_is_not_dead():
    """A process of this machine is told from its successor by its start time."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        stat = Path(f"/proc/{other.pid}/stat").read_text(encoding="utf-8")
        started = stat.rpartition(")")[2].split()[19]
        alive = attrs.evolve(OwnerIdentity.generate(), pid=other.pid, start_time=started)
        assert not alive.is_dead
        assert attrs.evolve(alive, start_time="1").is_dead
        other.kill()
    assert alive.is_dead


@pytest.mark.parametrize(
    "change",
    [{"boot_id": "other"}, {"pid_namespace": "1"}, {"boot_id": "-"}, {"pid_namespace": "-"}, {"start_time": "-"}],
)
def test_what_cannot_be_established_counts_as_alive(change):
    """A number of another boot or namespace says nothing about a process here."""
    dead = attrs.evolve(OwnerIdentity.generate(), start_time="1")
    assert dead.is_dead
    assert not attrs.evolve(dead, **change).is_dead


def test_a_process_that_proc_hides_counts_as_alive(monkeypatch):
    """Where /proc shows no processes of other users, a signal that nobody gets tells."""
    monkeypatch.setattr(owners, "_read_process_stat", lambda _pid: ("-", "-"))
    assert not OwnerIdentity.generate.__func__(OwnerIdentity).is_dead
    known = OwnerIdentity(owners._read_boot_id(), owners._read_pid_namespace(), os.getpid(), "7", "x")
    assert not known.is_dead
    monkeypatch.setattr(os, "kill", _raise(PermissionError))
    assert not known.is_dead
    monkeypatch.setattr(os, "kill", _raise(ProcessLookupError))
    assert known.is_dead


def _raise(error):
    def kill(_pid, _signal):
        raise error

    return kill


@pytest.mark.parametrize("text", ["", "v2:somebody", "a b c d e", "a b 1 d e f"])
def test_text_of_another_form_is_nobody_known(text):
    """A later format is no reason to fail, nor to call its owner dead."""
    stranger = OwnerIdentity.parse(text)
    assert not stranger.is_dead
    assert stranger.is_current_boot


def test_without_proc_nothing_is_known(monkeypatch):
    """Elsewhere than on Linux an owner is alive until its lease ends."""

    def missing(*_args, **_kwargs):
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", missing)
    monkeypatch.setattr(Path, "stat", missing)
    monkeypatch.delattr("time.CLOCK_BOOTTIME", raising=False)
    owners._read_boot_id.cache_clear()
    try:
        here = OwnerIdentity.generate()
        assert (here.boot_id, here.pid_namespace, here.start_time) == ("-", "-", "-")
        assert here.is_current_boot
        assert not here.is_dead
        assert boot_clock() > 0
    finally:
        owners._read_boot_id.cache_clear()


def test_the_boot_clock_goes_on():
    """It is a clock."""
    assert 0 < boot_clock() <= boot_clock()
