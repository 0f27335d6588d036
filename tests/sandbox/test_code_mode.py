"""Scripts: their calls are calls of a run, with its rules, and none is repeated when a script goes on after a wait."""

from __future__ import annotations

import json
import socket
from random import Random

import pytest

from agentfsm import Agent, Limits, MisuseError, Outcome, State, tool
from agentfsm.agents.subagent import find_inner_agent
from agentfsm.guards import Guard, max_calls
from agentfsm.ports import FinishReason, Reply
from agentfsm.sandbox import Sandbox, find_isolation
from agentfsm.scripts import CPython, Monty, Script, ScriptSource, ScriptStep
from agentfsm.stores import MemoryStore
from agentfsm.testing import FunctionModel, ScriptedModel, call, say
from tests.support.checks import results_of
from tests.support.hostile_scripts import write_hostile_script

PRICES = {"A": 1, "B": 2, "C": 3}
GATHER = """
import asyncio
prices = await asyncio.gather(*[price(city) for city in "ABC"])
print(prices)
await pay("Ann", cents=sum(prices))
"""
ONE_BY_ONE = 'total = 0\nfor city in "ABC":\n    total += price(city)\npay("Ann", total)'


class Shop:
    """Tools that say what they did."""

    def __init__(self):
        self.done = []

        @tool(read_only=True)
        async def price(city: str) -> int:
            """Price of a city, in cents."""
            self.done.append(("price", city))
            return PRICES[city]

        @tool(requires_approval=lambda arguments: arguments.cents > 5)
        async def pay(account: str, cents: int) -> str:
            """Pay."""
            self.done.append(("pay", account, cents))
            return str(cents)

        self.tools = [price, pay]


@pytest.fixture
def shop():
    """Give the tools."""
    return Shop()


@pytest.fixture(params=["monty", "cpython"])
def interpreter(request):
    """Give each interpreter."""
    if request.param == "cpython" and find_isolation().isolation is None:
        pytest.skip("no sandbox here")
    return Monty(seconds=1) if request.param == "monty" else CPython(Sandbox(seconds=60))


def agent_of(shop, *codes, interpreter=None, **options):
    """Return an agent whose model runs these scripts one after the other, and then answers."""
    model = ScriptedModel(*[say("", call("run_python", code=code)) for code in codes], "done")
    return Agent(model, tools=[Script(*shop.tools, interpreter=interpreter, **options)], store=MemoryStore())


async def outcome_of(shop, code, **options):
    """Return what the model reads of a script that needs no approval."""
    run = await agent_of(shop, code, **options).run("go")
    [result] = results_of(run.messages)
    assert result.outcome is Outcome.DONE
    return json.loads(result.content)


@pytest.mark.parametrize("code", [GATHER, ONE_BY_ONE])
async def test_a_script_waits_for_an_approval_and_goes_on(shop, interpreter, code):
    """What was read before is not read again, and a result of text stays text."""
    agent = agent_of(shop, code, interpreter=interpreter)
    run = await agent.run("go", id="r")
    [pending] = run.pending
    assert (pending.tool, dict(pending.arguments)) == ("pay", {"account": "Ann", "cents": 6})
    assert shop.done == [("price", each) for each in "ABC"]
    await agent.approve(pending.run_id, pending.call_id, by="ann")
    run = await agent.resume("r")
    [result] = results_of(run.messages)
    assert run.output == "done"
    assert json.loads(result.content)["result"] == "6"
    assert shop.done == [*[("price", each) for each in "ABC"], ("pay", "Ann", 6)]


async def test_a_person_edits_or_rejects_a_call_of_a_script(shop, interpreter):
    """What the person has decided is done or raised, and the script goes on."""
    code = 'paid = pay("Ann", 6)\ntry:\n    pay("Bob", 7)\nexcept PermissionError as error:\n    print(error)\npaid'
    agent = agent_of(shop, code, interpreter=interpreter)
    [first] = (await agent.run("go", id="r")).pending
    await agent.approve(first.run_id, first.call_id, by="ann", arguments={"account": "Ann", "cents": 8})
    [second] = (await agent.resume("r")).pending
    await agent.reject(second.run_id, second.call_id, by="ann", message="not to Bob")
    [result] = results_of((await agent.resume("r")).messages)
    found = json.loads(result.content)
    assert (found["result"], found["error"]) == ("8", None)
    assert "not to Bob" in found["printed"]
    assert shop.done == [("pay", "Ann", 8)]


async def test_a_fork_of_a_script_goes_on_with_its_time_and_chance(shop):
    """Although the fork is another run, begun at another time."""
    code = 'import random, time\npay(f"{random.random()} {time.time()}", 1)\npay("Ann", 6)'
    agent = agent_of(shop, code)
    [pending] = (await agent.run("go", id="r")).pending
    script = find_inner_agent(Script(*shop.tools)).with_(store=agent.store)
    run = await script.fork(pending.run_id, id="f")
    await script.settle("f", run.pending[0].call_id, result="6")
    assert json.loads((await script.resume("f")).output) == {"printed": "", "result": "6", "error": None}
    assert len(shop.done) == 1


