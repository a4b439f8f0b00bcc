"""Training with ZeRO-1: buffers, collectives, shards, and the optimizer that joins them."""
