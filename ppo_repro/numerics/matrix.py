"""A matrix of weights as the kernels see it."""

from __future__ import annotations

import ctypes


class Matrix(ctypes.Structure):
    """`Matrix` of kernels.h: y = x w^T + bias. Offsets of gradients count floats; -1 if not trained."""

    _fields_ = (
        ("w", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("panels", ctypes.c_void_p),
        ("grad", ctypes.c_long),
        ("bias_grad", ctypes.c_long),
        ("n", ctypes.c_int),
        ("k", ctypes.c_int),
        ("transposed", ctypes.c_int),
        ("unused", ctypes.c_int),
    )
