# `make run` and `make test` do everything on a machine that has Python 3.9-3.11: they create
# .venv, install the exact set of requirements.lock into it, and do nothing of that again until the
# lock or pyproject.toml changes. All paths are relative: the checkout may have blanks in its name.

# The interpreter to build .venv with, e.g. PYTHON=/usr/bin/python3.10; looked for if not given.
PYTHON ?=
# Flags for the command, e.g. make run ARGS="--dataset=cifar10".
ARGS ?=

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help run test setup lock clean

help:
	@echo 'make run   [ARGS=...]    train (ARGS: flags of tff_programs.run; ARGS=--help lists them)'
	@echo 'make test  [ARGS=...]    run the tests (ARGS: options of pytest)'
	@echo 'make setup [PYTHON=...]  create .venv and install everything; run and test do this too'
	@echo 'make lock  [ARGS=...]    resolve requirements.lock again (ARGS=--upgrade: newest versions)'
	@echo 'make clean               delete .venv and the caches; results in runs/ are kept'

run: setup
	@.venv/bin/python -m tff_programs.run $(ARGS)

test: setup
	@.venv/bin/python -m pytest $(ARGS)

setup: .venv/.installed

# An interpreter that fits, else the complaint. Each candidate is asked for its version, because a
# python3.11 on the path may be a launcher that starts nothing.
find_python = $(shell \
	if [ -n '$(PYTHON)' ]; then set -- '$(PYTHON)'; \
	else set -- python3.11 python3.10 python3.9 python3; fi; \
	for candidate; do \
		version=$$("$$candidate" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' \
			2>/dev/null) || version=missing; \
		case "$$version" in (3.9.*|3.10.*|3.11.*) echo "$$candidate"; exit;; esac; \
	done; \
	echo "feast-tf needs Python 3.9-3.11 (TensorFlow Federated 0.87.0);" \
		"$$candidate is $$version. Set PYTHON=/path/to/python3.11")

# Sets $(python). Make's own error, not the shell's, so that the complaint is the only line.
define require_python
$(eval python := $(find_python))$(if $(findstring feast-tf needs,$(python)),$(error $(python)))
endef

# Each stamp is written last and --clear deletes both, so an interrupted set-up starts again.
.venv/.locked: requirements.lock
	$(require_python)
	"$(python)" -m venv --clear .venv
	.venv/bin/python -m pip install --no-deps --require-hashes -r requirements.lock
	@touch $@

.venv/.installed: .venv/.locked pyproject.toml
	.venv/bin/python -m pip install --no-deps --no-build-isolation --editable .
	@touch $@

# One set for Python 3.9-3.11 and all platforms. Versions already in the lock are kept where they
# still fit. The resolver lives in a folder of its own, because it is no part of the set.
lock:
	$(require_python)
	tools=$$(mktemp -d) && trap 'rm -rf "$$tools"' EXIT INT TERM && \
	"$(python)" -m venv "$$tools" && \
	"$$tools/bin/python" -m pip install --quiet uv==0.13.9 && \
	"$$tools/bin/python" -m uv pip compile --quiet pyproject.toml requirements.in \
		--extra tff --extra plots --extra dev --override requirements.override \
		--universal --python-version 3.9 --generate-hashes --no-annotate --no-header \
		--output-file requirements.lock $(ARGS)

clean:
	rm -rf .venv .pytest_cache .hypothesis feast_tf.egg-info
	find feast_tf tff_programs configs tests -name __pycache__ -type d -prune -exec rm -rf {} +
