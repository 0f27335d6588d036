"""`python -m benchmarks questions [DIRECTORY]`: about how many calls of ordinary work the policies of guards ask.

The work is that of `agentfsm demo`, of the tutorial and of each example, as it stands there, and of the recorded
dialogues of the Berkeley Function Calling Leaderboard. For the last install `bfcl-eval` and `mpmath` with `--no-deps`,
perhaps into a directory of their own.

A person approves each question, so each call is made. For programs the guards of each agent are replaced by one that
notes the verdict of each policy on a call and lets it run, also in processes that they start. The dialogues are runs of
a session, one for each message of the user, and a scripted model makes the recorded calls one by one. Their tools are
labelled twice: by their authors, as docs/tools.md wants it, and not at all.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import anyio
import attrs

from agentfsm import Agent
from agentfsm.core.header import Header
from agentfsm.guards import CallGuard, Guard, GuardDecision, GuardedCall, GuardVerdict, ToolTraits
from agentfsm.stores import MemoryStore
from agentfsm.testing import ScriptedModel, say
from agentfsm.testing import call as scripted
from agentfsm.tools.tool import Tool, make_tool
from benchmarks.dialogues import Call, Dialogue, build_objects, do_call, read_call
from benchmarks.injections import SCHEMA

POLICIES: Final[Mapping[str, Guard]] = {
    "by_labels": Guard.by_labels(),
    "default": Guard.default(),
    "strict": Guard.strict(),
}
# Name of the variable with the file in which programs note their calls.
LOG: Final = "QUESTIONS_LOG"
# Name of the variable that is set if they are counted for `strict`, which gives results labels of its own.
STRICT: Final = "QUESTIONS_STRICT"
ROOT: Final = Path(__file__).parents[1]
SECONDS: Final = 120
# Files and commands of a page of the tutorial.
_BLOCK: Final = re.compile(r"```(?:python|yaml|toml)\n# ([\w.]+)\n(.*?)```|```bash\n(.*?)```", re.DOTALL)
# Beginnings of the names of the dialogues' methods that change nothing.
_READING: Final = re.compile(
    "absolute_value|add_numbers|calculate_|cat|check_|compute_|diff|display|du|echo_|estimate_|filter_|find|gallon_|get_|"
    "grep|imperial_|list_|liter_|logarithm|ls|max_|mean|message_get|min_|multiply|notify_|percentage|posting_get|power|"
    "pwd|round_|search_|si_|sort|square_|standard_|subtract|sum_|tail|ticket_get|trading_get|verify_|view_|wc"
)
# Methods whose effect others notice, or that give power.
_IRREVERSIBLE: Final = re.compile(
    "book_flight|cancel_booking|cancel_order|close_ticket|comment|contact_customer_support|create_ticket|delete_message|"
    "edit_ticket|follow_user|fund_account|make_transaction|mention|place_order|post_tweet|purchase_insurance|"
    "register_credit_card|resolve_ticket|retweet|rm|rmdir|send_message|unfollow_user|withdraw_funds"
)
# Classes whose results have text of others: messages, posts, tickets.
_OF_OTHERS: Final = frozenset({"MessageAPI", "TwitterAPI", "TicketAPI"})


class Counting(CallGuard):
    """Notes the verdict of each policy on a call, and lets it run."""

    def concerns(self, tool: ToolTraits) -> bool:
        """Concern all calls."""
        return True

    def decide(self, call: GuardedCall) -> GuardDecision | None:
        """Note which policies ask."""
        is_strict = STRICT in os.environ
        decided = {name: guard.decide(call) for name, guard in POLICIES.items() if (name == "strict") is is_strict}
        asking = [name for name, each in decided.items() if each is not None and each.verdict is GuardVerdict.ASK]
        with Path(os.environ[LOG]).open("a", encoding="utf-8") as log:
            log.write(json.dumps({"tool": call.tool.name, "asking": asking}) + "\n")
        return None

    def distrusts(self, tool: ToolTraits) -> bool:
        """Label results as `strict` does, if it is counted."""
        return STRICT in os.environ and POLICIES["strict"].distrusts(tool)

    def for_sub_agent(self, header: Header) -> CallGuard:
        """Leave the calls of sub-agents to the guards of these."""
        return Guard()


def install() -> None:
    """Give each agent that is created in this process no other guard than one that counts."""
    create = Agent.__init__

    def create_counting(agent: Agent[Any], *args: Any, **options: Any) -> None:
        create(agent, *args, **{**options, "guards": [Counting()]})

    Agent.__init__ = create_counting  # type: ignore[assignment, method-assign]


@attrs.define
class Figures:
    """Number of calls, of tasks, and of those with a question, by policy."""

    tasks: int = 0
    calls: int = 0
    questions: Counter[str] = attrs.field(factory=Counter)
    asked_tasks: Counter[str] = attrs.field(factory=Counter)

    def add(self, calls: int, questions: Mapping[str, int]) -> None:
        """Add a task."""
        self.tasks += 1
        self.calls += calls
        for policy in POLICIES:
            self.questions[policy] += questions.get(policy, 0)
            self.asked_tasks[policy] += bool(questions.get(policy))

    def describe(self) -> str:
        """Return a line of the table: tasks, calls, and for each policy tasks with a question and questions."""
        cells = [f"{self.asked_tasks[policy]} ({self.questions[policy]})" for policy in POLICIES]
        return " | ".join([f"{self.tasks}", f"{self.calls}", *cells])


def run_programs(tasks: Mapping[str, Sequence[str]], folder: Path, setting: Mapping[str, str]) -> Figures:
    """Run the commands of tasks in a folder, with guards that count, also in the processes that they start."""
    hook, figures = folder / "hook", Figures()
    hook.mkdir()
    (hook / "sitecustomize.py").write_text("from benchmarks.questions import install\n\ninstall()\n", encoding="utf-8")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for number, (task, commands) in enumerate(tasks.items()):
        log = folder / f"calls-{number}.jsonl"
        environment = {**os.environ, "PATH": path, "PYTHONPATH": f"{hook}{os.pathsep}{ROOT}", LOG: str(log), **setting}
        for command in commands:
            try:
                subprocess.run(  # noqa: S603  commands of this repository
                    ["bash", "-c", command],  # noqa: S607  the shell of the user
                    cwd=folder,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    timeout=SECONDS,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                print(f"{task}: stopped after {SECONDS} s", file=sys.stderr)
        noted = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()] if log.exists() else []
        questions = Counter([policy for each in noted for policy in each["asking"]])
        tools = sorted({each["tool"] for each in noted if each["asking"]})
        figures.add(len(noted), questions)
        if tools:
            print(f"  {task}: {len(noted)} calls, {dict(questions)}, of {', '.join(tools)}", file=sys.stderr)
    return figures


def list_tasks(folder: Path) -> Mapping[str, Mapping[str, list[str]]]:
    """Return the commands of each task, by kind of work and name: the demo, pages of the tutorial, examples."""
    pages: dict[str, list[str]] = {}
    for page in sorted((ROOT / "docs/tutorial").glob("[0-9]-*.md")):
        blocks = _BLOCK.findall(page.read_text(encoding="utf-8"))
        pages[page.stem] = [
            command or f"cat > {name} <<'END-OF-FILE'\n{code}END-OF-FILE\n" for name, code, command in blocks
        ]
    copies = f"cp -r {ROOT}/examples/. {folder}"
    examples = {each.stem: [copies, f"python {each.name}"] for each in sorted((ROOT / "examples").glob("*.py"))}
    return {"demo": {"demo": ["agentfsm demo ."]}, "tutorial": pages, "examples": examples}


async def count_questions(given: Mapping[str, Any], turns: Sequence[Sequence[Call]], guard: Guard, labels: str) -> int:
    """Return the number of questions in a dialogue: each message of the user is a run of one session."""
    objects = build_objects(
        Dialogue(given["id"], given["initial_config"], given["involved_classes"], is_long=False, calls=())
    )
    store, asked = MemoryStore(), 0
    for messages, calls in zip(given["question"], turns, strict=True):
        model = ScriptedModel(*[say("", scripted(each.method, **each.arguments)) for each in calls], "Done.")
        tools = {each.method: build_tool(objects, each, labels) for each in calls}
        agent = Agent(model, tools=list(tools.values()), guards=[guard], name="bfcl", store=store)
        run = await agent.run("\n".join([each["content"] for each in messages]) or "Go on.", session="dialogue")
        while run.pending:
            asked += len(run.pending)
            await agent.decide(approve=run.pending)
            run = await agent.resume(run.id)
        assert run.output == "Done.", run.stop_message
    return asked


def build_tool(objects: Mapping[str, Any], made: Call, labels: str) -> Tool[..., Any]:
    """Return the tool that calls a method."""

    def do(**arguments: Any) -> str:
        return do_call(objects, Call(made.owner, made.method, arguments))

    is_reading = _READING.match(made.method) is not None
    declared: dict[str, Any] = {
        "read_only": is_reading,
        "reads_untrusted": is_reading and made.owner in _OF_OTHERS,
        "irreversible": _IRREVERSIBLE.fullmatch(made.method) is not None,
    }
    chosen = declared if labels == "declared" else {}
    return make_tool(do, name=made.method, description="A method of the benchmark.", parameters=SCHEMA, **chosen)


async def measure_dialogues(labels: str) -> Figures:
    """Return the figures of all dialogues."""
    data, name = files("bfcl_eval") / "data", "BFCL_v4_multi_turn_base.json"
    answers = [json.loads(line) for line in (data / "possible_answer" / name).read_text().splitlines()]
    texts = {each["id"]: each["ground_truth"] for each in answers}
    figures = Figures()
    for given in map(json.loads, (data / name).read_text().splitlines()):
        owners = given["involved_classes"]
        turns = [[read_call(text, owners) for text in turn] for turn in texts[given["id"]]]
        asked = {policy: await count_questions(given, turns, guard, labels) for policy, guard in POLICIES.items()}
        figures.add(sum(map(len, turns)), asked)
    return figures


def main(directory: str | None = None) -> int:
    """Print the table: for each policy the tasks with a question, and in brackets the questions.

    Args:
        directory: Directory of bfcl-eval and mpmath, if they are not installed beside agentfsm.
    """
    print(" | ".join(["work", "tasks", "calls", *POLICIES]))
    for name in ("demo", "tutorial", "examples"):
        both: list[Figures] = []
        for setting in ({}, {STRICT: "1"}):
            with TemporaryDirectory() as folder:
                both.append(run_programs(list_tasks(Path(folder))[name], Path(folder), setting))
        both[0].questions.update(both[1].questions)
        both[0].asked_tasks.update(both[1].asked_tasks)
        print(f"{name} | {both[0].describe()}", flush=True)
    if directory is not None:
        sys.path.insert(0, directory)
    for labels in ("declared", "none"):
        print(f"dialogues, labels: {labels} | {anyio.run(measure_dialogues, labels).describe()}", flush=True)
    return 0
