"""Wrong arguments of everything public: an error that names option and value, at once.

One process: ``hvd.init()`` works without a launcher.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import hvd_hetero as het
from hvd_hetero.compression.spec import Adaptive
from hvd_hetero.errors import (
    BatchAccountingError,
    ConfigurationError,
    HeteroError,
    InfeasibleBatchError,
    UnsupportedError,
)

hvd = pytest.importorskip("horovod.torch")

NAN, INFINITE = math.nan, math.inf
NOT_WHOLE = ("8", 2.5, True, None, NAN)
NOT_POSITIVE = ("1", True, None, 0, -1, NAN, INFINITE)


@pytest.fixture(autouse=True, scope="module")
def _horovod() -> None:
    hvd.init()


def net() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))


def wrap(model: torch.nn.Module | None = None, **options: Any) -> Any:
    """DistributedOptimizer around SGD, with compression unless told otherwise."""
    model = net() if model is None else model
    options.setdefault("optimizer", torch.optim.SGD(model.parameters(), lr=0.1))
    options.setdefault("named_parameters", list(model.named_parameters()))
    options.setdefault("compression", het.Compression.topk(2))
    return het.DistributedOptimizer(**options)


def balancer(**options: Any) -> Any:
    return het.Balancer(**{"global_batch_size": 8, **options})


def data(samples: int = 16) -> TensorDataset:
    return TensorDataset(torch.zeros(samples, 4))


def refused(
    call: Callable[[], object], option: str, value: Any, error: type[Exception] = ConfigurationError
) -> str:
    """Check that ``call`` raises an error with the option's name and the value; return its text."""
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    assert isinstance(caught.value, HeteroError)
    assert option in message
    shown = [value, *value] if isinstance(value, list) else [value]
    assert any(str(one) in message or repr(one) in message for one in shown)
    assert len(message) > len(f"{option}={value!r}: "), "no remedy"
    return message


def cases(table: dict[str, tuple[Any, ...]]) -> list[Any]:
    return [
        pytest.param(option, value, id=f"{option}-{str(value)[:30]}")
        for option, values in table.items()
        for value in values
    ]


# ---- Compression --------------------------------------------------------------------------------

ADAPTIVE = {
    "policy": ("GraVAC", "accordion", None, 1),
    "dense_steps": (*NOT_WHOLE, -1),
    "values": ("fp16", "float64", None, 16),
    "exchange": ("dense", "ring", None, 1),
    "do_no_harm": ("yes", 1, None),
    "objective": ("loss", None, 1),
    "kappa": ("1", -0.1, NAN, INFINITE, True),
    "rho_exponent": ("1", -0.1, NAN, INFINITE, True),
    "max_rho": ("1", 0, -1, NAN, INFINITE, None),
    "min_cf": ("10", 0.99, 0, -1, NAN, INFINITE, None, True),
    "max_cf": ("10", 0.5, NAN, INFINITE, None, True),
    "eps": ("0.5", 0, -0.1, 1.01, NAN, None, True),
    "omega": ("0", -0.1, NAN, INFINITE, None),
    "window": (*NOT_WHOLE, 0, -3),
    "scaling": ("linear", None, 2),
    "scaling_factor": ("2", 1.0, 0, -2, NAN, INFINITE, None),
    "critical_change": ("0.5", 0, -1, NAN, INFINITE, None),
    "dense_wait_windows": (*NOT_WHOLE, 0),
    "dense_margin": ("0", -0.01, NAN, INFINITE, None),
    "flush_steps": (*NOT_WHOLE, 0),
}


@pytest.mark.parametrize("cf", ["10", 0.99, 0, -5, NAN, INFINITE, None, True, [10]])
def test_topk_refuses(cf: Any) -> None:
    """Bad input: cf < 1 and what is no number."""
    refused(lambda: het.Compression.topk(cf), "cf=", cf)


@pytest.mark.parametrize(("option", "value"), cases(ADAPTIVE))
def test_adaptive_refuses(option: str, value: Any) -> None:
    """Bad input: eps outside (0, 1], cf < 1, and so on."""
    refused(lambda: het.Compression.adaptive(**{option: value}), f"{option}=", value)


