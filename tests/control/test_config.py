"""Control configurations: presets, round trips, one line per mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from ppo_repro.config.files import dump_yaml, load_control_config
from ppo_repro.errors import UserError
from tests.support.control import PRESETS, small_control


@pytest.mark.parametrize("path", PRESETS, ids=lambda p: p.stem)
def test_presets_are_read_and_written(path: Path, tmp_path: Path) -> None:
    config = load_control_config(path)
    assert config.experiment == path.stem
    copy = tmp_path / "config.yaml"
    copy.write_text(dump_yaml(config))
    assert load_control_config(copy) == config and load_control_config(copy).digest() == config.digest()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("ppo.minibatch_size=7", "ppo.minibatch_size = 7 must divide the 240 steps of an iteration"),
        ("ppo.learning_rate=-1", "ppo.learning_rate = -1"),
        ("ppo.learning_rates=1", "ppo.learning_rates: unknown field"),
        ("model.kind=tiny", "model: unknown field"),
        ("environment", "must be FIELD=VALUE"),
    ],
)
def test_mistakes_are_one_line(override: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        small_control(override)
    assert message in str(caught.value) and "\n" not in str(caught.value)
