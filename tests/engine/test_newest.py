"""The dict that keeps its newest entries."""

from agentfsm._lib.newest import Newest


def test_the_entry_set_longest_ago_goes_first() -> None:
    kept: Newest[str, int] = Newest(2)
    kept["a"], kept["b"] = 1, 2
    kept["a"] = 3
    kept.update(c=4)
    assert dict(kept) == {"a": 3, "c": 4}
    assert kept.pop("a") == 3
    kept["d"] = 5
    assert list(kept) == ["c", "d"]
