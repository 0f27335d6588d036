"""`agentfsm demo`: the main job, on folders as users have them."""

import http.server
import os
import threading
from pathlib import Path

import pytest

from agentfsm.cli.demo import scripted_model
from agentfsm.testing.fake_llm.openai_chat import find_history_error

ROOT = Path(__file__).parents[2]


@pytest.fixture
def demo(shell):
    """The shell, with a demo that does not wait for human eyes."""
    shell.env["AGENTFSM_DEMO_DELAY_S"] = "0"
    return shell


def the_report(shell):
    (report,) = shell.reports()
    return report.read_text(encoding="utf-8")


def test_an_empty_folder(demo):
    """Nothing to read: the report says so, in three turns."""
    (demo.folder / "empty").mkdir()
    done = demo("demo", "empty")
    assert "0 files" in the_report(demo)
    assert "The report is in .agentfsm/reports/" in done.out
    assert len(demo.load(done.run_id).calls) == 4


def test_this_repository(demo):
    """Every part of it: batches in parallel, the approval, the report, the tree."""
    done = demo("demo", str(ROOT))
    assert done.lines[0] == f"run {done.run_id}"
    assert "a local server simulates the model" in done.lines[1]
    assert "There is no terminal to ask at, so the demo approves write_report (t3.0) itself." in done.lines
    run = demo.load(done.run_id)
    assert [call.name for call in run.calls[:3]] == ["list_folder", "search_text", "search_text"]
    assert {call.name for call in run.calls[3:-1]} == {"read_file"}
    assert 3 <= len(run.calls[3:-1]) <= 5
    assert run.calls[-1].name == "write_report"
    assert {call.outcome for call in run.calls} == {"done"}
    report = the_report(demo)
    assert "| `.py` |" in report
    assert "`agentfsm/" in report
    for command in (f"show {run.id}", f"replay {run.id}", "studio", "init my-agent"):
        assert f"\n  agentfsm {command}\n" in done.out
    assert run.output in done.out
    assert (demo.folder / ".agentfsm" / ".gitignore").read_text(encoding="ascii") == "*\n"
    assert {path.name for path in demo.folder.iterdir()} == {"app.py", ".agentfsm"}


def test_a_folder_of_odd_files(demo):
    """Names that would break a line, a table or a path; binary, empty, huge and dangling ones."""
    folder = demo.folder / "odd [x] \u202e|`folder"
    folder.mkdir()
    (folder / "README\u202e.md").write_text("# hidden", encoding="utf-8")
    (folder / "a|b`c`.md").write_text("# title\n```\nTODO\n", encoding="utf-8")
    (folder / os.fsdecode(b"\xff.py")).write_text("def f(): ...", encoding="utf-8")
    (folder / "line\nbreak.py").write_text("def f(): ...", encoding="utf-8")
    (folder / "script.py").write_text("def f():\n    '''\x1b[31mred \u202e'''\n" * 1000, encoding="utf-8")
    (folder / "zeros.py").write_bytes(b"\0" * 100_000)
    (folder / "dangling.md").symlink_to("nowhere")
    (folder / "out").symlink_to("/etc")
    demo("demo", folder.name, code=2)
    folder = folder.rename(demo.folder / "odd [x] |`folder")
    done = demo("demo", folder.name)
    report = the_report(demo)
    assert "`a/b'c'.md`" in report
    assert "3 names contain characters that cannot be shown" in report
    assert not set(done.out + done.err) & set("\x1b\u202e")
    assert {call.outcome for call in demo.load(done.run_id).calls} == {"done"}


def test_as_json_in_a_store_elsewhere(demo):
    """One document, the final run; reports stay under `.agentfsm/` of the folder that the command was typed in."""
    found = demo.json("demo", ".", "--store", "elsewhere/runs.db")
    assert found["state"] == "done"
    assert found["resume"] is None
    assert [call["name"] for call in found["calls"]][-1] == "write_report"
    assert len(demo.reports()) == 1
    assert not (demo.folder / ".agentfsm" / "runs.db").exists()


def test_no_such_folder(demo):
    """It is said, and nothing is left behind."""
    assert "'nothing' is not a folder" in demo("demo", "nothing", code=2).err
    assert not (demo.folder / ".agentfsm").exists()


