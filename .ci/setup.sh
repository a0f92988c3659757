#!/bin/sh
# Make the virtual environment and install the checkout into it, editable. Usage: .ci/setup.sh [EXTRA...]
# Safe to repeat: while the dependencies and the C kernels stay as they are, a second call returns at once.
#   PYTHON         interpreter for a new environment (default python3)
#   VENV           folder of the environment (default .venv)
#   TORCH_BACKEND  torch build, read when torch is first installed: auto, cpu, cu130, ... as uv knows them, or
#                  none for whatever the package index has. Unset: a CPU build if pip finds one, otherwise auto,
#                  which takes the CPU build where there is no GPU.
set -eu
cd "$(dirname "$0")/.."
venv=${VENV:-.venv}
py=$venv/bin/python

fail() { echo "error: $*" >&2; exit 2; }
minor() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || echo "not there"; }
# kernels are built again also where their libraries were removed
state() {
    { cat pyproject.toml constraints.txt hatch_build.py ppo_repro/numerics/build*.py ppo_repro/numerics/c/*.[ch] \
          ppo_repro/numerics/c/gpu/*.[ch]
      ls ppo_repro/numerics/c; } | cksum
}
torch_version() { "$py" -c 'from importlib.metadata import version; print(version("torch"))' 2>/dev/null || :; }

if [ ! -x "$py" ] || [ ! -x "$venv/bin/pip" ]; then
    wanted=${PYTHON:-python3}
    "$wanted" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
        fail "Python 3.11 or newer is needed, $wanted is $(minor "$wanted"); try: PYTHON=python3.12 make setup"
    "$wanted" -m venv "$venv"
elif [ -n "${PYTHON:-}" ] && [ "$(minor "$PYTHON")" != "$(minor "$py")" ]; then
    fail "$venv has Python $(minor "$py") and $PYTHON is $(minor "$PYTHON"); choose another folder: VENV=.venv-other"
fi

extras=$(echo "$*" | tr ' ' ',')
stamp=$venv/.setup-${extras:-base}
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$(state)" ]; then exit 0; fi

echo "setup: installing into $venv; the first time takes a minute or more"
"$py" -m pip install -qq -c constraints.txt uv
pin=$(sed -n 's/^torch==//p' constraints.txt)
installed=$(torch_version)
backend=
if [ "${installed%%+*}" != "$pin" ]; then
    # `pip index` reads the list of versions only; `pip install --dry-run` may download the whole wheel to look at it.
    found=$("$py" -m pip index versions torch 2>/dev/null | tr ', ' '\n\n' | grep -E "^$pin(\+|$)" | head -n 1)
    case ${TORCH_BACKEND:-unset},$found in
        unset,*+cpu) "$py" -m pip install -qq --no-deps "torch==$found" ;;
        none,*) ;;
        *) backend=--torch-backend=${TORCH_BACKEND:-auto} ;;
    esac
fi
UV_FIND_LINKS=$(echo "${PIP_FIND_LINKS:-}" | tr ' ' ',') "$venv/bin/uv" pip install --quiet --python "$py" \
    --reinstall-package ppo_repro $backend -c constraints.txt -b constraints.txt -e ".${extras:+[$extras]}" ||
    fail "installation failed${backend:+; if only the PyTorch index is out of reach: TORCH_BACKEND=none make setup}"
state > "$stamp"
echo "setup: torch $(torch_version), Python $(minor "$py"), $venv${extras:+, extras $extras}"
