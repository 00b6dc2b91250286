# Everything runs from .venv, which is made on first use and again when its inputs change.
#   make demo   train a small CNN with 1 and with 2 workers and show where the time goes
#   make test   ruff, mypy, the pages and most tests; installs the engines that some of them start
#   make thorough  the same with all tests: before a release, and after a change of what tests/thorough.txt is about
#   make quick  ruff, mypy and a part of the unit tests, for the loop of a developer
#   make flaky RUNS=10 BUSY=2 LOG=FILE  the pool again and again, beside busy processes; a table of what failed at least
#               once, over all runs that FILE has; the same command again makes the runs that are left
#   make gpu MINUTES=8  the tests and benchmarks that need a CUDA device, by the Python that has one (PYTHON=python3), in
#               pieces; the same command again runs those that are left; GPU="--list", "--again": see tests/gpu.py
#   make engines  only the tests that start real engines: MPI, Slurm, torchrun, ssh, Ray, Spark
#   make dist   the wheel and the sdist in dist/, checked; make dist-test: used in an empty environment
#   make pythons  the quick tests from the wheel, on each Python that is found
#   make docs   the site, from docs to docs/_build/html: no warnings, every link inside it leads somewhere
#   make results   docs/results.md, its pictures and what the planner knows of methods, from the lines in benchmarks/results
#   make docs-links  the links to other sites; needs the network
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
ENGINES := $(VENV)/.engines
# One pool for all tests, the longest first (tests/conftest.py). Three at a time on two cores: many wait for processes.
POOL   := -n 3 --no-loadscope-reorder --timeout=300
DOCTEST := -q -p no:xdist --doctest-modules --ignore-glob='*_triton.py' $(foreach name,huggingface keras lightning skorch,--ignore=src/unisono/plugs/$(name).py) src
SITE = docs docs/_build/html
# Lint, types, doctests and the site are made beside the tests: what they say is shown at the end, and their failure is
# one of the whole.
BESIDE = @log=$$(mktemp); $(MAKE) --no-print-directory check doctest $(2) >$$log 2>&1 & beside=$$!; \
	$(1); tests=$$?; wait $$beside; checks=$$?; cat $$log; rm -f $$log; [ $$tests = 0 ] && [ $$checks = 0 ]

export PIP_DISABLE_PIP_VERSION_CHECK = 1
unexport PYTHONDONTWRITEBYTECODE # some hundred processes read what the first of them compiled

.PHONY: demo test thorough quick flaky gpu engines check doctest docs docs-check docs-if-there docs-links results bench
.PHONY: python all-tools network-tools engine-tools venv clean dist dist-test pythons

demo: $(STAMP)
	$(BIN)/python -m unisono.demo

test: all-tools
	$(call BESIDE,$(BIN)/python -m pytest -q $(POOL) -m "not alone" --durations=15 --most tests,docs-check)
	$(BIN)/python -m pytest -q -m alone tests/processes/test_neighbours.py

thorough: all-tools
	$(call BESIDE,$(BIN)/python -m pytest -q $(POOL) -m "not alone" --durations=15 tests,docs)
	$(BIN)/python -m pytest -q -m alone tests/processes/test_neighbours.py

quick: $(STAMP)
	$(call BESIDE,$(BIN)/python -m pytest -q $(POOL) --quick tests/unit tests/strangers tests/conformance,docs-if-there)

RUNS ?= 10
BUSY ?= 0
flaky: all-tools
	$(BIN)/python tests/flaky.py --runs $(RUNS) --busy $(BUSY) $(if $(LOG),--log $(LOG))

MINUTES ?= 8
gpu:
	@$(PYTHON) tests/gpu.py --minutes $(MINUTES) $(GPU)

engines: all-tools
	$(BIN)/python -m pytest -rs $(POOL) --durations=15 tests/engines

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

doctest: $(STAMP)
	OMP_NUM_THREADS=1 UNISONO_WARM=0 $(BIN)/python -m pytest $(DOCTEST)

docs: $(STAMP)
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "the site is not built: Sphinx needs Python 3.11 or newer"; exit 0; }; \
	$(BIN)/python -c 'import furo, myst_parser, sphinx_copybutton' \
		|| { echo "make docs needs the extra docs: pip install -c constraints.txt -e '.[docs]'"; exit 1; }; \
	echo "$(BIN)/python -m sphinx $(SITE)"; \
	$(BIN)/python -m sphinx -q -E -W --keep-going -b html $(SITE)

