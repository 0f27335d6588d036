"""Flows: steps that a program orders, run like the steps of a plan, with agents where judgement is needed."""

from agentfsm.flow.flow import Flow
from agentfsm.flow.flow_plan import StepStatus
from agentfsm.flow.steps import Step, agent_step, step

__all__ = ["Flow", "Step", "StepStatus", "agent_step", "step"]
