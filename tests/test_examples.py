"""The examples keep what they promise: in what they print, and against whoever means them harm."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from contextlib import closing, redirect_stdout
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import anyio
import attrs
import pytest

from agentfsm import ArgumentsError, ModelRetry, Outcome, Run, RunContext, State, ToolResult, Usage
from agentfsm.engine.execution.cost import calculate_run_cost
from tests.support.example_modules import example

# The coordinator.


@attrs.frozen(kw_only=True)
class Told:
    """A run of the coordinator, and what it printed."""

    module: ModuleType
    run: Run
    lines: list[str]

    def at(self, *beginnings: str) -> int:
        """Where the first line stands that begins in one of these ways."""
        return next(at for at, line in enumerate(self.lines) if line.strip().startswith(beginnings))


@pytest.fixture(scope="module", params=["asyncio", "trio"])
def told(request: pytest.FixtureRequest) -> Told:
    """The coordinator, run once on each backend."""
    coordinator = example("coordinator")
    out = io.StringIO()
    with redirect_stdout(out):
        run = anyio.run(coordinator.main, backend=request.param)
    return Told(module=coordinator, run=run, lines=out.getvalue().splitlines())


def test_the_coordinator_runs_in_the_order_of_its_plan(told):
    """Four batches, as document C has them; inside of one the slow do not hold up the others."""
    plan = [line.split()[1:4:2] for line in told.lines if line.startswith("batch ")]
    assert [batch for batch, _tool in plan] == ["1:", "1:", "1:", "1:", "1:", "2:", "3:", "3:", "4:"]
    assert [tool for batch, tool in plan if batch in ("2:", "4:")] == ["invoke_memory_manager", "generate_payment"]
    assert "about 13 s, and 23.5 s one by one" in told.lines

    begun = {call.call_id: told.at(f"{call.call_id} {call.name}") for call in told.run.calls}
    ended = {call: told.at(f"{call} done", f"{call} failed") for call in begun}
    assert max(begun[f"t1.{n}"] for n in (1, 2, 4)) < min(ended[f"t1.{n}"] for n in (1, 2, 4))
    batches = [[f"t1.{n}" for n in batch] for batch in ((0, 1, 2, 3, 4), (5,), (6, 7), (8,))]
    for before, after in pairwise(batches):
        assert max(ended[call] for call in before) < min(begun[call] for call in after)
    results = [message for message in told.run.messages if isinstance(message, ToolResult)]
    assert [result.index for result in results] == list(range(9))


def test_the_coordinator_shows_the_agents_below_their_calls(told):
    """A line for each turn of theirs, further in than the call's own."""
    at = told.lines.index("  t1.2   assessment_expert: turn 2 of 3")
    assert told.lines.index("  t1.2 invoke_assessment_expert") < at < told.lines.index("  t1.2 done")


def test_the_coordinator_survives_a_specialist(told):
    """One of five fails: the model is told, the user is spared the details, and the rest is there."""
    assert told.at("t1.3 failed: the agent objection_handler gave no answer (model_error: 529: overloaded)")
    assert told.run.state is State.DONE
    assert "529" not in told.run.output
    assert {call.name: call.outcome for call in told.run.calls}["invoke_objection_handler"] is Outcome.FAILED
    assert [call.outcome for call in told.run.calls].count(Outcome.DONE) == 8
    assert told.module.MEMORY == {"user-17": ["34, data engineer, Lisbon, two degrees"]}


def test_the_coordinator_adds_up_what_it_cost(told):
    """A line for each specialist, and the whole below, in tokens and dollars."""
    table = [line.split() for line in told.lines[told.at("agent  ") + 1 :]]
    spent = {name: (int(tokens.replace(",", "")), float(usd)) for name, _turns, tokens, _seconds, usd in table}
    assert [name for name, (tokens, _usd) in spent.items() if not tokens] == ["objection_handler"]
    assert len(spent) == 7
    whole_tokens, whole_usd = spent.pop("coordinator")
    own_tokens, own_usd = 2 * 1_350, 2 * 0.00585
    assert whole_tokens == own_tokens + sum(tokens for tokens, _ in spent.values())
    assert whole_usd == pytest.approx(own_usd + sum(usd for _, usd in spent.values()), abs=0.0005)


