"""docs/failures/changed-code.md says what becomes of a run in flight, as programs that are changed have shown."""

from __future__ import annotations

import logging

from tests.support.change_tables import PAGE, build_tables, write_tables


async def test_the_tables_are_what_changed_programs_do(anyio_backend, caplog):
    """Each cell is the outcome of a run that began under one program and continued under another."""
    caplog.set_level(logging.CRITICAL, "agentfsm")
    page, tables = PAGE.read_text(encoding="utf-8"), await build_tables()
    assert write_tables(page, tables) == page, "the tables are out of date: run `make diagram`"
    cells = [cell for rows in tables.values() for row in rows for cell in row]
    assert not [cell for cell in cells if "OTHER KEY" in cell or "no result" in cell]
