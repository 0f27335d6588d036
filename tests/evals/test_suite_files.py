"""Suites in files: what is wrong in one is refused, with its place; and reports that other programs read."""

import json
import sys
from xml.etree.ElementTree import fromstring

import pytest

from agentfsm import MisuseError, ModelError
from agentfsm.evals import Case, RubricJudge, Suite, add_case, evaluate, load_suite
from agentfsm.evals.report_files import render_junit
from agentfsm.testing import ScriptedModel, fail

CASE = {"id": "a", "input": "Go."}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("s.csv", "id,input,expect,expect\nc,x,[],[]\n", "the key 'column expect' is there twice"),
        ("s.csv", "id,input,max_steps\na,b,1\nc,x,three\n", "line 3, column 'max_steps', 'three'"),
        ("s.yaml", "cases:\n- id: a\n  expect: [b]\n  expect: []\n", "the key 'expect' is there twice"),
        ("s.json", '{"cases": [{"input": "a", "expect": ["b"], "expect": []}]}', "the key 'expect' is there twice"),
        ("s.yaml", "cases:\n- input: a\n  expect:\n", "case 1: the field 'expect' is empty"),
        ("s.yaml", "cases:\n- input: a\n  tags: 7\n", "case 1: "),
        ("s.jsonl", f"{json.dumps(CASE)}\nrubbish\n", "line 2: Expecting value"),
        ("s.yaml", "cases:\n- input: a\n  turns: [{goal: x}]\n", "a simulated user needs a model"),
        ("s.yaml", "cases:\n- input: a\n- input: a\n", "begin with 'a' and say the same: give each an id"),
        (
            "s.yaml",
            "cases:\n- input: a\n  expect: [{has: b}]\n",
            "not_called, 'no_question', for example {'has_field'",
        ),
        ("s.json", json.dumps([{**CASE, "files": ["../secret.txt"]}]), "is not in the folder of the suite"),
        ("s.json", json.dumps([{**CASE, "files": ["link.txt"]}]), "is not in the folder of the suite"),
        ("s.csv", "id,input,files\na,b,/etc/hostname\n", "is not in the folder of the suite"),
    ],
)
def test_a_suite_that_is_wrong(tmp_path, name, text, message):
    """No check is lost, no file of another place is read, and the error says where the fault is."""
    (tmp_path / "secret.txt").write_text("secret", encoding="utf-8")
    folder = tmp_path / "suite"
    folder.mkdir()
    if sys.platform != "win32":
        (folder / "link.txt").symlink_to(tmp_path / "secret.txt")
    elif "link.txt" in text:
        pytest.skip("links need a right on Windows")
    (folder / name).write_text(text, encoding="utf-8")
    with pytest.raises(MisuseError) as raised:
        load_suite(folder / name)
    assert message in str(raised.value)


def test_a_case_is_appended_to_files_that_can_take_it(tmp_path):
    """A line separator in a text does not end a line of JSON Lines; a table is refused."""
    for name in ("s.jsonl", "s.yaml"):
        assert add_case(tmp_path / name, {**CASE, "input": "one\u2028two"}).cases[0].input == "one\u2028two"
    with pytest.raises(MisuseError, match=r"appended to a file \.yaml or \.jsonl"):
        add_case(tmp_path / "s.csv", CASE)
    assert [*tmp_path.glob("s.csv*")] == []


async def test_a_report_of_control_characters():
    """JUnit's XML can be read whatever a case is called or answers."""
    found = await evaluate(lambda _text: "\x02", Suite([Case(id="a\x01b", input="a", expect=[str.isalpha])]), runs=1)
    report = fromstring(render_junit(found))  # noqa: S314  written a line above
    assert report[0].get("classname") == "suite.a\N{REPLACEMENT CHARACTER}b"


async def test_a_judge_that_is_down():
    """Its grade says so, and not that its replies are wrong."""
    judge = RubricJudge(ScriptedModel(*[fail(ModelError("down"))] * 9), rubric="It is polite.", own_family=True)
    found = await evaluate(lambda _text: "Hi.", [Case(input="a")], runs=1, scorers=[judge])
    assert found.results[0].grades["judge"].reason.startswith("the judge did not reply, model_error: ")
