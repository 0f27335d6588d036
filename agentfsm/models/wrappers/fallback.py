"""Combine several models: the next one answers when one is overloaded or unavailable.

The engine still does the retries (`Limits.model_retries`); a `Fallback` asks each of its models at most once per
attempt. It handles failures as follows:

- *Overload and outage* (503, 529, no connection, silence): the next model is asked at once. The one that failed rests,
  so that later requests do not run into it again; each further failure doubles the rest.
- *A rate limit* (429) ends after the time that the provider names. If that is short, the error is raised, and the
  engine asks the same model again afterwards. A model that is limited for longer, or still limited then, rests.
- *An unusable reply* says little about the model: the error is raised, and the engine asks the same model again.
  The second one in a row makes the model rest.
- *After a part of the reply was streamed*, the error is raised as well: a consumer replaces the text only when the
  engine starts a new attempt. That attempt asks the same model again, unless `after_text` is set: then a model that
  breaks off rests.
- *A bad request*, a refused key, an empty account, a history that is too long: the error is raised, and no other model
  is asked. Such a fault must not be hidden by a weaker or more expensive model, unless `on` lists it: then the next
  model is asked at once. The one that failed rests if further requests would fail as well.

A resting model is not excluded: if all models rest, they are asked too, beginning with the one whose rest ends first.

Source: document C, 9.3.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Final, get_args

import attrs

from agentfsm._lib.concurrency import monotonic_time
from agentfsm.core.errors import (
    ContextTooLongError,
    MisuseError,
    ModelError,
    ModelReplyError,
    ModelUnavailableError,
    Refusal,
)
from agentfsm.core.usage import Usage
from agentfsm.core.validation import shorten_repr
from agentfsm.core.value import Value
from agentfsm.models.wrappers.base import ChunkRelay, CompositeModel, ask_model
from agentfsm.tokens.billing import attach_usage

if TYPE_CHECKING:
    from agentfsm.ports.model import Emit, Model, Reply, Request

# Seconds of rest after a first failure: an overload is rarely shorter, and one failed request per rest costs little.
REST_S: Final = 30.0
# The longest rest in seconds, after four doublings: after an outage, the better model should be used again soon.
MAX_REST_S: Final = 480.0
# The longest rate limit in seconds that is waited for: about as long as another model takes to answer.
PATIENCE_S: Final = 10.0
# HTTP status of a rate limit.
RATE_LIMIT_STATUS: Final = 429
# Unusable replies in a row that make a model rest.
MAX_INVALID_REPLIES: Final = 2

_REFUSALS: Final = frozenset(get_args(Refusal))
# Refusals of the account and the model, which the next request would meet as well.
_LASTING_REFUSALS: Final = frozenset({"api_key", "permission", "not_found", "quota"})

_log = logging.getLogger("agentfsm.models")


@attrs.frozen(kw_only=True)
class ModelStatistics(Value):
    """Statistics of one model in a `Fallback`."""

    model: str
    """Name of the model."""

    answered: int
    """Number of replies."""

    failed: int
    """Number of requests that failed for a temporary reason, or for one of those in `Fallback(on=...)`."""

    rests_s: float
    """Seconds until the end of the model's rest; 0 if it does not rest."""


