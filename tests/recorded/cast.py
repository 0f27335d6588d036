"""What a seed throws: an agent with features, its tools, its model and its memory.

Each throw has dice of its own, made of the seed and of what it is about (this call, this request, this question), so
that no throw depends on how many others came before it, nor on which task came first.
"""

from __future__ import annotations

import hashlib
import json
import random
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import anyio
import attrs

from agentfsm import (
    Agent,
    AnswerCache,
    AssistantMessage,
    Found,
    ImagePart,
    InputRequired,
    Limits,
    ModelError,
    ModelReplyError,
    ModelRetry,
    ModelUnavailableError,
    Permissions,
    Purpose,
    Question,
    RefusedError,
    Rule,
    RunContext,
    Settings,
    Spend,
    TransientError,
    Usage,
    UserMessage,
    ask_user,
    note,
    tool,
    wait,
)
from agentfsm.context import BySimilarity, Context, Cut, SlidingWindow, Summarise, TrimResults, TwoStage
from agentfsm.core.messages import NativeReply
from agentfsm.core.recalled_items import RecalledItem
from agentfsm.core.window_layers import WindowLayers
from agentfsm.engine.execution.output import FINAL_ANSWER
from agentfsm.flow import Flow, Step, agent_step, step, until
from agentfsm.flow import each as for_each
from agentfsm.guards import (
    Guard,
    allow,
    ask,
    exit_filter,
    max_calls,
    no,
    only_for,
    refuse,
    two_of,
    within_clearance,
)
from agentfsm.models import HostedCall, HostedContent, HostedTool, TierClassifier, Tiered, WebSearch
from agentfsm.planning import Planner
from agentfsm.ports import (
    CallChunk,
    Emit,
    FinishChunk,
    FinishReason,
    Model,
    ProposedCall,
    Reply,
    Request,
    TextChunk,
)
from agentfsm.ports.memory_items import Recall
from agentfsm.reflection import Reflector
from agentfsm.tools.attendance import AttendedQuestions

if TYPE_CHECKING:
    from agentfsm import Tool
    from agentfsm.tools.tool import Arguments
    from tests.recorded.seeded_play import World

# The features, one of which each seed has for certain, in turns; it may have others.
FEATURES: Final = (
    "guards",
    "guards above",
    "labels",
    "clearance",
    "allowances",
    "approvals",
    "expiry",
    "unknown outcomes",
    "found calls",
    "kills",
    "poison",
    "workers",
    "cut off",
    "streams",
    "broken streams",
    "broken models",
    "broken tools",
    "breaker",
    "plans",
    "reviewed plans",
    "goals",
    "children",
    "inbox",
    "stops",
    "questions",
    "attended",
    "forks",
    "sessions",
    "limits",
    "last answers",
    "time",
    "tokens",
    "money",
    "spend",
    "typed output",
    "output tools",
    "text filters",
    "validators",
    "judge",
    "memory",
    "answer cache",
    "selection",
    "reminder",
    "window",
    "notes",
    "permissions",
    "loops",
    "flows",
    "tiers",
    "hosted tools",
    "changed programs",
    "long results",
    "four eyes",
    "slow disks",
    "all before a request",
    "all on a reply",
    "all before a start",
    "all on a result",
)
# How likely a feature is that is not the seed's own.
SHARE: Final = 0.09
# What leaves nothing to an answer cache.
NOT_REPEATED: Final = (
    "approvals",
    "selection",
    "children",
    "money",
    "guards above",
    "flows",
    "limits",
    "tokens",
    "poison",
    "sessions",
    "allowances",
)
# Pairs that exclude each other: an agent refuses them, or the one leaves nothing of the other.
EXCLUDED: Final = (
    {"memory", "answer cache"},
    {"typed output", "output tools"},
    *({"answer cache", each} for each in NOT_REPEATED),
    {"plans", "goals"},
    {"plans", "reviewed plans"},
    {"goals", "reviewed plans"},
)
# Features that meet at one point of the engine, so that their order shows: most of them, where the own one is this.
MEETINGS: Final[dict[str, tuple[str, ...]]] = {
    "all before a request": ("memory", "plans", "selection", "reminder", "window", "spend", "last answers", "labels"),
    "all on a reply": ("output tools", "text filters", "hosted tools", "validators", "judge", "loops", "streams"),
    "all before a start": ("guards", "approvals", "money", "spend", "permissions", "breaker", "kills", "allowances"),
    "all on a result": ("children", "money", "labels", "clearance", "long results", "plans", "kills", "expiry"),
}
# Features that the own one of a seed takes along, one of each tuple in turns, where it shows little alone.
PARTNERS: Final[dict[str, tuple[str, ...]]] = {
    "last answers": ("limits, output tools", "tokens", "money", "time", "loops", "broken models"),
    "guards above": ("children", "children, kills"),
    "judge": ("plans", "loops", "reviewed plans"),
    "changed programs": ("guards, expiry", "kills, guards", "plans, kills", "kills", "plans, cut off"),
    "answer cache": ("judge", "typed output, cut off", "kills", "judge", "cut off"),
    "attended": ("questions", "kills"),
    "found calls": ("kills", "slow disks, kills"),
    "money": ("children", "cut off", "plans, cut off", "kills", "cut off, time"),
    "spend": ("cut off", "kills, cut off", "sessions, cut off", "cut off, time", "children, cut off"),
    "cut off": ("slow disks", "broken tools", "slow disks, broken tools"),
    "streams": ("guards", "reviewed plans", "cut off", "reviewed plans, guards", "kills"),
    "sessions": ("guards", "forks"),
    "allowances": ("guards", "kills", "sessions"),
    "children": ("kills", "stops", "expiry", "approvals", "broken tools"),
    "stops": ("children", "slow disks"),
    "tiers": ("broken models", "kills"),
    "loops": ("last answers", "sessions"),
    "time": ("broken tools", "slow disks", "children"),
    "slow disks": ("cut off", "time", "stops", "cut off, kills"),
    "inbox": ("children", "plans", "kills"),
}
CRASHES: Final = 3
TOOL_TIMEOUT_S: Final = 4.0


