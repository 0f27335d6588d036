"""A process is killed by SIGKILL around a login and around the renewal of a token: the order is made once."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path

import anyio
import attrs
import pytest

from agentfsm import Agent, PendingKind, Run, State
from agentfsm.agents.login_waits import finish_login, list_logins
from agentfsm.guards import build_http_tool
from agentfsm.logins import LoginError, OAuth, TokenFile
from agentfsm.ports import Emit, Model, ProposedCall, Reply, Request
from agentfsm.stores import SQLiteStore
from tests.support.oauth_server import Shop, log_in, oauth_shop

RETURN = "http://127.0.0.1:9/v1/logins/callback"


@attrs.define
class Buyer(Model):
    """Orders once, and answers; in any process."""

    url: str
    name: str = "buyer"

    async def reply(self, request: Request, emit: Emit | None = None) -> Reply:
        """Return the next reply."""
        if len(request.messages) > 1:
            return Reply(text="ordered")
        return Reply(calls=(ProposedCall(id="a", name="order", arguments=f'{{"url": "{self.url}/orders"}}'),))


@pytest.fixture(scope="module")
def running() -> Iterator[Shop]:
    """Serve the shop for all kills."""
    with oauth_shop() as shop:
        yield shop


def agent_in(place: Path, url: str) -> Agent:
    """Return the agent of a process."""
    login = OAuth(redirect_url=RETURN, tokens=TokenFile(place / "tokens.json"))
    host = url.removeprefix("http://")
    order = build_http_tool([host], methods=["POST"], name="order", trusted=True, irreversible=False, login=login)
    return Agent(Buyer(url), tools=[order], store=SQLiteStore(str(place / "runs.db")))


async def come_back(place: Path, url: str, query: dict[str, str]) -> None:
    """Do what a gateway with a worker does with a browser that returns."""
    async with agent_in(place, url) as agent:
        await finish_login(agent.runs, list_logins(agent.tools), query)
        await agent.resume("r", takeover=True)


async def order(place: Path, url: str, run_id: str) -> None:
    """Begin a run, or continue it."""
    async with agent_in(place, url) as agent:
        await agent.run("order", id=run_id, user="ann")


async def end(shop: Shop, place: Path, run_id: str) -> Run:
    """Continue a run in another process, in which its user logs in as often as asked."""
    async with agent_in(place, shop.url) as agent:
        run = await agent.resume(run_id, takeover=True)
        while not run.is_over and run.pending[0].kind is PendingKind.LOGIN:
            try:
                await finish_login(agent.runs, list_logins(agent.tools), log_in(shop, run.pending[0].questions[0].url))
            except LoginError:  # the code was spent, and its tokens were lost: the link is opened again
                continue
            run = await agent.resume(run_id)
        return run


def check(shop: Shop, place: Path, run: Run) -> None:
    """Check that the order was made once, or that a person is asked; and where the tokens are."""
    if run.is_over:
        assert (run.state, len(shop.orders)) == (State.DONE, 1)
    else:
        assert run.pending[0].kind is PendingKind.OUTCOME
        assert len(shop.orders) <= 1
    secrets = [secret.encode() for secret in shop.issued]
    for path in place.iterdir():
        if path.name != "tokens.json":
            content = path.read_bytes()
            assert not [secret for secret in secrets if secret in content], path


@pytest.mark.parametrize("apart", [61, pytest.param(1, marks=pytest.mark.soak)])
def test_killed_around_a_login(fork_server, running, tmp_path, apart):
    """Whatever was lost, the user logs in again."""
    for at in count(1, apart):
        running.reset()
        place = tmp_path / str(at)
        place.mkdir()
        anyio.run(order, place, running.url, "r")
        [link] = anyio.run(find_links, place, running.url)
        work = partial(come_back, place, running.url, log_in(running, link))
        first = fork_server.run(work, kill_at=("await", at))
        check(running, place, anyio.run(end, running, place, "r"))
        if not first.killed:
            break
    assert at > 20


async def find_links(place: Path, url: str) -> list[str]:
    """Return the links of the waits of the run."""
    async with agent_in(place, url) as agent:
        return [each.questions[0].url for each in (await agent.load("r")).pending]


@pytest.mark.parametrize("apart", [61, pytest.param(1, marks=pytest.mark.soak)])
def test_killed_around_a_renewal(fork_server, running, tmp_path, apart):
    """A refresh token is good for one use: if the new ones are lost, the next call waits for a login."""
    for at in count(1, apart):
        running.reset()
        running.expires_in = 1
        place = tmp_path / str(at)
        place.mkdir()
        anyio.run(order, place, running.url, "r")
        anyio.run(end, running, place, "r")
        running.orders.clear()
        first = fork_server.run(partial(order, place, running.url, "r2"), kill_at=("await", at))
        check(running, place, anyio.run(end_or_begin, running, place))
        assert running.seen["reused"] <= 1
        if not first.killed:
            break
    assert at > 20


async def end_or_begin(shop: Shop, place: Path) -> Run:
    """Continue the second run, or begin it if it was killed before its first record."""
    async with agent_in(place, shop.url) as agent:
        known = [each.id for each in await agent.runs.list()]
        if "r2" not in known:
            await agent.run("order", id="r2", user="ann")
    return await end(shop, place, "r2")
