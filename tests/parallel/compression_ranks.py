"""Scenarios of compression on real ranks; each raises when something is wrong."""

# mypy: disable-error-code="no-untyped-call, union-attr, operator, index, misc"

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor, nn

import hvd_hetero as het
from hvd_hetero.compression.topk import k_for
from hvd_hetero.runtime.exchanger import SparsityMode
from tests.parallel.scenarios import forced_sparse
from tests.parallel.seam_tools import (
    Scenario,
    batch_of,
    check_close,
    check_same_on_all_ranks,
    exchanger_of,
    exchanges,
    gather,
    loss_of,
    own_batch,
    raises,
    recorded,
    registrar,
    residuals,
    run_scenarios,
    train,
    wrap,
)

SCENARIOS: dict[str, Scenario] = {}
scenario = registrar(SCENARIOS)


def run() -> dict[str, str]:
    return run_scenarios(SCENARIOS)


# ---- tools --------------------------------------------------------------------------------------


def plain_sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def wide(seed: int = 0, width: int = 64, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """As the classifier, but large enough for compression to save bytes."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3)).to(dtype)


def own_wide(step: int) -> tuple[Tensor, Tensor]:
    return own_batch(step, dtype=torch.float32)


def flat(tensors: Any) -> Tensor:
    return torch.cat([tensor.detach().double().flatten() for tensor in tensors])


def summed(tensor: Tensor, name: str) -> Tensor:
    return hvd.allreduce(tensor, op=hvd.Sum, name=f"test.{name}")


@contextmanager
def logged(level: int = logging.INFO) -> Iterator[io.StringIO]:
    """What the package logs in the block."""
    text = io.StringIO()
    logger, handler = logging.getLogger("hvd_hetero"), logging.StreamHandler(text)
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield text
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def strategies() -> list[Any]:
    return [
        het.Compression.topk(8, exchange="allgather"),
        het.Compression.topk(8, exchange="shared-index"),
        het.Compression.topk(8, exchange="allgather", values="float32"),
        het.Compression.topk(8, exchange="shared-index", values="float32"),
    ]


# ---- what is sent -------------------------------------------------------------------------------


@scenario(2)
def ratios() -> None:
    """S25: of 1000 elements 1000, 500, 100, 1, 1 are sent; bytes counted are those sent."""
    for cf, expected in ((1, 1000), (2, 500), (10, 100), (1000, 1), (1e6, 1)):
        model = nn.Linear(999, 1, bias=True)
        optimizer = wrap(model, plain_sgd(model), compression=het.Compression.topk(cf))
        assert k_for(1000, cf) == expected
        with recorded() as seen:
            optimizer.zero_grad()
            torch.manual_seed(hvd.rank())
            model(torch.randn(4, 999)).sum().backward()
            optimizer.step()
        (sent,) = exchanges(seen)
        exchanger = exchanger_of(optimizer)
        if expected == 1000:
            assert (sent.kind, sent.elements) == ("allreduce", 1000)
            assert exchanger.sent_bytes == 4 * 1000  # 2 (n-1)/n * 4 d
        else:
            assert sent.kind == "allgather"
            assert exchanger.sent_bytes == sent.elements  # one byte each, to one other rank
            kept = int((exchanger.buckets[0].feedback.residual == 0).sum())
            assert kept <= expected + 1, (kept, expected)


@scenario(2)
def dense_steps() -> None:
    """S28, A07: exactly so many dense steps come first."""
    for wanted in (0, 1, 2, 5):
        for compression in (
            het.Compression.topk(8, dense_steps=wanted),
            het.Compression.adaptive(dense_steps=wanted, do_no_harm=False, eps=0.001, window=50),
        ):
            model = wide()
            optimizer = wrap(model, plain_sgd(model), compression=compression)
            kinds = []
            for step in range(7):
                train(model, optimizer, [step], own_wide)
                kinds.append(exchanger_of(optimizer).take_strategy())
            assert kinds[:wanted] == ["dense"] * wanted, (wanted, kinds)
            assert all(kind != "dense" for kind in kinds[wanted:]), (wanted, kinds)


@scenario(2)
def small_tensors() -> None:
    """S28: three elements never travel as more bytes than dense."""
    model = nn.Linear(2, 1)
    optimizer = wrap(model, plain_sgd(model), compression=het.Compression.topk(100))
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert exchanger_of(optimizer).sent_bytes <= 4 * 3


@scenario(2)
def tied_embedding() -> None:
    """S21: at ratio 0.5 and 1 a tied embedding never costs more bytes than dense."""
    for cf in (1, 2):
        torch.manual_seed(0)
        embedding = nn.Embedding(5000, 16)
        output = nn.Linear(16, 5000, bias=False)
        output.weight = embedding.weight
        model = nn.Sequential(embedding, output)
        optimizer = wrap(model, plain_sgd(model), compression=het.Compression.topk(cf))
        optimizer.zero_grad()
        model(torch.tensor([hvd.rank(), 3])).logsumexp(-1).sum().backward()
        optimizer.step()
        assert 0 < exchanger_of(optimizer).sent_bytes <= 4 * 5000 * 16
        check_same_on_all_ranks(model)


@scenario(2)
def many_parameters() -> None:
    """S30: 400 parameters need few names, far from the 1024 of Horovod's cache."""
    layers = [nn.Linear(4, 4) for _ in range(200)]
    model = nn.Sequential(*layers)
    compression = het.Compression.topk(8, dense_steps=2)
    optimizer = wrap(model, plain_sgd(model, 1e-3), compression=compression)
    with recorded() as seen:
        for step in range(6):
            optimizer.zero_grad()
            model(own_wide(step)[0][:, :4]).sum().backward()
            optimizer.step()
    names = {one.name for one in seen}
    assert None not in names
    assert len(names) <= 400 + 20, len(names)


@scenario(2)
def early_buckets_start_before_backward_ends() -> None:
    """The exchange of early buckets overlaps backward, with every strategy."""
    for compression in (*strategies(), het.Compression.topk(1, dense_steps=9)):
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])
        optimizer = wrap(model, plain_sgd(model), compression=compression, bucket_bytes=20_000)
        launched: list[int] = []
        with recorded() as seen:
            for _ in range(2):
                optimizer.zero_grad()
                before = len(seen)
                x = torch.randn(4, 64, requires_grad=True)
                x.register_hook(
                    lambda _, n=launched, s=seen: n.append(len(s))
                )  # backward is not over yet
                model(x).sum().backward()
                launched[-1] -= before
                optimizer.step()
        assert min(launched) >= 2, launched
        assert exchanger_of(optimizer).launched_in_backward > 0


