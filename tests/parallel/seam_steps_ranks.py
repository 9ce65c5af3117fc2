"""What the ranks of seam_steps_test.py do: steps, exchanges and agreements."""

# torch has no types for backward(), and says "Tensor | Module" for what a module holds.
# mypy: disable-error-code="no-untyped-call, union-attr, operator, index, misc"

from __future__ import annotations

import copy
import itertools
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import horovod.torch as hvd
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hvd_hetero as het
from hvd_hetero.balance.timing import StepTiming, summarise
from hvd_hetero.compression.feedback import ErrorFeedback
from hvd_hetero.errors import ExchangeTimeoutError
from hvd_hetero.runtime.exchanger import SparsityMode
from tests.parallel.seam_tools import (
    Scenario,
    adamw,
    batch_of,
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
    scripted_plans,
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


# ---- clipping and the recipe around synchronize -------------------------------------------------


@scenario(1, 2)
def synchronize_recipes() -> None:
    """S01, rule 3: the three ways to step exchange once, and give the same parameters."""
    for compression in (dense(), het.Compression.topk(4)):
        finals, counts, kept = [], [], []
        for recipe in ("step", "synchronize", "skip"):
            model = classifier()
            optimizer = wrap(model, sgd(model), compression=compression, bucket_bytes=256)
            with recorded() as seen, warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                for step in range(4):
                    optimizer.zero_grad()
                    loss_of(model, own_batch(step)).backward()
                    if recipe != "step":
                        optimizer.synchronize()
                    if recipe == "skip":
                        with optimizer.skip_synchronize():
                            optimizer.step()
                    else:
                        optimizer.step()
            if recipe == "synchronize":
                assert any("skip_synchronize" in str(one.message) for one in warned), warned
            else:
                assert not warned, warned
            finals.append(model)
            counts.append(len(exchanges(seen)))
            kept.append(residuals(optimizer))
        expected = 0 if hvd.size() == 1 else 4 * len(exchanger_of(optimizer).buckets)
        assert counts == [expected] * 3, counts
        for other in (1, 2):
            check_close(finals[other], finals[0], 0)
            check_close(kept[other], kept[0], 0)
        if compression == dense():
            check_close(finals[0], one_process(sgd, range(4)))
        check_same_on_all_ranks(finals[0])


@scenario(2)
def clip_after_the_exchange() -> None:
    """S01, A09: the clipping recipe equals one process that clips; one exchange per step."""

    def clipped(model: nn.Module) -> None:
        total = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        assert total > 0.05, total

    reference = classifier()
    plain = adamw(reference)
    for step in range(4):
        plain.zero_grad()
        loss_of(reference, joined_batch(step)).backward()
        clipped(reference)
        plain.step()
    model = classifier()
    optimizer = wrap(model, adamw(model), compression=dense())
    with recorded() as seen, no_warnings():
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, own_batch(step)).backward()
            optimizer.synchronize()
            clipped(model)
            with optimizer.skip_synchronize():
                optimizer.step()
    check_close(model, reference)
    assert len(exchanges(seen)) == 4, seen


@scenario(2)
def clip_before_the_exchange() -> None:
    """A09: clipping between backward and step, without synchronize, would be lost: refused by all
    ranks with the recipe; zero_grad makes a new start."""
    for compression in (dense(), het.Compression.topk(4)):
        model, twin = classifier(), classifier()
        optimizer = wrap(model, sgd(model), compression=compression)
        undisturbed = wrap(twin, sgd(twin), compression=compression)
        train(model, optimizer, range(2))
        loss_of(model, own_batch(2)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        with raises(het.UnsupportedError, "synchronize()", "skip_synchronize()", "local_clip_norm"):
            optimizer.step()
        train(model, optimizer, range(2, 4))
        train(twin, undisturbed, range(4))
        check_close(model, twin, 0)
        check_close(residuals(optimizer), residuals(undisturbed), 0)


@scenario(2)
def clip_locally() -> None:
    """S02, A09: [3, 0] and [0, 4], max norm 1: [.6, .8] by the recipe, [.5, .5] by the option."""
    gradient = torch.tensor([[3.0, 0.0], [0.0, 4.0]])[hvd.rank()]
    for local_clip_norm, expected in ((None, [0.6, 0.8]), (1.0, [0.5, 0.5]), (3.5, [1.5, 1.75])):
        for passes in (1, 2):
            model = nn.Linear(2, 1, bias=False)
            optimizer = wrap(
                model,
                torch.optim.SGD(model.parameters(), lr=1.0),
                compression=dense(),
                local_clip_norm=local_clip_norm,
                backward_passes_per_step=passes,
            )
            with recorded() as seen:
                optimizer.zero_grad()
                for _ in range(passes):
                    ((model.weight * gradient).sum() / passes).backward()
                optimizer.synchronize()
            assert len(exchanges(seen)) == 1, seen
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            assert model.weight.grad is not None
            torch.testing.assert_close(
                model.weight.grad.flatten(),
                torch.tensor(expected) / max(torch.tensor(expected).norm().item(), 1.0),
            )
            with optimizer.skip_synchronize():
                optimizer.step()


@scenario(2)
def clip_locally_alone() -> None:
    """S02: the option without compression or balancer is enough to get it; off, nothing clips."""
    gradient = torch.tensor([[3.0, 0.0], [0.0, 4.0]])[hvd.rank()]
    for local_clip_norm, expected in ((None, [1.5, 2.0]), (1.0, [0.5, 0.5])):
        model = nn.Linear(2, 1, bias=False)
        optimizer = wrap(
            model,
            torch.optim.SGD(model.parameters(), lr=1.0),
            local_clip_norm=local_clip_norm,
        )
        before = model.weight.detach().clone()
        optimizer.zero_grad()
        (model.weight * gradient).sum().backward()
        optimizer.step()
        torch.testing.assert_close((before - model.weight).flatten(), torch.tensor(expected))


@scenario(2)
def clip_locally_with_a_balancer() -> None:
    """S02: the rank's mean gradient over its samples is clipped, however the loss is reduced."""
    gradient = torch.tensor([[3.0, 0.0], [0.0, 4.0]], dtype=torch.float64)[hvd.rank()]
    samples = (3, 1)[hvd.rank()]
    for reduction in ("mean", "sum"):
        for passes, divided in ((1, False), (2, False), (2, True)):
            model = nn.Linear(2, 1, bias=False).double()
            balancer = het.Balancer(4, fixed_local_batches=(3, 1))
            optimizer = wrap(
                model,
                torch.optim.SGD(model.parameters(), lr=1.0),
                balancer=balancer,
                local_clip_norm=1.0,
                loss_reduction=reduction,
                backward_passes_per_step=passes,
                loss_divided_by_passes=divided,
            )
            optimizer.zero_grad()
            for _ in range(passes):
                balancer.set_batch(samples)
                loss = (model.weight * gradient).sum()
                loss = loss * samples if reduction == "sum" else loss
                (loss / passes if divided else loss).backward()
            optimizer.synchronize()
            assert model.weight.grad is not None
            torch.testing.assert_close(
                model.weight.grad.flatten(),
                torch.tensor([0.75, 0.25], dtype=torch.float64),
                msg=lambda text, case=(reduction, passes, divided): f"{case}: {text}",
            )
            optimizer.zero_grad()


@scenario(2)
def second_synchronize() -> None:
    """Rule 3: the second call sends nothing and compresses nothing; the residual is not re-sent."""
    model, twin = classifier(), classifier()
    optimizer = wrap(model, sgd(model), compression=het.Compression.topk(4))
    once = wrap(twin, sgd(twin), compression=het.Compression.topk(4))
    for step in range(5):
        optimizer.zero_grad()
        loss_of(model, own_batch(step)).backward()
        optimizer.synchronize()
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        sent = exchanger_of(optimizer).sent_bytes
        with recorded() as seen:
            optimizer.synchronize()
            optimizer.synchronize()
        assert not seen, seen
        assert exchanger_of(optimizer).sent_bytes == sent
        check_close((p.grad for p in model.parameters() if p.grad is not None), gradients, 0)
        with optimizer.skip_synchronize():
            optimizer.step()
    train(twin, once, range(5))
    check_close(model, twin, 0)
    check_close(residuals(optimizer), residuals(once), 0)
    assert any(residual.any() for residual in residuals(once))


@scenario(1, 2)
def changed_gradients_are_stepped() -> None:
    """Rule 3: what a script does to p.grad after synchronize is what the step applies."""
    model = classifier()
    optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=1.0), compression=dense())
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.zero_grad()
    loss_of(model, own_batch(0)).backward()
    optimizer.synchronize()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.fill_(0.25)
    with optimizer.skip_synchronize():
        optimizer.step()
    check_close(model, [p - 0.25 for p in before])


