"""The exact numerics again, fused for CPUs in Numba: NumPy arrays in, the reference's bits out.

Nothing here defines a number. The eager torch code in `numerics` is the specification; every kernel must
equal it bit for bit, and chooses only the order of exact sums and where intermediate results live.
"""
