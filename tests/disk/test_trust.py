"""What files may not do: run code, or make anything outside the folder of a run."""

from __future__ import annotations

import ast
import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from ppo_repro import files
from ppo_repro.config.files import load_config
from ppo_repro.errors import UserError
from ppo_repro.files import check_sums, only_writer, remove_folder, whole_folder
from ppo_repro.models.folders import load_reward_model
from ppo_repro.models.load import load_folder
from ppo_repro.records import manifest
from ppo_repro.runs.run import run_folder
from ppo_repro.watcher import Silent
from tests.support.cli import folder_config
from tests.support.language import run
from tests.support.paths import ROOT, TINY

SOURCES = [path for top in ("ppo_repro", "analysis", "experiments") for path in sorted((ROOT / top).rglob("*.py"))]
# the values that the processes of one run send each other, and the weights in the form SGLang takes them; never a file
MAY_PICKLE = {"ppo_repro/rollout/sglang/weights.py"}
PICKLING = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
# of the base class SafeLoader; the text of the file that a user names as a reward
MAY_CALL = {("ppo_repro/config/yaml_text.py", "yaml.load"), ("ppo_repro/tasks/user_functions.py", "exec")}
MAY_CALL |= {("ppo_repro/audit/files.py", "torch.load")}  # which builds tensors and containers only: see below
NEVER = {"torch.load", "numpy.load", "np.load", "pd.read_pickle", "pandas.read_pickle", "yaml.load", "eval", "exec"}
NEVER |= {"os.system", "yaml.unsafe_load", "yaml.full_load", "torch.jit.load", "torch.hub.load"}