# ---- the model is right -------------------------------------------------------------------------


@scenario(2, 4)
def nothing_is_lost() -> None:
    """S26: applied updates + residuals = sum of mean gradients, with every exchange and format."""
    for compression in strategies():
        model = wide(dtype=torch.float64)
        start = flat(model.parameters()).clone()
        optimizer = wrap(model, plain_sgd(model, 1.0), compression=compression)
        true_sum = torch.zeros_like(start)
        for step in range(50):
            reference = wide(dtype=torch.float64)
            reference.load_state_dict(model.state_dict())
            for rank in range(hvd.size()):
                loss = loss_of(reference, batch_of(rank, step % 5)) / hvd.size()
                loss.backward()
            true_sum += flat(p.grad for p in reference.parameters())
            train(model, optimizer, [step % 5])
        applied = start - flat(model.parameters())
        by_name = optimizer.hetero_state_dict()["residuals"]
        left = flat(by_name[name] for name, _ in model.named_parameters())
        held_back = summed(left, "left")
        assert held_back.norm() > 0.01 * true_sum.norm()
        torch.testing.assert_close(applied + held_back, true_sum, rtol=1e-5, atol=1e-5)
        check_same_on_all_ranks(model)


@scenario(2)
def compression_factor_one_equals_dense() -> None:
    """CF 1 sends everything: as one process, also where the sparse exchange is forced."""
    for force in (False, True):
        for exchange in ("allgather", "shared-index"):
            with forced_sparse(force):
                ours, dense = wide(dtype=torch.float64), wide(dtype=torch.float64)
                compression = het.Compression.topk(1, exchange=exchange)
                optimizer = wrap(ours, plain_sgd(ours), compression=compression)
                stock = hvd.DistributedOptimizer(plain_sgd(dense), dense.named_parameters())
                train(ours, optimizer, range(5))
                train(dense, stock, range(5))
                check_close(ours, dense, 1e-12)


