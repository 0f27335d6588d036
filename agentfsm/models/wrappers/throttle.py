"""Limit the requests to a model: they wait here, in order, instead of being refused by the provider.

The limits hold for all runs, threads and event loops of this process. Other processes are not counted: give each one
its share.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs

from agentfsm._lib.concurrency import monotonic_time
from agentfsm._lib.limiter import Limiter, Permit
from agentfsm.core.errors import MisuseError, ModelError, ModelUnavailableError
from agentfsm.core.usage import Usage
from agentfsm.core.value import Value
from agentfsm.models.wrappers.base import CompositeModel
from agentfsm.ports.model import Emit, Model, Reply, Request
from agentfsm.tokens.billing import estimate_request_tokens


@attrs.frozen(kw_only=True)
class ThrottleStatistics(Value):
    """Statistics of a throttled model."""

    in_flight: int
    """Number of requests that are being answered."""

    waiting: int
    """Number of requests that wait for their turn, of all runs."""

    requests: int
    """Number of requests that began in the last minute. Counted only if a rate is limited."""

    tokens: int
    """Tokens of the requests in the last minute; those of requests in flight are estimated. Counted only if a rate is
    limited.
    """

    gave_up: int
    """Number of requests whose wait timed out, since the model was created."""


class Throttled(CompositeModel):
    """Model with limits on concurrent requests, and on requests and tokens per minute.

    Requests start in order of arrival. One that needs more tokens than are left blocks those behind it, so that it
    cannot starve. A request waits up to `Request.timeout_s`, and then fails as if the model were overloaded: the engine
    retries, and a `Fallback` asks the next model. A cancelled request leaves the queue without an effect on the others.

    Args:
        model: A model, or a string such as "openai:gpt-5.4-mini". Agents that share a limit share the throttled model.
        concurrency: Requests in flight at once, 1 or more. None: any number.
        per_minute: Requests that begin in any 60 seconds, 1 or more. None: any number.
        tokens_per_minute: Input and output tokens of the requests in any 60 seconds, 1 or more. The tokens of a request
            are estimated before it (its input, and its answer if `Settings.max_tokens` is set) and corrected after it.
            A request above the limit runs alone; a cancelled one counts as estimated. None: any number.
        monotonic: Monotonic clock in seconds. Default: the machine's, or virtual time in
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
            ModelUnavailableError: also when the wait for a turn times out.
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
        """Return the current statistics."""
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
        tokens = 0
        if limiter.cost_per_minute is not None:
            tokens = estimate_request_tokens(request) + (request.settings.max_tokens or 0)
        permit = await limiter.acquire(tokens, max_wait_s=request.timeout_s)
        if permit is None:
            self._gave_up += 1
            error = ModelUnavailableError(
                f"{self.name!r} had no turn for this request in {request.timeout_s:.0f} seconds, within its limits of "
                f"{self._describe_limits()}. Ask again later, raise the limits of Throttled, or run fewer agents at "
                "once."
            )
            error.usage = Usage()  # it was not sent
            raise error
        return permit

    def _describe_limits(self) -> str:
        limits = {
            "at once": self._limiter.concurrency,
            "in a minute": self._limiter.per_minute,
            "tokens in a minute": self._limiter.cost_per_minute,
        }
        return ", ".join(f"{limit:,} {unit}" for unit, limit in limits.items() if limit is not None)
