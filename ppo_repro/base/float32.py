"""The range of float32, without NumPy or torch."""

FLOAT32_MAX = 3.4028234663852886e38
