"""Checkpoints that other systems wrote, described by the same catalogs as our own."""