def name_of(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{name_of(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def faults(where: str, source: str) -> list[str]:
    """What a source does that could run code of a file that it loads."""
    found = []
    for node in ast.walk(ast.parse(source)):
        imported: list[str] = []
        if isinstance(node, ast.Import) and where not in MAY_PICKLE:
            imported = [item.name for item in node.names]
        if isinstance(node, ast.ImportFrom):
            imported = [node.module or ""]
        found += [f"{where} imports {name}" for name in imported if name.split(".")[0] in PICKLING]
        if isinstance(node, ast.Call):
            called = name_of(node.func)
            given = {word.arg: word.value for word in node.keywords}
            wrong = called in NEVER and (where, called) not in MAY_CALL
            wrong |= called == "torch.load" and ast.unparse(given.get("weights_only", ast.Constant(False))) != "True"
            for word in ("trust_remote_code", "allow_pickle"):
                value = given.get(word, ast.Constant(False))
                wrong |= not (isinstance(value, ast.Constant) and value.value is False)
            if called.startswith("Auto") and called.endswith((".from_pretrained", ".from_config")):
                wrong |= "trust_remote_code" not in given
            if called.startswith("AutoModel") and called.endswith(".from_pretrained"):
                wrong |= name_of(given.get("use_safetensors", ast.Name("False"))) == "False"
            found += [f"{where}:{node.lineno} calls {called}"] * wrong
    return found


def test_no_source_loads_what_can_run_code() -> None:
    assert len(SOURCES) > 200
    assert [fault for path in SOURCES for fault in faults(path.relative_to(ROOT).as_posix(), path.read_text())] == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle", "from dill import loads", "torch.load(x)", "torch.load(x, weights_only=True)", "eval(x)",
        "np.load(x, allow_pickle=True)", "f(trust_remote_code=flag)", "AutoConfig.from_pretrained(x)",
        "AutoModel.from_pretrained(x, trust_remote_code=False)",
    ],
)  # fmt: skip
def test_a_source_that_could_is_found(source: str) -> None:
    assert len(faults("ppo_repro/loop.py", source)) == 1


class Bomb:
    """Leaves a file where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


def test_the_bomb_works(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Bomb(tmp_path / "ran")))
    assert (tmp_path / "ran").exists()


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(load_config(TINY), tmp_path_factory.mktemp("tiny"), Silent())[0]


@pytest.fixture
def model(tiny_run: Path, tmp_path: Path) -> Path:
    """A model folder without sums, as of somebody else."""
    folder = Path(shutil.copytree(tiny_run / "checkpoints" / "final", tmp_path / "model"))
    (folder / "SHA256SUMS").unlink()
    return folder


def test_pickled_weights_are_not_opened(model: Path, tmp_path: Path) -> None:
    load_folder(model)
    (model / "model.safetensors").unlink()
    torch.save({"model.norm.weight": Bomb(tmp_path / "ran")}, model / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pickled weights only .* convert them"):
        load_folder(model)
    (model / "pytorch_model.bin").rename(model / "model.safetensors")
    with pytest.raises(UserError, match=r"model\.safetensors cannot be read"):
        load_folder(model)
    assert not (tmp_path / "ran").exists()


def test_code_of_a_model_folder_does_not_run(model: Path, tmp_path: Path) -> None:
    path = model / "config.json"
    code = f"from pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()\nclass Model: ...\n"
    (model / "code.py").write_text(code)
    references = {name: "code.Model" for name in ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer")}
    path.write_text(json.dumps({**json.loads(path.read_text()), "auto_map": references}))
    for load in (load_folder, lambda folder: load_reward_model(folder, "deterministic", 16)):
        with pytest.raises(UserError, match="auto_map"):
            load(model)
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": "mine", "auto_map": None}))
    with pytest.raises(UserError, match="cannot be loaded"):
        load_folder(model)
    assert not (tmp_path / "ran").exists()


def test_a_damaged_model_is_refused_where_it_is_used(tiny_run: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_run / "checkpoints" / "final", tmp_path / "model"))
    load_folder(folder)
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    with pytest.raises(UserError, match=r"model.safetensors: has another SHA-256 than .*SHA256SUMS says; restore it"):
        load_folder(folder)
    (folder / "SHA256SUMS").write_text("0" * 64 + "  ../x\n")
    with pytest.raises(UserError, match="is not a list of SHA-256"):
        check_sums(folder)
    (folder / "SHA256SUMS").write_text("")
    with pytest.raises(UserError, match=r"does not list config\.json"):
        check_sums(folder)


@pytest.mark.parametrize("name", ["../x", "..", "/tmp/x", "a/b", "a/../../b", ".hidden", "a\nb", "a\0", "", "x" * 65])
def test_a_name_of_an_experiment_is_no_path(name: str) -> None:
    with pytest.raises(UserError, match="experiment"):
        load_config(TINY, [f"experiment={json.dumps(name)}"])


def test_prompt_keys_are_no_paths(model: Path, tmp_path: Path) -> None:
    keys = ["../../../escaped", str(tmp_path / "absolute"), "a/b", "..", "~/x", "$(touch x)", "con\x01trol"]
    rows = [json.dumps({"key": key, "prompt": f"{i}+1=", "answer": str(i + 1)}) for i, key in enumerate(keys)]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(rows) + "\n")
    config = load_config(
        folder_config(tmp_path / "c.yaml", model, prompts), ["ppo.iterations=1", "numerics.max_context=12"]
    )
    before = {path for path in tmp_path.rglob("*")}
    run_dir, _ = run(config, tmp_path / "out", Silent())
    assert run_dir == run_folder(config, tmp_path / "out")
    made = {path for path in tmp_path.rglob("*")} - before
    assert all(path == tmp_path / "out" or (tmp_path / "out") in path.parents for path in made)
    assert {path.name for path in run_dir.rglob("*") if path.is_dir()} <= {
        *("records", "checkpoints", "final", "reference", "value_model", "final_state"),
        *(table.name for table in manifest.tables_of(manifest.load(run_dir))),
        *(table.name for table in manifest.side_tables_of(manifest.load(run_dir))),
    }
    assert not Path("x").exists()


def test_writing_follows_no_link(tmp_path: Path) -> None:
    mine, folder = tmp_path / "mine", tmp_path / "folder"
    mine.write_text("mine")
    folder.mkdir()
    (folder / "kept").write_text("kept")
    for name in ("a.tmp", "lock"):
        (tmp_path / name).symlink_to(mine)
    for name in ("b.tmp", "c.removed"):
        (tmp_path / name).symlink_to(folder)
    with pytest.raises(UserError, match="Too many levels of symbolic links"):
        files.atomic_write(tmp_path / "a", b"theirs")
    with pytest.raises(UserError, match="Too many levels of symbolic links"), only_writer(tmp_path):
        pass
    with pytest.raises(UserError, match="symbolic link"), whole_folder(tmp_path / "b"):
        pass
    with pytest.raises(OSError, match="symbolic link"):
        remove_folder(tmp_path / "c")
    assert mine.read_text() == "mine" and [path.name for path in folder.iterdir()] == ["kept"]
