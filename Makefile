# Every target installs what it needs in .venv. Python >= 3.11 and make must be there.
#
#   make demo           run the demo, on a GPU or a simulated one
#   make test           run the tests on simulated GPUs
#   make faults         run the tests of the faults in tests/faults/cases.toml, and print each with its result
#   make every-call     fail each driver call of the conformance suite's scenarios in turn, and judge what
#                       follows; CALLS=8 combinations of each scenario, 0 for all; STANDIN=... on the stand-in, too
#   make schedules      run random programs on the pool in random schedules, for STEPS=1000000 steps
#   make check          lint, format, types, import contracts, spelling
#   make docs           build the documentation in .build/site, warnings as errors
#   make screens        draw the pictures of `greensched top` in docs/reference
#   make docs-serve     show it on http://127.0.0.1:8000, or PORT=...
#   make check-counts   files that an operation passes; with STANDIN=..., driver calls of the hot paths
#   make check-extras   resolve every extra beside the newest torch; installs nothing
#   make test-standin   run the conformance suite and more with the real cuda.bindings on a stand-in
#                       driver, built from STANDIN=<folder with a Makefile>
#   make test-integrations  run torch, cuda.core, numba-cuda, Warp and Ray with greensched, in an
#                       environment of their own, some gigabytes; STANDIN=... for those with a driver
#   make test-embedding     run the recipes of embedding.md and processes.md in LitServe, BentoML, Triton's
#                       server, gunicorn and Celery, in an environment of their own, half a gigabyte
#   make test-gpu       run the conformance suite and all GPU tests on this machine's GPU, with the
#                       Python (GPU_PYTHON=...) and packages found there
#   make compiled       build the compiled package, a wheel in .build/compiled; needs a C compiler
#   make dist           build the wheel and the source distribution in dist/, twice, and compare them;
#                       ARGS=--compiled also builds a compiled wheel for the Python of .build/release
#   make test-matrix    install that wheel on each Python found (3.11 to 3.14, also pyenv's), with the
#                       oldest and the newest dependencies, and run the demo and quick tests
#   make test-compiled  run the tests of what is compiled on it
#   make bench          run the benchmarks on the simulated driver; STANDIN=... adds the real bindings
#   make bench-gpu      run the benchmarks on this machine's GPU, with the Python of test-gpu
#   make bench-engine   find the highest rate of each way to serve a language model, on this machine's GPU
#   make bench-models   find how many texts a second model reads beside a chat, on this machine's GPU
#   make bench-http     run the FastAPI example at twice its capacity for a minute
#   make bench-ray      run a fleet on a Ray cluster of three nodes with simulated GPUs, with faults
#   make fuzz-scheduler run PROGRAMS=10000 random programs against the scheduler, in one process, and
#                       1000 examples of each of its tests with Hypothesis
#   make soak           run leases with faults for MINUTES=10: memory, threads, files and device memory
#                       must not grow

PYTHON ?= $(firstword $(foreach v,python3.11 python3.12 python3.13 python3.14 python3,$(if $(shell $(v) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo ok),$(v))))
VENV   := .venv
BIN    := $(VENV)/bin
STANDIN ?=
BUILT  := .build/standin
OTHERS := .build/integrations
HOSTS  := .build/embedding
DOCS   := .build/docs
SITE   := .build/site
PORT   ?= 8000
COMPILED := .build/compiled
RELEASE := .build/release
COMPILER := $(shell command -v $(CC))
SOURCES  := $(shell find src -name '*.py')

# Bytecode is written: without it each process of a run compiles the package, the tests and hypothesis.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo docs screens docs-serve test faults every-call schedules check check-counts format test-standin test-integrations check-extras test-gpu bench bench-gpu bench-engine bench-models bench-http bench-ray test-embedding soak fuzz-scheduler compiled test-compiled dist test-matrix clean

demo: $(VENV)/.ready
	$(BIN)/greensched demo $(ARGS)

# Two processes for each processor, since the tests wait half of their time; a process that is done
# takes tests from the others. Eight at most: a container may have far fewer processors than it sees.
# ARGS="-n0" runs one process.
test: $(VENV)/.ready
	$(BIN)/python -m pytest -n $$(( 2 * $$(getconf _NPROCESSORS_ONLN) )) --maxprocesses 8 --dist worksteal $(ARGS)

faults: $(VENV)/.ready
	$(BIN)/python -m tests.faults -n $$(( 2 * $$(getconf _NPROCESSORS_ONLN) )) --maxprocesses 8 --dist worksteal $(ARGS)

CALLS ?= 8
every-call: $(VENV)/.ready $(if $(STANDIN),standin-built)
	$(BIN)/python -m pytest -q -p tests.faults.every_call -p no:randomly --every-call $(CALLS) $(or $(ARGS),tests/conformance)
