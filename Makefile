# `make demo` and `make test` work on a fresh clone: each first sets up .venv, or brings it up to date.

PYTHON ?= python3
ARGS ?=
BIN := .venv/bin
READY := .venv/.ready

.PHONY: help setup demo test quick lint format bench pictures docs clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -E '^[a-z]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | expand -t 10

setup: $(READY)  ## set up .venv with the tested versions

# PyTorch by itself first: the pin is met before any other package can ask for a newer, larger build.
$(READY): pyproject.toml constraints.txt
	@echo "Setting up .venv; the first time takes a few minutes."
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt torch
	$(BIN)/pip install --quiet -c constraints.txt -e '.[test,docs]'
	touch $@

demo: $(READY)  ## train a character GPT for two minutes (ARGS="--seconds 30 --devices 3")
	$(BIN)/python examples/char_gpt.py $(ARGS)

# One thread per operation: tests are small, and several virtual devices run at a time. Three files at a time: threads that
# wait for each other leave a core idle now and then.
test: $(READY)  ## run all tests (ARGS="-k resume" for some)
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -n 3 --dist loadfile $(ARGS)

quick: $(READY)  ## run the tests that take less than ten seconds each
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -n 3 --dist loadfile -m "not slow and not gpu" $(ARGS)

lint: $(READY)  ## check style and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(READY)  ## bring the code into the style that lint checks
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: $(READY)  ## measure speed and memory against their targets (ARGS="overhead memory" for some)
	$(BIN)/python benchmarks/run.py $(ARGS)

pictures: $(READY)  ## make docs/pictures: timelines, and what the commands print
	PYTHONPATH=. $(BIN)/python docs/make_pictures.py

docs: $(READY)  ## build the site of docs/ in site/ (ARGS=serve to read it in a browser)
	$(BIN)/mkdocs $(or $(ARGS),build)

clean:  ## remove .venv, caches and logs
	rm -rf .venv build dist site *.egg-info demo_logs lightning_logs .pytest_cache .mypy_cache .ruff_cache .hypothesis
