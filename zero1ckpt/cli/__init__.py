"""The command line: one file a verb without logic, rows as values, and tables and JSON made from the same rows."""
