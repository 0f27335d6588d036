"""Loops: what is one, what is a hint, and what looks like one and is none.

A turn is written as a letter: equal letters are equal calls. Results differ from turn to turn unless the test says so.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentfsm import AssistantMessage, ImagePart, Limits, SystemMessage, ToolResult, UserMessage
from agentfsm.core.stops import MAX_PERIOD, RecentTurns, count_equal_calls, find_loop
from tests.support.sample_runs import TASK, answer, call, result


def turn(number, name="look", arguments="{}", content=None, text=""):
    """Return the messages of one turn: a call and its result."""
    asked = call(turn=number, name=name, arguments=arguments)
    content = f"result {number}" if content is None else content
    return [AssistantMessage(text=text, calls=(asked,)), result(asked.id, content=content, name=name)]


def history(letters, **fields):
    """Return a task and a turn per letter; the tool is named after the letter."""
    turns = (turn(number, f"tool_{letter}", **fields) for number, letter in enumerate(letters, 1))
    return [TASK, *(message for each in turns for message in each)]


@pytest.mark.parametrize("letters", ["AAA", "AAAA", "BCAAA"])
def test_the_same_call_three_turns_running(letters):
    """The same call three times is a loop that names the tool."""
    loop = find_loop(history(letters))
    assert (loop.tools, loop.is_hint) == (("tool_A",), False)
    assert loop.description == "the same call of tool_A 3 turns running"


def test_the_same_call_however_written():
    """Order and spacing of the arguments do not make a call another one."""
    spellings = ['{"a": 1, "b": 2}', '{"b":2,"a":1}', '{ "a" : 1,\n"b" : 2 }']
    messages = [message for n, text in enumerate(spellings, 1) for message in turn(n, arguments=text)]
    assert "same call of look" in find_loop(messages).description


@pytest.mark.parametrize("letters", ["AABA", "ABAA", "CABAA"])
def test_the_same_call_in_three_of_the_last_four_turns(letters):
    """Another call in between does not hide it (document B, 4); three among five are none."""
    loop = find_loop(history(letters))
    assert (loop.tools, loop.is_hint) == (("tool_A",), False)
    assert loop.description == "the same call of tool_A in 3 of the last 4 turns"
    assert find_loop(history("ABBCA")) is None
    assert find_loop(history("AABCA")) is None


@pytest.mark.parametrize(
    ("letters", "period"),
    [("ABAB", 2), ("CABAB", 2), ("ABCABC", 3), ("AABAAB", 3), ("ABCDABCD", 4), ("XXABCDABCD", 4)],
)
def test_a_sequence_twice_running(letters, period):
    """A sequence of two to four turns that comes twice is a loop that names its tools."""
    loop = find_loop(history(letters))
    assert f"same sequence of {period} turns" in loop.description
    assert set(loop.tools) == {f"tool_{letter}" for letter in letters[-period:]}
    assert not loop.is_hint


def test_calls_of_one_turn_count_together():
    """Turns of several calls are alike when all their calls are."""
    messages = []
    for number in range(1, 4):
        calls = tuple(call(index, number, name) for index, name in enumerate("xy"))
        messages += [AssistantMessage(calls=calls), *(result(c.id, content=f"{number}", name=c.name) for c in calls)]
    assert find_loop(messages).tools == ("x", "y")
    assert find_loop(messages[3:]) is None


@pytest.mark.parametrize(
    "letters",
    ["", "A", "AA", "ABA", "AAB", "AAAB", "ABABC", "ABCD", "ABCDEFGH", "ABCAB", "ABCDABC", "ABCDEABCDE"],
)
def test_no_loop(letters):
    """Two repeats are a retry, a broken sequence is progress, and a period beyond the longest is not looked for."""
    assert MAX_PERIOD == 4
    assert find_loop(history(letters)) is None
    assert find_loop(history(letters)[1:]) is None


def test_the_same_reply_three_times():
    """The same words three turns running are a loop; twice they are not."""
    messages = [TASK, *[answer("Let me check.")] * 3]
    loop = find_loop(messages)
    assert (loop.description, loop.tools, loop.is_hint) == ("the same reply 3 turns running", (), False)
    assert find_loop(messages[:-1]) is None


def test_the_same_reply_but_for_its_margins():
    """White space around the words does not make another reply of them."""
    assert find_loop([answer("Let me check."), answer(" Let me check."), answer("Let me check.\n")]) is not None


def test_saying_nothing_is_no_reply():
    """Blank text repeated is not a repeated reply: turns with calls say nothing all the time."""
    assert find_loop([answer(" "), answer(""), answer("\n")]) is None
    assert find_loop(history("ABC", text=" ")) is None


def test_notes_between_turns_do_not_matter():
    """A system note, such as the nudge of the finding before, does not hide a loop."""
    messages = []
    for number in range(1, 4):
        messages += [*turn(number), SystemMessage(text="You are repeating yourself.")]
    assert find_loop(messages).tools == ("look",)


def test_equal_results_of_different_calls_are_a_hint():
    """Three equal results are worth a word when the calls differ, and no more than that."""
    loop = find_loop(history("ABC", content="nothing found"))
    assert loop.is_hint
    assert set(loop.tools) == {"tool_A", "tool_B", "tool_C"}
    by_arguments = [m for n in range(1, 4) for m in turn(n, arguments=f'{{"page": {n}}}', content="[]")]
    assert find_loop(by_arguments).is_hint
    assert find_loop(history("AB", content="nothing found")) is None


def test_equal_results_of_several_calls_count_as_one():
    """Two searches that find nothing, then one, then three: each turn has brought the same."""
    messages = [TASK]
    for number, calls in enumerate((2, 1, 3), 1):
        asked = [call(index, number, arguments=f'{{"page": {number}{index}}}') for index in range(calls)]
        messages += [AssistantMessage(calls=tuple(asked)), *(result(each.id, content="[]") for each in asked)]
    loop = find_loop(messages)
    assert (loop.is_hint, loop.description) == (True, "equal results of search 3 turns running")
    assert find_loop(messages[:-1]).is_hint
    assert find_loop([*messages[:-1], result("t3.2", content="a hit")]) is None


@pytest.mark.parametrize(
    ("letters", "limits", "description"),
    [
        ("AA", Limits(loop_turns=2), "the same call of tool_A 2 turns running"),
        ("AAA", Limits(loop_turns=4), None),
        ("ABABA", Limits(loop_turns=4), None),
        ("AAAA", Limits(loop_turns=4), "the same call of tool_A 4 turns running"),
        ("ABABAB", Limits(loop_turns=4), "the same sequence of 2 turns (tool_B, tool_A) 3 times running"),
        ("ABCDABCDABCD", Limits(loop_turns=4), "the same sequence of 4 turns"),
        ("ABBCA", Limits(loop_window=5), None),
        ("AABCA", Limits(loop_window=5), "the same call of tool_A in 3 of the last 5 turns"),
        ("ABCDEFGHAIA", Limits(loop_window=12), "the same call of tool_A in 3 of the last 12 turns"),
        ("AAA", Limits(loop_window=2), "the same call of tool_A 3 turns running"),
        ("AABA", Limits(loop_window=3), None),
    ],
)
def test_the_turns_and_the_window_of_a_loop_are_limits(letters, limits, description):
    """Document B, 4: threshold and window are configured."""
    loop = find_loop(history(letters), limits=limits)
    assert (loop is None) if description is None else loop.description.startswith(description)


@pytest.mark.parametrize("letters", ["AAA", "ABAB", "BBAAA"])
def test_polling_tools_are_exempt(letters):
    """A tool whose job is to be asked again makes no loop."""
    assert find_loop(history(letters), exempt={"tool_A"}) is None


def test_polling_does_not_excuse_the_others():
    """In a turn that also polls, the other calls count; and a turn that only polls ends the look back."""
    messages = []
    for number in range(1, 4):
        calls = (call(0, number, "poll"), call(1, number, "write"))
        messages += [AssistantMessage(calls=calls), *(result(c.id, content=f"{number}", name=c.name) for c in calls)]
    assert find_loop(messages, exempt={"poll"}).tools == ("write",)
    assert find_loop(history("AABA"), exempt={"tool_B"}) is None
    assert find_loop(history("ABA", content="same"), exempt={"tool_B"}) is None


def test_polling_for_something_new_does_not_excuse_the_others():
    """The same call three turns running is a loop also beside polls that differ."""
    messages = []
    for number in range(1, 4):
        calls = (call(0, number, "poll", arguments=f'{{"since": {number}}}'), call(1, number, "write"))
        messages += [
            AssistantMessage(calls=calls),
            *(result(c.id, content=f"{c.name} {number}", name=c.name) for c in calls),
        ]
    assert find_loop(messages, exempt={"poll"}).tools == ("write",)


@given(
    st.text("AB", min_size=3, max_size=9),
    st.sampled_from([None, "same"]),
    st.sampled_from([frozenset(), frozenset({"tool_A"})]),
    st.sampled_from([18, 0, 2, 6]),
    st.integers(1, 2),
)
def test_the_quick_look_hides_nothing(letters, content, exempt, spoken, every):
    """The look at the newest turns, which usually settles it, takes the history as it grows, and misses no loop."""
    messages = history(letters, content=content)
    messages.insert(1 + spoken, UserMessage(parts=TASK.parts))
    ends = [at for at, each in enumerate([*messages[1:], TASK], 1) if not isinstance(each, ToolResult)]
    recent = RecentTurns()
    for end in ends[::every]:
        seen = messages[:end], exempt, Limits()
        assert recent.may_loop(*seen) or find_loop(*seen) is None


def test_a_history_without_repetition_is_not_searched():
    """Ten turns that differ: the quick look settles each. Equal results it does not."""
    messages, recent = history("ABCDEFGHIJ"), RecentTurns()
    assert not any(recent.may_loop(messages[:end], frozenset(), Limits()) for end in range(3, len(messages) + 1, 2))
    messages, recent = history("ABC", content="same"), RecentTurns()
    assert [recent.may_loop(messages[:end], frozenset(), Limits()) for end in (3, 5, 7)] == [False, True, True]


@pytest.mark.parametrize("letters", ["AAA", "ABAB"])
def test_a_word_of_the_user_ends_the_look_back(letters):
    """What was called before the user spoke again, as in an earlier run of the session, makes no loop."""
    messages = history(letters)
    again = UserMessage(parts=TASK.parts)
    assert find_loop([*messages[:-2], again, *messages[-2:]]) is None


def test_the_same_words_before_different_calls_are_no_loop():
    """A model that says "Next file:" before each of three different calls makes progress."""
    loop = find_loop(history("ABC", text="Next file:"))
    assert loop is None or loop.is_hint


def test_other_pictures_are_other_results():
    """Two screenshots are told in the same words, and show that something has changed."""
    for pictures, is_loop in (("111", True), ("123", False), ("122", False)):
        messages = [TASK]
        for number, picture in enumerate(pictures, 1):
            asked = call(turn=number, name=f"tool_{number}")
            part = ImagePart(url=f"https://a.test/{picture}.png")
            held = result(asked.id, content="[image 1]", name=asked.name, parts=(part,))
            messages += [AssistantMessage(calls=(asked,)), held]
        assert (find_loop(messages) is not None) is is_loop, pictures


# Similarity

PAGE = (
    "The query for {0} took {1} ms and gave no documents. Try words that are less special, look at the spelling, or "
    "remove the filter on the date, which leaves out whatever is older than a year."
)


def searching(*results):
    """Return a task and turns with different calls that had these results."""
    turns = (turn(number, arguments=f'{{"page": {number}}}', content=text) for number, text in enumerate(results, 1))
    return [TASK, *(message for each in turns for message in each)]


def test_highly_similar_results_are_a_hint():
    """Results that differ by a word or a number say that nothing is found, whatever is called."""
    pages = [PAGE.format(word, number) for number, word in enumerate(("opera", "theatre", "ballet"), 3)]
    loop = find_loop(searching(*pages))
    assert (loop.description, loop.tools, loop.is_hint) == (
        "nearly equal results of look 3 turns running",
        ("look",),
        True,
    )
    assert find_loop(searching(*pages[:2])) is None
    assert find_loop(searching("Found: the third of May at noon, in the great hall.", *pages[:2])) is None
    chinese = [
        f"没有找到与{word}有关的任何文件。请换一个更常用的关键词,或者去掉日期的限制,然后再搜索一次,谢谢。"
        for word in "歌舞戏"
    ]
    assert find_loop(searching(*chinese)).is_hint


def test_results_that_bring_something_are_not_similar():
    """Pages of one form with other contents are progress; so are short results that differ in a word."""
    rows = [
        ", ".join(f'{{"id": {n}{i}, "name": "{c}{i}", "cents": {i * n}}}' for i in range(9))
        for n, c in enumerate("xyz", 1)
    ]
    assert find_loop(searching(*rows)) is None
    assert find_loop(searching("saw 1 of 3", "saw 2 of 3", "saw 3 of 3")) is None


def test_nearly_the_same_reply_is_a_hint():
    """It is worth a word that an answer hardly changes; what is no answer may repeat itself."""
    said = [PAGE.format("opera", number) for number in (3, 4, 5)]
    loop = find_loop([TASK, *map(answer, said)])
    assert (loop.description, loop.tools, loop.is_hint) == ("nearly the same reply 3 turns running", (), True)
    assert find_loop([TASK, *(m for n, text in enumerate(said, 1) for m in turn(n, f"tool_{n}", text=text))]) is None


@pytest.mark.parametrize("text", ["nothing found", PAGE])
def test_a_hint_is_found_once(text):
    """In the turn that completes it, and not in each that it goes on; when it begins anew it is found anew."""
    pages = [text.format("opera", number) for number in range(20)]
    found = [find_loop(searching(*pages[:count])) is not None for count in range(21)]
    assert [count for count, hit in enumerate(found) if hit] == [3]
    assert find_loop(searching(*pages[:9], "Here it is.", *pages[:3])) is not None


def test_long_results_are_compared_by_samples():
    """A change in a megabyte that no sample holds makes no other result of it; one in the head or the length does."""
    long = " ".join(f"line{number}" for number in range(100_000))
    other = long.replace("line30000 ", "line3 ")
    assert find_loop(searching(long, other, long)).description.startswith("nearly equal results")
    heads = [f"{' '.join([word] * 60)} {long}" for word in ("one", "two", "three")]
    assert find_loop(searching(*heads)) is None
    assert find_loop(searching(long, long[: len(long) // 2], long)) is None


def test_a_history_without_a_reply_has_no_equal_calls():
    """A turn without one is that of a plan, for example."""
    assert count_equal_calls((), frozenset({"pay"})) == {}


def test_a_message_of_the_system_ends_no_turn():
    """Such as one in a history that was given; a message of the user does."""
    recent, first = RecentTurns(), turn(1, "tool_A", content="same")
    recent.may_loop([TASK, *first], frozenset(), Limits())
    messages = [TASK, *first, SystemMessage(text="Be brief."), *turn(2, "tool_A", content="same")]
    assert recent.may_loop(messages, frozenset(), Limits())


def test_turns_that_only_poll_with_other_words_are_none():
    """Their calls do not count, and what they say differs."""
    texts = ["Three of ten files are there by now.", "The machine has finished nine of them."]
    turns = [turn(number, "poll", text=text) for number, text in enumerate(texts, 1)]
    messages = [TASK, *(message for each in turns for message in each)]
    recent = RecentTurns()
    assert [recent.may_loop(messages[:end], frozenset({"poll"}), Limits()) for end in (3, 5)] == [False, False]
