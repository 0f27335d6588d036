"""The extras that an agent uses by default. No other file of the core names an extra; each is loaded on demand."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from agentfsm.agents.validation import as_messages
from agentfsm.core.errors import MisuseError
from agentfsm.core.messages import check_history

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from agentfsm.agents.runnable_agent import RunnableAgent
    from agentfsm.agents.worker import RunStarter
    from agentfsm.core.header import Header
    from agentfsm.core.messages import Message
    from agentfsm.core.run import Run
    from agentfsm.engine.driver import Driver
    from agentfsm.engine.execution.config import DeferredInstructions
    from agentfsm.engine.execution.options import ExecutionOptions
    from agentfsm.ports.model import Model
    from agentfsm.tools.run_context import RunContext


def resolve_model(model: Model | str) -> Model:
    """Return the model, or the one that a name such as `"openai:gpt-5"` stands for."""
    found: Model = import_module("agentfsm.models.model_names").resolve_model(model)
    return found


def read_history(messages: Sequence[Message] | Sequence[Mapping[str, Any]]) -> tuple[Message, ...]:
    """Return a conversation as a history of a run: messages, or dicts as in chat completions, which need the SDK.

    Raises:
        MisuseError: if a message has another form, or there are none.
    """
    given: tuple[Any, ...] = as_messages(messages)  # type: ignore[arg-type]  # dicts are converted below
    if any(isinstance(each, Mapping) for each in given):
        given = import_module("agentfsm.models.openai.conversion").from_openai(given)
    check_history(given)
    if not given:
        raise MisuseError("messages=[]: give the messages of a conversation, oldest first")
    return given


def read_instructions(given: object) -> tuple[Callable[[Header], Header] | None, DeferredInstructions | None]:
    """Return the function that adds instructions to the header of a run at its start, or else the one that does later.

    Functions that are async or take the context are asked later.
    """
    if type(given) is str:
        return None, None
    resolution = import_module("agentfsm.prompts.resolution")
    source = resolution.find_source("instructions", given)

    def resolve(header: Header) -> Header:
        found: Header = resolution.set_instructions(header, source.read(header))
        return found

    async def resolve_later(header: Header, context: RunContext[Any]) -> Header:
        found: Header = resolution.set_instructions(header, await source.read_with(header, context))
        return found

    return (None, resolve_later) if source.is_deferred else (resolve, None)


def read_reminder(given: object) -> Callable[[Run[Any], RunContext[Any]], Awaitable[str]] | None:
    """Return the function that returns the reminder for a run; None if there is none."""
    if given == "":
        return None
    read: Callable[[Run[Any], RunContext[Any]], Awaitable[str]]
    read = import_module("agentfsm.prompts.resolution").find_source("reminder", given).read_with
    return read


def build_mcp_service(agent: RunnableAgent, **options: Any) -> Any:
    """Return the agent as an MCP server, an `MCPService`."""
    return import_module("agentfsm.mcp.server.service").build_service(agent, **options)


def create_due_runs(agent: RunnableAgent, choose: Any = None) -> RunStarter:
    """Return the part of a worker that starts the runs of schedules, a `DueRuns`; `choose` is its `AgentChoice`."""
    starter: RunStarter = import_module("agentfsm.schedules.due_runs").DueRuns(agent, choose)
    return starter


def publish_deltas(driver: Driver[Any], url: str) -> Callable[[Run[Any], ExecutionOptions], Awaitable[Run[Any]]]:
    """Return the driver's `run_until_blocked`, which also passes the text that models write to a Redis."""
    deltas = import_module("agentfsm.agents.deltas")
    relay = deltas.DeltaRelay(url)

    async def execute(run: Run[Any], options: ExecutionOptions) -> Run[Any]:
        listen = deltas.pass_deltas(run.id, relay.publish)
        return await driver.run_until_blocked(run, options._replace(on_event=listen))

    return execute
