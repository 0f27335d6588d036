"""What the engine needs from the world, as Protocols: adapters implement them, the engine never knows which.

A Protocol here may be subclassed for its defaults: a model of your own is a subclass of `Model` with a `name` and a
`reply`.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeAlias

import attrs

from agentfsm.core.errors import LeaseLostError, MisuseError
from agentfsm.core.inbox import InboxItem, PostedItem
from agentfsm.core.limits import StopReason
from agentfsm.core.machine import State
from agentfsm.core.messages import JSON, Message, NativeReply, Part, Usage
from agentfsm.core.run import Header, Run
from agentfsm.core.settings import DEFAULT_SETTINGS, Settings
from agentfsm.core.value import Value

if TYPE_CHECKING:
    from agentfsm.core.events import Event
    from agentfsm.core.verdict import Verdict
    from agentfsm.ports.context import CompactionBudget, MessageGroup


# What follows "e.g." is small, what follows a sentence is not.
_FIRST_SENTENCE: Final = re.compile(r".+?(?:[。！？]|[.!?](?=\s+[^\sa-z]|$)|$)")  # noqa: RUF001  Chinese ends sentences so
# Characters of a sentence in a summary, about 50 tokens: somebody else's tool may say all it has to say in one.
SENTENCE_CHARS: Final = 200
# Characters of the names of parameters in a summary: some ten names.
NAMES_CHARS: Final = 120


class FinishReason(StrEnum):
    """Why the model stopped talking."""

    STOP = "stop"
    TOOL_CALLS = "tool_calls"
    LENGTH = "length"
    CONTENT_FILTER = "content_filter"
    REFUSAL = "refusal"


def to_mutable_json(value: Any) -> Any:
    """Return a schema as dicts and lists, which json writes and a caller may change; it may hold read-only views."""
    if isinstance(value, Mapping):
        return {key: to_mutable_json(each) for key, each in value.items()}
    return [to_mutable_json(each) for each in value] if isinstance(value, list | tuple) else value


@attrs.frozen(kw_only=True)
class ToolDefinition(Value):
    """A tool as the model is told of it."""

    name: str
    description: str
    parameters: Mapping[str, JSON]
    # A JSON Schema of type "object".
    strict: bool = False
    # Whether the provider shall hold the model to the schema while it writes.

    @property
    def summary(self) -> str:
        """One line, as `name(city, unit?): First sentence.`: what may be left out is marked."""
        schema: Mapping[str, Any] = self.parameters
        named, needed = schema.get("properties"), schema.get("required") or ()
        names = [name if name in needed else f"{name}?" for name in named] if isinstance(named, Mapping) else []
        paragraph = " ".join(self.description.strip().partition("\n\n")[0].split())
        sentence = found[0] if (found := _FIRST_SENTENCE.match(paragraph)) else ""
        line = f"{self.name}({_truncate(', '.join(names), NAMES_CHARS)}): {_truncate(sentence, SENTENCE_CHARS)}"
        # A name out of somebody else's schema may hold a line break.
        return " ".join(line.rstrip(": ").split())

    def openai(self) -> dict[str, Any]:
        """Return a copy as OpenAI's chat completions take it, and whatever speaks like them."""
        return {"type": "function", "function": self._to_dict("parameters")}

    def anthropic(self) -> dict[str, Any]:
        """Return a copy as Anthropic's messages take it."""
        return self._to_dict("input_schema")

    def _to_dict(self, schema: str) -> dict[str, Any]:
        told = {"name": self.name, "description": self.description, schema: to_mutable_json(self.parameters)}
        # Only where it is set: servers that speak like these two refuse a field that they do not know.
        return {**told, "strict": True} if self.strict else told


def _truncate(text: str, chars: int) -> str:
    return text if len(text) <= chars else f"{text[:chars]}..."


