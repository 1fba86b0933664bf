# Each target does all of its own set-up in .venv: `make test` and `make demo` work on a fresh clone.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Threads of several processes that wait for each other must not spin on the same cores.
export OMP_WAIT_POLICY ?= passive
# Two workers for two cores, a thread each; tests of threads ask for more.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

.PHONY: help test test-slow torture lint docs demo bench clean
help:
	@echo "make test    run all tests that are not slow: under five minutes on two cores"
	@echo "make test-slow   run the slow tests: mutants, sanitizers, wheels, all GPU architectures, a browser"
	@echo "make torture 100,000 random operator cases, 60 models, 20 killed trainings: four minutes on two cores"
	@echo "make demo    train a small network on handwritten digits (a minute), draw what it learned"
	@echo "make lint    ruff, mypy and clang-format"
	@echo "make docs    build the documentation into site/, check its links"
	@echo "make bench   time the operators beside ReLU, SiLU and PReLU"
	@echo "make clean   remove .venv and everything built"

$(VENV)/installed: pyproject.toml setup.py src/pwlu/kernels/build.py $(wildcard src/pwlu/kernels/cpu/*.[ch])
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --editable '.[dev]'
	-$(BIN)/pwlu build  # half a minute of C++; without a compiler it says so, and all works without
	touch $@

test: $(VENV)/installed
	$(PYTEST) -m "not slow"

test-slow: $(VENV)/installed
	$(PYTEST) -m slow

torture: $(VENV)/installed
	OMP_NUM_THREADS=1 $(BIN)/python tests/torture/torture.py $(TORTURE)

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	git ls-files '*.c' '*.h' '*.cpp' '*.cu' '*.cuh' | xargs $(BIN)/clang-format --dry-run -Werror

# Material for MkDocs says at every start that it reaches its end of life in May 2027. Zensical, its successor, reads mkdocs.yml.
docs: $(VENV)/installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

demo: $(VENV)/installed
	$(BIN)/pwlu train --again

bench: $(VENV)/installed
	$(BIN)/python benchmarks/op.py

clean:
	rm -rf $(VENV) build dist site src/*.egg-info src/pwlu/kernels/cpu/_cpu_* .mypy_cache .ruff_cache .pytest_cache .hypothesis
