"""The arguments of the commands: what is declared agrees with the functions and the values of the library."""

import argparse
from importlib import import_module
from inspect import signature
from typing import get_args

import attrs

from agentfsm.cli import parser
from agentfsm.evals import comparison, evaluation_runner, rubric_judge
from agentfsm.mcp.oauth import person_login
from agentfsm.mcp.server.service import ClientLimits
from agentfsm.releases import rollout_log
from agentfsm.schedules import schedule
from agentfsm.serve.rate_limits import RateLimits
from agentfsm.telemetry import costs, notifier


def list_functions(made):
    """Yield "module:function" of each command."""
    if (act := made.get_default("act")) is not None:
        yield act
    for each in made._actions:
        if isinstance(each, argparse._SubParsersAction):
            for inner in each.choices.values():
                yield from list_functions(inner)


def test_each_command_names_its_function():
    """Its module is imported only when it runs, so a name that does not exist would be found there."""
    named = [act.partition(":") for act in list_functions(parser.build_parser())]
    assert len(named) > 50
    for module, _, name in named:
        command = getattr(import_module(f"agentfsm.cli.commands.{module}"), name)
        assert [*signature(command).parameters] == ["args", "terminal"], name


def test_values_that_are_repeated_are_those_of_the_library():
    """Their modules are not imported for the parser."""
    assert schedule.DATE_PLACEHOLDER == parser.DATE_PLACEHOLDER
    assert get_args(schedule.MissedPolicy) == parser.MISSED_POLICIES
    assert costs.COST_GROUPS == parser.COST_GROUPS
    assert get_args(notifier.MessageForm) == parser.MESSAGE_FORMS
    assert rollout_log.UNIT_KINDS == parser.UNIT_KINDS
    assert evaluation_runner.RUNS == parser.EVALUATION_RUNS
    assert evaluation_runner.PARALLEL == parser.EVALUATIONS_PARALLEL
    assert rubric_judge.VOTES == parser.JUDGE_VOTES
    assert comparison.WORSE_BY == parser.WORSE_BY
    assert person_login.LOGIN_TIMEOUT_S == parser.LOGIN_TIMEOUT_S
    assert {*parser.CLIENT_LIMITS} <= {each.name for each in attrs.fields(ClientLimits)}
    assert {*parser.KEY_LIMITS} <= {each.name for each in attrs.fields(RateLimits)}
