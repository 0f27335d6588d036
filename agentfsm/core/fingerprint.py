"""What an agent was when a run was begun, in few enough bytes to keep with each run: enough to say what has changed."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256

import attrs

from agentfsm.core.value import Value


def short_hash(text: str, digits: int) -> str:
    """Return the first hexadecimal digits of a text's hash; of any text, lone surrogates included."""
    return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:digits]


@attrs.frozen(kw_only=True)
class Fingerprint(Value):
    """Hashes of what shapes an agent's behaviour: 8 hexadecimal digits each."""

    instructions: str = ""
    model: str = ""
    """The model's name."""

    tools: Mapping[str, str] = attrs.field(factory=dict)
    """By the tool's name: of its description, its schema, and what its author declares about running it."""

    def changes_since(self, before: Fingerprint) -> tuple[str, ...]:
        """Say what is not as it was, a few words each; nothing where it is not known how it was."""
        if not before.model:
            return ()
        words = []
        if self.instructions != before.instructions:
            words.append("other instructions")
        if self.model != before.model:
            words.append(f"model {before.model} -> {self.model}")
        words += [f"tool {name} is gone" for name in before.tools if name not in self.tools]
        words += [f"tool {name} is new" for name in self.tools if name not in before.tools]
        words += [f"tool {name} has changed" for name, own in self.tools.items() if before.tools.get(name, own) != own]
        return tuple(words)
