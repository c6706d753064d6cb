# Everything a developer does, as one word each. `make` lists the words.
#
# PYTHON    the interpreter that the environment is made with (3.11 or later)
# PIP_ARGS  passed on to pip, for example an index that has CPU builds of torch
# ANSWERS, MINUTES  how much to sample and to train for `make draft-model`
# ARGS      passed on to the command, for example: make demo ARGS='--gamma 4 "Why is the sky blue?"'

PYTHON   ?= python3
PIP_ARGS ?=
ARGS     ?=
ANSWERS  ?= 2700
MINUTES  ?= 100
SHELL    := /bin/bash

VENV    := .venv
BIN     := $(VENV)/bin
PROTOS  := $(wildcard proto/tandem/v1/*.proto)
PROTO   := tandem/v1/.stamp
STAGE   := $(VENV)/proto-new
TARGET  := models/smollm2-135m-instruct
DRAFT   := models/smol-draft
RUNS    := models/runs
# Stamps lie inside what they vouch for, so that removing the folder removes the claim.
INSTALL := $(VENV)/.stamp

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv proto models demo up down status test soak lint bench plots chaos fuzz draft-model constraints clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-17s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

venv: $(INSTALL) ## make .venv with everything in its pinned version
proto: $(PROTO) ## generate the stubs of proto/ into tandem/v1/
models: $(TARGET)/model.safetensors ## make the demo's target model (93 MB to fetch, once)

demo: $(INSTALL) $(PROTO) $(TARGET)/model.safetensors ## start everything, stream one answer, compare with plain decoding, stop
	@$(BIN)/tandem demo $(ARGS)

# TRACING=1 sends the spans to a Jaeger or another collector on this machine.
up: export OTEL_EXPORTER_OTLP_ENDPOINT := $(or $(OTEL_EXPORTER_OTLP_ENDPOINT),$(if $(TRACING),http://127.0.0.1:4317))
up: $(INSTALL) $(PROTO) $(TARGET)/model.safetensors ## start the services and leave them running
	@$(BIN)/tandem up $(ARGS)

down: $(INSTALL) ## stop what `make up` started
	@$(BIN)/tandem down $(ARGS)

status: $(INSTALL) ## show what runs
	@$(BIN)/tandem status $(ARGS)

test: $(INSTALL) $(PROTO) $(TARGET)/model.safetensors ## all tests, against a real store and real services
	$(BIN)/pytest $(ARGS)

soak: $(INSTALL) $(PROTO) ## 2,000 requests that end in all ways, against a stack that must be as it was afterwards
	TANDEM_SOAK_REQUESTS=2000 $(BIN)/pytest -s --timeout 3000 tests/e2e/test_load.py -k soak

lint: $(INSTALL) $(PROTO) ## style, types, import rules, the contract
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	PYTHONPATH=. $(BIN)/lint-imports
	$(BIN)/buf lint
	@$(check_breaking)

bench: $(INSTALL) $(PROTO) $(TARGET)/model.safetensors ## measure overhead and speed-up on this machine
	$(BIN)/python -m bench $(ARGS)

plots: $(INSTALL) ## draw bench/results/*.json, which `make bench ARGS='pair --json bench/results/pair.json'` and others write
	$(BIN)/python -m bench plot bench/results/*.json $(ARGS)

chaos: $(INSTALL) $(PROTO) ## random faults under load, 500 requests, from a printed seed; ARGS='--seed 7' repeats one
	$(BIN)/python -m tests.chaos.schedule $(ARGS)

fuzz: $(INSTALL) $(PROTO) ## 20,000 random requests with a canary after each hundred, and 300,000 inputs of the wire decoders
	$(BIN)/python -m tests.fuzz.public_api $(ARGS)
	@$(BIN)/python -c 'import atheris' 2>/dev/null || { echo "no atheris for this Python and platform: the wire decoders are not fuzzed"; exit 0; } && \
	  $(BIN)/python -m tests.fuzz.wire_decoder -runs=300000 -max_len=300

bench-acceptance: $(INSTALL) $(PROTO) $(TARGET)/model.safetensors ## fail if the demo pair accepts less than was recorded
	$(BIN)/python -m bench acceptance $(ARGS)

draft-model: $(RUNS)/train.npz $(RUNS)/heldout.npz ## make the default draft again, in models/runs: sample the target, distil (hours)
	$(BIN)/python models/distill.py --data $(RUNS)/train.npz --heldout $(RUNS)/heldout.npz \
	  --teacher $(TARGET) --output $(RUNS)/smol-draft --layers 4 --minutes $(MINUTES) $(ARGS)
	@for draft in $(DRAFT) $(RUNS)/smol-draft; do echo "$$draft:"; \
	  $(BIN)/python models/measure_pair.py $(TARGET) $$draft --samples $(RUNS)/heldout.npz || exit 1; done
	@echo "the draft that is committed is left as it was: TANDEM_DRAFT_MODEL=$(RUNS)/smol-draft uses the new one"

constraints: $(INSTALL) ## pin what is installed now
	@{ sed -n '/^#/p; /; python_/p' constraints.txt; \
	   $(BIN)/pip freeze --exclude-editable | sed -e 's/+cpu$$//' -e '/^#/d'; } > constraints.new
	@mv constraints.new constraints.txt

clean: ## remove what was generated, but not the models
	-@test ! -x $(BIN)/tandem || $(BIN)/tandem down
	rm -rf $(VENV) tandem/v1 .tandem build *.egg-info
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .grimp_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Python compiles what is imported at its first import; pip would compile all 16,000 files, for a minute. Where Python may not keep what it
# compiles, they are compiled here after all: else each worker would, at each start, for 12 s of CPU time. Some are templates, or of other
# versions, and don't compile.
$(INSTALL): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Tandem needs Python 3.11 or later: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing the pinned packages into $(VENV) (about 2 GB); the first time this takes some minutes"
	@set -o pipefail; $(BIN)/python -m pip install --progress-bar off --no-compile --disable-pip-version-check $(PIP_ARGS) \
	  -c constraints.txt -e '.[worker,cli,proto,bench,dev]' | $(BRIEFLY)
	@test -z "$$PYTHONDONTWRITEBYTECODE" || { echo "compiling them, once, since PYTHONDONTWRITEBYTECODE is set"; \
	  $(BIN)/python -m compileall -q -j 0 $(VENV)/lib >/dev/null 2>&1 || true; }
	@touch $@

# Of what pip says: each package that it fetches, and when it begins to install them.
BRIEFLY := awk '/^ *Downloading / && !/metadata/ { print "  " $$2 " " $$3 " " $$4; fflush() } \
  /^Installing collected/ { print "  all there: installing them"; fflush() }'

# Generated beside the output and moved in one step, so that a failure leaves no half of a contract.
$(PROTO): $(PROTOS) constraints.txt | $(INSTALL)
	@rm -rf $(STAGE) && mkdir $(STAGE)
	@PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m grpc_tools.protoc -Iproto \
	  --python_out=$(STAGE) --grpc_python_out=$(STAGE) \
	  --mypy_out=quiet:$(STAGE) --mypy_grpc_out=quiet:$(STAGE) $(PROTOS)
	@echo '"""Generated from proto/ by `make proto`."""' > $(STAGE)/tandem/v1/__init__.py
	@rm -rf tandem/v1 && mv $(STAGE)/tandem/v1 tandem/v1 && rm -rf $(STAGE)
	@touch $@

$(TARGET)/model.safetensors: | $(INSTALL)
	$(BIN)/python models/fetch_smollm2.py

$(RUNS)/train.npz: | $(TARGET)/model.safetensors
	@mkdir -p $(RUNS)
	$(BIN)/python models/sample_teacher.py $(TARGET) $@ --answers $(ANSWERS)

$(RUNS)/heldout.npz: | $(TARGET)/model.safetensors
	@mkdir -p $(RUNS)
	$(BIN)/python models/sample_teacher.py $(TARGET) $@ --answers 64 --held-out

# Against the commit before, or where this branch left main: what was published must stay readable.
define check_breaking
base=$$(git merge-base HEAD origin/main 2>/dev/null || git merge-base HEAD main 2>/dev/null || true); \
if [ "$$base" = "$$(git rev-parse HEAD 2>/dev/null)" ]; then base=$$(git rev-parse --verify --quiet HEAD^ || true); fi; \
if [ -n "$$base" ] && git cat-file -e "$$base:proto" 2>/dev/null; then \
  echo "buf breaking --against $${base:0:12}"; $(BIN)/buf breaking --against ".git#ref=$$base"; \
else echo "buf breaking: no earlier contract to compare with"; fi
endef

# Containers and Kubernetes; see docs/operations.md.
#
# IMAGES      targets of the Dockerfile
# IMAGE_ARGS  passed on to podman or docker
# OVERLAY     a folder of k8s/overlays
# COMPONENTS  folders of k8s/components that `make kube-demo` adds to the overlay cpu-demo
# NAMESPACE   where `make smoke` looks
IMAGES     ?= orchestrator worker-cpu orchestrator-demo worker-cpu-demo
IMAGE_ARGS ?=
OVERLAY    ?= cpu-demo
NAMESPACE  ?= tandem
KUBECTL    ?= kubectl
ROLLED_OUT := statefulset/target statefulset/draft deployment/orchestrator

.PHONY: images check-images kube-demo deploy smoke
images: ## build the images with podman or docker
	@IMAGE_ARGS='$(IMAGE_ARGS)' k8s/build-images.sh $(IMAGES)

check-images: $(INSTALL) $(PROTO) images ## ... look into them, and play the demo's manifests with and without mTLS
	TANDEM_CHECK_IMAGES='$(IMAGES)' $(BIN)/pytest -s tests/k8s/test_images.py

kube-demo: $(INSTALL) ## play the demo's manifests with podman, with the draft and after it was killed
	@$(BIN)/python k8s/kube_demo.py $(KUBECTL) $(COMPONENTS)

deploy: ## apply an overlay to the cluster that kubectl talks to, and wait until it is ready
	$(KUBECTL) apply -k k8s/overlays/$(OVERLAY)
	@for workload in $(ROLLED_OUT); do \
	  $(KUBECTL) --namespace $(NAMESPACE) rollout status --timeout 30m $$workload || exit 1; done

smoke: $(INSTALL) $(PROTO) ## send one request to the cluster's orchestrator
	@KUBECTL='$(KUBECTL)' NAMESPACE='$(NAMESPACE)' k8s/smoke.sh