def test_the_matrix_of_document_c_is_declared():
    """Fourteen tools, each with its flag and its time-out."""
    tools = {tool.name: tool for tool in example("coordinator").TOOLS}
    assert len(tools) == 14
    alone = {name for name, tool in tools.items() if not tool.concurrency_safe}
    assert alone == {"invoke_memory_manager", "save_user_memory", "generate_payment"}
    assert {name: tools[name].timeout_s for name in tools if tools[name].timeout_s} == {
        "invoke_policy_expert": 30,
        "invoke_assessment_expert": 30,
        "invoke_strategist": 30,
        "invoke_objection_handler": 30,
        "invoke_case_analyst": 30,
        "invoke_memory_manager": 15,
        "search_knowledge": 10,
        "save_user_memory": 5,
        "generate_payment": 10,
        "get_current_datetime": 1,
        "web_search": 15,
    }
    assert {name for name, tool in tools.items() if tool.kind.value == "agent"} == {
        n for n in tools if n[:6] == "invoke"
    }


async def test_the_direct_tools_that_no_script_calls():
    """They are real functions, and tell what they say."""
    coordinator = example("coordinator")
    assert (await coordinator.get_current_datetime()).endswith("+08:00")
    assert await coordinator.check_off_topic("Who won the match?")
    assert not await coordinator.check_off_topic("Hong Kong, please")
    assert "visa" in await coordinator.web_search("visa")


# The toolbox.


@pytest.fixture
def toolbox() -> ModuleType:
    """The example as a module."""
    return example("toolbox")


@pytest.fixture
def ctx(toolbox: ModuleType, tmp_path: Path) -> Iterator[RunContext[Any]]:
    """A call, with a desk whose folder lies beside a secret."""
    (tmp_path / "secret.txt").write_text("secret", encoding="utf-8")
    folder = tmp_path / "folder"
    folder.mkdir()
    with closing(toolbox.shop()) as shop:
        yield RunContext(deps=toolbox.Desk(shop=shop, folder=folder), idempotency_key="r:t1.0")


async def test_the_toolbox_holds_one_conversation(toolbox, capsys):
    """Five tools work, three tries beyond their bounds are told off, and the mail waits for a yes."""
    run = await toolbox.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("get_weather(city, unit?): ")
    assert "only reading: get_weather, query_database, calculate, read_file" in lines
    assert "findings: 0" in lines
    assert "approved: Send 'Orders' to ann@example.com, 30 characters." in lines
    assert "t1.1 calculate, done: 82.4" in lines
    assert 't1.2 query_database, done: [{"total":300}]' in lines
    assert "t1.4 calculate, failed: '9 ** 9 ** 9' cannot be worked out: 100 is the largest exponent" in lines
    assert any("break a rule: write one SELECT" in line for line in lines)
    assert "t1.6 read_file, failed: there is no file '../../../etc/passwd' in the folder" in lines
    assert lines[-1].endswith("(1 mail in the outbox)")
    assert run.state is State.DONE


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("28 * 9 / 5 + 32", 82.4),
        (" (3 + 5) * 2", 16),
        ("-2 ** 2", -4),
        ("2 ** -1", 0.5),
        ("1e3", 1000.0),
        ("(" * 99 + "1" + ")" * 99, 1),
    ],
)
def test_the_calculator_calculates(toolbox, expression, value):
    """What arithmetic is, it knows."""
    assert toolbox.calculate(expression) == pytest.approx(value)


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "1 +",
        "1 / 0",
        "0 ** -1",
        "9 ** 9 ** 9",
        "2 ** 101",
        "10 ** 60",
        "1e999",
        "1e40 ** 10",
        "(-8) ** 0.5",
        "__import__('os').system('true')",
        "x",
        "True + 1",
        "'a' * 9",
        "[1][0]",
        "1 if 1 else 2",
        "1 < 2",
        "1 // 2",
        "~1",
        "1\0",
        "1j",
        "(lambda: 1)()",
        "9" * 90,
    ],
)
def test_the_calculator_is_no_eval(toolbox, expression):
    """Names, calls, texts, and numbers without end are told off, at once; the model may mend it."""
    with pytest.raises(ModelRetry, match="cannot be worked out"):
        toolbox.calculate(expression)


