"""Plans: a model plans the work once, and the steps run in parallel without a request for each."""

from agentfsm.core.plans import Plan, PlanStep, bind, ready
from agentfsm.planning.planner import Planner
from agentfsm.ports.policies import PlanAsk, PlanRequest

__all__ = ["Plan", "PlanAsk", "PlanRequest", "PlanStep", "Planner", "bind", "ready"]
