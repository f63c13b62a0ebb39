# make demo       train the example on two ranks, ZeRO-3, checked against one device
# make test       lint and the tests that everyone runs
# make test-all   the same with the long matrices and random campaigns
# Each makes its own virtual environment; a fresh machine needs Python >= 3.10 and make.

PYTHON ?= python3
VENV   ?= .venv
JOBS   ?= 2
RANKS  ?= 2
PIP    := $(VENV)/bin/python -m pip install --disable-pip-version-check --quiet -c constraints.txt

# One thread for each process: ranks and test workers share the cores.
export OMP_NUM_THREADS = 1

.PHONY: demo test test-all lint clean

demo: $(VENV)/.demo
	$(VENV)/bin/torchrun --nproc-per-node $(RANKS) --rdzv-backend c10d --rdzv-endpoint localhost:0 examples/train_gpt.py --zero 3 --check

test: lint
	$(VENV)/bin/python -m pytest -q -n $(JOBS) -m "not long"

test-all: lint
	$(VENV)/bin/python -m pytest -q -n $(JOBS)

lint: $(VENV)/.test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports --no-cache

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) -e '.[demo]'
	touch $@

$(VENV)/.test: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) -e '.[test,demo]'
	touch $@ $(VENV)/.demo

clean:
	rm -rf $(VENV) out .pytest_cache .mypy_cache .ruff_cache .hypothesis
