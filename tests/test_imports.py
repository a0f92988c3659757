"""Who may import what, read from the source: packages import downward only, and each rule of a room is one loop."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.support.paths import ROOT

STANDARD = set(sys.stdlib_module_names) | {"__future__"}

# The order of the packages, bottom to top. A package imports from lines above its own only; packages in one line
# do not import each other. A file directly in ppo_repro/ or analysis/ counts as a package.
PPO_REPRO = """
    base buffers
    config assets
    numerics
    ppo numerics.definition
    rollout
    sglang.plugin sglang.plugin.cpu_shim.sgl_kernel tasks
    models
    sglang
    stages preferences control
    records
    faults loop
    runs
    testing checks grids
    audit
    tracking
    commands
    library
    __main__
"""
ANALYSIS = """
    program words stats pairs diagnosis
    clipping notebooks tokenization
    mismatch dialects
    compare grids
    figures
    report
    view
"""


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


def package_of(path: Path, root: Path) -> str:
    """The folder of a file as a dotted name; the file's own name where it lies in `root` itself."""
    folder = path.parent.relative_to(root).parts
    return ".".join(folder) if folder else path.stem


def floors(order: str) -> dict[str, int]:
    return {name: floor for floor, line in enumerate(order.strip().splitlines()) for name in line.split()}


def arrows(root: Path) -> Iterator[tuple[str, str, Path]]:
    """(package, imported package, file) for every import between two packages of `root`."""
    modules = {".".join(path.relative_to(root).with_suffix("").parts): path for path in sorted(root.rglob("*.py"))}
    modules |= {name.removesuffix(".__init__"): path for name, path in modules.items() if name.endswith(".__init__")}
    for path in sorted(root.rglob("*.py")):
        names = {name.removeprefix(f"{root.name}.") for name in imports(path) if name.startswith(f"{root.name}.")}
        targets = names & modules.keys()
        # `from a.b import c` is an import of the module a.b.c where there is one, not of the package a.b
        packages = {name.rpartition(".")[0] for name in targets}
        for target in sorted(targets - packages):
            pair = package_of(path, root), package_of(modules[target], root)
            if pair[0] != pair[1] and path != root / "__init__.py":
                yield *pair, path


def upward(root: Path, order: str) -> list[str]:
    """The imports that break the order, and the packages that have no place in it."""
    floor = floors(order)
    faults = []
    for lower, upper, path in arrows(root):
        if lower not in floor or upper not in floor:
            faults.append(f"{path.relative_to(root.parent)}: give {lower} and {upper} a line in the order")
        elif floor[upper] >= floor[lower]:
            faults.append(f"{path.relative_to(root.parent)}: {lower} imports {upper}, which is not below it")
    return faults


def test_packages_import_downward_only() -> None:
    for root, order in ((ROOT / "ppo_repro", PPO_REPRO), (ROOT / "analysis", ANALYSIS)):
        assert upward(root, order) == []
        pairs = {(lower, upper) for lower, upper, _ in arrows(root)}
        assert set(floors(order)) <= {name for pair in pairs for name in pair}, "a line names a package that is gone"
        print(f"\n{root.name}: {len(floors(order))} packages, {len(pairs)} imports between them, none upward")
        for name in floors(order):
            print(f"  {name}: {' '.join(sorted(upper for lower, upper in pairs if lower == name)) or '-'}")


def test_an_upward_import_is_found(tmp_path: Path) -> None:
    """The negative control: the same check on a package with one import in the wrong direction."""
    (tmp_path / "house" / "cellar").mkdir(parents=True)
    (tmp_path / "house" / "attic").mkdir()
    (tmp_path / "house" / "cellar" / "coal.py").write_text("from house.attic import trunk\n")
    (tmp_path / "house" / "attic" / "trunk.py").write_text("import house.cellar.coal\n")
    assert upward(tmp_path / "house", "cellar\nattic") == [
        "house/cellar/coal.py: cellar imports attic, which is not below it"
    ]
    assert len(upward(tmp_path / "house", "cellar attic")) == 2
    assert "give cellar and attic a line" in upward(tmp_path / "house", "cellar")[1]


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
    """Only `families.py`, which reads transformers' models, needs more than NumPy. Nothing imports the definition."""
    definition = files("ppo_repro/numerics/definition/*.py")
    for path in definition:
        if path.name != "families.py":
            assert top(imports(path)) <= STANDARD | {"numpy", "ppo_repro"}, path
            ours = {name for name in imports(path) if name.startswith("ppo_repro.")}
            assert all(name.startswith("ppo_repro.numerics.definition") for name in ours), path
    for path in set(files("ppo_repro/**/*.py", "analysis/**/*.py")) - set(definition):
        assert not [name for name in imports(path) if name.startswith("ppo_repro.numerics.definition")], path


def test_records_need_no_torch() -> None:
    for path in files("ppo_repro/records/*.py"):
        if path.name != "columns.py":  # where tensors become columns; readers do not need it
            assert not {"torch", "transformers"} & top(imports(path)), path
            assert "ppo_repro.records.columns" not in imports(path), path


def test_no_test_imports_another_test() -> None:
    for path in files("tests/**/*.py"):
        assert not [name for name in imports(path) if name.startswith("tests.") and ".test_" in name], path


def test_analyses_read_records_only() -> None:
    allowed = (
        "ppo_repro.records",
        "ppo_repro.base.files",
        "ppo_repro.base.json_lines",
        "ppo_repro.base.errors",
        "ppo_repro.base.lock",
        "ppo_repro.config",
        "ppo_repro.runs.summary",
        "ppo_repro.testing.dumps",  # the audit's reader of dumps
    )
    allowed += ("ppo_repro.base.output",)  # their commands speak as the program does
    for path in files("analysis/**/*.py"):
        names = imports(path)
        assert not {"torch", "transformers", "mlflow"} & top(names), path
        assert all(name.startswith(allowed) for name in names if name.startswith("ppo_repro.")), path


def test_only_the_update_takes_optimizer_steps() -> None:
    trainers = {"loop.py", "control/loop.py", "models/warm_start.py", "preferences/training.py"}
    trainers |= {"checks/probe.py"}
    for path in files("ppo_repro/**/*.py"):
        name = path.relative_to(ROOT / "ppo_repro").as_posix()
        if name not in trainers:
            assert "optimizer.step(" not in path.read_text().replace("`optimizer.step`", ""), path


def test_heavy_libraries_have_one_importer() -> None:
    homes = {"mlflow": "tracking", "sglang": "sglang.plugin", "gymnasium": "control", "reasoning_gym": "tasks"}
    for path in files("ppo_repro/**/*.py"):
        package = package_of(path, ROOT / "ppo_repro")
        for library, home in homes.items():
            assert library not in top(imports(path)) or package == home, path