class OutputMode(StrEnum):
    """How a model is held to the form of an answer."""

    SCHEMA = "schema"
    # The provider holds the model to a JSON Schema while it writes.
    TOOL = "tool"
    # The answer is the arguments of a tool.
    JSON = "json"
    # The provider holds the model to JSON, and the instructions tell the schema.
    PROMPT = "prompt"
    # The instructions tell the schema.


@attrs.frozen(kw_only=True)
class OutputForm(Value):
    """The form that an answer shall have, where the provider is to see to it."""

    name: str
    # Of the schema: 1 to 64 letters, digits, "_" or "-".
    schema: Mapping[str, JSON] | None
    # A JSON Schema of type "object", closed and with all properties required; None for any JSON object.


@attrs.frozen(kw_only=True)
class Request(Value):
    """One question to a model."""

    instructions: str
    # The system prompt; may be empty.
    messages: Sequence[Message]
    # A valid history: each call has its result.
    tools: Sequence[ToolDefinition] = ()
    settings: Settings = DEFAULT_SETTINGS
    output: OutputForm | None = None
    # The form of the answer, for modes SCHEMA and JSON.
    timeout_s: float = 60.0
    # The longest silence, seconds, after which the model gives up; a stream that goes on may take longer.


@attrs.frozen(kw_only=True)
class ProposedCall(Value):
    """A tool call as the provider wrote it."""

    id: str
    name: str
    arguments: str
    # The text as it arrived; whether it is JSON is for the engine to find out.


@attrs.frozen(kw_only=True)
class Reply(Value):
    """What the model answered, whole."""

    text: str = ""
    calls: tuple[ProposedCall, ...] = ()
    finish_reason: FinishReason = FinishReason.STOP
    usage: Usage | None = None
    # None where the provider did not say: the engine then counts, and marks the figures as estimated.
    native: NativeReply | None = None
    # What this provider wants back beside text and calls, such as its thinking; it goes into the message.
    model: str = ""
    # The name of the model that answered, where it is one of several; empty for the one that was asked.


@attrs.frozen
class TextChunk(Value):
    """A piece of the answer's text, as it streams in."""

    text: str
    # Its only field, and so given without its name: that takes two thirds of the time, for each token of a reply.


@attrs.frozen(kw_only=True)
class CallChunk(Value):
    """A piece of a tool call, as it streams in."""

    index: int
    # Which call of the reply, from 0.
    name: str = ""
    # The tool's name, with the first piece.
    arguments: str = ""
    # The next piece of the arguments' JSON text.


@attrs.frozen(kw_only=True)
class FinishChunk(Value):
    """The model has said why it stops; what follows is its bill. A model that does not tell may leave it out."""

    reason: FinishReason


@attrs.frozen
class ThinkingChunk(Value):
    """A piece of what the model thinks, or of its summary, as it streams in; no part of the answer."""

    text: str


Chunk: TypeAlias = TextChunk | ThinkingChunk | CallChunk | FinishChunk
Emit: TypeAlias = Callable[[Chunk], None]


class Model(Protocol):
    """A language model. `name` and `reply` are all that a model of your own has to have."""

    name: str
    # As the provider knows it, for example "gpt-4o".
    window_tokens: int = 128_000
    # The context window: input and output together, tokens.
    output_modes: tuple[OutputMode, ...] = (OutputMode.TOOL, OutputMode.PROMPT)
    # How it can be held to the form of an answer, the best first.

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

    def unsupported_part(self, part: Part) -> str | None:  # noqa: ARG002  a default for those that take everything
        """Say why the model cannot take this part of a user's message, or of a tool's result; None where it can."""
        return None

    def unsupported_settings(self, settings: Settings) -> str | None:  # noqa: ARG002  as above
        """Say which of the settings the wire has no word for, and what to do; None where it has one for all."""
        return None

    def unsupported_schema(self, schema: Mapping[str, JSON]) -> str | None:  # noqa: ARG002  as above
        """Say why the provider cannot hold the model to this schema, in OutputMode.SCHEMA; None where it can."""
        return None

    def cost_usd(self, usage: Usage) -> float | None:  # noqa: ARG002  a default for those that know no prices
        """US dollars for the usage of one reply, or None where no price is known; it is asked for after each reply."""
        return None

    def prepare(self) -> None:
        """Load what would hold up the event loop later, such as a price list. May block; the default loads nothing."""
        return

    async def aclose(self) -> None:
        """Close what the model holds open; the default holds nothing."""
        return


