"""The protocol's own reference servers, driven by our agents over stdio and HTTP."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest
from anyio import run_process, to_thread

from agentfsm import Agent, Answer, ErrorType, ImagePart, ToolEvent, ToolEventType, ToolResult
from agentfsm.cli.demo import demo_agent
from agentfsm.mcp import MCPServer
from agentfsm.testing import LocalServer, ScriptedModel, call, say
from tests.support import server_reaper
from tests.support.node_packages import program
from tests.support.port_servers import free_port, listening

EVERYTHING = "@modelcontextprotocol/server-everything"
FILESYSTEM = "@modelcontextprotocol/server-filesystem"
MEMORY = "@modelcontextprotocol/server-memory"
CITY = "New York"


def by_stdio(package, *args, **options):
    command, *rest = program(package, *args)
    return MCPServer.stdio(command, rest, confirm=False, **options)


def python(module, *args):
    """Return a function of a folder, to how a server is started that is a module of Python."""
    return lambda _folder: [sys.executable, "-m", module, *args]


def by_http(url):
    return MCPServer.http(f"{url}/mcp", name="all", confirm=False)


async def results_of(server, *calls):
    """Let an agent make these calls, one in each turn; the results, once the run has ended well."""
    script = (say("", call(f"{server.name}__{name}", **arguments)) for name, arguments in calls)
    async with Agent(ScriptedModel(*script, "done"), tools=[server]) as agent:
        run = await agent.run("go on")
    assert run.output == "done"
    return results(run)


def results(run):
    return [message for message in run.messages if isinstance(message, ToolResult)]


EVERYTHING_CALLS = (
    ("echo", {"message": "Grüße, 世界"}),
    ("get-sum", {"a": 2.5, "b": -4}),
    ("get-structured-content", {"location": CITY}),
    ("get-tiny-image", {}),
    ("get-annotated-message", {"messageType": "error"}),
    ("get-resource-links", {"count": 2}),
    ("get-resource-reference", {"resourceType": "Text", "resourceId": 7}),
    ("trigger-long-running-operation", {"duration": 0.2, "steps": 2}),
    ("get-sum", {"a": "two", "b": 1}),
)


def check_everything(calls):
    """Check what the calls of `EVERYTHING_CALLS` have brought."""
    texts = [each.content for each in calls]
    assert [each.outcome for each in calls] == ["done"] * 8 + ["failed"]
    assert texts[0] == "Echo: Grüße, 世界"
    assert "-1.5" in texts[1]
    assert json.loads(texts[2]).keys() == {"temperature", "conditions", "humidity"}
    assert [type(part) for part in calls[3].parts] == [ImagePart]
    assert "Operation failed" in texts[4]
    assert "2 resource links" in texts[5]
    assert "Resource 7" in texts[6]
    assert "Steps: 2" in texts[7]
    assert calls[8].error_type is ErrorType.ARGUMENTS


async def test_everything_over_stdio():
    """Every kind of content, and a call that its own schema refuses."""
    calls = await results_of(by_stdio(EVERYTHING, "stdio", name="all"), *EVERYTHING_CALLS)
    check_everything(calls)


@pytest.fixture(scope="module")
def everything():
    """The URL of the same server, listening."""
    with listening(program(EVERYTHING, "streamableHttp"), os.environ) as url:
        yield url


async def test_everything_over_http(everything):
    """The same over streamable HTTP."""
    calls = await results_of(by_http(everything), *EVERYTHING_CALLS)
    check_everything(calls)


async def test_everything_over_the_older_transport():
    """The same over HTTP+SSE, which servers from before 2025-03-26 speak."""
    with listening(program(EVERYTHING, "sse"), os.environ) as url:
        calls = await results_of(MCPServer.sse(f"{url}/sse", name="all", confirm=False), *EVERYTHING_CALLS)
    check_everything(calls)


async def test_resources_and_prompts(everything):
    """What the application reads, and what a user picks: listed, looked up, filled in, completed."""
    server = by_http(everything)
    try:
        resources = {each.uri for each in await server.resources()}
        assert "demo://resource/static/document/features.md" in resources
        templates = {each.uri_template for each in await server.resource_templates()}
        assert "demo://resource/dynamic/text/{resourceId}" in templates
        (part,) = await server.read("demo://resource/dynamic/text/3")
        assert "Resource 3" in part.text
        prompts = {prompt.name: prompt for prompt in await server.prompts()}
        assert [each.name for each in prompts["args-prompt"].arguments] == ["city", "state"]
        (message,) = await server.prompt("args-prompt", city="Bern")
        assert "Bern" in message.text
    finally:
        await server.aclose()


@pytest.mark.parametrize("attended", [True, False], ids=["attended", "unattended"])
async def test_a_person_is_asked(everything, attended):
    """A server that asks in mid-call: a person who is there answers in the call, otherwise the question is refused."""
    asked = []

    def elicit(item):
        asked.extend(item.questions)
        return Answer(content={"name": "Ada", "check": True})

    model = ScriptedModel(say("", call("all__trigger-elicitation-request")), "done")
    async with Agent(model, tools=[by_http(everything)]) as agent:
        run = await agent.run("go on", elicit=elicit if attended else None)
    (result,) = results(run)
    assert (run.output, result.attempts) == ("done", 1)
    assert ["name" in question.schema["properties"] for question in asked] == [True] * attended
    assert ("Ada" if attended else "no person attends this run") in result.content


async def test_a_long_call_tells_how_far_it_is(everything):
    """The server's notes of progress are events of the run."""
    server = by_http(everything)
    long_call = call("all__trigger-long-running-operation", duration=0.3, steps=3)
    async with (
        Agent(ScriptedModel(say("", long_call), "done"), tools=[server]) as agent,
        agent.stream("go on") as stream,
    ):
        events = [event async for event in stream]
    told = [each for each in events if isinstance(each, ToolEvent) and each.type is ToolEventType.PROGRESS]
    assert [each.message for each in told] == ["1 of 3", "2 of 3", "3 of 3"]


