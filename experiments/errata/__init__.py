"""Claims of teaching material held against reality: each program states a claim as it is taught and what is so."""