# ---- zero_grad and thrown away gradients --------------------------------------------------------


@scenario(1, 2)
def zero_grad_variants() -> None:
    """S03, A15: zero_grad as current torch has it, on our path and on Horovod's."""
    for compression in (het.Compression.none, dense()):
        model = classifier()
        optimizer = wrap(model, sgd(model), compression=compression)
        calls = [((), {}, True), ((), {"set_to_none": True}, True), ((True,), {}, True)]
        calls += [((), {"set_to_none": False}, False), ((False,), {}, False)]
        for step, (positional, named, to_none) in enumerate(calls):
            optimizer.zero_grad(*positional, **named)
            for parameter in model.parameters():
                if to_none:
                    assert parameter.grad is None
                elif step > 0:
                    assert parameter.grad is not None and not parameter.grad.any()
            loss_of(model, own_batch(step)).backward()
            optimizer.step()
        check_close(model, one_process(sgd, range(len(calls))))


@scenario(1, 2)
def abandoned_gradients() -> None:
    """S04: zero_grad after backward, or after synchronize, throws the gradients away: residuals
    are bit-equal to before, and the run goes on as if they had never been."""
    for compression in (dense(), het.Compression.topk(4)):
        model, twin = classifier(), classifier()
        optimizer = wrap(model, sgd(model), compression=compression, bucket_bytes=256)
        undisturbed = wrap(twin, sgd(twin), compression=compression, bucket_bytes=256)
        train(model, optimizer, range(3))
        train(twin, undisturbed, range(3))
        kept = residuals(optimizer)
        assert hvd.size() == 1 or compression == dense() or any(r.any() for r in kept)
        for synchronize_first in (False, True):
            loss_of(model, own_batch(50)).backward()
            if synchronize_first:
                optimizer.synchronize()
            optimizer.zero_grad()
            check_close(residuals(optimizer), kept, 0)
            assert all(p.grad is None for p in model.parameters())
            assert not exchanger_of(optimizer)._pending
        assert steps_counted(optimizer) == 3
        train(model, optimizer, range(3, 6))
        train(twin, undisturbed, range(3, 6))
        check_close(model, twin, 0)
        check_close(residuals(optimizer), residuals(undisturbed), 0)
        check_same_on_all_ranks(model)


@scenario(2)
def abandoned_by_backward() -> None:
    """S04: synchronize, no step, and another backward without zero_grad: a step begins anew."""
    model, twin = classifier(), classifier()
    optimizer = wrap(model, sgd(model), compression=het.Compression.topk(4))
    undisturbed = wrap(twin, sgd(twin), compression=het.Compression.topk(4))
    train(model, optimizer, range(2))
    train(twin, undisturbed, range(2))
    kept = residuals(optimizer)
    optimizer.zero_grad()
    loss_of(model, own_batch(50)).backward()
    optimizer.synchronize()
    model.zero_grad()  # the model's own, of which the optimizer hears nothing
    loss_of(model, own_batch(2)).backward()
    check_close(residuals(optimizer), kept, 0)
    optimizer.step()
    train(twin, undisturbed, range(2, 3))
    check_close(model, twin, 0)
    check_close(residuals(optimizer), residuals(undisturbed), 0)


@scenario(1, 2)
def too_many_passes() -> None:
    """A11: a backward pass too many is refused in Horovod's words, on every rank."""
    model = classifier()
    optimizer = wrap(model, sgd(model), compression=dense())
    loss_of(model, own_batch(0)).backward()
    with raises(AssertionError, "backward_passes_per_step"):
        loss_of(model, own_batch(1)).backward()
    optimizer.zero_grad()
    train(model, optimizer, range(2))
    check_close(model, one_process(sgd, range(2)))


# ---- mixed precision ----------------------------------------------------------------------------


