# `make demo` shows the whole pipeline on this machine; `make test` runs every test; `make soak` runs the long campaigns
# and keeps their results. Nothing else is needed for set-up.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv

# When the Python that runs make has the packages already (a GPU image), it is used as it is; else a virtual environment.
RUN_MODULES := torch numpy sentencepiece brotli huggingface_hub tqdm
TEST_MODULES := $(RUN_MODULES) pytest xdist hypothesis ruff scipy jsonschema rich matplotlib python_minifier
has = $(shell $(PYTHON) -c "import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, '$(1)'.split())))" && echo 1)

SAMPLE := data/sample
DEMO_OUTPUT ?= demo
DEMO_SECONDS ?= 60
SAMPLE_OPTIONS ?=
ifeq ($(call has,$(RUN_MODULES)),1)
DEMO_PYTHON := $(PYTHON)
else
DEMO_PYTHON := $(VENV)/bin/python
demo: $(VENV)/.installed
endif
ifeq ($(call has,$(TEST_MODULES)),1)
TEST_PYTHON := $(PYTHON)
else
TEST_PYTHON := $(VENV)/bin/python
test soak-fuzz soak-kills soak-research: $(VENV)/.installed-tests
endif

DEMO_GPUS = $(shell $(DEMO_PYTHON) -c "import torch; print(1 << min(3, max(1, torch.cuda.device_count()).bit_length() - 1))")
# About a million parameters, so that two CPU cores take some hundred steps. Short runs need short averages and warm-ups.
DEMO_SETTINGS = DATA_DIR=$(SAMPLE) OUTPUT_DIR=$(DEMO_OUTPUT) VOCAB_SIZE=1024 NUM_LAYERS=4 XSA_LAST_N=4 MODEL_DIM=144 \
	EMBEDDING_DIM=144 NUM_HEADS=6 NUM_KV_HEADS=3 VE_DIM=48 VE_LAYERS=3 TRAIN_SEQ_LEN=256 EVAL_SEQ_LEN=256 \
	TRAIN_BATCH_TOKENS=4096 MICRO_BATCH_TOKENS=$$((4096 / $(DEMO_GPUS))) VAL_BATCH_TOKENS=8192 MAX_WALLCLOCK_SECONDS=$(DEMO_SECONDS) \
	GPTQ_RESERVE_SECONDS=5 GPTQ_CALIBRATION_BATCHES=16 WARMUP_STEPS=2 MUON_MOMENTUM_WARMUP_STEPS=60 \
	MUON_MOMENTUM=0.95 MUON_MOMENTUM_WARMUP_START=0.85 EMA_DECAY=0.95 TRAIN_LOG_EVERY=25 VAL_LOSS_EVERY=0

.PHONY: demo test soak soak-fuzz soak-kills soak-research
demo:
	$(DEMO_PYTHON) data/sample_docs.py --out $(SAMPLE) $(SAMPLE_OPTIONS)
	$(DEMO_PYTHON) data/download_hf_docs_and_tokenize.py --docs-jsonl $(SAMPLE)/docs_selected.jsonl \
		--tokenizer-config data/tokenizer_specs_sample.json --output-root $(SAMPLE)
	$(DEMO_SETTINGS) $(DEMO_PYTHON) -m torch.distributed.run --standalone --nproc_per_node=$(DEMO_GPUS) train_gpt.py

test:
	$(TEST_PYTHON) -m ruff check .
	$(TEST_PYTHON) -m pytest -q -n 2 --dist loadfile tests

# Each campaign fails by itself; `make -k soak` goes on with the others.
NOW := $(shell date -u +%Y-%m-%d_%H%M)
FUZZ_CASES ?= 100000
KILLS ?= 200
SOAK_MINUTES ?= 60
soak: soak-fuzz soak-kills soak-research

soak-fuzz:
	$(TEST_PYTHON) bench/fuzz.py --cases $(FUZZ_CASES) --out bench/results/$(NOW)_fuzz.json

soak-kills:
	$(TEST_PYTHON) bench/kill_runs.py --minutes $(SOAK_MINUTES) --out bench/results/$(NOW)_kill_runs.json

soak-research:
	$(TEST_PYTHON) bench/research_kills.py --kills $(KILLS) --json bench/results/$(NOW)_research_kills.json

$(VENV)/.installed: requirements.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install -q $(TORCH) -r requirements.txt
	touch $@

$(VENV)/.installed-tests: $(VENV)/.installed tests/requirements.txt golf/requirements.txt
	$(VENV)/bin/python -m pip install -q $(TORCH) -r tests/requirements.txt
	touch $@
