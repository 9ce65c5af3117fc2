"""``hvd-hetero doctor``: says what is installed, what is wrong, and how to mend it."""

from __future__ import annotations

import argparse
import json

from hvd_hetero.cli.diagnosis import Finding, diagnose
from hvd_hetero.cli.facts import Facts, collect


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "doctor",
        help="check the installation, the launcher and the cores",
        description=(
            "Checks versions, MPI, how Horovod was built, cores and threads, and, when it is "
            "itself started by a launcher, whether the ranks find each other. Ends with 1 when "
            "training could not start."
        ),
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quiet", action="store_true", help="print errors only")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Collect, diagnose, print; 1 when there is an error among the findings."""
    facts = collect()
    findings = diagnose(facts)
    failed = any(finding.severity == "error" for finding in findings)
    if options.json:
        report = {"facts": facts.to_dict(), "findings": [vars(f) for f in findings]}
        print(json.dumps(report, indent=1))
    elif options.quiet or (facts.launched_rank or 0) > 0:
        # Of many ranks the first one tells; the others speak up when something is wrong.
        print(*(_lines(f) for f in findings if f.severity == "error"), sep="\n", end="")
    else:
        print(describe(facts, findings))
    return 1 if failed else 0


def describe(facts: Facts, findings: list[Finding]) -> str:
    """The report for a person."""
    told = facts.horovod.told
    names = {"mpi_built": "MPI", "gloo_built": "Gloo", "nccl_built": "NCCL"}
    built = " ".join(
        f"{name}:{'yes' if told[key] else 'no'}" for key, name in names.items() if told
    )
    seen = f"{told['size']} over {told['controller']}" if "size" in told else "-"
    threads = {True: "yes", False: "no", None: "-"}[told.get("threads_supported")]
    same = {True: "Horovod's", False: "not Horovod's", None: "-"}[facts.same_mpi]
    setting = facts.environment.get("OMP_NUM_THREADS", "not set")
    versions = {name: version or "not installed" for name, version in facts.versions.items()}
    rows = {
        "Python": f"{'.'.join(map(str, facts.python))} ({facts.executable})",
        "hvd_hetero": versions["hvd_hetero"],
        "torch": f"{versions['torch']}, GPUs: {facts.torch.told.get('gpus', '-')}",
        "Horovod": versions["horovod"],
        "  built with": built or "-",
        "  MPI library": ", ".join(told.get("libmpi", [])) or "-",
        "  MPI threads": threads,
        "mpi4py": f"{versions['mpi4py']}, MPI: {same}",
        "MPI on PATH": str(facts.mpi) if facts.mpi else "none",
        "cores": f"{len(facts.cores)}; OMP_NUM_THREADS {setting}, torch threads {facts.threads}",
        "launcher": f"size {facts.launched_size}" if facts.launched_size else "none",
        "size seen": seen,
    }
    lines = [f"{name:14} {value}" for name, value in rows.items()]
    lines += ["", *(_lines(finding) for finding in findings)]
    if not any(finding.severity == "error" for finding in findings):
        lines.append("Training can start.")
    return "\n".join(lines)


def _lines(finding: Finding) -> str:
    return f"{finding.severity}: {finding.summary}\n    -> {finding.remedy}\n"
