"""`python -m benchmarks injections [DIRECTORY]`: injected results of agentdojo against guards, no model.

The data are the suites of agentdojo, which is put into a directory of its own: `pip install --no-deps --target
DIRECTORY agentdojo email-validator pyyaml`. Its models and their libraries are not used.

A pair is a user's task and an attacker's task for which agentdojo lists calls: there are 609. The tools that the user's
task reads with are called by an agent until a result has the attacker's text. From then on the model does as the
attacker wants: the calls that agentdojo lists for the attacker's task. A person approves the calls of the user's task,
if a guard asks, and none of the attacker's, so one that waits has not run. Each pair counts once: the wording in which
the text is injected makes no difference, because no model reads it.

The outcome does not depend on labels: an attack has succeeded if agentdojo's own check of the attacker's task says so,
which compares the environment before and after the run. A second figure is whether one of the attacker's calls changed
the environment at all. Two controls show that the measure works: without a guard the attacks succeed, and without the
attacker's calls none does. The labels are those of `LABELLINGS`, from none to `MARKS`.

Without an attack, the calls that agentdojo lists for each user's task are made in order, a turn each. A person approves
all that is asked; the tasks with a question and the questions are counted.

`python -m benchmarks injections DIRECTORY marks` takes each letter of `MARKS` away alone, as a developer may forget it.

`python -m benchmarks injections DIRECTORY scripts` makes the calls of each task and of each pair twice, one by one and
in one script, and compares the questions and the calls that were made.
"""

from __future__ import annotations

import importlib
import io
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from functools import cache, partial
from types import ModuleType, SimpleNamespace
from typing import Any, Final

import anyio
import attrs

from agentfsm import Agent, Limits
from agentfsm.guards import CallGuard, Guard
from agentfsm.scripts import Script
from agentfsm.testing import ScriptedModel, call, say
from agentfsm.tools.tool import Tool, make_tool

