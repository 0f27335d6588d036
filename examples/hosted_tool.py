"""An agent with a tool of the provider and one of its own: it searches the web, and saves what it found after approval.

    python examples/hosted_tool.py

The search runs at the provider: agentfsm records it and its sources with the reply, and never asks for it a second
time. The other tool runs here, with all that agentfsm promises for an effect. Without OPENAI_API_KEY, a small local
server plays OpenAI's Responses API.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import anyio

from agentfsm import Agent, Run, Settings, tool
from agentfsm.models import OpenAIResponses, WebSearch
from agentfsm.stores import SQLiteStore
from agentfsm.testing import LocalServer, WireReply

TASK = "Find out which release of SQLite is the newest, and save it as a note."
URL = "https://sqlite.org/changes.html"
SEARCH = {
    "id": "ws_1",
    "type": "web_search_call",
    "status": "completed",
    "action": {"type": "search", "query": "sqlite"},
}
SOURCE = {"type": "url_citation", "url": URL, "title": "Release history", "start_index": 0, "end_index": 28}
SAVE = {"id": "fc_1", "type": "function_call", "status": "completed", "call_id": "call_1", "name": "save_note"}


def text_item(said: str, *sources: Mapping[str, object]) -> dict[str, object]:
    """Return a text of the model as an item of the Responses API."""
    part = {"type": "output_text", "text": said, "annotations": list(sources), "logprobs": []}
    return {"id": "msg_1", "type": "message", "status": "completed", "role": "assistant", "content": [part]}


def reply_of(*items: Mapping[str, object]) -> WireReply:
    """Return a whole reply of the Responses API."""
    return WireReply(raw=json.dumps({"object": "response", "status": "completed", "output": items, "usage": None}))


def play(body: dict[str, Any]) -> WireReply:
    """Search and ask for the note; once it is saved, answer with the source."""
    if any(item.get("type") == "function_call_output" for item in body["input"]):
        return reply_of(text_item("The newest release is saved.", SOURCE))
    return reply_of(SEARCH, {**SAVE, "arguments": json.dumps({"text": f"See {URL}"})})


async def main() -> Run:
    """Run, approve, resume, and print the outcome of both tools."""
    with TemporaryDirectory() as folder:
        notes = Path(folder, "notes.txt")

        @tool(requires_approval=True)
        def save_note(text: str) -> str:
            """Save a note.

            Args:
                text: The note.
            """
            notes.write_text(text, encoding="utf-8")
            return "saved"

        key = os.environ.get("OPENAI_API_KEY")
        with nullcontext() if key else LocalServer(play) as server:
            model = OpenAIResponses("gpt-6-luna", api_key=key or "none", base_url=server.base_url if server else None)
            store, settings = SQLiteStore(Path(folder, "runs.db")), Settings(stream=False)
            async with Agent(model, tools=[WebSearch(), save_note], store=store, settings=settings) as agent:
                run = await agent.run(TASK)
                for item in run.pending:
                    print(f"approved: {item.tool}({json.dumps(item.arguments)})")
                    await agent.approve(run.id, item.call_id, by="ann")
                run = await agent.resume(run.id)
        for call in run.hosted.calls:
            print(f"at the provider: {call.tool} {call.arguments}")
        for source in run.hosted.citations:
            print(f"source: {source.title} <{source.url}>")
        note = anyio.Path(notes)
        print(f"here: {await note.read_text(encoding='utf-8') if await note.exists() else 'nothing saved'}")
        print(run.output)
        return run


if __name__ == "__main__":
    anyio.run(main)