def features_of(seed: int) -> tuple[str, ...]:
    """Return the features of a seed, its own first."""
    own = FEATURES[seed % len(FEATURES)]
    dice = random.Random(f"features of {seed}")
    found = [own]
    found += [each for each in MEETINGS.get(own, ()) if dice.random() < 0.8]
    if others := PARTNERS.get(own):
        found += [each for each in others[seed // len(FEATURES) % len(others)].split(", ") if each not in found]
    for each in FEATURES:
        if dice.random() < SHARE and each not in found and not any({each, had} in EXCLUDED for had in found):
            found.append(each)
    return tuple(found)


# The world in which a tool or a model finds itself.
here: ContextVar[World] = ContextVar("here")


def digest(*parts: object) -> str:
    """Return a short hash of values that print alike in every process."""
    return hashlib.sha256(repr(parts).encode("utf-8", "surrogatepass")).hexdigest()[:16]


# Tools


class PanicError(BaseException):
    """What a library in Rust raises."""


@tool
async def SHAPE(ctx: RunContext[Any], n: int, text: str = "") -> str:  # noqa: N802  a constant: the schema of all tools
    """Do something."""
    raise NotImplementedError


# What the quiz is answered with.
NUMBER: Final = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
ERRORS: Final[dict[str, type[BaseException]]] = {
    "raise": ValueError,
    "panic": PanicError,
    "passing": TransientError,
    "refuse": RefusedError,
    "retry": ModelRetry,
}


async def _act(ctx: RunContext[Any], made: Tool[..., Any], n: int, text: str) -> Any:
    """Take time, act, and end as the dice say."""
    world = here.get()
    dice = world.throw("tool", ctx.run_id, ctx.call_id)
    await anyio.sleep(0.01 + dice.random() / 8)  # calls that begin together go on one by one
    world.visit("tool")
    if made.name == "quiz" and len(ctx.answers) < 1 + n % 2:
        if ctx.attendance is not None and n > 1:
            asked = Question(key="q0", message="How many?", schema=NUMBER)
            await ctx.attendance.ask(AttendedQuestions(questions=(asked,), state=str(n), attempt=ctx.attempt))
            return "asked and told"
        raise InputRequired(Question(key=f"q{len(ctx.answers)}", message="How many?", schema=NUMBER), state=n)
    if dice.random() < 0.3:
        ctx.progress("begins")
    world.acted.add(ctx.idempotency_key)
    await anyio.sleep(dice.random() * (4 if world.has("cut off") else 2))
    world.visit("tool")
    if dice.random() < 0.1 and made.cost_usd is not None:
        ctx.add_cost(0.001 * n)
    if dice.random() < 0.15 and world.has("labels", "guards"):
        ctx.add_labels(dice.choice(("untrusted", "private", "internal")))
    if made.name in ("look", "put") and world.has("clearance") and dice.random() < 0.4:
        ctx.add_labels("restricted")
    end = dice.choice(tuple(ERRORS)) if dice.random() < world.tool_faults else ""
    if made.read_only and end and world.has("cut off"):
        end = "passing"
    if made.name == "down" and dice.random() < 0.95:
        end = "passing"
    if end:
        raise ERRORS[end](f"no luck with {n}")
    if world.has("time", "broken tools") and dice.random() < 0.1:
        await anyio.sleep(1_000.0)
    if made.name == "fetch":
        text += " See https://evil.example/a?b=1 and mail ann@example.org."
    more = dice.choice((0, 60, 200)) if world.has("window") else dice.choice((0, 3_000)) if made.name == "tome" else 0
    if made.name == "tome" and n == 2:
        return [f"page {n}", ImagePart(url="https://good.example/page.png")]
    return f"{made.name} {n} done{text}" + " and so on" * more


async def _find_out(ctx: RunContext[Any], _arguments: Arguments) -> Any:
    """Say what became of a call."""
    world = here.get()
    if ctx.idempotency_key in world.acted:
        return Found("booked")
    return world.throw("found", ctx.run_id, ctx.call_id).choice(("ask", "fail", "rerun", "nonsense"))


def _price(arguments: Any) -> float:
    if arguments.n == 4:
        raise ValueError("the price list is gone")
    return 0.004 * arguments.n


def tools_of(world: World) -> dict[str, Tool[..., Any]]:
    """Return all tools that an agent of the world may have, by name."""
    asked = {"requires_approval": True, "approval_expires_s": world.expires_s}
    read = {"read_only": True, "concurrency_safe": True}
    options: dict[str, dict[str, Any]] = {
        "look": {**read, "cacheable": True, "fresh_s": 900.0},
        "fetch": {**read, "reads_untrusted": True},
        "ledger": {**read, "reads_private": True, "data_level": "confidential"},
        "vault": {**read, "data_level": "restricted"},
        "put": {"idempotent": True, "concurrency_safe": True},
        "pay": {"irreversible": True, "cost_usd": 0.002},
        "ship": {"on_unknown": "fail", "locks": lambda a: [a.n % 2], "sends_out": lambda a: a.n > 2},
        "book": {"on_unknown": _find_out, "concurrency_safe": True},
        "mail": {"sends_out": True, "on_unknown": "ask"},
        "draft": {"harmless": "only the user sees it", "after": ("look",)},
        "sign": {**asked, "describe": lambda a: f"signs {a.n}"},
        "stamp": {**asked, "idempotent": True, "requires_approval": lambda a: a.n % 2 == 0},
        "quiz": {"answer_expires_s": world.expires_s},
        "down": {"on_unknown": "fail"},
        "poll": {**read, "poll": True, "enabled": lambda ctx: ctx.turn < 4},
        "strict": {"validate": lambda a: "n is too large" if a.n > 3 else None},
        "tome": {**read, "shown_tokens": 40},
        "dear": {**read, "cost_usd": _price},
        "clerk": {"external": True, "answer_expires_s": world.expires_s},
    }
    made: dict[str, Tool[..., Any]] = {
        "ask_user": attrs.evolve(ask_user, answer_expires_s=world.expires_s),
        "wait": attrs.evolve(wait),
        "note": attrs.evolve(note),
    }
    for name, each in options.items():
        declared = {
            "concurrency_safe": False,
            "on_unknown": "rerun" if each.get("read_only") or each.get("idempotent") else "ask",
        }
        level = {"permission": "read" if each.get("read_only") else "write"}
        made[name] = _acting(
            attrs.evolve(SHAPE, name=name, description=f"Do the {name} work.", **declared | level | each)
        )
    return made


def _acting(made: Tool[..., Any]) -> Tool[..., Any]:
    async def act(ctx: RunContext[Any], n: int, text: str = "") -> Any:
        return await _act(ctx, made, n, text)

    made.function = act
    return made


# Models


def _texts(request: Request) -> list[object]:
    """Return what a model reads, in a form that prints alike in every process."""
    return [
        (type(each).__name__, each.text, [(call.name, call.arguments) for call in getattr(each, "calls", ())])
        for each in request.messages
    ]


@attrs.define(eq=False)
class Script(Model):
    """Says what the dice say about a request, in whole or piece by piece."""

    name: str = "dice"
    window_tokens: int = 128_000

    def unsupported_hosted_tool(self, tool: HostedTool) -> str | None:
        """Take all of them."""
        return None

    async def reply(self, request: Request, emit: Emit | None = None) -> Reply:
        """Answer, call tools, or fail; the same request another time is another throw."""
        world = here.get()
        world.visit("model")
        tools, settings = [each.name for each in request.tools], request.settings
        read = digest(request.instructions, _texts(request), tools, settings, request.purpose, request.output)
        dice = world.throw("model", self.name, read)
        world.happens(f"asked for a {request.purpose}")
        await anyio.sleep(0.05 + dice.random())
        world.visit("model")
        if dice.random() < world.model_faults:
            raise dice.choice((ModelUnavailableError, ModelUnavailableError, ModelReplyError, ModelError))("overloaded")
        text, calls = self._speak(request, dice)
        usage = None if dice.random() < 0.1 else Usage(input_tokens=20 + 3 * len(request.messages), output_tokens=9)
        reason = FinishReason.TOOL_CALLS if calls else FinishReason.STOP
        if world.has("broken models") and dice.random() < 0.2:
            reason = dice.choice((FinishReason.LENGTH, FinishReason.CONTENT_FILTER, FinishReason.REFUSAL))
            calls = tuple(attrs.evolve(each, arguments=each.arguments[:5]) for each in calls)
        if emit is not None:
            await self._emit(text, calls, reason, emit, dice)
        more: dict[str, Any] = {"thinking": "hm" + _leak(dice)} if world.has("hosted tools", "text filters") else {}
        if world.has("hosted tools") and request.purpose is Purpose.TURN and dice.random() < 0.5:
            found = HostedCall(tool="web_search", id="h", arguments="{}", output="a page")
            more["hosted"] = HostedContent(calls=(found,))
            more["native"] = NativeReply(provider="dice", content="{}", model=self.name)
            if not calls and dice.random() < 0.3:
                reason = FinishReason.PAUSED
        if world.has("tiers", "hosted tools", "typed output") and dice.random() < 0.5:
            more["served_model"] = "another-2027-01-01"
        return Reply(text=text, calls=calls, finish_reason=reason, usage=usage, **more)

    async def _emit(
        self, text: str, calls: tuple[ProposedCall, ...], reason: FinishReason, emit: Emit, dice: random.Random
    ) -> None:
        world = here.get()
        breaks = world.has("broken streams") and dice.random() < 0.35
        pieces: list[Any] = [TextChunk(each + " ") for each in text.split(" ")[:6]]
        for index, each in enumerate(calls):
            done = dice.random() < 0.5
            pieces.append(CallChunk(index=index, name=each.name))
            pieces.append(CallChunk(index=index, arguments=each.arguments, is_complete=done))
        stop_at = dice.randrange(1, len(pieces) + 1) if breaks and pieces else -1
        for number, each in enumerate(pieces, 1):
            emit(each)
            if dice.random() < 0.6:
                await anyio.sleep(dice.random() / 2)
            world.visit("model")
            if number == stop_at:
                world.happens("a stream breaks")
                raise ModelUnavailableError("the connection was lost")
        emit(FinishChunk(reason=reason))

    def _speak(self, request: Request, dice: random.Random) -> tuple[str, tuple[ProposedCall, ...]]:
        world, offered = here.get(), [each.name for each in request.tools]
        match request.purpose:
            case Purpose.PLAN:
                return _plan(request, dice), ()
            case Purpose.JUDGE:
                return _judge(request, dice), ()
            case Purpose.ROUTING:
                return dice.choice(("small", "large", "neither")), ()
            case Purpose.TOOL_SELECTION:
                return json.dumps(dice.sample(sorted(world.tools), 4)), ()
            case Purpose.LAST_ANSWER if world.has("output tools") and dice.random() < 0.7:
                return "", (ProposedCall(id="end", name=FINAL_ANSWER, arguments=_typed(world, dice)),)
            case Purpose.SUMMARY | Purpose.PLAN_QUESTION | Purpose.LAST_ANSWER:
                return _answer(world, dice), ()
        since = [n for n, each in enumerate(request.messages) if isinstance(each, UserMessage) and not each.is_note]
        spoken = request.messages[since[-1] if since else 0 :]
        turns = sum(isinstance(each, AssistantMessage) for each in spoken)
        finals = [each for each in offered if each not in (*world.tools, *world.agents, *BUILT_IN)]
        ends = 0.02 if world.has("loops") else 0.12
        if turns >= world.turns or dice.random() < ends or not offered:
            if finals and dice.random() < 0.8:  # the answer is a call
                final = dice.choice(finals)
                return "", (ProposedCall(id="end", name=final, arguments=_typed(world, dice)),)
            return _answer(world, dice), ()
        chosen = [each for each in offered if each not in finals] or offered
        calls = [self._call(index, chosen, dice) for index in range(dice.choice((1, 1, 2, 2, 3, 5)))]
        if world.has("loops") and dice.random() < 0.97:  # also when it was withdrawn
            calls = [ProposedCall(id="p0", name="look" if world.seed % 2 else "put", arguments='{"n": 1}')]
        if world.has("breaker") and "down" in offered and dice.random() < 0.8:
            calls = [ProposedCall(id=f"p{n}", name="down", arguments=f'{{"n": {n}}}') for n in range(6)]
        return (_remark(world, dice) if dice.random() < 0.3 else ""), tuple(calls)

    def _call(self, index: int, names: list[str], dice: random.Random) -> ProposedCall:
        world = here.get()
        liked = [each for each in names if each in world.liked]
        name = "nobody" if dice.random() < 0.02 else dice.choice(liked if liked and dice.random() < 0.6 else names)
        match name:
            case "ask_user":
                arguments: dict[str, Any] = {"question": f"which {dice.randint(1, 9)}?"}
            case "wait":
                arguments = {"seconds": dice.choice((1, 3, 30)), "reason": "to see"}
            case "note":
                arguments = {"key": dice.choice(("plan", "facts")), "value": f"remember {dice.randint(1, 9)}"}
            case "helper" | "scout":
                arguments = {"query": f"help {dice.randint(1, 9)}"}
            case "find_tools":
                arguments = {"query": dice.choice(("mail", "money", "papers"))}
            case "read_result":
                arguments = {"call_id": "t1.0", "start": 0}
            case _:
                arguments = {"n": dice.choice((2, 2, 4)) if world.has("allowances") else dice.randint(1, 4)}
                if dice.random() < 0.2:
                    arguments["text"] = dice.choice(("ann@example.org", "hello", "card 4111 1111 1111 1111"))
        text = json.dumps(arguments)
        return ProposedCall(id=f"p{index}", name=name, arguments=text[:-2] if dice.random() < 0.03 else text)


def _remark(world: World, dice: random.Random) -> str:
    return f"so be it{_leak(dice) if world.has('text filters') and dice.random() < 0.6 else ''}"


def _leak(dice: random.Random) -> str:
    return dice.choice((" ann@example.org", " https://evil.example/x?d=1", " secret-of-the-house", " 13800138000"))


class Priced(Script):
    """A script whose tokens cost money."""

    def cost_usd(self, usage: Usage) -> float:
        """Return the price of a reply."""
        return usage.input_tokens * 0.00001 + usage.output_tokens * 0.0002


def _typed(world: World, dice: random.Random) -> str:
    fine = {"text": f"so be it {dice.randint(1, 9)}", "n": dice.randint(1, 9)}
    return json.dumps(fine if dice.random() < 0.7 else {"text": 1, "n": "many"})


def _answer(world: World, dice: random.Random) -> str:
    if world.has("typed output", "output tools"):
        return _typed(world, dice)
    told = f"the answer is {dice.randint(1, 9)}"
    if world.has("text filters") and dice.random() < 0.6:
        told += _leak(dice)
    return told if dice.random() < 0.97 else ""


def _plan(request: Request, dice: random.Random) -> str:
    """Plan some steps, with references to earlier ones and now and then a flaw."""
    world, instructions = here.get(), "\n".join([each.text for each in request.messages[-2:]])
    first = int(instructions.partition("Number the steps from ")[2].partition(".")[0])
    if '{"keep": true}' in instructions and dice.random() < 0.6:
        return '{"keep": true}'
    steps: list[dict[str, Any]] = []
    names = [
        each
        for each in world.tools
        if each not in ("wait", "note", "ask_user", "clerk") and f'"name": "{each}"' in request.messages[-1].text
    ]
    for number in range(first, first + dice.choice((0, 1, 2, 3, 4))):
        before = [each["id"] for each in steps if dice.random() < 0.4]
        step: dict[str, Any] = {"id": number, "after": before}
        if before and dice.random() < 0.15:
            step["question"] = "which is better?"
        elif "goal" in instructions and dice.random() < 0.4 and names:
            step |= {"goal": "find out", "tools": [dice.choice(names)]}
        else:
            liked = [each for each in names if each in world.liked]
            step |= {"tool": dice.choice(liked or names or ["nobody"]), "arguments": {"n": dice.randint(1, 4)}}
            if before and dice.random() < 0.4:
                step["arguments"]["text"] = {"$text": ["after ", {"$step": before[0]}]}
        steps.append(step)
    if dice.random() < 0.1:
        return "no plan"
    return json.dumps({"analysis": "as it is", "steps": steps})


def _judge(request: Request, dice: random.Random) -> str:
    if "Score each criterion" not in "\n".join([each.text for each in request.messages[-2:]]):
        said = {"correct": dice.random() < 0.7, "more_needed": dice.random() < 0.4, "next_step": "look again"}
        return json.dumps(said)
    names = ("completeness", "correctness", "format")
    lowest = dice.choice((4, 5)) if here.get().has("answer cache") else dice.choice((1, 3, 4, 4, 5))
    scores = {each: {"score": dice.randint(lowest, 5), "reason": "as it is"} for each in names}
    action = dice.choice(("accept", "accept", "retry_step", "replan", "escalate"))
    more = {"overall_pass": lowest > 3, "retry_details": {"step_id": "1", "modification": "look again"}}
    said = {"evaluation": scores, "action": action, **more}
    return json.dumps(said) if dice.random() < 0.9 else "fine"


# Tools of the engine.
BUILT_IN: Final = ("find_tools", "read_result")

# Memory


class Shelf:
    """A memory that finds what the dice say, or fails."""

    def wants(self, run: Any) -> bool:
        """Whether the run has a user."""
        return run.header.user is not None

    async def recall_for(self, run: Any, query: str, demand: Any) -> Recall:
        """Find items."""
        world = here.get()
        dice = world.throw("memory", run.id, query)
        await anyio.sleep(dice.random())
        if dice.random() < 0.15:
            raise ValueError("the shelf is empty")
        items = [
            RecalledItem(
                id=f"m{number}",
                kind="fact",
                text=f"fact {dice.randint(1, 99)}",
                score=round(dice.random(), 3),
                valid_from=1_700_000_000.0,
                labels=dice.choice(((), ("untrusted",), ("private", "internal"))),
            )
            for number in range(dice.choice((0, 1, 2)))
        ]
        usage = Usage(input_tokens=7) if dice.random() < 0.5 else Usage()
        layers = WindowLayers(instructions=9, memory=90, history=900, reserve=99) if dice.random() < 0.5 else None
        return Recall(
            layers=layers,
            items=tuple(items),
            usage=usage,
            model="shelf" if usage.tokens else "",
            left_out=dice.choice((0, 2)),
        )


# Agents


@dataclass
class Report:
    """An answer with a form."""

    text: str
    n: int


def _check_report(value: Any) -> Any:
    if sum(map(ord, str(value))) % 3 == 0:
        raise ModelRetry("a multiple of three")
    return value


def _choose_tier(request: Request) -> str | None:
    return "small" if len(request.messages) == 3 else None


class Sourced(str):
    """A text that was rendered from a prompt."""

    __slots__ = ()
    sources = ("brief@1#abc",)


def _remind(run: Any) -> str:
    return Sourced(f"turn {run.turn // 2}: be brief")


# All tools.
TOOLS: Final = (
    "look", "fetch", "ledger", "vault", "tome", "put", "pay", "ship", "book", "mail", "draft", "sign", "stamp", "quiz",
    "down", "poll", "strict", "dear", "clerk", "ask_user", "wait", "note",
)  # fmt: skip
# Tools that each feature is about; the model likes them.
LIKED: Final[dict[str, tuple[str, ...]]] = {
    "guards": ("put", "pay", "ship", "draft"),
    "guards above": ("helper", "pay", "mail"),
    "labels": ("fetch", "mail", "pay", "ledger", "put"),
    "clearance": ("ledger", "vault", "look"),
    "allowances": ("sign", "stamp"),
    "approvals": ("sign", "stamp"),
    "expiry": ("sign", "quiz", "ask_user", "clerk"),
    "unknown outcomes": ("pay", "ship", "mail", "book"),
    "found calls": ("book", "put"),
    "breaker": ("down",),
    "children": ("helper", "scout"),
    "questions": ("quiz", "ask_user", "clerk", "wait"),
    "attended": ("quiz",),
    "streams": ("look", "fetch", "ledger", "put"),
    "broken streams": ("look", "fetch", "put"),
    "money": ("dear", "pay", "helper"),
    "spend": ("dear", "pay"),
    "notes": ("note",),
    "answer cache": ("look",),
    "plans": ("look", "put", "book", "sign", "pay"),
    "reviewed plans": ("look", "put", "pay"),
    "goals": ("look", "put"),
    "permissions": ("strict", "poll", "pay", "nobody"),
    "text filters": ("mail", "fetch"),
    "loops": ("look", "put"),
    "long results": ("tome",),
    "four eyes": ("sign", "stamp", "pay"),
    "slow disks": ("put", "pay", "book"),
    "cut off": ("look", "put"),
    "changed programs": ("put", "put", "pay", "sign"),
}


def guards_of(world: World) -> list[Any]:
    """Return the guards of the agent at the top."""
    found: list[Any] = []
    if world.has("guards"):
        odd = Rule("pay", lambda a: a.n % 2 == 1)
        found.append(
            Guard(ask("put", "pay"), refuse(Rule("ship", lambda a: a.n == 1)), allow(odd), max_calls("put", 2))
        )
        found.append(Guard(max_calls("s*", 3, verdict="ask"), only_for("draft", "staff")))
    if world.has("guards above"):
        found.append(Guard(ask(Rule("pay", lambda a: a.n > 1)), refuse("mail"), max_calls("look", 4)))
    if world.has("labels"):
        strict = world.throw("strict").random() < 0.3
        found.append(Guard(Guard.strict() if strict else Guard.default(), no("private", "sends_out", verdict="refuse")))
        found.append(Guard(two_of("untrusted", "private", "irreversible")))
    if world.has("clearance"):
        found.append(Guard(within_clearance("confidential")))
    if world.has("text filters"):
        mode = world.throw("mode").choice(("redact", "refuse"))
        found.append(Guard(exit_filter(mode=mode, secrets=["secret-of-the-house"], allow_hosts=["good.example"])))
    return found


def agent_of(world: World, store: Any, *, changed: bool = False) -> Agent[Any]:
    """Return the agent of a process, or another version of it."""
    tools = tools_of(world)
    dice = world.throw("agent", again=False)
    if world.has("flows"):
        return flow_of(world, tools, store)
    small = world.has("window")
    model_class = Priced if world.has("money", "spend") else Script
    other = model_class("other") if dice.random() < 0.5 else None
    limits: dict[str, Any] = {
        "turns": 3 if world.has("limits") else 9,
        "tokens": dice.choice((900, 1_500, 2_500)) if world.has("tokens") else 200_000,
        "seconds": 6.0 if world.has("time") else 300.0,
        "usd": 0.02 if world.has("money") else None,
        "tool_calls": 5 if world.has("limits") else 60,
        "parallel": dice.choice((1, 3, 20)),
        "errors": 3,
        "model_retries": dice.choice((0, 1, 2)),
        "retry_wait_s": 0.5,
        "tool_timeout_s": TOOL_TIMEOUT_S,
        "crashes": CRASHES,
    }
    settings = Settings(max_tokens=40 if world.has("money", "spend", "window") else None, stream=world.streams)
    shared: dict[str, Any] = {"store": store, "clock": world.store.clock}
    names = [each for each in tools if each in world.liked] + dice.sample(sorted(tools), 4)
    if world.has("answer cache"):
        names = ["look"]
    mine = [tools[each] for each in dict.fromkeys(names) if each in tools]
    if world.has("guards above", "children", "money") and not world.has("answer cache"):
        mine += _helpers(world, limits)
    if changed:
        mine = [each for each in mine if each.name != "pay" or world.seed % 4]
        mine = [attrs.evolve(each, name="place") if each.name == "put" else each for each in mine]
    if world.has("selection"):
        mine += [tools[each] for each in sorted(tools) if tools[each] not in mine]
    options: dict[str, Any] = {}
    if world.has("plans", "reviewed plans", "goals"):
        options["planner"] = Planner(
            model=other,
            replans=dice.choice((0, 1, 2)),
            mode="hybrid" if world.has("goals") else "plan",
            review=world.has("reviewed plans"),
            review_expires_s=world.expires_s,
            replan=dice.choice(("on_failure", "on_failure", "each_step", "each_step", "never")),
        )
    if world.has("typed output"):
        options |= {"output_type": Report, "output_mode": "prompt"}
    if world.has("output tools"):
        options |= {"output_type": Report, "output_mode": "tool"}
    if world.has("validators"):
        options["output_validators"] = [_check_report]
    if world.has("judge"):
        judged = {"look", "put", "sign"} if dice.random() < 0.6 else set()
        options["reflector"] = Reflector(
            model=other, tools=judged, answers=not judged or dice.random() < 0.6, corrections=dice.choice((1, 3))
        )
    if world.has("memory"):
        options["memory"] = Shelf()
    if world.has("answer cache"):
        options["answer_cache"] = AnswerCache(ttl_s=1_000.0, wait_s=2.0)
    if world.has("selection"):
        options["selector"] = dice.choice((BySimilarity(top=4), TwoStage(picks=3)))
    if world.has("reminder"):
        options["reminder"] = _remind
    if small:
        kept = dice.choice(((TrimResults(), SlidingWindow()), (Summarise(model=other),), (Cut(messages=4),)))
        options["context"] = Context(kept)
    if world.has("spend"):
        options["spend"] = [Spend(per="day", usd=0.03), Spend(per="month", usd=0.05, scope="user")]
    if world.has("permissions"):
        odd = [] if world.has("answer cache") else [Rule("look", lambda a: a.n == 2)]  # whose text differs by process
        options["permissions"] = Permissions(level="write", deny=["pay", *odd])
    model: Model = model_class("top-2027-01-01" if world.has("hosted tools") else "top", 900 if small else 128_000)
    if world.has("tiers"):
        router = TierClassifier(model_class("router"), {"small": "what is easy", "large": "all else"})
        model = Tiered({"small": model_class("small"), "large": model}, choose=_choose_tier, classifier=router)
    if world.has("hosted tools"):
        mine = [*mine, WebSearch()]
    limit = Limits(**limits)
    return Agent(
        model,
        tools=mine,
        instructions="Do it in another way." if changed else "Do it.",
        guards=[
            *guards_of(world),
            *(
                [
                    Guard(
                        ask("place", "book", "sign"), refuse("ship", *(("sign",) if world.has("guards") else ("look",)))
                    )
                ]
                if changed
                else []
            ),
        ],
        limits=limit,
        settings=settings,
        last_answer=world.has("last answers"),
        name="top",
        **options,
        **shared,
    )


def _helpers(world: World, limits: dict[str, Any]) -> list[Tool[..., Any]]:
    """Return two agents as tools; the second works for the first."""
    below = tools_of(world)
    priced = Priced if world.has("money", "spend") else Script
    reader = Agent(priced("scout"), tools=[below[each] for each in ("look", "fetch")], name="scout")
    names = ("look", "pay", "sign", "ask_user", "mail", "put")
    own = [Guard(ask("put"))] if world.has("guards above") else []
    helper = Agent(
        priced("helper"),
        tools=[*[below[each] for each in names], reader.as_tool(timeout_s=20.0)],
        name="helper",
        guards=own,
        limits=Limits(**{**limits, "turns": 4, "usd": None}),
    )
    return [helper.as_tool(timeout_s=15.0, turns=4, cost_usd=0.001), attrs.evolve(reader).as_tool(timeout_s=20.0)]


def flow_of(world: World, tools: dict[str, Tool[..., Any]], store: Any) -> Flow:
    """Return a flow: steps that join, one for each item, one that is repeated, an agent, and what undoes some."""

    async def act(name: str, ctx: RunContext[Any], n: int) -> str:
        return await _act(ctx, tools[name], n, "")

    async def undo(ctx: RunContext[Any], take: str) -> str:
        return await act("put", ctx, 1)

    async def take(ctx: RunContext[Any]) -> str:
        return await act("book", ctx, 2)

    async def count(ctx: RunContext[Any]) -> list[int]:
        await act("look", ctx, 1)
        return [1, 2, 3]

    async def handle(ctx: RunContext[Any], item: int) -> str:
        return await act("put", ctx, item)

    async def knock(ctx: RunContext[Any], knock: str = "") -> str:
        return await act("look", ctx, 1) + knock[:4]

    async def pass_over(ctx: RunContext[Any]) -> str:
        return await act("put", ctx, 2)

    async def close(ctx: RunContext[Any], take: str, handle: list[str | None]) -> str:
        return await act("pay", ctx, 3)

    dice = world.throw("flow", again=False)
    asks = {"requires_approval": dice.random() < 0.4, "approval_expires_s": world.expires_s}
    wanted = dice.random() < 0.5
    first = step(take, on_unknown="ask", compensate=step(undo, idempotent=True), **asks)
    counted = step(count, read_only=True)
    items = for_each(step(handle, idempotent=True, key=lambda item: f"item-{item}"), over=counted, key=str)
    skipped = step(pass_over, when=lambda: wanted)
    knocks = until(step(knock, read_only=True), lambda knock: len(knock) > 14, times=3, on_limit="accept")
    reader = Agent(Script("scout"), tools=[tools["look"]], name="scout")
    asked = agent_step(reader, "look around", depends_on=[first], fallback="nothing", timeout_s=30.0)
    ended = step(close, depends_on=[first, items], join=dice.choice(("all_success", "all_done", "any")))
    steps: list[Step] = [first, counted, items, skipped, knocks, asked, ended]
    return Flow(steps, name="top", store=store, clock=world.store.clock, guards=guards_of(world))