def test_adaptive_refuses_crossed_limits_and_unknown_options() -> None:
    """Two options that contradict each other, and one that does not exist."""
    message = refused(lambda: het.Compression.adaptive(min_cf=100, max_cf=10), "max_cf=", 10)
    assert "min_cf=100" in message
    with pytest.raises(TypeError, match="epsilon"):
        het.Compression.adaptive(epsilon=0.5)


def test_every_option_of_adaptive_is_covered() -> None:
    """An option added later needs its wrong values here."""
    assert set(ADAPTIVE) == set(inspect.signature(Adaptive).parameters)


@pytest.mark.parametrize("spec", [het.Compression.topk(10), het.Compression.adaptive()])
def test_our_compression_in_the_stock_optimizer_is_refused(spec: Any) -> None:
    """DESIGN 3.8: a stock Compressor sees one tensor; the error names our optimizer."""
    with pytest.raises(UnsupportedError, match=r"hvd_hetero\.DistributedOptimizer"):
        spec.compress(torch.ones(3))
    with pytest.raises(UnsupportedError, match=r"hvd_hetero\.DistributedOptimizer"):
        spec.decompress(torch.ones(3), 0)


# ---- Balancer -----------------------------------------------------------------------------------

BALANCER = {
    "global_batch_size": (*NOT_WHOLE, 0, -8, [8]),
    "min_local_batch": ("8", 2.5, True, NAN, 0, -1, [1, 2], [0], "ab", ["1"]),
    "max_local_batch": ("8", 2.5, True, NAN, 0, -1, [8, 8], [0]),
    "granule": (*NOT_WHOLE, 0),
    "fixed_local_batches": (8, "8", [4, 4], [0], [8.0], [-8], []),
    "window_steps": (*NOT_WHOLE, 0),
    "min_gain": ("0", -0.1, 1.0, 2, NAN, None, True),
    "min_interval_windows": ("3", -1, 1.5, None, True),
    "seed": (*NOT_WHOLE, -1),
    "profile": (5, True, ["a"], ""),
    "exchange_timeout_seconds": NOT_POSITIVE,
}


@pytest.mark.parametrize(("option", "value"), cases(BALANCER))
def test_balancer_refuses(option: str, value: Any) -> None:
    """Bad input: wrong types and ranges of every argument, each under its own name."""
    refused(lambda: balancer(**{option: value}), option, value)


@pytest.mark.parametrize(
    ("options", "numbers"),
    [
        ({"min_local_batch": 9}, ("global_batch_size=8", "9")),
        ({"max_local_batch": 7}, ("global_batch_size=8", "7")),
        ({"max_local_batch": [7]}, ("global_batch_size=8", "7")),
        ({"fixed_local_batches": [6]}, ("fixed_local_batches", "6", "8")),
        ({"fixed_local_batches": [8], "max_local_batch": 8, "global_batch_size": 9}, ("9", "8")),
    ],
)
def test_balancer_refuses_what_cannot_be_met(
    options: dict[str, Any], numbers: tuple[str, ...]
) -> None:
    """Bad input: a global batch below the sum of minimum batches, bounds that cannot meet it."""
    with pytest.raises(InfeasibleBatchError) as caught:
        balancer(**options)
    assert all(number in str(caught.value) for number in numbers)


def test_balancer_refuses_crossed_bounds() -> None:
    with pytest.raises(ConfigurationError, match="minimum local batch 5 is above its maximum 4"):
        balancer(min_local_batch=5, max_local_batch=4)


def test_every_argument_of_the_balancer_is_covered() -> None:
    """An argument added later needs its wrong values here."""
    assert set(BALANCER) == set(inspect.signature(het.Balancer).parameters)


class Stream(IterableDataset[int]):
    """A data set without indices."""

    def __iter__(self) -> Any:
        return iter(range(8))


class Lengthless:
    """A data set that does not say its length."""

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize("dataset", [Stream(), Lengthless(), None, 5.5])
@pytest.mark.parametrize("maker", ["data_loader", "batch_sampler"])
def test_data_sets_without_indices_are_refused(maker: str, dataset: Any) -> None:
    """The error names the kind of data set, and set_batch as the way out."""
    message = refused(
        lambda: getattr(balancer(), maker)(dataset), "dataset=", type(dataset).__name__
    )
    assert "set_batch" in message


