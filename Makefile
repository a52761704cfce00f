# The targets a reader or an author needs. `make book` and `make test` each work as the first command.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

SYSTEM_PYTHON ?= $(shell command -v python3.11 || command -v python3 || echo python3)
PYTHON := .venv/bin/python
export OMP_NUM_THREADS ?= 1
export GOMP_SPINCOUNT ?= 1000  # a thread that waits longer sleeps: beside other work it would keep the one it waits for off the processor
export TOKENIZERS_PARALLELISM := false
NBVAL ?= --nbval
WORKBOOK ?= _build/workbook
TRAINS := 17 21 22 23
NO_BROWSER := --ignore-glob='*/test_site*.py' --ignore=tests/test_live.py  # these have a target of their own
export PYTHONDONTWRITEBYTECODE :=  # images often set it: each of hundreds of processes would then compile the sources of torch anew, in three seconds

help:  ## show the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "%-14s%s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: .venv/ready  ## make the environment in .venv (done by the other targets when needed)

.venv/ready: requirements.lock pyproject.toml
	@$(SYSTEM_PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.exit(sys.version_info < (3, 11) and f"Python 3.11 or newer is needed, {sys.executable} is {v}; name another with make SYSTEM_PYTHON=/path/to/python3.11")'
	@echo "[setup 1/3] making the virtual environment .venv with $$($(SYSTEM_PYTHON) --version)"
	@$(SYSTEM_PYTHON) -m venv .venv
	@echo "[setup 2/3] installing the packages of requirements.lock (torch among them: some minutes the first time)"
	@$(PYTHON) -m pip install --quiet --disable-pip-version-check --no-compile --no-deps -r requirements.lock
	@$(PYTHON) -m pip check > /dev/null || $(PYTHON) -m pip install --quiet --disable-pip-version-check --no-compile -r requirements.lock  # torch with CUDA brings packages that no lock of a CPU build names
	@echo "[setup 3/3] installing the package annotated from this checkout"
	@$(PYTHON) -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch .venv/ready
	@echo "[setup] done"

book: setup  ## the main job: translate, render the pages as they are stored, then execute them all with nbval and say which give what they show
	$(PYTHON) tools/book.py

site: setup  ## render the notebooks as they are stored to HTML
	$(PYTHON) tools/site_build.py

test: setup  ## unit tests, and nbval on the pages that do not train for minutes (NBVAL= without pages, after `make book`)
	$(PYTHON) -m pytest -q -n logical --maxprocesses=4 --dist=loadfile --durations=20 -m "not long" $(NO_BROWSER) \
	  $(NBVAL) $(if $(NBVAL),$(TRAINS:%=--ignore-glob='*/%_*.ipynb') notebooks) tests

test-site: setup axe  ## the site of `make site` in a real browser (Chromium): requests, errors, accessibility, charts, hostile text
	$(PYTHON) -m pytest -q -n 2 --dist=loadgroup tests/test_site.py tests/test_site_hostile.py tests/test_live.py

axe: _build/axe/node_modules/axe-core/axe.min.js

_build/axe/node_modules/axe-core/axe.min.js:  # without npm there is none, and the tests say so
	@mkdir -p _build/axe
	@npm install --silent --no-audit --no-fund --no-save --prefix _build/axe axe-core@4.14.1 || echo "axe-core could not be installed with npm"

test-long: setup  ## the tests that take longer: properties on new examples, a sample of mutants, runs that are killed 20 times, memory
	@echo "What a property test finds is printed under \"Falsifying example\": write it above the test as @example(...), and it comes back at each run."
	$(PYTHON) -m pytest -q -m "long or hypothesis" --hypothesis-profile=long tests
	$(PYTHON) tools/mutation_score.py
	@mkdir -p _build
	$(PYTHON) experiments/kill_loop.py --kills 20 --processes 1 > _build/kill_loop_1.json && mv _build/kill_loop_1.json results/
	$(PYTHON) experiments/kill_loop.py --kills 20 --processes 2 > _build/kill_loop_2.json && mv _build/kill_loop_2.json results/
	$(PYTHON) experiments/memory.py --out _build/memory.json && mv _build/memory.json results/

results: setup  ## bring the column of revisions and the rows on speed in results/README.md and README.md up to date
	$(PYTHON) tools/results.py

lint: setup  ## ruff over everything; no line of the pages and the package above 100 characters
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff check --select E501 --config notebooks/ruff.toml annotated

lab: setup  ## open JupyterLab on the book
	$(PYTHON) -m jupyterlab --notebook-dir=notebooks

sync: setup  ## execute, normalise and export all pages (PAGES="05 06": these); writes notebooks/ and annotated/
	$(PYTHON) tools/sync.py $(PAGES)

export: setup  ## export the modules only, without executing
	$(PYTHON) tools/sync.py --export $(PAGES)

bench: setup _build/bench/ready  ## speed beside its peers on a quiet machine: three quarters of an hour (python -m benchmarks --help)
	env -u OMP_NUM_THREADS -u GOMP_SPINCOUNT _build/bench/venv/bin/python -m benchmarks $(BENCH)

_build/bench/ready: .venv/ready pyproject.toml  # the peers, in an environment of their own that sees the packages of .venv
	$(PYTHON) -m benchmarks.install_peers _build/bench/venv
	@touch _build/bench/ready

workbook: setup  ## the book with its code left for you to write, in a new folder (WORKBOOK=FOLDER)
	$(PYTHON) -m annotated workbook $(WORKBOOK)

wmt: setup  ## the full WMT14 run of page 23 on this machine's GPUs (WMT_SIZE=base|big WMT_PAIR=en-de|en-fr); days
	WMT_RUN=full $(PYTHON) tools/wmt.py

gpu-check: setup  ## ten minutes on this machine's GPUs before a run costs money: _build/gpu_check/report.json (CHECK="--device cpu": a tiny model)
	$(PYTHON) tools/gpu_check.py $(CHECK)
	$(PYTHON) -m pytest -q tests/test_cuda.py

.PHONY: help setup book site test test-site axe test-long results lint lab sync export bench workbook wmt gpu-check
