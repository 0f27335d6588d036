"""The arguments of the commands: what is declared agrees with the functions and the values of the library."""

import argparse
from inspect import signature
from typing import get_args

import attrs
import pytest

from agentfsm.cli import arguments, parser
from agentfsm.cli.command_table import COMMANDS
from agentfsm.cli.commands import key_files, mcp_login, mcp_serve
from agentfsm.core.errors import MisuseError
from agentfsm.mcp.oauth import person_login
from agentfsm.mcp.server.service import ClientLimits
from agentfsm.serve.rate_limits import RateLimits
from agentfsm.telemetry import notifier


def list_functions(made):
    """Yield the function of each command."""
    if (act := made.get_default("act")) is not None:
        yield act
    for each in made._actions:
        if isinstance(each, argparse._SubParsersAction):
            for inner in each.choices.values():
                yield from list_functions(inner)


def test_each_command_has_its_function_and_is_in_the_table():
    """The table says which module adds it; only that one is imported when it is called."""
    functions = [*list_functions(parser.build_parser(*COMMANDS))]
    assert len(functions) > 50
    for each in functions:
        assert [*signature(each).parameters] == ["args", "terminal"], each
    for name in COMMANDS:
        (made,) = [each for each in parser.build_parser(name)._actions if isinstance(each, argparse._SubParsersAction)]
        assert name in made.choices


def test_a_command_that_does_not_exist(here):
    """The nearest name is suggested, also in a group."""
    here("shwo", code=2)
    assert "there is no command 'shwo' (did you mean 'show'?): `agentfsm --help` lists them" in here.err
    here("memory", "serch", code=2)
    assert "(did you mean 'search'?)" in here.err


def test_the_address_of_a_server():
    """`--host` and `--port` replace their part of `--http`, or of the default."""
    places = {
        "serve shop:agent --port 9000": "127.0.0.1:9000",
        "serve shop:agent --host 0.0.0.0": "0.0.0.0:8000",
        "serve shop:agent --host [::1] --port 0": "[::1]:0",
        "studio --port 9000": "127.0.0.1:9000",
        "mcp serve shop:agent": None,
        "mcp serve shop:agent --http": "127.0.0.1:8000",
        "mcp serve shop:agent --port 9000": "127.0.0.1:9000",
    }
    made = parser.build_parser("serve", "mcp")
    assert {line: made.parse_args(line.split()).http for line in places} == places
    for wrong in ("--port x", "--port 70000", "--host="):
        with pytest.raises(MisuseError, match="is not of the form HOST:PORT"):
            made.parse_args(["serve", "shop:agent", *wrong.split()])


def test_values_that_are_repeated_are_those_of_the_library():
    """Their modules are not imported for the options."""
    assert get_args(notifier.MessageForm) == arguments.MESSAGE_FORMS
    assert person_login.LOGIN_TIMEOUT_S == mcp_login.LOGIN_TIMEOUT_S
    assert {*mcp_serve.CLIENT_LIMITS} <= {each.name for each in attrs.fields(ClientLimits)}
    assert {*key_files.KEY_LIMITS} <= {each.name for each in attrs.fields(RateLimits)}


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
