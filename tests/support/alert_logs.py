"""Measurements of tasks with which each alert fires, and of others with which it is silent."""

from __future__ import annotations

from agentfsm import Outcome, StopReason
from agentfsm.ports import Feedback
from agentfsm.telemetry.measurements import measure_feedback, measure_run
from agentfsm.telemetry.metrics_summary import MeasurementLog
from tests.support.recorded_tasks import record_task

HOUR = 3_600.0


def log_of(tasks, ratings=()):
    """Return the measurements of recorded tasks, and of ratings of the first."""
    tasks, log = list(tasks), MeasurementLog()
    for each in tasks:
        log.add(measure_run(each.header, each.events))
    log.add(measure_feedback(tasks[0].header, Feedback(rating=rating, at=HOUR)) for rating in ratings)
    return log


def tasks(count, **options):
    """Return tasks, spread over an hour."""
    return [record_task(number, number * HOUR / count, **options) for number in range(count)]


def mixed(good, bad, **options):
    """Return good tasks and others, in turn over an hour."""
    total = good + bad
    every = [options if number * bad % total < bad else {} for number in range(total)]
    return [record_task(number, number * HOUR / total, **each) for number, each in enumerate(every)]


def hourly(counts):
    """Return tasks with one call each, so many in each hour."""
    return [
        record_task(hour * 1000 + number, hour * HOUR + number * HOUR / count, turns=2)
        for hour, count in enumerate(counts)
        for number in range(count)
    ]


FIRING = {
    "task_success_rate": log_of(mixed(35, 5, failed=StopReason.MAX_TURNS)),
    "error_rate": log_of(mixed(37, 3, failed=StopReason.TIMEOUT)),
    "avg_rounds_per_task": log_of(tasks(12, turns=9)),
    "avg_latency_ms": log_of(tasks(12, seconds=16)),
    "avg_tokens_per_task": log_of(tasks(12, tokens=10_100)),
    "daily_cost_usd": log_of(tasks(12, usd=42)),
    "daily_cost_warning_usd": log_of(tasks(12, usd=34)),
    "over_cost_limit": log_of(mixed(30, 1, failed=StopReason.COST_BUDGET)),
    "tool_call_frequency": log_of(hourly([10] * 30 + [40])),
    "tool_error_rate": log_of(mixed(35, 5, turns=2, outcome=Outcome.FAILED) + tasks(30, turns=2)),
    "user_satisfaction": log_of(tasks(1), ratings=[3] * 10),
    "other_model_replies": log_of(mixed(30, 1, served="m-2026-11-20")),
}
FIRING["tool_error_rate"] = log_of(
    [record_task(n, n * 90.0, turns=2, outcome=Outcome.FAILED if n % 8 == 0 else Outcome.DONE) for n in range(40)]
)
SILENT = {
    "task_success_rate": [
        log_of(mixed(37, 3, failed=StopReason.MAX_TURNS)),
        log_of(tasks(19, failed=StopReason.GUARD)),
    ],
    "error_rate": [log_of(mixed(35, 5, failed=StopReason.MAX_TURNS)), log_of(tasks(30, failed=StopReason.CANCELLED))],
    "avg_rounds_per_task": [log_of(tasks(12, turns=8)), log_of(tasks(9, turns=20))],
    "avg_latency_ms": [log_of(tasks(12, seconds=14))],
    "avg_tokens_per_task": [log_of(tasks(12, tokens=9_900))],
    "daily_cost_usd": [log_of(tasks(12, usd=41))],
    "daily_cost_warning_usd": [log_of(tasks(12, usd=33))],
    "over_cost_limit": [log_of(mixed(30, 1, failed=StopReason.TOKEN_BUDGET))],
    # Three times the median is not more than that; a new tool has no median yet; few calls are no surge.
    "tool_call_frequency": [
        log_of(hourly([10] * 30 + [29])),
        log_of(hourly([1] * 20 + [40])),
        log_of(hourly([1] * 30 + [15])),
    ],
    "tool_error_rate": [
        log_of(
            [record_task(n, n * 90.0, turns=2, outcome=Outcome.REJECTED if n % 3 else Outcome.DONE) for n in range(90)]
        )
    ],
    # Nobody voted, or few people, or they are content.
    "user_satisfaction": [log_of(tasks(30)), log_of(tasks(1), ratings=[1] * 9), log_of(tasks(1), ratings=[4, 3] * 5)],
    "other_model_replies": [log_of(tasks(30))],
}