def test_the_calculator_takes_no_long_text(toolbox):
    """The schema bounds it, before anything is parsed."""
    with pytest.raises(ArgumentsError, match="200"):
        toolbox.calculate.bind('{"expression": "' + "-" * 500 + '1"}')


@pytest.mark.parametrize(
    "sql",
    [
        "INSERT INTO orders VALUES (3, 'Eve', 1)",
        "UPDATE orders SET amount = 0",
        "DELETE FROM orders",
        "DROP TABLE orders",
        "PRAGMA writable_schema = 1",
        "ATTACH ':memory:' AS other",
        "VACUUM INTO 'copy.db'",
        "WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c) SELECT count(*) FROM c",
        "SELECT load_extension('x')",
        "SELECT length(zeroblob(2000000))",
        "SELECT count(*) FROM orders" + ", orders" * 39,  # 2 ** 40 rows
        "SELECT 1; SELECT 2",
    ],
)
def test_the_database_itself_refuses(toolbox, ctx, sql):
    """Where the rule did not see it: no write, no file, no extension, no endless query, no huge value."""
    with pytest.raises(ModelRetry, match="the database refused it"):
        toolbox.query_database(ctx, sql)
    assert toolbox.query_database(ctx, "SELECT sum(amount) AS total FROM orders") == [{"total": 300}]


@pytest.mark.parametrize("sql", ["DROP TABLE orders", "SELECT 1; DROP TABLE orders", "", "EXPLAIN SELECT 1"])
def test_the_rule_tells_the_model(toolbox, sql):
    """The third layer of validation speaks before anything is run."""
    bound = toolbox.query_database.to_namespace(((), {"sql": sql}))
    assert toolbox.only_select(bound) == "write one SELECT, without a semicolon"
    bound.sql = " select 1; "
    assert toolbox.only_select(bound) is None


def test_a_file_of_the_folder_is_read(toolbox, ctx):
    """Ten thousand characters of it, in the encoding that is named."""
    (ctx.deps.folder / "deep").mkdir()
    (ctx.deps.folder / "deep" / "long.txt").write_text("北" * 20_000, encoding="gbk")
    assert toolbox.read_file(ctx, "deep/long.txt", encoding="gbk") == "北" * 10_000


@pytest.mark.parametrize(
    "path", ["../secret.txt", "link.txt", "links/secret.txt", "deep/../../secret.txt", ".", "pipe"]
)
def test_no_file_outside_is_read(toolbox, ctx, path):
    """Neither by dots nor by links; nor what is no file."""
    folder = ctx.deps.folder
    (folder / "deep").mkdir()
    (folder / "link.txt").symlink_to(folder.parent / "secret.txt")
    (folder / "links").symlink_to(folder.parent)
    os.mkfifo(folder / "pipe")
    with pytest.raises(ModelRetry, match="there is no file"):
        toolbox.read_file(ctx, path)
    with pytest.raises(ModelRetry, match="there is no file"):
        toolbox.read_file(ctx, str(folder.parent / "secret.txt"))


