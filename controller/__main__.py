"""`python -m prefixd.controller`: runs a controller until SIGTERM or SIGINT.

Standard output carries one line of JSON, once every address answers:
`{"event": "controller_started", "addresses": ["127.0.0.1:7600"]}`. Logs go to standard error, one
JSON object per line. Exit status: 0 told to end, 1 cannot serve, 2 bad options.
"""

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

# The core's assertions guard other people's KV; -O would remove them.
if not __debug__:
    print("prefixd controller: refuses to run under python -O", file=sys.stderr)
    raise SystemExit(2)

# gRPC's own complaints about a taken port would stand beside our one clear line.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

from prefixd.controller.addresses import (
    CONTROLLER_ADDRESS_DEFAULT,
    AddressInvalid,
    AddressUnavailable,
    address,
)
from prefixd.controller.config import (
    HASH_ALGORITHM_DEFAULT,
    Config,
    ConfigInvalid,
    TlsConfig,
)
from prefixd.controller.core.limits import EVENT_BYTES_KEPT_MAX
from prefixd.controller.core.messages import EVICTION_POLICY_DEFAULT
from prefixd.controller.core.policies.registry import EVICTION_POLICIES
from prefixd.controller.logs import LOG_LEVELS, json_logger
from prefixd.controller.server import build, serve

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)


@app.command()
def main(
    *,
    listen: Annotated[
        list[str],
        typer.Option(help="Address to serve: HOST:PORT or unix:PATH; may be given again."),
    ] = [CONTROLLER_ADDRESS_DEFAULT],  # noqa: B006 - typer copies it
    hash_algorithm: Annotated[
        str,
        typer.Option(
            "--hash", help="Hash of the blocks: sha256_cbor, sha256, xxhash_cbor or xxhash."
        ),
    ] = HASH_ALGORITHM_DEFAULT,
    hash_seed: Annotated[
        str | None,
        typer.Option(
            help="Seed of every hash chain; without it PYTHONHASHSEED, where that is set; else "
            "sha256* starts from a fixed root and xxhash* from a random one.",
        ),
    ] = None,
    tls_certificate: Annotated[
        Path | None, typer.Option(help="PEM file with the server's certificate chain.")
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option(help="PEM file with the server's private key.")
    ] = None,
    tls_client_ca: Annotated[
        Path | None,
        typer.Option(help="PEM file of the authority whose certificates clients must show."),
    ] = None,
    allow_plaintext: Annotated[
        bool,
        typer.Option("--allow-plaintext", help="Serve other machines without TLS."),
    ] = False,
    log_level: Annotated[
        str, typer.Option(help=f"Least level to log: {', '.join(LOG_LEVELS)}.")
    ] = "info",
    event_bytes_kept: Annotated[
        int,
        typer.Option(
            help="Events kept for each pool's watchers, in bytes of digests, tokens and keys."
        ),
    ] = EVENT_BYTES_KEPT_MAX,
    eviction_policy: Annotated[
        str,
        typer.Option(
            help=f"Eviction policy of pools that name none: {', '.join(EVICTION_POLICIES)}."
        ),
    ] = EVICTION_POLICY_DEFAULT,
) -> None:
    """Run the controller: it plans block tables and knows every cached prefix."""
    try:
        if log_level not in LOG_LEVELS:
            raise ConfigInvalid(
                f"--log-level is {log_level!r}, but must be one of {', '.join(LOG_LEVELS)}"
            )
        config = Config(
            listen=tuple(address(text) for text in listen),
            hash_algorithm=hash_algorithm,
            hash_seed=hash_seed,
            tls=_tls(tls_certificate, tls_key, tls_client_ca),
            plaintext_allowed=allow_plaintext,
            event_bytes_kept_max=event_bytes_kept,
            eviction_policy=eviction_policy,
        )
        asyncio.run(_run(config, log_level))
    except (ConfigInvalid, AddressInvalid) as error:
        _fail(str(error), status=2)
    except (AddressUnavailable, OSError) as error:
        _fail(str(error), status=1)


async def _run(config: Config, log_level: str) -> None:
    await serve(build(config, log=json_logger(log_level)), on_started=_announce)


def _announce(addresses: Sequence[str]) -> None:
    print(json.dumps({"event": "controller_started", "addresses": list(addresses)}), flush=True)


def _tls(certificate: Path | None, key: Path | None, client_ca: Path | None) -> TlsConfig | None:
    if certificate is None and key is None and client_ca is None:
        return None
    if certificate is None or key is None:
        raise ConfigInvalid("TLS needs both --tls-certificate and --tls-key")
    return TlsConfig(certificate=certificate, private_key=key, client_ca=client_ca)


def _fail(message: str, *, status: int) -> None:
    print(f"prefixd controller: {message}", file=sys.stderr)
    raise typer.Exit(status)


if __name__ == "__main__":
    app()
