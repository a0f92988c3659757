"""Where sampler and trainer part, found by experiment on this machine."""
