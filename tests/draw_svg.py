"""Draw the pictures of the documentation as SVG: the machine from its table, timelines from journals of real runs.

`make diagram` writes them to docs/, and a test compares. Time is virtual, so each drawing gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import Any, Literal

import anyio

from agentfsm import TABLE, Agent, Found, JournalEvent, LeaseLostError, RunContext, State, ToolResult, next_state, tool
from agentfsm.core import events
from agentfsm.ports import Request
from agentfsm.stores import MemoryStore
from agentfsm.testing import FunctionModel, VirtualClock, call, run_virtual, say
from agentfsm.testing.models import Line

DOCS = Path(__file__).parent.parent / "docs"
# The colours of the studio: light, dark.
COLOURS = {
    "ink": ("#21201e", "#ebe9e4"),
    "soft": ("#67635b", "#a8a49b"),
    "line": ("#8d887e", "#77736a"),
    "panel": ("#ffffff", "#1e1e1c"),
    "box": ("#f4f3ef", "#2a2a27"),
    "observe": ("#2f6690", "#7db3da"),
    "think": ("#6a58a6", "#a696dc"),
    "act": ("#246050", "#74c4ac"),
    "reflect": ("#8e4467", "#d592b0"),
    "done": ("#246050", "#74c4ac"),
    "error": ("#a62d25", "#ee8f86"),
    "wait": ("#8a4f06", "#e4b061"),
}
# Between two states: the path of the arrow, and where its label is. The states stand at these places.
PLACES = {
    State.OBSERVE: (90, 150),
    State.THINK: (330, 150),
    State.ACT: (570, 150),
    State.REFLECT: (810, 150),
    State.DONE: (570, 40),
    State.ERROR: (450, 330),
}
ARROWS = {
    (State.OBSERVE, State.THINK): ("M140 150 H272", (206, 140)),
    (State.THINK, State.ACT): ("M380 150 H512", (446, 140)),
    (State.ACT, State.REFLECT): ("M620 150 H752", (686, 140)),
    (State.THINK, State.DONE): ("M350 128 C390 60 440 40 512 40", (420, 36)),
    (State.REFLECT, State.DONE): ("M790 128 C750 60 700 40 628 40", (740, 36)),
    (State.THINK, State.REFLECT): ("M360 128 C440 70 700 70 784 126", (570, 98)),
    (State.REFLECT, State.OBSERVE): ("M800 172 C740 262 160 262 100 176", (450, 256)),
    (State.ACT, State.THINK): ("M550 172 C500 202 400 202 352 176", (450, 186)),
    (State.REFLECT, State.THINK): ("M780 172 C700 228 420 228 342 176", (470, 229)),
    (State.OBSERVE, State.ERROR): ("M80 172 C90 300 200 330 392 330", (230, 342)),
    (State.THINK, State.ERROR): ("M334 172 C350 250 390 300 410 308", (350, 290)),
    (State.ACT, State.ERROR): ("M566 172 C550 250 510 300 490 308", (548, 290)),
    (State.REFLECT, State.ERROR): ("M820 172 C810 300 700 330 508 330", (680, 342)),
}
SECOND = 90
LEFT = 190


def draw(title: str, width: int, height: int, parts: Sequence[str]) -> str:
    """Return a picture that follows the theme of the reader."""
    light, dark = ("".join(f"--{name}:{pair[mode]};" for name, pair in COLOURS.items()) for mode in (0, 1))
    return "\n".join(
        [
            (
                f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
                f'viewBox="0 0 {width} {height}" role="img">'
            ),
            f"<title>{escape(title)}</title>",
            (
                f"<style>svg{{{light}font:13px system-ui,sans-serif}}text{{fill:var(--ink)}}.soft{{fill:var(--soft)}}"
                f".small{{font-size:11px}}.title{{font-size:17px;font-weight:600}}"
                ".code{font:16px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace}"
                f"@media(prefers-color-scheme:dark){{svg{{{dark}}}}}</style>"
            ),
            (
                '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
                'orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="var(--line)"/></marker></defs>'
            ),
            f'<rect width="{width}" height="{height}" rx="10" fill="var(--panel)"/>',
            *parts,
            "</svg>\n",
        ]
    )


def put(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    """Return a line of text."""
    return f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{escape(text)}</text>'


def bar(start: float, end: float, y: float, colour: str, height: int = 18) -> str:
    """Return a bar of a timeline, between two times in seconds."""
    x, width = LEFT + start * SECOND, max(end - start, 0.05) * SECOND
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height}" rx="3" fill="var(--{colour})"/>'


def draw_machine() -> str:
    """Return the states with the events between them; an event that leaves its state in place is counted below it."""
    parts = []
    for (source, target), (path, (x, y)) in ARROWS.items():
        names = [event.__name__ for event, end in TABLE[source].items() if end is target]
        middle = (len(names) + 1) // 2
        lines = [", ".join(names[:middle]) + ",", ", ".join(names[middle:])] if len(names) > 1 else names
        parts.append(f'<path d="{path}" fill="none" stroke="var(--line)" marker-end="url(#tip)"/>')
        parts += [put(x, y - 13 * (len(lines) - 1 - n), line, "small soft", "middle") for n, line in enumerate(lines)]
    for state, (x, y) in PLACES.items():
        stays = sum(end is state for end in TABLE[state].values())
        parts.append(
            f'<rect x="{x - 50}" y="{y - 20}" width="100" height="40" rx="8" fill="var(--panel)" '
            f'stroke="var(--{state})" stroke-width="2"/>'
        )
        parts.append(put(x, y + (1 if stays else 5), state.upper(), anchor="middle"))
        if stays:
            parts.append(put(x, y + 15, f"{stays} events stay", "small soft", "middle"))
    return draw("The state machine: six states, and the events between them", 900, 370, parts)


def list_states(history: Sequence[JournalEvent]) -> list[tuple[State, float, float]]:
    """Return the states of a run with the times at which they began and ended, in seconds since its first event."""
    state, since, spans = State.OBSERVE, history[0].at, []
    for event in history:
        after = next_state(state, event)
        if after is not state:
            spans.append((state, since - history[0].at, event.at - history[0].at))
            state, since = after, event.at
    return spans


def draw_axis(seconds: int, y: float) -> list[str]:
    """Return the seconds below a timeline."""
    return [put(LEFT + n * SECOND, y, f"{n} s", "small soft", "middle") for n in range(seconds + 1)]


@tool(read_only=True)
async def search(query: str, seconds: float) -> str:
    """Search for a time."""
    await anyio.sleep(seconds)
    return f"found {query}"


@tool(locks=lambda a: {("file", a.path)})
async def save(path: str, seconds: float) -> str:
    """Save a file, which takes a time."""
    await anyio.sleep(seconds)
    return "saved"


async def think(request: Request) -> Line | str:
    """Think for a second, then ask for five calls or answer."""
    await anyio.sleep(1)
    if isinstance(request.messages[-1], ToolResult):
        return "Done."
    return say(
        "",
        call("search", query="tea", seconds=1.5),
        call("search", query="cups", seconds=2.5),
        call("save", path="a.md", seconds=1.0),
        call("save", path="b.md", seconds=1.6),
        call("save", path="a.md", seconds=0.8),
    )


def run_in_no_time(work: Callable[[VirtualClock], Awaitable[Sequence[JournalEvent]]]) -> Sequence[JournalEvent]:
    """Return the journal that an async function makes in virtual time."""
    return run_virtual(lambda: work(VirtualClock()))


async def make_parallel_turn(clock: VirtualClock) -> Sequence[JournalEvent]:
    """Run a turn with five calls."""
    agent = Agent(FunctionModel(think), tools=[search, save], store=MemoryStore(clock=clock), clock=clock)
    run = await agent.run("Compare tea and cups, and save what you find.")
    return await agent.history(run.id)


def draw_parallel_turn() -> str:
    """Return the states and the calls of a turn over time."""
    history = run_in_no_time(make_parallel_turn)
    began = history[0].at
    chosen = next(event for event in history if isinstance(event, events.ToolsChosen))
    results = {event.result.call_id: event.result for event in history if isinstance(event, events.ToolFinished)}
    parts = [put(20, 34, "state"), *(bar(since, until, 20, state) for state, since, until in list_states(history))]
    for state, since, until in list_states(history):
        if until - since >= 1:
            middle = LEFT + (since + until) / 2 * SECOND
            parts.append(
                f'<text x="{middle:g}" y="33" text-anchor="middle" style="fill:var(--panel)">{state.upper()}</text>'
            )
    for row, asked in enumerate(chosen.message.calls):
        result, y = results[asked.id], 58 + row * 30
        subject = asked.arguments.split('"')[3]
        parts.append(put(20, y + 13, f"{asked.name}({subject})"))
        start = result.started_at - began
        if start > chosen.at - began:
            x = LEFT + (chosen.at - began) * SECOND
            parts.append(
                f'<path d="M{x:g} {y + 9} H{LEFT + start * SECOND:g}" stroke="var(--line)" stroke-dasharray="3 4"/>'
            )
        parts.append(bar(start, start + result.duration_s, y, "act"))
        parts.append(
            put(LEFT + (start + result.duration_s) * SECOND + 8, y + 13, f"{result.duration_s:g} s", "small soft")
        )
    parts += draw_axis(7, 226)
    return draw("A turn with five calls: searches overlap, and two calls that save one file do not", 860, 240, parts)


PAID: dict[str, int] = {}
TAKEN_OVER_S = 4


async def ask_the_bank(ctx: RunContext[Any], _: object) -> Found | Literal["rerun"]:
    """Look the payment up, which takes half a second."""
    await anyio.sleep(0.5)
    return Found("paid") if ctx.idempotency_key in PAID else "rerun"


@tool(on_unknown=ask_the_bank, timeout_s=60)
async def pay(ctx: RunContext[Any], cents: int) -> str:
    """Pay, and never hear of it."""
    await anyio.sleep(0.8)
    PAID[ctx.idempotency_key] = cents
    await anyio.sleep_forever()
    return "paid"


async def make_crash(clock: VirtualClock) -> Sequence[JournalEvent]:
    """Run until a call of `pay`; at four seconds, another worker takes the run over."""

    async def decide(request: Request) -> Line | str:
        await anyio.sleep(1)
        return "Paid." if isinstance(request.messages[-1], ToolResult) else say("", call("pay", cents=500))

    store = MemoryStore(clock=clock)
    first, second = (Agent(FunctionModel(decide), tools=[pay], store=store, clock=clock, name="clerk") for _ in "12")

    async def work() -> None:
        with suppress(LeaseLostError):
            await first.run("Pay order 17", id="order-17")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(work)
        await anyio.sleep(TAKEN_OVER_S)
        run = await second.resume("order-17", takeover=True)
        tasks.cancel_scope.cancel()
    return await second.history(run.id)


def draw_crash() -> str:
    """Return the journal of a run whose worker died while it paid, over time."""
    history = run_in_no_time(make_crash)
    began = history[0].at
    taken = TAKEN_OVER_S
    started = next(event for event in history if isinstance(event, events.ToolStarted)).at - began
    died = started + 1
    parts = [
        put(20, 34, "worker 1"),
        bar(0, started, 20, "think"),
        bar(started, died, 20, "act"),
        put(LEFT + died * SECOND + 8, 34, "killed: its lease ends", "small"),
        put(20, 64, "the bank"),
        bar(started + 0.8, started + 0.85, 50, "wait"),
        put(LEFT + (started + 0.85) * SECOND + 8, 64, "has paid", "small"),
        put(20, 94, "worker 2"),
    ]
    finished = next(event for event in history if isinstance(event, events.ToolFinished)).at - began
    parts += [
        bar(taken, finished, 80, "act"),
        bar(finished, history[-1].at - began, 80, "think"),
        put(LEFT + taken * SECOND, 118, "asks the bank by the key", "small soft"),
        f'<path d="M{LEFT} 136 H{LEFT + 6.4 * SECOND:g}" stroke="var(--line)"/>',
        put(20, 140, "journal"),
    ]
    rows: dict[int, int] = {}
    for event in history:
        x = LEFT + (event.at - began) * SECOND
        row = rows[int(x)] = rows.get(int(x), -1) + 1
        parts.append(f'<circle cx="{x:g}" cy="136" r="4" fill="var(--ink)"/>')
        parts.append(put(x - 4, 158 + row * 15, type(event).__name__, "small"))
    return draw("A worker dies after the bank has paid; the next one looks the payment up", 860, 228, parts)


PICTURES = {"machine.svg": draw_machine, "parallel-turn.svg": draw_parallel_turn, "crash-resume.svg": draw_crash}
"""What draws each picture, by its file in docs/."""
