"""What must hold before anything is built: Horovod's version, its state, the environment."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import hvd_hetero as het
from hvd_hetero.errors import ConfigurationError, HorovodUnavailableError, UnsupportedError

hvd = pytest.importorskip("horovod.torch")

import horovod  # noqa: E402

from hvd_hetero.runtime import collectives  # noqa: E402


def _optimizer() -> Any:
    model = torch.nn.Linear(2, 1)
    return het.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
    )


def _balancer() -> Any:
    return het.Balancer(global_batch_size=4)


USES = [pytest.param(_balancer, id="balancer"), pytest.param(_optimizer, id="optimizer")]


@pytest.fixture(autouse=True)
def _horovod() -> Iterator[None]:
    hvd.init()
    yield


@pytest.mark.parametrize("use", USES)
def test_use_before_init(use: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Bad input: the error says what to call, before anything else of Horovod is asked."""
    monkeypatch.setattr(hvd, "is_initialized", lambda: False)
    with pytest.raises(ConfigurationError, match=r"call hvd\.init\(\) before"):
        use()


@pytest.mark.parametrize("version", ["0.27.0", "0.19.5", "1.0.0", "0.281.0"])
@pytest.mark.parametrize("use", USES)
def test_another_horovod(
    use: Callable[[], Any], version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A06: both versions and the recipe are named."""
    monkeypatch.setattr(horovod, "__version__", version)
    with pytest.raises(
        HorovodUnavailableError, match=rf"Horovod {version} .*0\.28\.x.*hvd-hetero install-horovod"
    ):
        use()


@pytest.mark.parametrize("version", ["0.28.0", "0.28.1", "0.28.1+local"])
def test_the_supported_horovod(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(horovod, "__version__", version)
    collectives.check_horovod()


@pytest.mark.parametrize("name", ["_make_hook", "_allreduce_grad_async", "skip_synchronize"])
@pytest.mark.parametrize("use", USES)
def test_a_horovod_without_what_we_rely_on(
    use: Callable[[], Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DESIGN 3.1: checked at construction, the missing method is named."""
    monkeypatch.delattr(horovod.torch.optimizer._DistributedOptimizer, name)
    with pytest.raises(HorovodUnavailableError, match=f"has no {name} in its Distr.*install-horo"):
        use()


@pytest.mark.parametrize(
    ("name", "horovod_code", "reason"),
    [
        ("Balancer", "__version__ = '0.19.5'", "Horovod 0.19.5 is installed"),
        ("DistributedOptimizer", "raise ImportError('undefined symbol')", "undefined symbol"),
        ("Compression.none", "raise OSError('libmpi.so: not found')", "libmpi.so: not found"),
    ],
)
def test_import_of_an_unusable_horovod(
    name: str, horovod_code: str, reason: str, tmp_path: Any
) -> None:
    """S52: whichever name is used first, one line with the reason and the recipe."""
    package = tmp_path / "horovod"
    (package / "torch").mkdir(parents=True)
    (package / "__init__.py").write_text(horovod_code)
    (package / "torch" / "__init__.py").write_text("optimizer = object()\n")
    (package / "torch" / "mpi_ops.py").write_text("HorovodInternalError = RuntimeError\n")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import hvd_hetero\n"
        "try:\n"
        f"    hvd_hetero.{name}\n"
        "except ImportError as error:\n"
        "    print(type(error).__name__, error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    (line,) = done.stdout.splitlines()
    assert line.startswith("HorovodUnavailableError")
    assert reason in line
    assert "hvd-hetero install-horovod" in line


@pytest.mark.parametrize("use", USES)
def test_elastic_mode_is_refused(use: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A28: refused at start when elastic mode is on."""
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    with pytest.raises(UnsupportedError, match=r"HOROVOD_ELASTIC=1.*fixed number of ranks"):
        use()


@pytest.mark.parametrize("use", USES)
def test_unknown_variables_are_warned_of_once(
    use: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Conventions: warn of HVD_HETERO_* variables nobody reads, not of those that are known."""
    monkeypatch.setattr(collectives, "_warned_of", set())
    monkeypatch.setenv("HVD_HETERO_LGO", "/tmp/records.jsonl")
    monkeypatch.setenv("HVD_HETERO_LOG", "")
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "1")
    with caplog.at_level(logging.WARNING, logger="hvd_hetero"):
        use()
        use()
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= 30]
    assert len(warnings) == 1
    assert warnings[0].startswith("HVD_HETERO_LGO is set")
    assert "it knows HVD_HETERO_LOG" in warnings[0]


def test_join_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """S38, A04: refused where it is called once an exchange of ours exists, and not before."""
    calls: list[str] = []
    monkeypatch.setattr(hvd, "join", lambda: calls.append("stock"))
    model = torch.nn.Linear(2, 1)
    _optimizer()  # on Horovod's own path
    hvd.join()
    assert calls == ["stock"]
    het.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), compression=het.Compression.topk(2)
    )
    with pytest.raises(UnsupportedError, match=r"join\(\) cannot.*Balancer\(\.\.\.\).data_loader"):
        hvd.join()
    assert calls == ["stock"]
