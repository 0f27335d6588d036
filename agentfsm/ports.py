"""What the engine needs from the world, as Protocols: adapters implement them, the engine never knows which.

A Protocol here may be subclassed for its defaults: a model of your own is a class with a `name` and a `reply`.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import attrs

from agentfsm.core.inbox import InboxItem, Posted
from agentfsm.core.limits import StopReason
from agentfsm.core.machine import State
from agentfsm.core.messages import JSON, Message, Usage
from agentfsm.core.run import Header, Run

if TYPE_CHECKING:
    from agentfsm.core.events import Event
    from agentfsm.tally import Tally


class FinishReason(StrEnum):
    """Why the model stopped talking."""

    STOP = "stop"
    TOOL_CALLS = "tool_calls"
    LENGTH = "length"
    CONTENT_FILTER = "content_filter"
    REFUSAL = "refusal"


def _plain(value: Any) -> Any:
    """Return a schema as dicts and lists, which json writes and a caller may change; it may hold read-only views."""
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


@attrs.frozen(kw_only=True)
class ToolDefinition:
    """A tool as the model is told of it."""

    name: str
    description: str
    parameters: Mapping[str, JSON]
    # A JSON Schema of type "object".
    strict: bool = False
    # Whether the provider shall hold the model to the schema while it writes.

    def openai(self) -> dict[str, Any]:
        """Return a copy as OpenAI's chat completions take it, and whatever speaks like them."""
        return {"type": "function", "function": self._told("parameters")}

    def anthropic(self) -> dict[str, Any]:
        """Return a copy as Anthropic's messages take it."""
        return self._told("input_schema")

    def _told(self, schema: str) -> dict[str, Any]:
        told = {"name": self.name, "description": self.description, schema: _plain(self.parameters)}
        # Only where it is set: servers that speak like these two refuse a field that they do not know.
        return {**told, "strict": True} if self.strict else told


@attrs.frozen(kw_only=True)
class Settings:
    """How the model is asked. What is None is not sent."""

    temperature: float | None = None
    max_tokens: int | None = None
    # The largest answer, tokens.
    tool_choice: str | None = None
    # "auto", "none", "required", or the name of one tool.
    parallel_tool_calls: bool | None = None
    # Whether a reply may hold several calls; False also runs them one by one.
    stream: bool = False
    # Whether to ask for a streamed reply also where nobody watches, so that read-only calls start early.
    seed: int | None = None
    stop: tuple[str, ...] = ()
    extra_body: Mapping[str, JSON] = attrs.field(factory=dict)
    # Further fields of the request, as the provider names them.


@attrs.frozen(kw_only=True)
class Request:
    """One question to a model."""

    instructions: str
    # The system prompt; may be empty.
    messages: Sequence[Message]
    # A valid history: each call has its result.
    tools: Sequence[ToolDefinition] = ()
    settings: Settings = Settings()
    timeout_s: float = 60.0
    # The longest silence, seconds, after which the model gives up; a stream that goes on may take longer.


@attrs.frozen(kw_only=True)
class ProposedCall:
    """A tool call as the provider wrote it."""

    id: str
    name: str
    arguments: str
    # The text as it arrived; whether it is JSON is for the engine to find out.


@attrs.frozen(kw_only=True)
class Reply:
    """What the model answered, whole."""

    text: str = ""
    calls: tuple[ProposedCall, ...] = ()
    finish_reason: FinishReason = FinishReason.STOP
    usage: Usage | None = None
    # None where the provider did not say: the engine then counts, and marks the figures as estimated.


@attrs.frozen(kw_only=True)
class TextChunk:
    """A piece of the answer's text, as it streams in."""

    text: str


@attrs.frozen(kw_only=True)
class CallChunk:
    """A piece of a tool call, as it streams in."""

    index: int
    # Which call of the reply, from 0.
    name: str = ""
    # The tool's name, with the first piece.
    arguments: str = ""
    # The next piece of the arguments' JSON text.


@attrs.frozen(kw_only=True)
class FinishChunk:
    """The model has said why it stops; what follows is its bill. A model that does not tell may leave it out."""

    reason: FinishReason


Chunk: TypeAlias = TextChunk | CallChunk | FinishChunk
Emit: TypeAlias = Callable[[Chunk], None]


