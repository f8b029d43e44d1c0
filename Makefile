# Each command installs into .venv what it needs, once: `make fit` the package, `make test` the tests, the others everything.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PACKAGE := $(VENV)/.ready-package
TEST := $(VENV)/.ready-test
DEV := $(VENV)/.ready-dev

.PHONY: install fit test test-all test-nightly test-oldest check docs clean

install: $(DEV)  ## set up alone, with all tools for developers

fit: $(PACKAGE)  ## set up, then the main job on the embedded default
	OMP_NUM_THREADS=1 $(BIN)/python -m training.fit  # one thread: the embedded model is too small for more

test: $(TEST)  ## set up, then the unit tests and some commands
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m "not integration and not nightly"

test-all: $(DEV)  ## all tests but the nightly ones
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m "not nightly"

test-nightly: $(DEV)  ## faults, error rates, notebooks, memory, several processes
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m nightly

OLDEST := .venv-oldest
test-oldest: pins = $(shell sed -nE 's/^ *"(torch|transformers)>=([0-9.]+)",.*/\1==\2.0/p' pyproject.toml)
test-oldest:  ## the library and short runs on the oldest PyTorch and Transformers that pyproject.toml allows
	test -d $(OLDEST) || $(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --editable . $(pins) accelerate peft "pytest>=9" "pytest-xdist>=3.6" "pytest-timeout>=2.3" "hypothesis>=6.100" "scikit-learn>=1.4" onnx onnxscript
	OMP_NUM_THREADS=1 $(OLDEST)/bin/python -m pytest -n 2 --dist worksteal -m "not integration and not nightly" \
		tests/gates/attention tests/gates/gating tests/gates/scores tests/gates/surgery tests/gates/recovery/test_refit.py \
		tests/gates/export/test_checkpoint.py tests/gates/export/test_kv_cache.py tests/gates/export/test_stock.py \
		tests/gates/test_architectures.py tests/gates/test_trainer.py tests/gates/test_model.py \
		tests/training/test_fit_architectures.py tests/training/test_fit_kinds.py \
		tests/training/test_fit_causal_lm.py tests/training/test_fit_translation.py

check: $(DEV)  ## style, types and imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: export NO_MKDOCS_2_WARNING := 1
docs: $(PACKAGE)  ## the documentation as a site: open site/index.html
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[docs]"
	$(BIN)/mkdocs build --strict

$(DEV): EXTRAS := [dev]
$(DEV): READY := $(DEV) $(TEST) $(PACKAGE)
$(TEST): EXTRAS := [test]
$(TEST): READY := $(TEST) $(PACKAGE)
$(PACKAGE): READY := $(PACKAGE)
$(DEV) $(TEST) $(PACKAGE): pyproject.toml constraints.txt
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	@echo "installing head-gates$(EXTRAS) into $(VENV), once; this takes some minutes"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".$(EXTRAS)"
	touch $(READY)

clean:
	rm -rf $(VENV) $(OLDEST) site .pytest_cache .mypy_cache .ruff_cache
