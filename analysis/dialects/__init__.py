"""What would other frameworks have logged? Their published keys, computed from our records."""