class Model(Protocol):
    """A language model. `name` and `reply` are all that a model of your own has to have."""

    name: str
    # As the provider knows it, for example "gpt-4o".
    window_tokens: int = 128_000
    # The context window: input and output together, tokens.

    async def reply(self, request: Request, emit: Emit | None = None) -> Reply:
        """Ask once, without retries.

        Args:
            request: The whole question.
            emit: Where given, the reply is streamed: it is called with each chunk, in order, and never blocks.

        Returns:
            The whole reply, streamed or not.

        Raises:
            ModelUnavailableError: when asking again may help (429, 5xx, time-out, connection lost).
            ModelReplyError: when the reply cannot be used.
            ContextTooLongError: when the request is too large.
            ModelError: when the provider refused the request for good (400, 401, 403, 404).
        """
        ...

    def cost_usd(self, usage: Usage) -> float | None:  # noqa: ARG002  a default for those that know no prices
        """US dollars for this usage, or None where no price is known."""
        return None

    async def aclose(self) -> None:
        """Close what the model holds open; the default holds nothing."""
        return


class TokenCounter(Protocol):
    """Counts tokens of text."""

    encoding: str
    # The vocabulary's name, for example "o200k_base", or what the estimate is made of.
    exact: bool
    # False for an estimate.

    def count(self, text: str) -> int:
        """Tokens in the text, 0 or more; never raises for any str."""
        ...


class ContextPolicy(Protocol):
    """Decides which messages a request shows, once the history outgrows the window."""

    def fits(self, tally: Tally, start: int, budget_tokens: int) -> bool:
        """Tell whether a request whose window starts at `start` fits into the budget."""
        ...

    def start(self, messages: Sequence[Message], tally: Tally, current: int, budget_tokens: int) -> int:
        """Return where the window of the next request starts.

        Args:
            messages: The whole history, in which each call has its results right behind it.
            tally: The count of exactly these messages.
            current: Where it starts now.
            budget_tokens: What a request may hold besides instructions, tools and answer, tokens.

        Returns:
            `current` or more, and never the index of a tool result.
        """
        ...


@attrs.frozen(kw_only=True)
class Selection:
    """Which tools a model is offered, and how they were chosen."""

    tools: tuple[str, ...]
    # Names, in the order of registration: a request that offers the same tools again begins with the same bytes.
    how: str
    # "all", "similarity", "two_stage" or a word of your own; after a colon, what went otherwise than planned.
    usage: Usage = Usage()
    # What choosing cost.


class Scorer(Protocol):
    """Tells how well texts fit a query."""

    async def scores(self, query: str, texts: Sequence[str]) -> Sequence[float]:
        """Return one number per text, in their order; higher is better, and the scale is free.

        Args:
            query: What is looked for, in the user's words.
            texts: One per thing. The first line is its name; they stay the same from one query to the next.

        Raises:
            Exception: of any kind, when it cannot tell; whoever asked then does without.
        """
        ...


Ask: TypeAlias = Callable[[str, str], Awaitable[tuple[str, Usage]]]
# Asks the agent's own model, without tools: instructions and question in, answer and its cost out. Raises ModelError.


class ToolSelector(Protocol):
    """Chooses the tools that a model is offered, once for each input of a user."""

    def wants(self, count: int) -> bool:
        """Tell whether so many tools have to be chosen among; where not, all are offered and `select` is not called."""
        ...

    async def select(self, task: str, tools: Sequence[ToolDefinition], ask: Ask) -> Selection:
        """Choose.

        Args:
            task: What the user wants, of any length.
            tools: All that there are, in the order of registration.
            ask: For choices that take a model's judgement; each call costs.

        Returns:
            Names of these tools, in their order.

        Raises:
            MisuseError: when it is set up wrongly. What the world does to it must not raise.
        """
        ...


class Clock(Protocol):
    """Where the engine reads the time."""

    def now(self) -> float:
        """Seconds since 1970, for what is shown to people."""
        ...

    def monotonic(self) -> float:
        """Seconds since some moment, for durations; never goes back."""
        ...


class SystemClock(Clock):
    """The machine's own clocks."""

    def now(self) -> float:
        """Seconds since 1970."""
        return time.time()

    def monotonic(self) -> float:
        """Seconds since some moment."""
        return time.monotonic()


