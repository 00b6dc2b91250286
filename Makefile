# Everything runs from .venv, which is made on first use and again when its inputs change.
#   make demo   train a small CNN with 1 and with 2 workers and show where the time goes
#   make test   ruff, mypy, then all tests; installs the engines that some of them start
#   make engines  only the tests that start real engines: MPI, Slurm, torchrun, ssh, Ray, Spark
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
ENGINES := $(VENV)/.engines
# Several tests at a time (FAST), or several files (FILES: an engine's tests share its cluster, and wait for processes
# more than they compute): what does not depend on how long things take. The others one after the other.
STEADY := $(addprefix tests/processes/test_,zero_processes.py estimator_processes.py)
FAST   := tests/unit tests/conformance tests/golden $(STEADY)
TRAIN  := $(addprefix tests/processes/test_,examples.py server_processes.py resume.py local_training.py \
	strategy_processes.py ddp_parity.py)
SLOW   := tests/processes tests/network $(addprefix --ignore=,$(STEADY) $(TRAIN))
FILES  := -rs -n 2 --dist loadfile --timeout=300 --durations=15

export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: demo test engines check bench network-tools engine-tools venv clean

demo: $(STAMP)
	$(BIN)/python -m unisono.demo

test: check network-tools engine-tools $(ENGINES)
	$(BIN)/python -m pytest -q --doctest-modules --ignore-glob='*_triton.py' src
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --dist worksteal $(FAST)
	$(BIN)/python -m pytest $(FILES) tests/engines $(TRAIN)
	$(BIN)/python -m pytest --durations=15 $(SLOW)

engines: engine-tools $(ENGINES)
	$(BIN)/python -m pytest $(FILES) tests/engines

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

# A policy keeps apt from starting sshd and munge as services.
engine-tools:
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
		! { command -v mpirun && command -v slurmctld && command -v java && [ -x /usr/sbin/sshd ]; } >/dev/null; then \
		own=; [ -e /usr/sbin/policy-rc.d ] || { own=1; printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d; \
			chmod +x /usr/sbin/policy-rc.d; }; \
		apt-get update -qq && apt-get install -y -qq --no-install-recommends \
			openmpi-bin openssh-client openssh-server slurm-wlm munge default-jre-headless \
			|| echo "some engines could not be installed: their tests will be skipped"; \
		[ -z "$$own" ] || rm -f /usr/sbin/policy-rc.d; \
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

# About 540 MB to download, most of it Spark.
$(ENGINES): $(STAMP)
	@$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev,mpi,ray,spark]' && touch $@ \
		|| echo "Ray, Spark or mpi4py could not be installed: their tests will be skipped"

clean:
	rm -rf $(VENV) build src/*.egg-info .pytest_cache .mypy_cache .ruff_cache demo.png
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