async def test_a_server_that_is_restarted_between_two_calls():
    """It answers the old session with 400: it is handshaken anew, and the model is told nothing of effects."""
    command, port = program(EVERYTHING, "streamableHttp"), free_port()
    calls = [say("", call("all__echo", message=word)) for word in ("one", "two")]
    url = f"http://127.0.0.1:{port}"
    async with Agent(ScriptedModel(*calls, "done"), tools=[by_http(url)]) as agent:
        run = agent.start("go on")
        with listening(command, os.environ, port=port):
            while not results(run):
                run = await agent.step(run)
        with listening(command, os.environ, port=port):
            run = await agent.finish(run)
    first, second = results(run)
    assert (first.content, second.content) == ("Echo: one", "Echo: two")
    assert (second.outcome, second.attempts) == ("done", 2)


async def test_the_environment_is_not_ours(monkeypatch):
    """A server that is asked for its environment does not have what we know."""
    monkeypatch.setenv("AGENTFSM_SECRET", "sesame")
    (told,) = await results_of(by_stdio(EVERYTHING, "stdio", env={"GIVEN": "x"}, name="all"), ("get-env", {}))
    assert json.loads(told.content).keys() <= {"GIVEN", "HOME", "LOGNAME", "PATH", "SHELL", "TERM", "USER"}
    assert "sesame" not in told.content


async def test_files_are_really_written(tmp_path):
    """What an agent writes by the filesystem server is on the disk; what is out of bounds is refused, and told."""
    inside, outside = tmp_path / "in", tmp_path / "out.txt"
    inside.mkdir()
    path = str(inside / "note.md")
    calls = await results_of(
        by_stdio(FILESYSTEM, str(inside), name="files"),
        ("create_directory", {"path": str(inside / "deep" / "er")}),
        ("write_file", {"path": path, "content": "# Note\n"}),
        ("edit_file", {"path": path, "edits": [{"oldText": "Note", "newText": "Nota"}]}),
        ("read_text_file", {"path": path}),
        ("move_file", {"source": path, "destination": str(inside / "deep" / "nota.md")}),
        ("write_file", {"path": str(outside), "content": "x"}),
    )
    assert [each.outcome for each in calls] == ["done"] * 5 + ["failed"]
    assert calls[3].content == "# Nota\n"
    assert "Access denied" in calls[5].content
    assert (inside / "deep" / "nota.md").read_text() == "# Nota\n"
    assert (inside / "deep" / "er").is_dir()
    assert not outside.exists()


async def test_the_graph_is_really_stored(tmp_path):
    """What an agent tells the memory server outlives it: the next one knows it."""
    file = tmp_path / "memory.jsonl"
    ada = {"name": "Ada", "entityType": "person", "observations": ["wrote the first program"]}
    engine = {"name": "Engine", "entityType": "machine", "observations": []}
    knows = {"from": "Ada", "to": "Engine", "relationType": "knows"}

    def memory():
        return by_stdio(MEMORY, env={"MEMORY_FILE_PATH": str(file)}, name="memory")

    await results_of(
        memory(), ("create_entities", {"entities": [ada, engine]}), ("create_relations", {"relations": [knows]})
    )
    (found,) = await results_of(memory(), ("search_nodes", {"query": "first program"}))
    assert [each["name"] for each in json.loads(found.content)["entities"]] == ["Ada"]
    assert {json.loads(line)["type"] for line in file.read_text().splitlines()} == {"entity", "relation"}