@pytest.mark.parametrize(("path", "encoding"), [("bytes.txt", "utf-8"), ("bytes.txt", "klingon"), ("a\0b", "utf-8")])
def test_a_file_that_cannot_be_read(toolbox, ctx, path, encoding):
    """The model is told, without where the folder lies."""
    (ctx.deps.folder / "bytes.txt").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ModelRetry, match="cannot be read as text") as told:
        toolbox.read_file(ctx, path, encoding=encoding)
    assert str(ctx.deps.folder) not in str(told.value)


def test_one_key_is_one_mail(toolbox, ctx):
    """An attempt that follows one which was cut off does not send again."""
    assert toolbox.send_email(ctx, "ann@example.com", "Hi", "Text") == "sent to ann@example.com"
    assert toolbox.send_email(ctx, "ann@example.com", "Hi", "Text") == "it was sent already"
    (mail,) = ctx.deps.outbox.values()
    assert (mail["To"], mail["Subject"], mail.get_content()) == ("ann@example.com", "Hi", "Text\n")


@pytest.mark.parametrize(
    ("to", "subject"),
    [("ann@example.com\nBcc: eve@example.com", "Hi"), ("a@x.org,b@x.org", "Hi"), ("ann", "Hi"), ("a@x.org", "a\nb: c")],
)
def test_no_header_is_smuggled_in(toolbox, to, subject):
    """The schema refuses it before anybody is asked to approve."""
    text = json.dumps({"to": to, "subject": subject, "body": ""})
    with pytest.raises(ArgumentsError):
        toolbox.send_email.bind(text)


def test_no_weather_is_made_up(toolbox):
    """An unknown city is told off with those that are known; a unit is the one that was asked for."""
    with pytest.raises(ModelRetry, match="Beijing, Shanghai"):
        toolbox.get_weather("Atlantis")
    assert toolbox.get_weather("Shanghai") == "cloudy, 32 C"
    assert toolbox.get_weather("Shanghai", unit="fahrenheit") == "cloudy, 89.6 F"


# Two servers.


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_one_server_is_read_and_the_other_written_with_a_yes(backend, capsys):
    """Nothing is ordered before a person says so, and then what that person has changed; all of it is on record."""
    run = anyio.run(example("two_servers").main, backend=backend)
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert lines.count("stock__count, done: 3") == 1
    asked = lines.index('t2.0 waits for approval: supplier__order({"item": "tea", "boxes": 20})')
    assert lines[asked + 1] == "orders at the supplier: none"
    assert 'orders at the supplier: {"item": "tea", "boxes": 12}' in lines
    assert lines[-1] == 'supplier__order({"item": "tea", "boxes": 12}): done, approved by ann'
    assert sum(line.endswith(": done") for line in lines) == 3
    assert run.state is State.DONE


# The assistant.


def test_the_assistant_remembers_and_forgets():
    """Across processes and agents, for its user only; and of what is forgotten no byte remains."""
    out = io.StringIO()
    with redirect_stdout(out):
        example("assistant").main()
    assert out.getvalue().splitlines() == [
        "monday, writer: Sales rose by 7 %.",
        "tuesday, assistant to ann: Yesterday's report says: Sales rose by 7 %, and you live in Porto.",
        "tuesday, assistant to bob: I know of no report, and I do not know where you live.",
        "waits for approval: forget_memory",
        "tuesday, assistant to ann: It is forgotten (deleted: 2).",
        "tuesday, assistant to ann: I know of no report, and I do not know where you live.",
        "'Porto' in a file: True",
        "items forgotten for ann: 1",
        "'Porto' in a file: False",
    ]


# A guarded agent.


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_an_injected_page_sends_no_mail(backend, capsys):
    """A person sees where the request came from; without the page, nobody is asked."""
    guarded = example("guarded")
    anyio.run(guarded.main, backend=backend)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("because: the rule two_of(untrusted, private, sends_out)")
    assert "call t1.0 of read_page" in lines[1]
    assert "send_mail: rejected, guards: ask" in lines
    assert [line for line in lines if line.startswith("sent:")] == ["sent: []", "sent: ['ann@shop.example']"]


