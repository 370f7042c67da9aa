# One verb each. `make setup` makes .venv/ in this checkout; the others call it (or setup-light, which
# is a part of it) first, and it does nothing when pyproject.toml and scripts/setup.sh are
# unchanged since the last time.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PY := .venv/bin/python
# Material for MkDocs tells at every build that it has a successor.
export NO_MKDOCS_2_WARNING := 1
# Extra arguments for the verb, as in: make test ARGS="-m slow -k split"
ARGS ?=
# Processes of the test run: many tests wait for a server, a child or a clock.
JOBS ?= 5
# How many seeds `make simulate` runs; one failing seed again: ARGS="--seed 42".
SEEDS ?= 3000
# Of `make chaos`.
KILLS ?= 60
FREEZES ?= 10

# Of `make compat`.
VERSIONS ?= 0.28.0 0.29.0 0.30.0 0.31.0 0.32.0

.PHONY: help setup setup-light demo test test-light fix check bench simulate simulate-scale chaos docs build compat

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

setup-light: ## make .venv/ with what `fix`, `simulate` and `test-light` need: under 1 GB, no vLLM, no torch
	@bash scripts/setup.sh --extras dev

setup: ## add vLLM for the CPU and what else `test` and `bench` need: 5 GB
	@bash scripts/setup.sh --extras cpu,dev,full

demo: ## two real vLLM workers on the CPU, one killed and resumed, every answer checked
	@bash scripts/setup.sh --extras cpu
	$(PY) scripts/demo.py $(ARGS)

test-light: setup-light ## the tests that need neither vLLM nor another large package
	env -u PYTHONDONTWRITEBYTECODE $(PY) -m pytest -n $(JOBS) --dist loadfile -m "not (vllm or full or slow)" $(ARGS)

test: setup ## the test suite (all but the tests marked slow), in JOBS processes; adds .venv-sky/ and .venv-onnx/
	@bash scripts/setup.sh --skypilot
	@$(PY) -m batchinfer convert hf-to-onnx --setup --environment .venv-onnx --log-level warning >/dev/null
	@# Hundreds of processes import the package: none of them needs to compile it again.
	env -u PYTHONDONTWRITEBYTECODE $(PY) -m pytest -n $(JOBS) --dist loadfile $(ARGS)

fix: setup-light ## format, mend what ruff can, record the goldens anew
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	cd tests && PYTHONPATH=. ../$(PY) -m goldens

check: ## lint, format, types, import layers, links of the docs
	@bash scripts/setup.sh --extras dev,docs
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	.venv/bin/lint-imports
	.venv/bin/hadolint examples/docker/*Dockerfile
	$(PY) -m mkdocs build

bench: setup ## the main figures, in a quick form; one script: make bench ARGS="split --rows 1000"
ifneq ($(strip $(ARGS)),)
	$(PY) benchmarks/$(firstword $(ARGS)).py $(wordlist 2,$(words $(ARGS)),$(ARGS))
else
	$(PY) benchmarks/split.py --rows 20000 --repeats 1
	$(PY) benchmarks/pipeline.py --quick
	$(PY) benchmarks/startup.py --quick
	$(PY) benchmarks/throughput.py --quick
	$(PY) benchmarks/bookkeeping.py --quick
	$(PY) benchmarks/recovery.py --quick
	$(PY) benchmarks/collect.py
endif

simulate: setup-light ## the real worker on simulated time, storage and failures, SEEDS of them
	PYTHONPATH=tests $(PY) -m simulation --seeds $(SEEDS) $(ARGS)

simulate-scale: setup-light ## a thousand workers on simulated time: makespan, requests, dollars; ARGS="--workers 100" for fewer
	PYTHONPATH=tests $(PY) -m simulation.scale $(ARGS)

chaos: setup-light ## real workers over S3 on loopback, killed and frozen: KILLS and FREEZES of them
	cd tests && ../$(PY) -m chaos.campaign --kills $(KILLS) --freezes $(FREEZES) $(ARGS)

build: setup-light ## wheel and sdist in dist/, checked, installed and tried in bare environments; the Dockerfiles' steps
	bash scripts/build.sh

compat: ## the tests of the engine with the CPU builds of vLLM's last five releases; writes docs/compatibility.md
	bash scripts/compat.sh $(VERSIONS)

docs: ## build the site in build/site: these pages, every command's options, the Python interface
	@bash scripts/setup.sh --extras dev,docs
	$(PY) -m mkdocs build