def _scaled_step(model: nn.Module, optimizer: Any, scaler: Any, batch: Any, clip: bool) -> None:
    """The recipe: backward, synchronize, unscale, clip, step without a second exchange."""
    optimizer.zero_grad()
    scaler.scale(loss_of(model, batch)).backward()
    optimizer.synchronize()
    scaler.unscale_(optimizer)
    if clip:
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    with optimizer.skip_synchronize():
        scaler.step(optimizer)
    scaler.update()


@scenario(1, 2)
def grad_scaler() -> None:
    """S05, A10: GradScaler with scale 1024, unscale, clip, step: equal to a run without it."""
    reference = classifier()
    plain = sgd(reference)
    for step in range(4):
        plain.zero_grad()
        loss_of(reference, joined_batch(step)).backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 0.05)
        plain.step()
    model = classifier()
    optimizer = wrap(model, sgd(model), compression=dense())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with no_warnings():
        for step in range(4):
            _scaled_step(model, optimizer, scaler, own_batch(step), clip=True)
    check_close(model, reference, 1e-9)
    assert steps_counted(optimizer) == 4


@scenario(2)
def grad_scaler_skips() -> None:
    """S05, S04: an overflow on one rank is skipped by all; no step is counted, residuals are
    bit-equal to before, and training goes on with finite, equal parameters."""
    for compression in (dense(), het.Compression.topk(4)):
        model = classifier()
        optimizer = wrap(model, sgd(model), compression=compression)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(3):
            _scaled_step(model, optimizer, scaler, own_batch(step), clip=False)
        kept, before = residuals(optimizer), [p.detach().clone() for p in model.parameters()]
        x, y = own_batch(3)
        if hvd.rank() == 1:
            x[0, 0] = float("inf")
        _scaled_step(model, optimizer, scaler, (x, y), clip=False)
        assert scaler.get_scale() == 512.0, scaler.get_scale()
        check_close(model, before, 0)
        assert steps_counted(optimizer) == 3
        optimizer.zero_grad()
        check_close(residuals(optimizer), kept, 0)
        for step in range(4, 7):
            _scaled_step(model, optimizer, scaler, own_batch(step), clip=False)
        assert steps_counted(optimizer) == 6
        check_differ(model, before)
        check_same_on_all_ranks(model)


@scenario(2)
def grad_scaler_all_ranks_skip() -> None:
    """S05: overflow on all ranks, CF 4 and more infinities than are sent: skipped all the same."""
    model = classifier()
    optimizer = wrap(model, sgd(model), compression=het.Compression.topk(20))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    _scaled_step(model, optimizer, scaler, own_batch(0), clip=False)
    kept, before = residuals(optimizer), [p.detach().clone() for p in model.parameters()]
    x, y = own_batch(1)
    _scaled_step(model, optimizer, scaler, (x * float("inf"), y), clip=False)
    check_close(model, before, 0)
    _scaled_step(model, optimizer, scaler, own_batch(2), clip=False)
    check_same_on_all_ranks(model)
    assert all(residual.isfinite().all() for residual in residuals(optimizer))
    check_differ(residuals(optimizer), kept)


@scenario(1, 2)
def grad_scaler_moves() -> None:
    """DESIGN 4: residuals are free of the scale, so a moving one changes nothing, bit by bit."""
    for compression in (dense(), het.Compression.topk(4)):
        models = []
        for scaler in (
            torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2),
            torch.amp.GradScaler("cpu", enabled=False),
        ):
            model = classifier()
            optimizer = wrap(model, sgd(model), compression=compression, grad_scaler=scaler)
            for step in range(6):
                _scaled_step(model, optimizer, scaler, own_batch(step), clip=False)
            models.append(model)
        check_close(models[0], models[1], 0)


@scenario(1, 2)
def gradients_set_by_hand() -> None:
    """A gradient that no backward made is aggregated as stock Horovod does it."""
    stock_model, model = classifier(), classifier()
    optimizers = [
        hvd.DistributedOptimizer(sgd(stock_model), stock_model.named_parameters()),
        wrap(model, sgd(model), compression=dense()),
    ]
    for net, optimizer in zip((stock_model, model), optimizers, strict=True):
        for step in range(2):
            optimizer.zero_grad()
            for parameter in net.parameters():
                parameter.grad = torch.full_like(parameter, 1.0 + step + hvd.rank())
            optimizer.step()
    check_close(model, stock_model, 1e-12)
    check_differ(model, classifier())


@scenario(1, 2)
def step_without_synchronize() -> None:
    """skip_synchronize() without a synchronize() before it is told, not left to Horovod."""
    model = classifier()
    optimizer = wrap(model, sgd(model), compression=dense())
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, own_batch(step)).backward()
        with (
            raises(het.UnsupportedError, "skip_synchronize", "synchronize() first"),
            optimizer.skip_synchronize(),
        ):
            optimizer.step()
    train(model, optimizer, range(2))
    check_same_on_all_ranks(model)


@scenario(2)
def a_skipped_batch() -> None:
    """A rank that skips a batch alone is found out at the next agreement, on all ranks."""
    data = torch.utils.data.TensorDataset(*joined_batch(0, [32, 32]))
    balancer = het.Balancer(8, window_steps=2)
    loader = balancer.data_loader(data)
    model = classifier()
    optimizer = wrap(model, sgd(model), balancer=balancer)
    with raises(het.RankMismatchError, "(pass, batch)", "rank 0 has", "rank 1 has"):
        for index, batch in enumerate(loader):
            if index == 1 and hvd.rank() == 1:
                continue
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()


# ---- several optimizers -------------------------------------------------------------------------


@scenario(1, 2)
def two_optimizers() -> None:
    """S08, rule 5: equal parameter names, interleaved steps: as two runs by themselves."""
    first, second = classifier(1), classifier(2)
    optimizers = [wrap(m, sgd(m), compression=dense()) for m in (first, second)]
    names = []
    for step in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        with recorded() as seen:
            (loss_of(first, own_batch(step)) + loss_of(second, own_batch(step + 9))).backward()
            for optimizer in optimizers[:: 1 if step % 2 else -1]:
                optimizer.step()
        names += [one.name for one in seen]
    assert len(set(names)) == (0 if hvd.size() == 1 else 2), set(names)
    for model, seed, offset in ((first, 1, 0), (second, 2, 9)):
        reference = classifier(seed)
        steps = range(offset, offset + 4)
        train(reference, sgd(reference), steps, joined_batch)
        check_close(model, reference)


