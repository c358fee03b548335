"""A certificate authority for tests, with a server's and a client's certificate."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

NEW_KEY = ("-newkey", "rsa:2048", "-nodes", "-keyout")


def write_certificates(folder: Path) -> Path:
    """Writes ca, server and client as NAME.pem and NAME.key; skips the test without openssl."""
    try:
        _openssl(folder, "version")
    except FileNotFoundError:
        pytest.skip("no openssl command to make certificates with")
    (folder / "names.txt").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    authority = ("req", "-x509", *NEW_KEY, "ca.key", "-out", "ca.pem")
    _openssl(folder, *authority, "-days", "2", "-subj", "/CN=ca")
    signing = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "names.txt")
    for name in ("server", "client"):
        request = ("req", *NEW_KEY, f"{name}.key", "-out", f"{name}.csr")
        _openssl(folder, *request, "-subj", "/CN=localhost")
        signed = ("x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.pem")
        _openssl(folder, *signed, "-days", "2", *signing)
    return folder


def _openssl(folder: Path, *command: str) -> None:
    subprocess.run(["openssl", *command], cwd=folder, check=True, capture_output=True)
