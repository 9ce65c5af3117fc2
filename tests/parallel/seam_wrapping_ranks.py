"""What the ranks of seam_wrapping_test.py do: wrapping, names, refusals, and unusual parameters."""

# torch has no types for backward(), and says "Tensor | Module" for what a module holds.
# mypy: disable-error-code="no-untyped-call, union-attr, operator, index, misc"

from __future__ import annotations

import copy
import inspect
import io
import os
import pickle
import warnings
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import horovod.torch as hvd
import torch
from horovod.torch.optimizer import _DistributedOptimizer
from torch import Tensor, nn

import hvd_hetero as het
from tests.parallel.seam_tools import (
    Scenario,
    adamw,
    check_close,
    check_differ,
    check_same_on_all_ranks,
    classifier,
    exchanger_of,
    exchanges,
    gather,
    joined_batch,
    loss_of,
    no_warnings,
    one_process,
    own_batch,
    raises,
    recorded,
    registrar,
    residuals,
    run_scenarios,
    sgd,
    steps_counted,
    train,
    wrap,
)

SCENARIOS: dict[str, Scenario] = {}
scenario = registrar(SCENARIOS)


def run(only: list[str] | None = None) -> dict[str, str]:
    return run_scenarios(SCENARIOS, only or ())


def dense() -> Any:
    """Our exchange without loss: CF 1 is an allreduce of every bucket."""
    return het.Compression.topk(1)


def plain_sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


# ---- signature and class ------------------------------------------------------------------------


@scenario(1, 2)
def plain_tensors() -> None:
    """An optimizer over leaf tensors that are no nn.Parameter is wrapped as any other."""
    for compression in (het.Compression.none, het.Compression.topk(4)):
        weight = torch.zeros(40, requires_grad=True)
        balancer = het.Balancer(2 * hvd.size())
        optimizer = het.DistributedOptimizer(
            torch.optim.SGD([weight], lr=1.0), compression=compression, balancer=balancer
        )
        balancer.set_batch(samples=2)
        (weight * (1.0 + hvd.rank())).sum().backward()
        optimizer.step()
        mean = sum(1.0 + rank for rank in range(hvd.size())) / hvd.size()
        assert float(weight.detach().min()) == -mean
        assert hvd.size() == 1 or compression is het.Compression.none or (weight == 0).any()


@scenario(1, 2)
def positional_order() -> None:
    """S17: Horovod's parameters come first, in its order, with its defaults; ours are keyword-only
    and a call by position means the same."""
    stock = inspect.signature(hvd.DistributedOptimizer).parameters
    ours = inspect.signature(het.DistributedOptimizer).parameters
    assert list(ours)[: len(stock)] == list(stock)
    for name, parameter in stock.items():
        assert ours[name].default == parameter.default, name
        assert ours[name].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    for name in list(ours)[len(stock) :]:
        assert ours[name].kind is inspect.Parameter.KEYWORD_ONLY, name
    models = [classifier(), classifier()]
    for model, factory in zip(
        models, (het.DistributedOptimizer, hvd.DistributedOptimizer), strict=True
    ):
        optimizer = factory(
            sgd(model),
            model.named_parameters(),
            hvd.Compression.none if factory is hvd.DistributedOptimizer else dense(),
            2,
            hvd.Sum,
            1.0,
            0,
            None,
            True,
            hvd.global_process_set,
        )
        assert optimizer.backward_passes_per_step == 2
        assert optimizer.op == hvd.Sum and optimizer.sparse_as_dense is True
        for step in range(2):
            optimizer.zero_grad()
            loss_of(model, own_batch(2 * step)).backward()
            loss_of(model, own_batch(2 * step + 1)).backward()
            optimizer.step()
    check_close(models[0], models[1])


def _calls_like(one: Any, other: Any) -> bool:
    """Every call of the first is one of the second: equal parameters, or anything goes."""
    ours = list(inspect.signature(other).parameters.values())
    if [p.kind for p in ours] == [inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD]:
        return True
    theirs = list(inspect.signature(one).parameters.values())
    return [(p.name, p.default) for p in theirs] == [(p.name, p.default) for p in ours]


@scenario(1, 2)
def kind_of_result() -> None:
    """S15, A15: the result is an optimizer of the user's class with torch's signatures, and has
    the user's defaults and groups."""
    model = classifier()
    groups: list[dict[str, Any]] = [
        {"params": model[0].parameters(), "lr": 0.5},
        {"params": model[2].parameters()},
    ]
    plain = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    for compression in (het.Compression.none, dense()):
        optimizer = wrap(model, plain, compression=compression)
        assert issubclass(type(optimizer), torch.optim.SGD)
        assert type(optimizer).__name__ == "SGD" and type(optimizer) is not torch.optim.SGD
        assert optimizer.defaults == plain.defaults and optimizer.defaults["momentum"] == 0.9
        assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.1]
        assert repr(optimizer).startswith("SGD")
        for method in ("zero_grad", "load_state_dict", "add_param_group"):
            assert _calls_like(getattr(plain, method), getattr(optimizer, method)), method
        with optimizer.skip_synchronize():
            pass


