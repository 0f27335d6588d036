"""A process that asks a server of endless answers, and tells the error of each and the most memory that it took.

    python -m tests.support.endless_client BACKEND URL

BACKEND is "asyncio" or "trio", and URL is where an `EndlessServer` of `endless_replies` listens.
"""

import json
import re
import resource
import sys
from pathlib import Path

import anyio

from agentfsm import ModelError, TextPart, UserMessage
from agentfsm.ports import Request
from tests.support.endless_replies import ANSWERS, ERRORS, adapter_of

REQUEST = Request(instructions="", messages=(UserMessage(parts=(TextPart(text="Hello"),)),))


def _find_peak_kib() -> int:
    """Return the most memory that this program took. The `ru_maxrss` of Linux includes that of the forking process."""
    status = Path("/proc/self/status")
    if status.exists() and (
        found := re.search(r"^VmHWM:\s+(\d+) kB", status.read_text(encoding="ascii"), re.MULTILINE)
    ):
        return int(found[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


async def told(url: str, name: str) -> tuple[str, str]:
    """Ask for one answer; return the kind of the error and its words."""
    adapter, streamed = adapter_of(name)
    model = adapter("m", base_url=f"{url}/{name}", api_key="none")
    try:
        await model.reply(REQUEST, (lambda _chunk: None) if streamed else None)
    except ModelError as error:
        return type(error).__name__, str(error)
    finally:
        await model.aclose()
    return "", ""


async def main(url: str) -> None:
    """Ask for all of them."""
    errors = {name: await told(url, name) for name in ANSWERS | ERRORS}
    peak_kib = _find_peak_kib()
    sys.stdout.write(json.dumps({"errors": errors, "peak_mib": peak_kib / 1024}))


if __name__ == "__main__":
    anyio.run(main, sys.argv[2], backend=sys.argv[1])
