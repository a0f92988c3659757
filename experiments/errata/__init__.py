"""Claims of teaching material, tested: each program states a claim as it is taught, and what holds instead."""