@scenario(2)
def gradients_for_another_optimizer() -> None:
    """S08, S04: as in a GAN, one loss reaches both models but only one steps; the other's
    gradients are dropped by its zero_grad, and its residual stays."""
    generator, judge = classifier(1), nn.Linear(3, 3).double()
    nn.init.eye_(judge.weight)
    own = wrap(generator, sgd(generator), compression=het.Compression.topk(2))
    other = wrap(judge, sgd(judge), compression=het.Compression.topk(2))
    chain = nn.Sequential(generator, judge)
    train(chain, own, range(1))
    other.zero_grad()
    kept, before = residuals(other), [p.detach().clone() for p in judge.parameters()]
    for step in range(1, 3):
        train(chain, own, [step])
        other.zero_grad()
    check_close(residuals(other), kept, 0)
    check_close(judge, before, 0)
    assert (steps_counted(own), steps_counted(other)) == (3, 0)
    train(chain, other, [7])
    own.zero_grad()
    check_same_on_all_ranks(chain)
    check_differ(judge, before)


# ---- passes and weights -------------------------------------------------------------------------


@scenario(1, 2)
def passes_without_a_balancer() -> None:
    """Rule 8, A11: without a balancer passes and op mean what they mean in Horovod."""
    for op in (hvd.Average, hvd.Sum):
        for passes, steps in ((1, 3), (2, 3)):
            models = [classifier(), classifier()]
            ours = wrap(
                models[0],
                sgd(models[0]),
                compression=dense(),
                op=op,
                backward_passes_per_step=passes,
            )
            stock = hvd.DistributedOptimizer(
                sgd(models[1]), models[1].named_parameters(), op=op, backward_passes_per_step=passes
            )
            for model, optimizer in zip(models, (ours, stock), strict=True):
                for step in range(steps):
                    optimizer.zero_grad()
                    for number in range(passes):
                        loss_of(model, own_batch(10 * step + number)).backward()
                    optimizer.step()
            check_close(models[0], models[1])


@scenario(1, 2)
def passes_of_one_batch() -> None:
    """A11: several losses of one forward, each with its own backward, are passes of one step."""
    models = [classifier(), classifier()]
    options = {"backward_passes_per_step": 2}
    ours = wrap(models[0], sgd(models[0]), compression=dense(), **options)
    stock = hvd.DistributedOptimizer(sgd(models[1]), models[1].named_parameters(), **options)
    for model, optimizer in zip(models, (ours, stock), strict=True):
        for step in range(3):
            optimizer.zero_grad()
            x, y = own_batch(step)
            out = model(x)
            nn.functional.cross_entropy(out, y).backward(retain_graph=True)
            out.square().mean().backward()
            optimizer.step()
    check_close(models[0], models[1])


@scenario(1, 2)
def leftover_passes() -> None:
    """A11: a step after fewer passes than announced uses the passes there were."""
    models = [classifier(), classifier()]
    options = {"backward_passes_per_step": 3}
    ours = wrap(models[0], sgd(models[0]), compression=dense(), **options)
    stock = hvd.DistributedOptimizer(sgd(models[1]), models[1].named_parameters(), **options)
    for model, optimizer in zip(models, (ours, stock), strict=True):
        for step, passes in enumerate((3, 1, 2, 3)):
            optimizer.zero_grad()
            for number in range(passes):
                loss_of(model, own_batch(10 * step + number)).backward()
            optimizer.step()
    check_close(models[0], models[1])


@scenario(1, 2)
def passes_can_be_changed() -> None:
    """A11: Horovod's set_backward_passes_per_step works between steps."""
    models = [classifier(), classifier()]
    ours = wrap(models[0], sgd(models[0]), compression=dense())
    stock = hvd.DistributedOptimizer(sgd(models[1]), models[1].named_parameters())
    for model, optimizer in zip(models, (ours, stock), strict=True):
        for step, passes in enumerate((1, 2, 2, 1)):
            optimizer.zero_grad()
            optimizer.set_backward_passes_per_step(passes)
            for number in range(passes):
                loss_of(model, own_batch(10 * step + number)).backward()
            optimizer.step()
    check_close(models[0], models[1])


@scenario(1, 2)
def weights_per_pass() -> None:
    """Rule 6: micro-batches of one step have their own weights: the gradient is the mean over all
    samples of the step, whoever divides the loss and however it is reduced."""
    sizes = [(3, 1), (1, 5), (2, 2)]  # by pass, then by rank
    mine = [by_rank[hvd.rank()] for by_rank in sizes]
    for passes in (1, 2, 3):
        reference = classifier()
        plain = sgd(reference)
        for step in range(2):
            plain.zero_grad()
            parts = [
                batch_of(rank, 10 * step + number, sizes[number][rank])
                for number in range(passes)
                for rank in range(hvd.size())
            ]
            loss_of(
                reference, (torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts]))
            ).backward()
            plain.step()
        for reduction in ("mean", "sum"):
            for divided in (False, True):
                model = classifier()
                balancer = het.Balancer(4)
                optimizer = wrap(
                    model,
                    sgd(model),
                    balancer=balancer,
                    backward_passes_per_step=passes,
                    loss_reduction=reduction,
                    loss_divided_by_passes=divided,
                )
                for step in range(2):
                    optimizer.zero_grad()
                    for number in range(passes):
                        balancer.set_batch(mine[number])
                        loss = loss_of(
                            model, own_batch(10 * step + number, mine[number]), reduction
                        )
                        (loss / passes if divided else loss).backward()
                    optimizer.step()
                try:
                    check_close(model, reference)
                except AssertionError as error:
                    raise AssertionError(f"{passes=} {reduction=} {divided=}: {error}") from None


