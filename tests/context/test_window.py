"""The sliding window: what is shown fits, is whole, and holds the task; and it costs what was added."""

from collections import Counter
from collections.abc import Sequence
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentfsm.context.window import AFTER_CUT, SlidingWindow
from agentfsm.core.errors import MisuseError
from agentfsm.core.messages import (
    AssistantMessage,
    ImagePart,
    Outcome,
    SystemMessage,
    TextPart,
    ToolCall,
    ToolResult,
    UserMessage,
)
from agentfsm.core.run import shown
from agentfsm.ports import TokenCounter, ToolDefinition
from agentfsm.tally import (
    BYTES,
    BYTES_PER_TOKEN,
    CALL_TOKENS,
    IMAGE_TOKENS,
    LOW_IMAGE_TOKENS,
    MESSAGE_TOKENS,
    Tally,
    count_message,
    count_tools,
)
from agentfsm.tokens.estimate import EstimatedCounter


class Words(TokenCounter):
    """Counts words, and remembers what it was asked."""

    encoding = "words"
    exact = True

    def __init__(self):
        self.asked = Counter()

    def count(self, text):
        self.asked[text] += 1
        return len(text.split())


class Watched(Sequence):
    """A history that remembers which messages were looked at."""

    def __init__(self, messages):
        self.messages = messages
        self.seen = set()

    def __len__(self):
        return len(self.messages)

    def __getitem__(self, index):
        self.seen.update(range(*index.indices(len(self))) if isinstance(index, slice) else [index % len(self)])
        return self.messages[index]


def user(text):
    return UserMessage(parts=(TextPart(text=text),))


def turn(number, sizes):
    """An assistant message with a call for each size, and the results: each of so many words."""
    calls = tuple(
        ToolCall(id=f"t{number}.{place}", name="look", arguments="{}", key=f"{number}-{place}")
        for place in range(len(sizes))
    )
    results = [
        ToolResult(call_id=call.id, tool="look", outcome=Outcome.DONE, content=f"{call.id} " + "word " * size)
        for call, size in zip(calls, sizes, strict=True)
    ]
    return [AssistantMessage(text=f"turn {number}", calls=calls), *results]


SIZES = st.integers(0, 60)
GROUPS = st.lists(
    st.one_of(
        st.lists(SIZES, min_size=1, max_size=6),
        st.tuples(st.sampled_from(["user", "system", "assistant"]), SIZES),
    ),
    min_size=1,
    max_size=30,
)
# Either the sizes of the results of one turn, or a message of that kind and size.


def group_of(number, drawn):
    if isinstance(drawn, list):
        return turn(number, drawn)
    kind, size = drawn
    text = f"{kind} {number} " + "word " * size
    speak = {"user": user, "system": lambda t: SystemMessage(text=t), "assistant": lambda t: AssistantMessage(text=t)}
    return [speak[kind](text)]


def assert_whole(messages):
    """Every call has exactly its results right behind it, and there is no result without its call."""
    owed = []
    for message in messages:
        if isinstance(message, ToolResult):
            assert owed
            assert message.call_id == owed.pop(0)
        else:
            assert not owed
            owed = [call.id for call in message.calls] if isinstance(message, AssistantMessage) else []
    assert not owed


def missing(history, start):
    view = shown(history, start)
    return sum(message not in view for message in history)


def assert_sound(history, group, tally, start, allowance):
    """The view is whole, holds the task and the last group, and fits unless there is nothing else in it."""
    view = shown(history, start)
    assert_whole(view)
    assert view[-len(group) :] == tuple(group)
    task = next((message for message in history if isinstance(message, UserMessage)), None)
    assert task is None or task in view
    tokens = sum(count_message(message, tally.counter) for message in view)
    assert tokens == tally.shown(start)
    assert tokens <= allowance or not [m for m in view if m in history and m not in (task, *group)]


@given(groups=GROUPS, counter=st.sampled_from([Words(), BYTES]), percent=st.integers(-10, 110))
def test_what_is_shown_is_sound_all_along_a_run(groups, counter, percent):
    """Whatever is said: nothing is torn, only the last group may overflow, and what has gone does not come back."""
    everything = [message for number, drawn in enumerate(groups) for message in group_of(number, drawn)]
    budget = sum(count_message(message, counter) for message in everything) * percent // 100
    window, history, tally, start = SlidingWindow(), (), Tally(counter), 0
    for number, drawn in enumerate(groups):
        group = group_of(number, drawn)
        history = (*history, *group)
        tally.extend_to(history)
        before, start = start, window.start(history, tally, start, budget)
        assert_sound(history, group, tally, start, window.share * budget)
        assert start == before or missing(history, start) > missing(history, before)


@pytest.mark.parametrize("counter", [Words(), BYTES])
@pytest.mark.parametrize("task_words", [1, 150])
def test_what_is_shown_is_sound_at_every_budget(counter, task_words):
    """Wherever the cut falls: between groups, inside of one, or where only the task and the note are in the way."""
    turns = [message for number in range(6) for message in turn(number, [9, 5, 30])]
    remarks = [AssistantMessage(text=f"remark {number}") for number in range(20)]
    history, group = (user("task " * task_words), *turns, *remarks), remarks[-1:]
    tally, window = Tally(counter), SlidingWindow(share=1)
    tally.extend_to(history)
    starts = [window.start(history, tally, 0, budget) for budget in range(tally.total + 1)]
    for budget, start in enumerate(starts):
        assert_sound(history, group, tally, start, budget)
    assert starts == sorted(starts, reverse=True)
    assert {0, len(history) - len(group)} < set(starts)


