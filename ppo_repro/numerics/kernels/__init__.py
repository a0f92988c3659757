"""The exact numerics for CPUs, compiled by Numba: NumPy arrays in, the same bits as the eager code out.

Nothing here defines a number. The eager torch code in `numerics` is the specification, and every kernel must equal it
bit for bit. Kernels choose only the order of exact sums and where intermediate results are stored.
"""