BAD = [
    ("def f(:", "SyntaxError"),
    ("nope()", "NameError"),
    ('price("A", "B")', "TypeError"),
    ("price({1, 2})", "TypeError"),
    ("1\n1 / 0", "line 2"),
    ("for _ in range(3):\n    price('A')", "2 calls"),
    ("import asyncio\nasync def f():\n    pay('Ann', 1)\nawait f()", "not awaited: pay in line 3"),
    ("price('Z')\nawait price('A')", "not awaited: price in line 1"),
    ("import asyncio\npaid = pay('Ann', 1)\nasync def f():\n    pass\nawait f()", "not awaited: pay in line 2"),
    ("from time import sleep\nsleep(0.001)\ndef pay(name):\n    pass\npay('Ann')\nawait price('A')", None),
    ("while True:\n    pass", "TimeoutError"),
    ("price(city=[1])", "ValueError"),
    ('price("A")\nprice("Z")', "line 2"),
    ("price", None),
    ("price(float('nan'))", "ValueError"),
    ("price('\\x00')", "ValueError"),
    ("x = []\nfor _ in range(3000):\n    x = [x]\nprice(x)", "RecursionError"),
    ("(" * 9000, "[... "),
]


@pytest.mark.parametrize(("code", "error"), BAD)
async def test_a_bad_script_is_a_result(shop, code, error):
    """The model reads what is wrong, and where."""
    found = (await outcome_of(shop, code, interpreter=Monty(seconds=1), calls=2))["error"]
    assert error is found is None or error in found
    assert ("pay", "Ann", 1) not in shop.done


async def test_a_bad_script_is_a_result_of_cpython(shop):
    """As above; what ends its process ends the script."""
    if find_isolation().isolation is None:
        pytest.skip("no sandbox here")
    for code, error in [
        *BAD[:7],
        ("while True:\n    pass", "1 s of processor time"),
        ("import os\nos._exit(3)", "exit code 3"),
    ]:
        found = (await outcome_of(shop, code, interpreter=CPython(Sandbox(seconds=60, cpu_s=1)), calls=2))["error"]
        assert error in found
    assert ("pay", "Ann", 1) not in shop.done


async def test_a_script_catches_what_a_call_raises(shop, interpreter):
    """The text is that which a model reads."""
    code = 'try:\n    price("Z")\nexcept RuntimeError as error:\n    print(error)\nprice("A")'
    found = await outcome_of(shop, code, interpreter=interpreter)
    assert (found["result"], found["error"]) == (1, None)
    assert found["printed"].startswith("KeyError: 'Z'.")


async def test_time_and_chance_come_from_the_run(shop, interpreter):
    """They are the same when the script runs again, so that its calls are the same."""
    code = """
import random, time
began = time.time()
time.sleep(0.001)
pay(str(random.random()), 1)
pay(str(time.time() > began), 1)
"""
    assert (await outcome_of(shop, code, interpreter=interpreter))["error"] is None
    assert shop.done[1] == ("pay", "True", 1)


CPYTHON = """
import asyncio, datetime, secrets, time, uuid
values = [*{"Oslo", "Rome", "Bern"}, str(uuid.uuid4()), secrets.token_hex(4), str(datetime.datetime.now())]
values += [time.monotonic(), time.strftime("%S"), isinstance(datetime.datetime(2026, 1, 1), datetime.date)]
async def main():
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(price(city)) for city in "AB"]
    last = await asyncio.wait_for(price("C"), timeout=0.001)
    await asyncio.gather(pay(str(values), 1), price("Z"), return_exceptions=True)
    await pay(str(values), 6)
    return [task.result() for task in tasks] + [last]
asyncio.run(main())
"""


async def test_scripts_of_cpython_are_the_same_when_they_run_again(shop):
    """Also by the order of sets, by other clocks and other chance; the usual ways to await a call work."""
    if find_isolation().isolation is None:
        pytest.skip("no sandbox here")
    agent = agent_of(shop, CPYTHON, interpreter=CPython(Sandbox(seconds=60)))
    [pending] = (await agent.run("go", id="r")).pending
    await agent.approve(pending.run_id, pending.call_id, by="ann")
    [result] = results_of((await agent.resume("r")).messages)
    assert json.loads(result.content) == {"printed": "", "result": [1, 2, 3], "error": None}
    assert shop.done[3][1] == shop.done[5][1]


