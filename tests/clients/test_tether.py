"""A server does not outlive the process that started it."""

import json
import os
import select
import signal
import subprocess
import sys

ENDS_WITHIN_S = 30.0
PARENT = """
import json, signal
from prefixd.clients.processes import ServerProcess

controller = ServerProcess(
    "controller",
    module="prefixd.controller",
    arguments=("--listen", "127.0.0.1:0"),
    report=print,
)
controller.address(timeout_s=30)
print(json.dumps(controller.pid), flush=True)
signal.pause()
"""


def test_a_killed_parent_leaves_no_server_behind() -> None:
    """SIGKILL gives a parent no chance to stop its servers; they see their input end."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert parent.stdout is not None
    with parent, parent.stdout:
        server = os.pidfd_open(json.loads(parent.stdout.readline()))
        try:
            parent.send_signal(signal.SIGKILL)
            ended, _, _ = select.select([server], [], [], ENDS_WITHIN_S)
            assert ended, "the controller outlived its parent"
        finally:
            os.close(server)
