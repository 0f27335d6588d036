"""The worlds that the tests run in: which of them the normal run leaves out, and that it is told which not to."""

import pytest

from tests.support.worlds import are_named, left_out


def of(file, name, *worlds):
    return [f"{file}::{name}[{world}]" for world in worlds]


FOUR = ("asyncio-memory", "asyncio-sqlite", "trio-memory", "trio-sqlite")


def test_the_cases_of_a_file_take_turns():
    """Two worlds for each case, with both loops and both stores; the next case has the other two."""
    one, two = of("tests/engine/test_a.py", "test_1", *FOUR), of("tests/engine/test_a.py", "test_2", *FOUR)
    other = of("tests/engine/test_b.py", "test_3", *FOUR)
    kept = {*one, *two, *other} - left_out([*one, *two, *other])
    assert kept == {one[0], one[3], two[1], two[2], other[0], other[3]}


def test_the_parameters_of_a_case_are_no_world():
    """Each value is a case of its own, wherever the words of the world stand among the values."""
    ids = [f"tests/engine/test_a.py::test_1[{loop}-{n}-{store}]" for n in "xy" for loop, store in map(split, FOUR)]
    assert set(ids) - left_out(ids) == {ids[0], ids[3], ids[5], ids[6]}


def split(world):
    return world.split("-")


def test_around_the_engine_one_loop_is_enough():
    """A store is a parameter like any other there."""
    ids = of("tests/models/test_a.py", "test_1", "asyncio-sqlite", "trio-sqlite", "asyncio-memory", "trio-memory")
    assert set(ids) - left_out(ids) == {ids[0], ids[3]}


@pytest.mark.parametrize(
    "ids",
    [
        ["tests/engine/test_a.py::test_1"],
        of("tests/engine/test_a.py", "test_1", "asyncio-memory", "asyncio-sqlite"),
        of("tests/engine/test_a.py", "test_1", "asyncio", "trio"),
        of("tests/models/test_a.py", "test_1", "trio"),
        of("tests/engine/test_a.py", "test_1", "memory", "sqlite"),
        of("tests/engine/test_a.py", "test_1", "trio", "trio-sqlite"),
    ],
)
def test_what_is_not_there_in_all_worlds_is_kept(ids):
    """A test that takes no loop or no store, or one of them only, says so by its parameters."""
    assert left_out(ids) == set()


@pytest.mark.parametrize(
    ("args", "keyword", "named"),
    [
        (["tests"], "", False),
        (["tests/engine/test_parked.py"], "parked and not slow", False),
        (["tests/engine/test_parked.py::test_a"], "", True),
        (["tests/engine"], "trio and sqlite", True),
        (["tests/engine"], "not trio", True),
    ],
)
def test_who_names_a_world_gets_it(args, keyword, named):
    """By a node id, or by -k."""
    assert are_named(args, keyword) is named
