"""`agentfsm feedback`: an opinion of a run, in `show` and in the list."""


def test_feedback_is_recorded_and_shown(here):
    """On a run that is over, and on one that waits."""
    here.run("app:adder", "1 + 1", "--id", "r1")
    here.run("app:asker", "Ask.", "--id", "q", code=3)
    assert here("feedback", "r1", "--rating", "1", "--comment", "wrong\naccount", "--by", "ann") == ""
    assert here.err == "feedback on run r1 is recorded\n"
    here("feedback", "q", "--rating", "5", "--by", "")
    assert here.err == "feedback on run q is recorded\n"
    [line] = [line for line in here("show", "r1").splitlines() if line.startswith("feedback")]
    assert line.startswith("feedback 1/5 by ann, 2")
    assert line.endswith(": wrong account")
    [shown] = here.json("show", "r1")["feedback"]
    assert (shown["rating"], shown["comment"], shown["by"]) == (1, "wrong\naccount", "ann")
    assert "feedback" not in here("show", "r1", "--at", "1")


def test_runs_are_selected_by_their_rating(here):
    """The newest rating counts, and is in the list."""
    for run_id, rating in (("bad", "2"), ("good", "4"), ("none", "")):
        here.run("app:adder", "1 + 1", "--id", run_id)
        if rating:
            assert here.json("feedback", run_id, "--rating", rating)["id"] == run_id
    assert [run["id"] for run in here.json("runs", "--max-rating", "3")["runs"]] == ["bad"]
    assert [run["rating"] for run in here.json("runs")["runs"]] == [None, 4, 2]


def test_a_wrong_rating_is_refused(here):
    """And a run that is not there."""
    here.run("app:adder", "1 + 1", "--id", "r1")
    for rating in ("0", "6", "good"):
        here("feedback", "r1", "--rating", rating, code=2)
        assert "a whole number from 1 (bad) to 5 (good); for thumbs, 1 and 5" in here.err
    here("feedback", "nowhere", "--rating", "3", code=2)
    assert "holds no run 'nowhere'" in here.err
