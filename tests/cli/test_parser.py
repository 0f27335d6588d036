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


def test_errors_of_the_library_name_options():
    """Of the command that has them; arguments of calls in the user's code stay."""
    usage = "usage: agentfsm x [--root-path PATH] [--allow-origin O] [--alerts-private] [--session S] [--name N]"
    texts = {
        "root_path='x': give a path": "--root-path 'x': give a path",
        "origins='x/': give an origin": "--allow-origin 'x/': give an origin",
        "set allow_private=True if it is yours": "set --alerts-private if it is yours",
        "leave out name=, or give after= and session=": "leave out --name, or give after= and --session",
        "give Agent(model(1), name='a')": "give Agent(model(1), name='a')",
        "write Agent(...) (name='a')": "write Agent(...) (--name 'a')",
    }
    assert {text: parser.spell_options(text, usage) for text in texts} == texts


def test_an_error_of_a_command_names_its_options(here):
    """Where the library checks what the parser does not."""
    (here.folder / "shop.py").write_text(
        "from agentfsm import Agent\nfrom agentfsm.testing import ScriptedModel\n"
        "agent = Agent(ScriptedModel('hi'), name='shop')\n"
    )
    here("serve", "shop:agent", "--root-path", "agents/", code=2)
    assert "agentfsm: --root-path 'agents/': give a path" in here.err
