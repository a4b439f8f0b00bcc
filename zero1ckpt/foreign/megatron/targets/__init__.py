"""Megatron checkpoints as targets of a reshard: what goes into which file, at which byte. Nothing is written here."""
