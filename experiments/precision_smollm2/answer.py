"""Does a real model learn the same in precision high? `python -m experiments.precision_smollm2.answer [GRID]`; see
`experiments/answers.py`.
"""

from experiments.answers import study
from experiments.precision.answer import figure, tables

if __name__ == "__main__":
    study(__file__, tables, figure)
