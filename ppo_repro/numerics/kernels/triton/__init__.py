"""Kernels in Triton for CUDA devices; private to `numerics`. They define no number: each equals the eager code."""
