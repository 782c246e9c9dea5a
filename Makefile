# popgate: everything runs from the virtual environment .venv in this folder, made where it is missing.

VENV := .venv
BIN := $(VENV)/bin
SERVER_INSTALLED := $(VENV)/.installed-server
DEV_INSTALLED := $(VENV)/.installed-dev
BENCH_INSTALLED := $(VENV)/.installed-bench

.DEFAULT_GOAL := help
.PHONY: help setup run test test-quick test-unit crash check audit lock pin-images format bench bench-growth bench-peers prove chaos soak simulate fuzz mutate explore tla clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "Pass arguments with ARGS, for example: make run ARGS='--port 9000'"

setup: $(DEV_INSTALLED) ## make .venv with the proxy and every test and check tool

run: $(SERVER_INSTALLED) ## start the proxy (popgate serve $(ARGS))
	@exec $(BIN)/popgate serve $(ARGS)

test: $(DEV_INSTALLED) ## run all tests on RabbitMQ 4.3, and what depends on it on 4.0 and 3.10; one of them with RABBITMQ=4.0
	@.ci/install-test-servers
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder $(ARGS)

test-quick: $(DEV_INSTALLED) ## run what needs no server but Redis, before each push: at most three minutes
	@.ci/install-test-servers redis
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --quick $(ARGS)

test-unit: $(DEV_INSTALLED) ## run the unit tests only
	$(BIN)/python -m pytest tests/unit $(ARGS)

crash: $(DEV_INSTALLED) ## run the crash tests with their full counts
	@.ci/install-test-servers
	$(BIN)/python -m pytest tests/cluster tests/spark -m crash --full $(ARGS)

check: $(DEV_INSTALLED) ## lint, formatting, types, import rules, and the audit of dependencies
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/pyright
	$(BIN)/lint-imports
	@$(MAKE) --no-print-directory audit ARGS=

audit: $(DEV_INSTALLED) ## look for known vulnerabilities in the dependencies (ARGS=--must-check)
	PYTHONPATH=tests $(BIN)/python tests/audit/run.py $(ARGS)

lock: $(DEV_INSTALLED) ## write deploy/*.lock, which the images are built from (ARGS=--upgrade takes newer versions)
	@.ci/lock $(ARGS)

pin-images: ## write the digests of the base images into Dockerfile and docker-compose.yml (needs docker or crane)
	@.ci/pin-images

format: $(DEV_INSTALLED) ## rewrite the code to the house's format
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: $(DEV_INSTALLED) ## measure; prints a table and writes a JSON file
	@.ci/install-test-servers
	PYTHONPATH=tests $(BIN)/python tests/bench/run.py $(ARGS)

bench-growth: $(DEV_INSTALLED) ## measure what grows with clients, queues, topics, sizes and leases (ARGS='--quick')
	@.ci/install-test-servers
	PYTHONPATH=tests $(BIN)/python tests/bench/growth.py $(ARGS)

bench-peers: $(BENCH_INSTALLED) ## compare popgate with Redis, NATS, PostgreSQL and others (ARGS=--quick; ARGS='--docs docs')
	@.ci/install-test-servers
	@.ci/install-bench-servers
	PYTHONPATH=tests $(BIN)/python tests/bench/systems/run.py $(ARGS)

prove: $(DEV_INSTALLED) ## prove the locks: ten minutes of chaos on three RabbitMQ nodes, over AMQP and through proxies (popgate prove locks $(ARGS))
	@.ci/install-test-servers
	PYTHONPATH=tests $(BIN)/python tests/lock_proof/run.py $(ARGS)

chaos: $(DEV_INSTALLED) ## half an hour of chaos in a whole cluster, then an audit (ARGS='--seconds 600 --seed 7')
	@.ci/install-test-servers
	PYTHONPATH=tests $(BIN)/python tests/chaos/run.py $(ARGS)

soak: $(DEV_INSTALLED) ## two hours of mixed load; is memory, descriptors, threads or latency growing? (ARGS='--seconds 300 --out soak')
	@.ci/install-test-servers
	PYTHONPATH=tests $(BIN)/python tests/soak/run.py $(ARGS)

simulate: $(DEV_INSTALLED) ## engines in virtual time, seed after seed (ARGS='--seeds 3000 --first 1 --world embedded')
	PYTHONPATH=tests $(BIN)/python tests/simulator/run.py $(ARGS)

fuzz: $(DEV_INSTALLED) ## an hour of mutated frames, bodies, receipts and peers' messages (ARGS='--seconds 60 --target peers')
	PYTHONPATH=tests $(BIN)/python tests/fuzz/run.py $(ARGS)

mutate: $(DEV_INSTALLED) ## plant slips in a copy of the product, one by one: do the tests notice? (ARGS='--file engine')
	@.ci/install-test-servers
	PYTHONPATH=tests $(BIN)/python tests/mutants/run.py $(ARGS)

explore: $(DEV_INSTALLED) ## every state of small groups that balance their queues (ARGS='--short --processes 2')
	PYTHONPATH=tests $(BIN)/python tests/explorer/run.py $(ARGS)

tla: $(DEV_INSTALLED) ## the same in TLA+, by its model checker TLC (needs Java)
	PYTHONPATH=tests $(BIN)/python tests/tla/run.py

clean: ## remove .venv and everything that tools wrote
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis .schemathesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

$(SERVER_INSTALLED): pyproject.toml
	@.ci/make-venv $(VENV) server

$(DEV_INSTALLED): pyproject.toml
	@.ci/make-venv $(VENV) dev

# A client library that can't be had is skipped.
$(BENCH_INSTALLED): pyproject.toml $(DEV_INSTALLED)
	@.ci/make-venv $(VENV) bench || echo "popgate: systems whose client libraries are missing will be skipped" >&2
