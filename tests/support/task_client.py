"""What a client does with tasks of a server, with the SDK: begin one, look at it, answer its questions."""

import anyio
import mcp.types as m

from agentfsm.mcp.client import tasks


async def ask_nobody(_context, _params):
    """Stand for a person, so that the client may be asked."""
    return m.ElicitResult(action="cancel")


OPTIONS = {"extensions": [tasks.TasksExtension()], "elicitation_callback": ask_nobody}
"""Options of a client that has tasks."""


async def begin(client, name, /, **arguments):
    """Call a tool, and return the id of the task."""
    begun = await client.session.call_tool(name, arguments, allow_claimed=True)
    assert isinstance(begun, tasks.TaskStatus), begun
    assert begun.status == "working"
    return begun.task_id


async def look(client, task_id, *until):
    """Return a task once it has one of these states; at once without any."""
    params = tasks._TaskParams(task_id=task_id)
    while True:
        seen = await client.session.send_request(tasks._Get(params=params), tasks._TaskDetails)
        if seen.status in (until or {seen.status}):
            return seen
        await anyio.sleep(0.02)


async def answer(client, task_id, **answers):
    """Answer questions of a task, by their keys."""
    params = tasks._UpdateParams(task_id=task_id, input_responses=answers)
    await client.session.send_request(tasks._Update(params=params), m.EmptyResult)


def accept(**content):
    """Return the answer of a person."""
    return m.ElicitResult(action="accept", content=content)
