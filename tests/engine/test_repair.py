"""JSON of a model: what is written badly is mended, what is incomplete is not, and what is around it is skipped."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agentfsm import ArgumentsError
from agentfsm.tools.schema.arguments import check_object, read_object, repair_object

MENDED = {
    '{"a": 1,}': {"a": 1},
    '{"a": [1, 2,], "b": {"c": 3,},}': {"a": [1, 2], "b": {"c": 3}},
    '{"a": 1},': {"a": 1},
    '{"a": 1};': {"a": 1},
    "{'a': 'b', 'c': ['d']}": {"a": "b", "c": ["d"]},
    "{'a': 'it\\'s', \"b\": \"it's\", 'c': 'say \"hi\"'}": {"a": "it's", "b": "it's", "c": 'say "hi"'},
    "{a: 1, $b: 2, c-d.e: 3}": {"a": 1, "$b": 2, "c-d.e": 3},
    "{1: 2}": {"1": 2},
    "{'a': True, 'b': False, 'c': None}": {"a": True, "b": False, "c": None},
    '{"a": "True, None,}", b: "c: None"}': {"a": "True, None,}", "b": "c: None"},
    '```json\n{"a": 1}\n```': {"a": 1},
    "```\n{'a': 1}\n```": {"a": 1},
    'Here you go:\n```json\n{"a": 1}\n```\nI hope that helps.': {"a": 1},
    'Here\'s the call: {"a": 1}': {"a": 1},
    "Here's the call: {'a': 1,}": {"a": 1},
    'search({"a": 1})': {"a": 1},
    '{"a": 1} That is all.': {"a": 1},
    '{"a": 1, // one\n "b": /* two */ 2, # three\n}': {"a": 1, "b": 2},
    '{"a": "http://x/#y /* no */",}': {"a": "http://x/#y /* no */"},
    '{"a": "x\ny\tz"}': {"a": "x\ny\tz"},
    "{'a': 'def f():\n    return {}\n'}": {"a": "def f():\n    return {}\n"},
    '{"a": "\\n\\u00e9\\ud83d\\ude00\\\\",}': {"a": "\né😀\\"},
    "{'n': 12345678901234567890123, 'f': 1.50, 'e': -2e-3,}": {"n": 12345678901234567890123, "f": 1.5, "e": -0.002},
    "\ufeff {'a': 1} \n": {"a": 1},
}

REFUSED = {
    "an array": '[{"a": 1}]',
    "an array with a trailing comma": '[{"a": 1},]',
    "a text": '"{\\"a\\": 1}"',
    "null": "null",
    "nothing": "",
    "a word": "a",
    "two objects": '{"a": 1}{"b": 2}',
    "two objects that are alike": '{"a": 1} {"a": 1}',
    "two broken objects": "{'a': 1} {'b': 2}",
    "an object in a sentence with another": 'Use {x} and {"a": 1}',
    "members around an object": 'limit: 5, city: {"a": 1}',
    "members behind an object": 'city: {"a": 1}, limit: 5',
    "a member without its brackets": '"city": {"a": 1}',
    "duplicate keys": '{"a": 1, "a": 2}',
    "duplicate keys and a trailing comma": '{"a": 1, "a": 2,}',
    "duplicate keys, one bare": '{"a": 1, a: 2}',
    "duplicate keys, nested": "{'x': {'a': 1, 'a': 1}}",
    "NaN": '{"a": NaN}',
    "NaN and a trailing comma": '{"a": NaN,}',
    "Infinity": "{'a': -Infinity}",
    "half a pair": '{"a": "\\ud800"}',
    "half a pair and a trailing comma": '{"a": "\\ud800",}',
    "half a pair as a character": '{"a": "\ud800",}',
    "NUL": '{"a": "\\u0000",}',
    "NUL as a character": '{"a": "\0",}',
    "depth": '{"a":' * 300 + "1" + "}" * 300,
    "depth and a trailing comma": '{"a":' * 300 + "1," + "}" * 300,
    "200,000 brackets": "[" * 200_000,
    "15,000 brackets": "{" * 15_000 + "}",
    "15,000 brackets of both kinds": '{"a":[' * 2_500 + "}",
    "a large integer": f'{{"a": {"9" * 5_000},}}',
    "too long": '{"a": "' + "x" * 16_000 + '",}',
    "cut short": '{"a": 1',
    "cut short in a list": '{"a": [1, 2}',
    "cut short in an object": '{"a": {"b": 1}',
    "cut short in a text that ends in a bracket": '{"content": "def f():\n    return {}',
    "cut short in a single-quoted text": "{'content': 'return {}",
    "cut short behind an escape": '{"a": "}\\',
    "cut short in a comment": '{"a": 1 /* }',
    "a bracket too many": '{"a": 1}}',
    "brackets around": '{{"a": 1}}',
    "a quote in a text": '{"a": "he said "hi" to"}',
    "an apostrophe in a text": "{'a': 'it's'}",
    "two texts in a row": "{'a': 'it''s'}",
    "a bare text": '{"a": hello}',
    "half a word": '{"a": tru}',
    "undefined": '{"a": undefined}',
    "a hexadecimal number": '{"a": 0x10}',
    "two numbers": '{"a": 1 2}',
    "a comma too many": '{"a": 1,, "b": 2}',
    "no value": '{"a":}',
    "no key": "{1}",
    "a set": "{'a': {1, 2}}",
    "a tuple": "{'a': (1, 2)}",
    "Windows": '{"a": "C:\\dir",}',
    "curly quotes": "{“a”: 1}",
}


@pytest.mark.parametrize("text", MENDED, ids=lambda text: ascii(text[:30]))
def test_what_is_written_badly_is_mended(text):
    """What Python, JavaScript or a talkative model would write becomes the strict JSON object that was meant."""
    mended = repair_object(text)
    assert mended is not None
    assert check_object(mended) is None
    assert json.loads(mended) == MENDED[text]


@pytest.mark.parametrize("text", REFUSED.values(), ids=REFUSED)
def test_what_is_more_than_badly_written_stays_refused(text):
    """JSON that was refused for its content, what was cut short, and what would have to be guessed."""
    assert repair_object(text) is None


PLAIN = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8) | st.sampled_from(
    ["}", "{", "']", '"', "'", "\\", "{}", "return {}\n", "a: 1}", "//", "/*", "#", ",}", "None", "\n"]
)
# Objects whose texts are full of what the reader could take for structure.
OBJECTS = st.dictionaries(
    PLAIN,
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | PLAIN,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(PLAIN, inner, max_size=3),
        max_leaves=6,
    ),
    max_size=4,
)
WRITERS = st.sampled_from(
    [
        json.dumps,
        lambda value: json.dumps(value, ensure_ascii=False),
        lambda value: json.dumps(value, indent=1),
        repr,
        lambda value: f"Sure:\n```json\n{json.dumps(value)}\n```",
        lambda value: json.dumps(value, ensure_ascii=False).replace("\\n", "\n").replace("}", ",}"),
    ]
)


@given(OBJECTS, WRITERS, st.data())
@example({"a": "}"}, json.dumps, None)
def test_a_text_that_was_cut_short_never_becomes_another_object(value, write, data):
    """However an object was written and wherever the text ends: what comes out is that object, or nothing."""
    text = write(value)
    whole = repair_object(text)
    for length in range(len(text)) if data is None else [data.draw(st.integers(0, len(text)))]:
        mended = repair_object(text[:length])
        assert mended is None or json.loads(mended) == (value if whole is None else json.loads(whole))


@given(OBJECTS)
def test_what_python_prints_comes_back_as_it_was(value):
    """`repr` has escapes that JSON lacks, so it may be refused; it never comes out as something else."""
    mended = repair_object(repr(value))
    assert mended is None or json.loads(mended) == value


@given(OBJECTS)
def test_a_trailing_comma_and_a_comment_are_no_loss(value):
    """Whatever stands in the texts, they come out as they were."""
    text = json.dumps(value)
    mended = repair_object(f"{text[:-1]}{',' * bool(value)} /* done */ }}")
    assert mended is not None
    assert json.loads(mended) == value


@given(st.text() | st.text(alphabet="{}[]\"':,\\/*#u0dN1e-. \n`aTrue\ud800\0", max_size=60))
def test_no_text_escapes(text):
    """Whatever the text, the answer is None or one strict JSON object."""
    mended = repair_object(text)
    assert mended is None or check_object(mended) is None


@pytest.mark.parametrize("unit", ['"\\', "'\\", "/* ", '" ', "' ", "{", "a ", ", ", "#", "a:", "```", "\\", "[,"])
def test_no_junk_takes_long(unit):
    """Junk of the largest size is looked at once, not once for each of its characters."""
    assert repair_object("{" + unit * (15_990 // len(unit)) + "}") is None


# Replies of planners, judges and routers, answers of agents


def fitting(text):
    """Read an object that has a member "fits"."""
    found = json.loads(text)
    return found if found["fits"] else {}


BEFORE = st.sampled_from(
    [
        "",
        "\ufeff",
        "Here is my decision: ",
        'Here is "my" decision, it\'s final [1]:\n',
        "See [the docs](https://x.org). ```json\n",
        '<think>{"route": "?"}</think>\n',
        "First {'a': 1}, then [[1], {\"fits\": 0}]:\n",
    ]
)
BEHIND = st.sampled_from(
    ["", "\n```", ".", ' I hope "that" helps :)', '\n\nNot {"a": 1}.', '\n[{"fits": 0}]', " // done"]
)


@given(BEFORE, OBJECTS, BEHIND, st.booleans())
def test_an_object_is_read_wherever_it_stands(before, value, behind, ascii_only):
    """In a sentence, a fence, behind a byte order mark, beside others that do not fit: it comes out as it was."""
    value = {**value, "fits": 1}
    assert read_object(f"{before}{json.dumps(value, ensure_ascii=ascii_only)}{behind}", fitting) == value


@given(BEFORE, OBJECTS, WRITERS, BEHIND, st.floats(0, 1))
@example("", {"a": {"fits": 2}}, json.dumps, "", 0.5)
def test_a_reply_that_breaks_off_never_becomes_another_object(before, value, write, behind, share):
    """However it is written and wherever it ends: what comes out is that object, or an error for the model."""
    value = {**value, "fits": 1}
    text = f"{before}{write(value)}{behind}"
    try:
        whole = read_object(text, fitting)
    except ArgumentsError:
        whole = value
    with contextlib.suppress(ArgumentsError):
        assert read_object(text[: int(share * len(text))], fitting) == whole


@given(st.text() | st.text(alphabet="{}[]\"':,\\/*#u0dN1e-. \n`aTrue\ud800\0“”", max_size=60))
def test_no_reply_escapes(text):
    """The result is a strict object, or the error; and what arguments may be, an answer may be, too."""
    mended = text if check_object(text) is None else repair_object(text)
    try:
        found = read_object(text, str)
    except ArgumentsError:
        assert mended is None
    else:
        assert check_object(found) is None
        assert mended is None or json.loads(found) == json.loads(mended)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"a": 1}\n{"fits": 2}', {"fits": 2}),
        ('{"fits": 2} {"fits": 2}', {"fits": 2}),
        ("So 'it' is: {'fits': 'it’s “q”', b: True,} ok?", {"fits": "it’s “q”", "b": True}),  # noqa: RUF001
        (f'```json\n{{"fits": "{"x" * 20_000}"}}\n```', {"fits": "x" * 20_000}),
    ],
    ids=["first that fits", "said twice", "single quotes", "long"],
)
def test_what_is_clear_is_read(text, found):
    assert read_object(text, fitting) == found


@pytest.mark.parametrize(
    ("text", "flaw"),
    [
        ('{"fits": 1} or {"fits": 2}', "two JSON objects that differ"),
        ('{"fits": 1, "a": {"fits": 2}', "EOF while parsing"),
        ('For example {"fits": 1}. {"fits": 2, "b', "trailing characters"),
        ('{"a": 1}}, "fits": {"fits": 1}', "trailing characters"),
        ('"a": {"fits": 1}', "part of another value"),
        ('[{"fits": 1}]', "it is an array"),
        ("{“fits”: 1}", "key must be a string"),
        ("{'fits': 'it's'}", "key must be a string"),
        ('{"fits": 1, "fits": 2}', "duplicate key"),
        ('Maybe {"a": 1}', "'fits' is missing"),
        ("I refund it.", "expected a value"),
        ('{"fits": hello}', "bare word"),
    ],
)
def test_what_would_have_to_be_guessed_is_an_error_that_says_why(text, flaw):
    """So the model can be asked again."""
    with pytest.raises(ArgumentsError, match=flaw):
        read_object(text, fitting)


@pytest.mark.parametrize("unit", ["{} ", "{a} ", "[[", '{"a": 1} ', "{'", "}{", '": {', "[{}] "])
def test_no_long_reply_takes_long(unit):
    """A long reply is looked at once, not once for each of its brackets."""
    with pytest.raises(ArgumentsError):
        read_object(unit * (200_000 // len(unit)), fitting)


def test_a_validator_is_loaded_only_when_a_tool_needs_it():
    """Neither importing the package nor mending a text loads jsonschema-rs or pydantic."""
    code = (
        "import sys, agentfsm; from agentfsm.tools.schema.arguments import repair_object; repair_object('{a: 1}'); "
        "print(*[name for name in ('jsonschema_rs', 'pydantic') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == []
