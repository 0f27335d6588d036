# Each target makes what it needs; `make help` lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check
SRC := agentfsm tests benchmarks examples docs/reference.py docs/build_site.py
TRACED := tests/engine tests/core
SWEEPS := tests/engine/sweeps
DOORS := tests/cli tests/mcp tests/stores tests/upgrade tests/crash
SERVE := tests/serve tests/studio
# The Markdown parser of the studio's pages, a file of this npm package: `make vendor` fetches it.
MARKDOWN_IT := 15.0.3
MARKDOWN_IT_SHA256 := d5432491790141da046b1197353705db03264f40b5727f3b4b591f5aba193e30
VENDOR := $(CURDIR)/agentfsm/studio/static/vendor
REST := $(filter-out $(TRACED) $(DOORS) $(SERVE) tests/__pycache__,$(patsubst %/,%,$(wildcard tests/*/))) $(wildcard tests/test_*.py)

# The parts of the soak, and the minutes that each takes on two cores. A part that comes near 45 is to be split.
SOAK_core := tests/core  ## 3 min
SOAK_engine := tests/engine --ignore=$(SWEEPS)  ## 7 min
SOAK_schedules := $(SWEEPS)/test_schedules.py $(SWEEPS)/test_queue_properties.py  ## 1 min
SOAK_histories := $(SWEEPS)/test_valid_history.py $(SWEEPS)/test_true_record.py  ## 8 min
SOAK_sweeps := $(SWEEPS) $(patsubst %,--ignore=%,$(SOAK_schedules) $(SOAK_histories))  ## 6 min
SOAK_crash := tests/crash  ## 22 min
SOAK_simulation := tests/simulation  ## 32 min
SOAK_changed := tests/changed  ## 35 min
SOAK_recorded := tests/recorded  ## 1 min
SOAK_stores := tests/stores  ## 7 min
SOAK_models := tests/models tests/recordings tests/tokens  ## 2 min
SOAK_mcp := tests/mcp  ## 5 min
SOAK_cli := tests/cli  ## 3 min
SOAK_engines := tests/engines  ## 4 min
SOAK_packaging := tests/packaging  ## 3 min
SOAK_serve := $(SERVE)  ## 13 min
SOAK_rest := $(filter-out $(patsubst %,tests/%,core engine engines crash simulation changed recorded stores models recordings tokens mcp cli packaging),$(TRACED) $(DOORS) $(REST))  ## 14 min
PARTS := $(patsubst SOAK_%,%,$(filter SOAK_%,$(.VARIABLES)))

.PHONY: help demo test check types lowest matrix bench soak docs site reference diagram pictures vendor format clean

help:  ## list the targets, and the parts of the soak
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 12
	@sed -n 's/^SOAK_\([a-z]*\) :=.*## /  make soak PART=\1\t/p' $(MAKEFILE_LIST) | expand -t 30

$(VENV)/pip:
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "agentfsm needs Python 3.11 or newer: PYTHON=python3.11 make ...")'
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --quiet --upgrade 'pip>=25.1'
	@touch $@

# Pip compiles on one core. What packages have of templates does not compile.
$(VENV)/ready: $(VENV)/pip pyproject.toml
	@echo "Installing agentfsm with all extras, the tests and the checkers into $(VENV): a minute or two."
	$(INSTALL) --quiet --no-compile --editable '.[all]' --group test --group check
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
	@touch $@ $(VENV)/package

# Enough for the command line. Pip prints each package, since a first installation takes a while.
$(VENV)/package: $(VENV)/pip pyproject.toml
	$(INSTALL) --editable '.[cli,serve]'
	@touch $@

demo: $(VENV)/package  ## run the main job: an agent surveys a folder and writes a report (FOLDER=., no key needed)
	@$(BIN)/agentfsm demo $(FOLDER) || test $$? -eq 3  # a run that waits for you is no error

# Of three parts at once one has its own core, and those that start processes and wait for them share another. These stand
# in the foreground: a shell lets what it starts in the background ignore Ctrl-C, which they send.
# What Python and pytest compile is kept: tests start hundreds of processes, and two parts run the same files. What is
# run with coverage comes after them, since under it a file takes twice the time to compile.
unexport PYTHONDONTWRITEBYTECODE
SLOWEST := --durations=25
test: check  ## pass the whole suite, on asyncio and trio
	@$(BIN)/python -m compileall -q agentfsm
	$(BIN)/coverage erase
	@{ $(BIN)/python -m pytest $(SLOWEST) -m "not soak and on_trio" $(TRACED) --ignore=$(SWEEPS); one=$$?; \
		$(BIN)/coverage run -m pytest $(SLOWEST) -m "not soak and not on_trio" $(TRACED) --ignore=$(SWEEPS); two=$$?; \
		$(BIN)/python -m pytest $(SLOWEST) -m "not soak" $(SWEEPS) $(SERVE); exit $$((one + two + $$?)); } > .test-engine.log 2>&1 & engine=$$!; \
	$(BIN)/python -m pytest $(SLOWEST) -m "not soak" $(REST) > .test-rest.log 2>&1 & rest=$$!; \
	$(BIN)/python -m pytest $(SLOWEST) -m "not soak" $(DOORS); doors=$$?; \
	wait $$rest; rest=$$?; cat .test-rest.log; \
	wait $$engine; engine=$$?; cat .test-engine.log; exit $$((doors + rest + engine))
	$(BIN)/coverage report --include='agentfsm/core/*' --fail-under=100 --skip-covered
	$(BIN)/coverage report --include='agentfsm/engine/**,agentfsm/streaming/*,agentfsm/tools/**' --fail-under=95

check: $(VENV)/ready  ## ruff, import-linter, mypy and pyright
	$(BIN)/ruff check $(SRC)
	$(BIN)/ruff format --check $(SRC)
	$(BIN)/lint-imports
	@{ $(BIN)/mypy & mypy=$$!; $(BIN)/pyright && wait $$mypy; }

types: $(VENV)/ready  ## pyright knows the type of each public symbol
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/pyright --verifytypes agentfsm --ignoreexternal

# Warnings of old packages are none of ours. The tests that compare adapters with the newest packages of vendors are left out.
SOME := tests/core tests/models tests/context tests/prompts tests/evals tests/test_first_contact.py tests/engine/test_ladder.py \
	tests/engine/test_parked.py tests/cli/test_commands.py tests/cli/test_chat.py tests/cli/test_setting_up.py
ANY_VENDOR := -o filterwarnings=default -k "not vendor_error_is_missing and not schema_is_what_the_package"
QUICK := -m "not soak and not on_trio" -p no:cacheprovider

lowest: $(VENV)/ready  ## run a part of the suite with the lowest version of each requirement
	$(INSTALL) --quiet uv
	$(BIN)/uv venv --clear --quiet --python $(BIN)/python build/lowest
	$(BIN)/uv pip install --python build/lowest --resolution lowest-direct --editable '.[all,keyring]' --group test
	build/lowest/bin/python -m pytest $(QUICK) $(ANY_VENDOR) $(SOME)

# `make matrix PYTHONS="python3.13 /opt/python3.14/bin/python3"`; without it, those that the PATH or pyenv has.
PYTHONS ?= $(foreach version,3.11 3.12 3.13 3.14,python$(version) $(wildcard $(HOME)/.pyenv/versions/$(version).*/bin/python$(version)))
matrix: $(VENV)/ready  ## run a part of the suite on each installed Python, 3.11 to 3.14
	$(INSTALL) --quiet uv
	@for python in $(PYTHONS); do \
		name=$$($$python -c 'import sys; print("{}.{}".format(*sys.version_info))' 2>/dev/null) || continue; \
		case " $$known " in *" $$name "*) continue;; esac; known="$$known $$name"; \
		echo "Python $$name"; \
		$(BIN)/uv venv --clear --quiet --python $$python build/matrix-$$name && \
		$(BIN)/uv pip install --quiet --python build/matrix-$$name --editable '.[all]' --group test && \
		build/matrix-$$name/bin/python -m pytest $(QUICK) $(SOME) || failed="$$failed $$name"; \
	done; echo "ran on:$$known; failed on:$${failed:- none}"; test -z "$$failed"

