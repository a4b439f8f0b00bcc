"""``python -m zero1ckpt``."""

from .cli.main import main

main()
