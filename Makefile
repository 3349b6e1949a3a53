# Needs only Python >= 3.11 with pip, and make.
# `make demo` runs a demo; `make test-all` runs what continuous integration runs.

VENV   := .venv
BIN    := $(VENV)/bin
# Another interpreter: make PYTHON=/path/to/python3.13
PYTHON ?= $(firstword $(foreach name,python3 python3.14 python3.13 python3.12 python3.11,\
            $(shell $(name) -c 'import sys; sys.version_info >= (3, 11) and print("$(name)")' 2>/dev/null)))

# Tests start hundreds of processes, each of which would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

# Tests wait more than they compute, hence more workers than a small machine has cores.
WORKERS ?= 5

.PHONY: help demo check test test-sample test-all test-slow torture mutants lint types wheel bench bench-quick bench-pipeline \
        bench-gateway bench-safety reference proto docs images clean

help:
	@echo "make demo    send and handle ten thousand delayed messages on an embedded server"
	@echo "make check   lint, types, unit and contract tests on the embedded server: a minute"
	@echo "make test    lint, types and a test of every promise: six minutes"
	@echo "make test-all   adds all mutants, kill points, clusters, browsers and Spark jobs: 20 minutes"
	@echo "make test-sample   one case of each family that only test-all has: two minutes"
	@echo "make test-slow  the rest: torture with each persistence, clusters on Redis, every kill point"
	@echo "make torture  three minutes of faults; ARGS='--minutes 60 --rate 1500 --gateway' for more"
	@echo "make mutants  put known defects back and check that a test catches each: two minutes"
	@echo "make lint    ruff"
	@echo "make types   mypy --strict"
	@echo "make bench   measure Lisa and other queues: most of an hour"
	@echo "make bench-quick  measure Lisa only: two minutes"
	@echo "make bench-pipeline  measure the Spark jobs: about an hour"
	@echo "make bench-gateway  measure the HTTP gateway: one minute"
	@echo "make bench-safety  measure how long scripts block a server with ten million messages: 4 GiB"
	@echo "make reference  generate the reference pages, the example of all topic options, SQL and the TypeScript types"
	@echo "make proto   generate the Python code of the gRPC service from lisa.proto"
	@echo "make images  take the pictures of page and terminal again; needs Chromium"
	@echo "make docs    build the documentation site in build/site; a warning is an error"
	@echo "make wheel   build the package: dist/*.whl; PROJECT_URL=https://... adds links to it"
	@echo "make clean   remove all generated files"

demo: $(VENV)/.base
	$(BIN)/lisa demo

# Types are checked while the first tests run: most of those wait for processes.
define test_and_types
	@mkdir -p build
	@$(BIN)/mypy >build/types.txt 2>&1 & types=$$!; \
	echo "$(BIN)/python -m pytest $(1)"; $(BIN)/python -m pytest $(1); code=$$?; \
	wait $$types || { code=$$?; cat build/types.txt; }; exit $$code
endef

check: lint
	$(call test_and_types,-n 2 --embedded-only tests/unit tests/contract \
	  tests/mutants/test_mutants.py::test_every_patch_finds_its_text_once)

test: lint
	$(call test_and_types,-n $(WORKERS))

test-sample: $(VENV)/.dev
	$(BIN)/python -m pytest -n $(WORKERS) -m sample

test-all: lint
	$(call test_and_types,-n $(WORKERS) -m 'not slow')

test-slow: $(VENV)/.dev
	$(BIN)/python -m pytest -m slow -o timeout=14400

# The torture run starts with an earlier build, if the repository has it, and upgrades to this one.
EARLIER := 569b0c0

torture: $(VENV)/.dev
	@git cat-file -e $(EARLIER) 2>/dev/null || \
	  echo "no commit $(EARLIER) here: this run leaves out 'roll', the rolling restart from it"
	$(BIN)/python -m tests.torture \
	  $$(git cat-file -e $(EARLIER) 2>/dev/null && echo --earlier $(EARLIER)) $(ARGS)

mutants: $(VENV)/.dev
	$(BIN)/python -m tests.mutants

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

bench: $(VENV)/.bench
	$(BIN)/python -m benchmarks.comparison --out benchmarks/report

bench-quick: $(VENV)/.base
	$(BIN)/python -m benchmarks.bench --quick

bench-pipeline: $(VENV)/.dev
	$(BIN)/python -m benchmarks.pipeline --out benchmarks/report

bench-gateway: $(VENV)/.dev
	$(BIN)/python -m benchmarks.gateway --out benchmarks/report

bench-safety: $(VENV)/.base
	$(BIN)/python -m benchmarks.safety --out benchmarks/report

# Topic options first: the settings quote them.
reference: $(VENV)/.dev
	$(BIN)/python docs/generate_options.py
	$(BIN)/python docs/generate_settings.py
	$(BIN)/python docs/generate_metrics.py
	$(BIN)/python docs/generate_examples.py
	$(BIN)/python docs/generate_scale.py
	$(BIN)/python docs/generate_sql.py
	$(BIN)/python clients/generate_types.py

# An older compiler, in an environment of its own: code that it generates runs with its version of
# Protobuf and with all later ones. It has no wheels for the newest Python, so the generated code is
# in the repository: a build hook would make each installation from a checkout depend on it.
PROTO_TOOLS := build/proto

proto: | $(BIN)/python
	test -x $(PROTO_TOOLS)/bin/pip || $(BIN)/python -m venv $(PROTO_TOOLS)
	$(PROTO_TOOLS)/bin/pip install --quiet grpcio-tools==1.71.2
	$(PROTO_TOOLS)/bin/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. \
	  --grpc_python_out=. lisa/gateway/rpc/lisa.proto

# Material for MkDocs announces in each build that MkDocs 2 will not be compatible.
docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "open build/site/index.html"

images: $(VENV)/.dev
	$(BIN)/python docs/generate_images.py

wheel: $(VENV)/.dev
	$(BIN)/python -m hatchling build -t wheel

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Debian and others ship `venv` without `ensurepip`; use the system's pip there.
$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Lisa needs Python 3.11 or newer on PATH;" \
	  "name another with: make PYTHON=/path/to/python" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo \
	  "Lisa needs Python 3.11 or newer; $(PYTHON) is `"$(PYTHON)" -V 2>&1`" >&2; exit 1; }
	"$(PYTHON)" -c 'import ensurepip' 2>/dev/null && "$(PYTHON)" -m venv $(VENV) || { \
	  "$(PYTHON)" -m venv --without-pip $(VENV) && \
	  "$(PYTHON)" -m pip --python $@ install --quiet pip; }

# Earlier checkouts had a second distribution, whose files would hide those of the first.
define install
	$(BIN)/python -m pip uninstall -qq --yes lisa-delay-queue-client
	$(BIN)/python -m pip install --quiet --editable '.[$(1)]' $(2)
	@touch $@ $(VENV)/.base
endef

$(VENV)/.base: pyproject.toml | $(BIN)/python
	$(call install,standard)

$(VENV)/.bench: pyproject.toml | $(BIN)/python
	$(call install,standard,'matplotlib>=3.9')

$(VENV)/.dev: pyproject.toml | $(BIN)/python
	$(call install,dev)
	$(BIN)/python -m compileall -q lisa  # tests start many programs, also where Python writes no bytecode
