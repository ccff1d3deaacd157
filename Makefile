.DEFAULT_GOAL := help

SHELL := bash
.SHELLFLAGS := -o pipefail -c

REPORT := robustness-report
BENCH_REPORT := bench-report
NIGHTLY_REPORT := nightly-report
STRESS_REPORT := stress-gate-report
# For example --resume, to continue an interrupted run.
BENCH_OPTIONS :=
AS_ROOT := $(shell [ "$$(id -u)" = 0 ] || echo sudo)

help: ## List the targets
	@grep -E '^[a-z%-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z%-]+):.*## /\1\t/' | expand -t 18

install: ## Install dblock for development, with the embedded Postgres
	pip install -e '.[dev]'

check: ## Run the checks of a commit on all files, then the first stage of the tests
	pre-commit run --all-files
	pytest

check-all: ## Run both stages of the gate, as CI does
	pytest && pytest --stage 2

nightly: ## Run every test, also those that take minutes, and write a report (hours)
	mkdir -p $(NIGHTLY_REPORT)
	pytest --nightly -n 2 --junitxml=$(NIGHTLY_REPORT)/tests.xml 2>&1 | tee $(NIGHTLY_REPORT)/tests.log

stress-gate: ## Run the first stage on a busy, stalling or slow machine and in random orders, five times each (hours)
	python -m tests.robustness.stress_gate --out $(STRESS_REPORT)

quick: ## Run the tests of the core, the runtime, the SQL, the clients and the administration
	pytest tests/dblock/core tests/dblock/runtime tests/dblock/sql tests/dblock/client tests/dblock/admin

format: ## Format the code, and fix what ruff can fix
	ruff check --fix . ; ruff format .

bench: bench-peers ## Measure dblock beside other ways to lock, and check the ratios against the baseline (45 minutes)
	python -m bench --out $(BENCH_REPORT) $(BENCH_OPTIONS)

bench-peers: ## Install the peers of the benchmarks: Debian's servers and PyPI's clients, as far as they are available
	-$(AS_ROOT) apt-get install -y --no-install-recommends redis-server etcd-server zookeeper pgbouncer gcc libc6-dev
	pip install -e '.[bench]'

bench-publish: ## Write the last run of the benchmarks into docs/performance, and store its ratios as the baseline
	python -m bench.publish $(BENCH_REPORT) --baseline

bench-quick: ## Run every question of the benchmarks in its smallest size, to see that it works
	python -m bench --quick --out $(BENCH_REPORT)-quick

bench-%: ## Answer one question: make bench-pair, bench-hand_off_rate, … (python -m bench --list)
	python -m bench $* --out $(BENCH_REPORT)

robustness: ## Run every fault, find every seeded bug, and write a report with pictures (hours)
	mkdir -p $(REPORT)
	( echo '## Simulation' && echo && python -m tests.robustness.simulation --seeds 100000 --processes 2 && echo ) \
		| tee $(REPORT)/section-simulation.md
	( echo '## Seeded bugs' && echo && python -m tests.robustness.mutations --at-once 2 && echo ) | tee $(REPORT)/section-bugs.md
	( echo '## Limits' && echo && python -m tests.robustness.limits ) | tee $(REPORT)/section-limits.md
	python -m tests.robustness all --at-once 2 --out $(REPORT)

robustness-quick: ## Run the part of the robustness suite that every change must pass (both stages of the gate have it)
	pytest --stage all -n 2 tests/robustness tests/security

cluster: ## Fail a Patroni cluster of three nodes again and again (needs patroni, etcd and Postgres; half an hour)
	python -m tests.robustness all --only cluster- --out $(REPORT)-cluster

soak: ## Run an hour of mixed traffic, and check that nothing grows
	python -m tests.robustness.soak --minutes 60 --out $(REPORT)/soak

model: ## Search every state of the protocol's model for violations (needs spin and gcc)
	python spec/check.py

containers: ## Run the tests against every supported Postgres, in Docker
	for version in 14 15 16 17 18; do export DBLOCK_TEST_IMAGE=postgres:$$version; \
		pytest --postgres=container && pytest --postgres=container --stage 2 || exit 1; done

demo: ## Play two workers, one lock and a freeze
	dblock demo

.PHONY: help install check check-all nightly stress-gate quick format bench bench-peers bench-publish bench-quick robustness robustness-quick cluster soak model containers demo
