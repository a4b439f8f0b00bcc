"""Ranges, layouts, checksums, dtypes and errors: pure values, no I/O and no torch."""
