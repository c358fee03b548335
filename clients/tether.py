"""`python -m prefixd.clients.tether MODULE ARGUMENTS`: a server that ends with its parent.

Runs a module as `python -m MODULE ARGUMENTS` does, and sends SIGTERM to itself once standard input
ends. A parent that holds the other end of that pipe cannot leave the server behind, however it
dies.
"""

import os
import runpy
import signal
import sys
import threading

READ_BYTES = 4_096
"""Bytes read at a time; what they say does not matter."""


def _end_with_input() -> None:
    # Not sys.stdin: its lock would be held while the interpreter ends.
    while os.read(0, READ_BYTES):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    """Runs the module of the command line."""
    del sys.argv[0]
    threading.Thread(target=_end_with_input, name="tether", daemon=True).start()
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
