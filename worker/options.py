"""The command line's options: one type per option, with its help."""

from pathlib import Path
from typing import Annotated

import typer

from prefixd.worker.logs import LOG_LEVELS

ControllerOption = Annotated[
    str, typer.Option(help="Address of the controller: HOST:PORT or unix:PATH.")
]
ControllerCaOption = Annotated[
    Path | None,
    typer.Option(help="PEM file of the authority of the controller's certificate: speak TLS."),
]
ControllerCertificateOption = Annotated[
    Path | None, typer.Option(help="PEM file with the certificate to show to the controller.")
]
ControllerKeyOption = Annotated[
    Path | None, typer.Option(help="PEM file with the private key of that certificate.")
]
ListenOption = Annotated[
    list[str],
    typer.Option(help="Address to serve: HOST:PORT or unix:PATH; may be given again."),
]
TlsCertificateOption = Annotated[
    Path | None, typer.Option(help="PEM file with the worker's certificate chain.")
]
TlsKeyOption = Annotated[Path | None, typer.Option(help="PEM file with the worker's private key.")]
TlsClientCaOption = Annotated[
    Path | None,
    typer.Option(help="PEM file of the authority whose certificates clients must show."),
]
AllowPlaintextOption = Annotated[
    bool, typer.Option("--allow-plaintext", help="Serve other machines without TLS.")
]
ModelOption = Annotated[
    str, typer.Option(help="Folder of a model, or the name of a model that can be fetched.")
]
ModelVersionOption = Annotated[
    str, typer.Option(help="Version of the model's weights; part of every block's identity.")
]
LoraOption = Annotated[
    list[str],
    typer.Option(
        metavar="NAME[@VERSION]=FOLDER",
        help="LoRA adapter in peft's format that requests can name; may be given again.",
    ),
]
SubBlockReuseOption = Annotated[
    bool,
    typer.Option(
        "--sub-block-reuse", help="Reuse cached tokens to the last, not whole blocks only."
    ),
]
MergeDuplicatesOption = Annotated[
    bool, typer.Option("--merge-duplicates", help="Let equal blocks become one once written.")
]
EvictionPolicyOption = Annotated[
    str,
    typer.Option(
        help="Eviction policy of the pool: lru, or retention, which heeds what clients say about "
        "later use; by default the controller's."
    ),
]
PoolNameOption = Annotated[
    str, typer.Option(help="Name of the pool at the controller; by default the model's name.")
]
BlockSizeOption = Annotated[int, typer.Option(help="Token slots per block.")]
BlockCountOption = Annotated[
    int,
    typer.Option(help="Blocks of the pool, one of them for padding; 0: sized by the memory."),
]
GpuMemoryUtilizationOption = Annotated[
    float,
    typer.Option(
        help="Share of a GPU's memory that the worker may use, weights and pool included."
    ),
]
CudaGraphsOption = Annotated[
    bool,
    typer.Option(
        "--cuda-graphs/--no-cuda-graphs",
        help="Record steps of decode on a GPU, to start each of them at once.",
    ),
]
AttentionBackendOption = Annotated[
    str,
    typer.Option(
        help="How to compute attention: torch, triton (GPUs), strict (bitwise reproducible),"
        " reference (slow); auto: triton on a GPU, else torch."
    ),
]
DeviceOption = Annotated[
    str, typer.Option(help="cpu, cuda or cuda:N; auto: a GPU where there is one, else the CPU.")
]
DtypeOption = Annotated[
    str,
    typer.Option(
        help="What to compute in: float32, bfloat16 or float16; auto: float32 on the CPU, bfloat16"
        " on a GPU."
    ),
]
KvDtypeOption = Annotated[
    str,
    typer.Option(
        help="How the pool stores K and V: int8 or fp8, 8 bits per element; auto: as --dtype says."
    ),
]
TensorParallelOption = Annotated[
    int,
    typer.Option(
        help="Processes to split the model over, by heads: as many GPUs, or parts of the CPU."
    ),
]
ThreadsOption = Annotated[int, typer.Option(help="Threads of the forward pass on the CPU.")]
ChunkTokenCountMaxOption = Annotated[
    int, typer.Option(help="Most tokens that one step prefills of one sequence.")
]
RunningSequenceCountMaxOption = Annotated[
    int, typer.Option(help="Most sequences that run at a time; others wait.")
]
TokenBudgetOption = Annotated[int, typer.Option(help="Most tokens that one step computes.")]
LeaseMsOption = Annotated[
    int,
    typer.Option(help="How long the pool outlives a lost worker; 0: as the controller says."),
]
ControllerWaitSOption = Annotated[
    float, typer.Option(help="How long running answers wait for a lost controller.")
]
LogLevelOption = Annotated[str, typer.Option(help=f"Least level to log: {', '.join(LOG_LEVELS)}.")]
