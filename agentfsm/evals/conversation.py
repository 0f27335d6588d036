"""Carry out the turns of a case: each text is a run, and decisions and messages reach the run that they are about.

The ids of all runs follow from the case and the repeat, and what is decided while the conversation goes on (the reply
of a simulated user, the call that an approval is for) is recorded as a run of its own, before it has an effect. So a
conversation that was interrupted goes on where it was, and one that is over is read again without a request.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from inspect import isawaitable
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

import attrs

from agentfsm.agents.agent import Agent
from agentfsm.agents.agent_starts import StartOptions
from agentfsm.agents.extras import resolve_model
from agentfsm.agents.subagent import find_inner_agent
from agentfsm.core.errors import ConflictError, LeaseHeldError, MisuseError, RunNotFoundError
from agentfsm.core.machine import State
from agentfsm.core.messages import AssistantMessage, TextPart, UserMessage
from agentfsm.core.pending import PendingKind
from agentfsm.core.plans import PLAN_TOOL
from agentfsm.core.usage import Usage
from agentfsm.core.value import Value
from agentfsm.evals.case import Case, NextTurn, SimulatedUser, Turn
from agentfsm.ports.model import Reply
from agentfsm.ports.store import Filter
from agentfsm.testing.models import FunctionModel

if TYPE_CHECKING:
    from agentfsm.agents.runnable_agent import RunnableAgent
    from agentfsm.core.header import Header
    from agentfsm.core.messages import Message
    from agentfsm.core.pending import Pending
    from agentfsm.core.run import Run

    # Whose words a run has: its user and tenant count.
    Owner: TypeAlias = Case | Header

# What a simulated user replies at the end, and to decide on a call.
_END: Final = "[END]"
_APPROVE: Final = "[APPROVE]"
_REJECT: Final = "[REJECT]"
_USER_PROMPT: Final = (
    "You play the user in a conversation with an assistant. You write the user's messages, one at a time, and never "
    "the assistant's. Write as the user would, and tell only what was asked for or what the next step needs. Invent "
    "nothing that your goal does not say.\n"
    "Your goal: {goal}\n"
    f"Reply {_END}, and nothing else, as soon as this holds: {{stop}}.\n"
    f"If you are asked to approve an action, reply {_APPROVE}, or {_REJECT} and the reason."
)
_BEGIN: Final = "Write your first message."
_UNSET: Final = object()
# Waits that only a process that died leaves behind.
_BROKEN: Final = frozenset({PendingKind.OUTCOME, PendingKind.CRASH})
# Turns of a function as user after which it is taken to have no end.
MAX_FUNCTION_TURNS: Final = 100
# Purpose of all runs of an evaluation, those of judges and simulated users included.
PURPOSE: Final = "eval"


class _WorldLostError(Exception):
    """The world of a conversation is gone."""


class _BrokenWorldError(Exception):
    """The function that makes dependencies raised."""


class AgentChooser(Protocol):
    """A `Rollout`: chooses the agent of each run."""

    @property
    def arms(self) -> Mapping[str, Agent[Any]]:
        """The agents by arm."""
        ...

    async def choose(
        self,
        *,
        user: str | None = None,
        session: str | None = None,
        tenant: str | None = None,
        id: str | None = None,  # noqa: A002  as in `Agent.start`
        roles: Iterable[str] = (),
        metadata: Mapping[str, Any] = MappingProxyType({}),
    ) -> tuple[Agent[Any], StartOptions]:
        """Return the agent that starts a run, and the options of its start."""
        ...


@attrs.frozen(kw_only=True)
class PlayedTurn(Value):
    """A turn as it was carried out."""

    turn: Turn
    """The turn; what a simulated user said is one as well."""

    run: Run[Any]
    """The run that it began, or was about, as it was after the turn: over, or waiting, perhaps for the next turn."""


class _Recorder(FunctionModel):
    """Stands where a run that keeps a decision has its model; it costs nothing."""

    name = "none"

    def cost_usd(self, usage: Usage) -> float | None:  # noqa: ARG002  nothing is requested
        """Return 0, so that the run has no unknown price."""
        return 0.0


async def record(agent: Agent[Any], run_id: str, task: str, decide: Callable[[], Any], owner: Owner) -> Any:
    """Return what a function returns, plain or async, as JSON; it is kept as a run, so the function is called once.

    Args:
        agent: The agent whose store keeps it.
        run_id: Id of that run, whose name says what it is.
        task: What is decided, for people.
        decide: The function.
        owner: Case or header with the user and the tenant of that run.
    """

    async def reply(_request: object) -> Reply:
        found = decide()
        text = json.dumps(await found if isawaitable(found) else found)
        return Reply(text=text, usage=Usage(input_tokens=0, output_tokens=0, cost_usd=0.0))

    recorder = Agent(_Recorder(reply), name="eval-record", store=agent.store, clock=agent.clock)
    run = await run_beside(recorder, task, run_id, owner)
    return json.loads(run.answer)


@asynccontextmanager
async def open_memory(agent: Agent[Any], case: Case) -> AsyncIterator[None]:
    """Let a memory with the items of the case stand in for that of the user, for the agent and the agents below it.

    Raises:
        MisuseError: if none of them has a memory, or one has a memory that cannot be set apart.
    """
    if case.memory is None:
        yield
        return
    from agentfsm.memory import Memory  # noqa: PLC0415  few cases have one

    agents: list[RunnableAgent] = [agent]
    for each in agents:  # those below are added on the way
        inner = [find_inner_agent(tool) for tool in each.driver.config.registry]
        agents += [found for found in inner if found is not None and found not in agents]
    named = [(each.name, each.driver.config.memory) for each in agents if each.driver.config.memory is not None]
    memories = [memory for _name, memory in named if isinstance(memory, Memory)]
    if not memories or len(memories) < len(named):
        name = next((name for name, memory in named if not isinstance(memory, Memory)), agent.name)
        raise MisuseError(f"case {case.id!r} has memory=, and the agent {name!r} has no Memory of agentfsm.memory")
    apart = memories[0].apart()
    try:
        await apart.for_(user=case.user or "", tenant=case.tenant or "").remember_all(case.memory)
        with apart.stand_in():
            yield
    finally:
        await apart.aclose()


@attrs.define(eq=False)
class Conversation:
    """The turns of a case, carried out with an agent."""

    agent: Agent[Any]
    case: Case
    run_id: str
    """Id of the first run; those of the others begin with it."""

    metadata: Mapping[str, Any]
    make_deps: Callable[[Run[Any]], Any]
    """Returns the dependencies of the conversation, plain or async, for its first run."""

    has_own_world: bool = False
    """Whether the dependencies, the memory or the recorded results are of this process and conversation alone."""

    options: StartOptions = attrs.field(factory=StartOptions)
    """Further options of the start of each run, as a roll-out gives them."""

    runs: list[Run[Any]] = attrs.field(factory=list)
    """The runs, oldest first. The last one waits if the turns have not decided it."""

    played: list[PlayedTurn] = attrs.field(factory=list)
    stop: str = ""
    """Reason why a turn could not be carried out, which is a fault of the agent; empty if all were."""

    fault: str = ""
    """Reason why the conversation says nothing about the agent, such as a simulated user that broke; empty if none."""

    users: list[Run[Any]] = attrs.field(factory=list)
    """Runs of the simulated user, for their cost."""

    is_fresh: bool = False
    """Whether this process has begun the conversation."""

    is_lost: bool = False
    """Whether another process has begun the conversation, and the world of its own in which it had to go on is gone."""

    is_kept: bool = True
    """Whether all of it was over before."""

    _deps: Any = _UNSET

    @property
    def deps(self) -> Any:
        """Dependencies of the runs; None if nothing was executed."""
        return None if self._deps is _UNSET else self._deps

    async def play(self) -> None:
        """Carry out the turns, up to the first that cannot be."""
        waiting = deque(self.case.all_turns)
        while waiting and not self.stop and not self.fault:
            turn = waiting.popleft()
            if not isinstance(turn, Turn):
                said = await self._ask_user(turn)
                if said is None:
                    if not self.runs and not self.fault:
                        self.fault = "the user ended the conversation before it began"
                    return
                waiting.append(turn)
                turn = said
            sent = []
            while waiting and isinstance(next_turn := waiting[0], Turn) and next_turn.send:
                sent.append(next_turn)
                waiting.popleft()
            try:
                await self._take(turn, sent)
            except _WorldLostError:
                self.is_lost = True
                return
            except _BrokenWorldError as error:
                self.fault = str(error)
                return
            kinds = {item.kind for item in self.runs[-1].pending}
            if not kinds.isdisjoint(_BROKEN):
                self.fault = f"a process died in the middle of run {self.runs[-1].id}: {' and '.join(kinds & _BROKEN)}"

    async def _take(self, turn: Turn, sent: Sequence[Turn]) -> None:
        """Carry out a turn, and those that arrive in the inbox of its run."""
        number, run = len(self.played) + 1, self.runs[-1] if self.runs else None
        if run is not None and not (turn.input and run.is_over and await self._read_decision(number) is None):
            run = await self._decide(number, turn, run)
            if run is None:
                return
        else:
            run = await self._begin(turn, is_stepped=bool(sent))
        for place, each in enumerate(sent, number):
            if not run.is_over:
                try:
                    await self.agent.send(run.id, each.send, key=f"eval-{place}")
                except ConflictError:  # it has ended meanwhile, in another process
                    break
        self.runs[-1] = await self._execute(run)
        self.played += [PlayedTurn(turn=each, run=self.runs[-1]) for each in (turn, *sent)]

    async def _begin(self, turn: Turn, *, is_stepped: bool) -> Run[Any]:
        """Return the run of a text, which is new or was begun before."""
        run_id = f"{self.run_id}-{len(self.runs) + 1}" if self.runs else self.run_id
        try:
            run = await self.agent.load(run_id)
            self.is_kept = self.is_kept and run.is_over
        except RunNotFoundError:
            self.is_kept = False
            run = self.agent.start(self._build_prompt(turn), **await self._build_options(run_id))
            self.is_fresh = self.is_fresh or not self.runs
            if is_stepped:  # a message can be sent to a run that is in the store
                run = await self.agent.step(run, deps=await self._find_deps(run))
        self.runs.append(run)
        return run

    def _build_prompt(self, turn: Turn) -> Any:
        return turn.input if self.runs or not self.case.files else [TextPart(text=turn.input), *self.case.files]

    async def _build_options(self, run_id: str) -> StartOptions:
        case = self.case
        options: StartOptions = {
            **self.options,
            "id": run_id,
            "user": case.user,
            "roles": case.roles,
            "tenant": case.tenant,
            "metadata": {**case.metadata, **self.metadata},
            "purpose": PURPOSE,
        }
        session = None if case.session is None else f"{case.session}-{self.run_id}"
        if self.runs:
            if session is None:
                options["after"] = self.runs[-1]
            else:
                options["session"] = session
            return options
        if session is not None:
            found = await self.agent.runs.list(Filter(session=case.session), limit=1)
            options["session"] = session
            if found:
                options["after"] = await self.agent.load(found[0].id)
        if case.history:
            options["messages"] = case.history
        return options

    async def _read_decision(self, number: int) -> list[Any] | None:
        """Return what a turn has decided on before: run, call, tool, and the version that waited; None for nothing."""
        try:
            run = await self.agent.runs.load(f"{self.run_id}-turn-{number}")
        except RunNotFoundError:
            return None
        found: list[Any] | None = json.loads(run.answer) if run.state is State.DONE else None
        return found

    async def _decide(self, number: int, turn: Turn, run: Run[Any]) -> Run[Any] | None:
        """Decide what a run waits for, and return the run; None if it does not wait for this."""
        wanted = PendingKind.APPROVAL if turn.approve or turn.reject else PendingKind.QUESTION
        tool = turn.approve or turn.reject
        tool = PLAN_TOOL if tool == "plan" else tool
        kinds = {wanted, PendingKind.INPUT} if turn.input else {wanted}
        target = await self._read_decision(number)
        if target is None:
            found = next((each for each in run.pending if each.kind in kinds and tool in {"", each.tool}), None)
            if found is None:
                waits = ", ".join(f"{each.kind} of {each.tool}" if each.tool else each.kind for each in run.pending)
                self.stop = f"turn {number} {turn}: the run {f'waits for {waits}' if waits else 'is over'}"
                return None
            await self._find_deps(run)  # a run whose world is lost is not decided on
            target = [found.run_id, found.call_id, found.tool, run.version]
            decision_id = f"{self.run_id}-turn-{number}"
            target = await record(self.agent, decision_id, f"Turn {number}: {turn}", lambda: target, self.case)
        *wanted_call, version = target
        if run.version > version:  # it had gone on before, so what the turn before has left is read again
            waited = await self.agent.load(run.id, at=version)
            self.played = [
                attrs.evolve(each, run=waited) if each.run.id == run.id and each.run.version > version else each
                for each in self.played
            ]
        item = next((each for each in run.pending if [each.run_id, each.call_id, each.tool] == wanted_call), None)
        if item is not None:
            await self._find_deps(run)
            await self._post(turn, item, number)
        return run

    async def _post(self, turn: Turn, item: Pending, number: int) -> None:
        if turn.approve:
            await self.agent.approve(item.run_id, item.call_id, arguments=turn.arguments)
        elif turn.reject:
            await self.agent.reject(item.run_id, item.call_id, message=turn.message)
        elif item.kind is PendingKind.INPUT:
            await self.agent.send(item.run_id, turn.input, key=f"eval-{number}")
        else:
            await self.agent.answer(item.run_id, item.call_id, turn.answer or turn.input)

    async def _execute(self, run: Run[Any]) -> Run[Any]:
        if run.is_over:
            return run
        self.is_kept = False
        is_begun = self.has_own_world and not self.is_fresh
        if is_begun and run.is_waiting and _BROKEN.isdisjoint([item.kind for item in run.pending]):
            return run  # it was left so; a decision would have found the world lost
        return await _finish(self.agent, run, await self._find_deps(run))

    async def _find_deps(self, run: Run[Any]) -> Any:
        if self.has_own_world and not self.is_fresh:
            raise _WorldLostError
        if self._deps is _UNSET:
            try:
                found = self.make_deps(run)
                self._deps = await found if isawaitable(found) else found
            except Exception as error:
                raise _BrokenWorldError(f"the function of deps= raised {type(error).__name__}: {error}") from error
        return self._deps

    # What the user says.

    async def _ask_user(self, user: SimulatedUser | NextTurn) -> Turn | None:
        """Return the next turn of a user; None if the user has ended the conversation."""
        number = len(self.played) + 1
        run_id = f"{self.run_id}-user-{number}"
        if isinstance(user, SimulatedUser):
            return await self._ask_model(user, run_id)
        if len(self.played) - (len(self.case.all_turns) - 1) >= MAX_FUNCTION_TURNS:
            self.fault = f"the function of the user has not returned None in {MAX_FUNCTION_TURNS} turns"
            return None

        async def decide() -> Any:
            try:
                found = user(self.runs[-1] if self.runs else None)
                found = await found if isawaitable(found) else found
            except Exception as error:  # noqa: BLE001  the function is the user's code
                return {"fault": f"the function of the user raised {type(error).__name__}: {error}"}
            found = Turn(found) if isinstance(found, str) else found
            if found is None or isinstance(found, Turn):
                return None if found is None else attrs.asdict(found, filter=_is_said)
            return {"fault": f"the function of the user returned {type(found).__name__}: return a Turn, a text or None"}

        found = await record(self.agent, run_id, f"Say the turn {number} of the user.", decide, self.case)
        if found and "fault" in found:
            self.fault = found["fault"]
            return None
        return None if found is None else Turn(**found)

    async def _ask_model(self, user: SimulatedUser, run_id: str) -> Turn | None:
        if len(self.users) == user.max_turns:
            return None
        prompt = _USER_PROMPT.format(goal=user.goal, stop=user.stop)
        actor = Agent(
            resolve_model(user.model),
            name="eval-user",
            instructions=prompt,
            store=self.agent.store,
            clock=self.agent.clock,
        )
        texts = [(_BEGIN, ""), *[(describe_reply(each.run), str(each.turn)) for each in self.played]]
        said: list[Message] = []
        for (heard, _), (_, reply) in pairwise(texts):
            said += [UserMessage(parts=(TextPart(text=heard),)), AssistantMessage(text=reply)]
        try:
            run = await actor.load(run_id)
        except RunNotFoundError:
            case, text = self.case, texts[-1][0]
            run = actor.start(text, messages=said, id=run_id, purpose=PURPOSE, user=case.user, tenant=case.tenant)
        run = await _finish(actor, run)
        self.users.append(run)
        if run.state is not State.DONE:
            self.fault = f"the simulated user broke, {run.stop_reason}: {run.stop_message}"
            return None
        text = run.answer.strip()
        if _END in text or not text:
            return None
        if not text.startswith((_APPROVE, _REJECT)):
            return Turn(text)
        decided = await self._read_decision(len(self.played) + 1)
        asks = (
            [] if not self.runs else [each.tool for each in self.runs[-1].pending if each.kind is PendingKind.APPROVAL]
        )
        tool = next(iter(asks if decided is None else decided[2:3]), "call")
        tool = "plan" if tool == PLAN_TOOL else tool
        reason = text.removeprefix(_REJECT).strip()
        return Turn(approve=tool) if text.startswith(_APPROVE) else Turn(reject=tool, message=reason)


def describe_reply(run: Run[Any]) -> str:
    """Return what the user sees of a run: the answer, or what the agent waits for."""
    if run.state is State.DONE:
        return run.answer or "(no answer)"
    if run.is_over:
        return f"(the assistant failed: {run.stop_reason})"
    lines = [
        f"(asks you to approve {each.tool} {json.dumps(each.arguments, ensure_ascii=False)})"
        if each.kind is PendingKind.APPROVAL
        else " ".join([question.message for question in each.questions]) or each.description or str(each.arguments)
        for each in run.pending
    ]
    return "\n".join(lines)


async def run_beside(agent: Agent[Any], text: str, run_id: str, owner: Owner) -> Run[Any]:
    """Return a run of an evaluation beside the runs of its target, such as a vote; it is made once.

    It has the owner of these, so that it is deleted with them when the words of a user are.
    """
    run = agent.start(text, id=run_id, purpose=PURPOSE, user=owner.user, tenant=owner.tenant)
    return await _finish(agent, run)


async def _finish(agent: Agent[Any], run: Run[Any], deps: Any = None) -> Run[Any]:
    """Execute a run that is new, or was begun before."""
    try:
        if run.version == 0 or run.is_over:
            return await agent.finish(run, deps=deps)
    except LeaseHeldError:  # of a process that was killed a moment ago
        pass
    return await agent.resume(run.id, deps=deps)


def _is_said(field: attrs.Attribute[Any], value: object) -> bool:
    """Return whether a field of a turn says something, so that it is recorded. Checks are functions, and are not."""
    return field.name not in {"expect", "paths"} and bool(value)