@scenario(2)
def plans_change_between_steps() -> None:
    """Rules 6 and 12: a plan is agreed after step() only and applied by all ranks at the same
    draw; one that begins between two passes of a step gives each pass its own weight."""
    samples = torch.Generator().manual_seed(5)
    x = torch.randn(96, 6, generator=samples, dtype=torch.float64)
    y = torch.randint(0, 3, (96,), generator=samples)
    for delay in (0, 1):
        model, reference = classifier(), classifier()
        balancer = het.Balancer(8, window_steps=2)
        loader = balancer.data_loader(torch.utils.data.TensorDataset(x, y))
        optimizer = wrap(
            model,
            sgd(model),
            balancer=balancer,
            backward_passes_per_step=2,
            loss_divided_by_passes=True,
        )
        if hvd.rank() == 0:
            scripted_plans(balancer, [(6, 2), (1, 7)], delay)
        versions, drawn = [], []
        for number, (own_x, own_y) in enumerate(loader):
            if number % 2 == 0:
                optimizer.zero_grad()
                version = balancer.plan.version
            drawn.append(len(own_x))
            (loss_of(model, (own_x, own_y)) / 2).backward()
            assert balancer.plan.version == version
            if number % 2 == 1:
                optimizer.step()
                versions.append(balancer.plan.version)
        train(
            reference,
            sgd(reference),
            range(6),
            lambda step: (x[16 * step : 16 * step + 16], y[16 * step : 16 * step + 16]),
        )
        check_close(model, reference)
        assert versions == [0, 1, 1, 2, 2, 2], versions
        by_rank = gather(drawn)
        assert [sum(pair) for pair in zip(*by_rank, strict=True)] == [8] * 12, by_rank
        even = 4 + delay  # the first batches, before the first new plan
        assert by_rank[0] == [4] * even + [6] * 4 + [1] * (8 - even), by_rank


@scenario(2)
def checkpointed_activations() -> None:
    """Rule 6: activation checkpointing, reentrant or not, is one pass and one weight."""

    class Checkpointed(nn.Module):
        def __init__(self, reentrant: bool) -> None:
            super().__init__()
            self.inner = classifier()
            self.reentrant = reentrant

        def forward(self, x: Tensor) -> Tensor:
            hidden = checkpoint(self.inner[0], x, use_reentrant=self.reentrant)
            hidden = checkpoint(self.inner[1], hidden, use_reentrant=self.reentrant)
            out: Tensor = checkpoint(self.inner[2], hidden, use_reentrant=self.reentrant)
            return out

    for reentrant in (True, False):
        for passes in (1, 2):
            for with_balancer in (False, True):
                model = Checkpointed(reentrant)
                balancer = het.Balancer(8) if with_balancer else None
                optimizer = wrap(
                    model,
                    sgd(model),
                    compression=dense(),
                    balancer=balancer,
                    backward_passes_per_step=passes,
                    loss_divided_by_passes=True if passes > 1 else None,
                )
                reference = classifier()
                plain = sgd(reference)
                for step in range(2):
                    optimizer.zero_grad()
                    plain.zero_grad()
                    for number in range(passes):
                        x, y = own_batch(10 * step + number)
                        if balancer is not None:
                            balancer.set_batch(len(x))
                        (loss_of(model, (x.requires_grad_(), y)) / passes).backward()
                        assert exchanger_of(optimizer).passes == number + 1
                        joined = joined_batch(10 * step + number)
                        (loss_of(reference, joined) / passes).backward()
                    optimizer.step()
                    plain.step()
                check_close(model, reference)


# ---- parameters without gradients ---------------------------------------------------------------


