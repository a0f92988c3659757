"""The model of another stack is an input: a damaged folder is refused soon and in one line, or computes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AttentionMaskInterface, MistralConfig, PreTrainedModel, Qwen2MoeConfig, Qwen2MoeForCausalLM

from ppo_repro.base.errors import UserError
from ppo_repro.models.folder_files import check_folder
from ppo_repro.tasks.tokenizer import character_tokenizer
from ppo_repro.testing.audit.load_model import load_model, load_tokenizer
from tests.support.damage import changed, computes, drawn
from tests.support.models import CONFIGS, MIXTURES, gpt2_config, llama_config, qwen3_config, small_model
from tests.testing.audit.families import EXPERTS, FAMILIES, SHAPE, made

PLAIN = {"rope_type": "default", "rope_theta": 1e4}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("folders")
    for family, make in {**CONFIGS, **MIXTURES}.items():
        small_model(make(), 0).save_pretrained(root / family)
        character_tokenizer("0123456789+=").save_pretrained(root / family)
    return root


def use(folder: Path) -> None:
    check_folder(folder, "--model")
    model = load_model("--model", folder, "cpu")
    load_tokenizer(folder)
    assert torch.isfinite(model(torch.tensor([[1, 2, 3]])).logits).all()


def test_a_model_of_many_more_weights_than_its_files_is_refused_before_memory_is_taken(
    folders: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(folders / "gpt2", tmp_path / "model"))
    changed("config.json", ("n_positions",), 10**8)(folder)
    with pytest.raises(UserError, match=r"wants [0-9]+ weights, and its files have"):
        use(folder)


def saved(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


UNREAD = [
    ("attn_logit_softcapping", 50.0),
    ("sliding_window", 4),
    ("residual_multiplier", 0.5),
    ("use_qk_norm", True),
    ("rope_parameters.partial_rotary_factor", 0.5),
    ("rope_parameters.attention_factor", 1.5),
]


@pytest.mark.parametrize(("field", "value"), UNREAD)
def test_an_option_that_the_class_does_not_compute_gives_no_verdict(field: str, value: float, tmp_path: Path) -> None:
    folder = saved(small_model(llama_config(rope_parameters=PLAIN), 0), tmp_path / "model")
    changed("config.json", tuple(field.split(".")), value)(folder)
    with pytest.raises(
        UserError, match=rf"config.json has {field} = {value}, which LlamaForCausalLM .* does not compute"
    ):
        use(folder)


def test_a_tensor_that_the_class_does_not_use_gives_no_verdict(tmp_path: Path) -> None:
    folder = saved(small_model(qwen3_config(), 0), tmp_path / "model")
    changed("config.json", ("model_type",), "llama")(folder)
    changed("config.json", ("architectures",), ["LlamaForCausalLM"])(folder)
    with pytest.raises(UserError, match=r"k_norm\.weight, which LlamaForCausalLM of transformers does not use"):
        use(folder)


def test_an_output_matrix_beside_a_tied_embedding_gives_no_verdict(tmp_path: Path) -> None:
    folder = saved(small_model(qwen3_config(tie_word_embeddings=False), 0), tmp_path / "model")
    changed("config.json", ("tie_word_embeddings",), True)(folder)
    with pytest.raises(UserError, match="tie_word_embeddings = true, and an output matrix that is not the embedding"):
        use(folder)


@pytest.mark.parametrize(("family", "chosen"), [("gemma2", "eager"), ("qwen3", "sdpa")])
def test_fused_attention_is_taken_only_if_it_gives_the_numbers_of_the_familys_own(
    family: str, chosen: str, tmp_path: Path
) -> None:
    folder = saved(made(family).model, tmp_path / "model")
    assert load_model("--model", folder, "cpu").config._attn_implementation == chosen


def test_fused_attention_without_the_window_of_a_real_model_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_model(MistralConfig(**SHAPE | {"max_position_embeddings": 8192, "sliding_window": 4096}), 0)
    folder = saved(model, tmp_path / "model")
    assert load_model("--model", folder, "cpu").config._attn_implementation == "sdpa"

    def causal(*args: object, **kwargs: object) -> None:
        """No mask: fused attention is causal by itself, and sees all tokens before."""

    monkeypatch.setitem(AttentionMaskInterface._global_mapping, "sdpa", causal)
    loaded = load_model("--model", folder, "cpu")
    assert (loaded.config._attn_implementation, loaded.config.sliding_window) == ("eager", 4096)


def test_a_model_of_few_positions_loads(tmp_path: Path) -> None:
    use(saved(small_model(gpt2_config(n_positions=8), 0), tmp_path / "model"))


def test_a_folder_without_files_of_a_tokenizer_has_none(tmp_path: Path) -> None:
    assert load_tokenizer(saved(small_model(qwen3_config(), 0), tmp_path / "model")) is None


def test_a_qwen2_moe_without_a_window_loads_as_transformers_writes_it(tmp_path: Path) -> None:
    config = Qwen2MoeConfig(**SHAPE, **EXPERTS, shared_expert_intermediate_size=24)
    folder = saved(Qwen2MoeForCausalLM(config), tmp_path / "model")
    assert json.loads((folder / "config.json").read_text())["sliding_window"] == 0
    use(folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_of_any_width_compute(dtype: torch.dtype, tmp_path: Path) -> None:
    model = load_model("--model", saved(made("qwen3_moe").model, tmp_path / "model"), "cpu")
    assert EXPERTS["moe_intermediate_size"] % 8 == 4
    assert torch.isfinite(model.to(dtype)(torch.tensor([[1, 2, 3]])).logits).all()


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_loads_with_its_own_options(family: str, tmp_path: Path) -> None:
    use(saved(made(family).model, tmp_path / "model"))


@pytest.mark.slow
def test_no_damage_of_a_folder_is_a_fault(folders: Path) -> None:
    families, computed = sorted(folders.iterdir()), 0
    for seed in range(1000, 1100):
        folder = families[seed % len(families)]
        computed += computes(f"seed {seed}", drawn(folder, seed)[1], folder, use)
    assert 10 < computed < 90
