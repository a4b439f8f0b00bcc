"""ZeRO-1 training and checkpoints whose optimizer state moves between any data-parallel and bucket sizes."""
