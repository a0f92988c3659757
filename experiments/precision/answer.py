"""Does a policy learn the same in precision high? `python -m experiments.precision.answer [GRID]`; see
`experiments/answers.py`.
"""

from __future__ import annotations

import pandas as pd

from experiments.answers import equality_table, settings_figure, study


def tables(results: pd.DataFrame) -> list[pd.DataFrame]:
    others = [setting for setting in results["numerics"].unique() if setting != "highest"]
    return [equality_table(results, "numerics", "highest", other) for other in others]


if __name__ == "__main__":
    study(__file__, tables, settings_figure("numerics", "mean_accuracy"))