ifneq ($(STANDIN),)
	GREENSCHED_STANDIN_LIB=$(abspath $(BUILT)/build) LD_LIBRARY_PATH=$(abspath $(BUILT)/build) \
	$(BIN)/python -m pytest -q -p tests.faults.every_call -p no:randomly --driver cuda --every-call $(CALLS) $(or $(ARGS),tests/conformance)
endif

STEPS ?= 1000000
schedules: $(VENV)/.ready
	PYTHONPATH=tests $(BIN)/python -m tests.faults.schedules --steps $(STEPS) $(ARGS)

check: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell

# Counts do not drift as times do: they are gates.
check-counts: $(VENV)/.ready $(if $(STANDIN),standin-built)
	$(BIN)/python -m benchmarks.path --check
ifneq ($(STANDIN),)
	GREENSCHED_STANDIN_LIB=$(abspath $(BUILT)/build) LD_LIBRARY_PATH=$(abspath $(BUILT)/build) \
	$(BIN)/python -m pytest -q --driver cuda tests/driver_cuda/test_counts.py $(ARGS)
endif

docs: $(DOCS)/.ready
	$(DOCS)/bin/python -m sphinx --fail-on-warning --keep-going --nitpicky --quiet docs $(SITE) $(ARGS)

screens: $(VENV)/.ready
	$(BIN)/python -m tests.helpers.screens docs/reference

docs-serve: docs
	$(DOCS)/bin/python -m http.server --bind 127.0.0.1 --directory $(SITE) $(PORT)

format: $(VENV)/.ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test-standin: $(VENV)/.ready standin-built
	$(BIN)/python tests/run_standin.py $(BUILT)/build $(ARGS)

# On the stand-in these libraries keep what they created until the process ends, so the account is not
# read afterwards. No adapter knows of a driver's version, so one version shows what they do there.
# Ray's GPUs are simulated.
test-integrations: $(OTHERS)/.ready $(if $(STANDIN),standin-built)
	$(OTHERS)/bin/python -m pytest tests/integrations/gpu_libraries tests/integrations/fleet $(ARGS)
ifneq ($(STANDIN),)
	GREENSCHED_STANDIN_LIB=$(abspath $(BUILT)/build) LD_LIBRARY_PATH=$(abspath $(BUILT)/build) \
	STUBCUDA_DRIVER_VERSION=13000 \
	$(OTHERS)/bin/python -m pytest tests/integrations/gpu_libraries --driver cuda $(ARGS)
endif

# Each host is several processes, so the tests run one after another.
test-embedding: $(HOSTS)/.ready
	$(HOSTS)/bin/python -m pytest tests/integrations/hosts $(ARGS)

check-extras: $(VENV)/.ready
	$(BIN)/python tests/extras.py

# The integrations run in a process of their own: torch makes the primary context current and keeps
# it, and a driver keeps 4 MiB of each executor that existed until that context is released.
GPU_TESTS = PYTHONPATH=src:$$PYTHONPATH $(or $(GPU_PYTHON),python3) -m pytest -c tests/gpu.ini --rootdir . -p no:cacheprovider --driver cuda

test-gpu:
	$(GPU_TESTS) tests/conformance $(ARGS)
	$(GPU_TESTS) tests/integrations/gpu_libraries tests/integrations/fleet tests/gpu $(ARGS)

# Each row for the plain build, and where there is a C compiler for the compiled one, too.
bench: $(VENV)/.ready $(if $(STANDIN),standin-built) $(if $(COMPILER),compiled)
	$(BIN)/python -m benchmarks host $(if $(STANDIN),--standin $(BUILT)/build) $(if $(COMPILER),--compiled $(COMPILED)/site) $(ARGS)

bench-gpu:
	PYTHONPATH=src:$$PYTHONPATH $(or $(GPU_PYTHON),python3) -m benchmarks gpu $(ARGS)

# On one GPU, at most nine minutes; `ARGS="--json FILE --plot FILE"`.
bench-engine:
	PYTHONPATH=src:$$PYTHONPATH $(or $(GPU_PYTHON),python3) -m benchmarks.gpu.engine $(ARGS)

bench-models:
	PYTHONPATH=src:$$PYTHONPATH $(or $(GPU_PYTHON),python3) -m benchmarks.gpu.two_models $(ARGS)

bench-http: $(VENV)/.ready
	$(BIN)/python -m benchmarks.system.http $(ARGS)

bench-ray: $(OTHERS)/.ready
	$(OTHERS)/bin/python -m benchmarks.system.ray $(ARGS)

