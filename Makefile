# Every target sets up what it needs: a virtual environment in .venv, with pinned dependencies.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
# With an empty HOME and temporary directory, outside of which nothing may be written, and no process left behind.
ISOLATED := $(BIN)/python scripts/isolated
PYTEST := $(ISOLATED) $(BIN)/python -m pytest -q
# More workers than cores, since many tests wait; the tests of a file stay together, since they share its servers.
PARALLEL := -n $${TEST_WORKERS:-3} --dist loadfile --no-loadscope-reorder
TESTS := $(addprefix tests/,unit integration contract e2e fault cluster fuzz)
STAMP := $(VENV)/.installed
# What the versions of other packages can break: families, samplers, the SDK's surface, the wire, journeys.
VERSIONED := $(addprefix tests/unit/test_,families.py loading.py start_check.py wrappers.py vision.py vision_sampling.py vision_gemma3.py \
	recurrent.py delta_rule.py local_sampler.py prompt_logprobs.py contiguous_kv.py kv_cache.py attention.py decoder.py lora.py \
	losses.py experts.py torch_backend.py adapters.py merging.py tied_adapters.py connections.py versions.py schemas.py \
	tool_grammars.py harmony.py) \
	$(addprefix tests/contract/test_,wire.py json_results.py sdk_surface.py) \
	$(addprefix tests/integration/test_,legacy_clients.py openai_chat.py responses.py batch_smoke.py) \
	$(addprefix tests/e2e/test_,journeys.py sampling_live.py numerics_live.py)

.PHONY: demo docs lint test test-extended test-all attack test-postgres test-crash test-roles test-recipes test-examples \
	test-clients test-sdks test-newest test-oldest test-families test-ranks test-gpu test-harness test-vllm test-sglang test-ray test-benchmarks test-browser test-fuzz lint-deploy mutants \
	format bench bench-quick bench-gpu release clean

demo: $(STAMP)
	$(ISOLATED) $(BIN)/tinsmith demo

# docs/testing.md says what each part is for and how long it takes.
test: $(STAMP)
	$(PYTEST) $(PARALLEL) -m "not slow and not extended" $(TESTS)

# The rest of tests/e2e, fault, cluster and fuzz, and the longer tests of the other directories.
# SHARD=2/8 runs the second of eight parts of about equal length.
test-extended: $(STAMP)
	$(PYTEST) $(PARALLEL) -m "extended and not slow and not recipes" --shard "$(SHARD)" $(TESTS) tests/recipes

# All parts that need nothing which setup does not install, one after the other, with one closing line.
test-all: $(STAMP)
	$(BIN)/python scripts/test-parts test test-browser test-extended test-crash test-roles test-ranks test-postgres test-ray test-families \
		test-examples test-benchmarks test-harness test-recipes test-fuzz

lint: $(STAMP)
	scripts/lint-units
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

test-postgres: $(STAMP)
	$(PYTEST) $(PARALLEL) -m "not slow and not recipes" --database postgres tests/unit tests/integration tests/contract \
		tests/e2e tests/fault tests/cluster

# Servers and engines as processes of their own, on both databases; make test does some of it.
test-roles: $(STAMP)
	$(PYTEST) tests/cluster/test_roles.py tests/cluster/test_several_servers.py

test-crash: $(STAMP)
	$(PYTEST) tests/fault/crash

# Every page of the dashboard, in Chromium.
test-browser: $(STAMP)
	scripts/setup-browser
	$(PYTEST) tests/browser

# A live server under attack, with the seed printed: processes that are killed, broken requests, a flood of the queue.
# ATTACK_SECONDS, ATTACK_REQUESTS and ATTACK_SEED say how long, how many and which.
attack: $(STAMP)
	$(PYTEST) -s tests/attack

# lm-eval brings packages that nothing else needs, so it is installed when it is asked for.
test-harness: $(STAMP)
	$(BIN)/pip install -q -c constraints.txt 'lm-eval[api]==0.4.13'
	$(PYTEST) tests/e2e/test_lm_eval.py

# Clients that others wrote, each in an environment of its own below build/clients, from the package index.
test-clients: $(STAMP)
	$(BIN)/python scripts/test-clients

# Old versions of the SDK, one of each minor, each in an environment of its own below build/sdks, against one server.
test-sdks: $(STAMP)
	$(BIN)/python scripts/test-sdks

# The newest releases that the package index serves today, as a user installs them: NEWEST_TORCH chooses a build of torch.
test-newest: $(STAMP)
	scripts/setup-versions newest
	$(ISOLATED) build/newest/.venv/bin/python -m pytest -q --timeout 3600 $(PARALLEL) -m "not slow" $(VERSIONED)
	build/newest/.venv/bin/python scripts/test-clients openai anthropic langchain pydantic_ai