# What the engine and other models ask of a model.
_MODEL_MEMBERS: Final = (
    "name",
    "reply",
    "window_tokens",
    "output_modes",
    "unsupported_part",
    "unsupported_settings",
    "unsupported_schema",
    "cost_usd",
    "prepare",
    "aclose",
)


def ensure_model(model: Model) -> Model:
    """Return what is a model.

    Raises:
        MisuseError: when it is none; it says what it lacks, and what to give.
    """
    if isinstance(model, str):
        raise MisuseError(f"{model!r} is a name and no model: give resolve({model!r}), of agentfsm.models")
    if isinstance(model, type):
        raise MisuseError(
            f"{model.__name__} is a class, and a model is one of its objects: write {model.__name__}(...)"
        )
    if missing := [name for name in _MODEL_MEMBERS if not hasattr(model, name)]:
        raise MisuseError(
            f"{type(model).__name__} is no model, since it has no {', '.join(missing)}: give one such as "
            "OpenAIChat('gpt-4o'), or of your own subclass of agentfsm.ports.Model, with a name and an async reply",
        )
    what = type(model).__name__
    if not isinstance(model.name, str) or not model.name.strip():
        raise MisuseError(f"{what} has the name {model.name!r}: give a text that is not empty, such as 'gpt-4o'")
    if not isinstance(model.window_tokens, int) or model.window_tokens < 1:
        raise MisuseError(f"{what} has window_tokens={model.window_tokens!r}: give a whole number of tokens, 1 or more")
    if not _are_output_modes(model.output_modes):
        raise MisuseError(f"{what} has output_modes={model.output_modes!r}: give a tuple of at least one OutputMode")
    return model


def _are_output_modes(modes: object) -> bool:
    return isinstance(modes, tuple | list) and bool(modes) and all(isinstance(mode, OutputMode) for mode in modes)


def check_model(_owner: object, _attribute: object, model: Model | None) -> None:
    """Refuse what is no model in a field that may hold one."""
    if model is not None:
        ensure_model(model)


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
    """Makes a history shorter that outgrew the window; several do so one after the other, see `Context`."""

    async def compact(self, groups: Sequence[MessageGroup], budget: CompactionBudget) -> Sequence[MessageGroup]:
        """Return what a request shows in place of these groups, until they fit or there is nothing more to do.

        Args:
            groups: What is shown now, oldest first: each is kept or dropped as a whole.
            budget: How much there is, and how a group is made shorter.

        Returns:
            Some of these groups in their order, or what `budget` has made of them. The task and the newest group are
            among them.

        Raises:
            MisuseError: when it is set up wrongly. What the world does to it must not raise.
        """
        ...

    async def aclose(self) -> None:
        """Close what the policy holds open; the default holds nothing."""
        return


@attrs.frozen(kw_only=True)
class Selection(Value):
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


# Asks the agent's own model, without tools: instructions and question in, answer and its cost out. Raises ModelError.
SelectorAsk: TypeAlias = Callable[[str, str], Awaitable[tuple[str, Usage]]]


class ToolSelector(Protocol):
    """Chooses the tools that a model is offered, once for each input of a user."""

    def wants(self, count: int) -> bool:
        """Tell whether so many tools have to be chosen among; where not, all are offered and `select` is not called."""
        ...

    async def select(self, task: str, tools: Sequence[ToolDefinition], ask: SelectorAsk) -> Selection:
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

    async def find(self, query: str, tools: Sequence[ToolDefinition]) -> Sequence[str]:
        """Find what the model looks for by `find_tools`, among the tools that it was not offered.

        Without a method of your own: the tools in whose name and description most words of the query stand.

        Args:
            query: In the model's words.
            tools: Those that it may use and does not see, in the order of registration.

        Returns:
            Names of these tools, the best first: 5 or so, since all of them are offered. None where nothing fits.
        """
        words = set(_WORD.findall(query.casefold()))
        hits = {tool.name: _count_hits(words, f"{tool.name} {tool.description}") for tool in tools}
        most = max(hits.values(), default=0)
        return [name for name, count in hits.items() if most and count == most][:MAX_FOUND_TOOLS]


