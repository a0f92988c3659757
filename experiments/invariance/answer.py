"""Do deterministic numerics change learning? `python -m experiments.invariance.answer [GRID]`; see
`experiments/answers.py`.
"""

from __future__ import annotations

import pandas as pd

from experiments.answers import equality_table, settings_figure, study


def tables(results: pd.DataFrame) -> list[pd.DataFrame]:
    return [equality_table(results, "numerics", "deterministic", "native")]


if __name__ == "__main__":
    study(__file__, tables, settings_figure("numerics", "mean_accuracy"))
