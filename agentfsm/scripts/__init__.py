"""Code mode: a tool that runs scripts of the model, whose calls of other tools are calls of a run.

`Monty`, the default interpreter, needs the extra: `pip install agentfsm[monty]`.
"""

from agentfsm.scripts.cpython import CPython
from agentfsm.scripts.interpreter import Answer, Interpreter, ScriptCall, ScriptEnd, ScriptSource, ScriptStep
from agentfsm.scripts.monty import Monty
from agentfsm.scripts.script import Script

__all__ = [
    "Answer",
    "CPython",
    "Interpreter",
    "Monty",
    "Script",
    "ScriptCall",
    "ScriptEnd",
    "ScriptSource",
    "ScriptStep",
]