@scenario(1, 2)
def horovods_own_path() -> None:
    """Rule 13: none and fp16 without a balancer are Horovod's own objects, methods and numbers."""
    assert het.Compression.none is hvd.Compression.none
    assert het.Compression.fp16 is hvd.Compression.fp16
    gradient_path = ("synchronize", "step", "_allreduce_grad_async", "_make_hook")
    for compression in (het.Compression.none, het.Compression.fp16):
        models = [classifier(dtype=torch.float32), classifier(dtype=torch.float32)]
        ours = wrap(models[0], adamw(models[0]), compression=compression)
        stock = hvd.DistributedOptimizer(
            adamw(models[1]), models[1].named_parameters(), compression=compression
        )
        assert not hasattr(ours, "_hetero") and ours._compression is compression
        for name in gradient_path:
            mine = inspect.unwrap(getattr(type(ours), name))  # torch wraps step to profile it
            assert mine is getattr(_DistributedOptimizer, name), name
        seen_by = []
        for model, optimizer in zip(models, (ours, stock), strict=True):
            with recorded() as seen:
                train(model, optimizer, range(4), lambda step: own_batch(step, 4, torch.float32))
            seen_by.append(sorted(seen, key=str))
        assert seen_by[0] == seen_by[1]
        check_close(models[0], models[1], 0)
        loss_of(models[0], own_batch(9, 4, torch.float32)).backward()
        if hvd.size() > 1:  # Horovod's own guard of its own path
            with raises(AssertionError, "zero_grad"):
                ours.zero_grad()
        ours.synchronize()
    for options in (
        {"compression": dense()},
        {"balancer": het.Balancer(4)},
        {"local_clip_norm": 1.0},
    ):
        model = classifier()
        optimizer = wrap(model, sgd(model), **options)
        assert type(optimizer).synchronize is not _DistributedOptimizer.synchronize


@scenario(2)
def half_floats_on_our_path() -> None:
    """Rule 13: fp16 with a balancer travels as half floats on our path, one value for each."""
    model, reference = classifier(), classifier()
    balancer = het.Balancer(4, fixed_local_batches=(3, 1))
    optimizer = wrap(model, sgd(model), compression=het.Compression.fp16, balancer=balancer)
    plain = sgd(reference)
    with recorded() as seen:
        for step in range(3):
            balancer.set_batch((3, 1)[hvd.rank()])
            train(model, optimizer, [step], lambda step: own_batch(step, (3, 1)[hvd.rank()]))
            train(reference, plain, [step], lambda step: joined_batch(step, (3, 1)))
    assert {one.dtype for one in exchanges(seen)} == {"torch.float16"}, seen
    check_close(model, reference, 2e-3)
    check_same_on_all_ranks(model)


# ---- names --------------------------------------------------------------------------------------


@scenario(1, 2)
def names_are_made() -> None:
    """S06: without names, and with several groups, names are unique, equal on all ranks, and the
    optimizer works."""
    for compression in (het.Compression.none, dense()):
        model = classifier()
        groups = [{"params": layer.parameters()} for layer in (model[0], model[2])]
        plain = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        optimizer = wrap(model, plain, named_parameters=None, compression=compression)
        names = sorted(optimizer._parameter_names.values())
        assert len(set(names)) == 4, names
        assert gather(names) == [names] * hvd.size()
        train(model, optimizer, range(3))
        check_close(model, one_process(sgd, range(3)))


@scenario(1, 2)
def names_are_checked() -> None:
    """S07: a missing name is told by shape and group, bare tensors, a name given twice and things
    that are no pairs by what they are; more names than parameters are fine."""
    model = classifier()
    pairs = list(model.named_parameters())
    for compression in (het.Compression.none, dense()):
        options: dict[str, Any] = {"compression": compression}
        with raises(het.ConfigurationError, "(3, 8)", "group 0", "position 2"):
            wrap(model, sgd(model), named_parameters=pairs[:2] + pairs[3:], **options)
        with raises(het.ConfigurationError, "bare tensor of shape (8, 6)", "pairs"):
            wrap(model, sgd(model), named_parameters=list(model.parameters()), **options)
        with raises(het.ConfigurationError, "'0.weight'", "two parameters", "prefix"):
            twice = [("0.weight", parameter) for parameter in model.parameters()]
            wrap(model, sgd(model), named_parameters=twice, **options)
        with raises(het.ConfigurationError, "pairs"):
            wrap(model, sgd(model), named_parameters=["0.weight"], **options)
        extra = [*pairs, ("other", nn.Parameter(torch.zeros(2)))]
        wrap(model, sgd(model), named_parameters=iter(extra), **options)
        model = classifier()
        pairs = list(model.named_parameters())


