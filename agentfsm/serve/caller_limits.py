"""Refuse requests that exceed the limits of a user or a tenant, and new runs that a full queue would delay."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

import anyio
import attrs

from agentfsm.core.errors import LeaseLostError, MisuseError, StoreError
from agentfsm.ports.store import Filter, Store
from agentfsm.ports.stored import QuotaUse
from agentfsm.serve.errors import QUEUE_RETRY_S, LimitExceededError, OverloadedError
from agentfsm.serve.rate_limits import NO_LIMITS, RateLimits
from agentfsm.serve.start_places import PlaceLimit, StartPlaces

if TYPE_CHECKING:
    from agentfsm.agents.runs import Runs
    from agentfsm.serve.access import Caller

_log = logging.getLogger("agentfsm.serve")

# Runs that may wait for a worker before new ones are refused. A worker that executes 20 runs at once, of 10 s each,
# needs eight minutes for them: longer than a client waits.
MAX_QUEUE: Final = 1_000
# Seconds for which a queue that was full is not counted again.
QUEUE_CHECK_S: Final = 1.0
# Requests of a user that a process answers at once, unless there is a limit: a quarter of its connections.
MAX_OPEN_REQUESTS: Final = 128
# Name of the follower that counts the tokens of runs.
TOKEN_FOLLOWER: Final = "agentfsm.serve.tokens"  # noqa: S105  a name
# Seconds after which the follower is tried again that met an error.
FOLLOWER_RETRY_S: Final = 5.0


@attrs.define(eq=False, repr=False, kw_only=True)
class Admission:
    """Admits requests and new runs. All processes with the same store share its counts."""

    runs: Runs
    user_limits: RateLimits = NO_LIMITS
    """Limits of each user whose key has none of its own."""

    tenant_limits: RateLimits = NO_LIMITS
    """Limits of all users of a tenant together; also of all users without a tenant."""

    max_queue: int | None = MAX_QUEUE
    """Runs of an agent that may wait for a worker. None: any number."""

    refused: dict[str, int] = attrs.field(
        factory=lambda: dict.fromkeys(("requests", "open_requests", "tokens", "runs", "queue"), 0)
    )
    """Number of refusals, by what was exceeded."""

    _open_requests: Counter[str] = attrs.field(factory=Counter, init=False)
    """Requests that this process is answering, by user and by tenant."""

    _queue_full_at: dict[str, float] = attrs.field(factory=dict, init=False)
    """Times of the event loop at which the queue of an agent was seen to be full."""

    _places: StartPlaces = attrs.field(
        default=attrs.Factory(lambda self: StartPlaces(self.runs), takes_self=True), init=False
    )

    _counts_tokens: anyio.Event = attrs.field(factory=anyio.Event, init=False)
    """Set once a limit of tokens was met: from then on they are counted."""

    async def admit_request(self, caller: Caller) -> None:
        """Count a request.

        Raises:
            LimitExceededError: when it is one too many.
        """
        await self._take("requests", caller, "{} requests in 60 s are allowed")

    @contextmanager
    def hold_request(self, caller: Caller) -> Iterator[None]:
        """Count a request as long as it is answered.

        Raises:
            LimitExceededError: when it is one too many.
        """
        names = _quota_names("open", caller.tenant, caller.user)
        of_user, of_tenant = [each.open_requests for each in self._find_limits(caller)]
        for name, limit in ((names[0], of_user or MAX_OPEN_REQUESTS), (names[1], of_tenant)):
            if limit is not None and self._open_requests[name] >= limit:
                self.refused["open_requests"] += 1
                text = f"{limit} requests at once are allowed: close event streams, or wait until they have ended"
                raise LimitExceededError(text, QUEUE_RETRY_S)
        self._open_requests.update(names)
        try:
            yield
        finally:
            self._open_requests.subtract(names)
            for name in names:
                if not self._open_requests[name]:
                    del self._open_requests[name]

    @asynccontextmanager
    async def admit_run(self, caller: Caller, agent: str, run_id: str) -> AsyncIterator[None]:
        """Admit a new run, which the block starts. Until then it counts already, in all processes of the store.

        A run keeps its place until it is over, also while it waits or is paused, so that it can always go on.

        Args:
            caller: The user of the run, with its limits.
            agent: Name of the agent.
            run_id: Id of the run.

        Raises:
            LimitExceededError: when the caller, or its tenant, has used its tokens or has too many runs.
            OverloadedError: when too many runs of the agent wait for a worker.
        """
        of_user, of_tenant = self._find_limits(caller)
        if anyio.current_time() - self._queue_full_at.get(agent, -QUEUE_CHECK_S) < QUEUE_CHECK_S:
            raise self._refuse_run("queue", None)
        if of_user.tokens is not None or of_tenant.tokens is not None:
            self._counts_tokens.set()
            await self._take("tokens", caller, "{} tokens in 60 s are allowed")
        where = Filter(tenant=caller.tenant or "", over=False, purpose="")
        by_user, by_tenant = _quota_names("runs", caller.tenant, caller.user)
        limits = (
            PlaceLimit(
                name="queue",
                scope=f"queue:{agent}",
                where=Filter(agent=agent, purpose=""),
                is_queue=True,
                limit=self.max_queue,
            ),
            PlaceLimit(name="runs", scope=by_user, where=attrs.evolve(where, user=caller.user), limit=of_user.runs),
            PlaceLimit(name="runs", scope=by_tenant, where=where, limit=of_tenant.runs),
        )
        if all(each.limit is None for each in limits):
            yield
            return
        async with self._places.take(run_id, limits) as refused_by:
            if refused_by is not None:
                if refused_by.name == "queue":
                    self._queue_full_at[agent] = anyio.current_time()
                raise self._refuse_run(refused_by.name, refused_by.limit)
            yield

    def _refuse_run(self, name: str, limit: int | None) -> LimitExceededError | OverloadedError:
        self.refused[name] += 1
        if name == "queue":
            return OverloadedError("too many runs wait for a worker: try again later")
        text = f"{limit} runs at once are allowed, waiting ones included: wait until one has ended, or cancel one"
        return LimitExceededError(text, QUEUE_RETRY_S)

    async def count_queue(self, agent: str, limit: int) -> int:
        """Return how many runs of an agent wait for a worker, up to a limit."""
        store = self.runs.store
        return await store.count(Filter(agent=agent, ready_by=await store.now(), purpose=""), limit=limit)

    async def _take(self, kind: str, caller: Caller, text: str) -> None:
        names = _quota_names(kind, caller.tenant, caller.user)
        uses = [
            QuotaUse(name=name, limit=limit)
            for name, limits in zip(names, self._find_limits(caller), strict=True)
            if (limit := getattr(limits, kind)) is not None
        ]
        if uses and (wait_s := await self.runs.store.take_quotas(uses)):
            self.refused[kind] += 1
            raise LimitExceededError(text.format(min(use.limit for use in uses)), wait_s)

    def _find_limits(self, caller: Caller) -> tuple[RateLimits, RateLimits]:
        return caller.limits.or_else(self.user_limits), self.tenant_limits

    async def count_tokens(self) -> None:
        """Count the tokens of all runs as they end or wait, once a limit of tokens was met. Runs until cancelled."""
        if self.tenant_limits.tokens is not None or self.user_limits.tokens is not None:
            self._counts_tokens.set()
        await self._counts_tokens.wait()
        while True:
            try:
                async with self.runs.store.follow(TOKEN_FOLLOWER, start="now") as follower:
                    async for delivery in follower:
                        # A run's usage includes that of its sub-agents. An evaluation is not the caller's.
                        if delivery.header.parent is None and not delivery.header.purpose:
                            await self._count_run(delivery.header.id, delivery.after_version)
            except (StoreError, LeaseLostError) as error:
                _log.warning("the tokens of runs are counted later: %s", error)
                await anyio.sleep(FOLLOWER_RETRY_S)

    async def _count_run(self, run_id: str, after: int) -> None:
        run = await self.runs.load(run_id)
        amount = run.usage.tokens - (await self.runs.load(run_id, at=after)).usage.tokens
        if amount > 0:
            names = _quota_names("tokens", run.header.tenant, run.header.user or "")
            uses = [QuotaUse(name=name, amount=amount, limit=0) for name in names]
            await self.runs.store.take_quotas(uses, force=True)


def _quota_names(kind: str, tenant: str | None, user: str) -> tuple[str, str]:
    """Return the names of the quotas of a user and of its tenant."""
    of_tenant = f"{kind}:{quote(tenant or '', safe='')}"
    return f"{of_tenant}/{quote(user, safe='')}", of_tenant


def check_quota_store(store: Store, *limits: RateLimits) -> None:
    """Check that a store can keep limits.

    Raises:
        MisuseError: when there are limits, and it has no quotas, or no records.
    """
    kind = type(store)
    if any(each.requests or each.tokens for each in limits) and kind.take_quotas is Store.take_quotas:
        raise MisuseError(f"{kind.__name__} has no quotas, so that it cannot keep limits: use another store")
    if any(each.runs for each in limits) and kind.write_record is Store.write_record:
        raise MisuseError(f"{kind.__name__} keeps no records, so that it cannot limit runs at once: use another store")
