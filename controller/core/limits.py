"""Named limits of the controller, as `GetServerInfo` reports them."""

STEPS_IN_FLIGHT_MAX = 4
"""Steps of one pool that may be unconfirmed at a time."""
BLOCK_SIZE_DEFAULT = 16
"""Token slots per block where a driver names none."""
BLOCK_SIZE_MAX = 4_096
"""Token slots per block."""
BLOCK_COUNT_MAX = 4_194_304
"""Blocks of one pool: listings read the whole pool at one moment, in one message."""
SLOT_COUNT_MAX = 2**31 - 1
"""Slots of one pool: slots travel as int32."""
TOKENS_PER_SEQUENCE_MAX = 4_194_304
"""Tokens of one sequence."""
SEQUENCES_PER_POOL_MAX = 65_536
"""Open sequences of one pool."""
POOLS_MAX = 1_024
"""Registered pools."""
DECODE_ROWS_MAX = 65_536
"""Rows of one decode entry."""
SEQUENCE_ID_BYTES_MAX = 256
"""Length of a sequence id in UTF-8."""
CACHE_SALT_LENGTH_MAX = 128
"""Length of a cache salt in characters."""
IDENTIFIER_LENGTH_MAX = 256
"""Length of a multimodal identifier, or of a LoRA name or version, in characters."""
LORA_PATH_LENGTH_MAX = 4_096
"""Length of a LoRA path in characters."""
POOL_NAME_LENGTH_MAX = 128
"""Length of a pool's name in characters."""
POOL_TEXT_LENGTH_MAX = 4_096
"""Length of a pool's model name, KV format or worker address in characters."""
MULTIMODAL_ITEMS_MAX = 4_096
"""Multimodal items of one sequence."""
LEASE_MS_DEFAULT = 15_000
"""Lease of a pool whose driver names none."""
LEASE_MS_MIN = 100
"""Shortest lease."""
LEASE_MS_MAX = 600_000
"""Longest lease."""
MESSAGE_BYTES_MAX = 64 * 1024 * 1024
"""Size of one gRPC message."""
HIT_RATE_SEQUENCES = 1_000
"""Sequences that the recent hit rate covers."""
EVENT_BYTES_KEPT_MAX = 16 * 1024 * 1024
"""Events of one pool that are kept for watchers, in bytes of digests, tokens and keys."""
EVENT_BLOCKS_MAX = 2_048
"""Blocks of one event."""
EVENT_TOKENS_MAX = 262_144
"""Tokens of one event."""
RETENTION_PRIORITY_MAX = 7
"""Priority of a retention hint."""
RETENTION_MS_MAX = 7 * 24 * 3_600_000
"""How long a retention hint may hold."""
GROUPS_PER_POOL_MAX = 64
"""KV groups of one pool."""
