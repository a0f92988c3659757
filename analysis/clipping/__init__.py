"""What did the clip do to tokens, words, buckets and steps? All of it is read from the frame of `update_rows`."""
