"""Loads an unmodified Hugging Face decoder and runs it on paged KV."""
