"""What happened in a run, or in the runs of a grid? The answer is one self-contained HTML page."""
