"""The engine section: what it allows, what it refuses and in which words, what a server's command line follows from."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ppo_repro.base.errors import UserError
from ppo_repro.config.rollout import DETERMINISTIC_ARGUMENTS, OWN_ARGUMENTS, SGLangServers
from ppo_repro.runs.resume import require_same_sampler
from ppo_repro.sampling.sglang.command import look_into, numerics_digest
from tests.sampling.sglang.fake_sglang import fake_python
from tests.support.paths import ROOT
from tests.support.runs import small_config

SGLANG = "rollout.engine.kind=sglang"
PACKAGE = ROOT / "ppo_repro"


def engine_of(*overrides: str) -> SGLangServers:
    engine = small_config(SGLANG, *overrides).rollout.engine
    assert isinstance(engine, SGLangServers)
    return engine


OURS, STOCK = (SGLANG,), (SGLANG, "rollout.engine.numerics=stock")
URLS = "rollout.engine.urls=[http://h:1, http://h:2]"
SAME_BITS: list[tuple[tuple[str, ...], tuple[str, ...]]] = [
    ((), OURS),
    (OURS, (*OURS, "rollout.engine.servers=3", "rollout.engine.timeout_s=9")),
    (STOCK, (*STOCK, "rollout.engine.timeout_s=9", "rollout.engine.python=/x")),
    ((*STOCK, URLS), (*STOCK, "rollout.engine.urls=[http://g:1, http://g:2]")),
]
OTHER_BITS: list[tuple[tuple[str, ...], tuple[str, ...], str]] = [
    (OURS, STOCK, "the run samples with deterministic numerics"),
    (STOCK, (), "would sample with deterministic numerics, and the run samples with SGLang's"),
    (("numerics.mode=native",), ("numerics.mode=native", *STOCK), "the run samples with native numerics"),
    (STOCK, (*STOCK, "rollout.engine.servers=2"), "servers: 2"),
    (STOCK, (*STOCK, "rollout.engine.arguments=[--dtype, half]"), "arguments: --dtype half"),
    (
        (*STOCK, "rollout.engine.arguments=[-a, b]"),
        (*STOCK, "rollout.engine.arguments=['-a b']"),
        "arguments: '-a b'",
    ),
]


@pytest.mark.parametrize(("recorded", "now"), SAME_BITS)
def test_engines_of_the_same_bits_may_take_over(recorded: tuple[str, ...], now: tuple[str, ...]) -> None:
    require_same_sampler(small_config(*recorded), small_config(*now))


@pytest.mark.parametrize(("recorded", "now", "said"), OTHER_BITS, ids=[said for *_, said in OTHER_BITS])
def test_an_engine_of_other_bits_may_not(recorded: tuple[str, ...], now: tuple[str, ...], said: str) -> None:
    with pytest.raises(UserError, match=r"^rollout\.engine: ") as caught:
        require_same_sampler(small_config(*recorded), small_config(*now))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


REFUSED = {
    ("rollout.engine.numerics=stock", "rollout.top_k=5"): "engine.numerics = stock needs rollout.top_k = 0",
    ("rollout.engine.numerics=stock", "rollout.top_p=0.9"): "engine.numerics = stock needs rollout.top_p = 1",
    ("rollout.top_k=1",): "rollout.top_k must be 0 or above 1 with rollout.engine.kind = sglang",
    ("rollout.mismatch_sigma=0.1",): "rollout.mismatch_sigma needs rollout.engine.kind = torch: the built-in sampler",
    ("numerics.mode=native",): "rollout.engine.numerics = deterministic needs numerics.mode = deterministic",
    ("rollout.engine.urls=[http://h:1]", "rollout.engine.servers=2"): "servers is for servers the run starts",
    ("rollout.engine.urls=[http://h:1]", "rollout.engine.python=/x"): "python is for servers the run starts",
    ("rollout.engine.urls=[http://h:1]", "rollout.engine.arguments=[--x]"): "arguments is for servers the run",
    ("rollout.engine.urls=[ftp://h:1]",): "rollout.engine.urls.0 = 'ftp://h:1'",
}


@pytest.mark.parametrize("overrides", REFUSED, ids=" ".join)
def test_what_sglang_cannot_do_is_refused_in_one_line(overrides: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as caught:
        small_config(SGLANG, *overrides)
    assert REFUSED[overrides] in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", [*OWN_ARGUMENTS, *DETERMINISTIC_ARGUMENTS, "--port=1", "--mod", "--weight-v"])
def test_arguments_the_run_sets_itself_are_refused_by_name(name: str) -> None:
    with pytest.raises(UserError, match=r"is set by the run|which records would keep"):
        small_config(SGLANG, f"rollout.engine.arguments=['{name}', '1']")


def test_the_interpreter_is_looked_into_before_it_is_used(tmp_path: Path) -> None:
    def refusal(package: Path, *misbehave: str) -> str:
        with pytest.raises(UserError) as caught:
            look_into(engine_of(f"rollout.engine.python={fake_python(tmp_path, package, *misbehave)}"))
        return str(caught.value)

    good = engine_of(f"rollout.engine.python={fake_python(tmp_path, PACKAGE)}")
    assert look_into(good).packages["sglang"] == "0.5.21"
    assert "has no sglang" in refusal(PACKAGE, "no sglang")
    assert "not ppo_repro's plugin" in refusal(PACKAGE, "no plugin")
    assert "has other numerics than this one" in refusal(tmp_path)
    with pytest.raises(UserError, match="cannot be run"):
        look_into(engine_of("rollout.engine.python=/nowhere/python"))
    with pytest.raises(UserError, match="does not answer as a Python interpreter"):
        look_into(engine_of("rollout.engine.python=/bin/true"))


def test_server_and_trainer_pin_what_both_have_to_the_same_version() -> None:
    def pins(name: str) -> dict[str, str]:
        lines = (ROOT / name).read_text().splitlines()
        pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
        return {package.lower().replace("_", "-"): version for package, version in pairs}

    ours, theirs = pins("constraints.txt"), pins("constraints-sglang.txt")
    both = set(ours) & set(theirs)
    assert {"torch", "transformers", "tokenizers", "numpy", "safetensors"} <= both
    assert {name: theirs[name] for name in both} == {name: ours[name] for name in both}


SOURCES = shutil.ignore_patterns("*.so", "*.o", "__pycache__")


@pytest.mark.parametrize(
    ("file", "counts"),
    [
        ("numerics/definition/rows.py", False),
        ("numerics/rows.md", False),
        ("numerics/network.py", True),
        ("numerics/c/rows.c", True),
        ("sampling/draw.py", True),
    ],
)
def test_files_that_decide_no_bit_do_not_count(file: str, counts: bool, tmp_path: Path) -> None:
    for folder in ("numerics", "sampling"):
        shutil.copytree(PACKAGE / folder, tmp_path / folder, ignore=SOURCES)
    with (tmp_path / file).open("a") as changed:
        changed.write("\n// or # another comment\n")
    assert (numerics_digest(tmp_path) != numerics_digest(PACKAGE)) == counts
