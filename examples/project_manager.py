"""The tasks of a project as an MCP server: two tools, a resource and a prompt.

A host starts it by its configuration: `{"mcpServers": {"project-manager": {"command": "python", "args":
["examples/project_manager.py"]}}}`. Over HTTP: `agentfsm mcp serve examples.project_manager:service --http`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal

import anyio

from agentfsm import ModelRetry, ToolRegistry, tool
from agentfsm.mcp import MCPService, Prompt, Resource

Status = Literal["todo", "in_progress", "done"]
Tasks = dict[str, dict[str, str]]

TASKS: Tasks = {
    "TASK-001": {"title": "Implement user authentication", "status": "done", "assignee": "alice"},
    "TASK-002": {"title": "Design the database schema", "status": "in_progress", "assignee": "bob"},
    "TASK-003": {"title": "Write the API documentation", "status": "todo", "assignee": "alice"},
}

# The logic, without any protocol.


class TaskNotFoundError(ModelRetry):
    """The task does not exist. The message says how the model can continue."""


def filter_tasks(tasks: Tasks, status: str | None = None, assignee: str | None = None) -> Tasks:
    """Return the tasks with this status and this assignee; None matches all."""
    wanted = {"status": status, "assignee": assignee}
    return {
        task_id: task
        for task_id, task in tasks.items()
        if all(value is None or task[name] == value for name, value in wanted.items())
    }


def set_status(tasks: Tasks, task_id: str, new_status: str) -> str:
    """Change the status of a task, and return the previous status.

    Raises:
        TaskNotFoundError: when no task has this id.
    """
    if task_id not in tasks:
        raise TaskNotFoundError(f"{task_id} does not exist, use list_tasks to see which tasks there are")
    before = tasks[task_id]["status"]
    tasks[task_id]["status"] = new_status
    return before


def summary_of(tasks: Tasks) -> Mapping[str, Any]:
    """Count the tasks: all of them, by status, by person."""
    return {
        "total": len(tasks),
        "by_status": Counter(task["status"] for task in tasks.values()),
        "by_assignee": Counter(task["assignee"] for task in tasks.values()),
    }


# The tools, the resource and the prompt.


@tool(read_only=True)
async def list_tasks(status: Status | None = None, assignee: str | None = None) -> Tasks:
    """List the tasks of the project: all, or those with a status or an assignee.

    Use it to find out the work of a person, or the id of a task. It changes nothing.

    Args:
        status: Only tasks that are still to do, in progress, or done.
        assignee: Only tasks of this person, for example alice.
    """
    return filter_tasks(TASKS, status, assignee)


@tool(idempotent=True)
async def update_task_status(task_id: str, new_status: Status) -> str:
    """Change the status of one task.

    Args:
        task_id: Id of the task, for example TASK-002; list_tasks returns the ids.
        new_status: New status of the task.
    """
    return f"{task_id} was {set_status(TASKS, task_id, new_status)} and is {new_status} now"


async def summary() -> Mapping[str, Any]:
    """Return the current counts of the tasks."""
    return summary_of(TASKS)


def standup(assignee: str) -> str:
    """Return a prompt for the report of a person in the daily meeting."""
    return f"Look up the tasks of {assignee}, and report in three sentences what is done, in progress and to do."


registry = ToolRegistry.of([list_tasks, update_task_status])
service = MCPService(
    registry,
    name="project-manager",
    instructions="The tasks of one project: look them up, and change their status.",
    resources=[
        Resource(
            uri="project://tasks/summary",
            name="Project summary",
            description="Number of tasks, by status and by person.",
            mime_type="application/json",
            read=summary,
        )
    ],
    prompts=[Prompt(name="standup", description="Report what a person is working on.", render=standup)],
)

if __name__ == "__main__":
    anyio.run(service.stdio)
