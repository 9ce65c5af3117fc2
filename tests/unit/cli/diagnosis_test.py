"""The doctor's judgement: facts in, findings out."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from hvd_hetero.cli.diagnosis import Finding, diagnose
from hvd_hetero.cli.facts import Facts, Probe, read_probe
from hvd_hetero.cli.mpi import Mpi

HOROVOD = {
    "mpi_built": True,
    "gloo_built": True,
    "nccl_built": False,
    "libmpi": ["/mpi/libmpi.so.40"],
    "size": 1,
    "controller": "MPI",
    "threads_supported": True,
}
HEALTHY = Facts(
    python=(3, 11, 7),
    executable="/v/bin/python",
    versions={"torch": "2.13.0+cpu", "horovod": "0.28.1", "mpi4py": "4.1.2", "numpy": "2.4"},
    torch=Probe({"threads": 2, "gpus": 0}),
    horovod=Probe(HOROVOD),
    mpi4py=Probe({"libmpi": ["/mpi/libmpi.so.40"]}),
    mpi=Mpi("/mpi/bin/mpicxx", "/mpi/bin/mpirun", "Open MPI", "4.1.4"),
    cores=(0, 1),
    environment={},
    is_root=False,
)


def _but(**changes: Any) -> list[Finding]:
    return diagnose(dataclasses.replace(HEALTHY, **changes))


def _horovod(**changes: Any) -> Probe:
    return Probe({**HOROVOD, **changes})


def _one(findings: list[Finding], severity: str, part: str) -> Finding:
    matching = [f for f in findings if f.severity == severity and part in f.summary]
    assert len(matching) == 1, findings
    assert matching[0].remedy
    return matching[0]


def test_a_healthy_setup_has_no_complaint() -> None:
    """Only notes, for what mpirun will refuse later."""
    assert {finding.severity for finding in diagnose(HEALTHY)} == {"note"}


@pytest.mark.parametrize(
    ("name", "probe"), [("torch", "torch"), ("horovod", "horovod")], ids=["torch", "horovod"]
)
def test_missing_packages(name: str, probe: str) -> None:
    """Works without Horovod and without torch, and says how to get them."""
    findings = _but(
        versions={**HEALTHY.versions, name: None}, **{probe: Probe(error="not installed")}
    )
    found = _one(findings, "error", "is not installed")
    assert "install" in found.remedy


def test_horovod_that_does_not_import() -> None:
    """S52: built against another torch."""
    broken = Probe(error="ImportError: undefined symbol: _ZN3c10")
    found = _one(_but(horovod=broken), "error", "undefined symbol")
    assert "hvd-hetero install-horovod" in found.remedy


def test_init_that_crashes() -> None:
    """A crash of the child is a finding; what it told before still counts."""
    told = {key: HOROVOD[key] for key in ("mpi_built", "gloo_built", "nccl_built", "libmpi")}
    found = _one(_but(horovod=Probe(told, "crashed by signal 11")), "error", "hvd.init() fails")
    assert "signal 11" in found.summary


@pytest.mark.parametrize(
    "variable", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "HOROVOD_SIZE", "SLURM_NTASKS"]
)
def test_copies_that_believe_they_are_alone(variable: str) -> None:
    """A launcher of another MPI than Horovod's starts N jobs of one rank each."""
    environment = {variable: "4", "SLURM_STEP_ID": "0"}
    _one(_but(environment=environment), "error", "4 copies that each believe they are alone")
    joined = _but(environment=environment, horovod=_horovod(size=4))
    assert not [finding for finding in joined if finding.severity == "error"]


def test_a_batch_script_is_no_rank() -> None:
    """SLURM_NTASKS also stands in the batch script itself, outside any step."""
    findings = _but(environment={"SLURM_NTASKS": "4"})
    assert not [finding for finding in findings if finding.severity == "error"]


def test_sizes_that_differ() -> None:
    """Variables that an outer launcher has left behind."""
    findings = _but(environment={"PMI_SIZE": "8"}, horovod=_horovod(size=2))
    assert "PMI_SIZE" in _one(findings, "error", "8 ranks and Horovod sees 2").remedy