# Tools that a search finds at most: as many as a model is shown where it picks from a list (Source: document E, 5.4).
MAX_FOUND_TOOLS: Final = 5
_WORD: Final = re.compile(r"[^\W_]+")


def _count_hits(words: Collection[str], text: str) -> int:
    return len(set(_WORD.findall(text.casefold())).intersection(words))


# Asks the judge's model: instructions, question and the JSON Schema of the answer in, its text out. Raises ModelError.
JudgeAsk: TypeAlias = Callable[[str, str, Mapping[str, JSON]], Awaitable[str]]


class Judge(Protocol):
    """Looks at answers, or at the results of tools, before the run goes on."""

    model: Model | None = None
    # Who is asked; None for the agent's own model.
    answer_tokens: int = 1_000
    # The longest answer of that model.

    def wants(self, run: Run) -> bool:
        """Tell whether what the run is about to reflect upon is to be judged: a draft, or the results of a turn."""
        ...

    async def judge(self, run: Run, ask: JudgeAsk) -> Verdict:
        """Judge it.

        Args:
            run: In REFLECT; its last message is the draft, or a tool's result.
            ask: For a model's judgement; each call costs.

        Raises:
            ModelError: when it cannot be judged; a person is then asked.
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


class SystemClock:
    """The machine's own clocks: seconds since 1970, and seconds since some moment."""

    now = staticmethod(time.time)
    monotonic = staticmethod(time.monotonic)


# What an acknowledged append survives. "full": a power cut. "normal": the death of the process that asked, not always
# that of the machine or of a database server.
Durability: TypeAlias = Literal["full", "normal"]


@attrs.define(eq=False, repr=False)
class LeaseTerm:
    """How long the leases of one owner surely hold; the store moves it on each time that it has renewed them."""

    until: float = math.inf
    # Seconds by `threads.boot_clock`. From then on another worker may hold the leases.


# Of a lease that ends only when it is given back.
NO_EXPIRY: Final = LeaseTerm()


@attrs.define(eq=False, repr=False, kw_only=True)
class Lease:
    """The right to append to one run, until it is released, lost or dropped. A store keeps it alive by itself."""

    run_id: str
    token: int
    # The fencing token: grows with each change of owner, and is checked inside every append.
    version: int
    # How many events the journal held when the lease was taken.
    durability: Durability = "full"
    # Of its appends.
    term: LeaseTerm = NO_EXPIRY
    # Of its owner. Before a tool has an effect the engine sees whether the lease still holds.
    crashes: int = 0
    # How many owners died while they drove this run and no other, since it last finished a turn or was resumed.
    abandoned: bool = False
    # Whether an owner did not give it back since then: what that had begun may have come further than the journal says.
    inbox_head: int = 0
    # The newest inbox number that the store has told of.
    inbox_read: int = 0
    # The newest inbox number that the owner has looked at; kept by the release, so that `claim` sees what is newer.
    timers_read_at: float = 0.0
    # When it last looked for timers, seconds since 1970 by the store's clock: what fell due later is news, too.
    backoff_s: float = 0.0
    # Seconds for which no worker claims the run after the release; a newer post than the next ends that rest.
    backoff_inbox_head: int = 0
    # The newest inbox number when the rest was decided on.
    cancelled: bool = False
    # Whether somebody asked for the end of the run.
    lost: bool = False
    # Whether another owner has taken over.
    wake: Callable[[], None] | None = None
    # Called, from any thread, when `cancelled` or `lost` turns true.
    agent: str = ""
    # The name of the run's agent, once the store knows it.

    @property
    def valid_until(self) -> float:
        """Until when the lease surely holds, seconds by `threads.boot_clock`; the store moves it at each renewal."""
        return self.term.until


