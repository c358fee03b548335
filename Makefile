# Every target works as the first command after a clone: what it needs is made on the way and kept
# (stamp files in .venv), so the second run starts at once. `make` alone prints the targets.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

BUF_VERSION := 1.75.0
BUF := $(VENV)/buf-$(BUF_VERSION)/node_modules/.bin/buf

PROTOS := $(wildcard protos/prefixd/v1/*.proto)
MYPY_PACKAGES := $(addprefix --package prefixd.,clients controller kernels worker) --package bench

# One thread per process: the figures and the bitwise tests are those of one core.
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv proto model demo test test-all lint format bench gpu-bench kernels-report baseline pins clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

venv: $(VENV)/.installed ## Create .venv with the pinned dependencies and prefixd itself

proto: $(VENV)/.generated ## Generate the Python code of protos/prefixd/v1

model: $(VENV)/.installed ## Fetch the small model of the demo and the tests (about 100 MB, once)
	@$(BIN)/python -m prefixd.worker.model.fetch

demo: model ## Answer three questions about one long document
	@$(BIN)/python -m prefixd.clients.demo

test: model ## Run the tests, but for the slow ones
	@$(BIN)/python -m pytest -m "not slow"

test-all: model ## Run all tests, with 5,000 examples per property
	@$(BIN)/python -m pytest --hypothesis-profile=all --timeout=7200

lint: $(VENV)/.installed $(BUF) ## Check style, types and protos; change nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(MYPY_PACKAGES)
	$(BUF) lint
	$(BUF) format --diff --exit-code
	$(BUF) breaking --against protos/baseline.binpb

format: $(VENV)/.installed $(BUF) ## Format the code and the protos in place
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BUF) format --write

bench: model ## Measure, print a table, write JSON to bench/out
	@$(BIN)/python -m bench

gpu-bench: $(VENV)/.installed ## Check and measure the kernels on this machine's GPU (without make: python bench/gpu.py)
	@$(BIN)/python bench/gpu.py

kernels-report: $(VENV)/.installed ## Compile every GPU kernel for every target; fail where one spills
	@$(BIN)/python -m prefixd.kernels.report

baseline: $(BUF) ## Take the present protos as what later ones must stay compatible with
	$(BUF) build --exclude-source-info --output protos/baseline.binpb

pins: $(VENV)/.installed ## Check that constraints.txt resolves from the registry alone
	PIP_CONFIG_FILE=/dev/null PIP_FIND_LINKS= $(BIN)/python -m pip install --quiet --dry-run \
		--ignore-installed --no-build-isolation --constraint constraints.txt ".[worker,events,dev]"

clean: ## Remove all that the targets above made, but for the model cache
	rm -rf $(VENV) .typing protos/gen build dist *.egg-info bench/out
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "prefixd needs Python 3.11 or newer as $(PYTHON); try: make PYTHON=python3.11 ..." >&2; exit 1; }
	@echo "Creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

# What generation needs comes first: the package can be installed only once prefixd.v1 exists.
$(VENV)/.tools: constraints.txt $(VENV)/.created
	@echo "Installing the build tools"
	@$(PIP_INSTALL) setuptools grpcio-tools mypy-protobuf
	@touch $@

$(VENV)/.generated: $(PROTOS) protos/generate.py $(VENV)/.tools
	@echo "Generating protos/gen"
	@$(BIN)/python protos/generate.py
	@touch $@

$(VENV)/.installed: pyproject.toml constraints.txt $(VENV)/.generated
	@echo "Installing prefixd and its pinned dependencies (torch is large: minutes the first time)"
	@$(PIP_INSTALL) --no-build-isolation --editable ".[worker,dev]"
	@touch $@

$(BUF):
	@command -v npm >/dev/null || { echo "buf comes from npm, which is missing: install Node.js and npm" >&2; exit 1; }
	@echo "Installing buf $(BUF_VERSION)"
	@npm install --silent --no-save --no-audit --no-fund --prefix $(VENV)/buf-$(BUF_VERSION) @bufbuild/buf@$(BUF_VERSION)
