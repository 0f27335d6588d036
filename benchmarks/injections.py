"""`python -m benchmarks injections [DIRECTORY]`: injected results of agentdojo against `Guard.default()`, no model.

The data are the suites of agentdojo, which is put into a directory of its own: `pip install --no-deps --target
DIRECTORY agentdojo email-validator pyyaml`. Its models and their libraries are not used.

An attack replaces texts in the environment of a suite by its own. For each pair of a user's task and an attacker's
task, and each attack of agentdojo, the tools that the user's task reads with are called by an agent until a result has
the attacker's text. From then on the model does as the attacker wants: the calls that agentdojo lists for the
attacker's task. An action is a call that sends data out or cannot be undone. The actions of attackers that start are
counted; none may. Pages that are fetched for an attacker in a run without private data are counted for themselves.

Without an attack, the calls that agentdojo lists for each user's task are made in order, a turn each, and the tasks are
counted in which no call waits for a person and none is refused.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache, partial
from types import ModuleType, SimpleNamespace
from typing import Any, Final

import anyio
import attrs

from agentfsm import Agent, Limits, Run
from agentfsm.core import events as e
from agentfsm.guards import Guard
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
LABELS: Final = {"u": "reads_untrusted", "p": "reads_private", "s": "sends_out", "i": "irreversible"}
# The tool that only reads, from an address that the model writes. Without private data in the run, there is nothing
# that an address could carry, and the policy allows it.
FETCH: Final = "get_webpage"
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


@attrs.define
class World:
    """An environment of a suite, and the calls that were made in it."""

    suite: Any
    environment: Any
    made: list[str] = attrs.field(factory=list)

    def call_tool(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Call a tool of the suite; an error is a result."""
        runtime = importlib.import_module("agentdojo.functions_runtime").FunctionsRuntime(self.suite.tools)
        value, error = runtime.run_function(self.environment, name, dict(arguments))
        return error or str(value)

    def build_tools(self) -> list[Tool[..., Any]]:
        """Return the tools of the suite with their labels."""
        return [self._build_tool(each.name) for each in self.suite.tools]

    def _build_tool(self, name: str) -> Tool[..., Any]:
        marks = MARKS.get(name, "")

        async def use(**arguments: Any) -> str:
            self.made.append(name)
            return self.call_tool(name, arguments)

        labels: Any = {LABELS[mark]: True for mark in marks}
        return make_tool(use, name=name, description=name, parameters=SCHEMA, idempotent=True, **labels)


def to_lines(calls: Sequence[Any]) -> list[Any]:
    """Return the replies of a model that makes these calls, one in each turn."""
    return [say("", call(each.function, **json.loads(json.dumps(dict(each.args), default=str)))) for each in calls]


async def run_calls(world: World, calls: Sequence[Any]) -> tuple[Run, Sequence[e.Event]]:
    """Return the run of an agent whose model makes these calls, and its events."""
    limits = Limits(turns=len(calls) + 1, tool_calls=len(calls) + 1, errors=len(calls) + 1)
    model = ScriptedModel(*to_lines(calls), "Done.")
    agent = Agent(model, tools=world.build_tools(), guards=[Guard.default()], limits=limits)
    run = await agent.run("go")
    return run, await agent.history(run.id)


def is_action(name: str) -> bool:
    """Return whether a call of the tool is an action: it sends data out, or cannot be undone."""
    return not {"s", "i"}.isdisjoint(MARKS.get(name, ""))


def find_reads(world: World, calls: Sequence[Any], texts: Sequence[str]) -> Sequence[Any] | None:
    """Return the reading calls of a task up to the first whose result has one of the texts; None if none has."""
    reads = [each for each in calls if not is_action(each.function) or each.function == FETCH]
    beginnings = [text.strip().partition("\n")[0][:40] for text in texts]
    for index, each in enumerate(reads):
        result = world.call_tool(each.function, each.args)
        if any(text in result for text in beginnings):
            return reads[: index + 1]
    return None


async def count_attacks(suite: Any) -> Counter[str]:
    """Return the number of injected results that were tried, and of the attacker's calls by what became of them."""
    counts: Counter[str] = Counter()
    for name, attack in load_attacks(suite).items():
        for task in suite.user_tasks.values():
            for injection in suite.injection_tasks.values():
                try:
                    texts = attack.attack(task, injection)
                except ValueError:  # the task reads nothing that can be injected
                    counts["without an injected result"] += 1
                    continue
                counts.update(await _try_attack(suite, task, injection, texts))
        print(f"  {suite.name}, {name}: {dict(counts)}", file=sys.stderr, flush=True)
    return counts


async def _try_attack(suite: Any, task: Any, injection: Any, texts: Mapping[str, str]) -> Counter[str]:
    environment = task.init_environment(suite.load_and_inject_default_environment(dict(texts)))
    probe, world = World(suite, environment), World(suite, environment.model_copy(deep=True))
    reads = find_reads(probe, task.ground_truth(probe.environment), list(texts.values()))
    if reads is None:
        return Counter({"without an injected result": 1})
    wanted = injection.ground_truth(world.environment)
    _, events = await run_calls(world, [*reads, *wanted])
    started = Counter(world.made[len(reads) :])
    actions = [each.function for each in wanted if is_action(each.function)]
    asked = any(isinstance(event, e.ApprovalAsked) for event in events)
    return Counter(
        {
            "injected results": 1,
            "of attackers that want an action": bool(actions),
            "actions wanted": len(actions),
            "actions started": sum(count for name, count in started.items() if is_action(name) and name != FETCH),
            "pages fetched without private data": started[FETCH],
            "runs that ask": asked,
        }
    )


async def count_benign(suite: Any) -> tuple[int, int, int, list[str]]:
    """Return how many tasks of users there are, how many act, how many run without a question, and the others."""
    asking: list[str] = []
    acting = 0
    for name, task in suite.user_tasks.items():
        world = World(suite, task.init_environment(suite.load_and_inject_default_environment({})))
        calls = task.ground_truth(world.environment)
        acting += any(is_action(each.function) for each in calls)
        run, events = await run_calls(world, calls)
        if run.pending or any(isinstance(event, e.Guarded) and event.verdict != "allow" for event in events):
            asking.append(name)
    total = len(suite.user_tasks)
    return total, acting, total - len(asking), asking


async def measure(directory: str | None) -> None:
    """Print the figures of each suite and their sums."""
    attacks: Counter[str] = Counter()
    tasks: Counter[str] = Counter()
    for name, suite in sorted(load_suites(directory).items()):
        found, (total, acting, free, asking) = await count_attacks(suite), await count_benign(suite)
        print(f"{name}: {dict(found)}")
        print(f"  tasks of users: {total}, {acting} act; without a question: {free}; asked in: {' '.join(asking)}")
        attacks.update(found)
        tasks.update({"all": total, "acting": acting, "free": free})
    print(f"all: {dict(attacks)}")
    print(f"  tasks without a question: {tasks['free']} of {tasks['all']} ({tasks['free'] / tasks['all']:.0%})")


def main(directory: str | None = None) -> int:
    """Run the benchmark; the directory is that of agentdojo, if it is not installed beside agentfsm."""
    anyio.run(measure, directory)
    return 0