PROGRAMS ?= 10000
fuzz-scheduler: $(VENV)/.ready
	$(BIN)/python -m tests.scheduling.fuzz --programs $(PROGRAMS) $(ARGS)
	$(BIN)/python -m pytest -q tests/scheduling --hypothesis-profile deep

MINUTES ?= 10
soak: $(VENV)/.ready
	$(BIN)/python -m benchmarks.system.soak --minutes $(MINUTES) $(ARGS)

# Built in a copy: the build writes its libraries beside the sources, where every import finds them.
compiled: $(COMPILED)/.ready

$(COMPILED)/.ready: $(VENV)/.ready $(SOURCES)
	@rm -rf $(COMPILED) && mkdir -p $(COMPILED)/tree && cp -R pyproject.toml README.md LICENSE src $(COMPILED)/tree/
	HATCH_BUILD_HOOK_ENABLE_MYPYC=1 $(BIN)/python -m pip wheel --quiet --disable-pip-version-check \
	  --no-deps --build-constraint constraints.txt --wheel-dir $(COMPILED) $(COMPILED)/tree
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps \
	  --target $(COMPILED)/site $(COMPILED)/*.whl
	@touch $@

# The tests of the packages with compiled modules and of the failures that reach them, and the
# conformance suite on asyncio: no compiled module knows of a loop, a clock or a driver's version.
test-compiled: compiled
	PYTHONPATH=$(COMPILED)/site $(BIN)/python -m pytest -n logical --maxprocesses 8 --dist worksteal \
	  tests/scheduling tests/device tests/execution tests/leasing/test_faults.py \
	  tests/leasing/test_cancellation.py tests/conformance -k "not conformance or real-asyncio" $(ARGS)

# The times in both files are those of the commit, so that everyone builds the same bytes of it.
dist: $(RELEASE)/.ready
	$(RELEASE)/bin/python tests/release.py dist $(ARGS)

test-matrix: dist
	$(RELEASE)/bin/python tests/matrix.py dist $(ARGS)

$(RELEASE)/.ready: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "no Python >= 3.11 found: install one, or give PYTHON=<path>"; exit 2; }
	$(PYTHON) -m venv $(RELEASE)
	$(RELEASE)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt "pip>=25.3" hatchling
	@touch $@

# Built in a copy of its folder, with the headers of the runtime package of the nvrtc extra: an nvcc
# on the path may have no headers beside it.
.PHONY: standin-built
standin-built: $(VENV)/.ready
	@test -n "$(STANDIN)" && test -f "$(STANDIN)/Makefile" || { echo "give STANDIN=<folder with a Makefile>"; exit 2; }
	@rm -rf $(BUILT) && mkdir -p $(BUILT) && cp -R "$(STANDIN)/." $(BUILT)/ && chmod -R u+w $(BUILT)
	@include=$$($(BIN)/python tests/cuda_headers.py); $(MAKE) -C $(BUILT) $${include:+CUDA_INC=$$include}

$(VENV)/.ready: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "no Python >= 3.11 found: install one, or give PYTHON=<path>"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "pip>=25.3"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e . --group dev
	@touch $@

# torch pins the CUDA components, so those of the constraints are left out.
$(OTHERS)/.ready: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "no Python >= 3.11 found: install one, or give PYTHON=<path>"; exit 2; }
	$(PYTHON) -m venv $(OTHERS)
	$(OTHERS)/bin/python -m pip install --quiet --disable-pip-version-check "pip>=25.1"
	@grep -v '^cuda-\|^nvidia-' constraints.txt > $(OTHERS)/constraints.txt
	$(OTHERS)/bin/python -m pip install --quiet --disable-pip-version-check -c $(OTHERS)/constraints.txt -e . --group integrations
	@touch $@

$(DOCS)/.ready: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "no Python >= 3.11 found: install one, or give PYTHON=<path>"; exit 2; }
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check "pip>=25.1"
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e . --group docs
	@touch $@

# pytriton needs numpy 1, Triton's client an older gRPC than Ray, and BentoML its own opentelemetry.
$(HOSTS)/.ready: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "no Python >= 3.11 found: install one, or give PYTHON=<path>"; exit 2; }
	$(PYTHON) -m venv $(HOSTS)
	$(HOSTS)/bin/python -m pip install --quiet --disable-pip-version-check "pip>=25.1"
	@grep -v '^numpy\|^opentelemetry\|^protobuf\|^grpcio\|^googleapis' constraints.txt > $(HOSTS)/constraints.txt
	$(HOSTS)/bin/python -m pip install --quiet --disable-pip-version-check -c $(HOSTS)/constraints.txt -e . --group embedding
	@touch $@

clean:
	rm -rf $(VENV) .build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
