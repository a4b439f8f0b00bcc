"""What a checkpoint is: state, placement, catalogs, the manifest and the protocols. No torch."""
