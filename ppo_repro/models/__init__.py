"""Policy, value model and reference: made, loaded, laid out, run forward."""
