"""What Anthropic bills for requests by the published rules of its prompt cache, computed from their bodies."""

import json
from hashlib import sha256

import attrs

from agentfsm import Usage

LIVES_S = {"5m": 300.0, "1h": 3_600.0}
LOOKBACK_BLOCKS = 20
MIN_TOKENS = 1_024
CHARS_PER_TOKEN = 4


@attrs.define
class PromptCache:
    """The cache of one account. A prefix is kept from a mark on, and each hit keeps it for its time again.

    Source: platform.claude.com/docs/en/build-with-claude/prompt-caching: tools, system, messages; at most 4 marks; a
    hit up to 20 blocks before a mark; no entry below a minimum; what is behind the hit is written, for an hour up to
    the last mark of an hour, then for 5 minutes.
    """

    entries: dict[str, tuple[float, float]] = attrs.field(factory=dict)
    """Time until which a prefix is kept, and for how long at a time, by its hash."""

    def bill(self, body: dict, at_s: float = 0.0) -> Usage:
        """Return the input of a request that comes at this time."""
        blocks = [*body.get("tools", ()), *body.get("system", ())]
        blocks += [block for message in body["messages"] for block in message["content"]]
        digest, ends, marks, total = sha256(), [], [], 0
        for place, block in enumerate(blocks):
            text = json.dumps({name: value for name, value in block.items() if name != "cache_control"})
            digest.update(text.encode())
            total += len(text) // CHARS_PER_TOKEN
            ends.append((digest.hexdigest(), total))
            if (mark := block.get("cache_control")) is not None:
                marks.append((place, mark.get("ttl", "5m")))
        assert len(marks) <= 4
        assert [kind for _, kind in marks] == sorted(kind for _, kind in marks), "an hour stands before 5 minutes"
        read = 0
        for place, _ in marks:
            for key, tokens in ends[max(0, place - LOOKBACK_BLOCKS) : place + 1]:
                until, life_s = self.entries.get(key, (0.0, 0.0))
                if until > at_s:
                    self.entries[key], read = (at_s + life_s, life_s), max(read, tokens)
        written = kept = 0
        for place, kind in marks:
            key, tokens = ends[place]
            if tokens >= MIN_TOKENS and tokens > read:
                self.entries[key], written = (at_s + LIVES_S[kind], LIVES_S[kind]), tokens - read
                kept = written if kind == "1h" else kept
        return Usage(input_tokens=total, cached_tokens=read, cache_write_tokens=written, cache_write_1h_tokens=kept)
