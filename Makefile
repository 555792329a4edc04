.PHONY: help reproduce evidence test test-all test-deepspeed test-vllm test-cuda lint charts bench plans fit-data
.DEFAULT_GOAL := help

help:
	@sed -nE 's/^([a-z-]+):.*## (.*)/make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 22

reproduce: ## every arm at k = 2, 4, 8, with charts and tables (12 to 25 minutes on 2 cores)
	./setup_env.sh
	./run_baseline-rloo.sh
	./run_improve-rloo.sh
	./visualize_results.sh

bench: ## time and memory of today's trainer with and without prefix sharing (half an hour)
	./setup_env.sh
	./run_bench.sh

# MACHINE=reference-cpu-2-cores: the folder that the pages show. TRL=DIR: a clone of TRL, whose own tests are run
evidence: ## measure all that README.md and docs show (two and a half hours; goes on where it was stopped)
	./setup_env.sh
	.venv/bin/python -m pip install -q --no-deps "prefix-grouper==$$(.venv/bin/python -c 'from experiments.bench import rivals; print(rivals.PREFIX_GROUPER)')"
	.venv/bin/python -m experiments.evidence $(if $(MACHINE),--machine $(MACHINE)) $(if $(TRL),--trl $(TRL))

test: lint ## all tests but the slow ones, after the linters
	.venv/bin/python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder -m "not slow"

test-all: lint ## the slow tests as well; each of the next three has an environment of its own
	.venv/bin/python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder

test-deepspeed: ## DeepSpeed ZeRO-3 on two processes (about 10 minutes)
	./setup_env.sh
	DS_BUILD_OPS=0 tests/venv.sh deepspeed
	TORCH_EXTENSIONS_DIR=$(CURDIR)/.venv-deepspeed/extensions .venv-deepspeed/bin/python -m pytest -q tests/test_distributed.py tests/test_launch_distributed.py -k zero3

# What it covers: docs/vllm.md
test-vllm: ## real vLLM on a CPU, in the trainer and as a server (3 minutes, 2 to 4 more the first time)
	./setup_env.sh
	tests/with_vllm/setup.sh
	.venv-vllm/bin/python -m pytest -q -n 2 --dist loadfile tests/with_vllm

test-cuda: ## CUDA's build of torch on an emulated device (4.7 GB; 10 minutes on 2 quiet cores)
	@command -v gcc >/dev/null && command -v g++ >/dev/null \
	  || { echo "make test-cuda: gcc and g++ compile the emulated device: apt-get install g++" >&2; exit 1; }
	./setup_env.sh
	tests/venv.sh cuda -c requirements.lock liger-kernel==0.8.5
	.venv-cuda/bin/python -m pytest -q tests/cuda tests/test_liger.py

lint: ## ruff and mypy
	./setup_env.sh
	.venv/bin/python -m ruff check . && .venv/bin/python -m ruff format --check -q . && .venv/bin/python -m mypy

charts: ## draw the committed results again, update the tables of README.md and docs
	./visualize_results.sh results/reference-cpu-2-cores
	.venv/bin/python -m visualization.charts.published_gpus results/published results/published/gpu_peaks.png
	.venv/bin/python -m visualization.tables $$(grep -l '^<!-- table:' README.md docs/*.md)

# Predictions of every profile at prompts of 2,000 tokens, a few minutes; then make charts
plans: ## predict the memory of every profile (a few minutes)
	./setup_env.sh --quiet
	for profile in single_gpu_12gb:11.7GiB single_gpu_24gb:23.5GiB constrained:11.7GiB balanced:44.4GiB max_efficiency:79.1GiB; do \
	  .venv/bin/rloo-memory plan --profile $${profile%:*} --prompt 2000 \
	    --device-memory $${profile#*:} --json results/plans/$${profile%:*}.json || exit 1; done
	.venv/bin/rloo-memory plan --profile multi_gpu_70b --prompt 2000 --device-memory 79.1GiB \
	  --accelerate rloo_memory/settings/accelerate/fsdp2_offload.yaml --json results/plans/multi_gpu_70b.json
	.venv/bin/python -m visualization.charts.plan results/plans/single_gpu_24gb.json results/plans/single_gpu_24gb.png

# Some 5 minutes of one core a model; 30 of Gemma 3, whose layers are all simulated, 11 of gpt-oss-20b.
# The first goes on where it was interrupted: its parts stay until all is done. fit_check holds the page's sums against
# the planner. In the first, malloc keeps what is freed: taking it from the system again, page by page, was a fifth of
# the time. Many passes, as the second has, would take 16 GiB so
fit-data: ## docs/fit.html and what it answers from (70 minutes on 2 quiet cores; goes on where it was stopped)
	./setup_env.sh --quiet
	MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=2147483647 .venv/bin/python -m experiments.fitting.fit_data
	.venv/bin/python -m experiments.fitting.fit_check
	.venv/bin/python -m visualization.fit.make_page
	rm -rf .build/fit
