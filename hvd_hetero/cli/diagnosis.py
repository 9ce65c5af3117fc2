"""From facts to findings: what is wrong with a set-up, and its remedy. Pure."""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from hvd_hetero.cli.facts import Facts
from hvd_hetero.environment import KNOWN_VARIABLES, unknown_variables

_INSTALL = "run `hvd-hetero install-horovod`"

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True)
class Finding:
    """One thing a person should know. An ``error`` keeps training from starting as asked."""

    severity: Severity
    summary: str
    remedy: str


def diagnose(facts: Facts) -> list[Finding]:
    """All findings, the gravest first."""
    checks: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
        _python,
        _torch,
        _horovod,
        _launcher,
        _mpi4py,
        _cores,
        _variables,
        _launching,
    )
    found = [finding for check in checks for finding in check(facts)]
    order = ("error", "warning", "note")
    return sorted(found, key=lambda finding: order.index(finding.severity))


def _python(facts: Facts) -> Iterator[Finding]:
    if facts.python < (3, 10):
        text = ".".join(map(str, facts.python))
        yield Finding("error", f"Python {text} is too old", "use Python 3.10 or newer")


def _torch(facts: Facts) -> Iterator[Finding]:
    version = facts.versions.get("torch")
    if version is None:
        yield Finding("error", "torch is not installed", "run `pip install torch==2.13.0`")
    elif facts.torch.error:
        yield Finding(
            "error",
            f"torch {version} cannot be used: {facts.torch.error}",
            "install it anew: `pip install --force-reinstall torch==2.13.0`",
        )
    elif _numbers(version) < (2, 1):
        yield Finding(
            "error", f"torch {version} is too old", "install 2.1 or newer, then Horovod anew"
        )


def _horovod(facts: Facts) -> Iterator[Finding]:
    version, probe = facts.versions.get("horovod"), facts.horovod
    if version is None:
        yield Finding("error", "Horovod is not installed", _INSTALL)
        return
    if not version.startswith("0.28."):
        yield Finding(
            "error", f"Horovod {version} is installed; 0.28.1 is what this works with", _INSTALL
        )
    if "gloo_built" not in probe.told:
        yield Finding(
            "error",
            f"horovod.torch cannot be imported: {probe.error}",
            f"it was built for another torch or MPI, or not for torch at all: {_INSTALL}",
        )
        return
    if not probe.told["mpi_built"] and not probe.told["gloo_built"]:
        yield Finding("error", "Horovod was built with neither MPI nor Gloo", _INSTALL)
    if probe.error:
        yield Finding(
            "error",
            f"hvd.init() fails: {probe.error}",
            "start with the launcher of the MPI that Horovod was built with, or build Horovod "
            "again for the MPI at hand: `hvd-hetero install-horovod`",
        )
    if probe.told.get("threads_supported") is False:
        yield Finding(
            "warning",
            "this MPI has no support for several threads (MPI_THREAD_MULTIPLE): mpi4py is not "
            "used beside Horovod",
            "use an MPI built with it (Open MPI from 3 on has it), or `horovodrun --gloo`",
        )
    if facts.torch.told.get("gpus") and not probe.told["nccl_built"]:
        yield Finding(
            "warning",
            "there are GPUs, and Horovod was built without NCCL: tensors travel through the CPU",
            "install NCCL and run `hvd-hetero install-horovod --nccl`",
        )


def _launcher(facts: Facts) -> Iterator[Finding]:
    launched, seen = facts.launched_size, facts.horovod.told.get("size")
    if launched is None or seen is None or launched == seen:
        return
    if seen == 1:
        built = "MPI and Gloo" if facts.horovod.told.get("mpi_built") else "Gloo only"
        yield Finding(
            "error",
            f"the launcher has started {launched} copies that each believe they are alone: "
            f"Horovod (built with {built}) sees size 1",
            "start with the mpirun of the MPI that Horovod was built with "
            f"({_library(facts)}), or with `horovodrun --gloo`; under Slurm use "
            "`srun --mpi=pmix` or mpirun inside the allocation",
        )
    else:
        yield Finding(
            "error",
            f"the launcher speaks of {launched} ranks and Horovod sees {seen}",
            "unset variables left by another launcher: " + ", ".join(_size_variables(facts)),
        )


