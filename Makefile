# Everything a contributor types. `make setup` is implied by every target and costs nothing the second time.
PYTHON ?= python3
BIN := .venv/bin
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest

.DEFAULT_GOAL := help
# A restart of a worker reads torch's bytecode instead of compiling it again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help
help: ## Show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## /{printf "  make %-17s%s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: setup
setup: ## Make .venv with everything needed (Python >= 3.11 is all that must be there)
	@PYTHON='$(PYTHON)' bash .ci/setup

.PHONY: demo
demo: setup ## Lose two GPUs under a real training job and compare with an undisturbed run
	@$(BIN)/python e2e/demo/run.py

.PHONY: test
test: setup ## Run all tests, those on the lab too (PYTEST_ARGS='-k …' to choose)
ifdef PYTEST_ARGS
	@$(PYTEST) $(PYTEST_ARGS)
else
	@bash .ci/test
endif

.PHONY: test-long
test-long: setup ## The full crash, protocol and store runs; crash runs are resumed (PYTEST_ARGS='-k …' to choose)
ifdef PYTEST_ARGS
	@$(PYTEST) -m long -s $(PYTEST_ARGS)
else
	@bash .ci/test long
endif

.PHONY: e2e
e2e: setup ## The core user stories on a kind cluster; needs docker and kind (E2E_ARGS='-k xid' to choose)
	@$(PYTEST) -s e2e/stories --stories=core $(E2E_ARGS)

.PHONY: e2e-all
e2e-all: setup ## All user stories on a kind cluster
	@$(PYTEST) -s e2e/stories --stories=all $(E2E_ARGS)

.PHONY: check
check: setup ## Format, lint, types, layers, generated files
	@bash .ci/check

.PHONY: bench
bench: setup ## The small benchmarks: reading a page of an exporter
	@bash .ci/bench

.PHONY: bench-scale
bench-scale: setup ## What 200 jobs on 500 nodes cost the operator and the API server (ARGS='--jobs 20 --nodes 50')
	@$(BIN)/python benchmarks/scale/run.py $(ARGS)

.PHONY: bench-steady
bench-steady: setup ## What an undisturbed step costs beside the same loop under stock DDP (ARGS='--ranks 2 --rounds 20')
	@$(BIN)/python benchmarks/steady/run.py $(ARGS)

.PHONY: bench-recovery
bench-recovery: setup ## What a lost rank costs, beside torchrun, torchft and others; table and picture for the README (FULL=1: 7 runs; ARGS='--only "everstep in place"')
	@$(BIN)/python benchmarks/recovery/run.py $(ARGS)

.PHONY: bench-storm
bench-storm: setup ## Goodput under a fault every 15 s, beside torchft and another (ARGS='--seconds 60 --mix deaths --only everstep')
	@$(BIN)/python benchmarks/storm/run.py $(ARGS)

.PHONY: bench-hang
bench-hang: setup ## How often slow steps on a busy machine are taken for a hang (ARGS='--seconds 3600')
	@$(BIN)/python benchmarks/hang/run.py $(ARGS)

.PHONY: bench-checkpoint
bench-checkpoint: setup ## What a save costs the step, beside torch.save, DCP, torch-checkpointing and DLRover (FULL=1: all sizes)
	@$(BIN)/python benchmarks/checkpoint/run.py $(ARGS)

.PHONY: crds
crds: setup ## Write crds/ anew from the pydantic models, and what the chart has of them
	@$(BIN)/python -m everstep_operator.crd
	@$(BIN)/python charts/values_table.py

.PHONY: constraints
constraints: setup ## Choose the versions of all dependencies anew (constraints*.txt)
	@bash .ci/constraints --upgrade

.PHONY: clean
clean: ## Remove what was built here, .venv included (caches in ~/.cache stay)
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