@scenario(2)
def a_gradient_that_is_not_finite() -> None:
    """One rank's NaN or infinity is everybody's in that step, and in no residual ever."""
    for compression in strategies():
        for bad in (float("nan"), float("inf"), -float("inf")):
            model = wide()
            optimizer = wrap(model, plain_sgd(model), compression=compression, bucket_bytes=1200)
            train(model, optimizer, range(3), own_wide)
            before = residuals(optimizer)
            weights = [p.detach().clone() for p in model.parameters()]
            optimizer.zero_grad()
            loss = loss_of(model, own_wide(3))
            first = next(model.parameters())
            hook = first.register_hook(
                lambda grad, bad=bad: torch.full_like(grad, bad) if hvd.rank() == 1 else grad
            )
            loss.backward()
            hook.remove()
            optimizer.synchronize()
            # All of it, in every bucket: a part would be applied, and sent again.
            assert all(p.grad.isnan().all() for p in model.parameters()), compression
            with optimizer.skip_synchronize():
                optimizer.step()
            check_close(residuals(optimizer), before, 0)
            assert exchanger_of(optimizer).nonfinite_steps == 1
            with torch.no_grad():
                for parameter, weight in zip(model.parameters(), weights, strict=True):
                    parameter.copy_(weight)
            train(model, optimizer, range(4, 8), own_wide)
            check_same_on_all_ranks(model)


@scenario(2)
def a_skipped_mixed_precision_step() -> None:
    """A10: with a GradScaler all ranks skip together; residuals are right while the scale moves."""
    for compression in strategies():
        model = wide()
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        optimizer = wrap(model, plain_sgd(model), compression=compression, grad_scaler=scaler)
        unscaled = wide()
        plain = wrap(unscaled, plain_sgd(unscaled), compression=compression)
        skipped = 0
        for step in range(8):
            weights = [p.detach().clone() for p in model.parameters()]
            before = residuals(optimizer)
            optimizer.zero_grad()
            loss = loss_of(model, own_wide(step))
            if step == 4 and hvd.rank() == 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
            scaler.update()
            if step == 4:
                check_close(model, weights, 0)
                optimizer.hetero_state_dict()  # a checkpoint may be due just now
                optimizer.zero_grad()
                check_close(residuals(optimizer), before, 0)
                skipped += 1
            else:
                train(unscaled, plain, [step], own_wide)
        assert skipped == 1
        if compression.exchange == "allgather":  # else other ranks led after the skipped step
            check_close(model, unscaled, 1e-6)
        check_same_on_all_ranks(model)


@scenario(1, 2)
def a_scaler_without_synchronize_is_refused() -> None:
    """GradScaler unscales what is under way; the recipe is named before anything is applied."""
    model = wide()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    compression = het.Compression.topk(8)
    optimizer = wrap(model, plain_sgd(model), compression=compression, grad_scaler=scaler)
    optimizer.zero_grad()
    scaler.scale(loss_of(model, own_wide(0))).backward()
    before = [p.detach().clone() for p in model.parameters()]
    with raises(het.UnsupportedError, "synchronize()", "scaler.unscale_", "skip_synchronize"):
        scaler.step(optimizer)
    check_close(model, before, 0)
    optimizer.zero_grad()


@scenario(2)
def thrown_away_gradients() -> None:
    """A12: gradients of one optimizer, thrown away by zero_grad, leave no trace in it or others."""
    for compression in strategies():
        one, two = wide(0), wide(1)
        lonely = wide(0)
        first = wrap(one, plain_sgd(one), compression=compression)
        second = wrap(two, plain_sgd(two), compression=compression)
        alone = wrap(lonely, plain_sgd(lonely), compression=compression)
        for step in range(5):
            first.zero_grad()
            second.zero_grad()
            loss_of(two, own_wide(step)).backward()  # for another optimizer's step, as in a GAN
            loss_of(one, own_wide(step)).backward()
            first.step()
            second.zero_grad()
            train(lonely, alone, [step], own_wide)
        check_close(one, lonely, 0)
        assert all(not residual.any() for residual in residuals(second))
        train(two, second, range(3), own_wide)
        check_same_on_all_ranks(two)


@scenario(2)
def unfrozen_later() -> None:
    """A13: frozen parameters send nothing; unfrozen ones join with an empty residual."""
    for compression in strategies():
        model = wide()
        for parameter in model[0].parameters():
            parameter.requires_grad_(False)
        optimizer = wrap(model, plain_sgd(model), compression=compression)
        train(model, optimizer, range(3), own_wide)
        frozen = model[0].weight.detach().clone()
        check_close([wide()[0].weight], [frozen], 0)
        for parameter in model[0].parameters():
            parameter.requires_grad_(True)
        train(model, optimizer, range(3, 30), own_wide)
        assert not torch.equal(frozen, model[0].weight)
        check_same_on_all_ranks(model)


