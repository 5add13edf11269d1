# Everything runs in .venv, made on first use.
PYTHON ?= $(shell for p in python3.12 python3 python; do $$p -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null && { echo $$p; break; }; done)
# With which transformers' own models are run: 3.11 where there is one, whose PyTorch may come without CUDA.
PYTHON_TORCH ?= $(shell for p in python3.11 $(HOME)/.pyenv/versions/3.11*/bin/python; do $$p -c 'import venv, ensurepip' 2>/dev/null && { echo $$p; exit; }; done; echo $(PYTHON))
VENV   ?= .venv
BIN    := $(VENV)/bin
JOBS   ?= 2
DEPTH  ?= 24
FAULTS ?= 240
MUTATIONS ?= 2000
NO_PYTHON = nagjax needs Python 3.12 or newer: install it, or run make PYTHON=/path/to/python3.12
NEEDS_PYTHON = @test -n "$(PYTHON)" || { echo "$(NO_PYTHON)"; exit 2; }

# Where the environment forbids to keep bytecode, every process of the tests would compile a thousand modules anew: 2 s.
export PYTHONDONTWRITEBYTECODE :=

# uv makes an environment in a quarter of pip's time. Where there is none, pip fetches it; what uv cannot install, from a
# registry that only pip is told of, pip installs. Neither compiles what is never imported.
UV := $(or $(shell command -v uv 2>/dev/null),.venv-uv/bin/uv)
PIP = $(1)/bin/python -m pip install -q --disable-pip-version-check --no-compile
MAKE_VENV = @$(UV) venv -q --seed --allow-existing --python $(PYTHON) $(1) || $(PYTHON) -m venv $(1)
INSTALL = @echo "installing into $(1)"; install() { $(UV) pip install -q --python $(1)/bin/python "$$@" || $(call PIP,$(1)) "$$@"; }; install

.PHONY: environments demo quick test types test-any-cpu test-any-cpu-quick test-meshes test-newest test-beam test-hf test-eval aot aot-quick plans bench-torch bench-decode torture fuzz models notebooks docs lint clean

# What the tests of .ci/run need; make -j2 installs two at a time.
environments: $(VENV)/.dev .venv-torch/.torch .venv-newest/.dev .venv-beam/.beam .venv-eval/.eval .venv-aot/.aot $(VENV)/.notebooks .venv-docs/.docs

demo: $(VENV)/.base
	$(BIN)/nagjax demo --depth $(DEPTH)

# The first thing to run after a change: a minute and a half on two idle cores. Structure of the code, options and help,
# configs and run folders, layers and equations of the schemes against float64, one scheme's contracts, kernels' dispatch,
# and whether what is generated is as it would be written now: pages, tables, stubs.
QUICK = tests/test_imports.py tests/test_options.py tests/test_named_paths.py tests/cli/test_help.py tests/runs \
  tests/layers/test_attention.py tests/layers/test_mlp_and_embedding.py tests/residual/test_equations.py \
  tests/residual/test_nag_invariants.py tests/mod/test_selection.py tests/mod/test_mod_config.py tests/train/test_guard.py \
  tests/data/test_documents.py tests/contracts/test_scheme_protocol.py tests/pallas_kernels/test_add_rms_norm.py \
  tests/residual/test_every_equation.py tests/residual/test_scheme_page.py tests/cli/test_command_page.py \
  tests/test_public_names.py tests/experiments/test_pages.py tests/experiments/test_front_page.py
quick: $(VENV)/.dev
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -k "not contracts or nag" $(QUICK)

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder tests

# The tests that compute, under other instruction sets, threads and loop emitters than this machine's: four runs, or all
# sixteen with ALL=1; TESTS=tests/mod chooses the tests. What differs by rounding alone must pass.
test-any-cpu: $(VENV)/.dev
	$(BIN)/python -m tests.any_cpu --jobs $(JOBS) $(if $(ALL),--all) $(TESTS)

