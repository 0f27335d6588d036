"""Judges: a second look at answers, or at the results of chosen tools, before the run goes on."""

from agentfsm.core.events import Action, Score, Verdict
from agentfsm.ports.policies import Judge, JudgeAsk
from agentfsm.reflection.reflector import RUBRIC, Reflector

__all__ = ["RUBRIC", "Action", "Judge", "JudgeAsk", "Reflector", "Score", "Verdict"]
