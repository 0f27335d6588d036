"""Requests that a provider read anew although it had the beginning in its prompt cache, with the cause."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import attrs

from agentfsm.core import events as e
from agentfsm.core.run_fields import FORGOTTEN_AFTER_S
from agentfsm.core.usage import Usage
from agentfsm.core.value import Value

# Tokens below which nothing is lost: the smallest beginning that the caches of OpenAI, Gemini and most models of
# Anthropic keep. They also keep whole blocks only, of 128 tokens or more.
MIN_LOST_TOKENS: Final = 1_024


@attrs.frozen(kw_only=True)
class CacheLoss(Value):
    """A request of a run whose beginning its provider had read before, and read anew."""

    turn: int
    """Turn of the request, from 1."""

    cause: str
    """Description of the change since the previous request; empty if only the provider can tell."""

    at: float
    """Time of its reply, seconds since 1970."""

    tokens: int
    """Tokens that were read anew, by the provider's count."""

    reported: str = ""
    """Reason that the provider gives, in its word (`CacheReport.reason`); empty if it gives none or was not asked."""

    @property
    def reason(self) -> str:
        """The cause, and what the provider says, in words."""
        return "; ".join(filter(None, (self.cause, self.reported and f"the provider says {self.reported}")))


def list_cache_losses(events: Iterable[e.Event]) -> Iterator[CacheLoss]:
    """Yield the requests of a run that lost the provider's prompt cache by what the run did, or by a wait.

    A loss is what the provider reports: tokens of the request before that it did not read from its cache. Providers
    that report none, and losses without a known cause, are left out.

    Args:
        events: Events of the journal, from the first on.
    """
    causes: list[str] = []
    before: tuple[e.Answered, Usage] | None = None
    turn, has_cache, offered = 0, False, None
    for event in events:
        match event:
            case e.Compacted():
                causes.append("the history was compacted")
            case e.ToolsOffered(tools=names):
                causes += [] if names == offered else ["other tools were offered"]
                offered = names
            case e.LimitReached():
                causes.append("the last answer was asked for without tools")
            case e.Resumed(changes=changes) if changes:
                causes.append(f"the agent was changed: {'; '.join(changes)}")
            case e.ToolsChosen() | e.AnswerGiven() | e.AnswerDrafted() | e.ModelFaltered():
                turn, usage = turn + 1, event.usage
                if usage.estimated or not usage.input_tokens:
                    continue
                has_cache = has_cache or usage.cached_tokens > 0 or usage.cache_write_tokens > 0
                if before is not None and has_cache:
                    lost = min(before[1].input_tokens, usage.input_tokens) - usage.cached_tokens
                    cause = "; ".join(dict.fromkeys(causes)) or _find_cause(before[0], event)
                    report = None if isinstance(event, e.ModelFaltered) else event.message.cache_report
                    is_known = cause or (report is not None and report.names_cause)
                    if is_known and lost >= MIN_LOST_TOKENS:
                        said = "" if report is None else report.reason
                        yield CacheLoss(turn=turn, cause=cause, at=event.at, tokens=lost, reported=said)
                causes, before = [], (event, usage)


def _find_cause(before: e.Answered, event: e.Answered) -> str:
    """Return the cause that two replies show, one after the other; empty if they show none."""
    model = getattr(event, "model", "")
    if model != getattr(before, "model", ""):
        return f"another model replied: {model or 'that of the agent'}"
    if event.at - before.at > FORGOTTEN_AFTER_S:
        return f"{(event.at - before.at) / 60:.0f} minutes had passed"
    has_changed = read_agent_hash(before.request) != read_agent_hash(event.request)
    return "the tools, the instructions or the settings were changed" if has_changed else ""


def read_agent_hash(request: str) -> str:
    """Return the hash of the agent's part of a request from the two hashes of an event; empty if there are none."""
    return request.partition("-")[0]
