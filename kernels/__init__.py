"""Kernels over tensors: stores, copies and attention on paged KV, each with a plain torch twin.

The way in, from a pass to its numbers:

- ``work_list``: the sequences of a pass, and who reads what of them, as plain arrays.
- ``planner``: makes work lists; ``grouping`` finds the splits that sequences share.
- ``work_buffers``: work lists on a device, in static buffers where a graph needs them.
- ``attention`` and ``reduction`` compute a work list, ``store`` and ``copy_blocks`` write the pool;
  ``reference`` holds the twins of all four.
- ``layer_kv``: the pool of one layer, and its 8-bit formats; ``options``: what a layer asks for.
- ``tiling``: tile sizes, a table; ``launch``: a kernel launch as a value.
- ``variants``, ``compilation``, ``report``: what every kernel takes on every GPU, without one.
- ``oracle``: what attention is, in float64, over pools full of NaN.

``paged_kv`` writes pools as plain torch, ``kernel_writer`` by the kernels. Only the kernels, that
module and the report import triton.
"""
