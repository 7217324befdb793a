# make train   set up .venv, install, train the demo memory task with a live display, print the result
# make test    same set-up, all tests
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PRESET ?= tmaze
ENV ?= CartPole-v1

.PHONY: help setup train test check bench peers advise gpu figures learning chaos soak fuzz clean
.DEFAULT_GOAL := help

help:
	@echo "make train     train the demo memory task ($(PRESET)) with a live display"
	@echo "make test      all tests (under 10 minutes on two cores)"
	@echo "make check     lint, format, types"
	@echo "make bench     time the parts and a whole run; results in bench/results/"
	@echo "make peers     the same training by us and by every installed peer (bench/peers/install.sh); results and chart"
	@echo "make advise    actors, envs, threads and lag for an env: make advise ENV=CartPole-v1"
	@echo "make gpu       what only a GPU can show, in under four minutes; results in bench/results/; skipped without one"
	@echo "make learning  the learning suite, every memory task and arm; results in bench/results/"
	@echo "make chaos     faults of every kind in runs that have to come out right, 25 minutes; results in bench/results/"
	@echo "make soak      what a run takes over 20 minutes: memory, descriptors, segments; results in bench/results/"
	@echo "make fuzz      a million hostile messages against decoder, coordinator and socket, two minutes"
	@echo "make clean     remove what dead runs left in /dev/shm and /tmp"

setup: $(INSTALLED)

$(INSTALLED): pyproject.toml setup.py learner/_single_pass.c $(wildcard rollout_service/policy/_*.[ch]) constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed, $(PYTHON) is $$($(PYTHON) -V); try: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

train: setup
	$(BIN)/rollout-service train --preset $(PRESET)

test: setup
	$(BIN)/python -m pytest

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup
	$(BIN)/python -m bench.throughput

peers: setup
	$(BIN)/rollout-service bench peers --results bench/results
	@$(MAKE) --no-print-directory figures

figures: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[charts]'
	$(BIN)/python -m bench.chart

gpu: setup
	$(BIN)/python -m bench.gpu

advise: setup
	$(BIN)/rollout-service bench advise --env $(ENV)

learning: setup
	$(BIN)/python -m bench.learning

chaos: setup
	$(BIN)/python -m bench.chaos --seconds 600 --min-kills 200

fuzz: setup
	$(BIN)/python -m bench.fuzz --messages 1000000

soak: setup
	$(BIN)/python -m bench.soak --seconds 1200

clean: setup
	$(BIN)/rollout-service clean
