# `make run` and `make test` do everything on a machine that has Python 3.9-3.11: they create
# .venv, install the exact set of requirements.lock into it, and do nothing of that again until the
# lock or pyproject.toml changes. All paths are relative: the checkout may have blanks in its name.
# `make test-modern` does the same in .venv-modern, with the newest TensorFlow, Flower and OpenFL,
# and without TensorFlow Federated: none of them can live with its pins.

# The interpreter to build .venv with, e.g. PYTHON=/usr/bin/python3.10; looked for if not given.
PYTHON ?=
# Flags for the command, e.g. make run ARGS="--dataset=cifar10".
ARGS ?=

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help run test setup test-modern setup-modern docs lock clean

help:
	@echo 'make run   [ARGS=...]    train (ARGS: flags of tff_programs.run; ARGS=--help lists them)'
	@echo 'make test  [ARGS=...]    run the tests (ARGS: options of pytest)'
	@echo 'make setup [PYTHON=...]  create .venv and install everything; run and test do this too'
	@echo 'make test-modern, make setup-modern'
	@echo '                         the same with the newest TensorFlow, Flower and OpenFL'
	@echo 'make docs                write the API reference to docs/api'
	@echo 'make lock  [ARGS=...]    resolve both locks again (ARGS=--upgrade: newest versions)'
	@echo 'make clean               delete the environments and caches; results in runs/ are kept'

run: setup
	@.venv/bin/python -m tff_programs.run $(ARGS)

test: setup
	@.venv/bin/python -m pytest $(ARGS)

test-modern: setup-modern
	@.venv-modern/bin/python -m pytest $(ARGS)

docs: setup
	@.venv/bin/python docs/build_api.py

setup: .venv/.installed

setup-modern: .venv-modern/.installed

# An interpreter that fits, else the complaint. Each candidate is asked for its version, because a
# python3.11 on the path may be a launcher that starts nothing.
find_python = $(shell \
	if [ -n '$(PYTHON)' ]; then set -- '$(PYTHON)'; \
	else set -- python3.11 python3.10 python3.9 python3; fi; \
	for candidate; do \
		version=$$("$$candidate" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' \
			2>/dev/null) || version=missing; \
		case "$$version" in ($(1)) echo "$$candidate"; exit;; esac; \
	done; \
	echo "feast-tf needs Python $(2);" \
		"$$candidate is $$version. Set PYTHON=/path/to/python3.11")

# Sets $(python). Make's own error, not the shell's, so that the complaint is the only line.
define require_python
$(eval python := $(call find_python,$(1),$(2)))\
$(if $(findstring feast-tf needs,$(python)),$(error $(python)))
endef
require_federated_python = $(call \
	require_python,3.9.*|3.10.*|3.11.*,3.9-3.11 (TensorFlow Federated 0.87.0))
require_modern_python = $(call require_python,3.11.*,3.11 (Flower 1.42 and this project))

# Each stamp is written last and --clear deletes both, so an interrupted set-up starts again.
.venv/.locked: requirements.lock
	$(require_federated_python)
	"$(python)" -m venv --clear .venv
	.venv/bin/python -m pip install --no-deps --require-hashes -r requirements.lock
	@touch $@

.venv-modern/.locked: requirements-modern.lock
	$(require_modern_python)
	"$(python)" -m venv --clear .venv-modern
	.venv-modern/bin/python -m pip install --no-deps --require-hashes -r requirements-modern.lock
	@touch $@

.venv/.installed .venv-modern/.installed: %/.installed: %/.locked pyproject.toml
	$*/bin/python -m pip install --no-deps --no-build-isolation --editable .
	@touch $@

# One set for Python 3.9-3.11 and all platforms, and one for Python 3.11. Versions already in a lock
# are kept where they still fit. The resolver lives in a folder of its own, because it is part of
# neither set.
lock:
	$(require_federated_python)
	tools=$$(mktemp -d) && trap 'rm -rf "$$tools"' EXIT INT TERM && \
	"$(python)" -m venv "$$tools" && \
	"$$tools/bin/python" -m pip install --quiet uv==0.13.9 && \
	resolve() { lock=$$1; shift; "$$tools/bin/python" -m uv pip compile --quiet pyproject.toml \
		"$$@" --universal --generate-hashes --no-annotate --no-header \
		--output-file "$$lock"; } && \
	resolve requirements.lock requirements.in --extra tff --extra plots --extra dev \
		--override requirements.override --python-version 3.9 $(ARGS) && \
	resolve requirements-modern.lock requirements-modern.in --extra plots --extra flower \
		--extra openfl --override requirements-modern.override --python-version 3.11 $(ARGS)

clean:
	rm -rf .venv .venv-modern docs/api .pytest_cache .hypothesis feast_tf.egg-info
	find feast_tf tff_programs configs tests examples -name __pycache__ -type d -prune \
		-exec rm -rf {} +