def _mpi4py(facts: Facts) -> Iterator[Finding]:
    if not facts.horovod.told.get("mpi_built"):
        return
    again = (
        "build it against Horovod's MPI: `MPICC=.../mpicc pip install --no-cache-dir "
        "--force-reinstall --no-binary mpi4py mpi4py`"
    )
    if facts.versions.get("mpi4py") is None:
        yield Finding(
            "note",
            "mpi4py is not installed: step times are gathered by Horovod's own collectives",
            "`pip install mpi4py`, if you want them off Horovod's path",
        )
    elif facts.mpi4py.error:
        yield Finding("warning", f"mpi4py cannot be used: {facts.mpi4py.error}", again)
    elif facts.same_mpi is False:
        libraries = [", ".join(p.told.get("libmpi", [])) for p in (facts.mpi4py, facts.horovod)]
        yield Finding(
            "warning",
            f"mpi4py loads another MPI ({libraries[0]}) than Horovod ({libraries[1]}): a script "
            "that imports both may crash",
            again,
        )


def _cores(facts: Facts) -> Iterator[Finding]:
    cores, threads = len(facts.cores), facts.threads
    if threads > cores:
        setting = facts.environment.get("OMP_NUM_THREADS")
        source = f"OMP_NUM_THREADS={setting}" if setting else f"torch uses {threads} threads"
        yield Finding(
            "warning",
            f"{source}, and this process may use {cores} core(s): threads wait for each other",
            f"set OMP_NUM_THREADS={cores}, or let the process use more cores (`--bind-to none`, "
            "or `--map-by slot:PE=N` for N cores a rank)",
        )
    hosts = defaultdict(list)
    for peer in facts.horovod.told.get("peers", []):
        hosts[peer["host"]].append(peer)
    for host, peers in sorted(hosts.items()):
        shared = len({core for peer in peers for core in peer["cores"]})
        wanted = sum(peer["threads"] for peer in peers)
        if len(peers) > 1 and wanted > shared:
            yield Finding(
                "warning",
                f"{len(peers)} ranks on {host} want {wanted} threads and share {shared} core(s): "
                "their measured speeds depend on each other",
                "start fewer ranks there, lower OMP_NUM_THREADS, or check how ranks are bound "
                "(`--report-bindings`)",
            )


def _variables(facts: Facts) -> Iterator[Finding]:
    for name in unknown_variables(facts.environment):
        close = difflib.get_close_matches(name, KNOWN_VARIABLES, n=1)
        remedy = f"did you mean {close[0]}?" if close else "unset it"
        known = ", ".join(KNOWN_VARIABLES)
        yield Finding(
            "warning", f"{name} is set and means nothing here", f"{remedy} (known: {known})"
        )


def _launching(facts: Facts) -> Iterator[Finding]:
    """The usual three refusals of a launcher, before anybody meets them."""
    if facts.mpi is None or facts.mpi.flavour != "Open MPI" or facts.launched_size is not None:
        return
    yield Finding(
        "note",
        f"mpirun refuses more than {len(facts.cores)} ranks here as `not enough slots`",
        "`--oversubscribe`, or slots in `-H host:N`, or `slots=N` in a hostfile",
    )
    if facts.is_root and not facts.environment.get("OMPI_ALLOW_RUN_AS_ROOT"):
        yield Finding(
            "note",
            "mpirun refuses to run as root",
            "`--allow-run-as-root`, or OMPI_ALLOW_RUN_AS_ROOT=1 and "
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
        )
    if _numbers(facts.mpi.version) >= (5, 0):
        yield Finding(
            "note",
            "Open MPI 5 does not take the options that `horovodrun --mpi` gives it",
            '`horovodrun --mpi --binding-args="--bind-to none --map-by slot" ...`',
        )


def _library(facts: Facts) -> str:
    return ", ".join(facts.horovod.told.get("libmpi", [])) or "none"


def _size_variables(facts: Facts) -> list[str]:
    return [name for name in facts.environment if name.endswith(("_SIZE", "_NTASKS"))]


def _numbers(version: str) -> tuple[int, int]:
    parts = (*version.split("."), "0", "0")[:2]
    digits = ["".join(c for c in part if c.isdigit()) or "0" for part in parts]
    return int(digits[0]), int(digits[1])
