# Every target builds in place first; a build that is up to date takes no time.

PYTHON3 ?= python3
# Names that a user gives go through the environment: a shell would split them.
SETUP := "$$PYTHON3" -B -m tools.build
export PYTHON3 NPROC STEPS DEVICE

# The release to build on. Its variable gets a rarer name, as other programs may read
# RELEASE, and the options of this make do not reach makes that a recipe starts.
RELEASE ?= $(TORCH_RELEASE)
export TORCH_RELEASE := $(RELEASE)
unexport RELEASE MAKEFLAGS QUICK ARGS
VENV = $(if $(TORCH_RELEASE),build/$(TORCH_RELEASE)/.venv,.venv)
PYTHON = "$(VENV)/bin/python"

# The wheel of the release; empty: whatever pip finds.
export TORCH_WHEEL

# lintrunner keeps its state under XDG_DATA_HOME, and finds the linters on PATH.
LINT = PATH="$$PWD/$(VENV)/bin:$$PATH" XDG_DATA_HOME="$$PWD/build/lint" lintrunner
PATHS := git ls-files --cached --others --exclude-standard

.DEFAULT_GOAL := help
.PHONY: help python setup models train for-tests test test-tools clients series series-save bench gpu mutants lint wheel clean

help:  ## show this list
	@echo "make TARGET, where TARGET is one of"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-12s%s\n", $$1, $$2 }' Makefile
	@echo "RELEASE=VERSION takes one of" $(basename $(notdir $(wildcard constraints/*.txt)))

python:
	@"$$PYTHON3" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "error: $$PYTHON3 is no Python 3.10 or newer: PYTHON3=PATH" >&2; exit 1; }

setup: python  ## build in place: .venv, build/base (TORCH_WHEEL=PATH, PYTHON3=PATH)
	@$(SETUP) setup dev

models: python  ## set up, with the packages of real models that tests train
	@$(SETUP) setup dev models

train: python  ## train examples/train.py anew, without test tools (NPROC= STEPS=)
	@$(SETUP) setup
	@rm -rf build/train
	@OMP_NUM_THREADS=1 "$(VENV)/bin/torchrun" --nproc-per-node "$${NPROC:-4}" \
	  examples/train.py "$${STEPS:-60}" build/train

# Files of torch and of other packages are compiled once, for the processes that tests
# start too.
PYTEST = PYTHONPYCACHEPREFIX="$$PWD/build/pycache" PYTHONDONTWRITEBYTECODE= \
  $(PYTHON) -m pytest --durations=10
SIDE_BY_SIDE = --numprocesses=auto --dist=loadfile

# Continuous integration also runs the tests of `make test-tools`
MARKS = $(if $(QUICK),quick,$(if $(CI),,not tools))

# Without packages of models all other tests run, but in CI
for-tests: python
	@$(SETUP) setup dev models || \
	  { test -z "$$CI" && echo "tests of models are skipped" && $(SETUP) setup dev; }

test: for-tests  ## run the tests (QUICK=1: those marked so; ARGS=... goes to pytest)
	@$(PYTEST) $(or $(ARGS),$(SIDE_BY_SIDE) -m "$(MARKS)" test)

test-tools: for-tests  ## run the tests of set-up, wheels, overlays and benchmarks
	@$(PYTEST) $(or $(ARGS),$(SIDE_BY_SIDE) -m tools test)

# Their files are not called test_*.py, so that `make test` does not collect them.
CLIENTS = test/distributed/_composable/fsdp/fsdp_helpers/clients/with_*.py
clients: python  ## train with torchtitan, trl, torchao, lightning and others (ARGS=...)
	@$(SETUP) setup dev models clients
	@PYTHONPYCACHEPREFIX="$$PWD/build/pycache" PYTHONDONTWRITEBYTECODE= \
	  "$(VENV)/clients/bin/python" -m pytest --durations=10 $(or $(ARGS),$(CLIENTS))

# The series edits one release's own files: it runs on that, whatever RELEASE is
series: export TORCH_RELEASE = $(shell basename -s .txt constraints/*.txt | sort -V | tail -n 1)
series: setup  ## make the series for upstream as commits and patches, test each
	@$(PYTHON) tools/series.py make $(ARGS)

series-save: python  ## write tools/upstream anew from the commits in build/series/tree
	@"$$PYTHON3" -B tools/series.py save

bench: setup  ## compare with the release: host, bytes, step, memory (QUICK=1 ARGS=...)
	@$(PYTHON) benchmarks/distributed/fsdp/bench.py $(if $(QUICK),--quick) $(ARGS)

gpu: setup  ## check correctness, memory and speed on a CUDA device (DEVICE=cpu ARGS=...)
	@$(PYTHON) benchmarks/distributed/fsdp/gpu.py $(if $(DEVICE),--device "$$DEVICE") $(ARGS)

mutants: models  ## break the product line by line: which test notices? (ARGS=...)
	@$(PYTHON) tools/mutants.py $(ARGS)

lint: setup  ## check every file that git tracks or would add (ARGS=-a fixes)
	@mkdir -p build/lint
	@{ $(LINT) init; } >build/lint/init.log 2>&1 || { cat build/lint/init.log >&2; exit 1; }
	@$(LINT) --paths-cmd '$(PATHS)' $(ARGS)

wheel: python  ## write the branch's wheel into build/dist (TORCH_WHEEL=PATH)
	@$(SETUP) wheel

clean:  ## leave the clone as it was; with RELEASE=, remove that release's build
ifdef TORCH_RELEASE
	@rm -rf "build/$$TORCH_RELEASE"
else
	@rm -rf build .hypothesis .mypy_cache .pytest_cache .ruff_cache *.egg-info
	@test ! -L .venv || rm .venv
	@find . -name .git -prune -o -name __pycache__ -prune -exec rm -rf {} +
endif