# The lowest releases that pyproject.toml allows. Beside newer dependencies of theirs, they use what is deprecated.
test-oldest: $(STAMP)
	scripts/setup-versions oldest
	$(ISOLATED) build/oldest/.venv/bin/python -m pytest -q --timeout 3600 \
		-W ignore::DeprecationWarning -W ignore::PendingDeprecationWarning $(PARALLEL) -m "not slow" $(VERSIONED)

# vLLM's versions and the pinned ones do not meet in one environment: VLLM_PYTHON is an interpreter that has it.
test-vllm: $(STAMP)
	$(PYTEST) tests/e2e/test_vllm_export.py tests/e2e/test_vllm_sampler.py

# The same of SGLANG_PYTHON, an interpreter that has SGLang; on a CPU without its CUDA kernels.
test-sglang: $(STAMP)
	$(PYTEST) tests/e2e/test_sglang_sampler.py

# The benchmarks that are no part of `make bench`, each as small as it gets; what they find is not looked at.
test-benchmarks: $(STAMP)
	$(PYTEST) tests/integration/test_benchmarks_rare.py tests/integration/test_gpu_benchmark.py

# Clusters of Ray on this machine: nodes that are lost, a controller that is killed, bulk jobs on several nodes.
test-ray: $(STAMP)
	$(PYTEST) tests/cluster/test_ray.py tests/cluster/test_ray_nodes.py tests/cluster/test_ray_ranks.py tests/cluster/test_ray_data.py

test-recipes: $(STAMP)
	$(PYTEST) -m recipes

# Base models on several ranks: four of them, every family on two, and ranks that die.
test-ranks: $(STAMP)
	$(PYTEST) --timeout 3600 tests/cluster/test_ranks.py tests/cluster/test_rank_matrix.py tests/cluster/test_rendezvous.py

# On a machine with a GPU, with a torch that has CUDA in $(VENV); TEST_DEVICE=cpu runs what does not need one. After
# 7 minutes it begins no test, and has failed.
test-gpu: $(STAMP)
	TEST_DEVICE=$${TEST_DEVICE:-cuda} $(PYTEST) $(PARALLEL) --session-timeout 420 tests/gpu

# Every family of docs/models.md, of which `make test` does the first.
test-families: $(STAMP)
	$(PYTEST) --timeout 3600 tests/unit/test_families.py tests/e2e/test_families_live.py

# What is too large for `make test` of the checks of deploy/: SkyPilot itself, in an environment of its own.
lint-deploy:
	scripts/lint-deploy

# Every property, with forty times the examples of `make test`, and others in each run.
test-fuzz: $(STAMP)
	FUZZ_EXAMPLES=$${FUZZ_EXAMPLES:-20} $(PYTEST) --timeout 7200 -m hypothesis

# Small changes of ten modules, each of which a test should notice: docs/mutants.md. MUTANTS is how many of each module
# (or all), MUTANTS_SEED which, MODULES which modules.
mutants: $(STAMP)
	$(ISOLATED) $(BIN)/python scripts/mutants --mutants $${MUTANTS:-40} --seed $${MUTANTS_SEED:-1} $(MODULES)

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The examples that `make test` leaves out.
test-examples: $(STAMP)
	$(PYTEST) -m slow tests/contract/test_documentation.py

# The site, into build/site; a warning is an error, and nothing is fetched.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# Every benchmark, with its baselines, into build/bench: half an hour on two cores that do nothing else. VLLM and
# LLAMA are interpreters that have these engines, if any; with them it takes longer.
bench: $(STAMP)
	$(BIN)/python benchmarks/suite.py --out build/bench $(if $(VLLM),--vllm $(VLLM)) $(if $(LLAMA),--llama $(LLAMA))

# The same in three minutes or less, with fewer models and runs.
bench-quick: $(STAMP)
	$(BIN)/python benchmarks/suite.py --quick --out build/bench

# On a machine with a GPU, beside transformers and PEFT, and the vLLM of the interpreter VLLM: 8 minutes or less after
# the installation; writes docs/benchmarks/gpu.md.
bench-gpu: $(STAMP)
	$(BIN)/python benchmarks/gpu.py --write docs/benchmarks/gpu.md $(if $(VLLM),--vllm $(VLLM))

$(STAMP): pyproject.toml constraints.txt scripts/setup
	PYTHON="$(PYTHON)" scripts/setup "$(VENV)"
	touch $@

# The wheel, the source archive and a bill of materials in dist/, tried in bare environments (minutes).
release: $(STAMP)
	BIN=$(BIN) PYTHON="$(PYTHON)" scripts/release

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis
