"""Tools whose functions run in sandboxes: results, failures, the level in the audit, and what is refused."""

import datetime as dt
import os
import sys

import anyio
import pytest

from agentfsm import Agent, ErrorType, MisuseError, Outcome, RunContext, tool
from agentfsm.ports import SandboxEnd
from agentfsm.sandbox import Availability, Isolation, Sandbox, build_python_tool, find_isolation
from agentfsm.testing import ScriptedModel, call, say
from tests.support import sandbox_functions
from tests.support.database_servers import debian
from tests.support.sandbox_escapes import outside


@pytest.fixture
def level():
    """Give the level of isolation on this machine; skip where there is none."""
    debian("bwrap", "bubblewrap")
    available = find_isolation()
    if available.isolation is None:
        pytest.skip(f"no sandbox here: {available.description}")
    return available.isolation


def in_sandbox(function, **options):
    return tool(sandbox=Sandbox(), **options)(function)


async def results_of(tools, *calls):
    """Have a model make the calls; return their results and the audit."""
    async with Agent(ScriptedModel(say("", *calls), say("done")), tools=tools) as agent:
        run = await agent.run("go")
        return [each for each in run.messages if hasattr(each, "outcome")], await agent.audit(run.id)


async def test_an_agent_calls_a_function_in_a_sandbox(level):
    """The result is that of the function, and it and the audit name the isolation."""
    tools = [in_sandbox(sandbox_functions.add, read_only=True), in_sandbox(sandbox_functions.fail, read_only=True)]
    (added, failed), audit = await results_of(tools, call("add", a=1, b=2), call("fail", message="no such thing"))
    assert (added.outcome, added.content, added.sandbox) == (Outcome.DONE, "3", level.value)
    assert (failed.outcome, failed.error_type) == (Outcome.FAILED, ErrorType.TOOL)
    assert failed.content.startswith("ValueError: no such thing. It may be called again")
    assert [each.sandbox for each in audit] == [level.value, level.value]
    assert tools[0](1, 2) == 3  # the tool itself calls the function here


async def test_a_function_asks_for_other_arguments(level):
    """ModelRetry works in a sandbox, in which the package can be imported."""
    (asked,), _ = await results_of([in_sandbox(sandbox_functions.ask_again)], call("ask_again", city="Atlantis"))
    assert (asked.error_type, asked.content) == (ErrorType.RETRY, "no city is called Atlantis")
    assert asked.sandbox == level


@pytest.mark.parametrize(
    ("function", "options", "end", "words"),
    [
        (sandbox_functions.crash, {}, SandboxEnd.LOST, "ended by SIGSEGV"),
        (sandbox_functions.leave_by_exit, {}, SandboxEnd.LOST, "exit code 3 before it returned"),
        (sandbox_functions.answer_otherwise, {}, SandboxEnd.FAILED, "set is not JSON serializable"),
        (sandbox_functions.answer_with_equal_keys, {}, SandboxEnd.FAILED, "two of its keys are equal as text"),
        (sandbox_functions.compute, {"cpu_s": 1}, SandboxEnd.FAILED, "more than 1 s of processor time"),
        (sandbox_functions.take_memory, {"memory_mb": 128}, SandboxEnd.FAILED, "MemoryError (the sandbox has 128 MB)"),
        (sandbox_functions.open_many_files, {}, SandboxEnd.FAILED, "Too many open files"),
        (sandbox_functions.call_otherwise, {}, SandboxEnd.FAILED, "system call of another architecture"),
        (sandbox_functions.compute, {"seconds": 0.5, "cpu_s": 60}, SandboxEnd.TIMED_OUT, "no result within 0.5 s"),
    ],
)
async def test_how_a_function_ended(level, function, options, end, words):
    """A limit of the sandbox ends in a result. After any other death the outcome is unknown, with its reason."""
    ended = await Sandbox(**options).run(function, (), {})
    assert (ended.end, ended.level) == (end, level)
    assert words in ended.error


async def test_a_result_is_bounded(level):
    """A result that a record of the journal could not hold is refused, and one below the bound comes whole."""
    run = Sandbox().run
    assert "more than 16 MB" in (await run(sandbox_functions.answer_at_length, (17 << 20,), {})).error
    assert len((await run(sandbox_functions.answer_at_length, (1 << 20,), {})).value) == 1 << 20


def test_types_of_arguments_that_json_has():
    """A tool takes them nested, optional and annotated."""
    assert in_sandbox(sandbox_functions.take_many).parameters["required"] == ["names", "mode"]


async def test_arguments_and_results_are_json(level):
    """What JSON can express comes back as it was, also characters outside of ASCII."""
    value = {"a": [1, 2.5, None, True, "ä€😀"], "b": {}}
    assert (await Sandbox().run(sandbox_functions.echo, (value,), {})).value == value
    with pytest.raises(MisuseError, match="cannot be passed to a sandbox as JSON"):
        await Sandbox().run(sandbox_functions.echo, ({1, 2},), {})


async def test_a_script_has_sandboxed_functions(level, tmp_path):
    """A function of the program that is run is loaded from its file, and the program is not run again."""
    script = tmp_path / "script.py"
    script.write_text(
        "import anyio\nfrom agentfsm import tool\nfrom agentfsm.sandbox import Sandbox\n\n\n"
        "@tool(sandbox=Sandbox())\ndef double(n: int) -> int:\n    return 2 * n\n\n\n"
        'if __name__ == "__main__":\n    print(anyio.run(double.sandbox.run, double.function, (21,), {}).value)\n'
    )
    done = await anyio.run_process([sys.executable, str(script)])
    assert done.stdout == b"42\n"


def no_sandbox():
    return Availability(isolation=None, reasons={Isolation.BUBBLEWRAP: "it is not installed"})


async def test_without_a_sandbox_nothing_is_run(monkeypatch):
    """A call on a machine that allows no sandbox is refused with the reason; no level is recorded."""
    monkeypatch.setattr("agentfsm.sandbox.sandboxed_call.find_isolation", no_sandbox)
    (refused,), audit = await results_of([in_sandbox(sandbox_functions.add)], call("add", a=1, b=2))
    assert (refused.outcome, refused.error_type, refused.sandbox) == (Outcome.FAILED, ErrorType.UNAVAILABLE, "")
    assert "bubblewrap: it is not installed" in refused.content
    assert "Nothing was run" in refused.content
    assert audit[0].sandbox == ""


async def test_without_a_sandbox_if_the_user_allows_it(monkeypatch):
    """The function then runs in a process without isolation, and the audit says so."""
    monkeypatch.setattr("agentfsm.sandbox.sandboxed_call.find_isolation", no_sandbox)
    monkeypatch.setenv("OPENAI_API_KEY", "hush")
    trusting = tool(sandbox=Sandbox(allow_unsandboxed=True))(sandbox_functions.add)
    (added,), audit = await results_of([trusting], call("add", a=1, b=2))
    assert (added.content, added.sandbox, audit[0].sandbox) == ("3", "unsandboxed", "unsandboxed")


async def test_root_writes_as_another_user(level):
    """Where the agent is root, a folder of root's is closed to the function, and the error says for whom to open it."""
    if os.geteuid():
        pytest.skip("this is not root")
    with outside() as (place, *_):
        (place / "write").chmod(0o755)
        sandbox = Sandbox(write=[place / "write"])
        ended = await sandbox.run(sandbox_functions.write_note, (str(place / "write"),), {})
        assert "the function is user 65534" in ended.error
        (place / "write").chmod(0o777)
        assert (await sandbox.run(sandbox_functions.write_note, (str(place / "write"),), {})).value == 6


async def test_a_path_that_is_not_there(level, tmp_path):
    """A path of the sandbox has to exist when the function is called."""
    ended = await Sandbox(read=[tmp_path / "missing"]).run(sandbox_functions.add, (1, 2), {})
    assert ended.end is SandboxEnd.NOT_STARTED
    assert "missing of the sandbox does not exist" in ended.error


def define_inside():
    def inside(a: int) -> int:
        return a

    return inside


async def coroutine(a: int) -> int:
    return a


def with_context(ctx: RunContext[None], a: int) -> int:
    return a


def with_date(day: dt.date) -> str:
    return str(day)


def with_numbers_as_keys(names: list[dict[int, str]]) -> int:
    return len(names)


def shadowed(a: int) -> int:
    return a


hidden, shadowed = shadowed, None


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (define_inside(), "cannot load .define_inside.<locals>.inside"),
        (coroutine, "is async"),
        (with_context, "takes the RunContext"),
        (with_date, "the parameter day of with_date has the type datetime.date"),
        (with_numbers_as_keys, r"the parameter names of with_numbers_as_keys has the type list\[dict\[int, str\]\]"),
        (hidden, "the name is another object there"),
    ],
)
def test_functions_that_cannot_run_in_a_sandbox(function, words):
    """They are refused when the tool is made, with the reason."""
    with pytest.raises(MisuseError, match=words):
        tool(name="it", sandbox=Sandbox())(function)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"seconds": 0}, "finite number of seconds above 0"),
        ({"memory_mb": 8}, "give 64 or more"),
        ({"processes": 0}, "whole number, 1 or more"),
        ({"read": "/srv"}, "sequences of paths"),
        ({"read": ["/"]}, "cannot show /"),
        ({"read": ["/proc/1"]}, "cannot show /proc/1"),
        ({"write": ["/srv"], "read": ["/srv/a"]}, "may replace it"),
        ({"hosts": "example.org"}, "sequence of hosts"),
        ({"hosts": ["https://example.org"]}, "is not a host"),
        ({"env": {"A": 1}}, "mapping of names to strings"),
    ],
)
def test_rights_that_make_no_sense(options, words):
    """They are refused, with what to give."""
    with pytest.raises(MisuseError, match=words):
        Sandbox(**options)


