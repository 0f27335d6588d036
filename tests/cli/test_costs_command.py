"""`agentfsm costs`: the table with its bars, spending limits, the forecast and the estimate."""

from __future__ import annotations

import anyio
import attrs

from agentfsm import Agent, Spend, Usage, tool
from agentfsm.core.usage import CacheReport
from agentfsm.stores import SQLiteStore
from agentfsm.testing import ScriptedModel, call, say

SHOP = """
from agentfsm import Agent
from agentfsm.testing.models import ScriptedModel

class Priced(ScriptedModel):
    def cost_usd(self, usage):
        return usage.output_tokens * 0.01

agent = Agent(Priced(), name="shop")
"""


class Priced(ScriptedModel):
    """A scripted model whose output costs a cent per token."""

    def cost_usd(self, usage):
        return usage.output_tokens * 0.01


async def spend_some(path):
    replies = [
        say("done", usage=Usage(input_tokens=100, cached_tokens=71, output_tokens=cents)) for cents in (30, 60, 10, 5)
    ]
    async with Agent(Priced(*replies), name="shop", store=SQLiteStore(path), spend=Spend(per="day", usd=1)) as agent:
        for user in ("ann", "张伟", None, "ann"):
            await agent.run("x", user=user)


def test_the_table(here):
    """A bar for each row, as long as its cost; what is spent of the limits; the arithmetic of forecast and estimate."""
    path = here.folder / "runs.db"
    (here.folder / "shop.py").write_text(SHOP, encoding="utf-8")
    anyio.run(spend_some, path)
    out = here("costs", "shop:agent", "--by", "user", "--turns", "3", "--store", str(path))
    bars = {line.split()[0]: line.count("█") for line in out.splitlines() if "█" in line}
    assert bars == {"张伟": 24, "ann": 12, "(none)": 4}
    assert [line.split()[5] for line in out.splitlines() if "█" in line] == ["71%"] * 3
    assert "1 request refused" in out
    assert "$1.00 of $1.00 spent (100%)" in out
    assert "this month: no forecast, since the costs are of less than a day" in out
    assert "a run of 3 turns: about $0.9" in out
    assert "measured in 3 runs" in out
    found = here.json("costs", "--store", str(path))
    assert (found["rows"][0]["name"], found["total"]["usd"], found["total"]["runs"]) == ("shop", 1.0, 3)
    assert (found["total"]["input_tokens"], found["total"]["cached_tokens"], found["lost_tokens"]) == (300, 213, 0)
    here("costs", "--tz", "Mars", "--store", str(path), code=2)
    assert "--tz 'Mars': give a time zone" in here.err


class Diagnosed(ScriptedModel):
    """A scripted model whose provider says why it could not read the second request from its cache."""

    async def reply(self, request, emit=None):
        reply = await super().reply(request, emit)
        reason = "" if reply.calls else "tools_changed"
        return attrs.evolve(reply, cache_report=CacheReport(provider="local", response_id="m", reason=reason))


def test_lost_caches_and_the_reason_of_the_provider(here):
    """Only the provider knows it, since the run has changed nothing that is seen here."""
    path = here.folder / "runs.db"

    @tool(read_only=True)
    def look() -> str:
        """Look."""
        return "seen"

    async def run():
        usage = Usage(input_tokens=12_000, cached_tokens=11_000, output_tokens=1)
        anew = attrs.evolve(usage, cached_tokens=0)
        model = Diagnosed(say("", call("look"), usage=usage), say("done", usage=anew))
        async with Agent(model, tools=[look], store=SQLiteStore(path)) as agent:
            return (await agent.run("x")).id

    run_id = anyio.run(run)
    out = here("costs", "--store", str(path))
    assert "12,000 tokens of input were read anew" in out
    assert "in its prompt cache (the provider says: tools_changed 12,000); `agentfsm show`" in out
    assert here.json("costs", "--store", str(path))["lost_as_reported"] == {"tools_changed": 12_000}
    assert "were read anew, because the provider says tools_changed" in here("show", run_id, "--store", str(path))
    [loss] = here.json("show", run_id, "--store", str(path))["cache_losses"]
    assert (loss["cause"], loss["reported"]) == ("", "tools_changed")
