# Two commands do everything: `make demo` trains, `make test` is the gate. Both set up the environment once.
#
#   make check    lint, types, pure and loopback tests, 100 examples a property     under 3 minutes on 2 cores
#   make test     the same and tests with gloo processes                            under 8 minutes on 2 cores
#   make nightly  2,000 examples, faults, soak, mutants, the page in a browser, oldest and newest versions: before a release
#
#   PYTHON    interpreter for the environment        (default python3, >= 3.10)
#   VENV      where the environment lives            (default .venv)
#   PIP_ARGS  extra arguments of pip install         (for example --index-url ... for a CPU build of torch)
#   RANKS     processes of the demo                  (default 2)
#   JOBS      tests that run at once                 (default 3: many of them wait)
#   BENCH     what `make bench` measures             (default: everything; docs/benchmarks.md; BENCH=--help)
#   FAULTS    which faults `make faults` makes       (default: every; docs/faults.md)
#   VENV_BENCH  where the peers of `make bench` live (default .venv-bench)

PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
RANKS ?= 2
JOBS ?= 3
VENV_BENCH ?= .venv-bench
BENCH ?=
FAULTS ?=
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
BIN_BENCH := $(VENV_BENCH)/bin
STAMP_BENCH := $(VENV_BENCH)/.installed
PEERS := tests/benchmarks/peers

# One thread per rank: on a small machine the ranks are the parallelism.
export OMP_NUM_THREADS ?= 1

.PHONY: demo check test nightly lint types browser faults oldest newest bench bench-costs bench-gpu mutation setup clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e '.[dev]'
	touch $@

demo: $(STAMP)
	$(BIN)/torchrun --standalone --nproc-per-node $(RANKS) -m examples.bytegpt

# Tests that take long or need more than torch are marked `nightly`; those that start processes are marked `dist`.
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

check: lint types
	$(PYTEST) -m "not nightly and not dist and not slow"

test: lint types
	$(PYTEST) -m "not nightly" --durations=25

nightly: lint types browser
	FAULTS_SOAK_STEPS=50000 FAULTS_EVERY_LINE=1 $(PYTEST) --hypothesis-profile nightly --durations=25
	$(MAKE) faults
	$(MAKE) oldest newest

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

# Chromium for the tests of the report's page; they are skipped where it cannot be had.
browser:
	tests/browser/install.sh

# The tests with the oldest versions there is support for (PYTHON=python3.10 for the oldest Python, too), or with the newest
# there are. No part of `make test`: where a torch has no CPU build it downloads gigabytes.
oldest newest: %: .venv-%/.installed
	.venv-$*/bin/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m "not nightly"

.venv-%/.installed: pyproject.toml tests/versions/%.txt
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip install --disable-pip-version-check $(PIP_ARGS) -c tests/versions/$*.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) $(VENV_BENCH) .venv-oldest .venv-newest .mypy_cache .ruff_cache .hypothesis runs build/mutation build/bench

# The fault table: every kind of fault on real processes, for megabucket and for torch DDP; exits with 1 if ours has a failure.
# FAULTS="--quick" runs one combination of each place, FAULTS="--kinds 'SIGKILL*'" some of them.
faults: $(STAMP)
	PYTHONPATH=tests $(BIN)/python -m faults table --torch-ddp $(FAULTS)
	PYTHONPATH=tests $(BIN)/python -m faults table $(FAULTS)

# Beside its peers: torch DDP, ZeroRedundancyOptimizer, FSDP2, Megatron's wheel, DeepSpeed. Writes build/bench/.
bench: $(STAMP_BENCH)
	PYTHONPATH=tests/benchmarks $(BIN_BENCH)/python -m peers $(BENCH)

# A peer that cannot be installed is named in every result.
$(STAMP_BENCH): pyproject.toml constraints.txt $(PEERS)/requirements.txt
	$(PYTHON) -m venv $(VENV_BENCH)
	$(BIN_BENCH)/python -m pip install --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -c $(PEERS)/requirements.txt -e .
	for peer in megatron-core deepspeed; do \
	  $(BIN_BENCH)/python -m pip install --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -c $(PEERS)/requirements.txt $$peer \
	    || echo "$$peer could not be installed; results will report it as absent"; \
	done
	touch $@

bench-costs: $(STAMP)
	$(BIN)/python tests/benchmarks/constant_costs.py

# One GPU, world size 1; fits ten minutes. Says so and stops where there is no GPU.
bench-gpu: $(STAMP)
	$(BIN)/python tests/benchmarks/gpu.py

mutation: $(STAMP)
	$(BIN)/python -m pip install --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e '.[mutation]'
	$(BIN)/python tests/mutation/mutate.py
