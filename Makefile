# make test does everything from nothing: it makes the virtual environment, installs, checks and tests.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed.stamp

.PHONY: install test lint typecheck format bench clean

install: $(INSTALLED)

# Build isolation is off so that the pinned setuptools builds the package, not the newest one.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt setuptools wheel
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt \
		--no-build-isolation -e '.[all,dev]'
	touch $@

# pytest runs last, so that its summary closes the output.
test: lint typecheck
	$(BIN)/python -m pytest

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

typecheck: $(INSTALLED)
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(INSTALLED)
	$(BIN)/python benchmarks/planner.py
	$(BIN)/python benchmarks/paper_shapes.py

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find fluid integrations tests -name __pycache__ -type d -prune -exec rm -rf {} +
