"""Known damages: how each arises, what it looks like, whether it can be mended. One file a damage."""