@pytest.mark.parametrize(
    ("option", "value"),
    cases(
        {
            "shuffle": ("yes", 1, None),
            "drop_last": ("no", 0, None),
            "in_order": (False,),
            "batch_size": (8,),
            "sampler": (7, iter([0, 1]), [0, "a"], [0, 1.5], [0, True], [0, 16], [-1, 0]),
            "weigh": ("tokens", 1, True),
            "batch_sampler": ([[0, 1]],),
        }
    ),
)
def test_data_loader_refuses(option: str, value: Any) -> None:
    """Bad input: in_order=False, and DataLoader's arguments that the plan decides."""
    refused(lambda: list(balancer().data_loader(data(), **{option: value})), option, _shown(value))


def _shown(value: Any) -> Any:
    """What the error shows of a sampler: the first of its indices that is none."""
    return value[-1] if isinstance(value, list) and value[0] == 0 else value


@pytest.mark.parametrize("option", ["shuffle", "drop_last"])
def test_batch_sampler_refuses(option: str) -> None:
    refused(lambda: balancer().batch_sampler(16, **{option: "yes"}), f"{option}=", "yes")


@pytest.mark.parametrize("samples", [True, -1])
def test_batch_sampler_refuses_a_wrong_number_of_samples(samples: Any) -> None:
    refused(lambda: balancer().batch_sampler(samples), "dataset_samples=", samples)


def test_data_set_smaller_than_the_bounds() -> None:
    """No batch can be cut from it: an error with the numbers instead of an empty epoch."""
    with pytest.raises(InfeasibleBatchError, match="3"):
        balancer(min_local_batch=4).data_loader(data(3))


def test_second_loader_is_refused() -> None:
    """DESIGN 6: one optimizer listens to one loader."""
    one = balancer()
    one.data_loader(data())
    with pytest.raises(ConfigurationError, match="create another Balancer"):
        one.data_loader(data())
    with pytest.raises(ConfigurationError, match="create another Balancer"):
        one.batch_sampler(16)


def test_a_refused_loader_leaves_the_balancer_free() -> None:
    """After a wrong option the corrected call works."""
    one = balancer()
    with pytest.raises(ConfigurationError, match="in_order"):
        one.data_loader(data(), in_order=False)
    with pytest.raises(ValueError, match="num_workers"):
        one.data_loader(data(), num_workers=-1)
    assert len(one.data_loader(data())) == 2


@pytest.mark.parametrize("samples", ["8", True, None, 0, -1, NAN, INFINITE, [8]])
def test_set_batch_refuses(samples: Any) -> None:
    refused(lambda: balancer().set_batch(samples), "samples=", samples)


@pytest.mark.parametrize(
    "weight", ["8", True, -1, NAN, INFINITE, [8], torch.zeros(2), torch.tensor(True)]
)
def test_set_batch_refuses_a_weight(weight: Any) -> None:
    refused(lambda: balancer().set_batch(4, weight), "weight=", repr(weight))
    refused(lambda: balancer().set_batch(4, weight=0), "weight=", 0)


@pytest.mark.parametrize("weight", ["8", True, None, -1, NAN, INFINITE, [8], torch.zeros(2), 0])
def test_a_wrong_weight_of_a_batch(weight: Any) -> None:
    """The error names rank and value; the pass over the loader has ended with it."""
    batches = iter(balancer().data_loader(data(), weigh=lambda _: weight))
    message = refused(lambda: next(batches), "weigh(batch)=", repr(weight))
    assert message.startswith("rank 0: ")
    with pytest.raises(BatchAccountingError, match="failed before"):
        next(batches)


def test_a_weight_may_be_a_count_in_a_tensor() -> None:
    one = balancer()
    for (x,) in one.data_loader(data(), weigh=lambda batch: (batch[0] == 0).sum()):
        batch = one.batch_of_pass()
        assert (batch.own, batch.total, batch.samples) == (4.0 * len(x), 4.0 * len(x), len(x))
    one.set_batch(3, weight=torch.tensor([5]))
    batch = one.batch_of_pass()
    assert (batch.own, batch.total, batch.samples) == (5.0, 5.0, 3)


@pytest.mark.parametrize("loss", [1.5, None, torch.tensor(3)])
def test_weigh_loss_refuses(loss: Any) -> None:
    model, one = net(), balancer()
    wrap(model, balancer=one, loss_weighted=True)
    one.set_batch(8)
    refused(lambda: one.weigh_loss(loss), "loss=", repr(loss))


