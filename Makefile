# Two commands do everything: `make demo` trains, `make test` is the gate. Both set up the environment once.
#
#   make check    lint, types, pure and loopback tests, 100 examples a property     6 minutes on 2 cores
#   make test     the same and tests with gloo processes                            10 to 15 minutes on 2 cores
#   make nightly  2,000 examples, mutants, coverage, faults, soak, the page in a browser, oldest and newest versions: before a release
#
#   PYTHON    interpreter for the environment        (default python3, >= 3.10)
#   VENV      where the environment lives            (default .venv)
#   PIP_ARGS  extra arguments of pip install         (for example --index-url ... for a CPU build of torch)
#   RANKS     processes of the demo                  (default 2)
#   DEMO      options and overrides of the demo      (default none; docs/train.md; DEMO="--optimizer muon", DEMO=--help)
#   JOBS      tests that run at once                 (default 3: with more, two cores spend their time on taking turns)
#   BENCH     what `make bench` measures             (default: everything; docs/benchmarks.md; BENCH=--help)
#   GPU       what `make gpu` tries                  (default: everything; docs/gpu.md; GPU=--help)
#   FAULTS    which faults `make faults` makes       (default: every; docs/faults.md)
#   VENV_BENCH  where the peers of `make bench` live (default .venv-bench)
#   VENV_FRAMEWORKS  where Lightning, accelerate, Ray and torchao live (default .venv-frameworks)
#   VENV_DOCS  where Sphinx lives                   (default .venv-docs)

PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
RANKS ?= 2
DEMO ?=
JOBS ?= 3
VENV_BENCH ?= .venv-bench
VENV_FRAMEWORKS ?= .venv-frameworks
VENV_DOCS ?= .venv-docs
BENCH ?=
FAULTS ?=
GPU ?=
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
BIN_BENCH := $(VENV_BENCH)/bin
STAMP_BENCH := $(VENV_BENCH)/.installed
STAMP_FRAMEWORKS := $(VENV_FRAMEWORKS)/.installed
STAMP_DOCS := $(VENV_DOCS)/.installed
PEERS := tests/benchmarks/peers

# One thread per rank: on a small machine the ranks are the parallelism.
export OMP_NUM_THREADS ?= 1

# Otherwise each of the many processes that tests start would compile the package where the machine sets this variable.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo check test nightly coverage lint types browser docs faults frameworks oldest newest bench bench-costs gpu mutation setup clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e '.[dev]'
	touch $@

demo: $(STAMP)
	$(BIN)/torchrun --standalone --nproc-per-node $(RANKS) -m examples.bytegpt $(DEMO)

# Tests that take long or need more than torch are marked `nightly`; those that start processes are marked `dist`.
PYTEST = $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

check: lint types
	$(PYTEST) -m "not nightly and not dist and not slow"

test: lint types
	$(PYTEST) -m "not nightly" --durations=25

nightly: lint types browser docs
	$(PYTEST) --hypothesis-profile nightly --timeout 1200 --durations=25
	$(MAKE) coverage
	PYTHONPATH=tests $(BIN)/python -m faults interrupts
	PYTHONPATH=tests $(BIN)/python -m faults soak --steps 50000
	$(MAKE) faults
	$(MAKE) frameworks
	$(MAKE) oldest newest

# Which lines of the package no test by day runs, processes of tests included; as pages in build/coverage. Left out are tests that
# set a trace function of their own.
coverage: $(STAMP)
	$(PYTEST) -m "not nightly" --cov --cov-report=term:skip-covered --cov-report=html:build/coverage --ignore tests/faults

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

# Chromium for the tests of the report's page; they are skipped where it cannot be had.
browser:
	tests/browser/install.sh

# The documentation as a site, in build/docs: open index.html. Needs no network once its tools are installed: Sphinx and the
# package. With a stand-in for torch the reference would lose signatures and members of what inherits from torch's classes.
docs: $(STAMP_DOCS)
	$(VENV_DOCS)/bin/python -m docs.tools.diagrams
	$(VENV_DOCS)/bin/sphinx-build --quiet --fail-on-warning --keep-going -b html docs build/docs

$(STAMP_DOCS): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV_DOCS)
	$(VENV_DOCS)/bin/python -m pip install --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e '.[docs]'
	touch $@

# The tests with the oldest versions there is support for (PYTHON=python3.10 for the oldest Python, too), or with the newest
# there are. No part of `make test`: where a torch has no CPU build it downloads gigabytes.
oldest newest: %: .venv-%/.installed
	.venv-$*/bin/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m "not nightly"

.venv-%/.installed: pyproject.toml tests/versions/%.txt
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip install --disable-pip-version-check $(PIP_ARGS) -c tests/versions/$*.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) $(VENV_BENCH) $(VENV_FRAMEWORKS) $(VENV_DOCS) .venv-oldest .venv-newest .mypy_cache .ruff_cache .hypothesis .coverage* runs build/mutation build/bench build/docs build/gpu

# The fault table: every kind of fault on real processes, for megabucket and for torch DDP; exits with 1 if ours has a failure.
# FAULTS="--quick" runs one combination of each place, FAULTS="--kinds 'SIGKILL*'" some of them.
faults: $(STAMP)
	PYTHONPATH=tests $(BIN)/python -m faults table --torch-ddp $(FAULTS)
	PYTHONPATH=tests $(BIN)/python -m faults table $(FAULTS)

# The adapters of megabucket/integrations against each framework's own DDP, and their examples. Their frameworks are in an
# environment of their own; elsewhere these tests are skipped.
frameworks: $(STAMP_FRAMEWORKS)
	$(VENV_FRAMEWORKS)/bin/python -m pytest tests/integrations

$(STAMP_FRAMEWORKS): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV_FRAMEWORKS)
	$(VENV_FRAMEWORKS)/bin/python -m pip install --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e '.[dev,lightning,hf,float8,ray]' \
	  'jsonargparse[signatures]' peft
	touch $@

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

# All that waits for a GPU, in ten minutes on one: device tests, the sanitizer, benchmarks, profiles. Writes build/gpu/. Installs
# nothing: runs with the environment if there is one, and with PYTHON otherwise. Where there is no GPU it says so and ends.
gpu:
	$(or $(wildcard $(BIN)/python),$(PYTHON)) tests/gpu/ready.py $(GPU)

mutation: $(STAMP)
	$(BIN)/python -m pip install --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e '.[mutation]'
	$(BIN)/python tests/mutation/mutate.py
