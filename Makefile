# `make demo` and `make test` are the two commands; each makes what it needs.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
export CUTAWAY_TEST_MODELS ?= $(or $(CUTAWAY_HOME),$(or $(XDG_CACHE_HOME),$(HOME)/.cache)/cutaway)/models
# Processes that share the tests; each computes with one thread.
WORKERS ?= 2
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
PROMPT ?= The Eiffel Tower is in
# Other libraries, that tests and benchmarks ask, live in an environment of their own.
ORACLES := .oracles
# Tests marked `oracle` ask llama.cpp, in this interpreter or the one that is named; without it they are left out.
export CUTAWAY_LLAMA_CPP_PYTHON ?= $(or $(wildcard $(CURDIR)/$(ORACLES)/bin/python),$(CURDIR)/$(BIN)/python)
ORACLE = $(shell $(CUTAWAY_LLAMA_CPP_PYTHON) -c 'import llama_cpp' 2>/dev/null && echo yes)

.PHONY: help demo test test-all lint models oracles bench families inside clean

help:
	@echo 'make demo      set up, fetch the default model (98 MB), and see it run'
	@echo 'make test      set up, lint, type-check, and run the tests (13 minutes on two cores)'
	@echo 'make test-all  the same and the slow sweeps'
	@echo 'make oracles   other libraries, for tests that ask llama.cpp and for benchmarks (it is built: 10 minutes); one'
	@echo '               that is installed elsewhere will do: CUTAWAY_LLAMA_CPP_PYTHON=/path/to/its/python make test'
	@echo 'make bench     measure beside them and write benchmarks/RESULTS.md (ROWS="decode encode:short" for some)'

# What the native kernels are built of.
NATIVE := hatch_build.py $(wildcard src/cutaway/kernels/native/*)

$(VENV)/ready: pyproject.toml constraints.txt $(NATIVE)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e .
	touch $@

$(VENV)/ready-dev: $(VENV)/ready
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	touch $@

demo: $(VENV)/ready
	@$(BIN)/cutaway pull smollm2
	@echo; echo '$$ cutaway next "$(PROMPT)"'; $(BIN)/cutaway next "$(PROMPT)"
	@echo; echo '$$ cutaway run "$(PROMPT)" -n 40'; $(BIN)/cutaway run "$(PROMPT)" -n 40; echo
	@echo; echo '$$ cutaway chat "What is a transformer, in one sentence?"'; $(BIN)/cutaway chat "What is a transformer, in one sentence?"; echo

models: $(VENV)/ready-dev
	$(BIN)/python tests/get_models.py "$(CUTAWAY_TEST_MODELS)"

lint: $(VENV)/ready-dev
	$(BIN)/ruff check src tests benchmarks examples
	$(BIN)/ruff format --check src tests benchmarks examples
	$(BIN)/mypy

test: lint models
	@$(if $(ORACLE),:,echo 'llama.cpp is not here: the tests that ask it are left out (make oracles)')
	$(PYTEST) -m 'not slow$(if $(ORACLE),, and not oracle)'

test-all: lint models
	@$(if $(ORACLE),:,echo 'llama.cpp is not here: the tests that ask it are left out (make oracles)')
	$(BIN)/python -m pytest$(if $(ORACLE),, -m 'not oracle')

# The measured differences of the reference matrix, as docs/families.md.
families: $(VENV)/ready-dev
	CUTAWAY_MEASURED=.measured.json $(PYTEST) tests/reference -m 'not real and not oracle' -q
	$(BIN)/python -m tests.reference.page .measured.json docs/families.md

# What is found inside real models, as docs/inside.md.
inside: models
	$(BIN)/cutaway pull smollm2 -q; $(BIN)/cutaway pull gemma3-270m -q
	$(BIN)/python -m benchmarks.inside

# Compiles llama.cpp, which needs a C++ compiler and cmake. torch, transformers and the like are those of our own
# environment, by its path: nothing is there twice, and nothing can replace what we are tested with.
oracles: $(VENV)/ready-dev
	test -x $(ORACLES)/bin/python || $(PYTHON) -m venv $(ORACLES)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > \
		"$$($(ORACLES)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/ours.pth"
	$(ORACLES)/bin/python -m pip install -q --no-deps -r benchmarks/peers.txt

bench: $(VENV)/ready-dev
	$(BIN)/python -m benchmarks.all $(ROWS)

clean:
	rm -rf $(VENV) $(ORACLES) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
