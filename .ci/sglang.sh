#!/bin/sh
# Make an environment with SGLang for servers on the CPU, and this checkout in it. Usage: .ci/sglang.sh DIR
# Safe to repeat: while constraints and C kernels stay as they are, a second call returns at once. 2.8 GB; x86-64 Linux.
#   PYTHON         interpreter for a new environment (default python3; 3.11 is what was tested)
#   TORCH_BACKEND  none takes whatever torch the package index has, instead of the CPU build
# With a GPU this is not needed: pip install 'ppo_repro[sglang]' in an environment of its own.
set -eu
[ $# = 1 ] || { echo "usage: $0 DIR" >&2; exit 2; }
mkdir -p "$1"
venv=$(cd "$1" && pwd)
cd "$(dirname "$0")/.."
py=$venv/bin/python
fail() { echo "error: $*" >&2; exit 2; }

[ -x "$py" ] || "${PYTHON:-python3}" -m venv "$venv" || fail "no virtual environment in $venv"
stamp=$venv/.sglang
kernels=$(cat hatch_build.py ppo_repro/numerics/build.py ppo_repro/numerics/c/*.[ch] | cksum)
state=$(cat constraints-sglang.txt pyproject.toml .ci/sglang.sh | cksum; pwd; echo "$kernels")
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$state" ]; then exit 0; fi

echo "sglang: installing into $venv; takes some minutes"
pin=$(sed -n 's/^torch==//p' constraints-sglang.txt)
torch=torch==$pin
if [ "${TORCH_BACKEND:-cpu}" = cpu ]; then
    # reads the list of versions only
    if "$py" -m pip index versions torch 2>/dev/null | grep -qF "$pin+cpu"; then
        "$py" -m pip install -qq --no-deps "$torch+cpu"
    else
        "$py" -m pip install -qq --no-deps --index-url https://download.pytorch.org/whl/cpu "$torch" ||
            fail "no CPU build of torch $pin; if only the PyTorch index is out of reach: TORCH_BACKEND=none"
    fi
fi
"$py" -m pip install -qq --no-deps -r constraints-sglang.txt || fail "installation failed"
"$py" -m pip install -qq --no-deps -e . || fail "this checkout cannot be installed"
echo "$state" > "$stamp"
echo "sglang: $("$py" -c 'from importlib.metadata import version as v; print("sglang", v("sglang") + ", torch", v("torch"))'), $venv"
