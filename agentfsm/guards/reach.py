"""Whether guards can ever stop a call of an agent, for the checks before it goes live."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING

from agentfsm.core.events import GuardVerdict
from agentfsm.core.header import Header
from agentfsm.core.labels import DATA_LEVELS, EFFECT_LABELS, Label, LabelSource, ToolKind, join_labels
from agentfsm.guards.call_rules import LabelRule, ToolRule
from agentfsm.guards.guard import Guard
from agentfsm.guards.leak_rule import LeakRule
from agentfsm.ports.guards import GuardedCall, list_hosted_labels

if TYPE_CHECKING:
    from agentfsm.ports.guards import CallGuard, ToolTraits
    from agentfsm.tools.registry import ToolRegistry
    from agentfsm.tools.tool import Tool


def find_labels(tools: ToolRegistry, guards: Sequence[CallGuard]) -> frozenset[Label]:
    """Return the labels that runs of an agent with these tools may come to have.

    Those of prompts and inputs (`labels=`) are not known. If tools are not known yet, or agents are among them, all
    labels are possible.
    """
    if tools.sources or any(tool.kind is ToolKind.AGENT for tool in tools):
        return frozenset(Label)
    is_distrusted = any(guard.distrusts(tool.traits) for guard in guards for tool in tools)
    found = join_labels(*[tool.labels for tool in tools], *[list_hosted_labels(tool, guards) for tool in tools.hosted])
    return frozenset((*found, Label.UNTRUSTED) if is_distrusted else found)


def may_stop(guard: CallGuard, tool: ToolTraits, labels: Iterable[Label]) -> bool:
    """Return whether a guard asks about or refuses calls of a tool, in a run that has read and done everything.

    It is tried: the guard decides on a call without arguments, in a run with all these labels, no role, the lowest
    clearance and each quota used up. A guard that fails then may stop it.
    """
    if isinstance(guard, Guard):
        return any(may_stop(rule, tool, labels) for rule in guard.rules)
    if isinstance(guard, LeakRule):  # the texts of the run decide
        return guard.verdict is not GuardVerdict.ALLOW and guard.concerns(tool) and Label.UNTRUSTED in labels
    if isinstance(guard, ToolRule):
        return guard.verdict is not GuardVerdict.ALLOW and guard.concerns(tool)
    if any(screen.concerns(tool) for screen in getattr(guard, "screens", ())):
        return True
    call = GuardedCall(
        tool=tool,
        arguments=SimpleNamespace(),
        labels={label: LabelSource(label=label, run_id="any", name="prompt") for label in labels},
        counted={tool.name: sys.maxsize},
        header=Header(id="any", prompt=(), created_at=0.0, clearance=DATA_LEVELS[0]),
    )
    try:
        decision = guard.decide(call)
    except Exception:  # noqa: BLE001  a rule of a user that needs the arguments
        return True
    return decision is not None and decision.verdict is not GuardVerdict.ALLOW


def explain_idle_guards(guards: Iterable[CallGuard], tools: ToolRegistry) -> str:
    """Return the reason why guards never stop a call of the tools that may change something; empty if they may.

    Empty also without guards, and if a person approves or answers all calls of such tools.
    """
    rules, acting = list(guards), [tool for tool in tools if _acts_alone(tool)]
    known = find_labels(tools, rules)
    if not acting or not rules or any(may_stop(rule, tool.traits, known) for rule in rules for tool in acting):
        return ""
    needed = {label for rule in iter_rules(rules) if isinstance(rule, LabelRule) for label in rule.labels}
    missing = [label for label in join_labels(needed) if label not in known]
    names = ", ".join(tool.name for tool in acting)
    if not missing:
        return f"no rule of the guards is about {names}"
    effects, data = EFFECT_LABELS.intersection(missing), [label for label in missing if label not in EFFECT_LABELS]
    lacks = " or ".join(
        [
            *(["does anything that is " + " or ".join(sorted(effects))] if effects else []),
            *(["reads anything that is " + " or ".join(data)] if data else []),
        ]
    )
    return f"the guards never ask about {names}: no tool declares that it {lacks}"


def _acts_alone(tool: Tool[..., object]) -> bool:
    """Return whether calls of a tool may change something or send something out without a person."""
    if tool.requires_approval is not False or tool.external:
        return False
    return bool(tool.effect_labels) or not (tool.read_only or tool.harmless or tool.kind is ToolKind.AGENT)


def iter_rules(guards: Iterable[CallGuard]) -> list[CallGuard]:
    """Return guards and, of each that is a set of rules, the rules."""
    found: list[CallGuard] = []
    for guard in guards:
        found += [guard, *(iter_rules(guard.rules) if isinstance(guard, Guard) else ())]
    return found
