"""Groups and layouts: what a run shows comes apart in pieces that hold together, and goes into the journal again."""

from collections.abc import Sequence

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentfsm import AssistantMessage, MisuseError, Outcome, SystemMessage
from agentfsm.context import SlidingWindow, TrimResults
from agentfsm.core import events as e
from agentfsm.core.history import Removed, Span, Summarised, render_segments
from agentfsm.core.messages import Message
from agentfsm.engine.model_calls.message_groups import build_segments, group_messages
from agentfsm.ports import Context, GroupKind
from agentfsm.ports.context import count_tokens
from tests.support.histories import GROUPS, history_of, room_of, run_of, tally_of, turn, user
from tests.support.word_counter import WordCounter


def compaction(start, head):
    return e.Compacted(start=start, head=head, tokens_before=9, tokens_after=8, why="full")


@given(groups=GROUPS, picks=st.lists(st.sampled_from(["keep", "drop", "cut"]), min_size=80, max_size=80))
def test_what_is_left_is_what_is_shown(groups, picks):
    """Whichever groups are dropped or shortened: the layout shows exactly the others, and counts each message once."""
    run = run_of((user("task"), *history_of(groups), user("newest")))
    for _ in range(2):  # the second time in what the first has left
        tally = tally_of(run, WordCounter())
        before = group_messages(run, tally)
        assert [m for group in before for m in group.messages] == [m for m in run.shown if not is_gap(m)]
        assert count_tokens(before) + sum(4 + len(m.text.split()) for m in run.shown if is_gap(m)) == tally.shown_tokens
        room = room_of(run, 10)
        left = [
            room.shorten(group, 60, 2) if pick == "cut" and not group.is_newest else group
            for group, pick in zip(before, picks, strict=False)
            if pick != "drop" or group.is_task or group.is_newest
        ]
        left += list(before[len(picks) :])
        start, head = build_segments(left, len(run.messages))
        after = run.apply(compaction(start, head))
        assert [m for group in left for m in group.messages] == [m for m in after.shown if not is_gap(m)]
        assert sum(entry.end - entry.start if isinstance(entry, Span) else entry.count for entry in head) == start
        assert tally_of(after, WordCounter()).shown_tokens == sum(room.count(m) for m in after.shown)
        run, picks = after, picks[::-1]


def is_gap(message: Message) -> bool:
    return isinstance(message, SystemMessage) and message.text.endswith("removed to fit the context window.]")


def test_a_group_says_what_it_is():
    """By who spoke, and how it ended; an answer is final where the user went on from it."""
    history = (
        user("task"),
        *turn(1, [1, 1]),
        *turn(2, [1, 1], Outcome.FAILED),
        AssistantMessage(text="so it is"),
        user("go on"),
        AssistantMessage(text="thinking aloud"),
        SystemMessage(text="a note"),
        *turn(3, [1]),
        user("and"),
    )
    groups = group_messages(run_of(history), tally_of(run_of(history), WordCounter()))
    kinds = [
        GroupKind.USER,
        GroupKind.RESULTS,
        GroupKind.ERROR,
        GroupKind.FINAL,
        GroupKind.USER,
        GroupKind.OTHER,
        GroupKind.SYSTEM,
        GroupKind.RESULTS,
        GroupKind.USER,
    ]
    assert [group.kind for group in groups] == kinds
    assert [group.is_task for group in groups].index(True) == 0
    assert [group.is_unread for group in groups] == [False] * 7 + [True] * 2
    assert [group.is_newest for group in groups] == [False] * 8 + [True]
    assert [group.message_count for group in groups] == [1, 3, 3, 1, 1, 1, 1, 2, 1]


def test_neighbours_that_are_shown_alike_are_one_entry():
    """So the event stays small, however many turns there are."""
    history = (user("task"), *(m for number in range(1, 50) for m in turn(number, [30])), user("newest"))
    run = run_of(history)
    groups = group_messages(run, tally_of(run, WordCounter()))
    room = room_of(run, 10)
    left = [groups[0], *[room.shorten(group, 40, 0) for group in groups[9:40]], *groups[40:]]
    start, head = build_segments(left, len(history))
    assert head == (Span(start=0, end=1), Removed(count=16), Span(start=17, end=79, chars=40))
    assert start == 79


