"""The worker: paged KV tensors, attention, Hugging Face models, continuous batching."""
