"""Many runs of one question: a grid file, its cells, and what runs them."""
