# What a contributor runs. A fresh machine needs git, make and Python 3.11 or newer, nothing else:
# each target first creates what it uses, in $(VENV).

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
# One environment serves all targets, and two pip runs at once would spoil it.
.NOTPARALLEL:
SHELL := /bin/sh

VENV ?= .venv
BIN := $(VENV)/bin
# Narrow a test run: make test TESTS=tests/unit ARGS="-k key"
TESTS ?=
ARGS ?=
# Tests at a time. Each may start several processes: more than there are cores makes races slow.
WORKERS ?= 2
CORE_TESTS := tests/unit tests/integration tests/migration
MATRIX ?= 3.12 3.13
# Where the demo's locks are: database (its own SQLite file), redis, or zookeeper (at
# DEMO_ZOOKEEPER_HOSTS).
BACKEND ?= database
demo serve: export DEMO_BACKEND = $(BACKEND)
export DISTLOCKS_SOAK_SECONDS ?= 300

.PHONY: help demo serve test test-matrix soak lint bench build lock clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: $(VENV)/.stamp-demo ## Show in the terminal what the locks do (BACKEND=database, redis or zookeeper)
	$(BIN)/python manage.py demo

serve: $(VENV)/.stamp-demo ## Serve the demo project with its admin (BACKEND=database, redis or zookeeper)
	$(BIN)/python manage.py serve

test: $(VENV)/.stamp-test ## Run the tests, with real servers (TESTS=, ARGS=)
	$(BIN)/python -m pytest -m "not soak" -n $(WORKERS) --dist worksteal $(ARGS) $(TESTS)

test-matrix: ## Run the core of the tests on the other Python versions found here
	@for version in $(MATRIX); do \
	  $(find_version); \
	  if [ -z "$$python" ]; then echo "Python $$version: not found here, left out"; continue; fi; \
	  echo "Python $$version: $$python"; \
	  $(MAKE) --no-print-directory test PYTHON="$$python" VENV=".venv-$$version" \
	    TESTS="$(wildcard $(CORE_TESTS))" || exit 1; \
	done

soak: $(VENV)/.stamp-test ## Run the long tests (DISTLOCKS_SOAK_SECONDS=300)
	$(BIN)/python -m pytest -m soak --timeout $$((DISTLOCKS_SOAK_SECONDS + 300)) $(ARGS) $(TESTS)

lint: $(VENV)/.stamp-lint ## Check style, types, layers and migrations
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python manage.py makemigrations --check --dry-run --settings tests.settings
	$(BIN)/python manage.py makemigrations --check --dry-run

bench: $(VENV)/.stamp-bench ## Run the benchmarks
	$(BIN)/python -m benchmarks $(ARGS)

build: $(VENV)/.stamp-venv ## Build the wheel into dist/ and check what it carries
	rm -rf dist
	$(BIN)/python -m pip wheel -qq --no-deps --wheel-dir dist .
	@$(BIN)/python -c "$$CHECK_WHEEL" dist/*.whl

lock: $(VENV)/.stamp-venv ## Pin the newest versions of everything in constraints.txt
	$(BIN)/python -m pip install -qq --upgrade uv
	$(BIN)/uv pip compile pyproject.toml --quiet --upgrade --universal --python-version 3.11 \
	  --all-extras --group demo --group test --group lint --group bench \
	  --no-annotate --no-emit-index-url --custom-compile-command "make lock" -o constraints.txt

clean: ## Remove what make created, but not var/, the data of the demo
	rm -rf .venv .venv-* build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# One stamp for each dependency group, all in one environment with the same pins.
$(VENV)/.stamp-%: pyproject.toml constraints.txt | $(VENV)/.stamp-venv
	$(BIN)/python -m pip install -qq --constraint constraints.txt --editable . --group $*
	@touch $@

# The pip that Python 3.11 brings does not know dependency groups.
$(VENV)/.stamp-venv:
	@$(find_python); $(make_venv)
	$(BIN)/python -m pip install -qq --upgrade "pip>=25.1"
	@touch $@

# Sets $$python to the first interpreter that starts and is new enough: a name in PATH can be a
# version manager's shim that does neither.
define find_python
python=; \
for candidate in $(if $(PYTHON),"$(PYTHON)",python3 python3.13 python3.12 python3.11); do \
  if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
    python=$$candidate; break; \
  fi; \
done; \
if [ -z "$$python" ]; then \
  echo "make: no Python 3.11 or newer $(if $(PYTHON),at PYTHON=$(PYTHON),in PATH: install one or name it with PYTHON=)" >&2; exit 1; \
fi
endef

# Sets $$python to a working Python $$version, also one that a version manager has installed but not
# chosen; to nothing if there is none.
define find_version
python=; \
for candidate in "python$$version" "$${PYENV_ROOT:-$$HOME/.pyenv}/versions/$$version".*/bin/python; do \
  if "$$candidate" -c "import sys; sys.exit('%d.%d' % sys.version_info[:2] != '$$version')" >/dev/null 2>&1; then \
    python=$$candidate; break; \
  fi; \
done
endef

# Creates $(VENV) with $$python. Debian keeps what that needs in a package of its own.
define make_venv
if ! "$$python" -c 'import ensurepip, venv' >/dev/null 2>&1; then \
  package="python$$("$$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')-venv"; \
  if [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then \
    echo "make: $$python cannot create virtual environments: install the package $$package (or python3-venv)" >&2; exit 1; \
  fi; \
  export DEBIAN_FRONTEND=noninteractive; \
  apt-get -qq update; \
  apt-get -qq -o DPkg::Lock::Timeout=300 install -y --no-install-recommends "$$package" >/dev/null \
    || apt-get -qq -o DPkg::Lock::Timeout=300 install -y --no-install-recommends python3-venv >/dev/null \
    || { echo "make: could not install $$package, which $$python needs to create virtual environments" >&2; exit 1; }; \
fi; \
"$$python" -m venv "$(VENV)"
endef

# What hatchling leaves out is easily missed, because an editable install still finds it.
define CHECK_WHEEL
import pathlib, sys, zipfile

held = set(zipfile.ZipFile(sys.argv[1]).namelist())
wanted = {"distlocks/py.typed"} | {
    path.as_posix()
    for path in pathlib.Path("distlocks").rglob("*")
    if path.is_file() and "__pycache__" not in path.parts
}
missing = sorted(wanted - held)
strangers = sorted({name.split("/")[0] for name in held if "dist-info/" not in name} - {"distlocks"})
if missing or strangers:
    sys.exit(f"{sys.argv[1]}: lacks {missing}, should not have {strangers}")
print(f"{sys.argv[1]}: all {len(wanted)} files of distlocks are in it")
endef
export CHECK_WHEEL
