# The targets a user needs; docs: README.md. Everything else is `.venv/bin/lab --help`.
.PHONY: fuzz demo test setup lint bench test-docker format proto lock
PY := .venv/bin/python

# Programs that only tests call; scripts/setup installs them.
test fuzz test-docker: export EXTRA_PACKAGES += procps curl bind9-dnsutils

demo: setup
	@$(PY) -m lab verify topologies/quickstart.yaml

test: setup
	$(PY) -m pytest tests/unit tests/netns $(PYTEST_ARGS)

test-docker: setup
	$(PY) -m pytest tests/docker $(PYTEST_ARGS)

# Predictions against the kernel and against Envoy, the size of a night; seeds are printed, SIDECARLAB_FUZZ_SEED repeats one.
# Then every property test with examples of its own choice (make test takes the same ones each time).
fuzz: setup
	SIDECARLAB_FUZZ_PAIRS=$${PAIRS:-10000} SIDECARLAB_FUZZ_REQUESTS=$${REQUESTS:-2000} $(PY) -m pytest tests/netns/explain -s --timeout 3600 $(PYTEST_ARGS)
	SIDECARLAB_FUZZ=on $(PY) -m pytest tests/unit tests/netns/init/test_init_documents.py --timeout 3600 $(PYTEST_ARGS)

setup:
	@scripts/setup

lint: setup
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy

format: setup
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .

bench: setup
	$(PY) -m scripts.bench

lock:
	uv pip compile --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header pyproject.toml --group dev -o requirements.lock
	uv pip compile --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header -c requirements.lock pyproject.toml -o requirements-run.lock
	echo 'setuptools>=77' | uv pip compile --python-version 3.11 --generate-hashes --no-emit-index-url --no-header - -o requirements-build.lock
