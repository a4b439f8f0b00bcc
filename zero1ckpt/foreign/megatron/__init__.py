"""Megatron-Core's distributed-optimizer checkpoints. What the files look like: formats/foreign/megatron/NOTES.md."""
