"""Serve a local page over every response of one or several runs, from their Parquet files: `ppo-repro view`."""
