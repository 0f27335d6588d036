"""Messages: what the model reads, what is cut, what adds up, and what is refused."""

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentfsm import (
    AssistantMessage,
    ImagePart,
    MisuseError,
    Outcome,
    SystemMessage,
    TextPart,
    ToolCall,
    Usage,
    UserMessage,
)
from agentfsm.core.messages import as_parts, check_history
from tests.support.sample_runs import call, result

TEXT, IMAGE = TextPart(text="hi"), ImagePart(url="https://example.com/a.png", detail="low")


@pytest.mark.parametrize("url", ["https://example.com/a", "http://localhost/a", "data:image/png;base64,AA=="])
def test_image_addresses(url):
    """An image is given by an address or carried in a data URL."""
    assert ImagePart(url=url).url == url


@pytest.mark.parametrize("url", ["", "a.png", "file:///etc/passwd", "data:text/html,x", "javascript:alert(1)"])
def test_other_addresses_are_refused(url):
    """What no provider can fetch, or should not, is a misuse that names it."""
    with pytest.raises(MisuseError, match="not"):
        ImagePart(url=url)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TextPart(text=5), r"^TextPart\(text=5\): give a string$"),
        (lambda: UserMessage(parts=[TEXT]), r"^UserMessage\(parts=\["),
        (lambda: UserMessage(parts=(TEXT, "hi")), r"^UserMessage\(parts=\("),
    ],
)
def test_wrong_content_is_refused(make, message):
    """The error names the field, where it is given and not where it is sent."""
    with pytest.raises(MisuseError, match=message):
        make()


def test_user_text_leaves_images_out():
    """The text of a user message is its text parts, a line each."""
    assert UserMessage(parts=(TEXT, IMAGE, TEXT)).text == "hi\nhi"


@pytest.mark.parametrize("content", ["hi", TEXT, (TEXT,), [TEXT]])
def test_a_prompt_is_text_or_parts(content):
    """Text, a part, and a sequence of parts are all the same prompt."""
    assert as_parts(content) == (TEXT,)


@pytest.mark.parametrize("content", [IMAGE, [TextPart(text=" "), IMAGE]])
def test_an_image_is_enough(content):
    """A prompt with an image needs no words."""
    assert IMAGE in as_parts(content)


@pytest.mark.parametrize("content", ["", " \n", [], TextPart(text="\t"), [TextPart(text=""), TextPart(text=" ")]])
def test_an_empty_prompt_is_refused(content):
    """A prompt without anything in it is a misuse, and the text says what to do."""
    with pytest.raises(MisuseError, match="the text is empty"):
        as_parts(content)


@pytest.mark.parametrize(
    ("content", "name"),
    [
        (["hi"], "str"),
        ([""], "str"),
        ([None], "NoneType"),
        ([TEXT, 0], "int"),
        ([SystemMessage(text="hi")], "SystemMessage"),
        (SystemMessage(text="hi"), "SystemMessage"),
        (b"hi", "bytes"),
        ({"text": "hi"}, "dict"),
        (None, "NoneType"),
        (5, "int"),
    ],
)
def test_a_strange_prompt_is_refused(content, name):
    """What is neither text nor parts, falsy or not, is a misuse that names the type it met."""
    with pytest.raises(MisuseError, match=f"not {name}$"):
        as_parts(content)


def test_equal_calls_have_equal_signatures():
    """Key order and white space of the arguments do not matter; their values and the tool's name do."""
    one = AssistantMessage(calls=(call(arguments='{"a": 1, "b": {"c": 2, "d": 3}}'),))
    two = AssistantMessage(calls=(call(4, 7, arguments='{"b":{"d":3,"c":2},"a":1}'),))
    assert one.signature == two.signature
    for other in (call(arguments='{"a": 2, "b": {"c": 2, "d": 3}}'), attrs.evolve(one.calls[0], name="find")):
        assert AssistantMessage(calls=(other,)).signature != one.signature
    assert AssistantMessage(text="hi").signature == ()


def unlike(one, other):
    """Whether two arguments make two signatures."""
    signatures = [AssistantMessage(calls=(call(arguments=f'{{"a": {value}}}'),)).signature for value in (one, other)]
    return signatures[0] != signatures[1]


@pytest.mark.parametrize(
    ("one", "other"),
    [("1", '"1"'), ("1", "true"), ("0", "false"), ("null", '"null"'), ("[1, 2]", "[2, 1]"), ('{"b": 1}', '{"c": 1}')],
)
def test_unequal_arguments_have_unequal_signatures(one, other):
    """Values that only look alike are different calls: True is not 1, and the order of a list matters."""
    assert unlike(one, other)


@pytest.mark.parametrize(("one", "other"), [("{}", "[]"), ('{"b": "c"}', '[["b", "c"]]')])
def test_an_object_is_no_array(one, other):
    """An object and an array are never the same argument."""
    assert unlike(one, other)


@pytest.mark.parametrize("shown_chars", [None, 10, 11])
def test_a_result_within_its_length_is_shown_whole(shown_chars):
    """The model reads tool, status and the whole content."""
    assert result(content="0123456789", shown_chars=shown_chars).text == "[search: done]\n0123456789"


@pytest.mark.parametrize("outcome", Outcome)
def test_every_outcome_is_told(outcome):
    """The status that the model reads is the outcome's own word."""
    assert result(outcome=outcome).text == f"[search: {outcome}]\nok"