def test_weighed_losses_and_clipping_of_a_ranks_own_gradient() -> None:
    """Where gradients hold parts of other ranks' losses no rank has one of its own."""
    with pytest.raises(UnsupportedError, match=r"local_clip_norm=1\.0.*loss_weighted=True"):
        wrap(balancer=balancer(), loss_weighted=True, local_clip_norm=1.0)


@pytest.mark.parametrize("epoch", ["1", True, None, -1, 0.5])
def test_set_epoch_refuses(epoch: Any) -> None:
    """With and without a loader, on the balancer and on the loader."""
    one = balancer()
    refused(lambda: one.set_epoch(epoch), "epoch=", epoch)
    loader = one.data_loader(data())
    refused(lambda: one.set_epoch(epoch), "epoch=", epoch)
    refused(lambda: loader.set_epoch(epoch), "epoch=", epoch)


# ---- DistributedOptimizer -----------------------------------------------------------------------

OPTIMIZER = {
    "optimizer": ("SGD", None, 3),
    "compression": ("topk", 10, None, 0.5, het.Compression),
    "backward_passes_per_step": (*NOT_WHOLE, 0, -1),
    "op": ("mean", 17, None, True),
    "gradient_predivide_factor": ("2", 0, -1, NAN, None),
    "num_groups": ("2", -1, 1.5, None),
    "sparse_as_dense": ("yes", 1, None),
    "balancer": (512, "balancer", het.Balancer),
    "loss_reduction": ("none", "average", None, 1),
    "loss_divided_by_passes": ("yes", 1, 0),
    "loss_weighted": ("yes", 1, None, True),  # True needs a balancer
    "grad_scaler": ("scaler", 1024.0, True, torch.amp.GradScaler),
    "local_clip_norm": ("1", True, 0, -1, NAN, INFINITE),
    "bucket_bytes": (*NOT_WHOLE, 0, -1),
    "exchange_timeout_seconds": NOT_POSITIVE,
    "drift_check_steps": ("5", 2.5, True, 0, -1),
    "log": (3, True, "", b"bytes", ["a"]),
    "replay": (3, True, "", b"bytes", ["a"]),
}
UNSUPPORTED = {
    "groups": (2, [[]]),
    "num_groups": (2,),
    "op": (hvd.Adasum,),
    "gradient_predivide_factor": (2.0,),
    "process_set": (hvd.ProcessSet([0]), "global", None),
}


@pytest.mark.parametrize("compression", [het.Compression.topk(2), het.Compression.none])
@pytest.mark.parametrize(("option", "value"), cases(OPTIMIZER))
def test_optimizer_refuses(option: str, value: Any, compression: Any) -> None:
    """Bad input: wrong types and ranges of every argument, on our path and on Horovod's own."""
    options = {"compression": compression, option: value}
    shown = type(value).__name__ if option == "optimizer" else value
    refused(lambda: wrap(**options), option, shown)


@pytest.mark.parametrize(("option", "value"), cases(UNSUPPORTED))
def test_optimizer_refuses_unsupported(option: str, value: Any) -> None:
    """DESIGN 3.8: groups, Adasum, process sets, each with a sentence."""
    for own in (
        {"compression": het.Compression.topk(2)},
        {"compression": het.Compression.none, "balancer": balancer()},
        {"compression": het.Compression.fp16, "local_clip_norm": 1.0},
    ):
        name = "Adasum" if value == hvd.Adasum and option == "op" else value
        options = {**own, option: value}
        refused(partial(wrap, **options), option, name, UnsupportedError)


def test_every_argument_of_the_optimizer_is_covered() -> None:
    """An argument added later needs its wrong values here."""
    covered = set(OPTIMIZER) | set(UNSUPPORTED) | {"named_parameters"}
    assert covered == set(inspect.signature(het.DistributedOptimizer).parameters)


def test_names_are_checked() -> None:
    """S07: bare tensors, a missing name and a name given twice."""
    model = net()
    named = list(model.named_parameters())
    with pytest.raises(ConfigurationError, match=r"bare tensor of shape \(8, 4\).*pairs"):
        wrap(model, named_parameters=list(model.parameters()))
    with pytest.raises(ConfigurationError, match=r"shape \(1,\) in parameter group 0, position 3"):
        wrap(model, named_parameters=named[:-1])
    with pytest.raises(ConfigurationError, match=r"'a' to two parameters.*prefix"):
        wrap(model, named_parameters=[("a", p) for p in model.parameters()])
    with pytest.raises(ConfigurationError, match="named_parameters holds int 3"):
        wrap(model, named_parameters=[3])