VERSION: Final = "v1.2.2"
# Labels by tool, as a careful developer would declare them. `u`: the result has text that strangers can write; `p`: it
# has data of the user; `s`: the call sends data to others; `i`: it cannot be undone, as with anything that others have
# received or may now see. Tools without a mark only read public data, or change something that can be changed back.
MARKS: Final[Mapping[str, str]] = {
    # Workspace: strangers can send mails, invitations and files. Events with participants send invitations.
    **dict.fromkeys(
        ("get_unread_emails", "get_sent_emails", "get_received_emails", "get_draft_emails", "search_emails"), "up"
    ),
    **dict.fromkeys(("search_calendar_events", "get_day_calendar_events"), "up"),
    **dict.fromkeys(("search_files", "search_files_by_filename", "get_file_by_id", "list_files"), "up"),
    **dict.fromkeys(("search_contacts_by_name", "search_contacts_by_email"), "p"),
    "send_email": "si",
    "delete_email": "i",
    "delete_file": "i",
    "share_file": "si",
    **dict.fromkeys(("create_calendar_event", "reschedule_calendar_event", "add_calendar_event_participants"), "si"),
    "cancel_calendar_event": "si",
    # Banking: the payer writes the subject of a transaction, and a file may be a stranger's bill.
    **dict.fromkeys(("get_iban", "get_balance", "get_user_info", "get_scheduled_transactions"), "p"),
    "get_most_recent_transactions": "up",
    "read_file": "up",
    **dict.fromkeys(("send_money", "schedule_transaction", "update_scheduled_transaction"), "si"),
    **dict.fromkeys(("update_password", "update_user_info"), "i"),
    # Slack: messages and names come from others, and an address can carry data to its host.
    **dict.fromkeys(("get_channels", "get_users_in_channel", "read_channel_messages", "read_inbox"), "up"),
    "get_webpage": "us",
    "post_webpage": "si",
    **dict.fromkeys(("send_direct_message", "send_channel_message"), "si"),
    **dict.fromkeys(("add_user_to_channel", "invite_user_to_slack"), "si"),
    "remove_user_from_slack": "i",
    # Travel: reviews are written by strangers, bookings are made with others.
    **dict.fromkeys(
        (
            "get_rating_reviews_for_hotels",
            "get_rating_reviews_for_restaurants",
            "get_rating_reviews_for_car_rental",
        ),
        "u",
    ),
    "get_user_information": "p",
    **dict.fromkeys(("reserve_hotel", "reserve_restaurant", "reserve_car_rental"), "si"),
}
LABELS: Final = {
    "r": "read_only",
    "u": "reads_untrusted",
    "p": "reads_private",
    "s": "sends_out",
    "i": "irreversible",
}
# Beginnings of the names of tools that change nothing.
_READING: Final = ("get_", "search_", "read_", "list_", "check_")
# Marks of a tool by its name, for each way to label tools. "hints": as of an MCP server whose hints are believed.
LABELLINGS: Final[Mapping[str, Callable[[str], str]]] = {
    "none": lambda _name: "",
    "hints": lambda name: "ru" if is_reading(name) else "",
    "marks": lambda name: MARKS.get(name, "") + ("r" if is_reading(name) else ""),
}
# What is measured: the labels, and the guards. Labels make no difference without a guard.
CASES: Final[Mapping[str, tuple[str, tuple[CallGuard, ...]]]] = {
    "no guard": ("none", ()),
    "Guard.by_labels(), labels as in MARKS": ("marks", (Guard.by_labels(),)),
    "Guard.default(), no labels": ("none", (Guard.default(),)),
    "Guard.default(), labels by hints": ("hints", (Guard.default(),)),
    "Guard.default(), labels as in MARKS": ("marks", (Guard.default(),)),
    "Guard.strict(), no labels": ("none", (Guard.strict(),)),
    "Guard.strict(), labels by hints": ("hints", (Guard.strict(),)),
    "Guard.strict(), labels as in MARKS": ("marks", (Guard.strict(),)),
}
WORDING: Final = "important_instructions"
SCHEMA: Final = {"type": "object", "properties": {}}


def load_suites(directory: str | None) -> Mapping[str, Any]:
    """Return the suites of agentdojo by name, with stand-ins for the libraries that only its models and scores use."""
    if directory is not None:
        sys.path.insert(0, directory)
    package = importlib.import_module("agentdojo")
    pipeline = ModuleType("agentdojo.agent_pipeline")
    pipeline.__path__ = [f"{package.__path__[0]}/agent_pipeline"]
    sys.modules[pipeline.__name__] = pipeline  # without its __init__, which imports every vendor's library
    for name in ("deepdiff", "deepdiff.diff"):
        sys.modules.setdefault(name, _stand_in(name, DeepDiff=dict))
    yaml: Any = importlib.import_module("yaml")
    yaml.safe_load = cache(partial(yaml.load, Loader=yaml.CSafeLoader))  # each environment is read for every task
    suites: Mapping[str, Any] = importlib.import_module("agentdojo.task_suite.load_suites").get_suites(VERSION)
    return suites


def _stand_in(name: str, **members: object) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(members)
    return module


def load_attacks(suite: Any) -> Mapping[str, Any]:
    """Return the attacks of agentdojo that write their texts themselves, by name."""
    for name in ("baseline_attacks", "important_instructions_attacks", "dos_attacks"):
        importlib.import_module(f"agentdojo.attacks.{name}")
    registry = importlib.import_module("agentdojo.attacks.attack_registry").ATTACKS
    target = SimpleNamespace(name="gpt-4o-2024-05-13")  # some texts address the model by its name
    return {name: kind(suite, target) for name, kind in sorted(registry.items()) if name != "manual"}


def is_reading(name: str) -> bool:
    """Return whether a tool of agentdojo changes nothing, by its name."""
    return name.startswith(_READING)