@given(st.text(min_size=1), st.data())
def test_a_long_result_is_cut_in_the_middle(content, data):
    """Three quarters of what is shown are the head, one quarter the tail; the note says what is missing, and where."""
    shown_chars = data.draw(st.integers(min_value=4, max_value=max(4, len(content))))
    whole = result(content=content, shown_chars=shown_chars)
    text = whole.text.removeprefix("[search: done]\n")
    if len(content) <= shown_chars:
        assert (text, whole.cut) == (content, None)
        return
    first, last = shown_chars * 3 // 4, shown_chars // 4
    assert text.startswith(content[:first] + "\n[... ")
    assert text.endswith(" ...]\n" + content[-last:])
    end = len(content) - last
    assert whole.cut == (first, end)
    assert f"[... characters {first} to {end} of {len(content)} are not shown: " in text
    assert f"read on in result t1.0 from character {first} ...]" in text


@pytest.mark.parametrize("shown_chars", [0, 1, 2, 3])
def test_a_result_cut_to_nearly_nothing(shown_chars):
    """A tail of no characters is empty, not the whole content."""
    text = result(content="0123456789", shown_chars=shown_chars).text
    assert sum(text.count(digit) for digit in "456789") < 6


def test_the_note_is_no_part_of_the_content():
    """A result that is cut keeps its whole content, for the record and for whoever reads on in it."""
    whole = result(content="0123456789", shown_chars=4)
    assert whole.content == "0123456789"
    assert whole.content[slice(*whole.cut)] == "345678"


def test_a_result_knows_when_it_came():
    """Its end is its beginning and how long it took."""
    assert result(started_at=100.0, duration_s=1.5).completed_at == 101.5


@pytest.mark.parametrize("outcome", Outcome)
def test_what_went_wrong_is_its_error(outcome):
    """Only DONE is a success, so every other outcome tells in its content what went wrong."""
    assert result(outcome=outcome, content="why").error == (None if outcome is Outcome.DONE else "why")


def test_a_call_without_a_key_goes_by_its_id():
    """The id is unique in the run, so by itself it tells two calls apart."""
    assert ToolCall(id="t3.1", name="search", arguments="{}").key == "t3.1"
    assert call().key == "r1:t1.0"


ASKING = AssistantMessage(calls=(call(0), call(1)))
FIRST, SECOND = result("t1.0"), result("t1.1")


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [SystemMessage(text="rules"), UserMessage(parts=(TEXT,)), AssistantMessage(text="hi")],
        [ASKING, FIRST, SECOND],
        [ASKING, FIRST, SECOND, AssistantMessage(text="hi"), UserMessage(parts=(TEXT,))],
    ],
)
def test_a_sound_history_is_taken(messages):
    """A history in which each call has its result right behind it is one that a model accepts."""
    check_history(messages)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([ASKING, FIRST], "no result of 't1.1'"),
        ([ASKING], "no result of 't1.0'"),
        ([ASKING, FIRST, UserMessage(parts=(TEXT,)), SECOND], "no result of 't1.1'"),
        ([ASKING, ASKING, FIRST, SECOND], "no result of 't1.0'"),
        ([ASKING, SECOND, FIRST], "no result of 't1.0'; put the result of each call after it, in order"),
        ([ASKING, FIRST, SECOND, ASKING, FIRST, SECOND], "call id twice"),
        ([FIRST], "result of 't1.0' without its call"),
        ([ASKING, FIRST, SECOND, FIRST], "result of 't1.0' without its call"),
        ([ASKING, FIRST, FIRST], "result of 't1.0' without its call"),
        ([AssistantMessage(calls=(call(0), call(0))), FIRST, FIRST], "call id twice"),
        ([AssistantMessage(calls=(call(arguments="nope"),)), FIRST], "'t1.0' are not a JSON object: 'nope'"),
        ([AssistantMessage(calls=(call(arguments="[1]"),)), FIRST], r"are not a JSON object: '\[1\]'"),
        ([{"role": "user", "content": "hi"}], "not dict; .*from_openai"),
        (["hi"], "not str"),
    ],
)
def test_an_unsound_history_is_refused(messages, words):
    """A call without a result, a result without its call, and what is no message are a misuse that says which."""
    with pytest.raises(MisuseError, match=words):
        check_history(messages)


def test_a_history_nested_too_deep_is_refused():
    """Arguments that no reader can take apart are a misuse as well."""
    deep = call(arguments='{"a":' + "[" * 200_000)
    with pytest.raises(MisuseError):
        check_history([AssistantMessage(calls=(deep,)), FIRST])


usages = st.builds(
    Usage,
    input_tokens=st.integers(0, 10**9),
    output_tokens=st.integers(0, 10**9),
    cached_tokens=st.integers(0, 10**9),
    cost_usd=st.none() | st.integers(0, 100).map(float),
    estimated=st.booleans(),
)


@given(usages, usages, usages)
def test_usage_adds_up(a, b, c):
    """Adding is associative and commutative, nothing is its zero, and tokens are input plus output."""
    assert (a + b) + c == a + (b + c)
    assert a + b == b + a
    assert a + Usage() == a
    assert (a + b).tokens == a.input_tokens + a.output_tokens + b.input_tokens + b.output_tokens


@pytest.mark.parametrize(
    ("a", "b", "total"), [(None, None, None), (0.5, None, 0.5), (None, 0.5, 0.5), (0.5, 0.25, 0.75)]
)
def test_costs_that_are_known_add_up(a, b, total):
    """The cost of what has a price; None only where nothing has one."""
    assert (Usage(cost_usd=a) + Usage(cost_usd=b)).cost_usd == total


def test_an_estimate_stays_one():
    """A sum with one estimated part is an estimate."""
    assert (Usage() + Usage(estimated=True)).estimated
    assert not (Usage() + Usage()).estimated
