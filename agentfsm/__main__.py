"""Run the command line as the process: `agentfsm`, or `python -m agentfsm`."""

import signal
import sys

from agentfsm.cli import main


def run() -> None:
    """Run the command line of the process, and exit with its code."""
    code = main()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a Ctrl-C while Python exits needs no traceback
    sys.exit(code)


if __name__ == "__main__":
    run()
