"""Schedules: runs that workers start at recurring times, each once."""

from agentfsm.schedules.schedule import MissedPolicy, Schedule
from agentfsm.schedules.schedule_client import BackfilledRuns, Schedules

__all__ = ["BackfilledRuns", "MissedPolicy", "Schedule", "Schedules"]
