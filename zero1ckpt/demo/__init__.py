"""The demo: a small GPT is trained, saved, inspected, resharded and resumed on another number of ranks."""
