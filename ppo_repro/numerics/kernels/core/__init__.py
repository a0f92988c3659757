"""How kernels are compiled and run, and the scalar and vector functions they share."""
