"""An MCP server whose calls begin tasks, by the extension `io.modelcontextprotocol/tasks`. It notes all that it does.

Its argument is a folder: `notes`, and a file for each task, so that the next process knows the tasks of a killed one.
With PORT it listens there, otherwise it uses standard input and output. The task of a call ends when there is a file
JOB.done, after its argument; `ask` asks a person in its midst.
"""

import json
import os
import sys
import uuid
from datetime import UTC, datetime
from pathlib import Path

import mcp.types as m
from mcp import MCPError
from mcp.server import MCPServer
from mcp.server.extension import Extension
from mcp.server.extension import MethodBinding as Method
from pydantic import Field

PLACE = Path(sys.argv[1])
ASKED = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}


def note(text):
    """Write down what has happened."""
    with (PLACE / "notes").open("a") as file:
        file.write(text + "\n")


class TaskParams(m.RequestParams):
    """Parameters of the methods on tasks."""

    task_id: str
    input_responses: dict[str, m.ElicitResult] = Field(default_factory=dict)


def load(task_id):
    """Return a task, or refuse its id."""
    try:
        return json.loads((PLACE / f"task-{task_id}.json").read_text())
    except FileNotFoundError:
        raise MCPError(m.INVALID_PARAMS, "Task not found") from None


def save(task):
    """Keep a task for the next process."""
    (PLACE / f"task-{task['taskId']}.json").write_text(json.dumps(task))
    return task


class Tasks(Extension):
    """The extension, for the tools below."""

    identifier = "io.modelcontextprotocol/tasks"

    def methods(self):
        """Return the methods on tasks."""
        return [
            Method("tasks/get", TaskParams, self.get),
            Method("tasks/update", TaskParams, self.update),
            Method("tasks/cancel", TaskParams, self.cancel),
        ]

    async def intercept_tool_call(self, params, ctx, call_next):
        """Begin a task."""
        job, tool, now = params.arguments["job"], params.name, datetime.now(UTC).isoformat()
        note(f"{job}: began")
        task = {"taskId": uuid.uuid4().hex, "status": "working", "createdAt": now, "lastUpdatedAt": now}
        times = {"ttlMs": params.arguments.get("ttl_ms"), "pollIntervalMs": params.arguments.get("poll_ms", 50)}
        task |= {**times, "statusMessage": "at work"}
        save(task | {"job": job, "tool": tool})
        return {"resultType": "task", **task}

    async def get(self, ctx, params):
        """Return a task."""
        task = load(params.task_id)
        job, tool, answer = task.pop("job"), task.pop("tool"), task.pop("answer", None)
        if task["status"] == "cancelled" or not (PLACE / f"{job}.done").exists():
            return task
        if tool == "ask" and answer is None:
            form = {"mode": "form", "message": "Who travels?", "requestedSchema": ASKED}
            asked = {"who": {"method": "elicitation/create", "params": form}}
            return task | {"status": "input_required", "inputRequests": asked}
        if tool == "fail":
            return task | {"status": "failed", "error": {"code": -32603, "message": "the disk is full"}}
        text = f"{job} is ready" if answer is None else f"a seat for {answer['content']['name']}"
        return task | {"status": "completed", "result": {"content": [{"type": "text", "text": text}]}}

    async def update(self, ctx, params):
        """Take the answers of a person."""
        task = load(params.task_id)
        for key, reply in params.input_responses.items():
            note(f"{task['job']}: answer {key}")
            save(task | {"answer": reply.model_dump(mode="json")})
        return m.EmptyResult()

    async def cancel(self, ctx, params):
        """Cancel a task."""
        task = load(params.task_id)
        note(f"{task['job']}: cancelled")
        save(task | {"status": "cancelled"})
        return m.EmptyResult()


server = MCPServer("jobs", extensions=[Tasks()])


@server.tool(structured_output=False)
def report(job: str, poll_ms: int = 50, ttl_ms: int | None = None) -> str:
    """Write a report, which takes long."""
    return job


@server.tool(structured_output=False)
def ask(job: str) -> str:
    """Reserve a seat for a person who is asked."""
    return job


@server.tool(structured_output=False)
def fail(job: str) -> str:
    """Do what fails."""
    return job


if __name__ == "__main__":
    if port := os.environ.get("PORT"):
        server.run("streamable-http", port=int(port))
    else:
        server.run()
