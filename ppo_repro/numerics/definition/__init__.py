"""Define the rules of the numerics in slow NumPy, one function per rule. The kernels in C compute the same bits.

The definition imports NumPy alone, and shares no line with the kernels. Tests compare definition and kernels bit for
bit. Kernels for other hardware can be compared in the same way. Arrays are float32 unless a docstring says otherwise.
T: positions of one sequence, H: width of the hidden states, [.., C]: any leading shape. After "Kernel:" a docstring
names the C functions that compute the same bits.

Read `product.py` first, then `gradients.py`, then follow a token through `network.py`.

====  =========================================================================  ======================================
rule  functions                                                                  where
====  =========================================================================  ======================================
1     `chain`, `exact`, `product`; for a layer `linear`, `linear_backward`       `product.py`, `linear.py`
2     `weight_addends`, `column_addends`, `row_addends`, `slot_of`,              `gradients.py`; for a whole model
      `slot_sums`, `join_slots`                                                  `network.gradients`
3     `row_sum`; for the norm of all gradients `sum_of_squares`, `global_norm`   `row_sums.py`, `optimizer.py`
4     `attend`, `attend_backward`                                                `attention.py`
5     `fma`, `exp32`, ..; `norm`, `rotate`, `activate`; `statistics`, ..         `elementary.py`, `rows.py`, `tokens.py`
      `frequencies`, `rotary_tables`                                             `rotary.py`
6     `adamw`                                                                    `optimizer.py`
7     `choose`, `mixture`, `mixture_backward`                                    `experts.py`
8     `gumbel_noise`, `sample`                                                   `sampling.py`
9     `mean`                                                                     `means.py`
====  =========================================================================  ======================================

`model.py` has the weights of a transformer, and `rounding.py` rounds deliberately to other number formats.
"""
