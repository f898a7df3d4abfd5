# make demo   the main job: install, serve a small model with HiSparse on and off, compare
# make test   install and pass all tests that need no GPU
# Everything goes into .venv; no command here changes anything outside this folder.

PYTHON ?= $(shell for p in python3.12 python3.11 python3 python; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null && { echo $$p; break; }; done)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
# torch spins all cores; on small machines two threads a process are enough and leave room for SGLang's others.
export OMP_NUM_THREADS ?= 2
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: install demo test fuzz lint test-gpu test-gpu-sanitize nightly doctor clean

install: $(STAMP)

# SGLang goes in without its dependencies: on a CPU they would be several GB of CUDA. requirements/cpu.txt has the rest.
$(STAMP): pyproject.toml requirements/cpu.txt requirements/cpu-nodeps.txt requirements/dev.txt requirements/dev-nodeps.txt
	@test -n "$(PYTHON)" || { echo "hisparse: Python 3.11 or 3.12 is needed; set PYTHON=/path/to/python3.12" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements/cpu.txt -r requirements/dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/cpu-nodeps.txt -r requirements/dev-nodeps.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@

demo: $(STAMP)
	$(BIN)/hisparse demo

doctor: $(STAMP)
	$(BIN)/hisparse doctor

# Tests that share servers go to the same worker, the longest first (test/conftest.py). One thread a process: two workers
# with two servers each are enough for the cores.
TEST_WORKERS ?= 2

test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_WORKERS)

# An hour of random histories: three fuzz tests of FUZZ_SECONDS each.
FUZZ_SECONDS ?= 1200

fuzz: $(STAMP)
	HISPARSE_FUZZ_SECONDS=$(FUZZ_SECONDS) HISPARSE_FUZZ_SEED=$${HISPARSE_FUZZ_SEED:-1000} OMP_NUM_THREADS=1 \
		$(BIN)/python -m pytest test/engine/test_fuzz.py test/unit/test_coordinator_fuzz.py

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# On a machine with a GPU (sm_90), nvcc, and a Python that has torch, apache-tvm-ffi, pytest and hypothesis.
GPU_ENV := PYTHONPATH=python:sgl-kernel:$$PYTHONPATH

test-gpu:
	$(GPU_ENV) $(PYTHON) -m pytest -m gpu test/kernel

test-gpu-sanitize:
	for tool in memcheck racecheck; do $(GPU_ENV) PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool $$tool \
		--error-exitcode 1 --kernel-name kernel_substring=hisparse $(PYTHON) test/kernel/sanitize.py || exit 1; done

# On such a machine with SGLang installed too: real servers, HiSparse on and off. docs/contributing.md has the variables.
nightly:
	$(GPU_ENV) $(PYTHON) -m pytest -m "gpu and nightly" test/nightly

clean:
	rm -rf $(VENV) out
