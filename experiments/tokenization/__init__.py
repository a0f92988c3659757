"""Test whether the tokenizer matters: grid files of studies, and an exact table of invariant quantities."""
