"""Kernels over tensors: stores, copies and attention on paged KV, each with a torch twin."""
