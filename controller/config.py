"""What a controller can be told at its start."""

from dataclasses import dataclass
from pathlib import Path

from prefixd.controller.addresses import CONTROLLER_ADDRESS_DEFAULT, Address, address
from prefixd.controller.core.limits import EVENT_BYTES_KEPT_MAX
from prefixd.controller.core.messages import EVICTION_POLICY_DEFAULT
from prefixd.controller.core.policies.registry import EVICTION_POLICIES

HASH_ALGORITHM_DEFAULT = "sha256_cbor"
"""The only cryptographic algorithm of the four that any language can reproduce."""


class ConfigInvalid(Exception):
    """The options contradict each other or cannot be used."""


@dataclass(frozen=True, slots=True)
class TlsConfig:
    """PEM files of the server's identity; `client_ca` makes clients show a certificate too."""

    certificate: Path
    private_key: Path
    client_ca: Path | None = None


@dataclass(frozen=True, slots=True)
class Config:
    """Options of a controller process.

    `hash_seed`: None takes vLLM's rules for a process without PYTHONHASHSEED (S1).
    `event_bytes_kept_max`: events kept for each pool's watchers, in bytes of digests, tokens and
    keys.
    `eviction_policy`: that of pools whose drivers name none.
    """

    listen: tuple[Address, ...] = (address(CONTROLLER_ADDRESS_DEFAULT),)
    hash_algorithm: str = HASH_ALGORITHM_DEFAULT
    hash_seed: str | None = None
    tls: TlsConfig | None = None
    plaintext_allowed: bool = False
    log_level: str = "info"
    event_bytes_kept_max: int = EVENT_BYTES_KEPT_MAX
    eviction_policy: str = EVICTION_POLICY_DEFAULT

    def check(self) -> None:
        """Raises ConfigInvalid where options contradict each other."""
        if not self.listen:
            raise ConfigInvalid("at least one listen address is needed")
        if self.eviction_policy not in EVICTION_POLICIES:
            raise ConfigInvalid(
                f"--eviction-policy is {self.eviction_policy!r}, not one of "
                f"{', '.join(EVICTION_POLICIES)}"
            )
        if self.event_bytes_kept_max < 0:
            raise ConfigInvalid("--event-bytes-kept must not be negative")
        if self.tls is None and not self.plaintext_allowed:
            for one in self.listen:
                if not one.is_local:
                    raise ConfigInvalid(
                        f"{one.target} can be reached from other machines: give --tls-certificate "
                        "and --tls-key, or say --allow-plaintext"
                    )
