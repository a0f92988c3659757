"""The user's functions: what the trial before a run lets through, and what it refuses with one line."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as of_examples
from hypothesis.strategies import booleans, floats, sampled_from

from ppo_repro.base.errors import UserError
from ppo_repro.user.functions import Functions, OwnEstimator, load_functions
from ppo_repro.user.trial import try_functions
from tests.support.runs import small_config

HEAD = "import torch\nfrom ppo_repro.numerics import exp, log, sigmoid, softplus, sqrt, tanh\n\ncalls = []\n"


LOSS = "ppo.objective"
FIELDS = {LOSS: "b", "advantages": "b", "kl.estimator": "p, q", "reward.placement": "b"}


def tried(
    folder: Path,
    body: str,
    *overrides: str,
    field: str = LOSS,
    head: str = HEAD,
    signature: str = "",
    options: str = "",
) -> None:
    """Load and try `def f(SIGNATURE): BODY` as the function of a field."""
    (folder / "own.py").write_text(f"{head}def f({signature or FIELDS[field]}):\n    {body}\n")
    config = small_config(*overrides, f"{field}={{kind: function, path: {folder}/own.py:f{options}}}")
    try_functions(config, load_functions(config.functions))


@pytest.mark.parametrize(
    "body",
    [
        "return -b.ratios * b.advantages",
        "return -b.new_logprobs * b.advantages + 0.1 * b.entropies",
        "return -exp(b.response_means(b.new_logprobs - b.anchor_logprobs)) * b.response_means(b.advantages)",
        "return -b.of_tokens(b.response_sums(b.new_logprobs)) * b.advantages",
        "return -(b.ratios + b.of_tokens(b.response_sums(b.ratios)).detach()) * b.advantages",
        "x = (b.ratios - 1).clamp(-5, 5); return x**2 - sigmoid(x) * b.advantages + softplus(x) + tanh(x)",
        "x = b.ratios.clamp(0.1, 9); return -log(x) * b.advantages + sqrt(x)",
        "cut = (b.ratios > 1.2) & (b.advantages > 0); return -torch.where(cut, 1.2, b.ratios) * b.advantages, cut",
        "return -b.ratios * b.advantages * torch.where(b.positions == 0, 2.0, 1.0) / b.lengths",
        # the advantage of the first token, and what is left of the response
        "return -b.ratios * b.advantages[torch.arange(len(b.positions)) - b.positions]",
        "return -b.ratios * (b.of_tokens(b.response_sums(b.advantages)) - b.advantages)",
    ],
)
def test_a_loss_of_each_response_alone_passes(tmp_path: Path, body: str) -> None:
    tried(tmp_path, body, "ppo.ratio_anchor=old")
    tried(tmp_path, body, "numerics.mode=native")


def test_native_numerics_have_a_tolerance_and_any_operation(tmp_path: Path) -> None:
    body = "return -torch.exp((b.new_logprobs - b.anchor_logprobs).clamp(-9, 9)) * b.advantages"
    tried(tmp_path, body, "numerics.mode=native")


@pytest.mark.parametrize(
    "setting", ["rollout.max_response_tokens=1", "rollout.samples_per_prompt=8", "layout.update_micro_batch=5"]
)
def test_every_run_can_try_a_function(tmp_path: Path, setting: str) -> None:
    tried(tmp_path, "return -b.of_tokens(b.response_means(b.ratios)) * b.advantages", setting)
    with pytest.raises(UserError, match="depends on the layout"):
        tried(tmp_path, "return -b.ratios * len(b.ratios)", setting)


# the ratio of the next token; of a last one its own
AFTER = "x = b.ratios; after = torch.where(b.positions + 1 == b.lengths, x, torch.cat([x[1:], x[:1]]))"
BEFORE = "x = b.advantages; before = torch.where(b.positions == 0, x, torch.cat([x[-1:], x[:-1]]))"
# the bodies that each message refuses
REFUSED = {
    r"depends on the layout\. micro batch 1: loss differs at \d+ tokens, first \S+ instead of \S+ at response": [
        "return -b.ratios * b.advantages / len(b.ratios)",
        "return -b.ratios * (b.advantages - b.advantages.mean())",
        "return -b.ratios * b.ratios.detach().max()",
        "return -b.ratios * b.responses.unique().numel()",
        "return -b.ratios * (b.responses == b.responses[-1])",
    ],
    r"depends on the layout\. micro batch 1: loss differs at \d+ tokens, first -0 instead of 0 at response": [
        "x = -b.ratios * b.advantages; return torch.where(x == 0, 0.0 if len(b.response_lengths) > 1 else -0.0, x)"
    ],
    r"depends on the layout\. micro batch 1: gradient differs at \d+ tokens, first \S+ instead of \S+ at response": [
        "y = b.advantages * b.ratios.sum(); return y - y.detach() + b.advantages",
        "x = -b.ratios * b.advantages; x.register_hook(lambda g: g / g.abs().max()); return x",
    ],
    r"depends on the layout\. micro batch 1: clip flag differs at \d+ tokens, first ": [
        "return -b.ratios * b.advantages, b.ratios > b.ratios.max() - 0.1"
    ],
    r"depends on the layout\. ranks 2: loss differs at \d+ tokens": [
        "return -b.ratios * (2.0 if len(b.response_lengths) == 10 else 1.0)"  # as the second half of 19 has
    ],
    r"gives two results for one batch, loss differs at": [
        "return -b.ratios * torch.rand(())",
        "calls.append(0); return b.ratios * len(calls)",
    ],
    r"changes advantages in place": ["b.advantages.clamp_(min=0); return -b.ratios * b.advantages"],
    r"returned a loss without a gradient; it must depend on new_logprobs or entropies": [
        "return -b.advantages",
        "return torch.nn.Parameter(b.ratios.detach()) * b.advantages",
    ],
    r"calls backward\(\) itself; let it return the loss alone, which the run differentiates": [
        "x = -b.ratios * b.advantages; x.sum().backward(retain_graph=True); return x"
    ],
    r"returned a loss at response \d+, position 0 that depends on new_logprobs at position 1; let it depend on": [
        f"{AFTER}; return -torch.where(b.lengths == 1, b.ratios, after) * b.advantages"
    ],
    r"returned a loss at response \d+, position 0 that depends on new_logprobs at position 0, 1; let it depend on": [
        f"{AFTER}; return -(b.ratios + after.detach()) * b.advantages"
    ],
    **{
        rf"returned a loss at response \d+, position 1 that depends on {column} at position 2 and not at 1; let": [
            f"{AFTER.replace('b.ratios', f'b.{column}')}; return -b.ratios * b.advantages + 0.1 * b.ratios * after"
        ]
        for column in ("ref_logprobs", "rollout_logprobs", "entropies", "corrections")
    },
    r"returned a loss at response \d+, position 1 that depends on advantages at position 2 and not at 1; let it": [
        f"{AFTER.replace('b.ratios', 'b.advantages')}; return -b.ratios * after"
    ],
    r"returned a loss at response \d+, position 1 that depends on advantages at position 0 and not at 1; let it": [
        f"{BEFORE}; return -b.ratios * before"
    ],
    r"returned inf at response \d, position \d+; must be finite \(log-ratio 100, adv": ["return b.ratios**2"],
    r"returned -inf at response \d, position \d+; must be finite \(log-ratio 100, advantage 0\); ": [
        "return -torch.where(b.advantages == 0, b.ratios * b.ratios, b.ratios)"
    ],
    r"returned -?(inf|nan) at response \d, position \d+; must be finite \(log-ratio 100, advantage 0.001\); ": [
        "return -torch.exp(b.new_logprobs - b.anchor_logprobs) * b.advantages"
    ],
    r"calls torch's exp: its bits may differ between machines; take ppo_repro\.numerics\.exp": [
        "return -torch.exp((b.new_logprobs - b.anchor_logprobs).clamp(-9, 9)) * b.advantages"
    ],
    r"calls torch's sum: its bits may differ": ["return -(torch.stack([b.ratios, b.ratios]).sum(0)) * b.advantages"],
    r"calls torch's mish: .*; take \+ - \* /, comparisons, where, indexing": [
        "return -torch.nn.functional.mish(b.ratios)"
    ],
    r"calls torch's pow: .*take x \* x": ["return -(b.ratios.double() ** 0.5).float()"],
    r"returned a tensor \[\] float32; must be a float32 tensor \[\d+\]": ["return -(b.ratios * b.advantages).mean()"],
    r"returned a tensor \[\d+\] float64; must be a float32 tensor": ["return (b.ratios * b.advantages).double()"],
    r"returned a tensor \[\d+\] float32; must be a float32 tensor \[\d+\], a": ["return (b.ratios * b.advantages)[1:]"],
    r"returned a NoneType; must be a float32 tensor": ["return None"],
    r"returned as second value something else than a bool tensor \[\d+\]": ["return b.ratios, b.ratios"],
    r"returned 3 values; must return the loss, or loss and cut tokens": ["return b.ratios, b.ratios > 1, 3"],
    r"returned 7 as ClipFlag; must be one of .*, 5, 8, 9, 10": ["return b.ratios, torch.full_like(b.ratios, 7).byte()"],
    r"returned nan at response 0, position 0 and \d+ more tokens; must be finite": ["return b.ratios * float('nan')"],
    r"or its file changes torch's number of threads": ["torch.set_num_threads(3); return -b.ratios"],
    r"raised AttributeError: 'ObjectiveBatch' object has no attribute 'ratio'": ["return b.ratio"],
    r"has a gradient in new_logprobs that is not finite at response 0, position 0": [
        "return sqrt(b.ratios - b.ratios.detach()) - b.advantages"
    ],
}


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Puts back what a function of a test leaves."""
    monkeypatch.chdir(Path.cwd())
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    torch.set_autocast_enabled("cpu", False)
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision("highest")
    torch.set_flush_denormal(False)


