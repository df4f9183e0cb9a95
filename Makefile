# make demo   sets up, then trains, tries and compares a tiny ELECTRA on real text
# make test   sets up, then runs the tests; make test-long runs those that take long
# make docs   sets up, then builds the documentation into site/
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: setup locked lock check test test-long docs demo clean

setup: $(VENV)/.ready

INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check

# torch first and pinned: 2.13.0 is the tested release, and a looser range could bring another build.
$(VENV)/.demo: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) torch==2.13.0
	$(INSTALL) --editable '.[demo]'
	touch $@

$(VENV)/.ready: $(VENV)/.demo
	$(INSTALL) --editable '.[dev]'
	touch $@

# What continuous integration runs before `make test`: the versions and hashes of .ci/lock.txt. Not
# torch, and what it alone needs: its build for the CPU is not the file that PyPI has.
locked:
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) --require-hashes --no-deps --requirement .ci/lock.txt
	$(INSTALL) torch==2.13.0
	$(INSTALL) --no-deps --no-build-isolation --editable .
	$(BIN)/python -m pip check
	touch $(VENV)/.demo $(VENV)/.ready

# The newest versions that pyproject.toml allows, for every Python of it; needs uv.
lock:
	echo "torch; python_version < '3'" | uv pip compile pyproject.toml --extra dev --universal \
	    --python-version 3.11 --generate-hashes --no-annotate --no-header --override - \
	    --upgrade --quiet --output-file .ci/lock.txt

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

test: setup
	$(BIN)/python -m pytest -n 2 -m 'not alone and not long'
	$(BIN)/python -m pytest -m 'alone and not long'

$(VENV)/.long: $(VENV)/.ready
	$(INSTALL) --editable '.[dev,ray]' accelerate
	touch $@

test-long: $(VENV)/.long
	$(BIN)/python -m pytest -m long

docs: setup
	$(BIN)/sphinx-build -W -E docs site

demo: $(VENV)/.demo
	$(BIN)/electra demo

clean:
	rm -rf $(VENV) runs build site *.egg-info
