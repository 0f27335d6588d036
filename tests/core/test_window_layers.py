"""Shares of the window: the table, its moves, and the floors."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentfsm.core.window_layers import TaskKind, WindowDemand, WindowLayers, share_window


@pytest.mark.parametrize(
    ("task", "demand", "percents"),
    [
        ("simple", {}, (15, 15, 45, 25)),
        ("medium", {}, (20, 30, 30, 20)),
        ("complex", {}, (15, 40, 25, 20)),
        ("simple", {"has_documents": True}, (15, 25, 35, 25)),
        ("medium", {"has_documents": True}, (20, 40, 20, 20)),
        ("complex", {"has_documents": True}, (15, 50, 15, 20)),
        ("medium", {"messages": 30}, (20, 30, 30, 20)),
        ("simple", {"messages": 31}, (15, 15, 50, 20)),
        ("medium", {"messages": 31}, (20, 30, 35, 15)),
        ("complex", {"messages": 31}, (15, 40, 30, 15)),
        ("medium", {"messages": 31, "has_documents": True}, (20, 40, 25, 15)),
        # Floors: the reserve and the instructions have what they need, memory and history share the rest.
        ("medium", {"reserve_tokens": 1_000}, (20, 30, 30, 20)),
        ("medium", {"messages": 31, "reserve_tokens": 3_200}, (20, 30, 30, 20)),
        ("medium", {"reserve_tokens": 9_600}, (20, 10, 10, 60)),
        ("simple", {"instructions_tokens": 8_000}, (50, 6.25, 18.75, 25)),
        ("medium", {"instructions_tokens": 8_000, "reserve_tokens": 8_000}, (50, 0, 0, 50)),
    ],
)
def test_each_row(task, demand, percents):
    """Of a window of 16,000 tokens, as in the document."""
    layers = share_window(WindowDemand(window_tokens=16_000, task=TaskKind(task), **demand))
    instructions, memory, history, reserve = [round(160 * each) for each in percents]
    if demand.get("messages", 0) > 30 and "reserve_tokens" in demand:
        memory, history = 4_430, 5_170  # 60 % by 30 to 35
    assert layers.instructions == instructions
    assert layers.reserve == reserve
    assert (layers.memory, layers.history) == pytest.approx((memory, history), abs=2)


@given(
    st.builds(
        WindowDemand,
        window_tokens=st.integers(0, 10**6),
        instructions_tokens=st.integers(0, 10**6),
        reserve_tokens=st.integers(0, 10**6),
        messages=st.integers(0, 60),
        has_documents=st.booleans(),
        task=st.sampled_from(TaskKind),
    )
)
def test_the_window_is_never_exceeded_by_what_can_be_chosen(demand):
    """Memory and history have what instructions and reserve leave, and no less than nothing."""
    layers = share_window(demand)
    assert min(layers.memory, layers.history) >= 0
    fixed = layers.instructions + layers.reserve
    assert layers.memory + layers.history <= max(0, demand.window_tokens - fixed)
    assert layers.reserve >= demand.reserve_tokens
    assert layers.instructions >= demand.instructions_tokens


def test_nothing_fits_into_no_window():
    """Then the memory has no room."""
    demand = WindowDemand(window_tokens=100, reserve_tokens=4_096)
    assert share_window(demand) == WindowLayers(instructions=20, reserve=4_096)
