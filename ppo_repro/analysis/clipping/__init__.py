"""What did the clip do to tokens and steps? Every function reads the frames of `update_rows`."""