@pytest.mark.parametrize(("body", "message"), [(body, said) for said, bodies in REFUSED.items() for body in bodies])
def test_what_it_must_refuse_is_one_line_with_file_and_line(tmp_path: Path, body: str, message: str) -> None:
    with pytest.raises(UserError, match=rf"^ppo\.objective\.path: {tmp_path}/own\.py:[56]: f {message}") as caught:
        tried(tmp_path, body)
    assert str(caught.value).isprintable()


def test_a_trial_leaves_the_global_generators_as_they_were(tmp_path: Path) -> None:
    def states() -> list[object]:
        return [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]  # noqa: NPY002

    before = states()
    head = f"{HEAD}import random\nimport numpy as np\n"
    body = "random.random(), np.random.rand(), torch.rand(1); return -b.ratios"
    tried(tmp_path, body, "numerics.mode=native", head=head)
    assert states() == before


def test_every_call_has_the_parameters_of_the_configuration(tmp_path: Path) -> None:
    tried(tmp_path, "p.append(0); return -b.ratios * len(p)", signature="b, p", options=", parameters: {p: [1]}")


def test_an_unchecked_function_runs_as_it_is(tmp_path: Path) -> None:
    tried(tmp_path, "return -b.ratios / len(b.ratios)", options=", checked: false")