@scenario(1, 2)
def shared_parameters() -> None:
    """S08: a parameter given to a second wrapped optimizer is refused at once, by name; after its
    own end a model may be wrapped anew."""
    first = classifier()
    keep = wrap(first, sgd(first), compression=dense())
    with raises(het.ConfigurationError, "'0.weight'", "one optimizer"):
        wrap(first, sgd(first), compression=dense())
    both = nn.Sequential(classifier(1), first)
    with raises(het.ConfigurationError, "one optimizer"):
        wrap(both, sgd(both), compression=dense())
    train(first, keep, range(2))
    check_close(first, one_process(sgd, range(2)))


@scenario(1, 2)
def tied_weights() -> None:
    """S22: a tied weight, listed once or twice, has one place, one residual and one send."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.inner = nn.Linear(6, 6, bias=False).double()
            self.outer = nn.Linear(6, 6, bias=False).double()
            self.outer.weight = self.inner.weight
            self.head = nn.Linear(6, 3).double()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.outer(torch.tanh(self.inner(x))))
            return out

    reference = Tied()
    train(reference, sgd(reference), range(3), joined_batch)
    for remove_duplicate in (True, False):
        for compression in (dense(), het.Compression.topk(4)):
            model = Tied()
            names = list(model.named_parameters(remove_duplicate=remove_duplicate))
            optimizer = wrap(model, sgd(model), named_parameters=names, compression=compression)
            buckets = exchanger_of(optimizer).buckets
            assert sum(bucket.elements for bucket in buckets) == 36 + 21
            with recorded() as seen:
                train(model, optimizer, range(3))
            assert len(seen) == (0 if hvd.size() == 1 else 3)
            if compression == dense():
                check_close(model, reference)
            check_same_on_all_ranks(model)


class Lookahead(torch.optim.Optimizer):
    """Holds an inner optimizer and every k steps goes halfway back to where it came from."""

    def __init__(self, inner: torch.optim.Optimizer, k: int = 2) -> None:
        self.inner, self.k, self.steps = inner, k, 0
        self.param_groups = inner.param_groups
        self.defaults, self.state = inner.defaults, inner.state
        parameters = [p for group in inner.param_groups for p in group["params"]]
        self.slow = [(p, p.detach().clone()) for p in parameters]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()
        self.steps += 1
        if self.steps % self.k == 0:
            with torch.no_grad():
                for fast, slow in self.slow:
                    slow.add_(fast - slow, alpha=0.5)
                    fast.copy_(slow)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)


@scenario(1, 2)
def lookahead() -> None:
    """S09: an optimizer that holds another is refused with its class's name; the way the message
    proposes works."""
    for compression in (het.Compression.none, dense()):
        model = classifier()
        with raises(TypeError, "Lookahead", "Wrap the inner"):
            wrap(model, Lookahead(sgd(model)), compression=compression)
    reference = classifier()
    train(reference, Lookahead(sgd(reference)), range(4), joined_batch)
    model = classifier()
    train(model, Lookahead(wrap(model, sgd(model), compression=dense())), range(4))
    check_close(model, reference)


# ---- broadcasts and optimizer state -------------------------------------------------------------


@scenario(1, 2)
def broadcast_of_fresh_state() -> None:
    """S10, rule 10: the documented order of broadcasts, on fresh optimizers: no exchange, no step
    counted, residuals empty, ranks bit-equal, then training as usual."""
    fresh: list[Callable[[nn.Module], torch.optim.Optimizer]] = [
        lambda model: torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        lambda model: torch.optim.Adam(model.parameters(), lr=0.1, amsgrad=True),
    ]
    for make in fresh:
        model = classifier(seed=hvd.rank())
        optimizer = wrap(model, make(model), compression=het.Compression.topk(4))
        with recorded() as seen:
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        assert {one.kind for one in seen} <= {"broadcast"}, seen
        assert steps_counted(optimizer) == 0
        assert exchanger_of(optimizer).sent_bytes == 0
        assert exchanger_of(optimizer).nonfinite_steps == 0
        assert all(not residual.any() for residual in residuals(optimizer))
        check_same_on_all_ranks(model)
        # Stock Horovod makes the same step with zero gradients, so weights may decay by it once.
        stock_model = classifier(seed=0)
        stock = hvd.DistributedOptimizer(make(stock_model), stock_model.named_parameters())
        hvd.broadcast_optimizer_state(stock, root_rank=0)
        check_close(model, stock_model, 0)
        train(model, optimizer, range(2))
        assert steps_counted(optimizer) == 2
        check_same_on_all_ranks(model)


@scenario(1, 2)
def state_from_before_wrapping() -> None:
    """Rule 1, S10: state and defaults of the user's optimizer survive wrapping, also where only
    rank 0 has loaded them and broadcasts."""
    reference = classifier()
    plain = adamw(reference)
    train(reference, plain, range(3), joined_batch)
    saved = copy.deepcopy((reference.state_dict(), plain.state_dict()))
    train(reference, plain, range(3, 6), joined_batch)
    for loaded_by_all in (True, False):
        model = classifier(seed=hvd.rank() + 5)
        resumed = adamw(model)
        if loaded_by_all or hvd.rank() == 0:
            model.load_state_dict(saved[0])
            resumed.load_state_dict(copy.deepcopy(saved[1]))
        optimizer = wrap(model, resumed, compression=dense())
        if loaded_by_all or hvd.rank() == 0:
            assert len(optimizer.state) == 4
        # In this order, as a rank without state makes a step that decays its weights.
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        train(model, optimizer, range(3, 6))
        check_close(model, reference)


# ---- frozen, unfrozen, added --------------------------------------------------------------------


def _without_first_layer(model: nn.Sequential) -> nn.Sequential:
    model[0].requires_grad_(False)
    return model


@scenario(1, 2)
def frozen() -> None:
    """S11, rule 2: frozen parameters inside the optimizer stay bit-equal and have no collective."""
    for compression in (het.Compression.none, dense(), het.Compression.topk(2)):
        model = _without_first_layer(classifier())
        weights = [p.detach().clone() for p in model[0].parameters()]
        optimizer = wrap(model, adamw(model), compression=compression, bucket_bytes=1)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        before = [p.detach().clone() for p in model[2].parameters()]
        with recorded() as seen:
            train(model, optimizer, range(3))
        check_close(model[0], weights, 0)
        check_differ(model[2], before)
        assert len(seen) == (0 if hvd.size() == 1 else 6), seen
        assert not any("0.weight" in str(one.name) for one in seen)


@scenario(1, 2)
def unfrozen() -> None:
    """S12, rule 7: a layer unfrozen while training gets hooks and buckets and equals one process,
    whether before zero_grad or after it, and with several passes per step."""
    for passes in (1, 2):
        for late in (False, True):
            for compression in (dense(), het.Compression.topk(2)):
                model = _without_first_layer(classifier())
                reference = _without_first_layer(classifier())
                optimizer = wrap(
                    model, sgd(model), compression=compression, backward_passes_per_step=passes
                )
                plain = sgd(reference)
                weights = [p.detach().clone() for p in model[0].parameters()]
                for step in range(6):
                    if step == 3 and not late:
                        check_close(model[0], weights, 0)
                        model[0].requires_grad_(True)
                        reference[0].requires_grad_(True)
                    optimizer.zero_grad()
                    plain.zero_grad()
                    if step == 3 and late:
                        model[0].requires_grad_(True)
                        reference[0].requires_grad_(True)
                    for number in range(passes):
                        loss_of(model, own_batch(10 * step + number)).backward()
                        loss_of(reference, joined_batch(10 * step + number)).backward()
                    optimizer.step()
                    plain.step()
                if compression == dense():
                    check_close(model, reference)
                check_differ(model[0], weights)
                check_same_on_all_ranks(model)
                assert sum(b.elements for b in exchanger_of(optimizer).buckets) == 48 + 8 + 27


@scenario(1, 2)
def added_group() -> None:
    """S12, rule 7: add_param_group after wrapping, in the middle of training: equal to one
    process, with compression and several passes equal on all ranks."""
    for passes in (1, 2):
        for compression in (dense(), het.Compression.topk(2)):
            model, reference = classifier(), classifier()
            plain = torch.optim.SGD(reference[2].parameters(), lr=0.1, momentum=0.9)
            inner = torch.optim.SGD(model[2].parameters(), lr=0.1, momentum=0.9)
            optimizer = wrap(model, inner, compression=compression, backward_passes_per_step=passes)
            before = [p.detach().clone() for p in model[0].parameters()]
            for step in range(6):
                if step == 3:
                    group = {"params": list(model[0].parameters()), "lr": 0.05}
                    optimizer.add_param_group(group)
                    plain.add_param_group({"params": reference[0].parameters(), "lr": 0.05})
                optimizer.zero_grad()
                plain.zero_grad()
                if step < 3:  # not the optimizer's, so nobody else clears them
                    model[0].zero_grad()
                    reference[0].zero_grad()
                for number in range(passes):
                    loss_of(model, own_batch(10 * step + number)).backward()
                    loss_of(reference, joined_batch(10 * step + number)).backward()
                optimizer.step()
                plain.step()
            if compression == dense():
                check_close(model, reference)
            check_differ(model[0], before)
            check_same_on_all_ranks(model)
            assert optimizer._parameter_names[model[0].weight] == "0.weight"


@scenario(2)
def joining_parameters_are_compared() -> None:
    """Rule 7: ranks that unfreeze different parameters hear of it at once, all of them."""
    model = _without_first_layer(classifier())
    optimizer = wrap(model, sgd(model), compression=dense())
    train(model, optimizer, range(1))
    (model[0].weight if hvd.rank() == 0 else model[0].bias).requires_grad_(True)
    with raises(het.RankMismatchError, "parameters that joined", "0.weight", "0.bias"):
        optimizer.zero_grad()


@scenario(2)
def layouts_are_compared() -> None:
    """Rule 2, S46: parameters or options that differ between ranks are found when wrapping, by all
    ranks, with the name and both values."""
    rank = hvd.rank()
    for compression in (het.Compression.none, dense()):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3 + rank))
        with raises(het.RankMismatchError, "1.weight", "(3, 8)", "(4, 8)"):
            wrap(model, sgd(model), compression=compression)
        model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
        if rank == 1:
            model[0].weight.requires_grad_(False)
        with raises(het.RankMismatchError, "0.weight", "frozen"):
            wrap(model, sgd(model), compression=compression)
        if rank == 1:
            model.double()
        model.requires_grad_(True)
        with raises(het.RankMismatchError, "0.weight", "torch.float32", "torch.float64"):
            wrap(model, sgd(model), compression=compression)
        with raises(het.RankMismatchError, "backward_passes_per_step", "1", "2"):
            wrap(
                one := classifier(),
                sgd(one),
                compression=compression,
                backward_passes_per_step=1 + rank,
            )
    with raises(het.RankMismatchError, "compression.min_cf", "2.0", "4.0"):
        wrap(one := classifier(), sgd(one), compression=het.Compression.topk(2 + 2 * rank))


# ---- saving, copying, schedulers ----------------------------------------------------------------


@scenario(1, 2)
def saving_and_copying() -> None:
    """S14: state dicts of the optimizer and of schedulers are saved; copying or pickling the
    optimizer itself says what to do instead."""
    for compression in (het.Compression.none, dense()):
        model = classifier()
        optimizer = wrap(model, sgd(model), compression=compression)
        train(model, optimizer, range(2))
        stored = io.BytesIO()
        torch.save(optimizer.state_dict(), stored)
        stored.seek(0)
        other = classifier()
        other.load_state_dict(model.state_dict())
        resumed = wrap(other, sgd(other), compression=compression)
        resumed.load_state_dict(torch.load(stored))
        train(model, optimizer, range(2, 4))
        train(other, resumed, range(2, 4))
        check_close(model, other, 0)
        for attempt in (copy.deepcopy, copy.copy, pickle.dumps):
            with raises(TypeError, "SGD", "state_dict()"):
                attempt(optimizer)
        with raises(TypeError, "state_dict()"):
            torch.save(optimizer, io.BytesIO())
        schedulers = torch.optim.lr_scheduler
        for scheduler in (
            schedulers.OneCycleLR(optimizer, max_lr=0.1, total_steps=10),
            schedulers.StepLR(optimizer, 2),
            schedulers.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
            schedulers.ReduceLROnPlateau(optimizer),
        ):
            torch.save(scheduler.state_dict(), io.BytesIO())
            scheduler.load_state_dict(scheduler.state_dict())


@scenario(1, 2)
def schedulers() -> None:
    """S15: schedulers made before or after wrapping drive the wrapped optimizer, without warnings;
    OneCycleLR finds the momentum."""
    makers: list[Callable[[Any], Any]] = [
        lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=0.2, total_steps=12
        ),
        lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6),
    ]
    for make in makers:
        reference = classifier()
        plain = sgd(reference)
        expected = _scheduled(reference, plain, make(plain), joined_batch)
        for compression in (het.Compression.none, dense()):
            for made_before in (True, False):
                model = classifier()
                with no_warnings():
                    inner = sgd(model)
                    scheduler = make(inner) if made_before else None
                    optimizer = wrap(model, inner, compression=compression)
                    scheduler = scheduler or make(optimizer)
                    rates = _scheduled(model, optimizer, scheduler, own_batch)
                assert rates == expected, (rates, expected)
                check_close(model, reference)


def _scheduled(model: nn.Module, optimizer: Any, scheduler: Any, batch: Any) -> list[Any]:
    rates = []
    for epoch in range(3):
        train(model, optimizer, range(2 * epoch, 2 * epoch + 2), batch)
        scheduler.step()
        group = optimizer.param_groups[0]
        rates.append((group["lr"], group["momentum"]))
    return rates


# ---- refusals -----------------------------------------------------------------------------------


@scenario(1, 2)
def refusals() -> None:
    """Rule 8: what cannot be combined is refused when wrapping, with a sentence that names it."""
    model = classifier()
    own_paths: list[dict[str, Any]] = [{"compression": dense()}, {"local_clip_norm": 1.0}]
    own_paths.append({"balancer": het.Balancer(4)})
    refused: list[tuple[dict[str, Any], tuple[str, ...]]] = [
        ({"groups": 2}, ("groups=2", "bucket_bytes")),
        ({"groups": [list(model.parameters())]}, ("groups=", "bucket_bytes")),
        ({"num_groups": 2}, ("num_groups=2", "bucket_bytes")),
        ({"op": hvd.Adasum}, ("op=Adasum", "hvd.Average")),
        ({"process_set": hvd.ProcessSet([0])}, ("process_set", "global_process_set")),
        ({"gradient_predivide_factor": 2.0}, ("gradient_predivide_factor=2.0", "1.0")),
    ]
    for path in own_paths:
        for options, words in refused:
            with raises(het.UnsupportedError, *words):
                wrap(model, sgd(model), **path, **options)
    wrong: list[tuple[dict[str, Any], tuple[str, ...]]] = [
        ({"compression": 3}, ("compression=3", ".topk(cf)")),
        ({"compression": het.Compression}, ("compression=", ".topk(cf)")),
        ({"balancer": 4}, ("balancer=4", "Balancer")),
        ({"backward_passes_per_step": 0}, ("backward_passes_per_step=0",)),
        ({"backward_passes_per_step": 1.5}, ("backward_passes_per_step=1.5",)),
        ({"op": hvd.Max}, ("op=", "hvd.Average")),
        ({"local_clip_norm": 0.0}, ("local_clip_norm=0.0",)),
        ({"local_clip_norm": "1"}, ("local_clip_norm='1'",)),
        ({"loss_reduction": "none"}, ("loss_reduction='none'", "'mean'", "'sum'")),
        ({"bucket_bytes": 0}, ("bucket_bytes=0",)),
        ({"exchange_timeout_seconds": 0}, ("exchange_timeout_seconds=0",)),
        ({"drift_check_steps": 0}, ("drift_check_steps=0",)),
        ({"sparse_as_dense": 1}, ("sparse_as_dense=1", "True or False")),
        (
            {"balancer": het.Balancer(4), "backward_passes_per_step": 2},
            ("loss_divided_by_passes", "backward_passes_per_step=2"),
        ),
    ]
    for options, words in wrong:
        with raises(het.ConfigurationError, *words):
            wrap(model, sgd(model), **options)
    with raises(het.ConfigurationError, "optimizer=Sequential", "torch.optim.Optimizer"):
        het.DistributedOptimizer(model)  # type: ignore[arg-type]
    wrapped = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
    with raises(het.ConfigurationError, "wrapped by Horovod already"):
        wrap(model, wrapped)


@scenario(1, 2)
def elastic_mode() -> None:
    """Rule 8, A28: elastic mode is refused at the first use, on both paths."""
    model = classifier()
    with mock.patch.dict(os.environ, {"HOROVOD_ELASTIC": "1"}):
        for options in ({}, {"compression": dense()}):
            with raises(het.UnsupportedError, "HOROVOD_ELASTIC=1", "fixed number of ranks"):
                wrap(model, sgd(model), **options)
        with raises(het.UnsupportedError, "HOROVOD_ELASTIC=1"):
            het.Balancer(4)


@scenario(1, 2)
def complex_parameters() -> None:
    """S24, rule 8: complex parameters are refused when wrapping, by name, with the way out."""
    model = nn.Module()
    model.phase = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    for options in ({}, {"compression": dense()}):
        with raises(het.UnsupportedError, "'phase'", "torch.complex64", "view_as_real"):
            wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)


@scenario(2)
def our_compression_in_the_stock_optimizer() -> None:
    """Rule 8: Compression.topk handed to Horovod's own wrapper says where it belongs."""
    for compression in (het.Compression.topk(4), het.Compression.adaptive()):
        model = classifier()
        stock = hvd.DistributedOptimizer(
            sgd(model), model.named_parameters(), compression=compression
        )
        with raises(het.UnsupportedError, "hvd_hetero.DistributedOptimizer"):
            train(model, stock, range(1))


