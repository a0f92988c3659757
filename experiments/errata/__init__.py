"""Test claims of teaching material: each program shows a claim as it is taught, and the correct statement."""
