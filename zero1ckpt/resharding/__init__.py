"""The one copy loop: joins two catalogs into a plan, and executes it."""