# ---- choosing -----------------------------------------------------------------------------------


@scenario(2)
def no_harm_on_loopback() -> None:
    """S31, A08: where compression wins nothing the run is dense within 50 steps, and says so.

    A residual counts so much here that no noise of a busy machine makes up for it; what a step
    takes on a loopback is benchmarks/overhead.py's to tell.
    """
    for policy in ("gravac", "model"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 256), nn.Tanh(), nn.Linear(256, 256), nn.Linear(256, 3))
        compression = het.Compression.adaptive(policy=policy, kappa=30.0)
        with logged() as text:
            optimizer = wrap(model, plain_sgd(model), compression=compression)
            train(model, optimizer, range(70), own_wide)
        exchanger = exchanger_of(optimizer)
        assert exchanger.mode.cf is None, exchanger.mode
        exchanger.take_strategy()
        as_horovod = []
        for step in range(20):
            train(model, optimizer, [step], own_wide)
            as_horovod.append(exchanger.where_it_lies)
        assert exchanger.take_strategy() == "dense"
        assert sum(as_horovod) >= 10, as_horovod  # without a copy, but for a window of measuring
        if hvd.rank() == 0:
            assert "dense" in text.getvalue(), text.getvalue()


@scenario(2)
def a_policy_that_compresses() -> None:
    """Every policy runs with every exchange: replicas stay equal while the factor changes."""
    for policy in ("gravac", "model"):
        for exchange in ("auto", "allgather", "shared-index"):
            model = wide(width=512)
            compression = het.Compression.adaptive(
                policy=policy,
                exchange=exchange,
                window=3,
                eps=0.05,
                min_cf=4,
                max_cf=500,
                do_no_harm=False,
            )
            optimizer = wrap(model, plain_sgd(model, 0.01), compression=compression)
            train(model, optimizer, range(30), own_wide)
            check_same_on_all_ranks(model)


# ---- checkpoints --------------------------------------------------------------------------------


@scenario(2)
def flush() -> None:
    """flush_residuals: afterwards nothing is held back, and no gradient was lost."""
    for compression in strategies():
        for steps in (1, 3):
            model = wide(dtype=torch.float64)
            optimizer = wrap(model, plain_sgd(model), compression=compression)
            train(model, optimizer, range(5))
            assert any(residual.any() for residual in residuals(optimizer))
            optimizer.flush_residuals(steps)
            for step in range(steps):
                assert any(residual.any() for residual in residuals(optimizer)), step
                train(model, optimizer, [step])
            assert all(not residual.any() for residual in residuals(optimizer))
            train(model, optimizer, range(3))
            assert any(residual.any() for residual in residuals(optimizer)), "compresses again"
            check_same_on_all_ranks(model)


@scenario(2)
def flush_on_one_rank_only() -> None:
    """A call that not all ranks make alike is an error on all of them."""
    model = wide()
    optimizer = wrap(model, plain_sgd(model), compression=het.Compression.topk(8))
    train(model, optimizer, range(2), own_wide)
    with raises(het.RankMismatchError, "flush_residuals.steps", "rank 0 has 1", "rank 1 has 2"):
        optimizer.flush_residuals(1 + hvd.rank())
    with raises(het.ConfigurationError, "steps=0"):
        optimizer.flush_residuals(0)
    optimizer.zero_grad()
    loss_of(model, own_wide(0)).backward()
    for call in (optimizer.flush_residuals, optimizer.hetero_state_dict):
        with raises(het.ConfigurationError, "between backward and the end"):
            call()
    optimizer.step()


@scenario(2)
def a_gradient_that_is_not_finite_in_a_flush() -> None:
    """Dense steps that carry residuals lose nothing to another rank's NaN either."""
    model = wide()
    optimizer = wrap(model, plain_sgd(model), compression=het.Compression.topk(8))
    train(model, optimizer, range(3), own_wide)
    weights = [p.detach().clone() for p in model.parameters()]
    before = residuals(optimizer)
    optimizer.flush_residuals()
    hook = next(model.parameters()).register_hook(
        lambda grad: grad * float("nan") if hvd.rank() == 1 else grad
    )
    optimizer.zero_grad()
    loss_of(model, own_wide(3)).backward()
    hook.remove()
    optimizer.step()
    check_close(residuals(optimizer), before, 0)
    assert exchanger_of(optimizer).nonfinite_steps == 1
    with torch.no_grad():
        for parameter, weight in zip(model.parameters(), weights, strict=True):
            parameter.copy_(weight)
    train(model, optimizer, [4], own_wide)
    assert all(not residual.any() for residual in residuals(optimizer))
    check_same_on_all_ranks(model)


