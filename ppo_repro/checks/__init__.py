"""Check a machine or a run: plan the memory, probe the promises, bisect a difference, replay the records."""
