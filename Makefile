# make test does everything from nothing: it makes the virtual environment, installs, checks and tests.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed.stamp
EXAMPLES := $(VENV)/examples.stamp
DOCS := $(VENV)/docs.stamp
INTEGRATIONS := $(VENV)/integrations.stamp

.PHONY: install examples integrations test test-slow test-integrations test-parity test-versions lint typecheck format bench sweep docs docs-version clean

install: $(INSTALLED)

# Build isolation is off so that the pinned setuptools builds the package, not the newest one.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt setuptools wheel
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt \
		--no-build-isolation -e '.[all,dev]'
	touch $@

# Apart from the rest, as PyTorch is large and nothing but the examples, their tests and benchmarks needs it, and as
# HpBandSter needs a C compiler.
$(EXAMPLES): $(INSTALLED)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt \
		--no-build-isolation -e '.[all,examples,hpbandster,rehearsal]'
	touch $@

examples: $(EXAMPLES)

# Clients of loggers, frameworks and search libraries: about 100 packages, which the rest of Fluid does without.
$(INTEGRATIONS): $(EXAMPLES)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt \
		--no-build-isolation -e '.[all,examples,loggers,frameworks,rehearsal]'
	touch $@

integrations: $(INTEGRATIONS)

# Most tests wait for processes now and then, so three run at a time on two cores.
PYTEST := $(BIN)/python -m pytest -n 3 --dist loadscope --durations 25

# pytest runs last, so that its summary closes the output.
test: lint typecheck
	@echo "make test leaves out the slow tests, of more than a second or two each (real sweeps, clusters, builds)."
	@echo "make test-slow runs those, and make test-parity all comparisons with stock Ray Tune; CI runs the first two, but"
	@echo "for what is marked long."
	$(PYTEST) -m "not slow and not long and not frameworks"

# make test-slow SLOW='slow and not long' is what CI runs.
SLOW := slow or long
test-slow: $(INSTALLED)
	$(PYTEST) -m "($(SLOW)) and not parity and not frameworks"

# What is tested with the clients and frameworks themselves, in the releases that constraints.txt names.
# make test-integrations FRAMEWORKS='frameworks and not long' is what CI runs.
FRAMEWORKS := frameworks
test-integrations: $(INTEGRATIONS)
	FLUID_REQUIRE_FRAMEWORKS=1 $(PYTEST) -m "$(FRAMEWORKS)" tests

# All sweeps that are compared with stock Ray Tune; make test-slow has the most telling of them.
test-parity: $(INSTALLED)
	$(BIN)/python -m pytest tests/integrations/ray_tune/parity

# The oldest and the newest release of what Fluid works with, each in an environment of its own; not part of CI.
# make test-versions ARGS='--only ray' passes options on.
test-versions:
	$(PYTHON) scripts/tested_versions.py $(ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python scripts/sizes.py

typecheck: $(INSTALLED)
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(INSTALLED)
	$(BIN)/python benchmarks/planner.py
	$(BIN)/python benchmarks/paper_shapes.py

# make sweep ARGS='--algo hyperband --data DIR' passes options on.
sweep: $(EXAMPLES)
	$(BIN)/python examples/sweep.py $(ARGS)

# Anything that is wrong with a page or a link fails it. The site can be read as files: site/index.html.
docs: $(DOCS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The site of this version beside those of others, as a commit on the branch gh-pages, which git push publishes.
docs-version: $(DOCS)
	NO_MKDOCS_2_WARNING=1 PATH="$(abspath $(BIN)):$$PATH" $(BIN)/mike deploy --update-aliases \
		"$$($(BIN)/python -c 'import fluid; print(fluid.__version__.rpartition(".")[0])')" latest
	$(BIN)/mike set-default latest

$(DOCS): $(INSTALLED)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt \
		--no-build-isolation -e '.[docs]'
	touch $@

clean:
	rm -rf $(VENV) build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find fluid integrations tests -name __pycache__ -type d -prune -exec rm -rf {} +