# Its core in two of the runs, a minute on two idle cores.
test-any-cpu-quick: $(VENV)/.dev
	$(BIN)/python -m tests.any_cpu --jobs $(JOBS) --quick

# The static type checker on the public surface: see tool.ty in pyproject.toml.
types: $(VENV)/.dev
	$(BIN)/ty check --python $(VENV)

# Every scheme, with and without Mixture-of-Depths, on every mesh; `make test` leaves most pairs out.
test-meshes: $(VENV)/.dev
	EVERY_MESH=1 $(BIN)/python -m pytest -n $(JOBS) -k "eight_devices or any_mesh or every_kind_of_stream" tests/contracts tests/mod tests/train/test_moe_training.py

# The same library on the newest jax 0.12: kernels, contracts on one device with one scheme per kind of stream, training;
# NEWEST=tests/mod chooses other tests.
NEWEST ?= tests/pallas_kernels tests/contracts tests/train/test_loop.py
test-newest: .venv-newest/.dev
	ONE_PER_STREAM=1 .venv-newest/bin/python -m pytest -n $(JOBS) --dist loadfile -k "not eight_devices" $(NEWEST)

# Preparation of a corpus on Apache Beam, which needs an older numpy, and so an environment of its own.
test-beam: .venv-beam/.beam
	.venv-beam/bin/python -m pytest tests/data/test_beam.py

# Imported and exported models against transformers' own, which PyTorch runs in an environment of its own.
test-hf: $(VENV)/.dev .venv-torch/.torch
	$(BIN)/python -m pytest tests/interop

# lm-evaluation-harness on a tiny run, in an environment of its own: it brings datasets and scikit-learn along.
test-eval: .venv-eval/.eval
	.venv-eval/bin/python -m pytest tests/interop/test_lm_eval.py tests/train/test_harness_tasks.py

# Every kernel and the sharded training step through the TPU and GPU compilers, with no accelerator;
# at most ten minutes per program.
COMPILE = .venv-aot/bin/python -m pallas_kernels.aot --check pallas_kernels/README.md --step $(STEP):routed_step
STEP = nagjax.train.abstract_step
COMPILER_TESTS = .venv-aot/bin/python -m pytest -n $(JOBS) --dist worksteal tests/pallas_kernels/test_raw_triton.py tests/aot/test_compile.py
aot: .venv-aot/.aot
	$(COMPILE) --step $(STEP):nag_step $(AOT)
	$(COMPILER_TESTS) tests/aot/test_plan.py

# One TPU and one GPU, the kernels at two shapes, half of the plans: three minutes on two idle cores.
aot-quick: .venv-aot/.aot
	$(COMPILE) --target v5e --target h200 --quick
	$(COMPILER_TESTS) tests/aot/test_plan.py -k "not gpu_box and not on_the_host and not too_large and not dropless"

# The plans and tables of docs/plan.md, tpu_vms.md, memory.md and experiments/README.md: what their files of results in
# benchmarks/results lack is compiled, minutes for each.
plans: .venv-aot/.aot
	.venv-aot/bin/python -m benchmarks.plan
	.venv-aot/bin/python -m benchmarks.block_bytes
	.venv-aot/bin/python -m benchmarks.library_kernels
	.venv-aot/bin/python -m benchmarks.long_context
	.venv-aot/bin/python -m benchmarks.head_memory
	.venv-aot/bin/python -m benchmarks.experiment_costs

# nagjax's training step beside PyTorch's on this CPU, in one sitting; writes benchmarks/results/step_cpu.json, docs/cpu.md.
bench-torch: $(VENV)/.dev .venv-torch/.torch
	$(BIN)/python -m benchmarks.step --torch .venv-torch/bin/python $(BENCH)

# nagjax's sampling beside transformers' of the same model; writes benchmarks/results/decode_cpu.json, docs/cpu.md.
bench-decode: $(VENV)/.dev .venv-torch/.torch
	$(BIN)/python -m benchmarks.decode_peers --torch .venv-torch/bin/python $(BENCH)