class Fallback(CompositeModel):
    """Model that asks its first model, and the next one when that is overloaded or unavailable.

    Example: `Fallback("anthropic:claude-sonnet-5-5", "anthropic:claude-haiku-5-5")`. One `Fallback` may serve any
    number of runs, event loops and threads; they share the state of its models.

    Args:
        first: The preferred model, or its string.
        *others: The substitutes, in the order in which they are asked; at least one.
        on: Refusals after which the next model is asked too: "api_key" (401), "permission" (403), "not_found" (404),
            "quota" (402, or an account without credit), "bad_request" (other statuses from 400 to 499) and
            "context_too_long". Default none.
        after_text: Whether a model that breaks off in a streamed reply rests at once, so that the next attempt asks
            another model, whose text replaces the streamed one.
        rest_s: Seconds that a model rests after a first failure, above 0; each further failure in a row doubles them.
        patience_s: The longest rate limit that is waited for, in seconds, 0 or more.
        monotonic: Monotonic clock in seconds. Default: the machine's, or virtual time in
            `agentfsm.testing.run_virtual`.

    Raises:
        MisuseError: when an argument is invalid, or the models have no common output mode.
    """

    def __init__(
        self,
        first: Model | str,
        *others: Model | str,
        on: Collection[Refusal] = (),
        after_text: bool = False,
        rest_s: float = REST_S,
        patience_s: float = PATIENCE_S,
        monotonic: Callable[[], float] = monotonic_time,
    ) -> None:
        if not others:
            raise MisuseError(
                "Fallback has one model: give its substitutes as well, in the order in which they are asked"
            )
        if not 0 < rest_s <= MAX_REST_S or not patience_s >= 0:
            raise MisuseError(
                f"Fallback(rest_s={rest_s}, patience_s={patience_s}): a rest lasts more than 0 and at most "
                f"{MAX_REST_S:.0f} seconds, and patience 0 or more"
            )
        super().__init__(" else ", (first, *others))
        self._after_text, self._monotonic = after_text, monotonic
        if isinstance(on, str) or not isinstance(on, Collection) or not set(on) <= _REFUSALS:
            raise MisuseError(f"Fallback(on={shorten_repr(on)}): give a list of some of {', '.join(sorted(_REFUSALS))}")
        refusals = frozenset(on)
        self._health = tuple([_ModelHealth(model, rest_s, patience_s, refusals) for model in self.models])

    async def reply(self, request: Request, emit: Emit | None = None) -> Reply:
        """Ask each model at most once, until one answers; see `Model.reply`, and the module for the errors raised.

        A cancellation does not count for or against a model.

        Raises:
            ModelError: also if one of the models does not support a setting: any of them may have to answer.
        """
        if (why := self.unsupported_settings(request.settings)) is not None:
            raise ModelError(why)  # already now, and not when the first model becomes unavailable
        paid, failures = Usage(), list[tuple[str, Exception]]()
        now = self._monotonic()
        # Resting models come last; the others keep their order.
        for health in sorted(self._health, key=lambda health: health.remaining_rest_s(now)):
            relay = None if emit is None else ChunkRelay(emit)
            period = health.begin(self._monotonic())
            try:
                reply = await ask_model(health.model, request, relay)
            except ModelError as error:
                has_chunks = relay is not None and relay.has_chunks
                is_shown = has_chunks and not self._after_text
                moves_on = health.record_failure(error, period, self._monotonic(), is_shown=is_shown)
                paid += error.usage or Usage()
                failures.append((health.model.name, error))
                if not moves_on or has_chunks:
                    error.usage = paid
                    raise
                _log.warning("model %s has failed, the next is asked: %s", health.model.name, type(error).__name__)
            except BaseException as error:  # cut off: what was paid before goes with it
                attach_usage(error, paid + (getattr(error, "usage", None) or Usage()))
                raise
            else:
                health.record_reply(period)
                return reply if reply.usage is None else attrs.evolve(reply, usage=reply.usage + paid)
        all_failed = _join_failures(failures)
        all_failed.usage = paid
        raise all_failed

    def statistics(self) -> tuple[ModelStatistics, ...]:
        """Return the statistics of each model, in their order."""
        now = self._monotonic()
        return tuple([health.statistics(now) for health in self._health])


def _join_failures(failures: Sequence[tuple[str, Exception]]) -> ModelError:
    """Build the error of a request that each model has failed: a retry helps if one of them was unavailable."""
    named = " ".join([f"{name}: {error}" for name, error in failures])
    text = f"none of {len(failures)} models could answer. {named}"
    refusals: set[Refusal | None] = {getattr(error, "refusal", None) for _, error in failures}
    if refusals == {"context_too_long"}:
        return ContextTooLongError(text)
    if None in refusals:
        return ModelUnavailableError(text)
    return ModelError(text, refusal=refusals.pop() if len(refusals) == 1 else None)


