# Everything here needs make and Python 3.10 or newer, and puts what it installs into $(VENV).

VENV ?= .venv
# 3.11 is what graftlab is tested with, so it comes first.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.10 python3 python; do \
	if $$p -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1; then command -v $$p; break; fi; done)

PYTEST_ARGS ?=
# Worker processes of pytest; 0 for none, as --pdb and -s need it. On two cores a third one works while others wait for
# the processes that tests start.
PYTEST_WORKERS ?= 3
DEMO_ARGS ?=
LAB_ARGS ?=
BENCH_ARGS ?=
MATRIX_ARGS ?=
MUTANTS_ARGS ?=
COVERAGE_ARGS ?=
# How many times the examples of the suite, and from which seed: the one of a run that failed repeats it.
FUZZ ?= 20
FUZZ_SEED ?= $(shell date +%s)
DOCS_ARGS ?=

run := $(VENV)/bin/python
demo_ready := $(VENV)/.graftlab-demo
docs_ready := $(VENV)/.graftlab-docs
test_ready := $(VENV)/.graftlab-test
# Or each worker of pytest rewrites the asserts of all tests anew, for five seconds.
keep_bytecode := PYTHONDONTWRITEBYTECODE=
# The constraints keep pip from taking a newer and far larger build of torch.
install := $(run) -m pip install --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo lab test test-fast lint docs soak fuzz pairs mutants coverage bench matrix dist clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(demo_ready) ## run notebooks/quickstart.ipynb, print where the two models part ways, plot it to build/demo
	$(run) -m graftlab demo --out build/demo $(DEMO_ARGS)

lab: $(demo_ready) ## open JupyterLab on the index of notebooks/
	$(run) -m jupyterlab --ServerApp.root_dir=notebooks --LabApp.default_url=/lab/tree/index.ipynb $(LAB_ARGS)

test: $(test_ready) ## run all tests but the soak tests (PYTEST_ARGS="-k name" to choose)
	$(keep_bytecode) $(run) -m pytest -n $(PYTEST_WORKERS) --dist worksteal $(PYTEST_ARGS)

test-fast: $(test_ready) ## run the tests that start no process and take no seconds; properties with a fifth of the examples
	$(keep_bytecode) GRAFTLAB_FUZZ=0.2 $(run) -m pytest -m "not ranks and not slow and not browser and not soak" -n $(PYTEST_WORKERS) --dist worksteal $(PYTEST_ARGS)

lint: $(test_ready) ## ruff check, ruff format --check, mypy --strict
	$(run) -m ruff check .
	$(run) -m ruff format --check .
	$(run) -m mypy

docs: $(docs_ready) ## build the pages, the API and the executed notebooks into build/docs, a site to read offline
	$(run) -m sphinx -W --keep-going -c docs -d build/docs-doctrees . build/docs $(DOCS_ARGS)
	@echo "Open build/docs/index.html"

soak: $(test_ready) ## run the tests that take minutes
	$(install) -q 'ray>=2.40'
	$(run) -m pytest -m soak $(PYTEST_ARGS)

fuzz: $(test_ready) ## try FUZZ times as many examples in the property tests; prints its seed (FUZZ_SEED=1 to repeat one)
	@echo "FUZZ_SEED=$(FUZZ_SEED) FUZZ=$(FUZZ)"
	GRAFTLAB_FUZZ=$(FUZZ) $(run) -m pytest -m "hypothesis and not browser and not soak" --timeout 0 \
		--hypothesis-seed=$(FUZZ_SEED) -n $(PYTEST_WORKERS) --dist loadgroup $(PYTEST_ARGS)

pairs: ## match public implementations of one model (timm, litgpt, open_clip), in a separate environment
	$(MAKE) VENV=build/pairs build/pairs/.graftlab-pairs
	$(keep_bytecode) build/pairs/bin/python -m pytest tests/pairs $(PYTEST_ARGS)

mutants: $(test_ready) ## put small faults into the code, one at a time, and show those that no test notices
	$(install) -q 'cosmic-ray>=8.7,<9' 'coverage>=7.11'
	$(keep_bytecode) $(run) tests/mutants.py $(MUTANTS_ARGS)

coverage: $(test_ready) ## run all tests under coverage.py; print lines and branches by room (COVERAGE_ARGS="--again --lines rows")
	$(install) -q 'coverage>=7.11'
	$(run) tests/coverage_by_room.py -n $(PYTEST_WORKERS) --dist worksteal $(COVERAGE_ARGS)

bench: $(demo_ready) ## measure speed beside the published protocol; about five minutes (BENCH_ARGS="--only grafts")
	$(run) -m benchmarks $(BENCH_ARGS)

matrix: $(test_ready) ## run the suite with other releases of Python and torch (MATRIX_ARGS="-s torch-2.6 -- tests/diffs")
	$(install) -q 'nox>=2024.10'
	$(run) -m nox --envdir build/nox $(MATRIX_ARGS)

dist: $(test_ready) ## build what is published into dist/, twice, and try the wheel in a clean environment
	PATH="$(abspath $(VENV))/bin:$$PATH" .ci/dist

clean: ## remove what the other targets made
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find graftlab tests benchmarks notebooks -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps are younger than what they were installed from, so a second make installs nothing. Installing compiles the
# kernel, so a change of its sources installs again.
installed_from := pyproject.toml constraints.txt hatch_build.py $(wildcard graftlab/diffs/c/*.[ch])

$(demo_ready): $(installed_from) | $(run)
	@echo "Installing graftlab[demo] into $(VENV); the first time downloads PyTorch."
	$(install) -e '.[demo]'
	@touch $@

$(docs_ready): $(installed_from) | $(run)
	@echo "Installing graftlab[docs] into $(VENV); the first time downloads PyTorch."
	$(install) -e '.[docs]'
	@touch $@ $(demo_ready)

$(test_ready): $(installed_from) | $(run)
	@echo "Installing graftlab[test] into $(VENV); the first time downloads PyTorch."
	$(install) -e '.[test]'
	@touch $@ $(demo_ready)

# Both at once, or litgpt's older huggingface_hub would come under a transformers that needs a newer one.
$(VENV)/.graftlab-pairs: $(installed_from) | $(run)
	$(install) -e '.[test,pairs]'
	@touch $@

$(run):
	@python="$(PYTHON)"; \
	if [ -z "$$python" ]; then \
		echo "graftlab needs Python 3.10 or newer (it is tested with 3.11), and none was found on PATH." >&2; \
		echo "Install one, or name it: make PYTHON=/path/to/python3.11 ..." >&2; \
		exit 1; \
	fi; \
	if ! "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then \
		echo "PYTHON=$$python is not Python 3.10 or newer, which graftlab needs." >&2; \
		echo "Name another: make PYTHON=/path/to/python3.11 ..." >&2; \
		exit 1; \
	fi; \
	if ! "$$python" -m venv "$(VENV)"; then \
		rm -f "$(VENV)"/bin/python*; \
		echo "$$python could not make a virtual environment in $(VENV) (the reason is above)." >&2; \
		echo "On Debian and Ubuntu the package python3-venv brings what is missing." >&2; \
		exit 1; \
	fi
