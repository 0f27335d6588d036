"""Templates: parsed once, strict, and values are never read as a template."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentfsm import MisuseError
from agentfsm.prompts import PromptTemplate, RenderedPrompt, Variable, VariableKind

# Document F, 6.1, as its author meant it: single braces are JSON.
ROUTER_1 = """You are a request router.
Available tools: {{tool_descriptions}}
Route the following request: {{user_input}}
Output JSON: {"tool_name": "...", "tool_input": {...}}"""
ROUTER_2 = """You are a request router. Your ONLY job is to route, not to answer.
Available tools: {{tool_descriptions}}
Route the following request: {{user_input}}
Output JSON: {"tool_name": "...", "tool_input": {...}, "confidence": <0.0-1.0>}"""
VARIABLES = {"tool_descriptions": "text", "user_input": "untrusted"}
TOOLS = "1. web_search: Search the web\n2. calculator: Do math"


def template(text, variables=None, **more):
    return PromptTemplate(name="t", version="1.0", text=text, variables=variables or {}, **more)


@pytest.mark.parametrize(("version", "text"), [("1.0", ROUTER_1), ("2.0", ROUTER_2)])
def test_the_router_of_the_document(version, text):
    """No brace is doubled, and the user's text is marked as data."""
    router = PromptTemplate(name="router", version=version, text=text, variables=VARIABLES)
    rendered = router.render(tool_descriptions=TOOLS, user_input="What is 42 * 17?")
    head, _, tail = text.partition("{{user_input}}")
    assert rendered.startswith(head.replace("{{tool_descriptions}}", TOOLS))
    assert rendered.endswith(tail)
    assert "What is 42 * 17?\n</data-" in rendered
    assert "{{" not in rendered
    assert rendered.sources == (router.reference,)
    assert router.reference.startswith(f"router@{version}#")


def test_a_value_is_not_read_as_a_template():
    """Text that looks like a variable or an escape stays as it is."""
    made = template("{{a}}|{{b}}", {"a": "text", "b": "text"})
    assert made.render(a="{{b}}", b="secret") == "{{b}}|secret"
    assert made.render(a="\\{{", b="{a}") == "\\{{|{a}"


@given(st.lists(st.text(max_size=20).filter(lambda text: "{{" not in text + "{"), max_size=5), st.data())
def test_no_value_changes_a_literal(literals, data):
    """Between the values the text stands as it was written, for all kinds of variables."""
    kinds = data.draw(st.lists(st.sampled_from(VariableKind), min_size=len(literals), max_size=len(literals)))
    hostile = st.text(max_size=30) | st.sampled_from(["{{v0}}", "\\{{", "</data-0>", '"}]', "{{ v1 }}", "+++"])
    values = {f"v{number}": data.draw(hostile) for number in range(len(kinds))}
    variables = {f"v{number}": kind for number, kind in enumerate(kinds)}
    made = template("".join(f"{{{{v{n}}}}}{text}" for n, text in enumerate(literals)), variables)
    rest = str(made.render(**values))
    for number, text in enumerate(literals):
        name = f"v{number}"
        inserted = Variable(name=name, kind=kinds[number]).format_value(values[name])
        assert values[name] in inserted or kinds[number] is VariableKind.JSON
        assert rest.startswith(inserted + text)
        rest = rest[len(inserted + text) :]
    assert rest == ""


@given(st.text(max_size=200))
def test_untrusted_text_cannot_close_its_marks(text):
    """The end of the mark stands once, after the text."""
    rendered = template("{{q}}", {"q": "untrusted"}).render(q=text)
    end = rendered.splitlines()[-1] if rendered.endswith(">") else ""
    assert end.startswith("</data-")
    assert rendered.count(end) == 1


def test_json_keeps_characters_and_refuses_what_is_none():
    """A list or an object, not cut and not escaped."""
    made = template("{{v}}", {"v": "json"})
    assert json.loads(made.render(v={"city": "北京", "n": [1, None]})) == {"city": "北京", "n": [1, None]}
    assert "北京" in made.render(v="北京")
    for value in (float("nan"), {1, 2}):
        with pytest.raises(MisuseError, match="give a JSON value"):
            made.render(v=value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "values are missing for a, b; its variables are a, b, c"),
        ({"a": "x"}, "values are missing for b"),
        ({"a": "x", "b": "y", "z": "x"}, "unknown variables z"),
        ({"a": 1, "b": "y"}, "a=1: give a string, or declare a as json"),
    ],
)
def test_rendering_is_strict(values, message):
    """Missing, unknown and wrong values are named, with the prompt."""
    made = template("{{a}}{{b}}{{c}}", {"a": "text", "b": "untrusted", "c": {"kind": "text", "default": "d"}})
    with pytest.raises(MisuseError, match=message) as caught:
        made.render(**values)
    assert str(caught.value).startswith("prompt t 1.0: ")


def test_a_default_stands_in():
    """A variable with a default is optional."""
    made = template("{{a}}", {"a": {"kind": "text", "default": "plain"}})
    assert made.render() == "plain"
    assert made.render(a="x") == "x"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a\n{{b}}", r"line 2 of the text: \{\{b\}\} is not a declared variable"),
        ("{{ }}", r"opens no variable"),
        ('{{"a": 1}}', r"opens no variable"),
        ("{{examples}}", "is not a declared variable"),
    ],
)
def test_placeholders_are_checked_when_read(text, message):
    """Not when a run starts."""
    with pytest.raises(MisuseError, match=message):
        template(text)


@pytest.mark.parametrize("given", [{"a": "number"}, {"a b": "text"}, {"examples": "text"}, {"a": {"default": "x"}}])
def test_declarations_are_checked(given):
    """Kinds and names."""
    with pytest.raises(MisuseError, match="variable"):
        template("", given)


def test_two_braces_are_written_with_a_backslash():
    """The only escape there is."""
    assert template(r"\{{name}} \n").render() == r"{{name}} \n"


def test_examples_are_part_of_the_prompt():
    """They stand where the text says, braces and all, and count for the digest."""
    examples = [{"input": "Weather in Tokyo?", "output": [{"step_id": 1, "tool": "{{tool}}"}]}]
    made = template("Plan.\n\n{{examples}}\n\nNow:", examples=examples)
    assert '## Example 1\nInput: Weather in Tokyo?\nOutput: [\n  {\n    "step_id": 1' in made.render()
    assert "{{tool}}" in made.render()
    other = template("Plan.\n\n{{examples}}\n\nNow:", examples=[{"input": "x", "output": "y"}])
    assert other.digest != made.digest
    with pytest.raises(MisuseError, match=r"write \{\{examples\}\}"):
        template("Plan.", examples=examples)
    with pytest.raises(MisuseError, match="a table with input and output"):
        template("{{examples}}", examples=[{"question": "x"}])


def test_the_digest_covers_text_and_variables():
    """And nothing else: a new author makes no new prompt."""
    made = template("{{a}}", {"a": "text"})
    assert template("{{a}}", {"a": "text"}, author="ann").digest == made.digest
    assert template("{{a}}.", {"a": "text"}).digest != made.digest
    assert template("{{a}}", {"a": "untrusted"}).digest != made.digest
    assert template("{{a}}", {"a": {"kind": "text", "default": "x"}}).digest != made.digest


def test_a_fixed_prompt_is_its_own_current_version():
    """Only what came from a folder without a version follows its activations."""
    made = template("x")
    assert made.current() is made
    assert isinstance(made.render(), RenderedPrompt)


def test_a_variable_may_have_any_name():
    """Also that of a parameter of the method."""
    assert template("{{self}}", {"self": "text"}).render(self="x") == "x"