@pytest.mark.parametrize(
    "forged", ["calls = 7", "calls = [{}]", "calls.append({'tool': 7, 'arguments': 7, 'line': 'x'})", "end = {}"]
)
async def test_a_forged_step_ends_the_script(shop, forged):
    """A script of CPython can change what runs it, and nothing outside."""
    if find_isolation().isolation is None:
        pytest.skip("no sandbox here")
    code = f"script = price.func.__self__\nscript.{forged}\nscript.stopped.set()\nwhile True:\n    pass"
    found = await outcome_of(shop, code, interpreter=CPython(Sandbox(seconds=60)))
    assert found["error"] == "the script has changed what runs it, so it was ended"


async def test_results_have_the_types_of_the_annotations(interpreter):
    """A text that looks like a number stays one, nothing is None, and JSON that is too deep is a text."""

    def code_of(word: str) -> str | None:
        return word or None

    def act(word: str) -> None:
        assert word

    def deep(word: str):
        return word * 3000

    tools = [tool(read_only=True)(code_of), tool(act), tool(name="get-deep")(deep)]
    code = '[code_of("12"), code_of(""), act("x"), len(get_deep("["))]'
    model = ScriptedModel(say("", call("run_python", code=code)), "done")
    script = Script(*tools, interpreter=interpreter)
    assert "async def code_of(word: str) -> str | None:" in script.description
    assert "async def get_deep(word: str)" in script.description
    [result] = results_of((await Agent(model, tools=[script]).run("go")).messages)
    assert json.loads(result.content)["result"] == ["12", None, None, 3000]


async def test_a_deploy_does_not_change_what_a_script_has_read(shop):
    """The result of a call has the type that its tool had then."""
    agent = agent_of(shop, 'found = pay("Ann", 1)\npay("Ann", 6)\nfound')
    [pending] = (await agent.run("go", id="r")).pending

    @tool(name="pay", requires_approval=True)
    async def pay_cents(account: str, cents: int) -> int:
        """Pay."""
        return cents

    changed = Script(shop.tools[0], pay_cents)
    agent = Agent(ScriptedModel("done"), tools=[changed], store=agent.store)
    await agent.approve(pending.run_id, pending.call_id, by="ann")
    [result] = results_of((await agent.resume("r")).messages)
    assert json.loads(result.content)["result"] == "1"


@pytest.mark.parametrize(
    "code",
    [
        "open('/etc/passwd').read()",
        "import os\nos.environ['PATH']",
        "import socket\nsocket.create_connection(('127.0.0.1', 1))",
        "import subprocess\nsubprocess.run(['ls'])",
        "().__class__.__bases__[0].__subclasses__()",
        "x = 'a' * 10_000_000_000",
        "def f():\n    return f()\nf()",
        "print('x' * 40_000_000)",
    ],
)
async def test_monty_refuses_what_leads_out(shop, code):
    """An attempt is a result."""
    assert (await outcome_of(shop, code, interpreter=Monty(seconds=1, memory_mb=50)))["error"]
    assert shop.done == []


@pytest.mark.parametrize("number", [25, pytest.param(1_000, marks=pytest.mark.soak)])
async def test_hostile_scripts_end_as_results(tmp_path, interpreter, number):
    """Whatever they do is a step of the script: nothing is raised, read or connected to outside."""
    file, random = tmp_path / "secret", Random(55)
    file.write_text("hush")
    if interpreter.name == "cpython":
        number, interpreter = number // 10, CPython(Sandbox(seconds=20, cpu_s=1))
    else:
        interpreter = Monty(seconds=0.1, memory_mb=30)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0)
        for _ in range(number):
            code = write_hostile_script(random, str(file), listener.getsockname()[1])
            source = ScriptSource(
                code=code,
                parameters={"price": ("city",), "sleep": ("seconds",)},
                max_calls=20,
                has_await="await " in code,
                started_at=0.0,
                seed="",
            )
            step = await interpreter.advance(source)
            assert isinstance(step, ScriptStep), code
            assert step.end is not None or step.calls, code
            assert len(step.calls) <= 21, code
            assert "hush" not in repr(step), code
        with pytest.raises(BlockingIOError):
            listener.accept()
    assert file.read_text() == "hush"


async def test_the_rules_for_calls_hold_in_scripts(shop):
    """A guard of the agent decides about each call of a script."""
    guard = Guard(max_calls("pay", 1))
    model = ScriptedModel(say("", call("run_python", code='pay("Ann", 1)\npay("Ann", 1)')), "done")
    run = await Agent(model, tools=[Script(*shop.tools)], guards=guard).run("go")
    assert "PermissionError: " in json.loads(results_of(run.messages)[0].content)["error"]
    assert shop.done == [("pay", "Ann", 1)]


