# Two commands do everything: `make train` and `make test`. Each installs what it needs first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUNS := $(VENV)/.runs
STAMP := $(VENV)/.installed

# Images of containers set it. Without compiled files on disk each Python compiles torch anew: 13 s instead of 4 until it is imported.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: environment install train test test-all test-pool test-played test-slow test-rest test-wheel lint types test-dist test-crash test-matrix test-peers campaign clean

environment: $(RUNS)

install: $(STAMP)

# constraints.txt has what Holdfast needs; the other file what is tested beside it.
# What is imported is compiled then; compiling all of it takes longer than installing it.
PIP_INSTALL := install --quiet --no-compile --disable-pip-version-check -c constraints.txt
PINNED := -c constraints-dev.txt

# What running needs, and no more. torch goes first and by its pin, so that nothing pulls in another build of it.
$(RUNS): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Holdfast needs Python 3.11 or newer, this is " + sys.version.split()[0])'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip $(PIP_INSTALL) torch
	$(BIN)/pip $(PIP_INSTALL) -e .
	@touch $@

$(STAMP): $(RUNS) constraints-dev.txt
	$(BIN)/pip $(PIP_INSTALL) $(PINNED) -e ".[dev]"
	@touch $@

# About three minutes on any machine. make train ARGS="--seconds 60"
train: $(RUNS)
	$(BIN)/holdfast train $(ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tests/language.py src

types: install
	$(BIN)/pyrefly check

# Neighbouring tests go to one worker, so that fixtures that the tests of a file share (a server of ranks) are set up once.
DISTRIBUTION := --dist worksteal

# What to run while working: minutes.
test: install lint types
	$(BIN)/pytest -n 3 $(DISTRIBUTION) -m "not slow and not crash and not peers and not matrix" --ignore=tests/dist

# All tests that CI runs but those beside other libraries and on a played device, from one pool: they are collected once, and
# no core waits for the last test of a kind. Neighbouring tests go to one worker here too. Ranks and kills wait about half of
# their time, so that two cores have work for three workers.
test-pool: install lint types test-wheel
	$(BIN)/pytest -n 3 $(DISTRIBUTION) -m "not peers"

test-all: test-pool test-played

# What trains on a device that is played in Python: by itself, as pyproject.toml says.
test-played: install
	$(BIN)/pytest -n 2 $(DISTRIBUTION) -m "not gpu" tests/played tests/gpu

# Everything that `make test` leaves, tier by tier.
test-slow: test-rest test-dist test-crash test-matrix test-peers

test-rest: install test-wheel test-played
	$(BIN)/pytest -n 2 $(DISTRIBUTION) -m "slow and not crash and not peers and not matrix" --ignore=tests/dist

# The wheel, as a user gets it: built, put into a folder of its own, and run from there.
WHEEL := dist/wheel
test-wheel: install
	rm -rf $(WHEEL)
	$(BIN)/pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir $(WHEEL) .
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --target $(WHEEL)/installed $(WHEEL)/*.whl
	PYTHONPATH=$(WHEEL)/installed $(BIN)/python tests/wheel.py $(WHEEL)/installed

# Several ranks, each a process, which wait for one another.
test-dist: install
	$(BIN)/pytest -n 3 $(DISTRIBUTION) tests/dist

# They wait for the disk as much as they compute. The quick ones among them are part of `make test` and `test-rest`.
test-crash: install
	$(BIN)/pytest -n 3 $(DISTRIBUTION) -m crash tests/crash

test-matrix: install
	$(BIN)/pytest -n 2 $(DISTRIBUTION) tests/matrix

# All combinations and all repeated kills, of which the other targets take a part that is the same everywhere. Hours, alone on the
# machine; by hand, before a release. Counts are kept in benchmarks/results/.
campaign: install
	$(BIN)/python benchmarks/campaign.py --keep

# Other libraries that are read and written, each as it is. They have an environment of their own, since some change what
# torch and accelerate do by being installed; torchtitan has another, since it wants older releases of two packages.
# DeepSpeed compiles, which takes minutes. torch, the largest part of each by far, is by hard links that of $(VENV), which
# has it by the same pin. The pip of $(VENV) installs into each.
PEERS := .venv-peers
TITAN := .venv-titan
BESIDE := .venv-beside
LINKED := $(addsuffix /.linked,$(PEERS) $(TITAN) $(BESIDE))
test-peers: $(LINKED) $(PEERS)/.installed $(TITAN)/.installed $(BESIDE)/.installed
	DS_ACCELERATOR=cpu $(PEERS)/bin/pytest tests/peers
	$(TITAN)/bin/pytest tests/peers/test_torchtitan.py tests/peers/test_torchao.py

# All three before anything is installed in them: an import meanwhile would compile the files that are linked.
$(LINKED): | $(RUNS)
	$(PYTHON) -m venv $(@D)
	cd $(VENV)/lib/python3*/site-packages && \
		cp -alf torch torch-*.dist-info torchgen functorch $(CURDIR)/$(@D)/lib/python3*/site-packages
	@touch $@

pip_of = $(BIN)/pip --python $(1)/bin/python

$(PEERS)/.installed: $(RUNS) constraints-dev.txt | $(PEERS)/.linked
	DS_ACCELERATOR=cpu DS_BUILD_OPS=0 $(call pip_of,$(PEERS)) $(PIP_INSTALL) $(PINNED) -e ".[peers]"
	@touch $@

$(TITAN)/.installed: $(RUNS) constraints-dev.txt | $(TITAN)/.linked
	grep -v -E '^(datasets|fsspec|huggingface_hub)==' constraints-dev.txt > $(TITAN)/constraints-dev.txt
	$(call pip_of,$(TITAN)) $(PIP_INSTALL) -c $(TITAN)/constraints-dev.txt -e ".[titan]"
	@touch $@

# What people who fine-tune install beside Holdfast, in the versions that pip chooses for them under constraints.txt alone.
$(BESIDE)/.installed: $(RUNS) | $(BESIDE)/.linked
	$(call pip_of,$(BESIDE)) $(PIP_INSTALL) -e ".[models]" trl datasets peft
	$(call pip_of,$(BESIDE)) check
	$(BESIDE)/bin/python -c "import datasets, holdfast, peft, transformers; from trl import SFTTrainer; holdfast.Checkpointer"
	@touch $@

# What `install` made. Runs are yours: nothing here removes them.
clean:
	rm -rf $(VENV) $(PEERS) $(TITAN) $(BESIDE)
