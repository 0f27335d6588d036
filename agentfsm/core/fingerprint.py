"""Fingerprint of an agent, stored with each run: short hashes that show which parts of the agent have changed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256

import attrs

from agentfsm.core.value import Value


def short_hash(text: str, digits: int) -> str:
    """Return the first hexadecimal digits of the SHA-256 of a text, which may contain lone surrogates."""
    return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:digits]


@attrs.frozen(kw_only=True)
class Fingerprint(Value):
    """Hashes of the parts that determine an agent's behaviour: 8 hexadecimal digits each."""

    instructions: str = ""
    """Hash of the instructions."""

    model: str = ""
    """Name of the model; empty if the fingerprint is unknown."""

    tools: Mapping[str, str] = attrs.field(factory=dict)
    """Hashes by tool name: of its description, its schema, whether it is read-only, idempotent and strict, and its
    labels. Other options, such as timeouts and approvals, do not count.
    """

    config: str = ""
    """Hash of limits, settings, guards, and the names of context policies, selector, judge and planner; empty if it is
    unknown.
    """

    prompts: Mapping[str, str] = attrs.field(factory=dict)
    """Version and digest of each prompt in the instructions of the run, by name: "1.4.0#0123456789ab"."""

    @property
    def digest(self) -> str:
        """Hash of all parts: 12 hexadecimal digits."""
        return short_hash(json.dumps(attrs.asdict(self), sort_keys=True), 12)

    def changes_since(self, before: Fingerprint) -> tuple[str, ...]:
        """Return the changes since an earlier fingerprint, a few words each; none if the earlier one is unknown."""
        if not before.model:
            return ()
        words = []
        if self.instructions != before.instructions:
            words.append("other instructions")
        names = sorted(self.prompts.keys() | before.prompts.keys())
        pairs = [(name, before.prompts.get(name, "none"), self.prompts.get(name, "none")) for name in names]
        words += [f"prompt {name} {then} -> {now}" for name, then, now in pairs if then != now]
        if self.model != before.model:
            words.append(f"model {before.model} -> {self.model}")
        if before.config and self.config != before.config:
            words.append("other limits, settings or policies")
        words += [f"tool {name} is gone" for name in before.tools if name not in self.tools]
        words += [f"tool {name} is new" for name in self.tools if name not in before.tools]
        words += [f"tool {name} has changed" for name, own in self.tools.items() if before.tools.get(name, own) != own]
        return tuple(words)
