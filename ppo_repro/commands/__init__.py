"""Implement the command line: parse arguments, call the package, print results."""
