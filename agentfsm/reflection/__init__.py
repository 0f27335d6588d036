"""Judges: a second look at answers, or at the results of chosen tools, before the run goes on."""

from agentfsm.reflection.reflector import RUBRIC, Reflector

__all__ = ["RUBRIC", "Reflector"]
