"""Who may import what, read from the source: folders import downward only, and each rule of a folder is one loop."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from tests.support.paths import ROOT

STANDARD = set(sys.stdlib_module_names) | {"__future__"}
FACES = ("__init__", "__main__")  # of a whole package: they hand on what is in it, and nothing in it imports them
README_ROW = re.compile(r"^\| \[`(\w+)(?:/|\.py)`\]\(", re.MULTILINE)


def files(*patterns: str) -> list[Path]:
    """The files of some patterns; a pattern that matches none is an error."""
    matches = [sorted(ROOT.glob(pattern)) for pattern in patterns]
    assert all(matches), patterns
    return [path for group in matches for path in group]


@cache
def imports(path: Path) -> frozenset[str]:
    """Every module a file imports, at any depth of its code; `from a import b` gives a and a.b."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
    return frozenset(names)


def top(names: frozenset[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


def folder_of(path: Path, root: Path) -> str:
    """The folder in `root` that a file is in; the file's own name where it lies in `root` itself."""
    return path.relative_to(root).with_suffix("").parts[0]


def arrows(root: Path) -> dict[Path, set[Path]]:
    """The files of `root` that each of them imports."""
    paths = [path for path in sorted(root.glob("**/*.py")) if folder_of(path, root) not in FACES]
    home = next(folder for folder in root.parents if not (folder / "__init__.py").exists())
    modules = {".".join(path.relative_to(home).with_suffix("").parts): path for path in paths}
    modules |= {name.removesuffix(".__init__"): path for name, path in modules.items()}
    found = {}
    for path in paths:
        targets = imports(path) & modules.keys()
        # `from a.b import c` is an import of the module a.b.c where there is one, not of the package a.b
        packages = {name.rpartition(".")[0] for name in targets}
        found[path] = {modules[name] for name in targets - packages} - {path}
    return found


def floors(order: str) -> dict[str, int]:
    """The floor of each folder in lines of names, bottom to top."""
    return {name: floor for floor, line in enumerate(order.strip().splitlines()) for name in line.split()}


def printed_floors(page: str) -> dict[str, int]:
    """The floor of each folder in a page's table, which has them top to bottom."""
    return floors("\n".join(reversed(README_ROW.findall(page))))


def misplaced(root: Path, floor: dict[str, int]) -> list[str]:
    """The imports that run to no lower floor, the folders without a floor, and the floors without a folder."""
    of_files = arrows(root)
    folders = {folder_of(path, root) for path in of_files}
    faults = [f"{name} is a folder or a line, not both" for name in sorted(folders ^ floor.keys())]
    for path, targets in of_files.items():
        name = folder_of(path, root)
        for other in sorted({folder_of(target, root) for target in targets} - {name}):
            if floor.get(other, -1) >= floor.get(name, len(floor)):
                faults.append(f"{path.relative_to(root.parent)}: {name} imports {other}, which is not below it")
    return faults


def circle(root: Path) -> list[Path]:
    """Some files that import each other in a circle; empty if there are none."""
    try:
        TopologicalSorter(arrows(root)).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_folders_import_those_below_them_only() -> None:
    """The table of folders on a page has every folder, and each above all that it imports."""
    for page in (ROOT / "ppo_repro" / "README.md", ROOT / "ppo_repro" / "analysis" / "code.md"):
        assert misplaced(page.parent, printed_floors(page.read_text(encoding="utf-8"))) == []


def test_no_files_import_each_other_in_a_circle() -> None:
    assert circle(ROOT / "ppo_repro") == []
    assert circle(ROOT / "ppo_repro" / "analysis") == []


def house(folder: Path, **texts: str) -> Path:
    """A package of two folders for the negative controls; `coal` and `rack` are in the cellar, `trunk` in the attic."""
    root = folder / "house"
    for name, text in texts.items():
        path = root / ("attic" if name == "trunk" else "cellar") / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_an_upward_import_and_a_folder_without_a_line_are_found(tmp_path: Path) -> None:
    root = house(tmp_path, coal="from house.attic import trunk\n", trunk="")
    upward = "house/cellar/coal.py: cellar imports attic, which is not below it"
    row = "| [`{0}/`]({0}) | things |\n"
    assert misplaced(root, printed_floors(row.format("cellar") + row.format("attic"))) == []
    assert misplaced(root, printed_floors(row.format("attic") + row.format("cellar"))) == [upward]
    assert misplaced(root, floors("attic cellar")) == [upward]
    assert misplaced(root, floors("attic")) == ["cellar is a folder or a line, not both"]
    assert misplaced(root, floors("roof\nattic\ncellar")) == ["roof is a folder or a line, not both"]


def test_a_circle_is_found_within_a_folder_and_across(tmp_path: Path) -> None:
    across = house(tmp_path / "across", coal="from house.attic import trunk\n", trunk="import house.cellar.coal\n")
    assert {path.name for path in circle(across)} == {"coal.py", "trunk.py"}
    inside = house(
        tmp_path / "inside", coal="def f():\n    from house.cellar import rack\n", rack="import house.cellar.coal\n"
    )
    assert {path.name for path in circle(inside)} == {"coal.py", "rack.py"}
    assert circle(house(tmp_path / "none", coal="from house.cellar import rack\n", rack="")) == []


def test_foundations_need_little() -> None:
    allowed = STANDARD | {"numpy", "pydantic", "pydantic_core", "yaml", "ppo_repro"}
    for path in files(
        "ppo_repro/config/*.py", "ppo_repro/base/seeding.py", "ppo_repro/base/errors.py", "ppo_repro/records/schema.py"
    ):
        assert top(imports(path)) <= allowed, path


def test_ppo_mathematics_know_no_config_and_no_model() -> None:
    for path in files("ppo_repro/ppo/*.py"):
        ours = {name for name in imports(path) if name.startswith("ppo_repro.")}
        below = ("ppo_repro.ppo", "ppo_repro.numerics", "ppo_repro.base.errors")
        assert all(name.startswith(below) for name in ours), path
        assert "transformers" not in top(imports(path)), path


def test_the_definition_of_the_numerics_stands_alone() -> None:
    """It needs NumPy only, and nothing imports it."""
    definition = files("ppo_repro/numerics/definition/*.py")
    for path in definition:
        assert top(imports(path)) <= STANDARD | {"numpy", "ppo_repro"}, path
        ours = {name for name in imports(path) if name.startswith("ppo_repro.")}
        assert all(name.startswith("ppo_repro.numerics.definition") for name in ours), path
    for path in set(files("ppo_repro/**/*.py", "analysis/*.py")) - set(definition):
        assert not [name for name in imports(path) if name.startswith("ppo_repro.numerics.definition")], path


def test_records_need_no_torch() -> None:
    for path in files("ppo_repro/records/*.py"):
        if path.name != "columns.py":  # where tensors become columns; readers do not need it
            assert not {"torch", "transformers"} & top(imports(path)), path
            assert "ppo_repro.records.columns" not in imports(path), path


def test_trackers_need_no_torch() -> None:
    """A process beside a run holds the memory of its imports as long as the run works."""
    trackers = ", ".join(path.stem for path in files("ppo_repro/tracking/*_copy.py"))
    program = f"from ppo_repro.tracking import {trackers}; import sys; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", program], cwd=ROOT, text=True) == "False\n"


def test_no_test_imports_another_test() -> None:
    for path in files("tests/**/*.py"):
        assert not [name for name in imports(path) if name.startswith("tests.") and ".test_" in name], path


def test_analyses_read_records_only() -> None:
    allowed = (
        "ppo_repro.analysis",
        "ppo_repro.records",
        "ppo_repro.base.files",
        "ppo_repro.base.json_lines",
        "ppo_repro.base.latest",
        "ppo_repro.base.errors",
        "ppo_repro.base.lock",
        "ppo_repro.base.program",
        "ppo_repro.config",
        "ppo_repro.runs.results",
        "ppo_repro.runs.summary",
        "ppo_repro.testing.diagnosis",  # a page names the cause of a mismatch
        "ppo_repro.testing.evidence",
        "ppo_repro.statistics",
    )
    allowed += ("ppo_repro.base.output",)  # warnings
    remedies = ROOT / "ppo_repro/analysis/remedies.py"  # what the trainer itself would do
    for path in set(files("ppo_repro/analysis/**/*.py", "analysis/*.py")) - {remedies}:
        names = imports(path)
        assert not {"torch", "transformers", "mlflow"} & top(names), path
        assert all(name.startswith(allowed) for name in names if name.startswith("ppo_repro.")), path
    allowed += ("ppo_repro.ppo.corrections", "ppo_repro.stages.corrections")
    assert all(name.startswith(allowed) for name in imports(remedies) if name.startswith("ppo_repro."))


def test_the_markup_of_pages_knows_no_run() -> None:
    for path in files("ppo_repro/analysis/html/*.py"):
        ours = {name for name in imports(path) if name.startswith("ppo_repro.")}
        below = ("ppo_repro.analysis.html", "ppo_repro.analysis.csv_text", "ppo_repro.statistics")
        assert all(name.startswith(below) for name in ours), path


def test_statistics_need_frames_of_numbers_alone() -> None:
    for path in files("ppo_repro/statistics/*.py"):
        assert top(imports(path)) <= STANDARD | {"numpy", "pandas", "scipy", "ppo_repro"}, path
        assert all(n.startswith("ppo_repro.statistics") for n in imports(path) if n.startswith("ppo_repro.")), path


def test_the_diagnosis_needs_no_torch_and_no_run() -> None:
    for path in files(*(f"ppo_repro/testing/{name}.py" for name in ("advice", "diagnosis", "evidence"))):
        ours = {name for name in imports(path) if name.startswith("ppo_repro.")}
        assert not {"torch", "transformers"} & top(imports(path)), path
        # evidence takes names of columns from the pairs
        below = (
            "ppo_repro.testing",
            "ppo_repro.statistics",
            "ppo_repro.records.logprob_pairs",
            "ppo_repro.base.errors",
        )
        assert all(name.startswith(below) for name in ours), path
        assert not [name for name in ours if name.startswith("ppo_repro.testing.audit")], path


def test_only_the_update_takes_optimizer_steps() -> None:
    trainers = {"loop.py", "control/loop.py", "runs/warm_start.py", "preferences/training.py"}
    for path in files("ppo_repro/**/*.py"):
        name = path.relative_to(ROOT / "ppo_repro").as_posix()
        if name not in trainers:
            assert "optimizer.step(" not in path.read_text().replace("`optimizer.step`", ""), path


def test_heavy_libraries_have_one_importer() -> None:
    homes = {
        "mlflow": "tracking/",
        "sglang": "sampling/sglang/plugin/",
        "gymnasium": "control/",
        "reasoning_gym": "tasks/",
    }
    for path in files("ppo_repro/**/*.py"):
        name = path.relative_to(ROOT / "ppo_repro").as_posix()
        for library, home in homes.items():
            assert library not in top(imports(path)) or name.startswith(home), path
