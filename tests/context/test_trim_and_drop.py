"""The policies that ask nobody: what each leaves out, what it never does, and where it stops."""

import json

import attrs
import pytest

from agentfsm import AssistantMessage, ImagePart, MisuseError, Outcome, SystemMessage, ToolResult
from agentfsm.context import (
    Cut,
    DropAcknowledgements,
    DropRepeatedErrors,
    PriorityRetention,
    SlidingWindow,
    TrimResults,
)
from agentfsm.engine.model_calls.message_groups import group_messages
from agentfsm.ports import GroupKind
from agentfsm.ports.context import count_tokens
from tests.support.histories import room_of, run_of, tally_of, turn, user
from tests.support.word_counter import WordCounter

LONG = [m for number in range(1, 21) for m in turn(number, [200])]


async def left_of(policy, history, tokens, limit=None):
    """Return the groups before and after."""
    run = run_of(tuple(history))
    groups = group_messages(run, tally_of(run, WordCounter()))
    return groups, list(await policy.compact(groups, room_of(run, tokens, limit)))


def said(groups):
    return [group.messages[0].text for group in groups]


async def test_trim_shortens_the_oldest_first_and_stops_when_it_fits():
    """The newest are left as they are, whatever they hold."""
    before, after = await left_of(TrimResults(), [user("task"), *LONG], tokens=4_000)
    cut = [new is not old for old, new in zip(before, after, strict=True)]
    assert cut == [False, *[True] * sum(cut), *[False] * (20 - sum(cut))]
    assert count_tokens(after) <= 4_000 < count_tokens(after) + 150
    _, all_of_them = await left_of(TrimResults(keep=3), [user("task"), *LONG], tokens=10, limit=9_000)
    assert [group.segment.chars for group in all_of_them] == [None] + [500] * 17 + [None] * 3
    assert all(len(m.text) < 700 for group in all_of_them[1:18] for m in group.messages)


async def test_trim_keeps_the_first_items_of_a_list_and_a_count():
    """As many as asked for."""
    _, after = await left_of(TrimResults(items=3, keep=0), [user("task"), *turn(1, [90], kind="list"), user("x")], 10)
    told = json.loads(after[1].messages[1].content)
    assert (told["total_count"], told["showing_first"], len(told["records"])) == (90, 3, 3)


async def test_trim_leaves_what_nobody_has_read_unless_it_cannot_fit():
    """Then as much of each result as will do."""
    history = [user("task"), *LONG[:2], *turn(9, [2_000, 2_000])]
    _, after = await left_of(TrimResults(keep=0), history, tokens=10, limit=5_000)
    assert [m.shown_chars for m in after[-1].messages[1:]] == [None, None]
    _, tight = await left_of(TrimResults(keep=0), history, tokens=10, limit=1_500)
    assert [m.shown_chars for m in tight[-1].messages[1:]] == [2_000, 2_000]
    _, none = await left_of(TrimResults(keep=0), history, tokens=10, limit=10)
    assert [m.shown_chars for m in none[-1].messages[1:]] == [500, 500]


async def test_trim_changes_nothing_where_nothing_is_long():
    """So that the next policy begins with what there was."""
    before, after = await left_of(TrimResults(), [user("task"), *[m for n in range(9) for m in turn(n, [3])]], 10)
    assert all(new is old for old, new in zip(before, after, strict=True))


async def test_the_window_drops_the_oldest():
    """And neither the task, nor what is new."""
    history = [AssistantMessage(text="hello"), user("task"), *LONG, SystemMessage(text="a note")]
    before, after = await left_of(SlidingWindow(), history, tokens=1_000)
    assert said(after)[0] == "task"
    assert after[1:] == list(before[-len(after) + 1 :])
    assert count_tokens(after) <= 1_000 < count_tokens(after) + before[2].tokens
    _, least = await left_of(SlidingWindow(), history, tokens=10, limit=10)
    assert said(least) == ["task", "a note"]
    _, unread = await left_of(SlidingWindow(), history, tokens=10, limit=500)
    assert said(unread) == ["task", "turn 20", "a note"]


async def test_cut_counts_messages_and_leaves_groups_whole():
    """The task and the newest group stay beyond the number."""
    history = [user("task"), *turn(1, [1, 1, 1]), *turn(2, [1]), user("x")]
    assert said((await left_of(Cut(3), history, 10))[1]) == ["task", "turn 2", "x"]
    assert said((await left_of(Cut(6), history, 10))[1]) == ["task", "turn 2", "x"]
    assert said((await left_of(Cut(7), history, 10))[1]) == ["task", "turn 1", "turn 2", "x"]
    assert said((await left_of(Cut(1), history[:-3], 10))[1]) == ["task", "turn 1"]


