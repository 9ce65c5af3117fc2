"""Runs a command on every host of a lab, one Horovod rank each.

python -m benchmarks.lab --hosts 4 --rate 200mbit [--cpu 0.8,0.4,0.4,0.2] python train.py
"""

from __future__ import annotations

import argparse
import sys

from benchmarks.lab.launch import LAUNCHERS, LaunchError, run_ranks
from benchmarks.lab.network import Lab, LabError, why_not


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.lab", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rate", default="200mbit", help="of every link (default 200mbit)")
    parser.add_argument("--cpu", default="", help="cores of each host, by commas; no limit if none")
    parser.add_argument("--launcher", choices=LAUNCHERS, default="gloo")
    parser.add_argument("--lab-name", default="hetlab")
    parser.add_argument("--lab-subnet", default="10.98.0")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    if not options.command:
        parser.error("give a command")
    problem = why_not()
    if problem:
        sys.exit(f"no lab: {problem}")
    try:
        with Lab(
            options.hosts,
            options.rate,
            name=options.lab_name,
            subnet=options.lab_subnet,
            cpu_shares=[float(share) for share in options.cpu.split(",") if share],
        ) as lab:
            sys.stdout.write(
                run_ranks(
                    options.command,
                    options.hosts,
                    lab=lab,
                    launcher=options.launcher,
                    timeout_seconds=options.timeout,
                )
            )
    except (LabError, LaunchError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
