"""Starts a script on N ranks of this machine: ``python tools/mpirun.py -n 4 SCRIPT ARGUMENTS``.

It is the ``mpirun`` beside the MPI compiler that Horovod was built with, and the options which that
MPI needs to run more ranks than there are cores.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hvd_hetero.cli.mpi import find_mpi, is_open_mpi


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-n", type=int, default=4, metavar="N", help="ranks (default 4)")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args()

    # A system's MPI first, as in tools/setup_environment.py: PyPI's is installed without one.
    beside = str(Path(sys.executable).parent)
    mpi = find_mpi(os.environ.get("PATH", "") + os.pathsep + beside)
    if mpi is None or mpi.launcher is None:
        sys.exit("mpirun is missing: run `make install`")
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    command = [mpi.launcher, "-n", str(options.n)]
    if is_open_mpi(mpi):
        command += ["--oversubscribe", "--bind-to", "none"]
        environment.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
        if os.geteuid() == 0:
            command.append("--allow-run-as-root")
    command += [sys.executable, options.script, *options.arguments]
    os.execve(mpi.launcher, command, environment)


if __name__ == "__main__":
    main()
