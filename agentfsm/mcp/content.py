"""What a server returns, as text for the model."""

from __future__ import annotations

import json
from collections.abc import Iterable

from mcp.types import CallToolResult, ContentBlock, TextContent


def text_of(result: CallToolResult) -> str:
    """Return the text of a result: its text blocks, or its structured content where there is no text."""
    texts = [block.text for block in result.content if isinstance(block, TextContent)]
    if not texts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join([*texts, *_others(result.content)])


def _others(blocks: Iterable[ContentBlock]) -> list[str]:
    return [f"[{block.type}]" for block in blocks if not isinstance(block, TextContent)]
