"""Spending limits of several processes that are killed at any moment."""

from __future__ import annotations

import random
import signal
from contextlib import suppress

import anyio
import pytest

from agentfsm import StopReason
from agentfsm.core.limits import SPEND_RECORDS
from tests.support.spender import LIMIT_USD, LONGEST, build_agent, spend_all

PROCESSES = ("one", "two")


def read_bills(bills):
    """Return the cents that were billed."""
    return sum(map(int, bills.read_text().split())) if bills.exists() else 0


def await_bills(process, count):
    """Wait until the process has had some more answers, or has ended."""
    with suppress(EOFError):
        for _ in range(count):
            process.next_report()


async def check(store, bills):
    """All that was billed was seen, and the window was exceeded by one answer at most."""
    billed = read_bills(bills) / 100
    async with build_agent(store(), str(bills)) as agent:
        (record,) = await agent.store.list_records(SPEND_RECORDS)
        window = record.value
        seen = window["spent_usd"] + sum([usd for usd, _ in window["reserved"].values()])
        assert billed <= seen + 1e-9
        assert billed <= LIMIT_USD + LONGEST / 100
        assert seen >= LIMIT_USD - LONGEST / 100, "it was refused although there was room"
        assert (await agent.run("one more")).stop_reason is StopReason.COST_BUDGET


STORES = ("sqlite", "postgres", "redis")
LONG = [pytest.param(store, 40, marks=pytest.mark.soak) for store in STORES]


@pytest.mark.parametrize(
    ("store_of", "kills"), [("sqlite", 0), *[(store, 4) for store in STORES], *LONG], indirect=["store_of"]
)
def test_processes_that_are_killed_do_not_overspend_a_window(fork_server, store_of, folder, kills):
    """Two processes spend it, and one of them is killed each time that some more was billed, or none at all.

    Some answers break off, so a kill may come between their bill and its record.
    """
    bills = folder / "bills"
    running = {name: fork_server.start(spend_all, store_of, str(bills), name) for name in PROCESSES}
    for index in range(kills):
        name = PROCESSES[index % len(PROCESSES)]
        await_bills(running[name], random.randint(1, 5))
        running[name].signal(signal.SIGKILL)
        running[name].end()
        running[name] = fork_server.start(spend_all, store_of, str(bills), name)
    for process in running.values():
        process.end()
    anyio.run(check, store_of, bills)
