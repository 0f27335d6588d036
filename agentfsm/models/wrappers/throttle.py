"""A model that is asked no more often than its provider allows: requests wait here, in order, instead of being refused.

All limits hold in this process, for all runs, threads and event loops in it. Nothing is known of other processes: give
each its share.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs

from agentfsm._concurrency import monotonic_time
from agentfsm.core.errors import MisuseError, ModelError, ModelUnavailableError
from agentfsm.core.value import Value
from agentfsm.limiter import Limiter, Permit
from agentfsm.models.wrappers.base import CompositeModel
from agentfsm.ports.model import Emit, Model, Reply, Request
from agentfsm.tokens.ledger import BYTE_COUNTER, BYTES_PER_TOKEN, count_message, count_tools


@attrs.frozen(kw_only=True)
class ThrottleStatistics(Value):
    """What goes through a throttled model."""

    in_flight: int
    """Requests that are being answered."""

    waiting: int
    """Requests that wait for their turn, of all runs."""

    requests: int
    """That began in the last minute; counted where a rate is limited, like the tokens."""

    tokens: int
    """Of these requests, about: those of a request in flight are estimated."""

    gave_up: int
    """Requests that have waited in vain, since the model was made."""


class Throttled(CompositeModel):
    """Asks a model within limits on how many requests run at once, and on requests and tokens in any minute.

    Requests go in the order in which they came; one that needs more tokens than are left holds up those behind it, so
    that it is not passed by for ever. A request waits as long as a model may be silent (`Request.timeout_s`), and then
    fails as if the model were overloaded: the engine asks again, and a `Fallback` asks the next model. Who is cancelled
    while waiting leaves the line, and costs nobody a place.

    Args:
        model: A model, or a string such as "openai:gpt-4o". Agents that share a limit share the throttled model.
        concurrency: Requests in flight at once, 1 or more. None: any number.
        per_minute: Requests that begin in any 60 seconds, 1 or more. None: any number.
        tokens_per_minute: Tokens of these, input and output, 1 or more. What a request takes is estimated before it
            (its input, and its answer where `Settings.max_tokens` limits that) and counted after it. One that takes
            more than a minute allows goes alone, one that is cancelled counts as estimated. None: any number.
        monotonic: Tells the time, seconds since some moment: by default the machine's, and virtual time in
            `agentfsm.testing.run_virtual`.

    Raises:
        MisuseError: when no limit is given, or one is below 1.
    """

    def __init__(
        self,
        model: Model | str,
        *,
        concurrency: int | None = None,
        per_minute: int | None = None,
        tokens_per_minute: int | None = None,
        monotonic: Callable[[], float] = monotonic_time,
    ) -> None:
        limits = (concurrency, per_minute, tokens_per_minute)
        if all(limit is None for limit in limits) or any(limit is not None and limit < 1 for limit in limits):
            raise MisuseError(
                f"Throttled(concurrency={concurrency}, per_minute={per_minute}, tokens_per_minute={tokens_per_minute})"
                ": give one of them at least, and 1 or more"
            )
        super().__init__("", [model])
        self._limiter = Limiter(
            concurrency, per_minute=per_minute, cost_per_minute=tokens_per_minute, monotonic=monotonic
        )
        self._gave_up = 0

    async def reply(self, request: Request, emit: Emit | None = None) -> Reply:
        """Wait for a turn and ask once; see `Model.reply`.

        Raises:
            ModelUnavailableError: also when the turn did not come in time.
        """
        permit = await self._acquire(request)
        try:
            reply = await self.models[0].reply(request, emit)
        except ModelError as error:
            self._limiter.record_cost(permit, 0 if error.usage is None else error.usage.tokens)
            raise
        else:
            if reply.usage is not None:
                self._limiter.record_cost(permit, reply.usage.tokens)
            return reply
        finally:
            self._limiter.release()

    def statistics(self) -> ThrottleStatistics:
        """Return what is going through now."""
        now = self._limiter.statistics()
        return ThrottleStatistics(
            in_flight=now.in_use,
            waiting=now.waiting,
            requests=now.recent,
            tokens=now.recent_cost,
            gave_up=self._gave_up,
        )

    async def _acquire(self, request: Request) -> Permit:
        limiter = self._limiter
        tokens = 0 if limiter.cost_per_minute is None else _estimate_tokens(request)
        permit = await limiter.acquire(tokens, max_wait_s=request.timeout_s)
        if permit is None:
            self._gave_up += 1
            raise ModelUnavailableError(
                f"{self.name!r} had no turn for this request in {request.timeout_s:.0f} seconds, within its limits of "
                f"{self._describe_limits()}. Ask again later, raise the limits of Throttled, or run fewer agents at "
                "once."
            )
        return permit

    def _describe_limits(self) -> str:
        limits = {
            "at once": self._limiter.concurrency,
            "in a minute": self._limiter.per_minute,
            "tokens in a minute": self._limiter.cost_per_minute,
        }
        return ", ".join(f"{limit:,} {unit}" for unit, limit in limits.items() if limit is not None)


def _estimate_tokens(request: Request) -> int:
    """Return about how many tokens a request takes, its answer included where its length is limited."""
    asked = BYTE_COUNTER.count(request.instructions) + count_tools(request.tools, BYTE_COUNTER)
    asked += sum(count_message(message, BYTE_COUNTER) for message in request.messages)
    return asked // BYTES_PER_TOKEN + (request.settings.max_tokens or 0)
