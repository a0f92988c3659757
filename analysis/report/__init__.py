"""What happened in a run, or in the runs of a grid? One self-contained HTML page."""
