.PHONY: help reproduce test lint charts bench
.DEFAULT_GOAL := help

help:
	@echo "make reproduce   set up, run every arm at k = 2, 4, 8, draw charts and tables (about 14 minutes on 2 cores)"
	@echo "make test        set up, lint, run the tests"
	@echo "make bench       time and memory of today's trainer with and without prefix sharing (about 40 minutes)"
	@echo "make charts      draw charts and tables again from the results, update README.md"

reproduce:
	./setup_env.sh
	./run_baseline-rloo.sh
	./run_improve-rloo.sh
	./visualize_results.sh

bench:
	./setup_env.sh
	./run_bench.sh

test: lint
	.venv/bin/python -m pytest -q -n 2

lint:
	./setup_env.sh
	.venv/bin/python -m ruff check .

charts:
	./visualize_results.sh
	.venv/bin/python -m visualization.tables README.md --write
