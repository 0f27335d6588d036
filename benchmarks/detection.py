"""`python -m benchmarks detection [DIRECTORY]`: results of agentdojo, injected and harmless, by `PatternDetector`.

The directory is that of `injections`. For each suite, each attack of agentdojo with the first of the attackers' tasks
is put into the results that the users' tasks read, and each result with the text of an attack is scored. The harmless
texts are the different results that the users' tasks read without an attack.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import anyio

from agentfsm.guards import PatternDetector, score_windows
from benchmarks.injections import World, find_reads, is_reading, load_attacks, load_suites

THRESHOLD = 0.5


def list_harmless(suite: Any) -> set[str]:
    """Return the different results that the tasks of users read."""
    found: set[str] = set()
    for task in suite.user_tasks.values():
        world = World(suite, task.init_environment(suite.load_and_inject_default_environment({})))
        calls = task.ground_truth(world.environment)
        found |= {world.call_tool(each.function, each.args) for each in calls if is_reading(each.function)}
    return found


def list_injected(suite: Any, attack: Any) -> list[str]:
    """Return a result with the text of an attack for each task of users that reads one."""
    injection = next(iter(suite.injection_tasks.values()))
    found = []
    for task in suite.user_tasks.values():
        try:
            texts = attack.attack(task, injection)
        except ValueError:  # the task reads nothing that can be injected
            continue
        environment = task.init_environment(suite.load_and_inject_default_environment(dict(texts)))
        probe, world = World(suite, environment), World(suite, environment.model_copy(deep=True))
        reads = find_reads(probe, task.ground_truth(probe.environment), list(texts.values()))
        if reads is not None:
            results = [world.call_tool(each.function, each.args) for each in reads]
            found.append(results[-1])
    return found


async def count_found(texts: list[str]) -> int:
    """Return how many texts have a score above the threshold."""
    return sum([await score_windows(PatternDetector(), each) > THRESHOLD for each in texts])


async def measure(directory: str | None) -> None:
    """Print how many results are found, by attack, and how many harmless ones."""
    found: Counter[str] = Counter()
    total: Counter[str] = Counter()
    harmless: set[str] = set()
    for _, suite in sorted(load_suites(directory).items()):
        harmless |= list_harmless(suite)
        for name, attack in load_attacks(suite).items():
            texts = list_injected(suite, attack)
            total[name] += len(texts)
            found[name] += await count_found(texts)
    for name in sorted(total):
        print(f"{name}: {found[name]} of {total[name]}")
    print(f"injected results found: {found.total()} of {total.total()} ({found.total() / total.total():.0%})")
    print(f"harmless results found: {await count_found(sorted(harmless))} of {len(harmless)}")


def main(directory: str | None = None) -> int:
    """Run the benchmark; the directory is that of agentdojo, if it is not installed beside agentfsm."""
    anyio.run(measure, directory)
    return 0
