# Everything runs from .venv, which is made on first use and again when its inputs change.
#   make demo   train a small CNN with 1 and with 2 workers and show where the time goes
#   make test   ruff, mypy, then all tests
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
FAST   := tests/unit tests/conformance --ignore=tests/unit/test_world.py
SLOW   := tests/unit/test_world.py tests/processes tests/network

export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: demo test check bench network-tools venv clean

demo: $(STAMP)
	$(BIN)/python -m unisono.demo

test: check network-tools
	$(BIN)/python -m pytest -q --doctest-modules --ignore-glob='*_triton.py' src
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --dist worksteal $(FAST)
	$(BIN)/python -m pytest --durations=15 $(SLOW)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP)
	@set -e; for file in benchmarks/*.py; do echo "== $$file"; $(BIN)/python $$file; done

# tests/network lays out hosts as network namespaces: root and iproute2. Without them these tests are skipped.
network-tools:
	@if [ "$$(id -u)" = 0 ] && ! command -v ip >/dev/null && command -v apt-get >/dev/null; then \
		apt-get update -qq && apt-get install -y -qq --no-install-recommends iproute2 \
			|| echo "iproute2 could not be installed: tests/network will be skipped"; \
	fi

venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
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
	fi; \
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) build src/*.egg-info .pytest_cache .mypy_cache .ruff_cache demo.png
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