@attrs.define(eq=False, kw_only=True)
class Lease:
    """The right to append to one run, until it is released, lost or dropped. A store keeps it alive by itself."""

    run_id: str
    token: int
    # The fencing token: grows with each change of owner, and is checked inside every append.
    version: int
    # How many events the journal held when the lease was taken.
    newest: int = 0
    # The newest inbox number that the store has told of.
    cancelled: bool = False
    # Whether somebody asked for the end of the run.
    lost: bool = False
    # Whether another owner has taken over.
    wake: Callable[[], None] | None = None
    # Called, from any thread, when `cancelled` or `lost` turns true.


@attrs.frozen(kw_only=True)
class Stored:
    """What a store holds of one run."""

    header: Header
    events: tuple[Event, ...]
    # Those after the version asked for, oldest first.


@attrs.frozen(kw_only=True)
class Summary:
    """A line of a list of runs."""

    id: str
    agent: str
    session: str | None
    state: State
    stop_reason: StopReason | None
    waiting: bool
    # Whether a person has to decide.
    driven: bool
    # Whether somebody holds its lease now.
    turn: int
    version: int
    tokens: int
    created_at: float
    # Seconds since 1970, as `updated_at`.
    updated_at: float
    prompt: str
    # The first 200 characters.


class Commit(Protocol):
    """An append on its way to the disk."""

    @property
    def is_settled(self) -> bool:
        """Whether its outcome is known, so that `wait` does not wait."""
        ...

    async def wait(self) -> bool:
        """Return when it is durable: True if it was written, False if a final append met an inbox that is not empty.

        Cancelling the wait does not undo the append.

        Raises:
            LeaseLostError: when another owner has taken the run.
            ConflictError: when the journal is at another version.
            StoreError: when it could not be written.
        """
        ...


class Store(Protocol):
    """Where journals live. Appends of one run are written in the order in which they were asked for."""

    async def create(self, header: Header) -> tuple[Header, Lease]:
        """Insert the run if its id is new, and take its lease.

        Of a run in a session the header that is stored names, in `after`, the session's last run.

        Returns:
            The header as it stands in the store, and the lease; its `version` tells whether the run existed.

        Raises:
            ConflictError: when the id stands for another prompt, somebody else drives it, or its session has a run
                that is not over.
        """
        ...

    async def lease(self, run_id: str) -> Lease:
        """Take the lease of a run that exists.

        Raises:
            RunNotFoundError: when there is none.
            LeaseHeldError: when somebody else has it.
        """
        ...

    def append(
        self,
        lease: Lease,
        run: Run,
        events: Sequence[Event],
        *,
        taken: Sequence[int] = (),
        final: bool = False,
    ) -> Commit:
        """Write events and strike inbox rows, in one transaction; returns before it is durable.

        Args:
            lease: Checked in the transaction.
            run: The run after the events; the journal must be at `run.version - len(events)`.
            events: At least one.
            taken: The numbers of the inbox rows that the events took in.
            final: Write only if the inbox holds nothing else.
        """
        ...

    def release(self, lease: Lease) -> Commit:
        """Give the lease back, after the appends before; returns at once, and is harmless when the lease is lost."""
        ...

    async def post(self, run_id: str, key: str, item: InboxItem) -> Posted:
        """Put an item into the inbox, durably. The first post of a key wins, and the winner is returned.

        Raises:
            RunNotFoundError: when there is no such run.
            ConflictError: when it is over.
        """
        ...

    async def inbox(self, run_id: str) -> tuple[Posted, ...]:
        """Return the rows that are not taken yet, oldest first."""
        ...

    async def read(self, run_id: str, after: int = 0) -> Stored:
        """Return the header and the events after that version.

        Raises:
            RunNotFoundError, CorruptError, TooNewError: as they say.
        """
        ...

    async def runs(self, *, limit: int = 100, session: str | None = None) -> tuple[Summary, ...]:
        """Return the newest runs, newest first."""
        ...

    async def delete(self, run_id: str) -> None:
        """Remove a run that nobody drives, with its inbox."""
        ...

    async def aclose(self) -> None:
        """Close what is open; appends on their way are written first."""
        ...