def estimator_of(folder: Path) -> OwnEstimator:
    own = load_functions(small_config(f"kl.estimator={{kind: function, path: {folder}/own.py:f}}").functions).estimator
    assert own is not None
    return own


@pytest.mark.parametrize(
    ("statement", "setting"),
    [
        ("torch.set_default_dtype(torch.float64)", "torch's default dtype"),
        ("torch.set_default_device('meta')", "torch's default device"),
        ("torch.set_num_threads(3)", "torch's number of threads"),
        ("torch.set_grad_enabled(False)", "torch's grad mode"),
        ("mode.__enter__()", "torch's inference mode"),
        ("torch.set_autocast_enabled('cpu', True)", "torch's autocast"),
        ("torch.use_deterministic_algorithms(True)", "torch's use of deterministic algorithms"),
        ("torch.set_float32_matmul_precision('medium')", "torch's precision of matrix products"),
        ("torch.set_flush_denormal(True)", "how torch treats subnormal numbers"),
        ("os.chdir('/')", r"the current folder \(os\.chdir\)"),
    ],
)
def test_every_call_keeps_the_settings_of_the_process(tmp_path: Path, statement: str, setting: str) -> None:
    head = f"import os, torch\nmode, calls = torch.inference_mode(), []\n\ndef change():\n    {statement}\n\n"
    body = "calls.append(0); len(calls) == 3 and change(); return p - q"
    (tmp_path / "own.py").write_text(f"{head}def f(p, q):\n    {body}\n")
    own = estimator_of(tmp_path)
    p, folder = torch.ones(3), Path.cwd()
    assert [own.estimate(p, p).tolist() for _ in range(2)] == [[0.0] * 3] * 2
    with pytest.raises(UserError, match=rf"own\.py:7: f or its file changes {setting}, which the whole run shares"):
        own.estimate(p, p)
    assert Path.cwd() == folder
    if "mode" in statement:
        own.function.value.__globals__["mode"].__exit__(None, None, None)