@attrs.frozen(kw_only=True)
class Claim(Value):
    """What a worker got to drive."""

    leases: tuple[Lease, ...] = ()
    # Of runs that can be moved on now, those first that could be for longest.
    has_suspects: bool = False
    # Whether runs can be moved on whose owners died twice or more: a worker that drives nothing else claims them.


def lease_lost_error(lease: Lease) -> LeaseLostError:
    """Return the error of who goes on with a run that is another's now, or is gone."""
    return LeaseLostError(
        f"run {lease.run_id!r} was taken over by another worker, or the store has lost it: load it to see",
    )


@attrs.frozen(kw_only=True)
class StoredRun(Value):
    """What a store holds of one run."""

    header: Header
    events: tuple[Event, ...]
    # Those after the version asked for, oldest first.


@attrs.frozen(kw_only=True)
class RunSummary(Value):
    """A line of a list of runs."""

    id: str
    agent: str
    session: str | None
    user: str | None
    parent: str | None
    # The run whose tool it is.
    state: State
    stop_reason: StopReason | None
    waiting: bool
    # Whether only something from outside can move it on.
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
    ready_at: float | None = None
    # Since or from when a worker may claim it, seconds since 1970 by the store's clock. None while it is driven, while
    # only something from outside can move it on, and when it is over or another run's.


@attrs.frozen(kw_only=True)
class Filter(Value):
    """Which runs a list shows; what is None lets all through."""

    session: str | None = None
    agent: str | None = None
    user: str | None = None
    state: State | None = None
    waiting: bool | None = None
    parent: str | None = None
    # Those whose caller is this run.
    before: float | None = None
    # Those created earlier, seconds since 1970: the next page begins at the last line of this one.

    def matches(self, summary: RunSummary) -> bool:
        """Whether the list shows this line."""
        wanted = attrs.asdict(self)
        before = wanted.pop("before")
        named = all(value is None or getattr(summary, name) == value for name, value in wanted.items())
        return named and (before is None or summary.created_at < before)


ALL_RUNS = Filter()


