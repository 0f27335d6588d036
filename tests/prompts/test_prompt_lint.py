"""The linter of prompts: one finding for each fault of document F, 8, and none for a sound prompt."""

import pytest

from agentfsm import tool
from agentfsm.prompts import PromptReport, Prompts, PromptTemplate, PromptTestResult, lint_prompt, lint_prompts

EXIT = "If information is missing, ask for it."


def prompt(text, variables=None, **more):
    return PromptTemplate(name="p", version="1.0", text=text, variables=variables or {}, **more)


def messages(made, **more):
    return [finding.message for finding in lint_prompt(made, **more)]


def rules(number, heading="## Rules"):
    return f"{EXIT}\n{heading}\n" + "\n".join(f"{n}. Always do thing {n}." for n in range(1, number + 1))


def test_a_sound_prompt():
    """Seven rules, and a list that has nothing to do with rules."""
    made = prompt(rules(7) + "\n## Output format\n- one\n- two\n" + '{"tool_name": "x", "input": {"a": 1}}')
    assert messages(made) == []


@pytest.mark.parametrize("heading", ["## Rules", "# Critical Constraints", "Rules:", "## 规则", "行为约束："])  # noqa: RUF001
def test_too_many_rules(heading):
    """More than seven."""
    assert messages(prompt(rules(7, heading))) == []
    [message] = messages(prompt(rules(8, heading)))
    assert message.startswith("8 rules, more than 7")


def test_rules_without_a_heading():
    """A list whose items say what is to be done is one of rules, also if nothing stands above it."""
    items = ["Always greet.", "You must be brief.", "Do not lie.", "Never guess.", "Name a source."] * 2
    [message] = messages(prompt(f"{EXIT}\n\n" + "\n".join(f"- {each}" for each in items)))
    assert message.startswith("10 rules, more than 7")
    [message] = messages(prompt(f"{EXIT}\n" + "\n".join(f"{n}. 必须做第 {n} 件事" for n in range(1, 9))))
    assert message.startswith("8 rules")
    plain = ["Answer in English.", "Be brief.", "Use the tools.", "Cite a source.", "Keep names.", "State the date."]
    items = "".join(f"- {each}\n" for each in [*plain, "Greet the customer.", "Ask for the order.", "Round prices."])
    [message] = messages(prompt(f"{EXIT}\n{items}"))
    assert message.startswith("9 rules, more than 7")
    assert messages(prompt(f"{EXIT}\nSteps:\n" + "".join(f"{n}. Check part {n}.\n" for n in range(1, 10)))) == []
    assert messages(prompt(f"{EXIT}\nCities:\n" + "\n".join(f"- City {n}" for n in range(20)))) == []


@tool
def remove_records(query: str) -> str:
    """Deletes records matching the query."""
    return query


@tool
def find_records(query: str) -> str:
    """Finds records matching the query."""
    return query


@pytest.mark.parametrize("ban", ["Never delete records.", "You must not remove any data.", "不要删除任何记录。"])
def test_a_ban_and_a_tool_that_does_it(ban):
    """The example of document F, 8.2; a tool that only reads is none."""
    made = prompt(f"{EXIT}\n{ban}")
    [message] = messages(made, tools=[remove_records, find_records])
    assert "the tool remove_records says that it does this" in message


def test_no_exit():
    """A prompt of the system has to allow a question or a refusal."""
    [message] = messages(prompt("Answer in JSON."))
    assert message.startswith("it offers no exit")
    assert messages(prompt("Answer in JSON.", layer="constraints")) == []


def test_variables():
    """Declared and not used; written with single braces; the user's words as text."""
    made = prompt("{{a}} {b} ${c}", {"a": "text", "unused": "text"}, layer="user")
    unused, other, plain = messages(made)
    assert unused.startswith("its text has no place for unused")
    assert other.startswith("${c}, {b} stays as it is written")
    assert plain.startswith("a, unused stands in the layer of the user as text")


def test_over_budget():
    """Of its own maximum, or of the usual share."""
    assert "more than max_tokens of 10" in messages(prompt(EXIT + " word" * 20, max_tokens=10))[0]
    assert "the usual share of instructions of 2,000" in messages(prompt(EXIT + " word" * 2_100))[0]


def report(made, passed):
    tests = (PromptTestResult(name="edge", runs=5, passed=passed, failures={}),)
    return PromptReport(name="p", version="1.0", digest=made.digest, model="m", at="now", tests=tests)


def test_results():
    """None, or the newest below the rate; and too few tests."""
    made = prompt(EXIT)
    few = "0 tests; write 10 or more: usual requests, edge cases, and attacks"
    assert messages(made, results=()) == [
        "there are no test results for this version: run `agentfsm prompts test p@1.0`",
        few,
    ]
    assert messages(made, results=[report(made, 5), report(made, 4)]) == [
        "its newest results are below 90% in edge",
        few,
    ]
    assert messages(made, results=[report(made, 4), report(made, 5)]) == [few]


def test_a_folder(tmp_path):
    """The version in use of each prompt, and whether one was activated."""
    (tmp_path / "p").mkdir()
    for version in ("1.0", "2.0"):
        (tmp_path / "p" / f"{version}.md").write_text(f"+++\n+++\n{EXIT}\n")
    prompts = Prompts(tmp_path)
    found = lint_prompts(prompts)
    assert {each.prompt for each in found} == {"p 2.0"}
    assert found[-1].message.startswith("no version was activated")
    prompts.activate("p", "1.0", by="ann", why="test")
    assert {each.prompt for each in lint_prompts(prompts)} == {"p 1.0"}
    assert not any("activated" in each.message for each in lint_prompts(prompts))