# The same pages and links under a plain theme: half of the time of the site goes into its list of pages.
docs-check: SITE = -t check docs docs/_build/check
docs-check: docs

docs-if-there: $(STAMP)
	@if $(BIN)/python -c 'import furo, myst_parser, sphinx_copybutton' 2>/dev/null; then $(MAKE) --no-print-directory docs-check; \
	else echo "the site is not built: the extra docs is not installed"; fi

docs-links: $(STAMP)
	$(BIN)/python -m sphinx -q -b linkcheck docs docs/_build/links

results: $(STAMP)
	$(BIN)/python docs/results.py
	$(BIN)/python docs/pictures.py
	$(BIN)/python benchmarks/evidence_learning.py

bench: $(STAMP)
	@set -e; for file in benchmarks/*.py; do echo "== $$file"; $(BIN)/python $$file; done

# What apt and pip install, side by side; where pip cannot install the engines, without these.
all-tools: python
	@$(MAKE) -s --no-print-directory -j2 engine-tools $(ENGINES)
	@$(MAKE) -s --no-print-directory $(STAMP)

# The wheel is built from the sdist, and must be that of the checkout.
dist: $(STAMP)
	rm -rf dist build src/*.egg-info
	@$(BIN)/python -m pip install -q -c constraints.txt build twine 'setuptools>=77'
	$(BIN)/python -m build --no-isolation --outdir dist . >/dev/null
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python release/check_dist.py dist --tree .

dist-test: dist
	$(BIN)/python release/try_wheel.py --constraints constraints.txt dist/*.whl

pythons: dist
	$(BIN)/python release/try_pythons.py --constraints constraints.txt dist/*.whl

# tests/network lays out hosts as network namespaces, by iproute2. Where they cannot be made these tests are skipped.
network-tools:
	@if [ "$$(id -u)" = 0 ] && ! command -v ip >/dev/null && command -v apt-get >/dev/null; then \
		apt-get update -qq && apt-get install -y -qq --no-install-recommends iproute2 \
			|| echo "iproute2 could not be installed: tests/network will be skipped"; \
	fi

# Besides the engines: the browser that tests of the live page drive, and the shells that completion is tried in.
# A policy keeps apt from starting sshd and munge as services. One apt at a time; pip may run beside it.
engine-tools: network-tools
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
		! { command -v mpirun && command -v slurmctld && command -v java && command -v chromium && command -v zsh && \
			command -v fish && [ -x /usr/sbin/sshd ]; } >/dev/null; then \
		own=; [ -e /usr/sbin/policy-rc.d ] || { own=1; printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d; \
			chmod +x /usr/sbin/policy-rc.d; }; \
		apt-get update -qq && apt-get install -y -qq --no-install-recommends \
			openmpi-bin openssh-client openssh-server slurm-wlm munge default-jre-headless chromium zsh fish \
			|| echo "some tools could not be installed: their tests will be skipped"; \
		[ -z "$$own" ] || rm -f /usr/sbin/policy-rc.d; \
	fi

venv: $(STAMP)

# A Python that can make a virtual environment.
python:
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) not found: install Python 3.10 or newer"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo "$$($(PYTHON) --version) found, 3.10 or newer needed: make PYTHON=/path/to/python3"; exit 1; }
	@if $(BIN)/python -m pip --version >/dev/null 2>&1; then exit 0; fi; \
	if ! $(PYTHON) -c 'import ensurepip' >/dev/null 2>&1; then \
		if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
			apt-get update -qq && apt-get install -y -qq --no-install-recommends python3-venv; \
		else \
			echo "$(PYTHON) has no ensurepip. As root: apt-get install python3-venv; then make again."; exit 1; \
		fi; \
	fi

MAKE_VENV = $(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
# Not compiled: most of it is never imported, and what is keeps what it compiled. Half of the time of an installation.
INSTALL = $(BIN)/python -m pip install -q --no-compile -c constraints.txt -e

$(STAMP): pyproject.toml constraints.txt | python
	@$(MAKE_VENV)
	$(INSTALL) '.[dev]'
	@touch $@

# About 540 MB more to download, most of it Spark; all in one go where there is nothing yet.
$(ENGINES): pyproject.toml constraints.txt | python
	@$(MAKE_VENV)
	@$(INSTALL) '.[dev,mpi,ray,spark]' && touch $(STAMP) $@ \
		|| echo "Ray, Spark or mpi4py could not be installed: their tests will be skipped"

clean:
	rm -rf $(VENV) build dist docs/_build src/*.egg-info .pytest_cache .mypy_cache .ruff_cache demo.png
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
