"""Schedules: runs that workers start at recurring times, each once."""

from agentfsm.schedules.client import BackfilledRuns, Schedules
from agentfsm.schedules.schedule import MissedPolicy, Schedule

__all__ = ["BackfilledRuns", "MissedPolicy", "Schedule", "Schedules"]
