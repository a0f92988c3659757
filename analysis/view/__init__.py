"""A local page over every response of one or several runs, straight from their Parquet files: `ppo-repro view`."""