@scenario(2)
def frozen_in_mid_run() -> None:
    """Frozen on all ranks: trains on, in place again once unfrozen. On one rank only: an error."""
    model = wide()
    optimizer = wrap(model, plain_sgd(model), compression=het.Compression.topk(8, window=5))
    train(model, optimizer, range(3), own_wide)
    model[0].weight.requires_grad_(False)
    train(model, optimizer, range(3, 7), own_wide)
    model[0].weight.requires_grad_(hvd.rank() == 0)
    with raises(het.RankMismatchError, "frozen parameters", "0.weight"):
        train(model, optimizer, range(7, 12), own_wide)


@scenario(2)
def frozen_from_the_start() -> None:
    """Every policy wraps a model that has nothing to train as yet, and goes on when it has."""
    for policy in ("gravac", "model", "fixed"):
        model = wide()
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        factors = {"min_cf": 8, "max_cf": 8} if policy == "fixed" else {}
        compression = het.Compression.adaptive(policy=policy, window=3, **factors)
        optimizer = wrap(model, plain_sgd(model), compression=compression)
        for parameter in model.parameters():
            parameter.requires_grad_(True)
        optimizer.zero_grad()
        train(model, optimizer, range(8), own_wide)
        check_same_on_all_ranks(model)


@scenario(2)
def one_rank_loads_in_a_flush() -> None:
    """load_state_dict on rank 0 alone, as before a broadcast, must not part the ranks' ways."""
    model = wide()
    optimizer = wrap(model, plain_sgd(model), compression=het.Compression.topk(8))
    train(model, optimizer, range(3), own_wide)
    exchanger_of(optimizer).set_mode(SparsityMode(), flush_steps=4)
    train(model, optimizer, range(1), own_wide)
    if hvd.rank() == 0:
        optimizer.load_state_dict(optimizer.state_dict())
    train(model, optimizer, range(6), own_wide)
    check_same_on_all_ranks(model)


@scenario(2)
def states_at_odd_moments() -> None:
    """After the dense steps without the policy's part; before a joined parameter was sampled."""
    model = wide()
    compression = het.Compression.topk(8, dense_steps=3)
    optimizer = wrap(model, plain_sgd(model), compression=compression)
    train(model, optimizer, range(2), own_wide)
    state = optimizer.hetero_state_dict()
    del state["compression"]
    optimizer.load_hetero_state_dict({**state, "steps": 20})
    train(model, optimizer, range(12), own_wide)
    assert exchanger_of(optimizer).mode.cf == 8.0
    check_same_on_all_ranks(model)

    for policy in ("gravac", "model"):
        model = wide()
        model[0].weight.requires_grad_(False)
        compression = het.Compression.adaptive(policy=policy, window=5, do_no_harm=False)
        optimizer = wrap(model, plain_sgd(model), compression=compression)
        train(model, optimizer, range(2), own_wide)
        model[0].weight.requires_grad_(True)
        train(model, optimizer, range(2, 4), own_wide)
        optimizer.load_hetero_state_dict(optimizer.hetero_state_dict())
        train(model, optimizer, range(4, 12), own_wide)
        check_same_on_all_ranks(model)


@scenario(2)
def state_follows_names() -> None:
    """S27: layers in another order, same names: residuals go where the names are."""

    def model_of(order: tuple[str, ...]) -> nn.ModuleDict:
        torch.manual_seed(0)
        layers = {name: nn.Linear(20, 20) for name in ("a", "b")}
        return nn.ModuleDict({name: layers[name] for name in order})

    def step_of(model: nn.ModuleDict, optimizer: Any) -> None:
        optimizer.zero_grad()
        x = torch.randn(3, 20, generator=torch.Generator().manual_seed(hvd.rank()))
        (model["a"](x).sin().sum() + 2 * model["b"](x).cos().sum()).backward()
        optimizer.step()

    compression = het.Compression.topk(8)
    saved_model = model_of(("a", "b"))
    saved = wrap(saved_model, plain_sgd(saved_model), compression=compression)
    for _ in range(3):
        step_of(saved_model, saved)
    state = saved.hetero_state_dict()
    other_model = model_of(("b", "a"))
    other = wrap(other_model, plain_sgd(other_model), compression=compression)
    other.load_hetero_state_dict(state)
    loaded = other.hetero_state_dict()["residuals"]
    assert set(loaded) == set(state["residuals"]) == {"a.weight", "a.bias", "b.weight", "b.bias"}
    for name, residual in state["residuals"].items():
        check_close([loaded[name]], [residual], 0)
    wrong = nn.ModuleDict({"a": nn.Linear(20, 21), "b": nn.Linear(20, 20)})
    unfit = wrap(wrong, plain_sgd(wrong), compression=compression)
    with raises(het.ConfigurationError, "'a.bias'", "(20,)", "(21,)"):
        unfit.load_hetero_state_dict(state)