def test_the_note_on_the_gap_goes_first_before_the_models_own_words():
    """A provider wants somebody else to begin."""
    history = (user("old"), AssistantMessage(text="yes"), user("task"), *turn(1, [1]), *turn(2, [1]), user("newest"))
    run = run_of(history)
    groups = group_messages(run, tally_of(run, WordCounter()))
    start, head = build_segments([groups[1], *groups[-2:]], len(history))
    assert head == (Removed(count=4), Span(start=1, end=2))
    assert start == 5
    assert build_segments([groups[0], *groups[-1:]], len(history))[1] == (Span(start=0, end=1), Removed(count=6))


def test_a_summary_is_a_group_and_stays_one():
    """It counts the messages that it stands for, and the next compaction finds it."""
    history = (user("task"), *(m for number in range(1, 9) for m in turn(number, [3])), user("newest"))
    run = run_of(history)
    groups = group_messages(run, tally_of(run, WordCounter()))
    told = room_of(run, 10).build_summary(groups[1:5], "four turns went by")
    start, head = build_segments([groups[0], told, *groups[6:]], len(history))
    assert head == (Span(start=0, end=1), Summarised(count=8, text="four turns went by"), Removed(count=2))
    after = run.apply(compaction(start, head))
    again = group_messages(after, tally_of(after, WordCounter()))
    assert again[1] == told
    assert again[1].is_summary
    assert build_segments(again, len(history)) == (start, head)


def test_shortened_again_it_is_as_the_journal_will_show_it():
    """What is shown is made of the history, and not of what was shown before."""
    history = (user("task"), *turn(1, [300], kind="list"), user("newest"))
    run = run_of(history)
    room = room_of(run, 10)
    group = group_messages(run, tally_of(run, WordCounter()))[1]
    twice = room.shorten(room.shorten(group, 2_000, 5), 60, 5)
    assert twice.messages == render_segments((twice.segment,), run.messages)
    assert twice.tokens == sum(room.count(m) for m in twice.messages)
    assert room.shorten(twice, 90, 5) is twice


def test_the_hash_of_a_request_tells_heads_apart():
    """Where all follows from the start, it is what it was before there were heads."""
    history = (user("task"), *turn(1, [300]), *turn(2, [3]), user("newest"))
    plain = run_of(history, compaction(3, None))
    same = run_of(history, compaction(3, (Span(start=0, end=1), Removed(count=2))))
    cut = run_of(history, compaction(3, (Span(start=0, end=1), Span(start=1, end=3, chars=50))))
    told = run_of(history, compaction(3, (Span(start=0, end=1), Summarised(count=2, text="a"))))
    other = run_of(history, compaction(3, (Span(start=0, end=1), Summarised(count=2, text="b"))))
    digests = [tally_of(run, WordCounter()).digest for run in (plain, same, cut, told, other, run_of(history))]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 5


@pytest.mark.parametrize("wrong", [[SlidingWindow], ["window"], [None], [TrimResults(), 3]])
def test_what_is_no_policy_is_told_when_the_context_is_made(wrong: Sequence[object]):
    """With what to give."""
    with pytest.raises(MisuseError, match=r"is not a context policy: give for example \[TrimResults\(\)"):
        Context(wrong)


@pytest.mark.parametrize("share", [0, -1, 1.01, float("nan")])
def test_a_share_is_a_part(share):
    """A wrong one is told when the context is made."""
    with pytest.raises(MisuseError, match="above 0 and up to 1"):
        Context([SlidingWindow()], share=share)


def test_a_share_may_be_all_there_is():
    """The upper end of the range belongs to it."""
    assert Context([SlidingWindow()], share=1).share == 1


def test_a_span_of_an_old_journal_is_read_without_its_earlier_messages():
    """A store folds a run for its facts without what it goes on from: there is nothing to show, and nothing fails."""
    run = run_of((user("task"),), compaction(1, (Span(start=40, end=60, chars=5), Removed(count=3))))
    assert [type(message) for message in run.compacted_messages] == [SystemMessage]
    assert attrs.evolve(run, messages=()).shown == run.compacted_messages
