"""What all kernels share: compilation, threads, memory, scalar and vector functions, rows on grids."""
