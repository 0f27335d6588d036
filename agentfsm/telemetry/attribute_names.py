"""Names of spans' attributes: those of OpenTelemetry's semantic conventions for generative AI, and our own.

The conventions are in development and change. The names here are those of the repository
open-telemetry/semantic-conventions-genai, as read in November 2026.
"""

from __future__ import annotations

from typing import Final

# The day on which the conventions were read.
READ_ON: Final = "2026-11"

OPERATION: Final = "gen_ai.operation.name"
AGENT_NAME: Final = "gen_ai.agent.name"
AGENT_VERSION: Final = "gen_ai.agent.version"
CONVERSATION: Final = "gen_ai.conversation.id"
REQUEST_MODEL: Final = "gen_ai.request.model"
RESPONSE_MODEL: Final = "gen_ai.response.model"
INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
CACHED_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"
CACHE_WRITE_TOKENS: Final = "gen_ai.usage.cache_creation.input_tokens"
REASONING_TOKENS: Final = "gen_ai.usage.reasoning.output_tokens"
INPUT_MESSAGES: Final = "gen_ai.input.messages"
OUTPUT_MESSAGES: Final = "gen_ai.output.messages"
TOOL_NAME: Final = "gen_ai.tool.name"
TOOL_CALL_ID: Final = "gen_ai.tool.call.id"
TOOL_TYPE: Final = "gen_ai.tool.type"
TOOL_ARGUMENTS: Final = "gen_ai.tool.call.arguments"
TOOL_RESULT: Final = "gen_ai.tool.call.result"
ERROR_TYPE: Final = "error.type"
USER: Final = "user.id"

# Operations.
INVOKE_AGENT: Final = "invoke_agent"
CHAT: Final = "chat"
EXECUTE_TOOL: Final = "execute_tool"
PLAN: Final = "plan"
SEARCH_MEMORY: Final = "search_memory"
REPEAT_ANSWER: Final = "repeat_answer"

# Our own, for what the conventions do not name.
RUN: Final = "agentfsm.run.id"
VERSION: Final = "agentfsm.run.version"
TURN: Final = "agentfsm.turn"
TURNS: Final = "agentfsm.turns"
STATE: Final = "agentfsm.run.state"
STOP_REASON: Final = "agentfsm.run.stop_reason"
ACTIVE_S: Final = "agentfsm.run.active_seconds"
TOOL_CALLS: Final = "agentfsm.run.tool_calls"
COST: Final = "agentfsm.cost_usd"
PURPOSE: Final = "agentfsm.purpose"
DECISION: Final = "agentfsm.decision"
TIER: Final = "agentfsm.tier"
TIER_REASON: Final = "agentfsm.tier.reason"
CACHED_REPLIES: Final = "agentfsm.cached_replies"
ANSWERED_FROM: Final = "agentfsm.answered_from"
OUTCOME: Final = "agentfsm.tool.outcome"
ATTEMPTS: Final = "agentfsm.tool.attempts"
KEY: Final = "agentfsm.tool.idempotency_key"
WAIT: Final = "agentfsm.wait"
EVENT: Final = "agentfsm.event"
PROMPTS: Final = "agentfsm.prompts"
RELEASE: Final = "agentfsm.release"
ARMS: Final = "agentfsm.arms"
TENANT: Final = "agentfsm.tenant"
LABELS: Final = "agentfsm.labels"
AFTER: Final = "agentfsm.run.after"
TARGET: Final = "agentfsm.target"
