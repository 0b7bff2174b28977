# `make demo` and `make test` need Python >= 3.11, pip and make; they build .venv if it is not there.
PYTHON ?= python3
VENV ?= .venv
# EXTRAS=test,gpu-lowering also installs XLA's GPU compiler (600 MB), and tests what needs it.
EXTRAS ?= test
BIN = $(VENV)/bin
READY = $(VENV)/.ready
DEMO_READY = $(VENV)/.ready-demo

# `make test` runs one part in so many of the slow tests; which one goes on with each commit.
PARTS ?= 8
PART ?= $(shell git rev-list --count HEAD 2>/dev/null || echo 0)

.PHONY: demo test test-all test-fast test-random coverage lint types format bench bench-gpu docs site-test wheel clean

# An environment that is there for the tests has what the demo needs.
demo: $(or $(wildcard $(READY)),$(DEMO_READY))  ## train a real model in float32, bfloat16 and float16
	$(BIN)/python examples/digits.py

test: $(READY)  ## run the quick tests, the examples of all pages, and an eighth of the slow tests: the next eighth with each commit
	$(BIN)/python -m pytest -n auto --dist worksteal --part-of-slow-cases=$(PART)/$(PARTS)

test-all: $(READY)  ## run every test: whole programs, real models and all slow cases among them
	$(BIN)/python -m pytest -n auto --dist worksteal

test-fast: $(READY)  ## run the quick tests, which use every public name
	$(BIN)/python -m pytest -n auto --dist worksteal -m "not slow and not once and not gpu"

test-random: $(READY)  ## run the tests of properties with other examples than those of `make test`, each time
	$(BIN)/python -m pytest -n auto --dist worksteal -m hypothesis --hypothesis-profile random

coverage: $(READY) $(VENV)/.ready-coverage  ## run every test, and list the lines and branches of src that none runs
	$(BIN)/python -m pytest -n auto --dist worksteal --cov=jmp_policy --cov-branch --cov-report=term-missing:skip-covered

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)  ## measure; needs a second environment for the peers, which it builds
	$(BIN)/python -m benchmarks

bench-gpu: $(READY)  ## measure real models on this machine's GPU, the first ones in ten minutes; then compile them for others
	$(BIN)/python -m benchmarks gpu

docs: $(READY) $(VENV)/.ready-docs  ## build the documentation's site into build/site; the build itself needs no network
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

site-test: $(READY) $(VENV)/.ready-browser  ## look at the site in a browser, which must be installed (chromium or google-chrome)
	$(BIN)/python -m pytest tests/test_site.py -rs

wheel: $(READY) $(VENV)/.ready-release  ## build sdist and wheel, check both, and use each from where it is installed
	rm -rf dist build/release
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python tools/check_distributions.py dist
	$(PYTHON) -m venv build/release/wheel
	build/release/wheel/bin/python -m pip install --quiet dist/*.whl
	cd build/release && wheel/bin/python -c "import jmp_policy; print('wheel', jmp_policy.__version__, jmp_policy.get_policy('mixed_float16'))"
	build/release/wheel/bin/jmp-policy formats 1.0
	mkdir build/release/sdist && tar -xzf dist/*.tar.gz -C build/release/sdist --strip-components 1
	$(BIN)/python -m pip install --quiet --no-deps --target build/release/installed dist/*.tar.gz
	cd build/release/sdist && PYTHONPATH=$(CURDIR)/build/release/installed $(abspath $(BIN))/python -m pytest --collect-only --assert=plain > ../tests.txt
	@echo "sdist: $$(grep -c :: build/release/tests.txt) tests collected"

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

$(READY): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable ".[$(EXTRAS)]"
	touch $@

# What one more target needs: the extra of that name.
$(VENV)/.ready-%: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable ".[$*]"
	touch $@

clean:
	rm -rf .venv* build dist
