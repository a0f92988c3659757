"""Machine code is kept by a digest of every source it is made from, files in folders of folders included."""

from pathlib import Path

import pytest

from ppo_repro.numerics.kernels.core.cache import sources_digest


@pytest.mark.parametrize("name", ["arithmetic/a.py", "kernels/b.py", "kernels/deep/er/c.py"])
def test_any_changed_source_is_another_digest(tmp_path: Path, name: str) -> None:
    for source in ("arithmetic/a.py", "kernels/b.py", "kernels/deep/er/c.py"):
        (tmp_path / source).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / source).write_text("x = 1\n")
    before = sources_digest(tmp_path)
    assert sources_digest(tmp_path) == before
    (tmp_path / name).write_text("x = 2\n")
    assert sources_digest(tmp_path) != before


def test_a_renamed_source_is_another_digest(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    source = tmp_path / "kernels" / "a.py"
    source.write_text("x = 1\n")
    before = sources_digest(tmp_path)
    source.rename(source.with_name("b.py"))
    assert sources_digest(tmp_path) != before
