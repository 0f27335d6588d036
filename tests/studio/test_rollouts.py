"""The page of roll-outs: what each arm gets and did, and the way back."""

import subprocess
import sys

import httpx
from playwright.sync_api import expect

from tests.support.port_servers import free_port
from tests.support.studio_server import serving

SHOP = """
from agentfsm import Agent
from agentfsm.releases import Rollout
from agentfsm.stores import SQLiteStore
from agentfsm.testing import FunctionModel

old = Agent(FunctionModel(lambda _: "old"), name="shop", version="1", store=SQLiteStore("runs.db"))
rollout = Rollout("shop", {"old": old, "new": old.with_(model=FunctionModel(lambda _: "new"), version="2")})

if __name__ == "__main__":
    import anyio

    async def main():
        async with old:
            await rollout.start({"old": 70, "new": 30}, targets=["new:role=tester"], by="ann", reason="spring")

    anyio.run(main)
"""


def test_a_roll_out_is_taken_back(open_page, tmp_path):
    """Weights, targets and results are there; the new arm goes back to the base with a reason, which the log has."""
    (tmp_path / "shop.py").write_text(SHOP, encoding="utf-8")
    subprocess.run([sys.executable, "shop.py"], cwd=tmp_path, check=True)
    words = ("serve", "shop:rollout", "--studio", "--http", f"127.0.0.1:{free_port()}")
    with serving(tmp_path, *words) as (_process, url):
        httpx.post(url.replace("/studio/", "/v1/runs"), json={"prompt": "hi", "wait_s": 30}, timeout=60)
        page = open_page(url=f"{url}#/rollouts")
        panel = page.locator("[data-rollout=shop]")
        expect(panel.locator("[data-arm=new]")).to_contain_text("30 %")
        expect(panel.locator("[data-targets]")).to_contain_text("new:role=tester")
        panel.get_by_label("What goes back").select_option("new")
        panel.get_by_label("Reason, for the log").fill("it is slow")
        panel.get_by_role("button", name="Roll back").click()
        expect(panel.locator("[data-arm=new]")).to_contain_text("0 %")
        expect(panel.locator("[data-arm=old]")).to_contain_text("100 %")
        expect(panel.locator("[data-targets]")).to_have_count(0)
        panel.get_by_text("Log", exact=True).click()
        expect(panel.locator("li").last).to_contain_text("it is slow")
