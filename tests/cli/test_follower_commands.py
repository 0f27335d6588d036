"""`agentfsm followers`, and what a follower keeps from being pruned."""

import anyio

from agentfsm.stores import SQLiteStore


def follow(here, name, *, start="beginning"):
    """Read everything as a follower of that name."""

    async def act():
        store = SQLiteStore(here.folder / ".agentfsm" / "runs.db")
        async with store.follow(name, start=start, wait=False) as follower:
            async for delivery in follower:
                await delivery.done()
        await store.aclose()

    anyio.run(act)


def test_followers_are_listed_and_dropped(here):
    """With their lag, and since when the oldest run waits."""
    here.run("app:adder", "1 + 1", "--id", "r1")
    assert here("followers", "list") == ""
    assert "no followers" in here.err
    follow(here, "export")
    follow(here, "spend")
    here.run("app:adder", "2 + 2", "--id", "r2")
    follow(here, "export")
    export, spend = here("followers", "list").splitlines()
    assert export == "export  position 2, 0 runs behind"
    assert spend.startswith("spend   position 1, 1 run behind, waiting ")
    [export, spend] = here.json("followers", "list")["followers"]
    assert (export["name"], export["lag"], export["waiting_since"], export["held"]) == ("export", 0, None, False)
    assert (spend["lag"], spend["position"]) == (1, 1)
    assert here("followers", "drop", "spend") == "dropped the follower spend\n"
    assert here.json("followers", "drop", "export") == {"dropped": "export"}
    here("followers", "drop", "export", code=2)
    assert "no follower 'export': `agentfsm followers list`" in here.err


def test_what_a_follower_has_not_read_is_pruned_on_request_only(here):
    """`--unread` removes it all the same."""
    here.run("app:adder", "1 + 1", "--id", "r1")
    follow(here, "export")
    here.run("app:adder", "2 + 2", "--id", "r2")
    assert here.json("prune", "--before", "9999999999") == {"removed": 1}
    assert [run["id"] for run in here.json("runs")["runs"]] == ["r2"]
    assert here.json("prune", "--before", "9999999999", "--unread") == {"removed": 1}