def test_more_threads_than_cores() -> None:
    """S50: started under `taskset -c 0` with OMP_NUM_THREADS=8."""
    findings = _but(
        cores=(0,), environment={"OMP_NUM_THREADS": "8"}, torch=Probe({"threads": 8, "gpus": 0})
    )
    found = _one(findings, "warning", "OMP_NUM_THREADS=8, and this process may use 1 core")
    assert "OMP_NUM_THREADS=1" in found.remedy


def _peer(host: str, cores: list[int], threads: int = 1) -> dict[str, Any]:
    return {"host": host, "cores": cores, "threads": threads}


def test_ranks_that_share_cores() -> None:
    """S50: two ranks on one core set; two ranks on a core each, or a host each, are fine."""
    environment = {"OMPI_COMM_WORLD_SIZE": "2"}

    def findings(*peers: dict[str, Any]) -> list[Finding]:
        return _but(environment=environment, horovod=_horovod(size=2, peers=list(peers)))

    shared = findings(_peer("a", [0]), _peer("a", [0]))
    _one(shared, "warning", "2 ranks on a want 2 threads and share 1 core")
    _one(findings(_peer("a", [0, 1], 2), _peer("a", [0, 1], 2)), "warning", "want 4 threads")
    assert not [f for f in findings(_peer("a", [0]), _peer("a", [1])) if f.severity == "warning"]
    assert not [f for f in findings(_peer("a", [0]), _peer("b", [0])) if f.severity == "warning"]


def test_mpi4py_of_another_mpi() -> None:
    """S47: two MPI libraries in one process."""
    found = _one(
        _but(mpi4py=Probe({"libmpi": ["/usr/lib/libmpich.so.12"]})), "warning", "another MPI"
    )
    assert "MPICC" in found.remedy


def test_mpi_without_threads() -> None:
    """S47: a clear warning, no crash."""
    _one(_but(horovod=_horovod(threads_supported=False)), "warning", "MPI_THREAD_MULTIPLE")


def test_gpus_without_nccl() -> None:
    """Tensors on GPUs would travel through the CPU."""
    found = _one(_but(torch=Probe({"threads": 1, "gpus": 2})), "warning", "without NCCL")
    assert "--nccl" in found.remedy


def test_unknown_variables() -> None:
    """A mistyped setting is named, with the one that was meant."""
    findings = _but(environment={"HVD_HETERO_LOGS": "x", "HVD_HETERO_LOG": "y"})
    found = _one(findings, "warning", "HVD_HETERO_LOGS is set")
    assert "did you mean HVD_HETERO_LOG?" in found.remedy


def test_the_three_usual_refusals_of_mpirun() -> None:
    """S51: slots, root, and Open MPI 5's options, each with its remedy."""
    mpi = Mpi("/mpi/bin/mpicxx", "/mpi/bin/mpirun", "Open MPI", "5.0.11")
    findings = _but(mpi=mpi, is_root=True)
    assert "--oversubscribe" in _one(findings, "note", "not enough slots").remedy
    assert "--allow-run-as-root" in _one(findings, "note", "as root").remedy
    assert "--binding-args" in _one(findings, "note", "Open MPI 5").remedy


def test_reading_a_probe() -> None:
    """Noise of libraries between and after the facts does not hide them, nor the reason."""
    output = 'noise\nFACTS {"a": 1}\nmore\nFACTS {"b": [2]}\n'
    assert read_probe(output, "", 0) == Probe({"a": 1, "b": [2]})
    assert read_probe(output, "", -11) == Probe({"a": 1, "b": [2]}, "crashed by signal 11")
    assert "no answer" in (read_probe("", "", None).error or "")
    errors = 'Traceback:\n  File "x"\nImportError: libmpi.so: no such file\n[host] bye\n'
    assert read_probe("", errors, 1).error == "ImportError: libmpi.so: no such file"
