"""What a tool asks in the middle of its call: shown and answered on the command line, and at a terminal."""

import pytest

from tests.support.command_line import printed


def test_a_question_is_shown_with_all_that_it_takes_to_answer(here):
    """Its message, the fields of the answer, and the commands that give it."""
    run_id = here.run("app:desk", code=3)
    (asked,) = [line for line in here.err.splitlines() if "t1.0: " in line]
    fields = "[name (string, required), bags (integer), meals (boolean)]"
    assert asked.startswith(f"  t1.0: Who travels? {fields} (no answer until ")
    assert asked.endswith(" means that the call continues without one)")
    assert printed(here)[:2] == [f"agentfsm answer {run_id} t1.0 JSON", f"agentfsm answer {run_id} t1.0 --decline"]
    shown = here("show", run_id)
    assert "state    ACT, waits for an answer to t1.0, version " in shown
    assert f"waits    t1.0: Who travels? {fields}" in shown


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (['{"name": "Ann", "bags": 2}'], "{'name': 'Ann', 'bags': 2}"),
        (
            ["--field", "name=Ann", "--field", "bags=2", "--field", "meals=True"],
            "{'name': 'Ann', 'bags': 2, 'meals': True}",
        ),
        (["--field", "name=Ann", "--field", "meals=no"], "{'name': 'Ann', 'meals': False}"),
        (["--decline"], "None"),
    ],
)
def test_an_answer_is_a_json_object_or_fields(here, words, told):
    """Each field is read as its kind has it; the tool gets it, and who gave it is shown."""
    run_id = here.run("app:desk", code=3)
    said = here.json("answer", run_id, "t1.0", *words, "--by", "ann")
    assert (said["decision"], said["call_id"]) == ("answer", "t1.0")
    assert here("resume", run_id) == f"booked for {{'who': {told}}}\n"
    assert "       questions of the tool answered by ann\n" in here("show", run_id)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["Ann"], "must be an object with the properties"),
        (["--field", "bags=two", "--field", "name=Ann"], "bags: should be an integer"),
        (["--field", "bags=2"], "name: required, but missing"),
        (["--field", "name=Ann", "--decline"], "expected either an answer or --decline, not both"),
        (['{"name": Ann}'], "the answer is not valid JSON (Expecting value: line 1 column 10 (char 9))"),
        (["{}", "--field", "name=Ann"], ", not both"),
        (["no idea", "--failed"], "use --decline instead of --failed"),
        (["--field", "name"], "is not of the form NAME=VALUE"),
    ],
)
def test_an_answer_that_does_not_fit_is_refused(here, words, why):
    """It says what is wrong, and the run waits as before."""
    run_id = here.run("app:desk", code=3)
    here("answer", run_id, "t1.0", *words, code=2)
    assert why in here.err
    here("answer", run_id, "t1.0", "--field", "name=Ann")
    here("resume", run_id)


def test_several_questions_are_answered_at_once(here):
    """Fields are named with the key of their question; what has nothing to fill in is agreed to."""
    run_id = here.run("app:counter", code=3)
    assert "who: Who travels?" in here.err
    assert "pay: Pay there. (open https://pay.example.com/17)" in here.err
    here("answer", run_id, "t1.0", "--field", "name=Ann", code=2)
    assert "write KEY.NAME=VALUE" in here.err
    here("answer", run_id, "t1.0", "--field", "who.name=Ann")
    assert here("resume", run_id) == "booked for {'who': {'name': 'Ann'}, 'pay': {}}\n"


def test_the_result_of_a_call_takes_no_fields(here):
    """Nor can it be declined: it is text, or why there is none."""
    run_id = here.run("app:asker", code=3)
    for words in (["--decline"], ["--field", "a=b"], []):
        here("answer", run_id, "t1.0", *words, code=2)
        assert "a text, with --failed" in here.err


def test_a_question_is_answered_at_the_terminal(terminal):
    """Field by field, until it fits; hidden characters are spelt out, and an address is shown whole."""
    screen = terminal("run", "app:counter", "Book.")
    screen.wait_for("Will you answer? [y/n]")
    assert "book (t1.0) asks:" in screen.text
    assert "Who travels?\\u202e" in screen.text
    screen.type("y\n")
    for field, text in (("name (string, required):", ""), ("bags (integer):", "two"), ("meals (boolean):", "")):
        screen.wait_for(field)
        screen.type(f"{text}\n")
    screen.wait_for("Will you answer? [y/n]", times=2)
    assert "name: required, but missing" in screen.text
    screen.type("y\n")
    for field, text in (("name (string, required):", "Ann"), ("bags (integer):", "2"), ("meals (boolean):", "")):
        screen.wait_for(field, times=2)
        screen.type(f"{text}\n")
    screen.wait_for("Do you agree? [y/n]")
    assert "Open this page: https://pay.example.com/17" in screen.text
    screen.type("n\n")
    assert screen.end() == 0
    assert "booked for {'who': {'name': 'Ann', 'bags': 2}, 'pay': None}" in screen.text


def test_a_question_is_declined_or_left_at_the_terminal(terminal):
    """A no is an answer; the end of input leaves it for later."""
    screen = terminal("run", "app:desk", "Book.")
    screen.wait_for("Will you answer? [y/n]")
    screen.type("n\n")
    assert screen.end() == 0
    assert "booked for {'who': None}" in screen.text
    screen = terminal("run", "app:desk", "Book.")
    screen.wait_for("Will you answer? [y/n]")
    screen.type("\x04")
    assert screen.end() == 3
