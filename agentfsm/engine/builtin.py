"""Tools that the engine brings along; a tool of the user's by the same name takes their place."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Final

from agentfsm.core.errors import ModelRetry
from agentfsm.engine.context import RunContext
from agentfsm.engine.tools import Tool, make_tool

if TYPE_CHECKING:
    from agentfsm.core.run import Run

READ_RESULT: Final = "read_result"
PAGE_CHARS: Final = 12_000
# Of a page: some 3,000 tokens of usual text.
PAGE_BYTES: Final = 4 * PAGE_CHARS
# As many as they may have, and so as many tokens at most: a page is not cut again.


@cache
def read_result() -> Tool[..., Any]:
    """Return the tool that reads what a long result did not show; made late, since that brings pydantic."""
    return make_tool(
        _read_result,
        name=READ_RESULT,
        description=_ABOUT,
        read_only=True,
        shown_tokens=PAGE_BYTES,
        shown_bytes=2 * PAGE_BYTES,
    )


ID_CHARS: Final = 40
# Of an id that does not exist, told back to the model.
_ABOUT: Final = "Read on in an earlier result of which only the beginning and the end were shown."


async def _read_result(ctx: RunContext[Any], result: str, start: int = 0) -> str:
    """Return a page of a result.

    Args:
        ctx: Knows the results of the run.
        result: The id that the note in the result names, such as "t3.0".
        start: The first character to read, from 0.
    """
    whole = ctx.kept(result)
    if whole is None:
        shown = repr(result[:ID_CHARS])
        raise ModelRetry(f"there is no result {shown} in this run; take the id from the note in the result")
    if not 0 <= start < len(whole):
        raise ModelRetry(f"result {result} has the characters 0 to {len(whole) - 1}: start among them")
    end = min(start + PAGE_CHARS, len(whole))
    more = f"\n[... {len(whole) - end} more characters: go on from character {end} ...]" if end < len(whole) else ""
    return whole[start:end] + more


def builtin(run: Run, name: str) -> Tool[..., Any] | None:
    """Return the tool of that name that the engine offers in this run, or None."""
    return read_result() if name == READ_RESULT and run.has_cut else None