class Heads(nn.Module):
    """A trunk and two heads, of which ``uses`` names those in the forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.trunk = nn.Linear(6, 4).double()
        self.a = nn.Linear(4, 3).double()
        self.b = nn.Linear(4, 3).double()
        self.unused = nn.Linear(2, 2).double()
        self.uses = "ab"

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.trunk(x))
        outputs = {"a": self.a, "b": self.b}
        total = torch.zeros(len(x), 3, dtype=torch.float64)
        for name in self.uses:
            total = total + outputs[name](hidden)
        return total


@scenario(2)
def unused_on_one_rank() -> None:
    """S13, rule 2: a head only one rank uses gets that rank's gradient by its weight, also where
    p.grad is None at first; one that nobody uses decays as in stock."""
    for weights in (None, (3, 1)):
        model, reference = Heads(), Heads()
        model.uses = "ab"[hvd.rank()]
        balancer = None if weights is None else het.Balancer(4, fixed_local_batches=weights)
        optimizer = wrap(model, adamw(model), compression=dense(), balancer=balancer)
        plain = adamw(reference)
        shares = (0.5, 0.5) if weights is None else (0.75, 0.25)
        sizes = (4, 4) if weights is None else weights
        for step in range(3):
            optimizer.zero_grad()
            plain.zero_grad()
            if balancer is not None:
                balancer.set_batch(sizes[hvd.rank()])
            loss_of(model, own_batch(step, sizes[hvd.rank()])).backward()
            total: Any = 0.0
            for rank in range(2):
                reference.uses = "ab"[rank]
                part = loss_of(reference, batch_of(rank, step, sizes[rank]))
                total = total + shares[rank] * part
            total.backward()
            for parameter in reference.unused.parameters():
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            plain.step()
        check_close(model, reference)
        check_same_on_all_ranks(model)


@scenario(2)
def frozen_later() -> None:
    """Rule 2: a parameter frozen after wrapping sends nothing and its residual waits, bit by bit;
    unfrozen again, the residual is used."""
    model = classifier()
    optimizer = wrap(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1),
        compression=het.Compression.topk(4),
        bucket_bytes=2**20,
    )
    train(model, optimizer, range(3))
    (bucket,) = exchanger_of(optimizer).buckets
    spans = {member.name: member.span for member in bucket.members}
    frozen = [spans["0.weight"], spans["0.bias"]]
    kept = [bucket.feedback.residual[span].clone() for span in frozen]
    rest = bucket.feedback.residual[spans["2.weight"]].clone()
    assert all(residual.any() for residual in kept)
    weights = [p.detach().clone() for p in model[0].parameters()]
    sent: list[Tensor] = []
    original = ErrorFeedback.sent

    def spying(self: ErrorFeedback, indices: Tensor | None, decoded: Tensor | None = None) -> None:
        values = self.work.clone()
        if indices is not None:
            values = torch.zeros_like(values).index_copy_(0, indices, values[indices])
        sent.append(values)
        original(self, indices, decoded)

    model[0].requires_grad_(False)
    with mock.patch.object(ErrorFeedback, "sent", spying):
        train(model, optimizer, range(3, 6))
    assert len(sent) == 3
    assert all(not values[span].any() for values in sent for span in frozen)
    check_close([bucket.feedback.residual[span] for span in frozen], kept, 0)
    check_close(model[0], weights, 0)
    check_differ([bucket.feedback.residual[spans["2.weight"]]], [rest])
    model[0].requires_grad_(True)
    train(model, optimizer, range(6, 9))
    check_differ(model[0], weights)
    check_differ([bucket.feedback.residual[span] for span in frozen], kept)
    check_same_on_all_ranks(model)


# ---- state --------------------------------------------------------------------------------------


@scenario(1, 2)
def load_state_dict_drains() -> None:
    """Rule 4: loading while an exchange is under way completes it, empties the residuals, and
    training goes on from the loaded state."""
    model = classifier()
    optimizer = wrap(model, sgd(model), compression=het.Compression.topk(4), bucket_bytes=256)
    train(model, optimizer, range(2))
    twin = classifier()
    twin.load_state_dict(model.state_dict())
    # Copied at each load, as torch shares the tensors of what it loads.
    state = copy.deepcopy(optimizer.state_dict())
    loaded = wrap(twin, sgd(twin), compression=het.Compression.topk(4), bucket_bytes=256)
    loaded.load_state_dict(copy.deepcopy(state))
    for synchronize_first in (False, True):
        loss_of(model, own_batch(50)).backward()
        assert hvd.size() == 1 or exchanger_of(optimizer)._pending
        if synchronize_first:
            optimizer.synchronize()
        optimizer.load_state_dict(copy.deepcopy(state))
        assert not exchanger_of(optimizer)._pending and not optimizer._handles
        assert all(not residual.any() for residual in residuals(optimizer))
    model.load_state_dict(twin.state_dict())
    train(model, optimizer, range(2, 5))
    train(twin, loaded, range(2, 5))
    check_close(model, twin, 0)
    check_close(residuals(optimizer), residuals(loaded), 0)


@scenario(1, 2)
def buckets_are_not_handed_out() -> None:
    """Rule 4: p.grad keeps its own storage, layout and identity; buckets stay inside."""
    for compression in (dense(), het.Compression.topk(4)):
        model = classifier()
        optimizer = wrap(model, sgd(model), compression=compression)
        optimizer.zero_grad(set_to_none=False)
        loss_of(model, own_batch(0)).backward()
        before = [(id(p.grad), p.grad.data_ptr()) for p in model.parameters()]
        optimizer.step()
        after = [(id(p.grad), p.grad.data_ptr()) for p in model.parameters()]
        assert before == after
        exchanger = exchanger_of(optimizer)
        inside = {
            tensor.untyped_storage().data_ptr()
            for bucket in exchanger.buckets
            for tensor in (bucket.feedback.work, bucket.feedback.residual)
        } | {tensor.untyped_storage().data_ptr() for tensor in exchanger._scratch.values()}
        for parameter in model.parameters():
            assert parameter.grad is not None
            assert parameter.grad.untyped_storage().data_ptr() not in inside


@scenario(1, 2)
def steps_are_counted_once() -> None:
    """Rule 9: step() counts, whatever step hooks the script registers; zero_grad and a skipped
    step do not."""
    model = classifier()
    optimizer = wrap(model, sgd(model), compression=dense())
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    train(model, optimizer, range(3))
    optimizer.zero_grad()
    assert steps_counted(optimizer) == 3
    assert calls == ["pre", "post"] * 3, calls


# ---- names, order and time of collectives -------------------------------------------------------


@scenario(2)
def collective_names() -> None:
    """Rule 5, S29: all names carry the optimizer's counter and a purpose; no name serves two kinds
    of collective, also while dense and compressed steps alternate; ranks agree on the sequence."""
    modes = ((None, "allreduce"), (2.0, "allgather"))
    with recorded() as seen:
        prefixes = []
        for _ in range(2):
            model = classifier()
            for parameter in model[2].parameters():
                parameter.requires_grad_(False)
            balancer = het.Balancer(8, window_steps=2)
            optimizer = wrap(
                model,
                sgd(model),
                compression=het.Compression.topk(2, window=1000),
                balancer=balancer,
                drift_check_steps=3,
                bucket_bytes=256,
            )
            exchanger = exchanger_of(optimizer)
            prefixes.append(exchanger.prefix)
            for step in range(8):
                if step == 4:
                    model[2].requires_grad_(True)
                optimizer.zero_grad()
                balancer.set_batch(4)
                exchanger.set_mode(SparsityMode(modes[step % 2][0]), flush_steps=1)
                before = len(seen)
                loss_of(model, own_batch(step)).backward()
                optimizer.step()
                kinds = {one.kind for one in exchanges(seen[before:])}
                assert modes[step % 2][1] in kinds, (step, kinds)
        adaptive = wrap(
            model := classifier(), sgd(model), compression=het.Compression.adaptive(window=1)
        )
        train(model, adaptive, range(3))
        prefixes.append(exchanger_of(adaptive).prefix)
    assert len(set(prefixes)) == 3
    sequences = gather([(one.kind, one.name) for one in seen])
    assert sequences[0] == sequences[1]
    kinds_of: dict[str, set[str]] = {}
    for one in seen:
        assert one.name is not None, one
        kinds_of.setdefault(one.name, set()).add(one.kind)
    assert all(len(kinds) == 1 for kinds in kinds_of.values()), kinds_of
    for name in kinds_of:
        counter, purpose = name.removeprefix("hvd_hetero.").removeprefix("balancer.").split(".", 1)
        assert name.startswith("hvd_hetero.") and counter.isdigit() and purpose, name
    used = {purpose for name in kinds_of for purpose in name.split(".")}
    assert {"options", "joined", "set_batch"} <= used, used


@scenario(2)
def launch_order() -> None:
    """Rule 5: ranks whose hooks fire in another order launch their buckets in the same order."""
    model, reference = Heads(), Heads()
    model.uses = ("ab", "ba")[hvd.rank()]
    optimizer = wrap(model, sgd(model), compression=dense(), bucket_bytes=1)
    fired: list[str] = []
    for name in ("a", "b"):
        getattr(model, name).weight.register_post_accumulate_grad_hook(
            lambda _, name=name: fired.append(name)
        )
    plain = sgd(reference)
    with recorded() as seen:
        for step in range(3):
            optimizer.zero_grad()
            plain.zero_grad()
            loss_of(model, own_batch(step)).backward()
            loss_of(reference, joined_batch(step)).backward()
            for parameter in reference.unused.parameters():
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            plain.step()
    orders = gather(fired)
    assert orders[0] != orders[1], orders  # else this would show nothing
    launched = gather([one.name for one in seen])
    assert launched[0] == launched[1]
    per_step = len(exchanger_of(optimizer).buckets)
    assert launched[0][:per_step] == launched[0][per_step : 2 * per_step]
    check_close(model, reference)


@scenario(2)
def overlap_with_backward() -> None:
    """Rule 5, issue of overlap: the first bucket is on its way before backward has reached the
    first layer, and no hook waits; with passes left nothing is sent."""
    for compression in (dense(), het.Compression.topk(4)):
        model = classifier()
        optimizer = wrap(
            model,
            sgd(model),
            compression=compression,
            bucket_bytes=256,
            backward_passes_per_step=2,
        )
        exchanger = exchanger_of(optimizer)
        under_way: list[int] = []
        model[0].weight.register_hook(
            lambda _, seen=under_way, one=exchanger: seen.append(len(one._pending))
        )
        for step in range(2):
            optimizer.zero_grad()
            before = exchanger.launched_in_backward
            loss_of(model, own_batch(step)).backward()
            assert exchanger.launched_in_backward == before
            with recorded() as seen, mock.patch.object(hvd, "synchronize", _forbidden):
                loss_of(model, own_batch(step + 5)).backward()
            assert len(exchanges(seen)) == len(exchanger.buckets) == 3, seen
            assert exchanger.launched_in_backward == before + 3
            optimizer.step()
        assert under_way == [0, 1, 0, 1] or under_way == [0, 2, 0, 2], under_way


def _forbidden(*_: Any) -> Any:
    raise AssertionError("a hook waits for an exchange")


@scenario(2)
def collectives_per_step() -> None:
    """S01: one collective per bucket and step, nothing else between agreements; few buckets."""
    torch.manual_seed(0)
    layers = [nn.Linear(6, 6).double() for _ in range(30)]
    model = nn.Sequential(*layers, nn.Linear(6, 3).double())
    for compression in (dense(), het.Compression.topk(4)):
        optimizer = wrap(model, sgd(model), compression=compression)
        with recorded() as seen:
            train(model, optimizer, range(3))
        assert len(seen) == 3, seen
        del optimizer
        model = nn.Sequential(*[nn.Linear(6, 6).double() for _ in range(30)])


# ---- waiting and drifting -----------------------------------------------------------------------


@scenario(2)
def waits_end() -> None:
    """Rule 11: a rank that is left alone says after its time-out where it waits: rank, step and
    parameters of the bucket, or the agreement; the late rank finds all it needs."""
    for compression in (dense(), het.Compression.topk(4, exchange="allgather")):
        model = classifier()
        optimizer = wrap(model, sgd(model), compression=compression)
        train(model, optimizer, range(2))
        if hvd.rank() == 0:
            exchanger_of(optimizer)._timeout_seconds = 0.5
            began = time.monotonic()
            words = ("rank 0", "step 2", "0.weight", "exchange_timeout_seconds", "0.5 s")
            with raises(ExchangeTimeoutError, *words):
                train(model, optimizer, [2])
            assert time.monotonic() - began >= 0.5
        hvd.barrier()
        if hvd.rank() == 1:
            train(model, optimizer, [2])
        hvd.barrier()
    balancer = het.Balancer(8, exchange_timeout_seconds=0.5 if hvd.rank() == 0 else 20.0)
    if hvd.rank() == 0:
        with raises(ExchangeTimeoutError, "rank 0", "set_batch", "exchange_timeout_seconds"):
            balancer.set_batch(4)
    hvd.barrier()
    if hvd.rank() == 1:
        balancer.set_batch(4)
    hvd.barrier()


@scenario(2)
def drift_of_a_weight() -> None:
    """S34, A29: a weight that rank 1 alone changes at step 3 is reported by all ranks at step 5,
    with the parameter's name."""
    model = classifier()
    optimizer = wrap(model, sgd(model), compression=dense(), drift_check_steps=5)
    train(model, optimizer, range(3))
    if hvd.rank() == 1:
        with torch.no_grad():
            model[2].weight[0, 0] += 1e-3
    train(model, optimizer, range(3, 4))
    with raises(het.RankMismatchError, "2.weight", "step 5", "rank 0", "rank 1"):
        train(model, optimizer, range(4, 5))


