"""Document E's five tools, made real: each does what it says, within bounds that hold whatever a model writes.

It runs without a key: the model is a script, which also tries what it should not. Give `Agent` the string
"openai:gpt-4o" instead, and it is a real one.
"""

from __future__ import annotations

import ast
import sqlite3
from contextlib import closing
from email.message import EmailMessage
from operator import add, mul, neg, sub, truediv
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal

import anyio
import attrs
from pydantic import Field

from agentfsm import Agent, ModelRetry, Permissions, Run, RunContext, ToolRegistry, ToolResult, tool
from agentfsm.testing import ScriptedModel, call, say


@attrs.frozen(kw_only=True)
class Desk:
    """What the tools work on: they are handed it as `ctx.deps`, and the model never sees it."""

    shop: sqlite3.Connection
    folder: Path
    outbox: dict[str, EmailMessage] = attrs.field(factory=dict)  # by idempotency key


@tool(read_only=True)
def get_weather(city: str, unit: Literal["celsius", "fahrenheit"] = "celsius") -> str:
    """Tell the weather in a city now: temperature and condition.

    Args:
        city: Its English name, such as "Beijing".
        unit: Of the temperature.
    """
    weather = {"Beijing": (28, "sunny"), "Shanghai": (32, "cloudy")}
    if city not in weather:
        raise ModelRetry(f"no weather of {city!r} is known here, only of {', '.join(weather)}")
    degrees, condition = weather[city]
    return f"{condition}, {degrees} C" if unit == "celsius" else f"{condition}, {degrees * 9 / 5 + 32:g} F"


# SELECT only, twice over: the rule tells the model, and the database refuses what the rule did not see.


def only_select(a: Any) -> str | None:
    """Say what is wrong with a query, if anything is."""
    sql = a.sql.strip().rstrip(";")
    return None if sql.upper().startswith("SELECT") and ";" not in sql else "write one SELECT, without a semicolon"


@tool(read_only=True, concurrency_safe=False, locks=lambda _a: ["shop"], validate=only_select)
def query_database(ctx: RunContext[Desk], sql: str) -> list[dict[str, Any]]:  # noqa: D417  no model is told of ctx
    """Run a SELECT on the shop's database, and return its first 100 rows. The table is orders(id, name, amount).

    Args:
        sql: The query, as SQLite takes it.
    """
    try:
        return [dict(row) for row in ctx.deps.shop.execute(sql).fetchmany(100)]
    except sqlite3.Error as error:
        raise ModelRetry(f"the database refused it: {error}") from None


def shop() -> sqlite3.Connection:
    """Make a small database that can only be read, in bounded time and space."""
    reads = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION}
    made = sqlite3.connect(":memory:", check_same_thread=False)  # plain functions run in threads, one by one: `locks`
    made.row_factory = sqlite3.Row
    made.execute("CREATE TABLE orders (id, name, amount)")
    made.execute("INSERT INTO orders VALUES (1, 'Ann', 100), (2, 'Bob', 200)")
    made.set_authorizer(lambda action, *_: sqlite3.SQLITE_OK if action in reads else sqlite3.SQLITE_DENY)
    made.set_progress_handler(lambda: 1, 5_000_000)  # steps of SQLite's machine, well below a second
    made.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 1_000_000)
    return made


# No eval: what is not in this table is no arithmetic, and no number grows beyond a bound.

OPERATORS: dict[type, Any] = {ast.Add: add, ast.Sub: sub, ast.Mult: mul, ast.Div: truediv, ast.Pow: pow, ast.USub: neg}
LARGEST, EXPONENT = 10**50, 100


@tool(read_only=True)
def calculate(expression: Annotated[str, Field(max_length=200)]) -> float:
    """Work out an expression of numbers, + - * / ** and parentheses, without names or functions.

    Args:
        expression: For example "(3 + 5) * 2".
    """
    try:
        return value_of(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ArithmeticError) as error:
        raise ModelRetry(f"{expression!r} cannot be worked out: {error}") from None


