# Everything is installed into .venv. `make setup` once, or any other target, which calls it.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PROTOS := $(wildcard protos/kilburn/v1/*.proto)
MEMMGR := memmgr/compiled/sources.sha256
KERNELS := kernels/cpu/compiled/made_of.txt
COMPILED := $(MEMMGR) $(KERNELS)

# Where it is set, each process compiles torch and transformers anew: four seconds more for each start of an executor.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup compile demo test exact prove faults fuzz check proto clean

help:
	@echo "make setup   install into .venv"
	@echo "make compile compile memmgr's core and the CPU's kernels anew where their sources have changed"
	@echo "make demo    run the default model and ask it something"
	@echo "make test    the tests"
	@echo "make exact   the full comparison with transformers (long)"
	@echo "make prove   the memory manager against naive models: 20,000 examples, every order of 8 operations (long)"
	@echo "make faults  plant faults in the memory manager, one at a time: does a test catch each? (long)"
	@echo "make fuzz    the CPU's kernels on random steps, under sanitizers, for ten minutes (long)"
	@echo "make check   ruff and mypy"
	@echo "make proto   generate kilburn/v1 from protos/"
	@echo "make clean   remove .venv and all that was built; models stay in the cache folder"

setup: $(STAMP)

# Written last: an installation that was cut short is done again.
$(STAMP): pyproject.toml
	@echo "installing into $(VENV); the first time takes some minutes, torch is large"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --editable '.[dev]'
	@touch $@

# Where there is no compiler it says so: memmgr is interpreted, and attention on the CPU is plain torch.
compile: $(COMPILED)

$(MEMMGR): deploy/compile.py $(wildcard memmgr/core/*.py memmgr/schedule/*.py) | $(STAMP)
	@echo "compiling memmgr's core; it takes a minute"
	-@$(BIN)/python deploy/compile.py memmgr

$(KERNELS): deploy/compile.py kernels/cpu/build.py $(wildcard kernels/cpu/native/*.h kernels/cpu/native/*.cpp) | $(STAMP)
	@echo "compiling the CPU's kernels"
	-@$(BIN)/python deploy/compile.py kernels

demo: $(COMPILED)
	$(BIN)/python -m cli.demo

# The default model is made first, so that no test waits for it; tests/conftest.py puts the quick tests before the others.
test: $(COMPILED)
	$(BIN)/python -m cli fetch
	$(BIN)/python -m pytest

exact: $(COMPILED)
	$(BIN)/python -m tests.e2e.exact

prove: $(STAMP)
	$(BIN)/python -m tests.memmgr.prove

faults: $(STAMP)
	$(BIN)/python -m tests.memmgr.plant

fuzz: $(STAMP)
	$(BIN)/python -m tests.kernels.fuzz --seconds 600 --sanitize

clean:
	rm -rf $(VENV) memmgr/compiled/*.so memmgr/compiled/*/ $(MEMMGR) kernels/cpu/compiled .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist

proto: $(STAMP)
	$(BIN)/python -m grpc_tools.protoc --proto_path=protos \
		--plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy --plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc \
		--python_out=. --grpc_python_out=. --mypy_out=. --mypy_grpc_out=. $(PROTOS)
	rm -f $(foreach part,engine journal ranks,kilburn/v1/$(part)_pb2_grpc.py kilburn/v1/$(part)_pb2_grpc.pyi)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
