"""Does a real model learn the same in precision high? `python -m experiments.precision_smollm2.answer [GRID]`; see
`experiments/answers.py`.
"""

from experiments.answers import settings_figure, study
from experiments.precision.answer import tables

if __name__ == "__main__":
    study(__file__, tables, settings_figure("numerics", "mean_accuracy"))
