# Every target sets up .venv first; a second call installs nothing again.
#
#   make install   the set-up alone          TORCH_SPEC=torch==2.13.0  the torch to install
#   make test      the whole test suite      PYTHON=python3            the Python to set up with
#   make demo      the mixed-cluster demo    PYTEST_ARGS, DEMO_ARGS    handed on
#   make lint      ruff and mypy

PYTHON ?= python3
TORCH_SPEC ?= torch==2.13.0
PYTEST_ARGS ?= -v
DEMO_RANKS ?= 4
DEMO_ARGS ?=
export TORCH_SPEC

VENV := .venv/bin

.PHONY: install test demo lint

install:
	@command -v $(PYTHON) > /dev/null || { echo "set-up: there is no $(PYTHON): install Python 3.10" \
		"or newer (on Debian: apt-get install python3 python3-venv python3-dev) or name one by" \
		"PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit("set-up: Python %d.%d is too old: name one from 3.10 on, for \
	example by make PYTHON=python3.11" % sys.version_info[:2] if sys.version_info < (3, 10) else 0)'
	@$(PYTHON) tools/setup_environment.py

test: install
	@$(VENV)/python -m pytest $(PYTEST_ARGS)

demo: install
	@$(VENV)/python tools/mpirun.py -n $(DEMO_RANKS) examples/mixed_cluster.py \
		$$([ -t 1 ] && echo --progress rich) $(DEMO_ARGS)

lint: install
	@$(VENV)/ruff check .
	@$(VENV)/ruff format --check .
	@$(VENV)/mypy
