"""Every limit by which the audit judges, with its reason.

Errors are recorded minus right or predicted log-probs, in nats.
"""

from __future__ import annotations

# Is a side right, and does a cause explain it? (`measure.explains`)
# up to 10 times stock float32's rms distance: other kernels of float32 are 1 to 3 times as far
RIGHT = 10.0
# a token may be off by 10 times this limit of the rms. Errors of rounding have short tails
TOKEN_OVER_RMS = 10.0
# a side with a token further off is right only if its largest error is at most 3 times stock float32's
STOCK_LARGEST = 3.0
# a cause leaves less than this part of the errors: near rounding another cause could leave less by chance
OF_ERRORS = 0.5
# a cause that rounds to 16 bits leaves at most this part of its rounding: another order of sums rounds otherwise.
# Dumps of the cause leave up to 0.26, dumps of another cause 0.64 and more
OF_ROUNDING = 0.4
# an error has at most so many nats, so that an infinite one can be summed
CLAMP = 1e3

# Are errors 16-bit rounding with other bits? (`measure.likeness`)
# bfloat16 has 3 bits less than float16, so their errors are 8 times apart
FORMATS_APART = 8.0
# errors are of one format rather than of either if their sizes are at most this factor apart
SURE_OF_FORMAT = FORMATS_APART ** (1 / 3)
# standard errors of a correlation that are no chance
NO_CHANCE = 3.0
# another part in bfloat16 is named too if its errors correlate nearly as well; parts of one layer are that alike
ALIKE = 0.8

# Which tokens can be judged?
# a token of this probability may have a log-prob that rounds to 0; any other 0 was not recorded
SURE = 0.99
# numbers from which a pattern shows: fewer have a format, or a cause of their own, by chance
FEWEST_NUMBERS = 8
# a lower limit is tried only if so many numbers are above it: else it would explain any constant
VARIED = 6
# response tokens on which stock float32 is measured: its rms has an error of about 2 %
FLOOR_TOKENS = 2048

# a cause is judged only by its numbers for at least so many tokens, and for one in so many of the tried tokens. A shift
# predicts fewer tokens than there are, and so does an input that keeps only the last turn
FEWEST_PREDICTED, PREDICTED_ONE_IN = 4, 3

# On which tokens are causes tried? All causes on a few tokens, the best ones on some more.
# tokens of a window, and at most so many right ones before its first wrong one
WINDOW = FEWEST_NUMBERS
# tokens that causes are screened on, unless WINDOW wrong ones come first
SCREENED = 3 * WINDOW
# tokens that the best causes are tried on. So many wrong tokens would suffice too
TRIED = 256
# a cause passes the screening if it leaves at most so many times the largest rounding. The rms of a few tokens varies
NEAR = 3.0
# at most so many of the causes that pass are tried on more tokens. If none passes, so many of the nearest ones are
ON_ALL, WORST = 12, 3
# wrong tokens get a cause of their own if they are less than this part of the tokens. Else the right ones are chance
WRONG_ALONE = 0.95

# What explains wrong draws? (`draws.DrawCauses`)
# a cause makes them e^10 times as likely
LIKELIER = 10.0
# a cause within e^3 of the best is named beside it
AS_LIKELY = 3.0

# What is said? The hypotheses that explain a side with the fewest deviations; a cause counts 1
# a parameter counts half a cause: its value adapts to the errors of another cause
PER_PARAMETER = 0.5
# a cause that leaves the same rms as a simpler one, up to this part, explains nothing more
SAME_LEFT = 1e-3
# a fitted value so near to another row's value is that row
SAME_VALUE = 5e-4
# 16-bit rounding with other bits, or another order, counts as a cause with a parameter: such a pattern is vague
PATTERN = 1.0 + PER_PARAMETER
# so many hypotheses that explain a side equally well are named; with more the cause is unknown
NAMED = 3
# hypotheses that are listed
SHOWN = 8
# sides that are nearer to each other than this part of their distance have the same numbers
AGREE = 0.1
# "right up to a token, then not" needs this part of the later tokens to be wrong
WRONG_AFTER = 0.8
