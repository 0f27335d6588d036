"""The messages of a run: a sequence like a tuple, which grows without being copied."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest

from agentfsm import IllegalTransitionError, SystemMessage
from agentfsm.core import events as e
from agentfsm.core.history import History, as_history
from agentfsm.core.run import begin_run
from tests.support.sample_runs import acting, answer, finished, header, round_trip, thinking


def said(*texts: str) -> tuple[SystemMessage, ...]:
    """Return messages of these texts."""
    return tuple([SystemMessage(text=text) for text in texts])


ABC = said("a", "b", "c")


def grown(*messages: SystemMessage) -> History:
    """Return a history that has grown one by one, and whose list has grown beyond it."""
    history = History()
    for message in messages:
        history = history.with_appended(message)
    history.with_appended(*said("beyond"))
    return history


@pytest.mark.parametrize("history", [History(ABC), grown(*ABC)], ids=["made", "grown"])
def test_it_is_like_a_tuple(history):
    """It compares, hashes, shows itself, is sliced and read as the tuple of its messages."""
    assert (len(history), list(history), [*reversed(history)]) == (3, [*ABC], [*ABC[::-1]])
    assert history == ABC
    assert ABC == history  # noqa: SIM300  a tuple on the left asks it as well
    assert history == History(ABC) == as_history(history)
    assert history != ABC[:2]
    assert history != [*ABC]
    assert (hash(history), repr(history)) == (hash(ABC), repr(ABC))
    assert (history[0], history[-1], history[True]) == (ABC[0], ABC[-1], ABC[1])
    for cut in (slice(1, None), slice(None, -1), slice(2, 1), slice(None, None, -1), slice(0, 9, 2), slice(-9, 2)):
        assert history[cut] == ABC[cut]
        assert type(history[cut]) is tuple
    assert history + said("d") == ABC + said("d")
    assert said("d") + history == said("d") + ABC
    assert ABC[1] in history
    assert (history.index(ABC[2]), history.count(ABC[0]), bool(history), bool(History())) == (2, 1, True, False)
    for place in (3, -4):
        with pytest.raises(IndexError):
            history[place]


@pytest.mark.parametrize("twin", [copy.copy, copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])  # noqa: S301  our own
def test_a_copy_is_one_of_its_own(twin):
    """It holds the messages, and not what another has added behind them."""
    history = grown(*ABC)
    other = twin(history)
    assert other == history
    assert other.with_appended(*said("x"))[3:] == said("x")


def test_what_goes_another_way_leaves_the_others_as_they_are():
    """Two that go on from the same beginning do not see each other, whichever comes first and however far it goes."""
    root = History(ABC)
    first = root.with_appended(*said("1"))
    second = root.with_appended(*said("2"))
    again = root.with_appended(*said("1"))
    third = first.with_appended(*said("3", "4"))
    shorter = first.with_appended(*said("3"))
    assert (root, first, again, second) == (ABC, ABC + said("1"), ABC + said("1"), ABC + said("2"))
    assert (third, shorter) == (ABC + said("1", "3", "4"), ABC + said("1", "3"))
    assert shorter.with_appended(*said("5")) == ABC + said("1", "3", "5")
    assert third == ABC + said("1", "3", "4")
    assert root.with_appended() == root


def test_threads_that_go_on_from_one_history_do_not_meet():
    """Each gets what it has added itself, whoever was first."""
    texts = [str(number) for number in range(64)]
    with ThreadPoolExecutor(8) as threads:
        for _ in range(50):
            root = History(ABC)
            found = threads.map(
                lambda text, root=root: root.with_appended(*said(text)).with_appended(*said(text)), texts
            )
            assert [history[3:] for history in found] == [said(text, text) for text in texts]


def test_runs_that_go_on_from_one_another_share_their_messages():
    """The messages of the first are those of the second, and two that follow the same one keep apart."""
    first = thinking().apply(e.AnswerGiven(message=answer()))
    one, two = [begin_run(header(id=name, after="r1"), first).apply(e.Observed()) for name in ("r2", "r3")]
    one, two = one.apply(e.AnswerGiven(message=answer("one"))), two.apply(e.AnswerGiven(message=answer("two")))
    assert (first.answer, one.answer, two.answer) == ("Sunny.", "one", "two")
    assert one.messages[: one.own_start] == two.messages[: two.own_start] == first.messages


def test_an_older_value_goes_its_own_way():
    """A version of a run from which another event is applied changes nothing of the newer one, and folds alike."""
    run = thinking().fold(round_trip(1))
    newer = run.fold([e.Observed(), *round_trip(2)])
    other = run.fold([e.Observed(), *round_trip(2, content="another way")])
    assert newer.messages[-1].content == "ok"
    assert other.messages[-1].content == "another way"
    assert newer == thinking().fold([*round_trip(1), e.Observed(), *round_trip(2)])


def test_a_fold_that_fails_leaves_the_run_untouched():
    """An event in the middle that does not fit raises, and the run is what it was."""
    run = acting()
    before = dict(vars(run))
    with pytest.raises(IllegalTransitionError):
        run.fold([finished(), e.Accepted()])
    assert vars(run) == before