@scenario(1, 2)
def closures() -> None:
    """Rule 8: step(closure) is refused before anything is exchanged; None is no closure."""
    model = classifier()
    optimizer = wrap(model, sgd(model), compression=dense())
    optimizer.zero_grad()
    loss_of(model, own_batch(0)).backward()
    with recorded() as seen, raises(het.UnsupportedError, "step(closure)"):
        optimizer.step(lambda: loss_of(model, own_batch(0)))
    assert not exchanges(seen)
    optimizer.step(None)
    check_close(model, one_process(sgd, range(1)))


@scenario(1, 2)
def one_loader_one_optimizer() -> None:
    """Rule 6: a balancer serves one optimizer; a backward pass of unknown samples is an error."""
    balancer = het.Balancer(4)
    first, second = classifier(), classifier()
    optimizer = wrap(first, sgd(first), balancer=balancer)
    with raises(het.ConfigurationError, "another Balancer"):
        wrap(second, sgd(second), balancer=balancer)
    optimizer.zero_grad()
    with raises(het.BatchAccountingError, "set_batch"):
        loss_of(first, own_batch(0)).backward()
    optimizer.zero_grad()
    for step in range(2):
        balancer.set_batch(4)
        train(first, optimizer, [step])
    check_close(first, one_process(sgd, range(2)))


