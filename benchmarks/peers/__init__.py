"""The frameworks that users would pick instead, each a contender in an environment of its own.

`python -m benchmarks peers [NAME ...] [ROW ...]`: make the environments, measure each peer in its own and agentfsm in
ours, one after the other, and print one table. NAME is a module of this folder ("langgraph"), ROW a row ("turns") or a
line of one ("crowd:cpu"). The figures go to .agentfsm/bench-peers.json, and into docs/benchmarks.md when all peers and
all rows were measured.
"""

from __future__ import annotations


def main(*words: str) -> int:
    """Measure."""
    from benchmarks.peers import driver  # noqa: PLC0415  a peer imports this folder too, and needs no driver

    return driver.main(*words)
