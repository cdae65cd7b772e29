# make lab      open the course in JupyterLab; the first time this sets up .venv, later it takes seconds
# make test     check everything, as CI does
# make lessons  derive the lessons from the solutions and run both
# make site     build the static site of all lessons in build/site
# make clean    remove what make made, .venv too; notebooks stay
#
# Another Python: make lab PYTHON=python3.12

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
NBVAL = --nbval --nbval-current-env --nbval-cell-timeout=300 -n 2 --dist loadfile

.PHONY: lab test lint types step units notebooks lessons site clean

lab: $(VENV)/lab.ready
	@$(BIN)/zerolab lab

test: lint types step units notebooks

lint: $(VENV)/test.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/test.ready
	$(BIN)/mypy

step: $(VENV)/test.ready
	$(BIN)/python -m zerolab.course.derive --check

# Three processes keep two cores busy, as many tests wait; tests/conftest.py has the order. Tests that
# run notebooks come after them, one by one: a kernel that starts on a crowded machine may lose words.
KERNELS = $(addprefix tests/,browser/test_lab.py browser/test_explorers.py) \
	$(addprefix tests/test_,derive.py nbval_strict.py nbgrader.py release.py)
units: $(VENV)/test.ready
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder tests $(KERNELS:%=--ignore=%)
	$(BIN)/python -m pytest $(KERNELS)

notebooks: $(VENV)/test.ready
	$(BIN)/python -m pytest $(NBVAL) lessons solutions

lessons: $(VENV)/test.ready
	$(BIN)/python -m zerolab.course.derive -j 2

site: $(VENV)/test.ready
	$(BIN)/python docs/build.py

clean:
	rm -rf $(VENV) build dist test-results *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find zerolab tests -name __pycache__ -prune -exec rm -rf {} +

# A ready file is younger than what it was installed from, or it is made anew.
$(VENV)/lab.ready: pyproject.toml constraints.txt | $(BIN)/pip
	@echo "Setting up $(VENV), once. PyTorch is a large download; this can take some minutes."
	@$(INSTALL) -e .
	@touch $@

$(VENV)/test.ready: pyproject.toml constraints.txt | $(BIN)/pip
	@echo "Setting up $(VENV) with what the tests need, once."
	@$(INSTALL) -e '.[test,browser,docs,grading]'
	@touch $@ $(VENV)/lab.ready

# Makes the environment, or says in one sentence why it cannot.
$(BIN)/pip:
	@say() { echo "$$1" >&2; exit 1; }; \
	$(PYTHON) -c '' 2>/dev/null || \
	  say "There is no $(PYTHON) here: install Python 3.11 or newer, or name one as in: make lab PYTHON=python3.12"; \
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  say "zerolab needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) --version): name a newer one as in: make lab PYTHON=python3.12"; \
	$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
	  say "$(PYTHON) cannot make environments, as it lacks venv or ensurepip; on Debian and Ubuntu: sudo apt install python3-venv"; \
	$(PYTHON) -m venv $(VENV)
