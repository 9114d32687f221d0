# afdpatch. `make help` lists the targets.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# What CI runs. `gpu` needs a GPU, `full` is long.
SELECT ?= not gpu and not full
PYTEST_ARGS ?=

# A process that imports vLLM takes twice the time without bytecode, and a server has three of them.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help env test test-full test-unit bench demo lint lock clean

help: ## this list
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

env: ## the virtual environment .venv, complete and pinned (PYTHON=... picks the Python, 3.10 to 3.13)
	@$(PYTHON) requirements/environment.py --venv $(VENV)

test: env ## the tests that CI runs: unit tests and end-to-end tests on the CPU
	@$(BIN)/python -m pytest -m "$(SELECT)" $(PYTEST_ARGS)

test-full: env ## everything but what needs a GPU: also what is too long for CI
	@$(BIN)/python -m pytest -m "not gpu" $(PYTEST_ARGS)

test-unit: env ## the tests without vLLM servers
	@$(BIN)/python -m pytest -m "$(SELECT) and not e2e" $(PYTEST_ARGS)

bench: env ## what the registry costs, held against its budgets (a quiet machine), as a table and build/registry.json
	@mkdir -p build
	@$(BIN)/python -m pytest tests/bench tests/patches/test_attest.py --benchmark-only --benchmark-enable --benchmark-json=build/registry.json \
		--benchmark-columns=min,median,iqr,rounds --benchmark-sort=fullname $(PYTEST_ARGS)

demo: env ## an AFD pair and a stock vLLM side by side, on the CPU
	@$(BIN)/python -m afdpatch demo

lint: env ## ruff and mypy
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy requirements/environment.py afdpatch_plugin.py
	@# mypy doesn't know the packaging's map of folders (patches/ is afdpatch.patches, and so on): give it the tree.
	@rm -rf build/mypy && mkdir -p build/mypy/afdpatch
	@ln -s $(CURDIR)/afdpatch/* $(CURDIR)/kernels $(CURDIR)/manifests $(CURDIR)/patches build/mypy/afdpatch/
	@cd build/mypy && $(abspath $(BIN))/mypy --config-file $(CURDIR)/pyproject.toml -p afdpatch

lock: ## resolve requirements/cpu.in into requirements/cpu.txt again (needs uv)
	@cd requirements && uv pip compile cpu.in --override overrides.txt --universal --python-version 3.10 \
		--no-annotate --no-header -o cpu.new
	@cd requirements && { sed -n '/^#/p' cpu.txt; cat cpu.new; } > cpu.tmp && mv cpu.tmp cpu.txt && rm cpu.new

clean: ## remove the virtual environment and the caches
	@rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info
