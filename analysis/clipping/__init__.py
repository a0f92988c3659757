"""What the clip did to tokens, words, buckets and steps."""
