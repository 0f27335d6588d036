"""How large a reply of a model may be, whoever wrote the model.

Each bound is many times what a model writes in one reply: 128,000 tokens are some 600,000 characters, and OpenAI takes
at most 128 calls in one message. What is larger comes from a server that does not end, or from a model that repeats
itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from agentfsm.ports import Reply

# Calls of tools in one reply. Each is an entry of one record of the journal, and costs the event loop about 0.1 ms.
MAX_REPLY_CALLS: Final = 512
TOO_MANY_CALLS: Final = f"more than {MAX_REPLY_CALLS:,} calls"

# Characters of one reply: of its text, its thinking and the arguments of its calls together.
MAX_REPLY_CHARS: Final = 8 * 2**20
TOO_MANY_CHARS: Final = f"more than {MAX_REPLY_CHARS:,} characters of text, thinking and arguments"

# Characters of what the provider wants back beside them, such as pictures: 24 MB of them in base64. A record of the
# journal holds twice that.
MAX_NATIVE_REPLY_CHARS: Final = 32 * 2**20

# A reply of at most MAX_CALLS calls whose text and whose arguments of each call are no longer than these is within
# MAX_CHARS, and need not be counted.
USUAL_TEXT_CHARS: Final = MAX_REPLY_CHARS // 2
USUAL_ARGUMENTS_CHARS: Final = MAX_REPLY_CHARS // 2 // MAX_REPLY_CALLS


def find_reply_excess(reply: Reply) -> str | None:
    """Say which bound a reply is over, with its figure; None where it is within all."""
    if len(reply.calls) > MAX_REPLY_CALLS:
        return TOO_MANY_CALLS
    chars = len(reply.text) + sum(len(call.arguments) for call in reply.calls)
    if chars > MAX_REPLY_CHARS:
        return TOO_MANY_CHARS
    if reply.native is not None and len(reply.native.content) > MAX_NATIVE_REPLY_CHARS:
        return f"more than {MAX_NATIVE_REPLY_CHARS:,} characters in native"
    return None