# ---- kinds of parameters ------------------------------------------------------------------------


@scenario(1, 2)
def dtypes() -> None:
    """S23: bf16, fp16, float32 and float64 parameters, alone and mixed: finite, equal on ranks,
    and as exact as their type allows; residuals of half types are float32."""
    tolerances = {
        torch.bfloat16: 2e-2,
        torch.float16: 2e-3,
        torch.float32: 1e-6,
        torch.float64: 1e-12,
    }
    for dtype, tolerance in tolerances.items():
        reference = classifier(dtype=dtype).double()
        plain_optimizer = plain_sgd(reference)
        train(
            reference,
            plain_optimizer,
            range(2),
            lambda step, dtype=dtype: (
                joined_batch(step, dtype=dtype)[0].double(),
                joined_batch(step)[1],
            ),
        )
        for compression in (dense(), het.Compression.topk(4)):
            model = classifier(dtype=dtype)
            optimizer = wrap(model, plain_sgd(model), compression=compression)
            train(
                model, optimizer, range(2), lambda step, dtype=dtype: own_batch(step, dtype=dtype)
            )
            assert all(p.dtype == dtype for p in model.parameters())
            kept = exchanger_of(optimizer).buckets[0].feedback.residual.dtype
            assert kept == (torch.float64 if dtype == torch.float64 else torch.float32)
            if compression == dense():
                check_close([p.double() for p in model.parameters()], reference, tolerance)
            check_same_on_all_ranks(model)

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            kinds = enumerate(tolerances)
            self.parts = nn.ModuleList(classifier(seed, dtype) for seed, dtype in kinds)

        def forward(self, x: Tensor) -> Tensor:
            outputs = [part(x.to(part[0].weight.dtype)).double() for part in self.parts]
            return torch.stack(outputs).sum(0)

    mixed = Mixed()
    optimizer = wrap(mixed, plain_sgd(mixed), compression=het.Compression.topk(4))
    layout = [
        {member.parameter.dtype for member in bucket.members}
        for bucket in exchanger_of(optimizer).buckets
    ]
    assert [len(kinds) for kinds in layout] == [1] * len(tolerances), layout
    train(mixed, optimizer, range(3))
    check_same_on_all_ranks(mixed)


