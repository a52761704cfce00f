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
TRAINS := 17 21 22 23
BROWSER := --ignore-glob='*/test_site*.py' --ignore=tests/test_live.py  # these have a target of their own
export PYTHONDONTWRITEBYTECODE :=  # images often set it: each of hundreds of processes would then compile the sources of torch anew, in three seconds

help:  ## show the targets
	@grep -E '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: .venv/ready  ## make the environment in .venv (done by the other targets when needed)

.venv/ready: requirements.lock pyproject.toml
	@$(SYSTEM_PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.exit(sys.version_info < (3, 11) and f"Python 3.11 or newer is needed, {sys.executable} is {v}; name another with make SYSTEM_PYTHON=/path/to/python3.11")'
	@echo "[setup 1/3] making the virtual environment .venv with $$($(SYSTEM_PYTHON) --version)"
	@$(SYSTEM_PYTHON) -m venv .venv
	@echo "[setup 2/3] installing the packages of requirements.lock (torch among them: some minutes the first time)"
	@$(PYTHON) -m pip install --quiet --disable-pip-version-check --no-compile --no-deps -r requirements.lock
	@$(PYTHON) -m pip check > /dev/null || { echo "requirements.lock lacks packages that its packages need:"; $(PYTHON) -m pip check; }
	@echo "[setup 3/3] installing the package annotated from this checkout"
	@$(PYTHON) -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch .venv/ready
	@echo "[setup] done"

book: setup  ## the main job: translate, render the pages as they are stored, then execute them all with nbval and say which give what they show
	$(PYTHON) tools/book.py

site: setup  ## render the notebooks as they are stored to HTML
	$(PYTHON) tools/site_build.py

test: setup  ## unit tests, and nbval on the pages that do not train for minutes (NBVAL= without pages, after `make book`)
	$(PYTHON) -m pytest -q -n logical --maxprocesses=4 --dist=loadfile --durations=20 -m "not long" $(BROWSER) \
	  $(NBVAL) $(if $(NBVAL),$(TRAINS:%=--ignore-glob='*/%_*.ipynb') notebooks) tests

test-site: setup axe  ## the site of `make site` in a real browser (Chromium): requests, errors, accessibility, charts, hostile text
	$(PYTHON) -m pytest -q -n 2 --dist=loadgroup tests/test_site.py tests/test_site_hostile.py tests/test_live.py

axe: _build/axe/node_modules/axe-core/axe.min.js

_build/axe/node_modules/axe-core/axe.min.js:  # without npm there is none, and the tests say so
	@mkdir -p _build/axe
	@npm install --silent --no-audit --no-fund --no-save --prefix _build/axe axe-core@4.14.1 || echo "axe-core could not be installed with npm"

test-long: setup  ## the tests that take longer: properties on new examples, planted faults, a sample of mutants, runs that are killed 20 times, memory
	@echo "What a property test finds is printed under \"Falsifying example\": write it above the test as @example(...), and it comes back at each run."
	$(PYTHON) -m pytest -q -m "long or hypothesis" --hypothesis-profile=long tests
	$(PYTHON) tools/mutate.py
	$(PYTHON) tools/mutation_score.py
	@mkdir -p _build
	$(PYTHON) experiments/kill_loop.py --kills 20 --processes 1 > _build/kill_loop_1.json && mv _build/kill_loop_1.json results/
	$(PYTHON) experiments/kill_loop.py --kills 20 --processes 2 > _build/kill_loop_2.json && mv _build/kill_loop_2.json results/
	$(PYTHON) experiments/memory.py --out results/memory.json

results: setup  ## bring the column of revisions and the rows on speed in results/README.md and README.md up to date
	$(PYTHON) tools/results.py

toy: setup  ## train the book's model anew, put it into the package, score it (results/toy.json; 3 to 5 minutes, on a quiet machine)
	$(PYTHON) experiments/toy.py

lint: setup  ## ruff over everything; no line of the pages and the package above 100 characters
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff check --select E501 --config notebooks/ruff.toml annotated

lab: setup  ## open JupyterLab on the book
	$(PYTHON) -m jupyterlab --notebook-dir=notebooks

sync: setup  ## execute, normalise and export all pages (PAGES="05 06": these); writes notebooks/ and annotated/
	$(PYTHON) tools/sync.py $(PAGES)

export: setup  ## export the modules only, without executing
	$(PYTHON) tools/sync.py --export $(PAGES)

multi30k: setup  ## train and score Multi30k English to German (about 30 minutes on 2 cores)
	bash experiments/multi30k.sh

multi30k-record: setup  ## the same as the literature scores it, with the best published recipe, three seeds (hours)
	bash experiments/multi30k_record.sh

newstest: setup  ## train on the news, Tatoeba and Multi30k at hand, score newstest2014 (about 2 hours on 2 cores)
	bash experiments/newstest.sh

bench: setup _build/bench/ready  ## speed beside its peers on a quiet machine: about a quarter of an hour (python -m benchmarks --help)
	env -u OMP_NUM_THREADS -u GOMP_SPINCOUNT _build/bench/venv/bin/python -m benchmarks $(BENCH)

_build/bench/ready: .venv/ready pyproject.toml  # the peers, in an environment of their own that sees the packages of .venv
	$(PYTHON) -m benchmarks.peers _build/bench/venv
	@touch _build/bench/ready

variations: setup  ## train every row of Table 3 on Multi30k for page 21, a process a run (about two hours on 2 cores)
	bash experiments/variations.sh

variations-toy: setup  ## the same on toy until base has learned, with all pairs and with 2,000 (hours)
	bash experiments/variations.sh toy

variations-long: setup  ## nine rows, two seeds, on Multi30k until base translates (hours)
	bash experiments/variations.sh multi30k-long

lengths: setup  ## translate toy sentences longer than those of training, for page 05 (about 10 minutes on 1 core)
	$(PYTHON) experiments/lengths.py

since: setup  ## train each change since 2017 on toy, three seeds, for page 26 (about 15 minutes on 1 core)
	$(PYTHON) experiments/since_the_paper.py

long-inputs: setup  ## memory of training and translating by the length of a sentence, for page 24 (a few minutes on 1 core)
	$(PYTHON) experiments/long_inputs.py

two-processes: setup  ## one process and two train the same models to the same scores, on toy and Multi30k (about half an hour on 2 cores)
	$(PYTHON) experiments/two_processes.py
	$(PYTHON) experiments/two_processes.py results/two_processes_multi30k.json multi30k

padding: setup  ## shares of padding in Multi30k, for page 13 (a minute)
	$(PYTHON) experiments/padding.py multi30k results/padding.json

precision: setup  ## translations in each precision by the model of `make multi30k-record`, for page 24 (a few minutes on 1 core)
	$(PYTHON) experiments/precision.py _build/multi30k_record/data results/precision.json _build/multi30k_record/published.seed0-checkpoints/step-*

parse-gum: setup  ## train and score a constituency parser on the treebank GUM (about 90 minutes on 1 core)
	bash experiments/treebanks.sh gum

parse-craft: setup  ## the same on the treebank CRAFT (about 2.6 hours on 1 core)
	bash experiments/treebanks.sh craft

wmt: setup  ## the full WMT14 run of page 23 on this machine's GPUs (WMT_SIZE=base|big WMT_PAIR=en-de|en-fr); days
	WMT_RUN=full $(PYTHON) tools/wmt.py

gpu-check: setup  ## ten minutes on this machine's GPUs before a run costs money: _build/gpu_check/report.txt (CHECK="--device cpu": a tiny model)
	$(PYTHON) tools/gpu_check.py $(CHECK)

.PHONY: help setup book site test test-site axe test-long results toy lint lab sync export bench multi30k multi30k-record newstest variations variations-toy variations-long lengths since long-inputs padding precision parse-gum parse-craft wmt gpu-check two-processes
