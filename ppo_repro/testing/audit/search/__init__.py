"""Find the causes of a wrong side: `search` is the algorithm, ../code.md names the types."""