def test_a_proxy_does_not_come_between(demo):
    """The server is in the process itself."""
    demo.env |= {"HTTP_PROXY": "http://127.0.0.1:9", "ALL_PROXY": "http://127.0.0.1:9", "NO_PROXY": "example.org"}
    demo("demo", ".")


def test_a_report_that_cannot_be_written(demo):
    """The tool fails, the model reads it, and the run still ends."""
    (demo.folder / ".agentfsm").mkdir()
    (demo.folder / ".agentfsm" / "reports").write_text("in the way", encoding="ascii")
    done = demo("demo", ".")
    assert "The report could not be written" in done.out
    assert demo.load(done.run_id).calls[-1].outcome == "failed"


def test_an_empty_approval_by_another_run_is_not_given(demo):
    """Only the demo's own report is approved unasked: metadata that says so makes no demo of another run."""
    done = demo("run", "app:payer", "Pay.", "--metadata", "demo=true", code=3)
    demo("resume", done.run_id, code=3)
    assert not (demo.folder / "paid.txt").exists()


class Recorder(http.server.BaseHTTPRequestHandler):
    """Stands for another server that a key opens."""

    def do_POST(self):
        self.server.seen.append((self.path, self.headers["authorization"], self._body()))
        self.send_response(401)
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.wfile.write(b'{"error": {"message": "no", "type": "x"}}')

    def _body(self):
        return self.rfile.read(int(self.headers["content-length"]))

    def log_message(self, *args):
        pass


def test_a_key_opens_the_real_model(demo):
    """The same command asks the model that the environment names, at the address that it names, and says so."""
    with http.server.HTTPServer(("127.0.0.1", 0), Recorder) as server:
        server.seen = []
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        demo.env |= {
            "OPENAI_API_KEY": "sk-of-the-test",
            "OPENAI_BASE_URL": f"http://127.0.0.1:{server.server_address[1]}/v1",
            "AGENTFSM_MODEL": "some-model",
            "no_proxy": "127.0.0.1",
        }
        done = demo("demo", ".", code=1)
        server.shutdown()
        thread.join()
    ((path, authorization, body),) = server.seen
    assert path == "/v1/chat/completions"
    assert authorization == "Bearer sk-of-the-test"
    assert b'"model":"some-model"' in body
    assert "OPENAI_API_KEY is set: the model is some-model" in done.lines[1]
    assert "sk-of-the-test" not in done.err + done.out


# The mind, by itself.


def history(*turns):
    """Return the messages after these turns of (name, arguments, outcome, content)."""
    messages = [{"role": "user", "content": "Survey."}]
    for turn, calls in enumerate(turns, 1):
        asked = [
            {"id": f"t{turn}.{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for i, (name, arguments, _, _) in enumerate(calls)
        ]
        messages.append({"role": "assistant", "content": None, "tool_calls": asked})
        messages += [
            {"role": "tool", "tool_call_id": f"t{turn}.{i}", "content": f"[{name}: {outcome}]\n{content}"}
            for i, (name, _, outcome, content) in enumerate(calls)
        ]
    assert find_history_error(messages) is None
    return {"messages": messages}


@pytest.mark.parametrize("content", ["", "no json", "[]", "null", '{"files": 3}', "[[[["])
def test_results_that_say_nothing(content):
    """Whatever the tools answer, the mind goes on, and to an end."""
    looked = (("list_folder", "{}", "done", content), ("search_text", "{}", "failed", content))
    (call,) = scripted_model.answer_request(history(looked)).calls
    assert call.name == "write_report"
    written = (("write_report", "{}", "rejected", content),)
    answer = scripted_model.answer_request(history(looked, written))
    assert "it was not written" in answer.text
    assert not answer.calls


@pytest.mark.parametrize("value", ["x", "-1", "0.001", "1e9", "nan", ""])
def test_the_pace_is_bounded(monkeypatch, value):
    """A number that is none, or an odd one, does not stop the demo."""
    monkeypatch.setenv(scripted_model.DELAY_VARIABLE, value)
    say = scripted_model.answer_request(history())
    assert 0 <= say.chunk_delay_s <= 1