def test_a_current_folder_that_someone_removed_is_not_entered_again(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("import os\n\ndef f(p, q):\n    os.chdir('/'); return p - q\n")
    own = estimator_of(tmp_path)
    (tmp_path / "gone").mkdir()
    os.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(UserError, match=r"f or its file changes the current folder"):
        own.estimate(torch.ones(3), torch.ones(3))


# what a loss may depend on besides its own response; `r`, `a` are ratios and advantages, of `n` tokens
STATISTICS = [
    "n > {n}",
    "{n} < n <= 2 * {n}",
    "n % 2 == 0",
    "len(b.response_lengths) > {responses}",
    "torch.arange(n) < {share} * n",
    "torch.argsort(torch.argsort(r)) >= n - int({share} * n)",
    "torch.argsort(torch.argsort(a)) < int({share} * n)",
    "r <= torch.sort(r).values[int((1 - {share}) * (n - 1))]",
    "abs(float(a.tolist()[0])) > 0.5",
    "abs(sum(a.tolist())) > {dead} * n",
    "sum(r.tolist()) > (1 + {dead}) * n",
    "abs(sum((b.new_logprobs - b.ref_logprobs).tolist())) > {dead} * n",
    "(a * a).tolist() and sum((a * a).tolist()) > (1 + {dead}) * n",
]


@pytest.mark.parametrize("statistic", STATISTICS)
@of_examples(max_examples=4)
@given(share=sampled_from([0.001, 0.01, 0.1]), size=floats(0.01, 0.99), dead=floats(0.05, 0.5), native=booleans())
def test_a_dependence_on_any_share_size_or_statistic_of_the_minibatch_is_refused(
    tmp_path_factory: pytest.TempPathFactory, statistic: str, share: float, size: float, dead: float, native: bool
) -> None:
    """In a minibatch of 24 responses of 48 tokens."""
    condition = statistic.format(n=3 + int(size * 1100), responses=1 + int(size * 22), share=share, dead=dead)
    names = "r, a, n = b.ratios.detach(), b.advantages, len(b.ratios)"
    body = f"{names}; return -b.ratios * a * torch.where(torch.as_tensor({condition}), 2.0, 1.0)"
    limits = ("ppo.minibatch_size=24", "rollout.max_response_tokens=48", "numerics.max_context=64")
    mode = "native" if native else "deterministic"
    with pytest.raises(UserError, match=r": f depends on the layout\. (micro batch|ranks) \d+: loss differs at"):
        tried(tmp_path_factory.mktemp("own"), body, *limits, f"numerics.mode={mode}")


KL_IN_LOSS = "kl={placement: loss}"
OTHERS = [
    ("advantages", "return b.rewards - b.values"),
    ("advantages", "x = b.scores; return ((b.group_sizes * x - b.group_sums(x)) / 2).float()"),
    ("advantages", "return b.of_tokens(b.scores.float())"),
    ("kl.estimator", "x = (q - p).clamp(max=60.0); return exp(x) - 1 - x"),
    ("reward.placement", "return b.of_tokens(b.scores) / b.lengths"),
    ("reward.placement", "return torch.where(b.positions + 1 == b.lengths, b.of_tokens(b.scores).float(), -0.01)"),
]


# in torch's tanh; its derivative is another operation of torch
DEPENDENT = {
    "ppo.objective": "return -torch.tanh(b.ratios) * b.advantages",
    "advantages": "return torch.tanh(b.rewards)",
    "kl.estimator": "return torch.tanh(p - q)",
    "reward.placement": "return torch.tanh(b.of_tokens(b.scores))",
}


def test_every_field_with_a_function_has_a_case_below() -> None:
    assert len(fields(Functions)) == len(FIELDS)
    assert FIELDS.keys() == DEPENDENT.keys()


@pytest.mark.parametrize("field", DEPENDENT)
@pytest.mark.parametrize("kl", ["kl={placement: reward}", KL_IN_LOSS])
def test_the_operations_of_every_function_are_watched(field: str, kl: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"^{field}\.path: .*: f calls torch's tanh: its bits may differ"):
        tried(tmp_path, DEPENDENT[field], kl, field=field)
    tried(tmp_path, DEPENDENT[field], kl, "numerics.mode=native", field=field)


@pytest.mark.parametrize(("field", "body"), OTHERS)
def test_other_functions_pass_too(tmp_path: Path, field: str, body: str) -> None:
    tried(tmp_path, body, field=field)
    if field == "kl.estimator":
        tried(tmp_path, body, KL_IN_LOSS, field=field)


@pytest.mark.parametrize("samples", [2, 6, 8])
def test_leave_one_out_advantages_pass_whatever_the_size_of_a_group(tmp_path: Path, samples: int) -> None:
    body = "o = b.group_sums(b.scores) - b.scores; return (b.scores - o / (b.group_sizes - 1)).float()"
    tried(tmp_path, body, f"rollout.samples_per_prompt={samples}", "value={kind: none}", field="advantages")


OTHER_PROMPT = r"returned advantages of prompt \d that depend on the rewards of response \d+, to prompt \d, and not on"


@pytest.mark.parametrize(
    ("field", "body", "message"),
    [
        ("advantages", "return b.rewards - b.rewards.mean()", "calls torch's mean: its bits may differ between"),
        ("advantages", "s = b.scores.float(); return s - torch.cat([s[1:], s[:1]])", OTHER_PROMPT),
        ("advantages", "return b.rewards * torch.rand(())", "gives two results for one batch"),
        ("advantages", "calls.append(0); return b.rewards * len(calls)", "gives two results for one batch"),
        ("advantages", "b.rewards.add_(1); return b.rewards", "changes rewards in place"),
        ("advantages", "return b.rewards / (b.rewards - 1).abs()", "returned inf at response 0, position 0 and"),
        ("advantages", "return b.rewards.tolist()", "returned a list; must be a float32 tensor"),
        ("advantages", "return b.rewards.repeat(2)", r"returned a tensor \[\d+\] float32; must be a float32 tensor"),
        ("kl.estimator", "return p - q.mean()", "depends on the layout. micro batch 1: loss differs"),
        ("kl.estimator", "return (q - p).exp() - 1", "returned inf and 0 more|returned inf; must be finite"),
        ("reward.placement", "return b.scores", r"returned a tensor \[\d+\] float64; must be a float32 or float64"),
        ("reward.placement", "return b.of_tokens(b.scores).half()", r"returned a tensor \[\d+\] float16; must be"),
    ],
)
def test_what_is_wrong_in_them_is_one_line(tmp_path: Path, field: str, body: str, message: str) -> None:
    with pytest.raises(UserError, match=rf"^{field}\.path: {tmp_path}/own\.py:5: f (?:{message})"):
        tried(tmp_path, body, field=field)


def test_a_divergence_without_a_gradient_is_refused_in_the_loss_alone(tmp_path: Path) -> None:
    tried(tmp_path, "return (p - q).detach()", field="kl.estimator")
    with pytest.raises(UserError, match="without a gradient"):
        tried(tmp_path, "return (p - q).detach()", KL_IN_LOSS, field="kl.estimator")


def test_a_divergence_in_the_reward_is_tried_with_all_tokens_of_an_iteration(tmp_path: Path) -> None:
    body = "return (p - q) * (2.0 if len(p) > 200 else 1.0)"  # a minibatch has 16 responses of 6 tokens
    tried(tmp_path, body, KL_IN_LOSS, field="kl.estimator")
    with pytest.raises(UserError, match="depends on the layout"):
        tried(tmp_path, body, field="kl.estimator")


def test_a_file_that_changes_the_settings_of_the_process_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="or its file changes torch's default dtype, which the whole run shares"):
        tried(tmp_path, "return -b.ratios", head="import torch\ntorch.set_default_dtype(torch.float64)\n")
