# Everything runs in .venv, which is made on first use; pass PYTHON=... to choose the interpreter (3.10 or newer).

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.10 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
INSTALLED := .venv/.installed
# Sphinx reads the sources and imports nothing: it runs while the rest is being installed.
DOCS := .venv/docs

# Ranks share the cores: one thread for each.
export OMP_NUM_THREADS ?= 1
# Hundreds of processes are started: none is to compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
GPU_TESTS = tests/ranks/test_gpu.py tests/ranks/test_shared_gpu.py tests/unit/test_codec.py tests/unit/test_quantize.py tests/unit/test_state_fake.py

.PHONY: help install demo noniid test late nightly gpu wheels lint format docs matrix frameworks nccl bench clean

help: ## list the targets
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /\1\t/' | expand -t 10

install: $(INSTALLED) ## make .venv with everything below

$(INSTALLED): setup.cfg pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "no Python 3.10 or newer found; pass PYTHON=/path/to/python3" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -e '.[examples,test,lint]' -c constraints.txt
	@touch $@

$(DOCS)/.installed: setup.cfg constraints.txt
	@test -n "$(PYTHON)" || { echo "no Python 3.10 or newer found; pass PYTHON=/path/to/python3" >&2; exit 1; }
	$(PYTHON) -m venv $(DOCS)
	$(PYTHON) -c "import configparser; c = configparser.ConfigParser(); c.read('setup.cfg'); \
	print(c['options.extras_require']['docs'])" | xargs $(DOCS)/bin/python -m pip install --quiet -c constraints.txt
	@touch $@

demo: $(INSTALLED) ## train on handwritten digits in two cells; writes runs/digits/
	$(BIN)/python examples/01_digits/run.py

noniid: $(INSTALLED) ## compare algorithms in cells that lack most classes, and combiners against garbage; writes runs/noniid/
	$(BIN)/python examples/05_noniid/run.py

# Files of tests run side by side, one more than two cores take: some of them wait. Those that measure seconds run alone.
# tests/conftest.py has put the files in order; pytest-xdist would begin with those of many tests, not the long ones.
test: $(INSTALLED) ## run the tests; those of real launchers skip where system packages are missing
ifneq ($(CLUSTER),only)
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder --ignore=tests/cluster
ifneq ($(wildcard /dev/nvidiactl),)
	$(BIN)/python -m pytest -m gpu -q $(GPU_TESTS)
endif
endif
ifneq ($(CLUSTER),no)
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m 'not alone' tests/cluster
	$(BIN)/python -m pytest -m alone tests/cluster
endif

nightly: $(INSTALLED) ## run the long forms of tests, some hours (ONLY="storage nccl" for some); logs in runs/nightly/
	$(BIN)/python -m tests.nightly $(if $(ONLY),--only $(ONLY))

late: $(INSTALLED) ## run tests while what they start begins late and stands still at times (TESTS=tests/ranks/test_exec.py SEED=2)
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder -p tests.late --late $(or $(SEED),1) $(or $(TESTS),tests/ranks)

lint: $(INSTALLED) ## check style, types, imports and docstrings
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/pydoclint --config=pydoclint.toml xffl

format: $(INSTALLED) ## format the code, and fix what ruff can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(DOCS)/.installed ## build docs/_build/html; a warning is an error
	$(DOCS)/bin/python -m sphinx -W --keep-going -q -b html docs docs/_build/html
	@echo docs/_build/html/index.html

matrix: ## test each supported PyTorch and Python (an hour; ROWS="torch-2.11" for some), for the table in docs/install.rst
	$(PYTHON) tests/matrix.py $(ROWS)

frameworks: ## test the oldest and newest Trainer, TRL and Lightning, the newest torchtitan (half an hour; ROWS="trl-oldest" for some), for docs/frameworks.rst
	$(PYTHON) -m tests.frameworks $(ROWS)

# Without .venv, which needs a network: uses the Python that has PyTorch, and the packages of `make wheels`.
gpu: ## run the tests marked gpu on a machine without a network (docs/install.rst)
	test -z "$(wildcard wheels/*.whl)" || $(PYTHON) -m pip install --quiet --no-index --no-deps --upgrade --target .gpu $(wildcard wheels/*.whl)
	PYTHONPATH=.gpu $(PYTHON) -m pytest -m gpu -q -p no:cacheprovider $(GPU_TESTS)

wheels: $(INSTALLED) ## download into wheels/ the packages that a machine with a GPU may lack, to be copied there
	$(BIN)/python -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 -c constraints.txt -d wheels \
	jsonargparse cryptography cffi pycparser

nccl: $(INSTALLED) ## check all strategies and rounds against NCCL's rules, without a GPU (a quarter of an hour; docs/nccl.rst)
	NCCL_ALL=1 $(BIN)/python -m pytest -q -m 'long or not long' tests/ranks/test_nccl.py

bench: $(INSTALLED) ## time rounds against raw collectives; writes runs/bench/
	$(BIN)/xffl bench --processes 2 --federated 1,1 --out runs/bench
	$(BIN)/xffl exec --processes 2 --federated 1,1 benchmarks/round.py --out runs/bench/round.json

clean: ## remove what make has made, .venv included
	rm -rf .venv build docs/_build docs/reference/api runs *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
