"""The numbers by which the audit judges, with their reasons. Errors are recorded minus predicted log-probs, in nats.

The comment above a number says first what the number limits, and then why it has this value.
"""

from __future__ import annotations

# Is a side right? (`judge`)
# A right side is at most 10 times as far from the model (rms) as stock float32. Other float32 kernels are 1 to 3 times
# as far.
RIGHT = 10.0
# No token of a right side is off by more than 10 times the limit of the rms. Large rounding errors are rare.
TOKEN_OVER_RMS = 10.0
# If a token is further off, the side is still right if its largest error is at most 3 times stock float32's.
STOCK_LARGEST = 3.0
# Stock float32 counts as at least this far from the model: a log-prob near 1 nat has this rounding error in float32.
LEAST_FLOOR = 2.0**-24
# A wrong side's numbers may be off by this part of their rms: 4 times the rounding error of a float32 number.
RECORDED = 2.0**-22
# No error counts more than this. An infinite error can then be summed.
CLAMP = 1e3

# Does a cause explain a wrong side? (`measure.is_rounding`)
# A cause must leave less than half of the errors. If the errors are hardly larger than rounding, a wrong cause can make
# them a little smaller by chance.
OF_ERRORS = 0.5
# A cause that rounds to 16 bits leaves at most this part of its rounding: another order of sums rounds otherwise.
# Dumps with the cause left up to 0.26. Dumps with another cause left 0.64 and more.
OF_ROUNDING = 0.4

# Are errors 16-bit rounding with other bits? (`measure.likeness`, `search/other_bits`)
# bfloat16 has 3 bits less than float16, so its rounding errors are 8 times as large. Errors have the size of a format's
# rounding up to halfway to the other format: a factor of 8 ** 0.5.
FORMATS_APART = 8.0
# The format is named up to a third of the way to the other format. Beyond that the verdict is "16-bit rounding".
SURE_OF_FORMAT = FORMATS_APART ** (1 / 3)
# A correlation of at least 3 standard errors is no chance.
NO_CHANCE = 3.0
# A part in bfloat16 is named too if its errors correlate nearly as well. Parts of one layer have similar errors.
ALIKE = 0.8

# Which distribution are log-probs of? (`sides`)
# Log-probs count as processed only if the sides are e times nearer to it, all sides together, than to the tempered one.
UNLIKE_TEMPERED = 1.0
# A distribution that drops a drawn token must be e times nearer than one that keeps all drawn tokens.
DROPS_A_TOKEN = 1.0

# Which tokens can be judged?
# A log-prob of exactly 0 counts as recorded only if the token's probability is at least this.
SURE = 0.99
# A pattern needs at least this many numbers. Fewer numbers have a format, or a cause of their own, by chance.
FEWEST_NUMBERS = 8
# A lower limit is tried only if at least this many numbers are above it. If all numbers were equal, a lower limit would
# explain them, whatever made them equal.
VARIED = 6
# Stock float32 computes the first responses, with at most this many tokens, or the first response alone. The error of
# its rms is then about 2 %.
FLOOR_TOKENS = 2048
# A cause must predict at least 4 of the tokens that it is tried on, and at least a third of them. Some causes do not
# predict all tokens: if log-probs are moved by some positions, the tokens at an end of the response have no prediction.
FEWEST_PREDICTED, PREDICTED_ONE_IN = 4, 3

# On which tokens are causes tried? All causes are tried on a few tokens, the best ones on more.
# A window has this many tokens. At most this many right tokens come before its first wrong one.
WINDOW = FEWEST_NUMBERS
# A window has at least this many tokens when the best causes are tried.
LONG_WINDOW = 4 * WINDOW
# All causes are tried on this many tokens. Fewer tokens suffice if WINDOW of them are wrong.
SCREENED = 3 * WINDOW
# The best causes are tried on this many tokens.
TRIED = 256
# A cause is one of the best if it leaves at most this many times the largest rounding. The rms of few tokens varies.
NEAR = 3.0
# This many of the best causes are tried on more tokens. If no cause is good enough, this many of the nearest ones are.
ON_ALL, WORST = 12, 3
# If no cause explains all tokens, causes are tried on the wrong tokens alone, unless these are more than this part: the
# few others may be right by chance.
WRONG_ALONE = 0.95

# What explains wrong draws? (`draws.draw_causes`)
# A cause is named if it makes the draws at least e^10 times as likely.
LIKELIER = 10.0
# A cause within e^3 of the best one is named beside it.
AS_LIKELY = 3.0

# What is said? (`judge`, `search/hypothesis`, `facts`)
# The hypotheses that explain a side with the fewest deviations are named. A cause counts as one deviation.
# A parameter counts as half a deviation: its value adapts to the errors of another cause.
PER_PARAMETER = 0.5
# A pattern, such as another order, counts as a cause with a parameter. Patterns are vague.
PATTERN = 1.0 + PER_PARAMETER
# A hypothesis that explains nothing is left out if a simpler one leaves the same rms, up to this part.
SAME_LEFT = 1e-3
# A fitted value that is this near to the value of another row counts as that row.
SAME_VALUE = 5e-4
# At most this many hypotheses that explain a side equally well are named. With more, the cause is unknown.
NAMED = 3
# At most this many hypotheses are listed.
SHOWN = 8
# Two sides have the same numbers if they are nearer to each other than this part of their distance from the model.
AGREE = 0.1
# "Right up to a token, then not" is said if at least this part of the later tokens is wrong.
WRONG_AFTER = 0.8
# A sentence about the form of errors needs at least this many wrong tokens.
FEWEST_FACTS = 3
# Errors are equal, or proportional, up to this many times the tolerance: each has a rounding error of its own.
SAME_ERROR = 3.0
# A number is said to occur often if at least this part of the wrong tokens has it.
OFTEN = 0.1
