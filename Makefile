# Two commands do everything on a fresh machine: `make fit` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: install fit test test-all test-nightly test-oldest check docs clean

install: $(READY)  ## set up alone

fit: $(READY)  ## set up, then the main job on the embedded default
	OMP_NUM_THREADS=1 $(BIN)/python -m training.fit  # one thread: the embedded model is too small for more

test: $(READY)  ## set up, then the unit tests and some commands
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m "not integration and not nightly"

test-all: $(READY)  ## all tests but the nightly ones
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m "not nightly"

test-nightly: $(READY)  ## faults, error rates, notebooks, memory, several processes
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
		tests/training/test_fit_architectures.py tests/training/test_fit_images.py tests/training/test_fit_tags.py \
		tests/training/test_fit_causal_lm.py tests/training/test_fit_translation.py

check: $(READY)  ## style, types and imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: export NO_MKDOCS_2_WARNING := 1
docs: $(READY)  ## the documentation as a site: open site/index.html
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[docs]"
	$(BIN)/mkdocs build --strict

$(READY): pyproject.toml constraints.txt
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV), once: 2.6 GB, some minutes"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $(READY)

clean:
	rm -rf $(VENV) $(OLDEST) site .pytest_cache .mypy_cache .ruff_cache