@attrs.define(eq=False, repr=False)
class _ModelHealth:
    """Availability of one model; thread-safe.

    A request that began before the newest change is ignored, so that twenty concurrent failures count as one. Each
    request therefore carries the number of the period in which it began.
    """

    model: Model
    """The model."""

    rest_s: float
    """Seconds of rest after a first failure."""

    patience_s: float
    """Seconds of the longest rate limit that is waited for."""

    refusals: frozenset[str]
    """Refusals after which another model is asked."""

    _period: int = 0
    """Number that grows when the model begins to rest, is tried after a rest, or is available again."""

    _rests_until: float = 0.0
    """Monotonic time at which the rest ends; valid while there are failures."""

    _failures: int = 0
    """Failures in a row, one for each rest."""

    _is_probing: bool = False
    """Whether the rest is over and a first request tries the model."""

    _invalid_replies: int = 0
    """Unusable replies in a row."""

    _limited_until: float | None = None
    """Monotonic time at which the awaited rate limit ends; None if there is none."""

    _answered: int = 0
    _failed: int = 0
    _lock: threading.Lock = attrs.field(factory=threading.Lock, init=False)

    def remaining_rest_s(self, now: float) -> float:
        """Return the seconds until the rest ends; 0 if the model does not rest."""
        return max(0.0, self._rests_until - now) if self._failures else 0.0

    def begin(self, now: float) -> int:
        """Record a request, and return the period. After a rest, one request tries the model while others avoid it."""
        with self._lock:
            if self._failures and now >= self._rests_until:
                self._rests_until, self._is_probing = now + self.rest_s, True
                self._period += 1
            return self._period

    def record_reply(self, period: int) -> None:
        """Record a reply to a request of that period."""
        with self._lock:
            self._answered += 1
            self._mark_available(period)

    def record_failure(self, error: Exception, period: int, now: float, *, is_shown: bool) -> bool:
        """Record a failure, and return whether to ask another model.

        Args:
            error: The error of the request.
            period: Period in which the request began.
            now: Monotonic seconds.
            is_shown: Whether a part of the reply was streamed, so that the same model is asked again.
        """
        with self._lock:
            if isinstance(error, ModelReplyError):
                self._failed += 1
                self._invalid_replies += 1
                if self._invalid_replies >= MAX_INVALID_REPLIES:
                    self._start_rest(period, now, 0.0)
                return False
            if isinstance(error, ModelError) and not isinstance(error, ModelUnavailableError):
                return self._record_refusal(error.refusal, period, now)
            self._failed += 1
            if is_shown or self._should_wait(error, now):
                return False
            self._start_rest(period, now, getattr(error, "retry_after_s", None) or 0.0)
            return True

    def _record_refusal(self, refusal: Refusal | None, period: int, now: float) -> bool:
        moves_on = refusal in self.refusals
        self._failed += moves_on
        if moves_on and refusal in _LASTING_REFUSALS:
            self._start_rest(period, now, 0.0)
        else:
            self._mark_available(period)
        return moves_on

    def _should_wait(self, error: Exception, now: float) -> bool:
        """Return whether it is a rate limit that ends soon and was not waited for already."""
        if not isinstance(error, ModelUnavailableError) or error.status != RATE_LIMIT_STATUS:
            return False
        wait_s = error.retry_after_s or 0.0
        if self._limited_until is None:
            self._limited_until = now + wait_s
            return wait_s <= self.patience_s
        return wait_s <= self.patience_s and now < self._limited_until

    def _start_rest(self, period: int, now: float, asked_s: float) -> None:
        self._invalid_replies, self._limited_until = 0, None
        if period != self._period or (self._failures and not self._is_probing):
            return  # it rests already, and was asked because all models rest
        length_s = min(self.rest_s * 2.0**self._failures, MAX_REST_S)
        self._rests_until = now + min(max(length_s, asked_s), MAX_REST_S)
        self._failures += 1
        self._is_probing = False
        self._period += 1

    def _mark_available(self, period: int) -> None:
        """Record that the model has answered a request, or refused it permanently."""
        self._invalid_replies, self._limited_until = 0, None
        if self._failures and period == self._period:
            self._failures, self._is_probing = 0, False
            self._period += 1

    def statistics(self, now: float) -> ModelStatistics:
        """Return the statistics of the model."""
        with self._lock:
            return ModelStatistics(
                model=self.model.name,
                answered=self._answered,
                failed=self._failed,
                rests_s=self.remaining_rest_s(now),
            )