class PendingWrite(Protocol):
    """An append on its way to the disk."""

    @property
    def is_done(self) -> bool:
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
    """Where journals live. Appends of one run are written in the order in which they were asked for.

    All times that decide something (leases, expiry, timers) are the store's own.
    """

    async def now(self) -> float:
        """Seconds since 1970 by the store's clock."""
        ...

    async def create(
        self,
        header: Header,
        *,
        events: Sequence[Event] = (),
        durability: Durability = "full",
    ) -> tuple[Header, Lease]:
        """Insert the run if its id is new, and take its lease.

        Of a run in a session the header that is stored names, in `after`, the session's last run.

        Args:
            header: Entry 0.
            events: What the journal begins with, in the same transaction: a fork's are those of the run it came from.
            durability: Of the lease's appends, and of this one.

        Returns:
            The header as it stands in the store, and the lease; its `version` tells whether the run existed.

        Raises:
            ConflictError: when the id stands for another prompt, somebody else drives it, its session has a run that
                is not over, or the run that a new one goes on from is not there.
            MisuseError: when there is no such durability.
        """
        ...

    async def lease(self, run_id: str, *, durability: Durability = "full", takeover: bool = False) -> Lease:
        """Take the lease of a run that exists.

        Args:
            run_id: The run.
            durability: Of the lease's appends.
            takeover: Take the lease even if another owner holds it; that owner is refused at its next append.

        Raises:
            RunNotFoundError: when there is none.
            LeaseHeldError: when somebody else has it.
        """
        ...

    async def claim(self, agent: str, *, limit: int, durability: Durability = "full", suspects: bool = False) -> Claim:
        """Take the leases of runs of that agent that a worker can move on now, those first that could be for longest.

        They are not over, nobody drives them, no other run calls them, and they either do not wait, or something has
        come that their last owner had not seen, or the time of what they wait for is up.

        An owner that ends without giving its leases back has crashed, and one of its runs may be the reason. A first
        crash changes nothing. Runs whose owners crashed twice or more are suspects: they are claimed by themselves, in
        groups of half as many runs as the last of these owners had, and in the end one by one. A run that finishes a
        turn is no suspect any more.

        Args:
            agent: Its name.
            limit: How many at most.
            durability: Of the leases' appends.
            suspects: Whether to claim one group of suspects, for a worker that drives nothing else meanwhile; else
                those are left out.
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
    ) -> PendingWrite:
        """Write events and strike inbox rows, in one transaction; returns before it is durable.

        Args:
            lease: Checked in the transaction.
            run: The run after the events; the journal must be at `run.version - len(events)`.
            events: At least one.
            taken: The numbers of the inbox rows that the events took in.
            final: Write only if the inbox holds nothing else that is due.
        """
        ...

    def release(self, lease: Lease) -> PendingWrite:
        """Give the lease back, after the appends before; returns at once, and is harmless when the lease is lost."""
        ...

    async def post(self, run_id: str, key: str, item: InboxItem, *, before: float | None = None) -> PostedItem:
        """Put an item into the inbox, durably. The first post of a key wins, and the winner is returned.

        Args:
            run_id: The run.
            key: Unique in the run.
            item: What to post.
            before: Seconds since 1970 by the store's clock, from which on it is refused; None: it is never too late.

        Raises:
            RunNotFoundError: when there is no such run.
            ConflictError: when it is over, or it is too late; or when it is input and 1,000 posts wait already.
        """
        ...

    async def inbox(self, run_id: str) -> tuple[PostedItem, ...]:
        """Return the rows that are not taken yet, oldest first; those that are not due yet, too."""
        ...

    async def read(self, run_id: str, after: int = 0) -> StoredRun:
        """Return the header and the events after that version.

        Raises:
            RunNotFoundError, CorruptError, TooNewError: as they say.
        """
        ...

    async def runs(self, where: Filter = ALL_RUNS, *, limit: int = 100) -> tuple[RunSummary, ...]:
        """Return the newest runs that the filter takes, newest first."""
        ...

    async def delete(self, run_id: str) -> None:
        """Remove a run that nobody drives, with its inbox and the runs of agents below it.

        Raises:
            RunNotFoundError: when there is no such run.
            ConflictError: when it, or one below it, is driven, or another run goes on from one of them: sessions are
                deleted whole.
        """
        ...

    async def delete_session(self, session: str) -> int:
        """Remove all runs of a session, with what `delete` removes; return how many they were.

        Raises:
            ConflictError: when one of them is driven, or a run outside goes on from one; none is removed then.
        """
        ...

    async def prune(self, before: float) -> int:
        """Remove what is over and has not changed since that moment; return how many runs that were.

        Sessions go whole, when all of their runs may; a run from which another goes on stays as long as that one, and
        runs of agents as long as their callers.

        Args:
            before: Seconds since 1970.

        Raises:
            MisuseError: when it is no such number; nothing is removed.
        """
        ...

    def subscribe(self, topic: str, wake: Callable[[], None]) -> Callable[[], None]:  # noqa: ARG002  a default
        """Call `wake`, from any thread, when something may have changed under the topic; it must not block.

        Wakes may be spurious, and may be missing where another process writes and the store cannot tell: poll as well.
        The default never wakes.

        Args:
            topic: `run:<id>`: the run's journal grew, or its state changed. `agent:<name>`: a run of that agent may
                have become one that a worker can take (created, posted to, released).
            wake: Called after the change is committed.

        Returns:
            A function that ends the subscription, from any thread; a second call does nothing.
        """
        return lambda: None

    async def aclose(self) -> None:
        """Close what is open; appends on their way are written first."""
        ...