@pytest.mark.parametrize("name", ["A=B", "", "A\0"])
def test_names_that_no_environment_has(name):
    """They are refused when the sandbox is made, and not by each call."""
    with pytest.raises(MisuseError, match="without '=' in a name and null characters"):
        Sandbox(env={name: "x"})
    with pytest.raises(MisuseError, match="null characters"):
        Sandbox(env={"A": "x\0"})


@pytest.mark.parametrize("target", ["/", "/proc", "/sys/kernel", "/dev"])
@pytest.mark.parametrize("right", ["read", "write"])
def test_no_link_and_no_way_up_leads_to_all_files(tmp_path, monkeypatch, right, target):
    """What a sandbox cannot show it does not show under another name: relative, with `..`, or by a link."""
    (tmp_path / "link").symlink_to(target)
    monkeypatch.chdir(tmp_path)
    up = "/".join([".."] * len(tmp_path.parts))
    for path in ("link", tmp_path / "link", f"{up}{target}", f"{tmp_path}/{up}{target}"):
        with pytest.raises(MisuseError, match="which holds more than files"):
            Sandbox(**{right: [path]})


def test_a_folder_that_may_be_written_is_not_read_under_another_name(tmp_path):
    """The function could replace what is read there."""
    (tmp_path / "out" / "in").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "out")
    for outer, inner in (("out", "link/in"), ("link", "out/in"), ("out", "other/../out/in")):
        with pytest.raises(MisuseError, match="may replace it"):
            Sandbox(write=[tmp_path / outer], read=[tmp_path / inner])
    assert len(Sandbox(read=[tmp_path, tmp_path / "out"], write=[tmp_path / "out"]).read) == 2


def test_other_mistakes():
    """A sandbox is an instance, an external tool has none, and unknown fields are named."""
    with pytest.raises(MisuseError, match=r"a sandbox, as Sandbox\(\)"):
        tool(sandbox=True)(sandbox_functions.add)
    with pytest.raises(MisuseError, match="leave out sandbox="):
        tool(sandbox=Sandbox(), external=True)(sandbox_functions.add)
    with pytest.raises(TypeError, match="did you mean 'seconds'"):
        Sandbox(timeout=3)


async def test_calls_at_once_have_sandboxes_of_their_own(level):
    """Each gets its own result, and one that fails does not touch the others."""
    ends = {}

    async def run(number):
        function, args = (sandbox_functions.leave_by_exit, ()) if number == 1 else (sandbox_functions.add, (number, 0))
        ends[number] = await Sandbox().run(function, args, {})

    async with anyio.create_task_group() as tasks:
        for number in range(3):
            tasks.start_soon(run, number)
    assert [(ends[number].end, ends[number].value) for number in range(3)] == [
        (SandboxEnd.DONE, 0), (SandboxEnd.LOST, None), (SandboxEnd.DONE, 2),
    ]  # fmt: skip


async def test_a_model_runs_python(level):
    """The tool returns what the code printed, the value of its last line, and the error with its line."""
    run_python = build_python_tool()
    (done, failed, ended), _ = await results_of(
        [run_python],
        call("run_python", code="import math\nprint('hi')\nmath.factorial(20)"),
        call("run_python", code="def f():\n    return 1 / 0\nf()"),
        call("run_python", code="import subprocess\nsubprocess.run(['id'])"),
    )
    assert done.content == '{"printed":"hi\\n","result":"2432902008176640000","error":null}'
    assert "ZeroDivisionError: division by zero\\nline 3, in <module>\\nline 2, in f" in failed.content
    assert "PermissionError" in ended.content
    assert (run_python.read_only, run_python.labels) == (True, ())
    assert "30 s; 256 MB" in run_python.description


def test_python_with_more_rights(tmp_path):
    """A tool whose code may write or connect is not read-only, and its labels say what it may do."""
    assert not build_python_tool(Sandbox(write=[tmp_path])).read_only
    connected = build_python_tool(Sandbox(hosts=["example.org"]), reads_private=True)
    assert connected.labels == ("untrusted", "private", "sends_out")
    assert not connected.read_only
