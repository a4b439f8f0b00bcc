"""Bytes by key: where blobs are read from, and the staging area that makes a folder appear whole or not at all."""
