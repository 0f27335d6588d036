"""Five tools with strict bounds: weather, a database, a calculator, files and e-mail.

The model is a script, which also makes forbidden calls, so no API key is needed. For a real model, give `Agent` the
string "openai:gpt-5.4-mini" instead.
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
    """Dependencies of the tools, passed to them as `ctx.deps`. The model does not see them."""

    shop: sqlite3.Connection
    folder: Path
    outbox: dict[str, EmailMessage] = attrs.field(factory=dict)  # by idempotency key


@tool(read_only=True)
def get_weather(city: str, unit: Literal["celsius", "fahrenheit"] = "celsius") -> str:
    """Return the current weather in a city: temperature and condition.

    Args:
        city: English name of the city, such as "Beijing".
        unit: Unit of the temperature.
    """
    weather = {"Beijing": (28, "sunny"), "Shanghai": (32, "cloudy")}
    if city not in weather:
        raise ModelRetry(f"no weather of {city!r} is known here, only of {', '.join(weather)}")
    degrees, condition = weather[city]
    return f"{condition}, {degrees} C" if unit == "celsius" else f"{condition}, {degrees * 9 / 5 + 32:g} F"


# Only SELECT is allowed, by two checks: `only_select` explains the rule to the model, and the database enforces it.


def only_select(a: Any) -> str | None:
    """Return the reason why a query is not allowed, or None."""
    sql = a.sql.strip().rstrip(";")
    return None if sql.upper().startswith("SELECT") and ";" not in sql else "write one SELECT, without a semicolon"


@tool(read_only=True, concurrency_safe=False, locks=lambda _a: ["shop"], validate=only_select)
def query_database(ctx: RunContext[Desk], sql: str) -> list[dict[str, Any]]:  # noqa: D417  the model does not see ctx
    """Run a SELECT on the shop's database, and return its first 100 rows. The table is orders(id, name, amount).

    Args:
        sql: The query, in the dialect of SQLite.
    """
    try:
        return [dict(row) for row in ctx.deps.shop.execute(sql).fetchmany(100)]
    except sqlite3.Error as error:
        raise ModelRetry(f"the database refused it: {error}") from None


def shop() -> sqlite3.Connection:
    """Return a small read-only database with limits on time and memory."""
    reads = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION}
    made = sqlite3.connect(":memory:", check_same_thread=False)  # plain functions run in threads, one by one: `locks`
    made.row_factory = sqlite3.Row
    made.execute("CREATE TABLE orders (id, name, amount)")
    made.execute("INSERT INTO orders VALUES (1, 'Ann', 100), (2, 'Bob', 200)")
    made.set_authorizer(lambda action, *_: sqlite3.SQLITE_OK if action in reads else sqlite3.SQLITE_DENY)
    made.set_progress_handler(lambda: 1, 5_000_000)  # virtual machine steps, well below a second
    made.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 1_000_000)
    return made


# No eval: only these operators are allowed, and numbers are bounded.

OPERATORS: dict[type, Any] = {ast.Add: add, ast.Sub: sub, ast.Mult: mul, ast.Div: truediv, ast.Pow: pow, ast.USub: neg}
LARGEST, EXPONENT = 10**50, 100


@tool(read_only=True)
def calculate(expression: Annotated[str, Field(max_length=200)]) -> float:
    """Calculate an expression of numbers, + - * / ** and parentheses, without names or functions.

    Args:
        expression: For example "(3 + 5) * 2".
    """
    try:
        return value_of(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ArithmeticError) as error:
        raise ModelRetry(f"{expression!r} cannot be worked out: {error}") from None


def value_of(node: ast.AST) -> Any:
    """Return the value of a part of an expression."""
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
        file_path: Path in the folder, such as "notes.txt".
        encoding: Encoding of the file.
    """
    folder = ctx.deps.folder.resolve()
    try:
        path = (folder / file_path).resolve()  # the real path, with links and dots resolved
        if path.is_relative_to(folder) and path.is_file():
            with path.open(encoding=encoding) as file:
                return file.read(10_000)
    except (OSError, LookupError, ValueError):
        raise ModelRetry(f"{file_path!r} cannot be read as text in {encoding!r}") from None
    raise ModelRetry(f"there is no file {file_path!r} in the folder")


def summary(a: Any) -> str:
    """Describe a mail to the person who approves it."""
    return f"Send {a.subject!r} to {a.to}, {len(a.body)} characters."


@tool(permission="write", idempotent=True, requires_approval=True, describe=summary)
def send_email(  # noqa: D417  as above
    ctx: RunContext[Desk],
    to: Annotated[str, Field(pattern=r"^[^\s@,;<>]+@[^\s@,;<>]+$")],
    subject: Annotated[str, Field(pattern=r"^[^\r\n]+$")],
    body: str,
) -> str:
    """Send a plain-text mail to one address, after a person has approved it.

    Args:
        to: Address of the recipient.
        subject: Subject, one line.
        body: Text of the mail.
    """
    if ctx.idempotency_key in ctx.deps.outbox:  # an earlier attempt sent it, and crashed before it returned
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
    """Print the tools and their findings, and run a conversation in which the program approves the mail."""
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