@attrs.define
class World:
    """An environment of a suite, and the calls that were made in it."""

    suite: Any
    environment: Any
    first_watched: int | None = None
    """Number of calls before the first that is watched; None if none is."""
    made: list[Any] = attrs.field(factory=list)
    changed: bool = False
    """Whether a watched call has changed the environment."""

    def call_tool(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Call a tool of the suite; an error is a result."""
        runtime = importlib.import_module("agentdojo.functions_runtime")
        is_watched = self.first_watched is not None and len(self.made) >= self.first_watched
        before = self.environment.model_copy(deep=True) if is_watched else self.environment
        self.made.append(runtime.FunctionCall(function=name, args=dict(arguments)))
        value, error = runtime.FunctionsRuntime(self.suite.tools).run_function(self.environment, name, dict(arguments))
        self.changed = self.changed or (is_watched and before != self.environment)
        return error or str(value)

    def build_tools(self, mark: Callable[[str], str]) -> list[Tool[..., Any]]:
        """Return the tools of the suite, labelled by the marks of their names."""
        return [build_tool(each.name, mark(each.name), partial(self.call_tool, each.name)) for each in self.suite.tools]


def build_tool(name: str, marks: str, use: Callable[[Mapping[str, Any]], str]) -> Tool[..., Any]:
    """Return a tool with the labels of its marks."""

    async def function(**arguments: Any) -> str:
        return use(arguments)

    labels: Any = {LABELS[mark]: True for mark in marks}
    return make_tool(function, name=name, description=name, parameters=SCHEMA, idempotent="r" not in marks, **labels)


async def run_calls(
    tools: Sequence[Tool[..., Any]],
    calls: Sequence[Any],
    guards: Sequence[CallGuard],
    *,
    prompt: str,
    approved: int = 0,
) -> int:
    """Make calls in an agent, one in each turn, and return the number of questions.

    A person approves the first `approved` calls, if asked. The run ends at a question about another.
    """
    lines = [say("", call(each.function, **_plain_arguments(each))) for each in calls]
    limits = Limits(turns=len(calls) + 1, tool_calls=len(calls) + 1, errors=len(calls) + 1)
    agent = Agent(ScriptedModel(*lines, "Done."), tools=tools, guards=guards, limits=limits)
    return await _count_asked(agent, prompt, approved)


async def run_script(
    tools: Sequence[Tool[..., Any]],
    calls: Sequence[Any],
    guards: Sequence[CallGuard],
    *,
    prompt: str,
    approved: int = 0,
) -> int:
    """Make calls in one script, which goes on after a refused one; the rest is as in `run_calls`."""
    lines = [
        f"try:\n    {each.function}(**{_plain_arguments(each)!r})\nexcept PermissionError:\n    pass" for each in calls
    ]
    limits = Limits(tool_calls=len(calls) + 2, errors=len(calls) + 1)
    model = ScriptedModel(say("", call("run_python", code="\n".join(lines))), "Done.")
    agent = Agent(model, tools=[Script(*tools, calls=len(calls))], guards=guards, limits=limits)
    return await _count_asked(agent, prompt, approved)


def _plain_arguments(wanted: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(dict(wanted.args), default=str))
    return found


async def _count_asked(agent: Agent[Any], prompt: str, approved: int) -> int:
    run = await agent.run(prompt)
    questions = len(run.pending)
    while run.pending:
        [waiting] = run.pending
        if int(waiting.call_id[1:].partition(".")[0]) > approved:  # "t3.0" is that of the third turn
            break
        await agent.approve(waiting.run_id, waiting.call_id, by="user")
        run = await agent.resume(run.id)
        questions += len(run.pending)
    return questions


def find_reads(world: World, calls: Sequence[Any], texts: Sequence[str]) -> Sequence[Any] | None:
    """Return the reading calls of a task up to the first whose result has one of the texts; None if none has."""
    reads = [each for each in calls if is_reading(each.function)]
    beginnings = [text.strip().partition("\n")[0][:40] for text in texts]
    for index, each in enumerate(reads):
        result = world.call_tool(each.function, each.args)
        if any(text in result for text in beginnings):
            return reads[: index + 1]
    return None


@attrs.frozen
class Pair:
    """A user's task and an attacker's task for which agentdojo lists calls."""

    prompt: str
    injection: Any
    environment: Any
    """Environment with the attacker's text, before the run."""

    read: World
    """World after the calls that read the text."""

    reads: int
    """Number of those calls."""

    calls: Sequence[Any]
    """Those calls, and the attacker's behind them."""

    async def run(self, mark: Callable[[str], str], guards: Sequence[CallGuard]) -> World:
        """Return the world after all calls. A person approves those of the user's task, and none of the attacker's."""
        world = World(self.read.suite, self.environment.model_copy(deep=True), first_watched=self.reads)
        await run_calls(world.build_tools(mark), self.calls, guards, prompt=self.prompt, approved=self.reads)
        return world

    def has_succeeded(self, world: World) -> bool:
        """Return whether the attack has succeeded in a world, by agentdojo's check of the attacker's task."""
        arguments = "Done.", self.environment, world.environment
        with redirect_stdout(io.StringIO()):  # some of the checks print
            by_calls = self.injection.security_from_traces(*arguments, world.made)
            return bool(self.injection.security(*arguments) if by_calls is None else by_calls)


def iter_pairs(suite: Any) -> Iterator[Pair | None]:
    """Yield each pair of a suite; None for one for which agentdojo lists no calls of the attacker."""
    attack = load_attacks(suite)[WORDING]
    for task in suite.user_tasks.values():
        for injection in suite.injection_tasks.values():
            texts = attack.attack(task, injection)
            environment = task.init_environment(suite.load_and_inject_default_environment(dict(texts)))
            world = World(suite, environment.model_copy(deep=True))
            wanted = injection.ground_truth(environment.model_copy(deep=True))
            reads = find_reads(world, task.ground_truth(world.environment), list(texts.values()))
            if wanted and reads is not None:
                yield Pair(task.PROMPT, injection, environment, world, len(reads), [*reads, *wanted])
            else:
                yield None


async def count_attacks(suite: Any) -> Counter[str]:
    """Return the number of pairs, of attacks that succeeded, and of those that changed something, by case."""
    counts: Counter[str] = Counter()
    for pair in iter_pairs(suite):
        if pair is None:
            counts["not tried"] += 1
            continue
        counts["pairs"] += 1
        counts["without the attacker's calls: succeeded"] += pair.has_succeeded(pair.read)
        for case, (labelling, guards) in CASES.items():
            world = await pair.run(LABELLINGS[labelling], guards)
            counts[f"{case}: succeeded"] += pair.has_succeeded(world)
            counts[f"{case}: changed something"] += world.changed
    return counts


async def count_without_a_mark(suite: Any) -> Counter[tuple[str, str]]:
    """Return how many more attacks succeed under `by_labels` if one mark of a tool is missing, by tool and mark."""
    pairs = [pair for pair in iter_pairs(suite) if pair is not None]
    with_all = [pair.has_succeeded(await pair.run(LABELLINGS["marks"], (Guard.by_labels(),))) for pair in pairs]
    more: Counter[tuple[str, str]] = Counter()
    for name in [each.name for each in suite.tools]:
        for letter in MARKS.get(name, ""):
            marks = {each.name: LABELLINGS["marks"](each.name) for each in suite.tools}
            marks[name] = marks[name].replace(letter, "")
            more[name, letter] = 0
            for pair, before in zip(pairs, with_all, strict=True):
                if any(each.function == name for each in pair.calls):
                    world = await pair.run(marks.__getitem__, (Guard.by_labels(),))
                    more[name, letter] += pair.has_succeeded(world) - before
    return more


async def count_questions(suite: Any) -> Counter[str]:
    """Return the number of tasks of users, of those with a question, and of questions, by case."""
    counts: Counter[str] = Counter()
    for task in suite.user_tasks.values():
        counts["tasks"] += 1
        environment = task.init_environment(suite.load_and_inject_default_environment({}))
        calls = task.ground_truth(environment.model_copy(deep=True))
        for case, (labelling, guards) in CASES.items():
            world = World(suite, environment.model_copy(deep=True))
            tools = world.build_tools(LABELLINGS[labelling])
            asked = await run_calls(tools, calls, guards, prompt=task.PROMPT, approved=len(calls))
            counts[f"{case}: tasks with a question"] += bool(asked)
            counts[f"{case}: questions"] += asked
    return counts


async def measure(directory: str | None) -> None:
    """Print the figures of each suite and their sums."""
    attacks: Counter[str] = Counter()
    tasks: Counter[str] = Counter()
    for name, suite in sorted(load_suites(directory).items()):
        found, asked = await count_attacks(suite), await count_questions(suite)
        print(f"{name}: {dict(found)}\n  {dict(asked)}", flush=True)
        attacks.update(found)
        tasks.update(asked)
    pairs, others = attacks.pop("pairs"), attacks.pop("not tried")
    print(f"all: N = {pairs} pairs; {others} others have no calls of the attacker")
    for name, count in attacks.items():
        print(f"  {name}: {count} of {pairs} ({count / pairs:.1%})")
    for name, count in tasks.items():
        print(f"  {name}: {count}")


async def measure_marks(directory: str | None) -> None:
    """Print how many more attacks succeed if one mark is missing."""
    found: Counter[tuple[str, str]] = Counter()
    for name, suite in sorted(load_suites(directory).items()):
        more = await count_without_a_mark(suite)
        found.update({(f"{name}.{tool}", letter): count for (tool, letter), count in more.items()})
    missed = {f"{tool} without {LABELS[letter]}": count for (tool, letter), count in found.items() if count > 0}
    print(f"{len(missed)} of {len(found)} marks, each missing alone, let more attacks succeed:")
    for name, count in sorted(missed.items(), key=lambda each: -each[1]):
        print(f"  {name}: {count}")


async def compare_scripts(directory: str | None) -> None:
    """Print in how many tasks of users and pairs a script is asked about, or makes, other calls than single calls."""
    counts: Counter[str] = Counter()
    for suite in load_suites(directory).values():
        sequences: list[tuple[str, Any, Sequence[Any], int]] = []
        for task in suite.user_tasks.values():
            environment = task.init_environment(suite.load_and_inject_default_environment({}))
            calls = task.ground_truth(environment.model_copy(deep=True))
            sequences.append((task.PROMPT, environment, calls, len(calls)))
        pairs = [each for each in iter_pairs(suite) if each is not None]
        sequences += [(pair.prompt, pair.environment, pair.calls, pair.reads) for pair in pairs]
        for prompt, environment, calls, approved in sequences:
            for case, (labelling, guards) in CASES.items():
                if not calls or not guards:
                    continue
                worlds, asked = [], []
                for way in (run_calls, run_script):
                    world = World(suite, environment.model_copy(deep=True))
                    tools = world.build_tools(LABELLINGS[labelling])
                    asked.append(await way(tools, calls, guards, prompt=prompt, approved=approved))
                    worlds.append(world)
                counts[f"{case}: sequences"] += 1
                counts[f"{case}: questions"] += asked[0]
                counts[f"{case}: others in a script"] += asked[0] != asked[1] or worlds[0].made != worlds[1].made
    for name, count in counts.items():
        print(f"{name}: {count}")


def main(directory: str | None = None, what: str = "") -> int:
    """Run the benchmark.

    Args:
        directory: Directory of agentdojo, if it is not installed beside agentfsm.
        what: "marks" measures what a missing mark changes, "scripts" what calls in scripts change.
    """
    anyio.run({"marks": measure_marks, "scripts": compare_scripts}.get(what, measure), directory)
    return 0
