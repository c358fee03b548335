"""The parts of ``bench/gpu.py``: what a GPU computes, and how fast.

- ``correctness``: every kernel variant against the oracle.
- ``decode``, ``prefill``: paged attention by itself, against what the device can do at all.
- ``answers``: a random model of a billion parameters on the worker's runner.
- ``running``: runs parts in order and keeps what each gave; ``results`` prints and writes it.

Nothing here needs more than kernels and the model part of the worker, so that it runs uninstalled
on a machine that has torch, triton and transformers only.
"""