async def test_what_matters_least_goes_first():
    """Errors, results, the model's words, the user's, answers, notes; of equals the oldest; order is kept."""
    history = [
        user("task"),
        SystemMessage(text="a note"),
        user("a wish"),
        AssistantMessage(text="an answer"),
        user("another"),
        AssistantMessage(text="a remark"),
        *turn(1, [30]),
        *turn(2, [30], Outcome.FAILED),
        *turn(3, [30]),
        *turn(4, [30]),
    ]
    before, _ = await left_of(PriorityRetention(), history, 10_000)
    total = count_tokens(before)
    gone = []
    for tokens in range(total, 0, -1):
        _, after = await left_of(PriorityRetention(), history, tokens)
        gone += [text for text in said(before) if text not in said(after) and text not in gone]
        assert said(after) == [text for text in said(before) if text in said(after)]
    assert gone == ["turn 2", "turn 1", "turn 3", "a remark", "a wish", "another", "an answer", "a note"]
    _, other = await left_of(PriorityRetention({GroupKind.RESULTS: 99, "user": 0}), history, total - 1)
    assert "a wish" not in said(other)


@pytest.mark.parametrize("scores", [{"users": 1}, {"user": "much"}, ["user"], 3])
def test_scores_are_numbers_by_kind(scores):
    """What is not is told when the policy is made."""
    with pytest.raises(MisuseError, match="give numbers by kind, out of system, final, user"):
        PriorityRetention(scores)


async def test_an_error_is_told_once():
    """The first time; what differs, and what the model has not read, stays."""
    fails = [m for number in range(1, 5) for m in turn(number, [4], Outcome.FAILED, "same")]
    other = turn(5, [4], Outcome.FAILED)
    works = [m for number in (6, 7) for m in turn(number, [4], kind="same")]
    _, after = await left_of(DropRepeatedErrors(), [user("task"), *fails, *other, *works], 10)
    assert said(after) == ["task", "turn 1", "turn 5", "turn 6", "turn 7"]
    _, unread = await left_of(DropRepeatedErrors(), [user("task"), *fails], 10)
    assert said(unread) == ["task", "turn 1", "turn 4"]


@pytest.mark.parametrize("words", ["OK", "ok, got it!", "好的，明白了。", "Sure! 👍", "Understood.", "  Done\n", "…"])  # noqa: RUF001
async def test_bare_acknowledgements_go(words):
    """In any spelling."""
    history = [user("task"), AssistantMessage(text=words), user("more")]
    assert said((await left_of(DropAcknowledgements(), history, 10))[1]) == ["task", "more"]


@pytest.mark.parametrize("words", ["42", "Paris", "No.", "OK: Paris", "sure " * 9, "Done, 3 failed"])
async def test_short_answers_stay(words):
    """To be short is not to say nothing."""
    history = [user("task"), AssistantMessage(text=words), user("more")]
    assert len((await left_of(DropAcknowledgements(), history, 10))[1]) == 3


async def test_only_the_models_words_are_acknowledgements():
    """A user's yes decides something, and a call is no word."""
    history = [
        user("task"),
        *[m if isinstance(m, ToolResult) else AssistantMessage(text="ok", calls=m.calls) for m in turn(1, [1])],
        user("ok"),
        user("x"),
    ]
    assert len((await left_of(DropAcknowledgements(), history, 10))[1]) == 4


@pytest.mark.parametrize(
    "make",
    [
        lambda: TrimResults(chars=0),
        lambda: TrimResults(items=-1),
        lambda: TrimResults(keep=True),
        lambda: Cut(0),
        lambda: Cut("3"),
        lambda: DropAcknowledgements(chars=0.5),
    ],
)
def test_numbers_are_checked(make):
    """When the policy is made."""
    with pytest.raises(MisuseError, match="give a whole number"):
        make()


def seen(number, parts, words=5):
    """A turn whose result holds so many images."""
    reply, shown = turn(number, [words])
    return [reply, attrs.evolve(shown, parts=(IMAGE,) * parts)]


IMAGE = ImagePart(url="https://a.b/c.png")


async def test_trim_takes_pictures_off_what_was_read():
    """An old screenshot says less than the newest, and costs as much."""
    history = [user("task"), *[m for number in range(1, 6) for m in seen(number, 1)], user("x")]
    before, after = await left_of(TrimResults(), history, tokens=3 * 1_600)
    assert [len(group.messages[-1].parts) for group in after[1:-1]] == [0, 0, 0, 1, 1]
    assert count_tokens(after) <= 3 * 1_600 < count_tokens(before)
    assert all("not shown any more: image 1" in group.messages[-1].text for group in after[1:4])


async def test_trim_leaves_unread_pictures_as_long_as_they_fit():
    """And the first of them where not all do."""
    history = [user("task"), *seen(1, 4)]
    for limit, kept in ((9_000, 4), (5_000, 2), (2_500, 1), (1_000, 0)):
        _, after = await left_of(TrimResults(), history, tokens=10, limit=limit)
        assert len(after[-1].messages[-1].parts) == kept
        assert count_tokens(after) <= limit