@scenario(1, 2)
def channels_last() -> None:
    """A25: channels_last weights keep their layout and equal one process."""

    def convolution() -> nn.Sequential:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 2 * 2, 3))
        return model.to(dtype=torch.float64, memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]

    def images(x: Tensor) -> Tensor:
        wide = torch.cat([x, x.sin(), x.cos(), x**2, x.tanh(), -x, x + 1, x - 1], 1)
        return wide.reshape(-1, 3, 4, 4).to(memory_format=torch.channels_last)

    def own(step: int) -> tuple[Tensor, Tensor]:
        x, y = own_batch(step)
        return images(x), y

    def joined(step: int) -> tuple[Tensor, Tensor]:
        x, y = joined_batch(step)
        return images(x), y

    reference = convolution()
    train(reference, sgd(reference), range(3), joined)
    for compression in (dense(), het.Compression.topk(4)):
        model = convolution()
        optimizer = wrap(model, sgd(model), compression=compression)
        train(model, optimizer, range(3), own)
        assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
        if compression == dense():
            check_close(model, reference)
        check_same_on_all_ranks(model)


class Odd(nn.Module):
    """Parameters of shape (), (1,), (1, 1), (0, 4), and a common one."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
        self.one = nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.square = nn.Parameter(torch.ones(1, 1, dtype=torch.float64))
        self.empty = nn.Parameter(torch.ones(0, 4, dtype=torch.float64))
        self.layer = nn.Parameter(torch.full((6, 3), 0.1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        out = x @ self.layer * self.scalar + self.one + self.square
        return out + self.empty.sum()


@scenario(1, 2)
def odd_shapes() -> None:
    """S18, S19, S28: scalars, single elements and empty tensors, in buckets of their own (always
    whole, as k is at least 1) and together with others, at CF 100."""
    reference = Odd()
    train(reference, sgd(reference), range(3), joined_batch)
    for bucket_bytes in (1, 2**20):
        for compression in (dense(), het.Compression.topk(100)):
            model = Odd()
            optimizer = wrap(model, sgd(model), compression=compression, bucket_bytes=bucket_bytes)
            with recorded() as seen:
                train(model, optimizer, range(3))
            if compression == dense():
                check_close(model, reference)
            check_same_on_all_ranks(model)
            dense_sizes = {one.elements for one in seen if one.dtype == "torch.float64"}
            if bucket_bytes == 1 and compression != dense() and hvd.size() > 1:
                assert dense_sizes <= {0, 1}, seen  # never more bytes than dense
            if bucket_bytes == 1:
                assert not any(r.any() for r in residuals(optimizer) if r.numel() <= 1)


@scenario(1, 2)
def nothing_to_send() -> None:
    """S19: a model whose only parameter is empty, and gradients that are zero on one rank, or on
    all."""
    model = nn.Module()
    model.empty = nn.Parameter(torch.ones(0, 4))
    for compression in (dense(), het.Compression.topk(100)):
        optimizer = wrap(model, plain_sgd(model), compression=compression)
        for _ in range(3):
            optimizer.zero_grad()
            model.empty.sum().backward()
            optimizer.step()
        model = nn.Module()
        model.empty = nn.Parameter(torch.ones(0, 4))
    for zero_on in ((1,), (0, 1)):
        for compression in (dense(), het.Compression.topk(4)):
            classifier_model = classifier()
            optimizer = wrap(classifier_model, sgd(classifier_model), compression=compression)
            before = [p.detach().clone() for p in classifier_model.parameters()]
            for step in range(3):
                optimizer.zero_grad()
                scale = 0.0 if hvd.rank() in zero_on else 1.0
                (loss_of(classifier_model, own_batch(step)) * scale).backward()
                optimizer.step()
            check_same_on_all_ranks(classifier_model)
            if 0 in zero_on:
                check_close(classifier_model, before, 0)
            else:
                check_differ(classifier_model, before)


def _words(rank: int) -> Tensor:
    return torch.tensor([[1, 1, 3], [3, 9, 9]][rank])


def _embedding(sparse: bool) -> nn.Embedding:
    torch.manual_seed(0)
    return nn.Embedding(10, 2, sparse=sparse).double()


def _sparse_optimizers() -> Iterable[Callable[[nn.Module], torch.optim.Optimizer]]:
    yield lambda model: torch.optim.SGD(model.parameters(), lr=0.1)
    yield lambda model: torch.optim.SparseAdam(list(model.parameters()), lr=0.1)


@scenario(1, 2)
def sparse_gradients() -> None:
    """S20: sparse embedding gradients are refused by name with the option that helps; with
    sparse_as_dense the result equals one process, for SGD and SparseAdam."""
    for make in _sparse_optimizers():
        model = _embedding(True)
        optimizer = wrap(model, make(model), compression=dense())
        with raises(het.UnsupportedError, "'weight'", "sparse_as_dense=True", "sparse=False"):
            model(_words(hvd.rank())).square().sum().backward()
        optimizer.zero_grad()

        reference = _embedding(True)
        plain = make(reference)
        models = [_embedding(True), _embedding(True)]
        pairs = [
            (
                models[0],
                wrap(models[0], make(models[0]), compression=dense(), sparse_as_dense=True),
            ),
            (
                models[1],
                hvd.DistributedOptimizer(
                    make(models[1]), models[1].named_parameters(), sparse_as_dense=True
                ),
            ),
        ]
        for _ in range(3):
            plain.zero_grad()
            ranks = range(hvd.size())
            total = sum(reference(_words(rank)).square().sum() for rank in ranks) / hvd.size()
            total.backward()
            plain.step()
            for one, wrapped in pairs:
                wrapped.zero_grad()
                one(_words(hvd.rank())).square().sum().backward()
                wrapped.step()
                assert one.weight.grad is not None and one.weight.grad.is_sparse
        check_close(models[0], reference)
        check_close(models[0], models[1])
        check_same_on_all_ranks(models[0])


@scenario(2)
def sparse_gradients_compressed() -> None:
    """S20: sparse_as_dense with top-k, where rows travel alone: equal on ranks, never negative
    bytes saved, and untouched rows stay."""
    model = _embedding(True)
    untouched = model.weight[0].detach().clone()
    optimizer = wrap(
        model, plain_sgd(model), compression=het.Compression.topk(4), sparse_as_dense=True
    )
    for _ in range(5):
        optimizer.zero_grad()
        model(_words(hvd.rank())).square().sum().backward()
        optimizer.step()
    check_close([model.weight[0]], [untouched], 0)
    check_same_on_all_ranks(model)


@scenario(1, 2)
def no_balancer_weights() -> None:
    """Rule 8: op=Sum and op=Average on our path are Horovod's, compared with its own; with a
    balancer the aggregation is the weighted mean, whichever is given."""
    for op in (hvd.Average, hvd.Sum):
        models = [classifier(), classifier()]
        train(
            models[0],
            wrap(models[0], adamw(models[0]), compression=dense(), op=op),
            range(3),
        )
        train(
            models[1],
            hvd.DistributedOptimizer(adamw(models[1]), models[1].named_parameters(), op=op),
            range(3),
        )
        check_close(models[0], models[1])
        model, reference = classifier(), classifier()
        sizes = (3, 1)[: hvd.size()]
        own = sizes[hvd.rank()]
        balancer = het.Balancer(sum(sizes), fixed_local_batches=sizes)
        optimizer = wrap(model, sgd(model), balancer=balancer, op=op)
        plain = sgd(reference)
        for step in range(3):
            balancer.set_batch(own)
            train(model, optimizer, [step], lambda step, own=own: own_batch(step, own))
            train(reference, plain, [step], lambda step, all=sizes: joined_batch(step, all))
        check_close(model, reference)


@scenario(1, 2)
def no_warnings_at_all() -> None:
    """S15: wrapping and training in the documented order warns of nothing."""
    for compression in (het.Compression.none, dense(), het.Compression.topk(4)):
        model = classifier()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer = wrap(model, adamw(model), compression=compression)
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
            train(model, optimizer, range(2))