def value_of(node: ast.AST) -> Any:
    """Work out a part of an expression."""
    match node:
        case ast.Constant(value=value) if type(value) in (int, float):
            pass
        case ast.UnaryOp(op=op, operand=operand) if type(op) in OPERATORS:
            value = OPERATORS[type(op)](value_of(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            first, second = value_of(left), value_of(right)
            if isinstance(op, ast.Pow) and abs(second) > EXPONENT:
                raise ValueError(f"{EXPONENT} is the largest exponent")
            value = OPERATORS[type(op)](first, second)
        case _:
            raise ValueError("only numbers, + - * / ** and parentheses are known")
    if isinstance(value, complex) or not abs(value) <= LARGEST:
        raise ValueError("the numbers grow too large, or are no longer real")
    return value


@tool(read_only=True)
def read_file(ctx: RunContext[Desk], file_path: str, encoding: str = "utf-8") -> str:  # noqa: D417  as above
    """Read a text file of the folder, its first 10,000 characters.

    Args:
        file_path: From the folder on, such as "notes.txt".
        encoding: Of the file.
    """
    folder = ctx.deps.folder.resolve()
    try:
        path = (folder / file_path).resolve()  # through links and dots, to where it really lies
        if path.is_relative_to(folder) and path.is_file():
            with path.open(encoding=encoding) as file:
                return file.read(10_000)
    except (OSError, LookupError, ValueError):
        raise ModelRetry(f"{file_path!r} cannot be read as text in {encoding!r}") from None
    raise ModelRetry(f"there is no file {file_path!r} in the folder")


def summary(a: Any) -> str:
    """Tell the person who approves it what a mail is."""
    return f"Send {a.subject!r} to {a.to}, {len(a.body)} characters."


@tool(permission="write", idempotent=True, requires_approval=True, describe=summary)
def send_email(  # noqa: D417  as above
    ctx: RunContext[Desk],
    to: Annotated[str, Field(pattern=r"^[^\s@,;<>]+@[^\s@,;<>]+$")],
    subject: Annotated[str, Field(pattern=r"^[^\r\n]+$")],
    body: str,
) -> str:
    """Send a mail in plain text to one address. A person looks at it first.

    Args:
        to: The address.
        subject: One line.
        body: The text.
    """
    if ctx.idempotency_key in ctx.deps.outbox:  # an attempt before this one was cut off behind the deed
        return "it was sent already"
    message = EmailMessage()
    message["To"], message["Subject"] = to, subject
    message.set_content(body)
    ctx.deps.outbox[ctx.idempotency_key] = message
    return f"sent to {to}"


SCRIPT = (
    say(
        "",
        call("get_weather", city="Beijing"),
        call("calculate", expression="28 * 9 / 5 + 32"),
        call("query_database", sql="SELECT sum(amount) AS total FROM orders"),
        call("read_file", file_path="notes.txt"),
        call("calculate", expression="9 ** 9 ** 9"),
        call("query_database", sql="DROP TABLE orders"),
        call("read_file", file_path="../../../etc/passwd"),
    ),
    say("", call("send_email", to="ann@example.com", subject="Orders", body="300 in all; 82.4 F in Beijing.")),
    say("It is 82.4 F in Beijing, the orders come to 300, and Ann has a mail about it.", expect="sent to ann@"),
)


async def main() -> Run:
    """Show the tools, and hold one conversation, in which the program approves the mail."""
    registry = ToolRegistry.of([get_weather, query_database, calculate, read_file, send_email])
    print(registry.summary())
    print(f"only reading: {', '.join(registry.filter(permission='read').names)}")
    print(f"findings: {len(registry.check())}")
    for found in registry.check():
        print(f"{found.severity}, {found.tool}: {found.message}")
    agent = Agent(ScriptedModel(*SCRIPT), tools=registry, permissions=Permissions(level="write"))
    with TemporaryDirectory() as folder, closing(shop()) as orders:
        await anyio.Path(folder, "notes.txt").write_text("Orders go to ann@example.com.")
        desk = Desk(shop=orders, folder=Path(folder))
        run = await agent.run("Mail Ann the weather in Beijing, in Fahrenheit, and the orders.", deps=desk)
        for item in run.pending:
            print(f"approved: {item.description}")
            await agent.approve(item.run_id, item.call_id, by="you")
        run = await agent.resume(run.id, deps=desk)
    for message in run.messages:
        if isinstance(message, ToolResult):
            print(f"{message.call_id} {message.tool}, {message.outcome}: {message.content}")
    print(f"{run.output} ({len(desk.outbox)} mail in the outbox)")
    return run


if __name__ == "__main__":
    anyio.run(main)
