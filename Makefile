# PYTHON=python3.12 and TORCH_BACKEND=cu130 are read when the environment is made, VENV=folder always: .ci/setup.sh.
VENV ?= .venv
export VENV
# each of many processes would compile the sources of its libraries again, seconds of it
unexport PYTHONDONTWRITEBYTECODE
BIN = $(VENV)/bin
# as many processes as there are cores, at most four; each computes with one thread
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --maxprocesses 4

.PHONY: setup run test test-slow test-long test-gpu test-sglang test-vllm lint notebooks docs

setup:  ## make the virtual environment and install the checkout into it
	@.ci/setup.sh

run: setup  ## one small experiment, each time in a new folder
	$(BIN)/ppo-repro run experiments/quickstart.yaml --out runs/$$(date -u +%Y%m%dT%H%M%SZ)

test:  ## the quick tests; ARGS="-k name" goes to pytest
	@.ci/setup.sh test
	$(PYTEST) --dist loadfile $(ARGS)

test-slow:  ## the tests marked slow, and only those
	@.ci/setup.sh test
	$(PYTEST) --dist worksteal -m slow $(ARGS)

test-long:  ## the tests marked long, and every Hypothesis test with newly drawn cases: half an hour and more
	@.ci/setup.sh test
	$(PYTEST) --dist worksteal -m "long or (hypothesis and not slow)" --hypothesis-profile=new $(ARGS)

test-gpu:  ## what an NVIDIA GPU is to show, and how fast it is: ten minutes at most; ARGS="families" only that step
	@.ci/setup.sh test
	$(BIN)/python -m tests.gpu.device_check $(ARGS)

SGLANG_VENV ?= .venv-sglang
test-sglang:  ## the tests that start real SGLang servers, on the CPU: ten minutes and 2.8 GB
	@.ci/setup.sh test
	@.ci/server.sh sglang $(SGLANG_VENV)
	OMP_NUM_THREADS=1 PPO_REPRO_SGLANG_PYTHON=$(abspath $(SGLANG_VENV))/bin/python \
		$(BIN)/python -m pytest -q -m sglang $(ARGS)

VLLM_VENV ?= .venv-vllm
test-vllm:  ## the tests that start a real vLLM server, on the CPU: five minutes and 3.4 GB
	@.ci/setup.sh test
	@.ci/server.sh vllm $(VLLM_VENV)
	OMP_NUM_THREADS=1 PPO_REPRO_VLLM_PYTHON=$(abspath $(VLLM_VENV))/bin/python \
		$(BIN)/python -m pytest -q -m vllm $(ARGS)

lint:  ## style, format and types; changes nothing
	@.ci/setup.sh test dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

notebooks:  ## records the runs that the notebooks show, where they are missing, and executes them; ARGS="clipping" only that one
	@.ci/setup.sh notebook
	OMP_NUM_THREADS=1 $(BIN)/python -m analysis.execute $(ARGS)

docs:  ## pages from the docstrings of the public names: docs/index.html
	@.ci/setup.sh docs
	$(BIN)/python .ci/docs.py docs
