# Everything here works on a machine that has Python >= 3.11 with pip, and make.
# `make demo` shows Lisa at work; `make test` is all that continuous integration runs.

VENV   := .venv
BIN    := $(VENV)/bin
# Another interpreter: make PYTHON=/path/to/python3.13
PYTHON ?= $(firstword $(foreach name,python3 python3.14 python3.13 python3.12 python3.11,\
            $(shell $(name) -c 'import sys; sys.version_info >= (3, 11) and print("$(name)")' 2>/dev/null)))

.PHONY: help demo test test-slow torture mutants lint types wheel bench bench-quick bench-pipeline \
        bench-gateway bench-safety clean

help:
	@echo "make demo    ten thousand delayed messages, from an embedded server to their handlers"
	@echo "make test    lint, types and all tests but the slow ones"
	@echo "make test-slow  the slow ones: torture under each persistence, clusters on Redis, all kill points"
	@echo "make torture  three minutes of faults; ARGS='--minutes 60 --rate 1500 --gateway' for more"
	@echo "make mutants  known defects put back, and the test that catches each: two minutes"
	@echo "make lint    ruff"
	@echo "make types   mypy --strict"
	@echo "make bench   how fast and how punctual, also against other queues: most of an hour"
	@echo "make bench-quick  the same without them, in two minutes"
	@echo "make bench-pipeline  how fast the Spark jobs are: some fifteen minutes"
	@echo "make bench-gateway  how fast the HTTP gateway is: a minute"
	@echo "make bench-safety  how long a script blocks a server with ten million messages: 4 GiB"
	@echo "make wheel   build dist/*.whl"
	@echo "make clean   remove what these made"

demo: $(VENV)/.base
	$(BIN)/lisa demo

test: lint types
	$(BIN)/python -m pytest -n 2

test-slow: $(VENV)/.dev
	$(BIN)/python -m pytest -m slow

# Begins with an earlier build and rolls to this one, where there is a history to build that from.
EARLIER := 569b0c0
OLD     := build/earlier/$(EARLIER)

torture: $(VENV)/.dev
	@if git cat-file -e $(EARLIER) 2>/dev/null; then $(MAKE) --no-print-directory $(OLD)/.built; \
	  else echo "no commit $(EARLIER) here: this run leaves out 'roll', the rolling restart from it"; fi
	$(BIN)/python -m tests.torture $$(ls $(OLD)/*.whl 2>/dev/null | sed 's/^/--earlier /') $(ARGS)

mutants: $(VENV)/.dev
	$(BIN)/python -m tests.mutants

$(OLD)/.built: | $(VENV)/.dev
	rm -rf $(OLD) && mkdir -p $(OLD)/source
	git archive $(EARLIER) | tar -x -C $(OLD)/source
	cd $(OLD)/source && $(CURDIR)/$(BIN)/python -m hatchling build -t wheel -d ..
	rm -rf $(OLD)/source && touch $@

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

bench: $(VENV)/.bench
	$(BIN)/lisa bench --peers benchmarks/peers --out benchmarks/report

bench-quick: $(VENV)/.base
	$(BIN)/lisa bench --quick

bench-pipeline: $(VENV)/.dev
	$(BIN)/python -m benchmarks.pipeline --out benchmarks/report

bench-gateway: $(VENV)/.dev
	$(BIN)/python -m benchmarks.gateway --out benchmarks/report

bench-safety: $(VENV)/.base
	$(BIN)/python -m benchmarks.safety --out benchmarks/report

wheel: $(VENV)/.dev
	$(BIN)/python -m hatchling build -t wheel

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Distributions such as Debian ship `venv` without `ensurepip`: there the system's pip does it.
$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Lisa needs Python 3.11 or newer on PATH;" \
	  "name another with: make PYTHON=/path/to/python" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo \
	  "Lisa needs Python 3.11 or newer; $(PYTHON) is `"$(PYTHON)" -V 2>&1`" >&2; exit 1; }
	"$(PYTHON)" -c 'import ensurepip' 2>/dev/null && "$(PYTHON)" -m venv $(VENV) || { \
	  "$(PYTHON)" -m venv --without-pip $(VENV) && \
	  "$(PYTHON)" -m pip --python $@ install --quiet pip; }

$(VENV)/.base: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

$(VENV)/.bench: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[bench]'
	@touch $@ $(VENV)/.base

$(VENV)/.dev: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@ $(VENV)/.base
