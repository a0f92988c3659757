"""Control configurations: presets, round trips, one line per mistake."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from ppo_repro.config.control import ControlConfig, load_control_config
from ppo_repro.config.files import dump_yaml
from ppo_repro.errors import UserError
from tests.support.control import PRESETS, small_control
from tests.support.paths import SMALL_CONTROL


def leaf_fields(model: type[BaseModel], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found += leaf_fields(field.annotation, f"{prefix}{name}.")
        else:
            found.append((prefix + name, field))
    return found


def test_every_field_has_a_description_of_one_sentence() -> None:
    fields = leaf_fields(ControlConfig)
    assert len(fields) > 25
    for path, field in fields:
        assert field.description and re.fullmatch(r"[A-Z0-9`][^\n]*\.", field.description), path


@pytest.mark.parametrize("path", PRESETS, ids=lambda p: p.stem)
def test_presets_are_read_and_written(path: Path, tmp_path: Path) -> None:
    config = load_control_config(path)
    assert config.experiment == path.stem
    copy = tmp_path / "config.yaml"
    copy.write_text(dump_yaml(config))
    assert load_control_config(copy) == config and load_control_config(copy).digest() == config.digest()


def test_presets_are_there() -> None:
    assert [p.stem for p in PRESETS] == ["acrobot", "cartpole_cleanrl", "cartpole_fast", "pendulum"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("ppo.minibatch_size=7", "ppo.minibatch_size = 7 must divide the 240 steps of an iteration"),
        ("ppo.clip_range=1", "ppo.clip_range = 1"),
        ("ppo.learning_rate=-1", "ppo.learning_rate = -1"),
        ("ppo.learning_rates=1", "ppo.learning_rates: unknown field"),
        ("ppo.whiten_advantages=all", "ppo.whiten_advantages = 'all'"),
        ("ppo.value_clip_range=0", "ppo.value_clip_range = 0"),
        ("numerics.mode=fast", "numerics.mode = 'fast'"),
        ("layout.threads=0", "layout.threads = 0"),
        ("environment.num_envs=1.5", "environment.num_envs = 1.5"),
        ("model.kind=tiny", "model: unknown field"),
        ("environment", "must be FIELD=VALUE"),
    ],
)
def test_mistakes_are_one_line(override: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        small_control(override)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_field_and_a_file_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("experiment: a\n")
    with pytest.raises(UserError, match="seed: missing; add it"):
        load_control_config(path)
    path.write_text("- a\n")
    with pytest.raises(UserError, match="must be a mapping"):
        load_control_config(path, ["seed=1"])
    with pytest.raises(UserError, match="cannot be read"):
        load_control_config(tmp_path / "none.yaml")


def test_a_configuration_cannot_be_changed_and_every_change_shows_in_the_digest() -> None:
    config = small_control()
    with pytest.raises(ValidationError, match="frozen"):
        config.ppo.epochs = 3
    changes = ["seed=1", "ppo.epochs=3", "ppo.bootstrap_truncated=false", "network.hidden_size=32", "layout.threads=2"]
    digests = {small_control(change).digest() for change in changes}
    assert len(digests | {load_control_config(SMALL_CONTROL).digest()}) == 1 + len(changes)