async def test_tools_that_do_not_fit_are_found_by_words(shop):
    """The description has the stubs up to a length."""

    def echo(word: str) -> str:
        return word

    many = [tool(read_only=True, name=f"other_{n}", description="x" * 500)(echo) for n in range(40)]
    script = Script(*many, *shop.tools)
    assert len(script.description) < 10_000
    assert "find_tools" in script.description
    model = ScriptedModel(say("", call("run_python", code="find_tools('price of a city')[0]")), "done")
    run = await Agent(model, tools=[script]).run("go")
    assert "async def price(city: str) -> int" in json.loads(results_of(run.messages)[0].content)["result"]


async def test_more_calls_at_once_than_a_reply_can_have(shop):
    """They are made in several turns."""
    code = "import asyncio\nsum(await asyncio.gather(*[price('A') for _ in range(520)]))"
    agent = agent_of(shop, code, calls=520).with_(limits=Limits(tool_calls=1_000))
    [result] = results_of((await agent.run("go")).messages)
    assert json.loads(result.content)["result"] == 520


async def test_results_that_stay_in_the_script_take_no_tokens(shop):
    """Neither of the budget, which is too small for them, nor of the run."""

    @tool(read_only=True)
    def read(page: int) -> str:
        """Read."""
        return "x" * 50_000

    code = "sum(len(read(page)) for page in range(20))"
    model = ScriptedModel(say("", call("run_python", code=code)), say("", call("run_python", code="")), "done")
    run = await Agent(model, tools=[Script(read)], limits=Limits(tokens=10_000)).run("go")
    assert [json.loads(each.content)["result"] for each in results_of(run.messages)] == [1_000_000, None]
    assert run.output == "done"


class Source:
    """A source whose tools are not known before it is fetched."""

    def __init__(self, *tools):
        self.later, self.tools, self.version = tools, (), 0

    @property
    def is_stale(self):
        """Whether it was never fetched."""
        return not self.tools

    async def update(self):
        """Fetch."""
        self.tools, self.version = self.later, 1

    async def aclose(self):
        """Do nothing."""


async def test_tools_of_sources_are_found_and_called(shop):
    """By the name that Python can write, with results of the annotated type."""

    def weather(city: str) -> str:
        return "12"

    source = Source(tool(name="get-weather", read_only=True, description="Weather of a city.")(weather))
    model = ScriptedModel(say("", call("run_python", code="[find_tools('weather'), get_weather('Oslo')]")), "done")
    run = await Agent(model, tools=[Script(*shop.tools, source)]).run("go")
    found, result = json.loads(results_of(run.messages)[0].content)["result"]
    assert ["async def get_weather(city: str) -> str" in each for each in found] == [True]
    assert result == "12"


async def test_other_calls_than_those_of_the_journal_end_the_script(shop, monkeypatch):
    """Such as those of another interpreter: the difference is named, and nothing more is done."""
    agent = agent_of(shop, 'price("A")\npay("Ann", 6)')
    run = await agent.run("go", id="r")
    [pending] = run.pending
    await agent.approve(pending.run_id, pending.call_id, by="ann")
    advance = Monty.advance

    async def advance_other(self, source):
        return await advance(self, type(source)(**{**vars_of(source), "code": source.code.replace("6", "7")}))

    monkeypatch.setattr(Monty, "advance", advance_other)
    run = await agent.resume("r")
    [result] = results_of(run.messages)
    assert result.outcome is Outcome.FAILED
    assert 'call 2 was pay({"account": "Ann", "cents": 6})' in result.content
    assert 'called pay({"account": "Ann", "cents": 7}) in line 2' in result.content
    assert shop.done == [("price", "A"), ("pay", "Ann", 6)]


def vars_of(source):
    """Return the fields of a source by name."""
    return {name: getattr(source, name) for name in type(source).__slots__ if name != "__weakref__"}


def test_declarations_are_checked(shop):
    """When the tool is made."""

    async def deliver(word: str) -> str:
        return word

    with pytest.raises(MisuseError, match="needs the tools"):
        Script()
    with pytest.raises(MisuseError, match="no interpreter"):
        Script(*shop.tools, interpreter=3)
    with pytest.raises(MisuseError, match="calls"):
        Script(*shop.tools, calls=0)
    with pytest.raises(MisuseError, match="neither write= nor hosts="):
        CPython(Sandbox(hosts=["example.org"]))
    with pytest.raises(MisuseError, match="cannot have late"):
        Script(tool(background=True, name="late")(deliver))
    assert not Script(*shop.tools).read_only
    assert Script(shop.tools[0]).read_only


async def test_a_model_of_ones_own_reads_the_result(shop):
    """As of any other tool."""

    def answer(request):
        if len(request.messages) == 1:
            return say("", call("run_python", code="price('C')"))
        return Reply(text=request.messages[-1].content, finish_reason=FinishReason.STOP)

    run = await Agent(FunctionModel(answer), tools=[Script(*shop.tools)]).run("go")
    assert run.state is State.DONE
    assert json.loads(run.output)["result"] == 3