@scenario(2)
def drift_is_not_seen_where_there_is_none() -> None:
    """S34: gradients of equal magnitude, where top-k has ties, do not drift."""
    torch.manual_seed(0)
    model = nn.Linear(16, 4, bias=False)
    optimizer = wrap(model, sgd(model), compression=het.Compression.topk(8), drift_check_steps=1)
    for step in range(10):
        optimizer.zero_grad()
        signs = torch.ones(4, 16)
        signs[:, :: 2 + (step + hvd.rank()) % 3] = -1.0
        (model.weight * signs).sum().backward()
        optimizer.step()
    check_same_on_all_ranks(model)


@scenario(2)
def drift_of_the_learning_rate() -> None:
    """S16: ReduceLROnPlateau fed with each rank's own loss: the check names lr and the ranks; fed
    with the mean over ranks it reports nothing."""
    for averaged in (True, False):
        model = classifier()
        optimizer = wrap(model, sgd(model), compression=dense(), drift_check_steps=2)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)

        def epochs() -> None:
            for epoch in range(3):
                train(model, optimizer, range(2 * epoch, 2 * epoch + 2))  # noqa: B023
                own = float(epoch if hvd.rank() == 1 else -epoch)
                loss = sum(gather(own)) / 2 if averaged else own  # noqa: B023
                scheduler.step(loss)  # noqa: B023

        if averaged:
            epochs()
        else:
            with raises(het.RankMismatchError, "lr of parameter group 0", "rank 0", "rank 1"):
                epochs()


