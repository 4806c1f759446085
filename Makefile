# Two commands do everything: `make demo` trains, `make test` runs the whole gate. Both set up the environment once.
#
#   PYTHON    interpreter for the environment        (default python3, >= 3.10)
#   VENV      where the environment lives            (default .venv)
#   PIP_ARGS  extra arguments of pip install         (for example --index-url ... for a CPU build of torch)
#   RANKS     processes of the demo                  (default 2)
#   JOBS      tests that run at once                 (default 2)

PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
RANKS ?= 2
JOBS ?= 2
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# One thread per rank: on a small machine the ranks are the parallelism.
export OMP_NUM_THREADS ?= 1

.PHONY: demo test check lint types browser unit bench bench-gpu mutation setup clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e '.[dev]'
	touch $@

demo: $(STAMP)
	$(BIN)/torchrun --standalone --nproc-per-node $(RANKS) -m megabucket train -c configs/bytegpt.yaml

test: lint types browser unit

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

# Chromium for the tests of the report's page; they are skipped where it cannot be had.
browser:
	tests/browser/install.sh

unit: $(STAMP)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .hypothesis runs build/mutation

bench: $(STAMP)
	$(BIN)/python tests/benchmarks/constant_costs.py

# One GPU, world size 1; fits ten minutes. Says so and stops where there is no GPU.
bench-gpu: $(STAMP)
	$(BIN)/python tests/benchmarks/gpu.py

mutation: $(STAMP)
	$(BIN)/python -m pip install --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e '.[mutation]'
	$(BIN)/python tests/mutation/mutate.py