async def test_several_servers_at_once(tmp_path):
    """One agent with three of them: each call goes to its own, those of one reply side by side."""
    servers = [
        by_stdio(EVERYTHING, "stdio", name="all"),
        by_stdio(FILESYSTEM, str(tmp_path), name="files"),
        by_stdio(MEMORY, env={"MEMORY_FILE_PATH": str(tmp_path / "memory.jsonl")}, name="memory"),
    ]
    together = (call("all__echo", message="x"), call("files__list_allowed_directories"), call("memory__read_graph"))
    async with Agent(ScriptedModel(say("", *together), "done"), tools=servers) as agent:
        run = await agent.run("go on")
    calls = results(run)
    assert [each.outcome for each in calls] == ["done"] * 3
    assert str(tmp_path) in calls[1].content


# Killed in the middle of a run.

# By server: how it is started, and a call whose second result is like its first.
KILLED = {
    "everything": (lambda _folder: program(EVERYTHING, "stdio"), "echo", {"message": "x"}, "Echo: x"),
    "filesystem": (lambda folder: program(FILESYSTEM, folder), "list_allowed_directories", {}, "{folder}"),
    "memory": (lambda _folder: program(MEMORY), "read_graph", {}, "entities"),
    "git": (python("mcp_server_git"), "git_status", {"repo_path": "{folder}"}, "No commits yet"),
    "time": (python("mcp_server_time"), "get_current_time", {"timezone": "Europe/Rome"}, "Europe/Rome"),
    "fetch": (
        python("mcp_server_fetch", "--ignore-robots-txt", "--allow-private-ips"),
        "fetch",
        {"url": "{url}"},
        "hello from here",
    ),
}


@pytest.mark.soak
@pytest.mark.parametrize("name", KILLED)
async def test_a_server_that_is_killed_between_two_turns(name, tmp_path):
    """The next call starts it anew, each of them, and the run ends as if nothing had been."""
    start, tool, arguments, text = KILLED[name]
    folder, note = tmp_path / "in", tmp_path / "pid"
    await run_process(["git", "init", "-q", str(folder)])
    noting = ["-c", 'echo $$ > "$0"; exec "$@"', str(note), *start(str(folder))]
    (folder / "page.txt").write_text("hello from here")
    with listening([sys.executable, "-m", "http.server", "-d", str(folder), "{port}"], os.environ) as url:
        places = {"folder": folder, "url": f"{url}/page.txt"}
        given = {key: value.format_map(places) for key, value in arguments.items()}
        server = MCPServer.stdio("sh", noting, name="s", confirm=False, env={"NO_PROXY": "127.0.0.1"})
        calls = [say("", call(f"s__{tool}", **given)) for _ in range(2)]
        async with Agent(ScriptedModel(*calls, "done"), tools=[server]) as agent:
            run = agent.start("go on")
            while not results(run):
                run = await agent.step(run)
            first = int(note.read_text())
            os.kill(first, signal.SIGKILL)
            process = Path(f"/proc/{first}")
            await to_thread.run_sync(server_reaper.await_that, lambda: not process.exists(), "it is gone")
            run = await agent.finish(run)
    assert [each.outcome for each in results(run)] == ["done"] * 2
    assert all(text.format_map(places) in each.content for each in results(run))
    assert int(note.read_text()) != first
    assert run.output == "done"


# The demo agent.


async def test_the_demo_agent_reads_by_the_filesystem_server(tmp_path, monkeypatch):
    """The package's demo agent, its model behind a socket, with the server's tools among its own."""
    for name in ("a.py", "b.md"):
        (tmp_path / name).write_text(f"This is {name}.\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    start = demo_agent.prepare_survey(str(tmp_path))
    model = demo_agent.LocalChat(LocalServer(lambda body: surveyor_says(body["messages"], tmp_path)))
    surveyor = demo_agent.agent()
    await surveyor.model.aclose()
    tools = [*surveyor.tools, by_stdio(FILESYSTEM, str(tmp_path), name="files")]
    async with surveyor.with_(model=model, tools=tools) as agent:
        run = await agent.run(start.prompt, metadata=start.metadata)
        (asked,) = run.pending
        await agent.approve(run.id, asked.call_id, digest=asked.digest)
        run = await agent.resume(run.id)
    assert run.output == "The report is written."
    assert [each.name for each in run.calls] == [
        "list_folder",
        "files__directory_tree",
        "files__read_multiple_files",
        "write_report",
    ]
    (report,) = (tmp_path / ".agentfsm" / "reports").iterdir()
    assert "This is a.py." in report.read_text()


def surveyor_says(messages, folder):
    """Look around by a tool of the demo and one of the server, read by the server, write, tell."""
    results = [message["content"] for message in messages if message["role"] == "tool"]
    if not results:
        look = (call("list_folder", path="."), call("files__directory_tree", path=str(folder)))
        return say("I will look at what is there.", *look)
    if len(results) == 2:
        paths = [str(folder / name) for name in ("a.py", "b.md")]
        return say("Now the files.", call("files__read_multiple_files", paths=paths))
    if len(results) == 3:
        return say("I know enough.", call("write_report", title="A survey", markdown=results[2]))
    return say("The report is written.")
