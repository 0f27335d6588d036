"""Prompts as versioned files: variables, activation with roll-back, assembly within a budget, tests and a linter."""

from agentfsm.prompts.assembly import AssembledPrompt, Layer, ShortenedLayer, assemble, compose, shorten_text
from agentfsm.prompts.assertions import (
    ReplyCheck,
    contains,
    field_in,
    fits_schema,
    has_field,
    json_valid,
    matches,
    max_tokens,
    no_field,
    not_contains,
    not_matches,
)
from agentfsm.prompts.evaluation import (
    PromptReport,
    PromptTestResult,
    find_failures,
    wilson_interval,
)
from agentfsm.prompts.exits import Clarify, Refuse, ScratchpadReply, split_scratchpad, take_action
from agentfsm.prompts.folder import Activation, Prompts
from agentfsm.prompts.prompt_lint import PromptFinding, lint_prompt, lint_prompts
from agentfsm.prompts.template import (
    LayerKind,
    PromptTemplate,
    PromptTest,
    RenderedPrompt,
    Variable,
    VariableKind,
)

__all__ = [
    "Activation",
    "AssembledPrompt",
    "Clarify",
    "Layer",
    "LayerKind",
    "PromptFinding",
    "PromptReport",
    "PromptTemplate",
    "PromptTest",
    "PromptTestResult",
    "Prompts",
    "Refuse",
    "RenderedPrompt",
    "ReplyCheck",
    "ScratchpadReply",
    "ShortenedLayer",
    "Variable",
    "VariableKind",
    "assemble",
    "compose",
    "contains",
    "field_in",
    "find_failures",
    "fits_schema",
    "has_field",
    "json_valid",
    "lint_prompt",
    "lint_prompts",
    "matches",
    "max_tokens",
    "no_field",
    "not_contains",
    "not_matches",
    "shorten_text",
    "split_scratchpad",
    "take_action",
    "wilson_interval",
]
