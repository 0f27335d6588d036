"""A custom model: a class with a name and a `reply` method. This model repeats the newest message, word by word."""

from __future__ import annotations

import anyio

from agentfsm import Agent, Usage
from agentfsm.ports import Emit, Model, Reply, Request, TextChunk


class Echo(Model):
    """Repeats the newest message."""

    name = "echo"

    async def reply(self, request: Request, emit: Emit | None = None) -> Reply:
        """Return the newest message as the reply, and stream its words if `emit` is given."""
        text = getattr(request.messages[-1], "text", "")
        if emit is not None:
            for word in text.split():
                emit(TextChunk(text=f"{word} "))
        return Reply(text=text, usage=Usage(input_tokens=len(text), output_tokens=len(text)))


async def main() -> None:
    """Print the events of a run."""
    async with Agent(Echo()).stream("Well said is half done.") as stream:
        async for event in stream:
            print(type(event).__name__, getattr(event, "text", ""))


if __name__ == "__main__":
    anyio.run(main)
