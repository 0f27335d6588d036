"""Run the command line: `python -m agentfsm`."""

import sys

from agentfsm.cli import main

if __name__ == "__main__":
    sys.exit(main())
