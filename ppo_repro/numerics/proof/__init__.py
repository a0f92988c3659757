"""Backends prove themselves: before the first use on a machine their kernels are compared with the specification."""
