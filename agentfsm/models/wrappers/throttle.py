"""A model that is asked no more often than its provider allows: requests wait here, in order, instead of being refused.

All limits are of the process, whatever runs, threads and event loops its requests come from. Nothing is known of other
processes: give each its share.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

import anyio
import attrs

from agentfsm._concurrency import ThreadWaiter, notify_all
from agentfsm.core.errors import MisuseError, ModelError, ModelUnavailableError
from agentfsm.core.value import Value
from agentfsm.models import resolve_model
from agentfsm.ports import Model
from agentfsm.tokens.ledger import BYTE_COUNTER, BYTES_PER_TOKEN, count_message, count_tools

if TYPE_CHECKING:
    from agentfsm.core.messages import JSON, Part, Usage
    from agentfsm.core.settings import Settings
    from agentfsm.ports import Emit, Reply, Request

MINUTE_S: Final = 60.0
# A wait for room in the minute lasts so long at least: a shorter one may be lost in the digits of a clock.
MIN_WAIT_S: Final = 0.001


@attrs.frozen(kw_only=True)
class ThrottleStatistics(Value):
    """What goes through a throttled model."""

    in_flight: int
    # Requests that are being answered.
    waiting: int
    # Requests that wait for their turn, of all runs.
    requests: int
    # That began in the last minute; counted where a rate is limited, like the tokens.
    tokens: int
    # Of these requests, about: those of a request in flight are estimated.
    gave_up: int
    # Requests that have waited in vain, since the model was made.


class Throttled(Model):
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
        monotonic: Tells the time, seconds since some moment. Tests in virtual time give `anyio.current_time`.

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
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        limits = (concurrency, per_minute, tokens_per_minute)
        if all(limit is None for limit in limits) or any(limit is not None and limit < 1 for limit in limits):
            raise MisuseError(
                f"Throttled(concurrency={concurrency}, per_minute={per_minute}, tokens_per_minute={tokens_per_minute})"
                ": give one of them at least, and 1 or more"
            )
        self._model = resolve_model(model)
        self.name = self._model.name
        self.window_tokens = self._model.window_tokens
        self.output_modes = self._model.output_modes
        self._limiter = _RequestLimiter(monotonic, *limits)

    async def reply(self, request: Request, emit: Emit | None = None) -> Reply:
        """Wait for a turn and ask once; see `Model.reply`.

        Raises:
            ModelUnavailableError: also when the turn did not come in time.
        """
        gate = self._limiter
        place = await gate.acquire(_estimate_tokens(request) if gate.counts_tokens else 0, request.timeout_s, self.name)
        try:
            reply = await self._model.reply(request, emit)
        except ModelError as error:
            gate.record_tokens(place, 0 if error.usage is None else error.usage.tokens)
            raise
        else:
            if reply.usage is not None:
                gate.record_tokens(place, reply.usage.tokens)
            return reply
        finally:
            gate.release()

    def unsupported_part(self, part: Part) -> str | None:
        """Say why the model cannot take this part; None where it can."""
        return self._model.unsupported_part(part)

    def unsupported_settings(self, settings: Settings) -> str | None:
        """Say which of the settings the wire has no word for; None where it has one for all."""
        return self._model.unsupported_settings(settings)

    def unsupported_schema(self, schema: Mapping[str, JSON]) -> str | None:
        """Say why the provider cannot hold the model to this schema; None where it can."""
        return self._model.unsupported_schema(schema)

    def prepare(self) -> None:
        """Prepare the model."""
        self._model.prepare()

    def cost_usd(self, usage: Usage) -> float | None:
        """US dollars for the usage of one reply, or None where no price is known."""
        return self._model.cost_usd(usage)

    def statistics(self) -> ThrottleStatistics:
        """Return what is going through now."""
        return self._limiter.statistics()

    async def aclose(self) -> None:
        """Close the model; requests that wait for a turn are not held up."""
        await self._model.aclose()


def _estimate_tokens(request: Request) -> int:
    """Return about how many tokens a request takes, its answer included where its length is limited."""
    asked = BYTE_COUNTER.count(request.instructions) + count_tools(request.tools, BYTE_COUNTER)
    asked += sum(count_message(message, BYTE_COUNTER) for message in request.messages)
    return asked // BYTES_PER_TOKEN + (request.settings.max_tokens or 0)


@attrs.define(eq=False, repr=False)
class _StartedRequest:
    """A request that went."""

    started_at: float
    # When, monotonic seconds.
    tokens: int
    # Estimated, then counted.
    is_expired: bool = False
    # Whether that is more than a minute ago.


@attrs.define(eq=False, repr=False)
class _QueuedRequest:
    """A request that waits for its turn."""

    tokens: int
    waiter: ThreadWaiter
    # Rung when it shall look again whether it may go.


@attrs.define(eq=False, repr=False)
class _RequestLimiter:
    """Lets requests go one by one; from any thread and event loop."""

    monotonic: Callable[[], float]
    concurrency: int | None
    per_minute: int | None
    tokens_per_minute: int | None
    _queue: deque[_QueuedRequest] = attrs.field(factory=deque, init=False)
    # In the order of their coming; only the first may go.
    _recent: deque[_StartedRequest] = attrs.field(factory=deque, init=False)
    # What went in the last minute, oldest first, where a rate is limited.
    _recent_tokens: int = attrs.field(default=0, init=False)
    # Of these.
    _in_flight: int = attrs.field(default=0, init=False)
    _gave_up: int = attrs.field(default=0, init=False)
    _lock: threading.Lock = attrs.field(factory=threading.Lock, init=False)

    @property
    def counts_tokens(self) -> bool:
        """Whether it has to be told how many tokens a request takes."""
        return self.tokens_per_minute is not None

    async def acquire(self, tokens: int, max_wait_s: float, model: str) -> _StartedRequest:
        """Wait for a turn and take it; `leave` must follow.

        Args:
            tokens: That the request takes, about.
            max_wait_s: How long it may wait, seconds.
            model: Whose turn it is, for the error.

        Raises:
            ModelUnavailableError: when the turn did not come in time.
        """
        with self._lock:
            if not self._queue and self._required_wait_s(tokens) <= 0:
                return self._start_request(tokens)
            waiter = _QueuedRequest(tokens, ThreadWaiter())
            self._queue.append(waiter)
        try:
            with anyio.move_on_after(max_wait_s):
                return await self._wait_for_turn(waiter)
        finally:
            self._leave_queue(waiter)
        with self._lock:
            self._gave_up += 1
        raise ModelUnavailableError(
            f"{model!r} had no turn for this request in {max_wait_s:.0f} seconds, within its limits of "
            f"{self._describe_limits()}. Ask again later, raise the limits of Throttled, or run fewer agents at once."
        )

    def record_tokens(self, started: _StartedRequest, tokens: int) -> None:
        """Put the tokens that a request did take in the place of what was estimated."""
        with self._lock:
            if self.counts_tokens and not started.is_expired:
                self._recent_tokens += tokens - started.tokens
                started.tokens = tokens

    def release(self) -> None:
        """End a turn."""
        with self._lock:
            self._in_flight -= 1
            first = self._first_waiter()
        notify_all(first)

    def statistics(self) -> ThrottleStatistics:
        """Return what is going through now."""
        with self._lock:
            self._drop_expired(self.monotonic())
            return ThrottleStatistics(
                in_flight=self._in_flight,
                waiting=len(self._queue),
                requests=len(self._recent),
                tokens=self._recent_tokens,
                gave_up=self._gave_up,
            )

    async def _wait_for_turn(self, queued: _QueuedRequest) -> _StartedRequest:
        while True:
            with self._lock:
                queued.waiter = ThreadWaiter()  # before the look: what changes behind it rings this one
                wait_s = self._required_wait_s(queued.tokens) if self._queue[0] is queued else math.inf
                if wait_s <= 0:
                    self._queue.popleft()
                    return self._start_request(queued.tokens)
            with anyio.move_on_after(max(wait_s, MIN_WAIT_S)):
                await queued.waiter.event.wait()

    def _leave_queue(self, queued: _QueuedRequest) -> None:
        """Leave the line, with a turn or without one, and let the first in it look."""
        with self._lock:
            if queued in self._queue:
                self._queue.remove(queued)
            first = self._first_waiter()
        notify_all(first)

    def _first_waiter(self) -> list[ThreadWaiter]:
        return [self._queue[0].waiter] if self._queue else []

    # Under the lock.

    def _start_request(self, tokens: int) -> _StartedRequest:
        place = _StartedRequest(self.monotonic(), tokens)
        self._in_flight += 1
        if self.per_minute is not None or self.counts_tokens:
            self._recent.append(place)
            self._recent_tokens += tokens
        return place

    def _required_wait_s(self, tokens: int) -> float:
        """Return how long a request has to wait at least, seconds: 0 for not at all, infinite for until one leaves."""
        if self.concurrency is not None and self._in_flight >= self.concurrency:
            return math.inf
        now = self.monotonic()
        self._drop_expired(now)
        surplus = 0 if self.per_minute is None else len(self._recent) + 1 - self.per_minute
        excess = 0 if self.tokens_per_minute is None else self._recent_tokens + tokens - self.tokens_per_minute
        wait_s = 0.0
        for place in self._recent:
            if surplus <= 0 and excess <= 0:
                break
            surplus, excess = surplus - 1, excess - place.tokens
            wait_s = place.started_at + MINUTE_S - now
        return wait_s

    def _drop_expired(self, now: float) -> None:
        while self._recent and self._recent[0].started_at <= now - MINUTE_S:
            place = self._recent.popleft()
            place.is_expired = True
            self._recent_tokens -= place.tokens

    def _describe_limits(self) -> str:
        limits = {
            "at once": self.concurrency,
            "in a minute": self.per_minute,
            "tokens in a minute": self.tokens_per_minute,
        }
        return ", ".join(f"{limit:,} {what}" for what, limit in limits.items() if limit is not None)