bench: $(VENV)/ready  ## measure against a bare loop in the same process (ROW=turns: one row; PEERS=1: other frameworks)
	$(BIN)/python -m benchmarks $(if $(PEERS),peers) $(ROW)

soak: $(VENV)/ready  ## run a PART of the suite with its long runs, many random examples, on every loop and store; or PART=all
	@: $(if $(filter all $(PARTS),$(PART)),,$(error say which part: make soak PART=crash, of $(sort $(PARTS)), or all))
	EVERYWHERE=1 $(BIN)/pytest --hypothesis-profile=soak $(SOAK_$(PART))

docs: $(VENV)/ready  ## run every example of README and docs
	$(BIN)/pytest tests/test_docs.py tests/test_pictures.py

site: $(VENV)/ready  ## build the documentation site to build/site, in some minutes
	$(BIN)/python docs/build_site.py build
	@echo "To read it with search: $(BIN)/python -m http.server --directory build/site --bind 127.0.0.1 8001"

reference: $(VENV)/ready  ## write the API reference to build/reference, from the docstrings
	$(BIN)/python docs/reference.py build/reference

diagram: $(VENV)/ready  ## draw the pictures of docs: the machine, timelines, a terminal
	$(BIN)/python tests/draw.py

pictures: $(VENV)/ready  ## take the pictures of the studio in docs, and with FOLDER=... of every page
	$(BIN)/python -m tests.draw_studio $(FOLDER)

vendor:  ## fetch the Markdown parser of the studio from npm again, after a change of its version above
	cd "$$(mktemp -d)" && npm pack --silent markdown-it@$(MARKDOWN_IT) && tar -xzf *.tgz \
	&& cp package/dist/browser/markdown-it.esm.min.mjs $(VENDOR)/markdown-it.js && cp package/LICENSE $(VENDOR)/LICENSE
	echo "$(MARKDOWN_IT_SHA256)  $(VENDOR)/markdown-it.js" | sha256sum --check

format: $(VENV)/ready  ## format and sort
	$(BIN)/ruff check --fix $(SRC)
	$(BIN)/ruff format $(SRC)

clean:  ## remove what the targets made
	rm -rf $(VENV) build .agentfsm .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage* .test-*.log
