"""Publishes a pool's events as vLLM does, so that KV-aware routers can follow prefixd pools.

Needs pyzmq and msgpack: `pip install ".[events]"` in a checkout.
"""
