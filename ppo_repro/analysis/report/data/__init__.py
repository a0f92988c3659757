"""Read what a page shows: facts, curves and counts of runs, and the metrics of each kind of run."""
