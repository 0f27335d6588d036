"""Flows: steps that a program orders, run like the steps of a plan, with agents where judgement is needed."""

from agentfsm.flow.agent_steps import agent_step
from agentfsm.flow.each_step import each
from agentfsm.flow.flow import Flow
from agentfsm.flow.flow_plan import StepStatus
from agentfsm.flow.steps import Step, step
from agentfsm.flow.until_step import until

__all__ = ["Flow", "Step", "StepStatus", "agent_step", "each", "step", "until"]
