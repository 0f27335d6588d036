"""Measurements of runs, derived from their journals, of which the metrics consist.

`measure_run` is a pure fold: the same journal always gives the same measurements. Labels have
few values: agents, their versions, models, tools and outcomes, never users, sessions or runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from difflib import SequenceMatcher
from types import MappingProxyType
from typing import Any, Final, Literal

import attrs

from agentfsm.core import events as e
from agentfsm.core.calls import Phase
from agentfsm.core.events import Event
from agentfsm.core.header import Header
from agentfsm.core.limits import StopReason
from agentfsm.core.messages import ErrorType, Outcome, TextPart, ToolResult
from agentfsm.core.run import Run, begin_run
from agentfsm.core.run_facts import list_spending
from agentfsm.core.usage import Purpose, Usage
from agentfsm.core.value import Value
from agentfsm.ports.stored import Feedback, StoredRun

# Signals, as labels of the metric.
ASKED_AGAIN: Final = "asked_again"
EDITED: Final = "edited"
STOPPED: Final = "cancelled"
FINDING: Final = "finding"

# Time within which an alike question counts as asked again, seconds.
ASKED_AGAIN_S: Final = 600.0
# Similarity from which two questions are alike, 0 to 1, and the characters that are compared.
MIN_SIMILARITY: Final = 0.75
MAX_COMPARED_CHARS: Final = 500


def is_asked_again(previous: Header, header: Header) -> bool:
    """Return whether a run was given nearly the same question as the one before it in its session, within 10 minutes.

    Args:
        previous: Header of the run that it continues.
        header: Header of the run.
    """
    if not 0 <= header.created_at - previous.created_at <= ASKED_AGAIN_S:
        return False
    before, now = _read_question(previous), _read_question(header)
    return bool(before and now) and SequenceMatcher(None, before, now, autojunk=False).ratio() >= MIN_SIMILARITY


def _read_question(header: Header) -> str:
    text = " ".join([part.text for part in header.prompt if isinstance(part, TextPart)])
    return " ".join(text.casefold().split())[:MAX_COMPARED_CHARS]


# Shortest gap between two events that counts, seconds; shorter ones are the work of the engine between two events.
MIN_GAP_S: Final = 0.01
# Shortest time without any event, outside of a wait, that counts as an interruption: the worker was gone.
MIN_INTERRUPTION_S: Final = 1.0

QUEUE: Final = "queue"
INTERRUPTION: Final = "interruption"


@attrs.frozen(kw_only=True)
class Gap(Value):
    """A time during which no worker executed a run."""

    kind: str
    """"queue" before the first event; else the kinds of wait, such as "approval", separated by
    commas; or "interruption", after a crash or a shutdown of its worker.
    """

    started_at: float
    """Time at which it began, seconds since 1970."""

    ended_at: float
    """Time at which a worker went on, seconds since 1970."""

    @property
    def duration_s(self) -> float:
        """Seconds from its beginning to its end."""
        return self.ended_at - self.started_at


def find_gap(before: Run[Any], event: Event) -> Gap | None:
    """Return the time before an event during which no worker executed the run; None if there was no such time.

    Args:
        before: The run before the event.
        event: The event.
    """
    start, end = before.updated_at, event.at - event.took_s
    if end - start < MIN_GAP_S:
        return None
    if before.version == 0:
        kind = QUEUE
    elif pending := before.pending:
        kind = ",".join(dict.fromkeys(str(item.kind) for item in pending))
    elif end - start >= MIN_INTERRUPTION_S:
        kind = INTERRUPTION
    else:
        return None
    return Gap(kind=kind, started_at=start, ended_at=end)


@attrs.frozen(kw_only=True)
class Metric(Value):
    """A metric: its name, its labels, and the buckets of a histogram."""

    name: str
    """Name, with the unit, as Prometheus knows it."""

    kind: Literal["counter", "histogram"]
    """A counter adds up the values of its measurements; a histogram has their distribution as well."""

    text: str
    """Meaning, for people."""

    labels: tuple[str, ...]
    """Names of the labels, in the order of `Measurement.labels`."""

    buckets: tuple[float, ...] = ()
    """Upper bounds of the buckets of a histogram, ascending; empty for a counter."""


_SECONDS: Final = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 15.0, 30.0, 60.0, 120.0, 300.0, 900.0, 3600.0)
_WAITS: Final = (0.1, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14_400.0, 86_400.0, 604_800.0)
_TOKENS: Final = (100.0, 300.0, 1e3, 3e3, 1e4, 3e4, 1e5, 3e5, 1e6)
_TURNS: Final = (1.0, 2.0, 3.0, 5.0, 8.0, 13.0, 21.0, 34.0, 55.0)

RUNS: Final = Metric(
    name="agentfsm_runs_total",
    kind="counter",
    text="Tasks that have ended: runs that no other run has called, by their stop reason.",
    labels=("agent", "version", "model", "outcome"),
)
RUN_TURNS: Final = Metric(
    name="agentfsm_run_turns", kind="histogram", text="Turns of a task.", labels=("agent",), buckets=_TURNS
)
RUN_DURATION: Final = Metric(
    name="agentfsm_run_duration_seconds",
    kind="histogram",
    text="Time from the creation of a task to its end, without the time that it waited for people or was paused.",
    labels=("agent",),
    buckets=_SECONDS,
)
RUN_TOKENS: Final = Metric(
    name="agentfsm_run_tokens",
    kind="histogram",
    text="Tokens of a task, those of its sub-agents included.",
    labels=("agent",),
    buckets=_TOKENS,
)
TOKENS: Final = Metric(
    name="agentfsm_tokens_total",
    kind="counter",
    text="Tokens of model requests, by their direction: input or output.",
    labels=("agent", "model", "direction"),
)
COST: Final = Metric(
    name="agentfsm_cost_usd_total",
    kind="counter",
    text="US dollars for model requests and calls of tools whose price was known.",
    labels=("agent", "model"),
)
UNPRICED: Final = Metric(
    name="agentfsm_unpriced_tokens_total",
    kind="counter",
    text="Tokens of model requests whose price was unknown: their cost is in no sum.",
    labels=("agent", "model"),
)
REQUESTS: Final = Metric(
    name="agentfsm_model_request_duration_seconds",
    kind="histogram",
    text="Time of a turn's model request with its retries, by its outcome: done, failed or cached.",
    labels=("agent", "model", "outcome"),
    buckets=_SECONDS,
)
TOOL_CALLS: Final = Metric(
    name="agentfsm_tool_calls_total",
    kind="counter",
    text="Calls of tools by their outcome.",
    labels=("agent", "tool", "outcome"),
)
TOOL_DURATION: Final = Metric(
    name="agentfsm_tool_duration_seconds",
    kind="histogram",
    text="Time of a tool call with all its attempts.",
    labels=("agent", "tool"),
    buckets=_SECONDS,
)
WAITS: Final = Metric(
    name="agentfsm_wait_seconds",
    kind="histogram",
    text="Time in which no worker executed a run: queue, interruption, or that of a wait, such as approval.",
    labels=("agent", "kind"),
    buckets=_WAITS,
)
RATINGS: Final = Metric(
    name="agentfsm_feedback_rating",
    kind="histogram",
    text="Ratings of runs by people, from 1 to 5.",
    labels=("agent",),
    buckets=(1.0, 2.0, 3.0, 4.0, 5.0),
)
JUDGE_RATINGS: Final = Metric(
    name="agentfsm_judge_rating",
    kind="histogram",
    text="Ratings of runs by judges, from 1 to 5: each by its model and a hash of its rubric.",
    labels=("agent", "judge"),
    buckets=(1.0, 2.0, 3.0, 4.0, 5.0),
)

SIGNALS: Final = Metric(
    name="agentfsm_signals_total",
    kind="counter",
    text="Signs of dissatisfaction: asked_again within 10 minutes, arguments edited before an approval, cancelled.",
    labels=("agent", "signal"),
)

OTHER_MODELS: Final = Metric(
    name="agentfsm_other_model_replies_total",
    kind="counter",
    text="Replies in which the provider names another model than the snapshot that was asked.",
    labels=("agent", "model", "served"),
)

METRICS: Final[Mapping[str, Metric]] = MappingProxyType(
    {
        each.name: each
        for each in (
            RUNS,
            RUN_TURNS,
            RUN_DURATION,
            RUN_TOKENS,
            TOKENS,
            COST,
            UNPRICED,
            REQUESTS,
            TOOL_CALLS,
            TOOL_DURATION,
            WAITS,
            RATINGS,
            JUDGE_RATINGS,
            SIGNALS,
            OTHER_MODELS,
        )
    }
)
"""All metrics of journals, by name."""

# Name in place of that of a tool which does not exist: models invent any number of them.
UNKNOWN_TOOL: Final = "(unknown)"
# Outcomes of a call beside those of `Outcome`: no attempt was allowed; the end of the run cut it off.
REFUSED: Final = "refused"
CUT_OFF: Final = "cut_off"
TOOL_DONE: Final = str(Outcome.DONE)
# Outcomes of calls that are failures of the tool.
TOOL_ERRORS: Final = (str(Outcome.FAILED), str(Outcome.TIMED_OUT), str(Outcome.UNKNOWN))
_REFUSALS: Final = frozenset({ErrorType.NOT_PERMITTED, ErrorType.BLOCKED, ErrorType.BUDGET, ErrorType.WITHDRAWN})


@attrs.frozen
class Measurement(Value):
    """A value of a metric at a time."""

    metric: str
    """Name of the metric, a key of `METRICS`."""

    labels: tuple[str, ...]
    """Values of its labels."""

    value: float
    """The value, in the unit of the metric."""

    at: float
    """Time, seconds since 1970."""


def measure_run(
    header: Header, events: Iterable[e.Event], *, after: int = 0, previous: Header | None = None
) -> tuple[Measurement, ...]:
    """Return the measurements of a run, oldest first.

    Each run has its own tokens, costs and calls, so that those of sub-agents are not counted twice. A fork has none for
    the events that it shares with the run that it was forked from.

    Args:
        header: Header of the run.
        events: Events of its journal, from the first on.
        after: Version of the run up to which measurements are left out.
        previous: Header of the run that it continues in its session, to find questions that are asked again. None: they
            are not looked for.
    """
    meter = _RunMeter(header)
    found: list[Measurement] = []
    if previous is not None and not after and is_asked_again(previous, header):
        found.append(Measurement(SIGNALS.name, (previous.agent, ASKED_AGAIN), 1.0, header.created_at))
    for event in events:
        measured = meter.take(event)
        if meter.run.version > max(after, header.forked_at):
            found += measured
    return tuple(found)


def measure_feedback(header: Header, feedback: Feedback) -> Measurement:
    """Return the measurement of feedback on a run: that of a judge is apart from those of people."""
    metric, labels = (JUDGE_RATINGS, (header.agent, feedback.judge)) if feedback.judge else (RATINGS, (header.agent,))
    return Measurement(metric.name, labels, float(feedback.rating), feedback.at)


def iter_costs(stored: StoredRun) -> Iterator[tuple[int, float, Purpose, str, Usage]]:
    """Yield the costs of a run, without those of the runs of its sub-agents.

    Each has the version of the run after its event, the time, the purpose, the model ("(tools)" for calls that cost
    money) and the usage. A fork has none for the events that it shares with the run that it was forked from.
    """
    header, own_model = stored.header, stored.header.fingerprint.model
    for version, event in enumerate(stored.events[header.forked_at :], header.forked_at + 1):
        if isinstance(event, e.Resumed) and event.fingerprint is not None:
            own_model = event.fingerprint.model
        for part in list_spending(event):
            if part.purpose is not Purpose.AGENT and (part.usage.tokens or part.usage.cost_usd):
                model = "(tools)" if part.purpose is Purpose.TOOL else part.model or own_model
                yield version, event.at, part.purpose, model, part.usage


class _RunMeter:
    """Folds the events of a run, and measures each."""

    def __init__(self, header: Header) -> None:
        self.run: Run[Any] = begin_run(header)
        self.waited_s = 0.0
        """Time so far in which the run waited for people or was paused, seconds."""

    def take(self, event: e.Event) -> list[Measurement]:
        """Apply an event, and return its measurements."""
        before, self.run = self.run, self.run.apply(event)
        return [*self._measure_gap(before, event), *self._measure_event(before, event), *self._measure_end(event)]

    def _build(self, metric: Metric, value: float, at: float, *labels: str) -> Measurement:
        return Measurement(metric.name, (self.run.header.agent, *labels), value, at)

    def _own_model(self) -> str:
        return (self.run.fingerprint or self.run.header.fingerprint).model

    def _measure_gap(self, before: Run[Any], event: e.Event) -> Iterator[Measurement]:
        if (gap := find_gap(before, event)) is None:
            return
        if gap.kind not in {QUEUE, INTERRUPTION}:
            self.waited_s += gap.duration_s
        yield self._build(WAITS, gap.duration_s, gap.ended_at, gap.kind)

    def _measure_event(self, before: Run[Any], event: e.Event) -> Iterator[Measurement]:
        model = getattr(event, "model", "") or self._own_model()
        for part in () if isinstance(event, e.ToolFinished | e.ChildReported) else list_spending(event):
            yield from self._measure_usage(part.usage, part.model or model, event.at)
        match event:
            case e.AnswerGiven() | e.AnswerDrafted() if event.answered_from is not None:
                return  # no model was asked
            case e.ToolsChosen() | e.AnswerGiven() | e.AnswerDrafted():
                yield from self._measure_reply(event, model)
            case e.ModelFaltered() | e.AttemptFailed():
                yield self._build(REQUESTS, event.took_s, event.at, model, "failed")
            case e.ToolFinished():
                yield from self._measure_call(event.result, event.at)
            case e.ApprovalGiven(arguments=str()) | e.ApprovalAsked(arguments=str()):
                yield self._build(SIGNALS, 1.0, event.at, EDITED)
            case e.LimitReached() | e.Failed():
                for entry in before.open:
                    if entry.phase is Phase.RUNNING:
                        yield self._build(TOOL_CALLS, 1.0, event.at, entry.call.name, CUT_OFF)

    def _measure_reply(
        self, event: e.ToolsChosen | e.AnswerGiven | e.AnswerDrafted, model: str
    ) -> Iterator[Measurement]:
        outcome = "cached" if event.usage.cached_replies else "done"
        yield self._build(REQUESTS, event.took_s, event.at, model, outcome)
        if event.served_model:
            yield self._build(OTHER_MODELS, 1.0, event.at, model, event.served_model)

    def _measure_usage(self, usage: Usage, model: str, at: float) -> Iterator[Measurement]:
        for direction, tokens in (("input", usage.input_tokens), ("output", usage.output_tokens)):
            if tokens:
                yield self._build(TOKENS, tokens, at, model, direction)
        if usage.cost_usd:
            yield self._build(COST, usage.cost_usd, at, model)
        if usage.unpriced:
            yield self._build(UNPRICED, usage.tokens, at, model)

    def _measure_call(self, result: ToolResult, at: float) -> Iterator[Measurement]:
        tool = UNKNOWN_TOOL if result.error_type is ErrorType.UNKNOWN_TOOL else result.tool
        outcome = REFUSED if result.error_type in _REFUSALS else str(result.outcome)
        yield self._build(TOOL_CALLS, 1.0, at, tool, outcome)
        if result.duration_s:
            yield self._build(TOOL_DURATION, result.duration_s, at, tool)
        for spending in result.spent:
            yield from self._measure_usage(spending.usage, spending.model, at)

    def _measure_end(self, event: e.Event) -> Iterator[Measurement]:
        run, header = self.run, self.run.header
        if not run.is_over or header.parent is not None:
            return
        yield self._build(RUNS, 1.0, event.at, header.agent_version, self._own_model(), str(run.stop_reason))
        if run.stop_reason is StopReason.CANCELLED:
            yield self._build(SIGNALS, 1.0, event.at, STOPPED)
        for _ in run.findings:
            yield self._build(SIGNALS, 1.0, event.at, FINDING)
        yield self._build(RUN_TURNS, run.turn, event.at)
        yield self._build(RUN_DURATION, max(0.0, event.at - header.created_at - self.waited_s), event.at)
        yield self._build(RUN_TOKENS, run.usage.tokens, event.at)
