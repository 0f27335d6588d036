"""Draw what a terminal shows when an agent is killed while it pays: the processes and the kill -9 are real.

`make diagram` writes docs/kill-9.svg, and a test does the same again and compares all but ids and times.
"""

from __future__ import annotations

import os
import re
from html import escape
from pathlib import Path
from subprocess import PIPE, STDOUT, Popen
from tempfile import TemporaryDirectory

from tests.draw_svg import draw, put
from tests.support.tutorial import BLOCK, PAGES, execute, list_variables

STORY = (
    ("1. kill -9 hits the agent after the bank has paid", 'agentfsm run shop:agent "refund order 16" --id r-16'),
    ("2. The bank has paid, and no process knows it", "cat bank.txt"),
    ("3. The next process asks the bank, and does not pay again", "agentfsm resume r-16"),
    ("4. Paid once", "cat bank.txt"),
)
"""What happens, and the command that does it."""
VARYING = re.compile(r"\b[0-9a-f]{16}(?=:t)|(?<=:)[0-9a-f]{8}\b|\d\.\d{3}(?=\ss)")
"""Ids and times in the output, each as long as any other."""
COLOURS = {"$": "soft", "Killed": "error", "order 16": "wait", "Order 16": "done"}
"""Lines by their beginnings: commands, and what the eye should find."""
COLUMNS = 55
"""Characters of a line; the picture stays legible on a telephone."""
WIDTH, BOX, MARGIN, LINE = 620, 580, 20, 21


def run_until_killed(command: str, folder: Path) -> str:
    """Run a command that pays, kill it while it waits for the bank's answer, and return what a terminal shows."""
    os.mkfifo(folder / "answer")
    environment = list_variables(POWER_CUT="1")
    with Popen(["bash", "-c", f"exec {command}"], cwd=folder, env=environment, stdout=PIPE, stderr=STDOUT) as process:
        assert process.stdout
        out = b""
        while b"refund(" not in out:
            line = process.stdout.readline()
            assert line, out
            out += line
        with (folder / "answer").open("w"):  # opens when the tool, which has paid, begins to read the answer
            process.kill()
            process.wait()
    return f"{out.decode()}Killed"


def tell_story() -> list[str]:
    """Return what each command prints, in the shop of the tutorial, with a bank that is slow to answer."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        for page in PAGES[1:3]:
            for block in BLOCK.finditer(page.read_text(encoding="utf-8")):
                if block["name"]:
                    code = block["code"].replace("os.kill(os.getpid(), 9)", 'Path("answer").read_text()')
                    (folder / block["name"]).write_text(code, encoding="utf-8")
        (_, first), *rest = STORY
        return [run_until_killed(first, folder), *(execute(command, folder, list_variables()) for _, command in rest)]


def put_code(y: int, text: str) -> str:
    """Return a line of a terminal; a long one is cut off."""
    colour = next((colour for start, colour in COLOURS.items() if text.startswith(start)), "ink")
    shown = text if len(text) <= COLUMNS else f"{text[: COLUMNS - 2]} …"
    spaced = escape(shown).replace(" ", "\N{NO-BREAK SPACE}")
    return f'<text x="{MARGIN + 16}" y="{y}" class="code" style="fill:var(--{colour})">{spaced}</text>'


def draw_kill() -> str:
    """Return the commands with what they print, in a box for each."""
    parts, y = [], 40
    for (caption, command), out in zip(STORY, tell_story(), strict=True):
        lines = [f"$ {command}", *out.splitlines()]
        height = len(lines) * LINE + 18
        parts += [
            put(MARGIN, y, caption, "title"),
            f'<rect x="{MARGIN}" y="{y + 12}" width="{BOX}" height="{height}" rx="8" fill="var(--box)"/>',
            *(put_code(y + 36 + LINE * at, line) for at, line in enumerate(lines)),
        ]
        y += height + 50
    return draw(
        "A terminal: an agent is killed while it refunds an order, and it is refunded once", WIDTH, y - 18, parts
    )