@scenario(2)
def states_are_checked() -> None:
    """A state of another rank, of other options, of other ranks alone: each is an error."""
    model = wide()
    optimizer = wrap(model, plain_sgd(model), compression=het.Compression.topk(8))
    train(model, optimizer, range(2), own_wide)
    state = optimizer.hetero_state_dict()
    everyone = gather({**state, "residuals": {}, "compression": None})
    with raises(het.ConfigurationError, "version"):
        optimizer.load_hetero_state_dict({"residuals": {}})
    with raises(het.ConfigurationError, "every rank loads"):
        optimizer.load_hetero_state_dict(everyone[1 - hvd.rank()])
    with raises(het.ConfigurationError, "saved by a job of 3 ranks"):
        optimizer.load_hetero_state_dict({**state, "ranks": 3})
    changed = {**state, "compression": {**state["compression"]}}
    changed["compression"]["spec"] = {**changed["compression"]["spec"], "min_cf": 9.0}
    with raises(het.ConfigurationError, "other compression options", "min_cf 9.0 -> 8.0"):
        optimizer.load_hetero_state_dict(changed)
    with raises(het.RankMismatchError, "loaded state.steps"):
        optimizer.load_hetero_state_dict({**state, "steps": hvd.rank()})
    del state["residuals"]["0.bias"]
    with logged() as text:
        optimizer.load_hetero_state_dict(state)
    assert text.getvalue().count("no residual") == 1 and "0.bias" in text.getvalue()
    train(model, optimizer, range(2), own_wide)
    check_same_on_all_ranks(model)


# ---- started by tests that need more than one launch --------------------------------------------


def train_and_save(folder: str, first: int, last: int, options: dict[str, Any]) -> list[float]:
    """Train steps first..last, from the files of the step before if there is one, and save."""
    hvd.init()
    torch.manual_seed(0)
    model = wide(width=300)
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    compression = het.Compression.topk(**options)
    optimizer = wrap(model, inner, compression=compression, bucket_bytes=4096)
    if first > 0:
        path = Path(folder) / f"{first}.{hvd.rank()}.pt"
        if path.exists():
            saved = torch.load(path, weights_only=True)
            hetero = saved["hetero"]
        else:
            saved = torch.load(Path(folder) / f"{first}.0.pt", weights_only=True)
        if saved["hetero"]["ranks"] != hvd.size():
            hetero = [
                torch.load(file, weights_only=True)["hetero"]
                for file in sorted(Path(folder).glob(f"{first}.*.pt"))
            ]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        optimizer.load_hetero_state_dict(hetero)
    held_back = optimizer.hetero_state_dict()["residuals"]
    left = flat(held_back.values()) if held_back else torch.zeros(300 * 10 + 3).double()
    start = summed(left, "start")
    train(model, optimizer, range(first, last), own_wide)
    check_same_on_all_ranks(model)
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "hetero": optimizer.hetero_state_dict(),
    }
    torch.save(state, Path(folder) / f"{last}.{hvd.rank()}.pt")
    hvd.barrier()
    hvd.shutdown()
    return [float(start.norm()), float(start.sum())]


def alternate(steps: int) -> list[float]:
    """Train while every step travels in another way than the one before; return the weights."""
    hvd.init()
    model = wide()
    optimizer = wrap(model, plain_sgd(model), compression=het.Compression.topk(8, window=1000))
    exchanger = exchanger_of(optimizer)
    modes = [SparsityMode(8.0), SparsityMode(), SparsityMode(8.0, "shared-index"), SparsityMode()]
    for step in range(steps):
        exchanger.set_mode(modes[step % 4], flush_steps=1)
        train(model, optimizer, [step], own_wide)
    check_same_on_all_ranks(model)
    weights = [float(value) for value in flat(model.parameters())]
    hvd.shutdown()
    return weights