@given(groups=GROUPS, start=st.integers(0, 60))
def test_the_note_counts_what_is_missing(groups, start):
    """Whoever reads the request can tell how much of the history is not in it."""
    history = tuple(message for number, drawn in enumerate(groups) for message in group_of(number, drawn))
    view = shown(history, min(start, len(history)))
    notes = [message for message in view if message not in history]
    count = missing(history, min(start, len(history)))
    expected = [f"[{count} earlier messages removed to fit the context window.]"] if count else []
    assert [note.text for note in notes] == expected


def test_a_request_that_shows_everything_is_the_history_itself():
    """The common case copies nothing."""
    history = (user("task"), AssistantMessage(text="done"))
    assert shown(history, 0) is history


def test_a_long_run_counts_each_message_once_and_cuts_seldom():
    """The cost of a run grows with the run; the prompt cache is lost once in half a window, not at each turn."""
    window, words = SlidingWindow(share=0.5), Words()
    history, tally, start, cuts = (user("the task"),), Tally(words), 0, 0
    for number in range(500):
        history = (*history, *turn(number, [90]))
        tally.extend_to(history)
        before, start = start, window.start(history, tally, start, budget_tokens=4_000)
        cuts += start > before
    pieces = [1 + 2 * len(message.calls) if isinstance(message, AssistantMessage) else 1 for message in history]
    assert sum(n for text, n in words.asked.items() if "earlier messages" not in text) == sum(pieces)
    assert 0 < cuts <= tally.total / (4_000 * 0.5 * AFTER_CUT)


def test_a_turn_looks_only_at_what_it_added_or_cut():
    """A thousand old messages are not walked: not when counting, nor when there is nothing to cut, nor in a cut."""
    window, tally = SlidingWindow(share=1), Tally(Words())
    old = [user("task"), *(message for number in range(500) for message in turn(number, [5, 5]))]
    tally.extend_to(old)
    history = Watched(old + turn(500, [5]))
    tally.extend_to(history)
    assert window.start(history, tally, 0, tally.total) == 0
    assert history.seen == {1501, 1502}
    assert window.start(history, tally, 0, tally.total - 1) > 700
    assert len(history.seen) < 8


def test_bytes_are_a_bound_until_there_is_a_vocabulary():
    """A run that fits in bytes never loads one; another is counted again, and not cut where tokens fit."""
    history, tally, window = (user("task"), *turn(0, [50])), Tally(), SlidingWindow()
    tally.extend_to(history)
    assert window.fits(tally, 0, 1_000)
    assert not window.fits(tally, 0, 200)
    assert tally.estimate(0) == tally.total // BYTES_PER_TOKEN
    tally.recount(history, Words())
    assert tally.estimate(0) == tally.total
    assert window.fits(tally, 0, 200)
    assert window.start(history, tally, 0, 200) == 0


@given(groups=GROUPS)
def test_no_counter_exceeds_the_bound(groups):
    """That a byte holds at most one token is what makes skipping the vocabulary safe."""
    for number, drawn in enumerate(groups):
        for message in group_of(number, drawn):
            assert count_message(message, EstimatedCounter()) <= count_message(message, BYTES)


def test_a_lone_surrogate_has_three_bytes():
    """It is sent as U+FFFD."""
    assert BYTES.count("a\ud800中") == 7


def test_all_that_a_message_carries_is_counted():
    """Calls count with their ids, names and arguments; results as the model reads them; images at a flat rate."""
    call = ToolCall(id="t1.0", name="look", arguments='{"at": 1}', key="k")
    said = AssistantMessage(text="two words", calls=(call, call))
    assert count_message(said, Words()) == MESSAGE_TOKENS + 2 + 2 * (CALL_TOKENS + 3)
    result = ToolResult(call_id="t1.0", tool="look", outcome=Outcome.DONE, content="x" * 900, shown_chars=100)
    assert count_message(result, BYTES) == MESSAGE_TOKENS + CALL_TOKENS + len(result.text) < 300
    url = "data:image/png;base64," + "A" * 10_000
    seen = UserMessage(parts=(TextPart(text="see"), ImagePart(url=url), ImagePart(url=url, detail="low")))
    assert count_message(seen, Words()) == MESSAGE_TOKENS + 1 + IMAGE_TOKENS + LOW_IMAGE_TOKENS


def test_tools_count_as_the_json_they_are_sent_as():
    """Schemas may be read-only mappings; no tools cost nothing."""
    schema = MappingProxyType({"type": "object", "properties": MappingProxyType({})})
    tool = ToolDefinition(name="look", description="看", parameters=schema)
    text = '[{"name": "look", "description": "看", "parameters": {"type": "object", "properties": {}}}]'
    assert count_tools([tool], BYTES) == len(text.encode())
    assert count_tools([], BYTES) == 0


def test_a_tally_refuses_a_history_that_has_shrunk():
    """A fork has other messages, so its own tally."""
    tally = Tally()
    tally.extend_to((user("a"), user("b")))
    with pytest.raises(MisuseError, match=r"1 messages, but 2 were counted: a fork needs a Tally of its own"):
        tally.extend_to((user("a"),))


@pytest.mark.parametrize("share", [0, -1, 1.01, float("nan")])
def test_a_share_is_a_part(share):
    """A wrong share is told when the window is made."""
    with pytest.raises(MisuseError, match="above 0 and at most 1"):
        SlidingWindow(share=share)
