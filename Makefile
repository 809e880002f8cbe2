# make check: set up and compare all backends with the golden.  make test: set up and run every test.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: check test fuzz lint format clean

check: $(VENV)/ready
	$(BIN)/rmsnorm check --backend numpy --backend torch --backend tf --backend flax

test: $(VENV)/ready
	RMSNORM_REQUIRE=numpy,torch,tf,flax $(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder

# 2,000 compositions of transforms for each framework, 500 variants for `identify`: two hours.
fuzz: $(VENV)/ready
	RMSNORM_IDENTIFY_VARIANTS=500 $(BIN)/python -m pytest -q -n 2 tests/test_fuzz.py tests/identify/test_identify_variants.py \
		--timeout 14400 --hypothesis-profile nightly

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[all,dev,peers]'
	touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