@scenario(2)
def decisions_are_shared() -> None:
    """Rule 12: ranks that see different gradients and times still change CF at the same step."""
    model = classifier()
    optimizer = wrap(
        model,
        sgd(model),
        compression=het.Compression.adaptive(window=2, min_cf=2, max_cf=16, eps=0.3),
    )
    used = []
    for step in range(16):
        optimizer.zero_grad()
        scale = 1.0 if hvd.rank() == 0 else 1e-3
        (loss_of(model, own_batch(step)) * scale).backward()
        if hvd.rank() == 1:
            time.sleep(0.002)
        optimizer.step()
        used.append(exchanger_of(optimizer).mode.cf)
    by_rank = gather(used)
    assert by_rank[0] == by_rank[1], by_rank
    assert len(set(used)) > 1, used
    check_same_on_all_ranks(model)


@scenario(1, 2)
def samples_stated_before_zero_grad() -> None:
    """Rule 6: set_batch may come before zero_grad, as where a loop says it when it has the data;
    it holds until the step, and not longer."""
    model, reference = classifier(), classifier()
    balancer = het.Balancer(4)
    optimizer = wrap(model, sgd(model), balancer=balancer)
    sizes = (3, 1)[: hvd.size()]
    plain = sgd(reference)
    for step in range(3):
        balancer.set_batch(sizes[hvd.rank()])
        train(model, optimizer, [step], lambda step: own_batch(step, sizes[hvd.rank()]))
        train(reference, plain, [step], lambda step: joined_batch(step, sizes))
    check_close(model, reference)
    with raises(het.BatchAccountingError, "set_batch"):
        train(model, optimizer, [3])


@scenario(1)
def one_process_without_exchange() -> None:
    """Rule 9: one process sends nothing, counts its steps, and trains as plain torch does."""
    for options in (
        {"compression": het.Compression.topk(4)},
        {"compression": het.Compression.adaptive(window=2)},
        {"balancer": het.Balancer(4, window_steps=2)},
    ):
        model = classifier()
        optimizer = wrap(model, sgd(model), **options)
        with recorded() as seen:
            for step in range(5):
                if "balancer" in options:
                    options["balancer"].set_batch(4)
                train(model, optimizer, [step])
        assert not seen, seen
        assert steps_counted(optimizer) == 5
        check_close(model, one_process(sgd, range(5)), 1e-15)


# ---- evaluation ---------------------------------------------------------------------------------


@scenario(1, 2)
def evaluation_counts_every_sample_once() -> None:
    """S44, S45: 5 samples, then 1, on all ranks: each seen once, and the mean is over samples."""
    for samples in (5, 1):
        data = torch.utils.data.TensorDataset(torch.arange(float(samples)))
        loader = het.evaluation_loader(data, batch_size=2)
        metric, seen = het.SampleMean(), []
        for (x,) in loader:
            metric.add(x.mean(), len(x))
            seen += x.tolist()
        assert sorted(itertools.chain(*gather(seen))) == list(range(samples))
        assert metric.result() == (samples - 1) / 2
    shards = (951, 950) if hvd.size() == 2 else (951,)
    metric = het.SampleMean()
    metric.add(1.0 if hvd.rank() == 0 else 0.25, shards[hvd.rank()])
    expected = sum(n * v for n, v in zip(shards, (1.0, 0.25), strict=False)) / sum(shards)
    assert abs(metric.result() - expected) < 1e-12
    with raises(het.ConfigurationError, "no rank has added"):
        het.SampleMean().result()


@scenario(2)
def evaluation_follows_the_plan() -> None:
    balancer = het.Balancer(8, fixed_local_batches=[6, 2])
    data = torch.utils.data.TensorDataset(torch.arange(40.0))
    loader = het.evaluation_loader(data, batch_size=4, balancer=balancer)
    seen = [x.tolist() for (x,) in loader]
    assert [sum(map(len, one)) for one in gather(seen)] == [30, 10]


@scenario(1, 2)
def batchnorm_statistics_are_those_of_all_samples() -> None:
    """A19: with momentum 1 the merged statistics are those of the joined batch, by its sizes."""
    sizes = [6, 2] if hvd.size() == 2 else [8]
    balancer = het.Balancer(8, fixed_local_batches=sizes)
    generator = torch.Generator().manual_seed(0)
    joined = torch.randn(8, 3, 5, generator=generator, dtype=torch.float64) * 2 + 1
    model = nn.Sequential(nn.BatchNorm1d(3, momentum=1.0), nn.BatchNorm1d(3, momentum=1.0))
    model.append(nn.BatchNorm1d(3, track_running_stats=False))
    model.double()
    own = joined.split(sizes)[hvd.rank()]
    model[0](own)
    # torch keeps the unbiased variance; what is merged is put right here to compare exactly.
    count = own.shape[0] * own.shape[2]
    model[0].running_var.mul_((count - 1) / count)
    assert het.merge_batchnorm_statistics(model, balancer) == 2
    check_close([model[0].running_mean], [joined.mean(dim=(0, 2))], 1e-12)
    check_close([model[0].running_var], [joined.var(dim=(0, 2), unbiased=False)], 1e-12)
    check_same_on_all_ranks(model)


# ---- profiles -----------------------------------------------------------------------------------


@scenario(2)
def the_next_job_begins_with_the_profile() -> None:
    """A job on the same hosts begins with the plan that the one before it has learnt."""
    folder = hvd.broadcast_object(tempfile.mkdtemp() if hvd.rank() == 0 else None, name="folder")
    path = Path(folder) / "profile.json"
    first = het.Balancer(32, profile=path)
    assert first.plan.local_batches == (16, 16)
    if hvd.rank() == 0:
        for batches in ((16, 16), (24, 8)):
            seconds = (1e-3 * batches[0], 3e-3 * batches[1])
            steps = [
                [StepTiming(b, s / 2, s, 0.05)] * 9 for b, s in zip(batches, seconds, strict=True)
            ]
            first.decide([summarise(one) for one in steps], [first.report()] * 2, [1.0], None)
    hvd.barrier()
    later = het.Balancer(32, profile=path)
    assert later.plan.local_batches[0] > 20, later.plan
    assert gather(later.plan.local_batches) == [later.plan.local_batches] * 2
    hvd.barrier()
    if hvd.rank() == 0:
        path.write_text("{")
    hvd.barrier()
    with raises(het.ConfigurationError, "profile=", "delete it"):
        het.Balancer(32, profile=path)
    with raises(het.ConfigurationError, "does not exist"):
        het.Balancer(32, profile=Path(folder) / "nowhere" / "profile.json")
    with raises(het.RankMismatchError, "profile"):
        het.Balancer(32, profile=path if hvd.rank() == 0 else None)
