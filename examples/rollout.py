"""The drill of a roll-back: a release that fails is started at 5 %, and a rule takes it back while two workers run.

No key is needed. Time is virtual, so the minutes of the drill pass at once; this needs trio. The same by hand is
`agentfsm rollout back`; docs/releases.md explains both.
"""

import logging
from collections import Counter

import anyio

from agentfsm import Agent, Limits
from agentfsm.core.errors import ModelError
from agentfsm.ports import Request
from agentfsm.releases import Rollout
from agentfsm.stores import MemoryStore
from agentfsm.testing import FunctionModel, VirtualClock, run_virtual

RUNS = 1_000


def answer(_request: Request) -> str:
    """Answer as the release of last month does."""
    return "You owe nothing."


def fail(_request: Request) -> str:
    """Fail as a release with a wrong parameter does."""
    raise ModelError("400: unknown parameter 'temprature'")


clock = VirtualClock()
store = MemoryStore(clock=clock)
old = Agent(FunctionModel(answer), name="billing", version="1.4.0", store=store, clock=clock)
new = old.with_(model=FunctionModel(fail), version="1.5.0", instructions="Be brief.", limits=Limits(model_retries=0))


def deploy() -> Rollout:
    """Return the roll-out as each process has it."""
    return Rollout("billing", {"old": old, "new": new})


async def main() -> None:
    """Run the drill."""
    logging.getLogger("agentfsm").setLevel(logging.CRITICAL)  # the failures are expected
    door = deploy()
    for dimension, changes in door.releases["old"].diff(door.releases["new"]).items():
        print(f"{dimension}: {', '.join(changes)}")
    began = clock.now()
    await door.start({"old": 95, "new": 5}, by="ann", reason="a shorter prompt", rules=["failures 10%"])

    async with anyio.create_task_group() as workers:
        for _ in range(2):
            workers.start_soon(deploy().worker)
        for number in range(RUNS):
            await door.submit("What do I owe?", user=f"user {number}")
            await anyio.sleep(0.1)
        workers.cancel_scope.cancel()

    for change in await door.control.log():
        print(f"after {change.at - began:.0f} s: {change}")
    summaries = await store.runs(limit=RUNS)
    print(sorted(Counter((each.release, str(each.state)) for each in summaries).items()))

    late = [await deploy().run("What do I owe?", user=f"user {number}") for number in range(RUNS, RUNS + 100)]
    print(f"after the roll-back: {dict(Counter(run.header.release for run in late))}")


if __name__ == "__main__":
    run_virtual(main)
