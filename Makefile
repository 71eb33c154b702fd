# Two commands do everything: `make train` and `make test`. Both begin with `install`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: install train test lint types test-dist test-crash test-matrix test-peers clean

install: $(STAMP)

# torch goes first and by its pin, so that nothing pulls in another build of it.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Holdfast needs Python 3.11 or newer, this is " + sys.version.split()[0])'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

# make train ARGS="--set train.steps=30"
train: install
	$(BIN)/holdfast train examples/first-light.toml $(ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/pyrefly check

test: install lint types
	$(BIN)/pytest -n 2 -m "not crash and not gpu and not peers and not matrix" --ignore=tests/dist

# Several ranks, each a process, which wait for one another.
test-dist: install
	$(BIN)/pytest -n 3 --timeout=300 --session-timeout=2400 tests/dist

# They wait for the disk as much as they compute.
test-crash: install
	$(BIN)/pytest -n 3 --session-timeout=3300 tests/crash

test-matrix: install
	$(BIN)/pytest -n 2 --session-timeout=1800 tests/matrix

# Other libraries that are read and written, each as it is. They have an environment of their own, since some change what
# torch and accelerate do by being installed; torchtitan has another, since it wants older releases of two packages.
# DeepSpeed compiles, which takes minutes.
PEERS := .venv-peers
TITAN := .venv-titan
test-peers: $(PEERS)/.installed $(TITAN)/.installed
	DS_ACCELERATOR=cpu $(PEERS)/bin/pytest --session-timeout=4500 tests/peers
	$(TITAN)/bin/pytest --session-timeout=600 tests/peers/test_torchtitan.py

$(PEERS)/.installed: pyproject.toml constraints.txt
	test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	DS_ACCELERATOR=cpu DS_BUILD_OPS=0 $(PEERS)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[peers]"
	@touch $@

$(TITAN)/.installed: pyproject.toml constraints.txt
	test -x $(TITAN)/bin/python || $(PYTHON) -m venv $(TITAN)
	grep -v -E '^(fsspec|huggingface_hub)==' constraints.txt > $(TITAN)/constraints.txt
	$(TITAN)/bin/pip install --quiet --disable-pip-version-check -c $(TITAN)/constraints.txt torch
	$(TITAN)/bin/pip install --quiet --disable-pip-version-check -c $(TITAN)/constraints.txt -e ".[titan]"
	@touch $@

# What `install` made. Runs are yours: nothing here removes them.
clean:
	rm -rf $(VENV) $(PEERS) $(TITAN)
