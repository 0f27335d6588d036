"""Run the command line as the process: `agentfsm`, or `python -m agentfsm`."""

import signal
import sys

from agentfsm.cli import main


def run() -> None:
    """Run the words of the process, and end it."""
    code = main()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # what is left is Python's own end, and has nothing to tell
    sys.exit(code)


if __name__ == "__main__":
    run()