# Kills and faults by the hundred, half an hour at most; writes the table of docs/faults.md.
torture: $(VENV)/.dev
	$(BIN)/python -m tests.torture --faults $(FAULTS) --jobs $(JOBS) --docs docs/faults.md

# Every file that a command reads, damaged; writes the table of docs/damaged_files.md.
fuzz: $(VENV)/.dev
	$(BIN)/python -m tests.fuzz --mutations $(MUTATIONS) --jobs $(JOBS) --docs docs/damaged_files.md

# Trains the models of models/, five hours on two idle cores; goes on where it was stopped. MODELS="plain nag" chooses.
models: $(VENV)/.base
	$(BIN)/python models/make.py $(MODELS)

# All notebooks top to bottom; NOTEBOOKS=1_first_model.ipynb for one, WRITE=1 to renew the outputs in the files.
notebooks: $(VENV)/.notebooks
	$(BIN)/python notebooks/run.py $(if $(WRITE),--write) $(NOTEBOOKS)

# The pages of docs/, the notebooks and the API into site/, which opens from the disk; any warning is an error.
docs: .venv-docs/.docs
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/python -m mkdocs -q build

lint: $(VENV)/.dev
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

$(UV):
	$(NEEDS_PYTHON)
	@$(PYTHON) -m venv .venv-uv && $(call PIP,.venv-uv) -c constraints.txt uv || echo "without uv: pip installs"

$(VENV)/.base: pyproject.toml constraints.txt | $(UV)
	$(NEEDS_PYTHON)
	$(call MAKE_VENV,$(VENV))
	$(call INSTALL,$(VENV)) -c constraints.txt -e .
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(UV) $(VENV)/.base
	$(NEEDS_PYTHON)
	$(call MAKE_VENV,$(VENV))
	$(call INSTALL,$(VENV)) -c constraints.txt -e '.[dev]'
	@touch $(VENV)/.base $@

$(VENV)/.notebooks: $(VENV)/.dev
	$(call INSTALL,$(VENV)) -c constraints.txt -e '.[notebooks]'
	@touch $@

# Reads the sources without importing them: nagjax and jax are not installed.
.venv-docs/.docs: pyproject.toml constraints.txt | $(UV)
	$(call MAKE_VENV,.venv-docs)
	$(call INSTALL,.venv-docs) -c constraints.txt $$($(PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')
	@touch $@

.venv-newest/.dev: pyproject.toml constraints.txt | $(UV)
	$(call MAKE_VENV,.venv-newest)
	grep -v -E '^(jax|jaxlib|jax-cuda13-.*|libtpu)==' constraints.txt > .venv-newest/constraints.txt
	$(call INSTALL,.venv-newest) -c .venv-newest/constraints.txt 'jax>=0.12,<0.13' -e '.[dev]'
	@touch $@

.venv-beam/.beam: pyproject.toml constraints-beam.txt | $(UV)
	$(call MAKE_VENV,.venv-beam)
	$(call INSTALL,.venv-beam) -c constraints-beam.txt -e '.[beam]' pytest
	@touch $@

# Plain pip: PyTorch is fetched once, for this Python; PIP_EXTRA_INDEX_URL may name an index without CUDA.
.venv-torch/.torch: constraints-torch.txt
	$(PYTHON_TORCH) -m venv .venv-torch
	$(call PIP,.venv-torch) -c constraints-torch.txt torch transformers
	@touch $@

.venv-eval/.eval: pyproject.toml constraints.txt | $(UV)
	$(call MAKE_VENV,.venv-eval)
	$(call INSTALL,.venv-eval) -c constraints.txt -e '.[dev,eval]'
	@touch $@

.venv-aot/.aot: pyproject.toml constraints.txt | $(UV)
	$(call MAKE_VENV,.venv-aot)
	$(call INSTALL,.venv-aot) -c constraints.txt -e '.[dev,aot,triton,tokamax]'
	@touch $@

clean:
	rm -rf site .venv .venv-*
