# `make demo` and `make test` need Python >= 3.11, pip and make; they build .venv if it is not there.
PYTHON ?= python3
VENV ?= .venv
# EXTRAS=test,gpu-lowering also installs XLA's GPU compiler (600 MB), and tests what needs it.
EXTRAS ?= test
BIN = $(VENV)/bin
READY = $(VENV)/.ready

.PHONY: demo test lint types format bench wheel clean

demo: $(READY)  ## train a real model in float32, bfloat16 and float16
	$(BIN)/python examples/digits.py

test: $(READY)  ## run every test, the README's and the docstrings' examples among them
	$(BIN)/python -m pytest -n auto --dist worksteal

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

wheel: $(READY)  ## build the wheel and import it from a clean environment
	rm -rf dist build/wheel-env
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .
	$(PYTHON) -m venv build/wheel-env
	build/wheel-env/bin/python -m pip install --quiet dist/*.whl
	cd build && wheel-env/bin/python -c "import jmp_policy; print('wheel', jmp_policy.__version__, jmp_policy.get_policy('mixed_float16'))"
	rm -rf build/wheel-env

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable ".[$(EXTRAS)]"
	touch $(READY)

clean:
	rm -rf .venv* build dist
