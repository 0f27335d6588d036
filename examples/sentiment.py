"""A flow with an agent in the middle: reviews are read, an agent judges each of them, and the moods are stored.

    python examples/sentiment.py

Reading and storing are plain steps with fixed SQL. Each review is a run of the agent, and its answer is checked against
a closed set before it is stored; a review that it cannot judge counts as neutral, with a warning that has its id.
Without OPENAI_API_KEY, a script replaces the model.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import anyio

from agentfsm import Agent, RunContext
from agentfsm.flow import Flow, agent_step, each, step
from agentfsm.ports import Reply, Request, Store
from agentfsm.stores import SQLiteStore
from agentfsm.testing.models import FunctionModel

Review = dict[str, str]
DAY = "2025-07-28"
REVIEWS = {"r1": "Arrived early, works.", "r2": "It is blue.", "r3": "Broke on the first day.", "r4": "Works well."}
MOODS = ("positive", "negative", "neutral")


class Database:
    """The reviews, in a SQLite file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def execute(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        """Execute a statement in a transaction of its own."""
        with closing(sqlite3.connect(self.path)) as db, db:
            return db.execute(sql, values).fetchall()

    def fill(self) -> None:
        """Create the table with the reviews of a day."""
        self.execute("CREATE TABLE reviews (id TEXT PRIMARY KEY, day TEXT, comment TEXT, mood TEXT)")
        for key, comment in REVIEWS.items():
            self.execute("INSERT INTO reviews VALUES (?, ?, ?, NULL)", key, DAY, comment)

    def store(self, key: str, mood: str) -> None:
        """Store the mood of a review."""
        self.execute("UPDATE reviews SET mood = ? WHERE id = ?", mood, key)


def judge(request: Request) -> Reply:
    """Play a model that judges reviews, and sometimes says more than it should."""
    text = request.messages[-1].text
    mood = "Negative" if "Broke" in text else "That depends on whom you ask." if "blue" in text else "positive"
    return Reply(text=mood)


@step(read_only=True)
def extract(ctx: RunContext[Database], day: str) -> list[Review]:
    """Read the reviews of a day."""
    rows = ctx.deps.execute("SELECT id, comment FROM reviews WHERE day = ? ORDER BY id", day)
    return [{"id": key, "comment": comment} for key, comment in rows]


@step(depends_on=["extract", "moods"], read_only=True)
def pair(extract: list[Review], moods: list[str]) -> list[Review]:
    """Put each mood to its review."""
    return [{"id": review["id"], "mood": mood} for review, mood in zip(extract, moods, strict=True)]


@step(idempotent=True)
def load(ctx: RunContext[Database], review: Review) -> None:
    """Store the mood of a review."""
    ctx.deps.store(review["id"], review["mood"])


def build_flow(store: Store) -> Flow:
    """Return the flow."""
    model = "openai:gpt-5.4-mini" if os.environ.get("OPENAI_API_KEY") else FunctionModel(judge)
    mood = agent_step(
        Agent(model, name="reader", instructions="You judge reviews of products. Answer with one word."),
        lambda review: f"Is this review {', '.join(MOODS)}?\n{review['comment']}",
        name="mood",
        validate=MOODS,
        fallback="neutral",
    )
    moods = each(mood, over=extract, key=lambda review: review["id"], name="moods", parallel=10)
    return Flow([extract, moods, pair, each(load, over=pair, key=lambda review: review["id"])], store=store)


async def main() -> None:
    """Judge the reviews of a day."""
    logging.basicConfig(stream=sys.stdout, format="warning: %(message)s")
    with TemporaryDirectory() as folder:
        database = Database(str(Path(folder, "reviews.db")))
        database.fill()
        async with build_flow(SQLiteStore(Path(folder, "runs.db"))) as flow:
            run = await flow.run({"day": DAY}, deps=database, id=f"sentiment:{DAY}")
            print({name: str(status) for name, status in flow.statuses(run).items()})
            print(f"{run.stop_reason}, with {run.usage.input_tokens + run.usage.output_tokens} tokens")
        print(*database.execute("SELECT id, comment, mood FROM reviews ORDER BY id"), sep="\n")


if __name__ == "__main__":
    anyio.run(main)
