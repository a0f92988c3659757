"""One self-contained HTML page about a recorded run, or about the runs of a grid."""
