"""An agent with all 1,222 tools of GitHub's OpenAPI document: `make bench ROW=api_tools`.

The document is that of the npm package @octokit/openapi (MIT), which is downloaded once into the user's cache. Printed
are the time to make the tools, their names, the bytes of their definitions in a request, and how often a tool that a
task needs is among the first by similarity, and in the list from which the model chooses. The tasks are our own, in the
words of users and not of the document; nothing was chosen by them.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from typing import Any

from agentfsm import Agent
from agentfsm.context.selection import BySimilarity, TwoStage
from agentfsm.core.usage import Usage
from agentfsm.openapi import tools_from_openapi
from agentfsm.testing import ScriptedModel
from agentfsm.tokens.ledger import BYTE_COUNTER
from agentfsm.tokens.tool_prompts import count_tools

NAME = "package/generated/api.github.com.json"
FIRST = (1, 5, 20, 128)
# Each task, and the tools of which one does it.
TASKS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Open an issue in octo/app titled 'Login fails on Safari'", ("issues_create",)),
    ("Close issue 17 of octo/app", ("issues_update",)),
    ("Comment 'thanks, fixed in 2.1' on issue 12 of octo/app", ("issues_create-comment",)),
    ("Put the label bug on issue 5 in octo/app", ("issues_add-labels",)),
    ("Who is assigned to issue 33 of octo/app?", ("issues_get",)),
    ("List all open issues of octo/app", ("issues_list-for-repo",)),
    ("Assign anna to issue 9", ("issues_add-assignees",)),
    ("Lock the conversation of issue 44, it got heated", ("issues_lock",)),
    ("Create a milestone for the March release", ("issues_create-milestone",)),
    ("Merge pull request 101 of octo/app by squashing", ("pulls_merge",)),
    ("Open a pull request from branch fix-login into main", ("pulls_create",)),
    ("Which files does pull request 7 change?", ("pulls_list-files",)),
    ("Ask bob to review pull request 7", ("pulls_request-reviewers",)),
    ("Approve pull request 55 with the comment 'looks good'", ("pulls_create-review",)),
    ("Bring the branch of pull request 8 up to date with its base", ("pulls_update-branch",)),
    ("Show the commits of the main branch since Monday", ("repos_list-commits",)),
    ("Read the file README.md of octo/app", ("repos_get-content", "repos_get-readme")),
    ("Change the text of docs/index.md and commit it", ("repos_create-or-update-file-contents",)),
    ("Delete the file old.txt from the repository", ("repos_delete-file",)),
    ("What branches are there in octo/app?", ("repos_list-branches",)),
    ("Protect the main branch: two approvals needed", ("repos_update-branch-protection",)),
    ("Make a new private repository called notes in my account", ("repos_create-for-authenticated-user",)),
    ("Fork octo/app into my account", ("repos_create-fork",)),
    ("Publish a release v1.2.0 from tag v1.2.0", ("repos_create-release",)),
    ("What changed in the latest release of octo/app?", ("repos_get-latest-release",)),
    ("Compare main with the branch beta", ("repos_compare-commits", "repos_compare-commits-with-basehead")),
    ("Add carla as a collaborator with write access", ("repos_add-collaborator",)),
    ("Which workflows failed this week in octo/app?", ("actions_list-workflow-runs-for-repo",)),
    ("Start the workflow deploy.yml on main", ("actions_create-workflow-dispatch",)),
    ("Rerun the failed jobs of workflow run 998", ("actions_re-run-workflow-failed-jobs",)),
    ("Download the logs of workflow run 998", ("actions_download-workflow-run-logs",)),
    ("Cancel workflow run 1234", ("actions_cancel-workflow-run",)),
    ("Store the secret API_KEY for the actions of octo/app", ("actions_create-or-update-repo-secret",)),
    ("Star the repository octo/app for me", ("activity_star-repo-for-authenticated-user",)),
    ("Show my unread notifications", ("activity_list-notifications-for-authenticated-user",)),
    ("Find all repositories about quantum computing in Rust", ("search_repos",)),
    ("Search the code of octo/app for the word TODO", ("search_code",)),
    ("Create a gist with this Python snippet", ("gists_create",)),
    ("Who are the members of the organization octo?", ("orgs_list-members",)),
    ("Invite dave@example.org to the organization", ("orgs_create-invitation",)),
    ("Add erin to the team backend", ("teams_add-or-update-membership-for-user-in-org",)),
    ("Which Dependabot alerts are open in octo/app?", ("dependabot_list-alerts-for-repo",)),
    ("Dismiss code scanning alert 3 as a false positive", ("code-scanning_update-alert",)),
    ("Add a deploy key to octo/app", ("repos_create-deploy-key",)),
    ("Create a webhook that posts pushes to https://hooks.example.org", ("repos_create-webhook",)),
    ("How many visitors did octo/app have in the last two weeks?", ("repos_get-views",)),
    ("What is my remaining rate limit?", ("rate-limit_get",)),
    ("Who am I logged in as?", ("users_get-authenticated",)),
)


def read_document() -> dict[str, Any]:
    """Return GitHub's document."""
    from tests.support import public_documents  # noqa: PLC0415  only this needs it

    document: dict[str, Any] = json.loads(public_documents.read(next(iter(public_documents.PACKAGES)), NAME))
    return document


async def measure() -> None:
    """Measure and print."""
    document = read_document()
    start = time.perf_counter()
    tools = tools_from_openapi(document)
    made = time.perf_counter() - start
    offered = [tool.definition for tool in tools]
    names = [tool.name for tool in offered]
    print(f"{len(tools):,} tools, {len(tools.skipped)} left out, made in {made:.1f} s")
    longest = max(map(len, names))
    print(f"names: the longest have {longest} characters, {sum(len(name) == longest for name in names)} of them")
    sizes = sorted(count_tools([tool], BYTE_COUNTER) for tool in offered)
    print(f"definitions: {sum(sizes):,} bytes, median {statistics.median(sizes):,}, longest {sizes[-1]:,}\n")

    listed: list[set[str]] = []
    bytes_listed: list[int] = []

    async def ask(instructions: str, _question: str) -> tuple[str, Usage]:
        lines = [line.partition("(")[0] for line in instructions.splitlines()]
        listed.append(set(lines) & set(names))
        bytes_listed.append(len(instructions.encode()))
        return names[0], Usage()

    ranks = []
    for text, true in TASKS:
        order, _flaw, _usage = await BySimilarity().rank(text, offered)
        ranks.append(min(order.index(names.index(name)) for name in true))
        await TwoStage().select(text, offered, ask)
    for count in FIRST:
        print(f"{sum(rank < count for rank in ranks):>3} of {len(TASKS)} tasks have their tool among the first {count}")
    held = sum(bool(each.intersection(true)) for each, (_, true) in zip(listed, TASKS, strict=True))
    longest = max(map(len, listed))
    print(f"{held:>3} of {len(TASKS)} have it in the model's list of {longest} tools, {max(bytes_listed):,} bytes")

    model = ScriptedModel('["issues_create", "issues_list-for-repo", "issues_add-labels"]', "done")
    async with Agent(model, tools=tools) as agent:
        start = time.perf_counter()
        await agent.run("Open an issue in octo/app titled 'Login fails on Safari', and label it as a bug")
        took = time.perf_counter() - start
    few = model.requests[-1].tools
    size = count_tools(few, BYTE_COUNTER)
    print(f"\na run takes {took:.2f} s beside the model; its request offers {len(few)} tools, {size:,} bytes")


def main() -> int:
    """Measure an agent with the tools of a large document."""
    asyncio.run(measure())
    return 0