def test_not_iterable_names_are_refused() -> None:
    refused(lambda: wrap(named_parameters=5), "named_parameters", 5)


def test_complex_parameters_are_refused() -> None:
    """S24: at wrap time, with name and dtype."""
    model = torch.nn.Module()
    model.phase = torch.nn.Parameter(torch.ones(3, dtype=torch.complex64))
    with pytest.raises(UnsupportedError, match=r"'phase' is complex \(torch\.complex64\)"):
        wrap(model)


def test_wrapping_twice_is_refused() -> None:
    """The wrapped optimizer again, and another optimizer over the same parameters."""
    model = net()
    wrapped = wrap(model)
    with pytest.raises(ConfigurationError, match="wrapped by Horovod already"):
        wrap(model, optimizer=wrapped)
    with pytest.raises(ConfigurationError, match=r"'0\.weight' belongs to a wrapped optimizer"):
        wrap(model)


def test_second_optimizer_on_one_balancer_is_refused() -> None:
    """DESIGN 6: one optimizer listens to one loader; the second can be wrapped with its own."""
    one = balancer()
    wrap(balancer=one)
    model = net()
    with pytest.raises(ConfigurationError, match=r"already serves the optimizer.*another Balancer"):
        wrap(model, balancer=one)
    wrap(model, balancer=balancer())


def test_passes_with_a_balancer_need_to_know_who_divides() -> None:
    """A11: nobody can guess it; the same rule holds when passes are changed later."""
    with pytest.raises(ConfigurationError, match="loss_divided_by_passes=True or False"):
        wrap(balancer=balancer(), backward_passes_per_step=2)
    wrapped = wrap(balancer=balancer())
    with pytest.raises(ConfigurationError, match="loss_divided_by_passes"):
        wrapped.set_backward_passes_per_step(2)
    for passes in (0, "2", 1.5, None):
        refused(
            partial(wrapped.set_backward_passes_per_step, passes),
            "backward_passes_per_step",
            passes,
        )


def test_step_with_closure_is_refused() -> None:
    """DESIGN 3.8."""
    with pytest.raises(UnsupportedError, match=r"step\(closure\)"):
        wrap().step(lambda: 0.0)


def test_backward_without_a_known_batch_is_refused() -> None:
    """DESIGN 6: a plain DataLoader over batch_sampler() without set_batch raises at once."""
    one, model = balancer(), net()
    plain = DataLoader(data(), batch_sampler=one.batch_sampler(data()))
    wrapped = wrap(model, balancer=one)
    (x,) = next(iter(plain))
    with pytest.raises(BatchAccountingError, match=r"data_loader\(\.\.\.\).*set_batch\(samples="):
        model(x).mean().backward()
    wrapped.zero_grad()
    one.set_batch(samples=len(x))
    model(x).mean().backward()
    wrapped.step()
    with pytest.raises(BatchAccountingError):  # said for one step only
        model(x).mean().backward()


def test_batch_of_a_finished_epoch_is_not_known() -> None:
    """A backward pass after the loop belongs to no batch of the loader."""
    one, model = balancer(), net()
    loader = one.data_loader(data())
    wrapped = wrap(model, balancer=one)
    for (x,) in loader:
        wrapped.zero_grad()
        model(x).mean().backward()
        wrapped.step()
    with pytest.raises(BatchAccountingError, match="does not know"):
        model(torch.zeros(2, 4)).mean().backward()


@pytest.mark.parametrize("by", ["argument", "path", "variable"])
def test_log_that_cannot_be_written(by: str, tmp_path: Path, monkeypatch: Any) -> None:
    """Found at construction: the error names the file, the option and the variable."""
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "records.jsonl"
    log = {"argument": str(path), "path": path, "variable": None}[by]
    if by == "variable":
        monkeypatch.setenv("HVD_HETERO_LOG", str(path))
    message = refused(lambda: wrap(log=log), "log=", path)
    assert "HVD_HETERO_LOG" in message


def test_log_may_be_a_path(tmp_path: Path) -> None:
    """A pathlib path is as good as a text, and its folders are made."""
    path = tmp_path / "runs" / "records.jsonl"
    wrap(log=path)
    assert '"compression"' in path.read_text()
