"""What other frameworks would have logged: their published keys, derived again from our records."""
