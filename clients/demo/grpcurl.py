"""The command with which anybody can look into a controller, and its run where grpcurl is found."""

import json
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

GRPCURL_TIMEOUT_S = 20.0
"""How long grpcurl may take."""


@dataclass(frozen=True, slots=True)
class GrpcurlCommand:
    """One call as grpcurl takes it."""

    address: str
    method: str
    body: str

    @property
    def shown(self) -> str:
        """The command as one would type it."""
        return shlex.join(["grpcurl", *self.arguments])

    @property
    def arguments(self) -> list[str]:
        """The command's arguments."""
        return ["-plaintext", "-d", self.body, self.address, self.method]

    def run(self, grpcurl: str) -> str:
        """Runs it and returns the JSON that it prints; RuntimeError where it fails."""
        done = subprocess.run(
            [grpcurl, *self.arguments],
            capture_output=True,
            text=True,
            timeout=GRPCURL_TIMEOUT_S,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"grpcurl failed: {done.stderr.strip()}")
        return done.stdout


def sequence_command(*, address: str, pool_name: str, sequence_id: str) -> GrpcurlCommand:
    """Shows a sequence's block table."""
    body = json.dumps({"pool_name": pool_name, "sequence_id": sequence_id})
    return GrpcurlCommand(address, "prefixd.v1.InspectService/GetSequence", body)


def find_grpcurl() -> str | None:
    """The program's path: beside this Python, or on the search path; None without it."""
    return shutil.which("grpcurl", path=str(Path(sys.executable).parent)) or shutil.which("grpcurl")


def block_ids_of(printed: str) -> tuple[int, ...]:
    """The first block table in grpcurl's answer."""
    tables = json.loads(printed)["tables"]
    return tuple(int(block_id) for block_id in tables[0]["block_ids"])
