"""A world, thrown from a seed: what its tools do to it, what its model says, and what was done, told outside of runs.

Tools tell the world when they begin, when they act and when they end. At each beginning the world looks at the disk: an
effect may begin only if the journal says so already, and by the hand of whoever owns the run at that moment.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from contextvars import ContextVar
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import anyio
import attrs
from anyio.abc import TaskGroup
from seeded import at_once
from shared_disk import Disk, Handle

from agentfsm import (
    Agent,
    AssistantMessage,
    Found,
    InputRequired,
    Limits,
    ModelUnavailableError,
    Question,
    Run,
    RunContext,
    Settings,
    Tool,
    TransientError,
    Usage,
    ask_user,
    tool,
    wait,
)
from agentfsm import RefusedError as ServiceRefusedError
from agentfsm.core.events import Event, ToolStarted
from agentfsm.ports import CallChunk, Emit, FinishChunk, FinishReason, Model, ProposedCall, Reply, Request
from agentfsm.testing import VirtualClock
from agentfsm.tools.breaker import Breaker
from agentfsm.tools.tool import Arguments
from tests.support.wire_rules import RefusedError, check_wires

if TYPE_CHECKING:
    from agentfsm.core.inbox import PostedItem

# Seconds that things take. They are few and round, so that things happen at the same moment again and again.
TICKS: Final = (0.0, 0.0, 0.25, 0.5, 1.0, 2.0)
TOOL_TIMEOUT_S: Final = 4.0
HANG_S: Final = 1_000.0
# Owners that die while they drive one run alone, after which it is paused.
CRASHES: Final = 4


@attrs.define(eq=False)
class Attempt:
    """A tool at work."""

    run_id: str
    call_id: str
    tool: str
    key: str
    arguments: dict[str, Any]
    handle: Handle
    began_at: float
    acted: int = 0
    # Effects on the world.
    ended_at: float | None = None
    returned: bool = False
    refused: bool = False
    # Whether it ended with the word that nothing was done.


@attrs.define(eq=False)
class World:
    """All that there is, apart from the processes and the people."""

    seed: int
    listen: Callable[[str], None] | None = None
    # Told all that happens, for who replays a seed.
    dice: random.Random = attrs.field(
        init=False, default=attrs.Factory(lambda w: random.Random(w.seed), takes_self=True)
    )
    disk: Disk = attrs.field(init=False, factory=lambda: Disk(clock=VirtualClock()))
    tasks: TaskGroup = attrs.field(init=False)
    attempts: list[Attempt] = attrs.field(factory=list)
    wrong: list[str] = attrs.field(factory=list)
    # What was seen to break a promise.
    returned: list[Run] = attrs.field(factory=list)
    # What driving calls have returned.
    sent: dict[str, PostedItem] = attrs.field(factory=dict)
    # By text, what a person was told is in the inbox.
    is_calm: bool = False
    # Whether no more faults are thrown.
    numbers: int = 0
    # Of arguments.
    faults: float = attrs.field(init=False)
    delays: float = attrs.field(init=False)
    tool_faults: float = attrs.field(init=False)
    # How likely each of these is.
    stalls: float = 0.0
    # How likely a process stands still between the durable word that a call begins and its beginning.
    poison: bool = False
    # Whether the first run ends each process in which a call of it begins.
    reuses: bool = False
    # Whether runs that are over are deleted, and their ids used again.
    buried: list[Attempt] = attrs.field(factory=list)
    # Of runs that were deleted.
    runs: int = attrs.field(init=False)
    # That are begun.
    streams: bool = attrs.field(init=False)
    drifts: bool = attrs.field(init=False)
    # Whether some processes have another version of the agent.
    expires_s: float = attrs.field(init=False)
    # Of approvals and questions.
    seconds: float = attrs.field(init=False)
    # Active ones that a run may take.

    def __attrs_post_init__(self) -> None:
        """Throw the dice for the whole."""
        self.faults = self.dice.choice((0.0, 0.01, 0.04))
        self.delays = self.dice.choice((0.0, 0.1, 0.3))
        self.tool_faults = self.dice.choice((0.0, 0.2, 0.5))
        self.runs = self.dice.choice((1, 1, 2))
        self.streams = self.chance(0.3)
        self.drifts = self.chance(0.15)
        self.expires_s = self.dice.choice((2.0, 5.0, 1_000.0))
        self.seconds = self.dice.choice((20.0, 120.0))

    # What everybody uses

    def chance(self, share: float) -> bool:
        """Whether something happens that is so likely."""
        return self.dice.random() < share

    def tick(self) -> float:
        """Return a time that something takes, seconds."""
        return self.dice.choice(TICKS)

    def trip(self, what: str) -> tuple[float, str]:
        """Return how long a job of the disk takes, and what goes wrong with it."""
        if self.is_calm:
            return 0.0, ""
        delays = 0.5 if what == "now" else self.delays  # what is decided by the clock is decided late, too
        delay_s = self.tick() if self.chance(delays) else 0.0
        fault = self.dice.choice(("before", "after")) if self.chance(self.faults) else ""
        if fault or delay_s:
            self.note("disk", lambda: f"takes {delay_s} s {f'and fails {fault} ' if fault else ''}to {what}")
        return delay_s, fault

    def stalls_at(self, handle: Handle) -> bool:
        """Whether a process stands still now."""
        return self.stalls > 0 and not self.is_calm and handle.is_heard and self.chance(self.stalls)

    def tempt_fate(self, handle: Handle, share: float) -> None:
        """Let fate strike a process, so likely, soon: while what it has just begun is under way."""
        if not self.is_calm and self.chance(share):
            self.later(self.dice.choice((0.0, 0.25, 0.5)), handle.strike)

    def later(self, seconds: float, deed: Callable[[], object]) -> None:
        """Do something after a while."""

        async def wait_and_do() -> None:
            await anyio.sleep(seconds)
            deed()

        self.tasks.start_soon(wait_and_do)

    def note(self, who: str, text: Callable[[], str]) -> None:
        """Tell whoever replays the seed."""
        if self.listen is not None:
            self.listen(f"{anyio.current_time():9.2f}  {who:<12} {text()}")

    def blame(self, text: str) -> None:
        """A promise was broken."""
        self.note("!!!", lambda: text)
        self.wrong.append(text)

    # Tools at work

    def begins(self, handle: Handle, tool: Tool[..., Any], ctx: RunContext[Any], arguments: dict[str, Any]) -> Attempt:
        """A tool begins: see whether it may."""
        attempt = Attempt(
            run_id=ctx.run_id,
            call_id=ctx.call_id,
            tool=tool.name,
            key=ctx.idempotency_key,
            arguments=arguments,
            handle=handle,
            began_at=anyio.current_time(),
        )
        self.look_at_results(handle)
        self.note(handle.owner, lambda: f"begins {tool.name} {ctx.run_id} {ctx.call_id} as {ctx.idempotency_key}")
        if not tool.read_only:
            self._may_begin(handle, tool, attempt)
        self.attempts.append(attempt)
        if self.poison and not self.is_calm and ctx.run_id == "r0":
            self.later(0.0, handle.end)
        self.tempt_fate(handle, 0.4)
        return attempt

    def _may_begin(self, handle: Handle, tool: Tool[..., Any], attempt: Attempt) -> None:
        what = f"{tool.name} of {attempt.run_id} {attempt.call_id}"
        record, tenure = self.disk._records[attempt.run_id], self.disk.tenures.get(attempt.run_id)
        if tenure is None or tenure.handle is not handle or record.token != tenure.lease.token:
            self.blame(f"P4: {handle.owner} begins {what}, and does not own the run")
        others = [each for each in self.attempts if each.run_id == attempt.run_id and each.tool != "look"]
        before = [each for each in others if each.call_id == attempt.call_id]
        told = sum(isinstance(event, ToolStarted) and event.call_id == attempt.call_id for event in record.events)
        if not tool.repeatable and len(before) - sum(each.refused for each in before) >= told - _inherited(
            record, attempt
        ):
            self.blame(f"P2: {what} begins, and the journal does not say so")
        if not told:
            self.blame(f"P2: {what} begins, and the journal knows of no start")
        for other in others:
            if (
                other.ended_at is None
                and other.handle is not handle
                and other.call_id != attempt.call_id
                and not tool.repeatable
                and other.tool in UNSAFE
            ):
                phase = {each.call.id: str(each.phase) for each in record.run.open}.get(other.call_id, "finished")
                if phase not in ("lost", "finished"):
                    self.blame(f"P4: {what} begins beside {other.call_id}, which is {phase}")

    def look_at_results(self, handle: Handle) -> None:
        """See whether each result is in the journal, or on its way, as soon as it is there; siblings or none."""
        for each in self.attempts:
            is_over = each.handle is handle and each.returned and (each.ended_at or 0.0) < anyio.current_time()
            if is_over and each.tool != "look" and (each.run_id, each.call_id) not in handle.told:
                self.blame(f"P1: the result of {each.tool} {each.run_id} {each.call_id} was not written")

    def bury(self, run_id: str) -> None:
        """Delete a run that is over, with the agents below it; what it did stays done."""
        gone = {run_id, *(each for each, r in self.disk._records.items() if r.run.header.parent == run_id)}
        nonce = self.disk._records[run_id].run.header.nonce
        at_once(self.disk.delete(run_id))
        for each in self.attempts:
            if each.run_id in gone:
                self.buried.append(attrs.evolve(each, run_id=f"{each.run_id} of {nonce}"))
        self.attempts = [each for each in self.attempts if each.run_id not in gone]
        self.returned = [run for run in self.returned if run.id not in gone]
        self.disk.forget(gone)
        self.numbers = 0  # the next run may ask for the very same

    def look_at_request(self, request: Request) -> None:
        """See whether the vendors would take it; what asks for a run that it has lost already does not count."""
        try:
            check_wires(request.messages, request.instructions)
        except RefusedError as error:
            if any(record.run.shown == request.messages for record in self.disk._records.values()):
                self.blame(f"P5: a vendor would refuse the request: {error}")

    def ends(self, attempt: Attempt) -> None:
        """A tool is over."""
        attempt.ended_at = anyio.current_time()


# The world in which a tool or a model finds itself.
here: ContextVar[World] = ContextVar("here")


def _inherited(record: Any, attempt: Attempt) -> int:
    """How many starts of the call a fork has from the run that it was forked from."""
    events: list[Event] = record.events[: record.run.header.forked_at]
    return sum(isinstance(event, ToolStarted) and event.call_id == attempt.call_id for event in events)


# Tools


class PanicError(BaseException):
    """What a library in Rust raises."""


# Tools whose calls are not to be repeated unasked.
UNSAFE: Final = frozenset({"pay", "ship", "book", "sign", "quiz"})
# What the quiz is answered with.
NUMBER: Final = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
# Tools that a person has to let run.
ASKED: Final = frozenset({"sign", "stamp"})


async def work(ctx: RunContext[Any], tool: Tool[..., Any], n: int) -> str:
    """Take time, act, take time, and end as the dice say."""
    world, handle = here.get(), ctx.deps
    if not isinstance(handle, Handle):
        world.blame(f"{tool.name} of {ctx.run_id} {ctx.call_id} ran without its deps")
        return "lost"
    if handle.died_at is not None:
        await anyio.sleep_forever()
    attempt = world.begins(handle, tool, ctx, {"n": n})
    try:
        if tool.name == "quiz" and len(ctx.answers) < 1 + n % 2:
            raise InputRequired(Question(key=f"q{len(ctx.answers)}", message="How many?", schema=NUMBER), state=n)
        end = "" if world.is_calm or not world.chance(world.tool_faults) else world.dice.choice(ENDS)
        await _work(world, handle, attempt, end)
        attempt.returned = True
    finally:
        world.ends(attempt)
    return f"{tool.name} {n} done"


async def _work(world: World, handle: Handle, attempt: Attempt, end: str) -> None:
    before_s, after_s = world.tick(), world.tick()
    if end == "refuse":
        attempt.refused = True
        raise ServiceRefusedError("not now")
    try:
        await anyio.sleep(before_s)
    except anyio.get_cancelled_exc_class():
        if end != "swallow":
            raise
        with anyio.CancelScope(shield=True):
            await anyio.sleep(0.25)
    if handle.died_at is None:  # a dead process does nothing
        world.note(handle.owner, lambda: f"ACTS   {attempt.tool} {attempt.run_id} {attempt.call_id}")
        attempt.acted += 1
    if after_s and end != "swallow":
        await anyio.sleep(after_s)
    if end == "hang":
        await anyio.sleep(HANG_S)
    if end in ERRORS:
        raise ERRORS[end]("no luck")


ERRORS: Final[dict[str, type[BaseException]]] = {"raise": ValueError, "panic": PanicError, "passing": TransientError}
ENDS: Final = ("hang", "swallow", "refuse", *ERRORS)


async def find_out(ctx: RunContext[Any], _arguments: Arguments) -> Any:
    """Say what became of a call, as far as one can see."""
    world = here.get()
    await anyio.sleep(world.tick())
    if any(each.key == ctx.idempotency_key and each.acted for each in (*world.attempts, *world.buried)):
        return Found("booked")
    return world.dice.choice(("ask", "fail", "nonsense"))


def tools_of(expires_s: float, *, drifted: bool) -> dict[str, Tool[..., Any]]:
    """The tools of an agent, by name."""
    asked = {"requires_approval": True, "approval_expires_s": expires_s, "on_unknown": "ask"}
    options: dict[str, dict[str, Any]] = {
        "look": {"read_only": True, "concurrency_safe": True, "on_unknown": "rerun"},
        "put": {"idempotent": True, "concurrency_safe": True, "on_unknown": "rerun"},
        "pay": {"on_unknown": "ask"},
        "ship": {"on_unknown": "fail"},
        "book": {"on_unknown": find_out, "concurrency_safe": True},
        "sign": asked,
        "quiz": {"on_unknown": "ask", "answer_expires_s": expires_s},
        "stamp": {**asked, "idempotent": True, "on_unknown": "rerun", "requires_approval": lambda a: a.n % 2 == 0},
    }
    made: dict[str, Tool[..., Any]] = {
        "ask_user": attrs.evolve(ask_user, answer_expires_s=expires_s),
        "wait": attrs.evolve(wait),
    }
    for name, each in options.items():
        words = "Do it, as of late." if drifted and name in ASKED else "Do it."
        made[name] = _acting(attrs.evolve(SHAPE, name=name, description=words, timeout_s=TOOL_TIMEOUT_S, **each))
    return made


def _acting(tool: Tool[..., Any]) -> Tool[..., Any]:
    async def act(ctx: RunContext[Any], n: int) -> str:
        return await work(ctx, tool, n)

    tool.function = act
    return tool


@tool
async def SHAPE(ctx: RunContext[Any], n: int) -> str:  # noqa: N802  a constant: the schema of all tools here
    """Do something."""
    raise NotImplementedError


# The model


@attrs.define(eq=False)
class Script(Model):
    """Says what the dice say, in whole or piece by piece; checks each request as the vendors do."""

    names: tuple[str, ...]
    # Of the tools that it knows.
    last: int
    # Turns after which it answers.
    name: str = "dice"

    async def reply(self, request: Request, emit: Emit | None = None) -> Reply:
        """Answer, call tools, or fail."""
        world = here.get()
        world.look_at_request(request)
        await anyio.sleep(world.tick())
        if not world.is_calm and world.chance(0.06):
            raise ModelUnavailableError("overloaded")
        turns = sum(isinstance(message, AssistantMessage) for message in request.messages)
        usage = Usage(input_tokens=10, output_tokens=5)
        if not world.is_calm and world.chance(0.03):
            return Reply(text="", usage=usage)
        calls = () if turns >= self.last or world.chance(0.6 if world.is_calm else 0.15) else self._calls()
        if emit is not None:
            for index, call in enumerate(calls):
                emit(CallChunk(index=index, name=call.name))
                emit(CallChunk(index=index, arguments=call.arguments))
                await anyio.sleep(world.tick())
            emit(FinishChunk(reason=FinishReason.TOOL_CALLS if calls else FinishReason.STOP))
        text = "so be it" if not calls or world.chance(0.3) else ""
        reason = FinishReason.TOOL_CALLS if calls else FinishReason.STOP
        return Reply(text=text, calls=calls, finish_reason=reason, usage=usage)

    def _calls(self) -> tuple[ProposedCall, ...]:
        world = here.get()
        calls: list[ProposedCall] = []
        for index in range(world.dice.choice((1, 1, 2, 2, 3, 5))):
            name, arguments = self._call()
            if calls and world.chance(0.1):  # the same again
                name, arguments = calls[-1].name, calls[-1].arguments
            calls.append(ProposedCall(id=f"p{index}", name=name, arguments=arguments))
        return tuple(calls)

    def _call(self) -> tuple[str, str]:
        world = here.get()
        world.numbers += 1
        name = "nobody" if world.chance(0.03) else world.dice.choice(self.names)
        match name:
            case "ask_user":
                arguments: dict[str, Any] = {"question": f"which {world.numbers}?"}
            case "wait":
                arguments = {"seconds": world.dice.choice((1, 3, 30)), "reason": "to see"}
            case "helper":
                arguments = {"query": f"help {world.numbers}"}
            case _:
                arguments = {"n": world.numbers}
        text = json.dumps(arguments)
        return name, text[:-2] if world.chance(0.03) else text


@cache
def cast(expires_s: float, *, drifted: bool) -> Agent:
    """An agent with another one among its tools; made once, since the schemas of tools cost more than a world."""
    tools = tools_of(expires_s, drifted=drifted)
    below = tools_of(expires_s, drifted=drifted)
    known = ("look", "pay", "sign", "ask_user", "quiz")
    _BELOW[expires_s, drifted] = tuple(below.values())
    limits = Limits(turns=8, tool_timeout_s=TOOL_TIMEOUT_S, model_retries=1, retry_wait_s=0.5, crashes=CRASHES)
    helper = Agent(Script(known, last=2), tools=[below[name] for name in known], name="helper", limits=limits)
    every = [*tools.values(), helper.as_tool(timeout_s=15.0)]
    return Agent(Script((*tools, "helper", "pay", "sign"), last=4), tools=every, name="top", limits=limits)


# The tools of the agents below those that were cast.
_BELOW: Final[dict[tuple[float, bool], tuple[Tool[..., Any], ...]]] = {}


def agent_of(world: World, handle: Handle, *, drifted: bool = False) -> Agent:
    """The agent of one process."""
    agent = cast(world.expires_s, drifted=drifted)
    for each in (*agent.tools, *_BELOW[world.expires_s, drifted]):
        each.breaker = Breaker()  # what a service did in another world is forgotten
    limits = attrs.evolve(agent.limits, seconds=world.seconds, parallel=world.dice.choice((1, 3, 20)))
    settings = Settings(stream=world.streams)
    return agent.with_(limits=limits, settings=settings, clock=world.disk.clock, store=handle)
