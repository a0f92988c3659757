"""Models of which several processes hold one part each."""
