"""Native formats, one file each."""
