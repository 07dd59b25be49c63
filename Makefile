# make demo, make test, ...: each sets up what it needs first, and starts at once when that is done.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
PIP := $(BIN)/python -m pip install --disable-pip-version-check
SHELL := /bin/bash
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: demo test slow exhaustive test-gpu notebooks figures bench site site-serve test-site lint clean

demo: $(READY)
	@echo "== the worked example: 4 GPUs, 8 tokens, every number"
	$(BIN)/python worked_example.py
	@echo
	@echo "== the ring: 4 processes on this machine"
	OMP_NUM_THREADS=1 $(BIN)/torchrun --nproc_per_node=4 ring_attn.py

# Each process of the suite computes with one thread: two or more of them run at a time, and their ranks beside them.
# They see no GPU, so that a machine with one passes the same tests.
PYTEST := CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n logical --maxprocesses=4 --dist=loadgroup --no-loadscope-reorder

test: $(READY)  # all but the slow ones, or only some: make test TESTS=tests/ring/test_masks.py
	$(PYTEST) -m "not slow and not exhaustive and not gpu" $(TESTS)

slow: $(READY)  # the others: whole models, the doctor, benches, pictures, later chapters, killed jobs, hosts, JAX
	$(PYTEST) -m "slow and not exhaustive and not gpu"

exhaustive: $(READY)  # every model, two thousand drawn programs, appendices: half an hour
	$(PYTEST) -m exhaustive

test-gpu: $(READY)  # what a GPU changes, on one GPU; make test-gpu GPU=cpu tries these tests without one
	$(BIN)/python -m pytest -m gpu --gpu=$(or $(GPU),cuda) tests/test_on_a_gpu.py

notebooks: $(READY)  # run them from their .py sources and keep the outputs
	$(BIN)/python -m notebooks.source.build

figures: $(READY)  # redraw every picture
	$(BIN)/python -m figures.draw_all

bench: $(READY)  # measure again; takes about an hour and wants a quiet machine
	$(BIN)/python -m bench.gpu  # with a CUDA GPU; elsewhere it says so
	$(BIN)/python -m bench  # all the others. Some need Linux, some root; elsewhere they say so

SITE := $(VENV)/site-ready
site: $(SITE)  # the book, as pages in site/, in some minutes; nothing is fetched while it is built or read
	OMP_NUM_THREADS=1 $(BIN)/python -m book
	@echo "== written: open site/index.html, or make site-serve"

site-serve: site  # look at it: http://localhost:8000
	$(BIN)/python -m http.server --directory site --bind 127.0.0.1 8000

test-site: site  # its pages in a headless Chromium, where there is one
	$(PYTEST) book

$(SITE): $(READY)
	@$(PIP) -q -e '.[site]'
	@touch $(SITE)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# uv chooses PyTorch's build by the machine: without an NVIDIA GPU, no CUDA. (Not tried with PyTorch's own index.)
$(READY): requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 10) else f"Python {v.major}.{v.minor} found, 3.10 or newer needed: make PYTHON=python3.12 ...")'
	@echo "== setting up $(VENV): installing requirements.txt (once, a few minutes; to watch: tail -f $(VENV)/*.log)"
	@$(PYTHON) -m venv $(VENV)
	@if $(BIN)/python -m pip config list | grep -E 'index|find-links' > /dev/null; then \
		echo "== pip was told where to look, so pip installs, and not uv"; \
	elif $(PIP) uv > $(VENV)/uv.log 2>&1 && $(BIN)/uv pip install --python $(BIN)/python --torch-backend=auto \
			-r requirements.txt >> $(VENV)/uv.log 2>&1; then \
		exit 0; \
	else \
		echo "== uv cannot ($(VENV)/uv.log says why), so pip installs: on Linux with gigabytes of CUDA, unless you press" \
			"Ctrl-C and give it the address of PyTorch's CPU build: PIP_EXTRA_INDEX_URL=ADDRESS make demo"; \
	fi; \
	$(PIP) --no-compile -r requirements.txt > $(VENV)/install.log 2>&1 || { tail -n 20 $(VENV)/install.log; exit 1; }; \
	$(BIN)/python -m compileall -q -j 0 $(VENV)/lib > $(VENV)/compile.log 2>&1 || true  # pip would compile on one core
	@touch $(READY)
	@echo "== set up"

clean:
	rm -rf $(VENV)
