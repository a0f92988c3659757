"""Execute, resume, repeat and check runs as a whole."""
