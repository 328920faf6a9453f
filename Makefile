# `make demo` and `make test` set up everything they need in .venv.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready
CUDA := $(shell find src tests -name '*.cu' -o -name '*.cuh' -o -name '*.hpp')

.PHONY: help demo test test-fast check docs readme clean

help:  ## what can be made
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

demo: $(READY)  ## who remembers ten symbols? a minute of training, a table and a picture
	$(BIN)/cwy demo

test: $(READY)  ## every test that this machine can run
	$(BIN)/pytest -n 2

test-fast: $(READY)  ## two cases of every test that is not slow: every room, under two minutes
	$(BIN)/pytest -n 2 -m 'not slow' --cases 2 tests

check: $(READY)  ## lint, types, import contract, docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CUDA)
	$(BIN)/pyrefly check
	$(BIN)/lint-imports
	$(BIN)/python docs/_hooks/record_numbers.py --check README.md
	$(BIN)/python docs/_hooks/readme_figure.py --check
	$(MAKE) docs

docs: $(READY)  ## the documentation, into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

readme: $(READY)  ## the numbers and the figure in README, from the records
	$(BIN)/python docs/_hooks/record_numbers.py README.md
	$(BIN)/python docs/_hooks/readme_figure.py

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

clean:  ## remove what was made
	rm -rf .venv site demo .pytest_cache .ruff_cache .hypothesis