# An evaluation.


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_tiers_and_caches_save_half(backend, capsys):
    """The figures are those of the recorded tokens; a repeated answer has none."""
    tiered, alone = anyio.run(example("tiers_and_cache").main, backend=backend)
    assert (round(tiered, 6), round(alone, 6)) == (0.010068, 0.0203)
    out = capsys.readouterr().out
    assert "50% less" in out
    assert "ann: May I return it? Yes, within 14 days. (0 tokens, from the answer cache)" in out.splitlines()


def test_what_tiers_would_save_for_the_coordinator(told):
    """The tokens that its journals record, with its six specialists in the small tier, at the prices of document H.

    This is arithmetic: it assumes the same tokens, and says nothing about the answers.
    """
    prices = example("tiers_and_cache")
    cost = calculate_run_cost(told.run)
    below = sum([child.usage for child in cost.children], Usage())
    own = cost.usage.without(below)
    assert (below.tokens, own.tokens) == (9 * 1_350, 2 * 1_350)
    alone = prices.LARGE.cost_usd(cost.usage)
    tiered = prices.LARGE.cost_usd(own) + prices.SMALL.cost_usd(below)
    assert round(1 - tiered / alone, 2) == 0.77


def test_a_worse_version_is_caught(capsys):
    """An equal one passes, the worse one does not, and a case of a real run has no secret."""
    anyio.run(example("evaluate").main)
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith("version 1.1: pass; outcome: not shown to be worse")
    assert lines[3].startswith("version 1.2: worse; outcome: worse")
    assert "sk-proj" not in lines[4]
    assert lines[5] == "replayed, without a call: 1.0"


# Flows.


def test_a_killed_load_goes_on_and_a_wrong_one_is_taken_back(capfd):
    """The rows of the first day are there once, and none of the second."""
    example("etl").main()
    out = capfd.readouterr().out
    assert "the first worker was killed by signal 9" in out
    first, second = [line for line in out.splitlines() if "the warehouse has:" in line]
    assert first == second
    assert first.count("2025-07-28:") == 4
    assert "step_failed: step reconcile failed (ValueError: loaded 4800, and the bank has 5000" in out
    assert "compensated by: compensate_load" in out


def test_an_unclear_review_is_neutral_and_named(capfd):
    """The warning has its id, and all moods are stored."""
    anyio.run(example("sentiment").main)
    out = capfd.readouterr().out
    moods = [line.rsplit(", ", 1)[1] for line in out.splitlines()[-4:]]
    assert moods == ["'positive')", "'neutral')", "'negative')", "'positive')"]


def test_only_what_no_rule_and_no_agent_can_repair_waits_for_a_person(capsys):
    """The person names the cause, and the repair is carried out."""
    anyio.run(example("aiops").main)
    lines = capsys.readouterr().out.splitlines()
    assert sorted(lines[1:3]) == ["  clean_logs on db-1", "  scale_up on web-2"]  # at the same time
    assert lines[3] == "  roll_back on shop"
    assert lines[4] == "waits for a person: a5, P2, cause unknown"
    assert lines[5].startswith("completed")
    assert "restart_workers" in lines[5]


def test_code_mode_saves_requests_and_repeats_nothing(capsys):
    """Both ways order the same, and no offer is asked for twice although the process changes."""
    plain, script = anyio.run(example("code_mode").main)
    assert (plain.turn, script.turn) == (21, 2)
    assert plain.output == script.output
    assert capsys.readouterr().out.count("offers asked for: 19") == 2


def test_the_front_desk_goes_on_after_a_login(capsys):
    """The refund is made once, with the key of the user, which is in no journal."""
    run = anyio.run(example("front_desk").main)
    assert run.output == "Your order A-1 is refunded."
    assert "refunds: 1; the key is in the journal: False" in capsys.readouterr().out
