"""What examines a machine or a run: plan its memory, probe the promises, bisect a difference, replay the records."""
