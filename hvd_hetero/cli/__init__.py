"""The command ``hvd-hetero``: parse, call, print.

Installing and the doctor work without Horovod, MPI and torch, for they put them in place and tell
what is missing; planning needs numpy. Horovod and mpi4py are only ever imported in child processes.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from hvd_hetero.errors import HeteroError


def parser() -> argparse.ArgumentParser:
    """The command line of ``hvd-hetero``; each command sets ``run`` to a function of the result."""
    from hvd_hetero.cli import doctor, install_horovod, plan, simulate

    result = argparse.ArgumentParser(
        prog="hvd-hetero", description="Uneven batches and compression for Horovod + PyTorch."
    )
    commands = result.add_subparsers(metavar="COMMAND", required=True)
    install_horovod.add_parser(commands)
    doctor.add_parser(commands)
    plan.add_parser(commands)
    simulate.add_parser(commands)
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status. A HeteroError becomes one sentence on stderr."""
    options = parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except HeteroError as error:
        print(f"hvd-hetero: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # as behind `| head`; Python would complain again when it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print(
            "hvd-hetero: interrupted; nothing was changed that a second call minds", file=sys.stderr
        )
        return 130
