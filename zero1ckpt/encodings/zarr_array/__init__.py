"""Arrays of zarr version 3 in sharded chunks that are runs of the flattened array, by way of tensorstore.

``metadata``: what a ``zarr.json`` says. ``shards``: one file of an array, its header, and writing it. ``reading``: a
source for the copy loop. Tensorstore is imported when a shard is written or read, never to look at metadata.
"""
