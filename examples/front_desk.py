"""A skill, a run in the background, and the login of a user: one agent, in one journal.

    python examples/front_desk.py

The agent reads how refunds are made here from a skill, lets a sub-agent look into the case in the background, and makes
the refund at a shop to which each user logs in with a key of their own. The process "dies" while it waits for that key;
the next one goes on. A script replaces the model, and the shop is a server of this program, so no key is needed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread

import anyio

from agentfsm import Agent, Run, tool
from agentfsm.guards import build_http_tool
from agentfsm.logins import APIKey, Login, TokenFile
from agentfsm.skills import Skills
from agentfsm.stores import SQLiteStore
from agentfsm.testing import ScriptedModel, call, say

SKILL = """---
name: refunds
description: How refunds are made here. Read it before you make one.
---
Look into the case first. Refund what was paid, once, with the reference of the case.
"""
KEY = "the-key-of-ann"


class Shop(BaseHTTPRequestHandler):
    """A server that refunds for those who have a key."""

    refunds: list[str] = []  # noqa: RUF012  of this one server

    def do_POST(self) -> None:
        """Make a refund."""
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        is_known = self.headers.get("X-API-Key") == KEY
        if is_known:
            self.refunds.append(body)
        answer = b"refunded" if is_known else b"log in first"
        self.send_response(200 if is_known else 401)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_args: object) -> None:
        """Keep the terminal for the example."""


@contextmanager
def open_shop() -> Iterator[str]:
    """Serve the shop, and give its host and port."""
    Shop.refunds.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Shop) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


@tool(read_only=True)
async def find_payment(order: str) -> dict[str, object]:
    """Find the payment of an order."""
    await anyio.sleep(0.05)
    return {"order": order, "cents": 4200, "reference": "case-7"}


def build_agent(place: Path, shop: str, model: ScriptedModel) -> tuple[Agent, Login]:
    """Return the agent, and the login of its tool."""
    keys = APIKey(header="X-API-Key", prefix="", tokens=TokenFile(place / "tokens.json"))
    login = Login(f"http://{shop}", keys)
    refund = build_http_tool([shop], methods=["POST"], name="refund", login=login, irreversible=False)
    clerk = ScriptedModel(say("", call("find_payment", order="A-1")), "4200 cents were paid for A-1; reference case-7.")
    researcher = Agent(clerk, tools=[find_payment], name="researcher")
    agent = Agent(
        model,
        name="desk",
        tools=[researcher.as_tool(background=True), refund],
        skills=Skills(place / "skills", trusted=True),
        store=SQLiteStore(str(place / "runs.db")),
    )
    return agent, login


async def main() -> Run:
    """Refund an order, in two processes."""
    with TemporaryDirectory() as folder, open_shop() as shop:
        place = anyio.Path(folder)
        await (place / "skills/refunds").mkdir(parents=True)
        await (place / "skills/refunds/SKILL.md").write_text(SKILL)
        body = json.dumps({"order": "A-1", "cents": 4200, "reference": "case-7"})
        first = [
            say("", call("read_skill", name="refunds"), call("researcher", query="What was paid for A-1?")),
            say("", call("wait", seconds=600, reason="the case")),
            say("", call("refund", url=f"http://{shop}/refunds", method="POST", body=body)),
        ]
        agent, _login = build_agent(Path(folder), shop, ScriptedModel(*first))
        async with agent:
            run = await agent.run("Refund my order A-1.", id="r1", user="ann")
        [pending] = run.pending
        print(f"waits for the {pending.kind.value} of {run.header.user} at {pending.questions[0].key}")
        print(f"  done in the background: {', '.join(each.call.name for each in run.background.values())}")

        agent, login = build_agent(Path(folder), shop, ScriptedModel("Your order A-1 is refunded."))
        async with agent:
            await login.store_key(KEY, tenant=None, user="ann")
            await agent.answer("r1", pending.call_id, by="ann")
            run = await agent.resume("r1")
            is_told = KEY in str(await agent.history("r1"))
        print(run.output)
        print(f"refunds: {len(Shop.refunds)}; the key is in the journal: {is_told}")
        return run


if __name__ == "__main__":
    anyio.run(main)
