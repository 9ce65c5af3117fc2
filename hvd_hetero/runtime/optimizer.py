"""``DistributedOptimizer``: Horovod's own optimizer with a weighted, compressed exchange.

Horovod builds a class afresh for every wrapped optimizer, derived from the user's optimizer class.
Here the stock optimizer is built by Horovod's own function, and methods are overridden on that
fresh class. Subclassing it would recurse (its methods call ``super(self.__class__, self)``), and
patching the instance would break learning rate schedulers, which patch ``step`` there themselves.
"""

from __future__ import annotations

import itertools
import logging
import os
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch

from hvd_hetero.compression.spec import Adaptive
from hvd_hetero.errors import (
    ConfigurationError,
    UnsupportedError,
    check_bool,
    check_choice,
    check_float,
    check_int,
)
from hvd_hetero.runtime.agreement import CollectivesChannel, verify_alike
from hvd_hetero.runtime.balancer import Balancer
from hvd_hetero.runtime.collectives import connect, hvd
from hvd_hetero.runtime.coordinator import Coordinator, CoordinatorOptions, open_channel
from hvd_hetero.runtime.crossing import watch_collectives
from hvd_hetero.runtime.engine import OptimizerEngine, WeightRule
from hvd_hetero.runtime.exchanger import GradientExchanger
from hvd_hetero.runtime.joining import refuse_join
from hvd_hetero.runtime.marks import marks_for
from hvd_hetero.runtime.mpi import open_step
from hvd_hetero.runtime.parameters import name_parameters, parameter_signature
from hvd_hetero.runtime.timings import StepTimer

logger = logging.getLogger("hvd_hetero")

DEFAULT_BUCKET_BYTES = 8 * 2**20

_counter = itertools.count()
_owners: dict[int, str] = {}  # by id of the parameter, as tensors compare by elements


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Any = hvd.Compression.none,
    backward_passes_per_step: int = 1,
    op: Any = hvd.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: Any = hvd.global_process_set,
    *,
    balancer: Balancer | None = None,
    loss_reduction: str = "mean",
    loss_divided_by_passes: bool | None = None,
    loss_weighted: bool = False,
    local_clip_norm: float | None = None,
    grad_scaler: Any = None,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    exchange_timeout_seconds: float = 600.0,
    drift_check_steps: int | None = None,
    log: str | os.PathLike[str] | None = None,
    replay: str | os.PathLike[str] | None = None,
) -> Any:
    """Wrap a ``torch.optim.Optimizer`` as Horovod does, with compression and balancing.

    The positional parameters are those of ``horovod.torch.DistributedOptimizer``, in its order and
    with its meaning. Without a balancer, with ``Compression.none`` or ``.fp16`` and without
    ``local_clip_norm``, gradients take Horovod's own path.

    Args:
        compression: ``Compression.none``, ``.fp16``, ``.topk(cf)`` or ``.adaptive(...)``.
        balancer: gives every rank its local batch; the aggregated gradient is then the mean over
            all samples of the step, whatever the ranks' batches.
        loss_reduction: "mean" or "sum", how the loss of a batch is reduced (with a balancer).
        loss_divided_by_passes: whether the script divides the loss by
            ``backward_passes_per_step``; to be said with a balancer and more than one pass. The
            result is the mean over all samples of the step either way.
        loss_weighted: the script calls ``balancer.weigh_loss(loss).backward()``, which weighs
            losses before backward: exact also for layers that talk across ranks in forward (synced
            norms, gathered contrastive losses), which are refused otherwise. From then on backward
            of ``hvd.allgather``, ``hvd.broadcast`` and ``hvd.reducescatter`` gives the derivative
            of the sum of the ranks' losses, from which Horovod's own differs by a factor.
        local_clip_norm: clip each rank's own gradient to this norm before aggregation. The usual
            recipe, ``synchronize()`` then ``clip_grad_norm_`` then ``step()`` inside
            ``skip_synchronize()``, clips the aggregated gradient.
        grad_scaler: the ``torch.amp.GradScaler`` of mixed precision training, needed with
            compression: residuals are kept free of its moving scale. The order of calls is
            ``scaler.scale(loss).backward()``, ``optimizer.synchronize()``,
            ``scaler.unscale_(optimizer)``, then ``scaler.step(optimizer)`` inside
            ``optimizer.skip_synchronize()``, ``scaler.update()``.
        bucket_bytes: gradients travel in flat buckets of about this size.
        exchange_timeout_seconds: how long to wait for other ranks before an error.
        drift_check_steps: every so many steps compare parameters and learning rates between
            ranks; RankMismatchError names the first that differs.
        log: file for JSON lines about the run, written by rank 0; default ``HVD_HETERO_LOG``.
        replay: a file written by ``log``: the plans and choices of compression of the last run in
            it are applied again, after the same steps and from the same batches; nothing is
            measured to decide by. Needs the same ranks, model and options.

    Returns:
        An instance of a fresh subclass of the optimizer's class, as Horovod's is.

    Raises:
        ConfigurationError: a value that cannot be used.
        UnsupportedError: a Horovod feature that cannot be combined with compression or balancing.
        RankMismatchError: ranks differ in options or parameters.
        TypeError: the optimizer's class cannot be built from parameter groups.
    """
    collectives = connect()
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigurationError(
            f"optimizer={type(optimizer).__name__}: expected a torch.optim.Optimizer"
        )
    if hasattr(optimizer, "_requires_update"):
        raise ConfigurationError(
            "optimizer is wrapped by Horovod already: pass the plain torch optimizer"
        )
    passes = check_int("backward_passes_per_step", backward_passes_per_step, minimum=1)
    spec = compression if isinstance(compression, Adaptive) else None
    if spec is None and not _is_horovod_compressor(compression):
        raise ConfigurationError(
            f"compression={compression!r}: must be hvd_hetero.Compression.none, .fp16, .topk(cf) "
            "or .adaptive(...)"
        )
    if balancer is not None and not isinstance(balancer, Balancer):
        raise ConfigurationError(f"balancer={balancer!r}: expected an hvd_hetero.Balancer or None")
    if local_clip_norm is not None:
        check_float("local_clip_norm", local_clip_norm, minimum=0, exclusive_minimum=True)
    if isinstance(grad_scaler, type) or not (
        grad_scaler is None or callable(getattr(grad_scaler, "get_scale", None))
    ):
        raise ConfigurationError(
            f"grad_scaler={grad_scaler!r}: expected a torch.amp.GradScaler or None"
        )
    check_bool("sparse_as_dense", sparse_as_dense)
    if isinstance(op, bool) or op not in (hvd.Average, hvd.Sum, hvd.Adasum):
        raise ConfigurationError(f"op={op!r}: must be hvd.Average, hvd.Sum or hvd.Adasum")
    check_float(
        "gradient_predivide_factor", gradient_predivide_factor, minimum=0, exclusive_minimum=True
    )
    check_int("num_groups", num_groups, minimum=0)
    log = _check_path("log", log, "None to use HVD_HETERO_LOG")
    replay = _check_path("replay", replay, "None")
    own_path = spec is not None or balancer is not None or local_clip_norm is not None
    if own_path:
        _refuse_unsupported(op, gradient_predivide_factor, num_groups, groups, process_set)
    check_choice("loss_reduction", loss_reduction, ("mean", "sum"))
    _check_divided(loss_divided_by_passes, passes, balancer)
    if check_bool("loss_weighted", loss_weighted) and local_clip_norm is not None:
        raise UnsupportedError(
            f"local_clip_norm={local_clip_norm!r} with loss_weighted=True: a gradient may hold "
            "parts of other ranks' losses, so that no rank has one of its own to clip: clip the "
            "aggregated gradient between optimizer.synchronize() and optimizer.step()"
        )
    if loss_weighted and balancer is None:
        raise ConfigurationError(
            "loss_weighted=True without a balancer: losses are weighed by balancer.weigh_loss(); "
            "pass balancer=..., or leave it out"
        )
    check_int("bucket_bytes", bucket_bytes, minimum=1)
    timeout = check_float(
        "exchange_timeout_seconds", exchange_timeout_seconds, minimum=0, exclusive_minimum=True
    )
    if drift_check_steps is not None:
        check_int("drift_check_steps", drift_check_steps, minimum=1)

    names = name_parameters(optimizer, named_parameters)
    prefix = f"hvd_hetero.{next(_counter)}"
    options = CoordinatorOptions(
        spec=spec,
        drift_check_steps=drift_check_steps,
        log=log,
        replay=replay,
        rank=collectives.rank,
    )
    start_channel = CollectivesChannel(collectives, prefix, timeout)
    signature = {
        "compression": _describe_compression(compression),
        "backward_passes_per_step": passes,
        "op": str(op),
        "gradient_predivide_factor": float(gradient_predivide_factor),
        "num_groups": num_groups,
        "sparse_as_dense": sparse_as_dense,
        "balancer": None if balancer is None else balancer.describe(),
        "loss_reduction": loss_reduction,
        "loss_divided_by_passes": loss_divided_by_passes,
        "loss_weighted": loss_weighted,
        "local_clip_norm": local_clip_norm,
        "grad_scaler": grad_scaler is not None,
        "bucket_bytes": bucket_bytes,
        "drift_check_steps": drift_check_steps,
        "replay": replay,
        **parameter_signature(optimizer, names),
    }
    messages = start_channel.allgather({"alike": signature, "log": options.log_path}, "options")
    verify_alike([message["alike"] for message in messages])
    if replay is not None and spec is None and balancer is None:
        raise ConfigurationError(
            f"replay={replay!r}: there is nothing to replay without a balancer and without "
            "Compression.topk or .adaptive: give those of the recorded run, or leave replay out"
        )

    mine = {p: names[p] for group in optimizer.param_groups for p in group["params"]}
    if own_path:  # before Horovod registers hooks, which would stay
        _refuse_claimed(mine, prefix)
        if balancer is not None:
            balancer.check_free()
    stock = _build_stock(
        optimizer,
        [(name, parameter) for parameter, name in names.items()],
        compression=hvd.Compression.none if spec is not None else compression,
        backward_passes_per_step=passes,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        num_groups=num_groups,
        groups=groups,
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
    )
    # Stock wrapping starts with empty state and the class's own defaults.
    stock.defaults = optimizer.defaults
    stock.state.update(optimizer.state)
    # A scheduler made before wrapping would warn that its optimizer never steps: this one does.
    optimizer._opt_called = True  # type: ignore[attr-defined]
    _override_common(type(stock))
    if not own_path:
        if options.log_path is not None and collectives.rank == 0:
            logger.warning(
                "nothing is recorded in %s: without compression, balancer and local_clip_norm "
                "gradients take Horovod's own path",
                options.log_path,
            )
        return stock

    device = next(iter(mine)).device
    _claim(mine, prefix)
    if balancer is not None:
        balancer.attach(prefix, device, loss_reduction if loss_weighted else None)
    timer = balancer.timer if balancer is not None else StepTimer()
    timer.use(marks_for(device))
    if collectives.size == 1:
        stock._register_hooks()  # Horovod registers none for one process
    exchanger = GradientExchanger(
        collectives,
        _hooked(stock),
        prefix=prefix,
        bucket_bytes=bucket_bytes,
        timeout_seconds=timeout,
        describe_step=lambda: f"rank {collectives.rank}, step {coordinator.steps}",
        timer=timer,
        compressor=None if compression is hvd.Compression.none or spec is not None else compression,
        local_clip_norm=local_clip_norm,
        values_as="float16" if spec is None else spec.values,
        average=balancer is not None or op == hvd.Average,
        per_pass_weights=balancer is not None,
    )
    # Ranks of equal parameters may still differ in devices, and buckets hold one device each.
    verify_alike(start_channel.allgather(exchanger.layout(), "layout"))
    coordinator = Coordinator(
        options,
        channel=open_channel(start_channel, prefix, timeout),
        collectives=collectives,
        optimizer=stock,
        exchanger=exchanger,
        balancer=balancer,
        timer=timer,
        configuration={**signature, "ranks": collectives.size},
        log_everywhere=messages[0]["log"] is not None,
        timeout_seconds=timeout,
    )

    def weight_rule() -> WeightRule:
        return WeightRule(
            rank_weight=1.0 / collectives.size if op == hvd.Average else 1.0,
            loss_reduction=loss_reduction,
            loss_divided_by_passes=bool(loss_divided_by_passes),
            passes_per_step=stock.backward_passes_per_step,
            gradient_scale=1.0 if grad_scaler is None else float(grad_scaler.get_scale()),
            ranks=collectives.size,
            loss_weighted=loss_weighted,
        )

    engine = OptimizerEngine(stock, exchanger, coordinator, timer, weight_rule, balancer)
    refuse_join()
    if balancer is not None and collectives.size > 1:
        watch_collectives(timer, exact=loss_weighted)
    stock._hetero = engine  # also tells a wrapped optimizer of ours from a stock one
    _override_exchange(type(stock), engine, start_channel, grad_scaler)
    _override_passes(
        type(stock), lambda passes: _check_divided(loss_divided_by_passes, passes, balancer)
    )
    for _, parameter in _hooked(stock):
        engine.listen(parameter)
    return stock


# ---- before wrapping ----------------------------------------------------------------------------


def _is_horovod_compressor(compression: Any) -> bool:
    return isinstance(compression, type) and all(
        callable(getattr(compression, name, None)) for name in ("compress", "decompress")
    )


def _describe_compression(compression: Any) -> Any:
    if isinstance(compression, Adaptive):
        return compression.to_dict()
    return compression.__name__


def _check_path(name: str, value: Any, otherwise: str) -> str | None:
    if value is None:
        return None
    path = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(path, str) or not path:
        raise ConfigurationError(f"{name}={value!r}: expected the path of a file, or {otherwise}")
    return path


def _refuse_unsupported(
    op: Any, predivide: float, num_groups: int, groups: Any, process_set: Any
) -> None:
    plain = "with compression, a balancer or local_clip_norm"
    if groups is not None or num_groups != 0:
        raise UnsupportedError(
            f"groups={groups!r}, num_groups={num_groups!r}: not supported {plain}, whose buckets "
            "take the place of groups: leave both out and set bucket_bytes"
        )
    if op == hvd.Adasum:
        raise UnsupportedError(f"op=Adasum: not supported {plain}: use op=hvd.Average")
    if process_set is not hvd.global_process_set:
        raise UnsupportedError(
            f"process_set={process_set!r}: only hvd.global_process_set is supported {plain}"
        )
    if predivide != 1.0:
        raise UnsupportedError(
            f"gradient_predivide_factor={predivide!r}: not supported {plain}, as gradients are "
            "weighted before the sum already: leave it at 1.0"
        )


def _check_divided(divided: bool | None, passes: int, balancer: Balancer | None) -> None:
    if divided is not None:
        check_bool("loss_divided_by_passes", divided)
    elif balancer is not None and passes > 1:
        raise ConfigurationError(
            f"backward_passes_per_step={passes} with a balancer: say whether your script divides "
            "the loss by it: loss_divided_by_passes=True or False. The aggregated gradient is the "
            "mean over all samples of the step either way"
        )


def _build_stock(optimizer: torch.optim.Optimizer, names: Any, **options: Any) -> Any:
    kind = type(optimizer).__name__
    try:
        stock = hvd.DistributedOptimizer(optimizer, names, **options)
        alike = [len(group["params"]) for group in stock.param_groups] == [
            len(group["params"]) for group in optimizer.param_groups
        ]
    except (TypeError, AttributeError, KeyError) as error:
        raise TypeError(
            f"{kind} cannot be wrapped: Horovod builds the wrapped optimizer by calling "
            f"{kind}(param_groups), which failed ({type(error).__name__}: {error}). Wrap the inner "
            "optimizer and build the outer one around it"
        ) from error
    if not alike:
        raise TypeError(f"{kind} cannot be wrapped: {kind}(param_groups) lost parameters")
    return stock


def _refuse_claimed(names: dict[torch.Tensor, str], owner: str) -> None:
    for parameter, name in names.items():
        other = _owners.get(id(parameter), owner)
        if other != owner:
            raise ConfigurationError(
                f"parameter {name!r} belongs to a wrapped optimizer already ({other}); its "
                "gradient would be exchanged twice: give every parameter to one optimizer. Hooks "
                "stay with a parameter: to go on with other settings change optimizer.param_groups "
                "or use add_param_group, or load the state_dict into a new model"
            )


def _claim(names: dict[torch.Tensor, str], owner: str) -> None:
    _refuse_claimed(names, owner)
    for parameter in names:
        if id(parameter) not in _owners:
            _owners[id(parameter)] = owner
            weakref.finalize(parameter, _owners.pop, id(parameter), None)


def _hooked(stock: Any) -> list[tuple[str, torch.Tensor]]:
    """Parameters that have hooks, in the order of the groups (the set itself has no order)."""
    return [
        (stock._parameter_names[parameter], parameter)
        for group in stock.param_groups
        for parameter in group["params"]
        if parameter in stock._requires_update
    ]


# ---- methods of the fresh class -----------------------------------------------------------------


def _override_common(cls: Any) -> None:
    """Mend what current PyTorch expects of an optimizer; the gradient path stays Horovod's."""
    torch_class = cls.__mro__[1]
    stock_zero_grad = cls.zero_grad

    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        if self._handles:
            stock_zero_grad(self)  # raises: gradients are under way
        torch_class.zero_grad(self, set_to_none=set_to_none)

    def refuse_copy(self: Any, *_: Any) -> NoReturn:
        raise TypeError(
            f"the distributed {cls.__name__} cannot be copied or pickled: its class exists in this "
            "process only, and its hooks belong to these parameters. Save "
            "optimizer.state_dict() instead, and load it into a newly wrapped optimizer"
        )

    cls.zero_grad = zero_grad
    cls.__deepcopy__ = refuse_copy
    cls.__reduce_ex__ = refuse_copy


def _override_passes(cls: Any, check: Callable[[int], None]) -> None:
    stock_set_passes = cls.set_backward_passes_per_step

    def set_backward_passes_per_step(self: Any, passes: int) -> None:
        check(check_int("backward_passes_per_step", passes, minimum=1))
        stock_set_passes(self, passes)

    cls.set_backward_passes_per_step = set_backward_passes_per_step


def _override_exchange(
    cls: Any, engine: OptimizerEngine, channel: CollectivesChannel, grad_scaler: Any
) -> None:
    """Put our exchange behind Horovod's hooks and methods."""
    torch_class = cls.__mro__[1]
    stock_load_state_dict = cls.load_state_dict

    def _allreduce_grad_async(self: Any, p: torch.Tensor) -> tuple[Any, None]:
        engine.gradient_ready(p)
        return (lambda: p.grad), None

    def close_passes(self: Any) -> None:
        self._handles.clear()
        for parameter in self._allreduce_delay:
            self._allreduce_delay[parameter] = self.backward_passes_per_step

    def synchronize(self: Any) -> None:
        with open_step():
            exchange(self)

    def exchange(self: Any) -> None:
        adopt_new_parameters(self)
        engine.synchronize()
        close_passes(self)
        self._synchronized = True

    def step(self: Any, closure: Any = None) -> Any:
        if closure is not None:
            raise UnsupportedError(
                "step(closure) is not supported: the closure would run backward inside the step. "
                "Run it before, and call step() without arguments"
            )
        if self._should_synchronize:
            if grad_scaler is not None and getattr(grad_scaler, "is_enabled", lambda: True)():
                raise UnsupportedError(
                    "step() with grad_scaler outside `with optimizer.skip_synchronize():`: "
                    "GradScaler has unscaled gradients whose exchange had begun. Call "
                    "optimizer.synchronize() after backward, then scaler.unscale_(optimizer), and "
                    "scaler.step(optimizer) inside `with optimizer.skip_synchronize():`"
                )
            if self._synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(). Gradients are exchanged once all the same; use the "
                    "context to say that changes made to them since are meant",
                    stacklevel=2,
                )
        elif engine.exchanger.pending:
            raise UnsupportedError(
                "step() inside `with optimizer.skip_synchronize():` without a synchronize() before "
                "it: call optimizer.synchronize() first, as the exchange of gradients has begun"
            )
        with open_step():
            if self._should_synchronize:
                exchange(self)
            self._synchronized = False
            result = torch_class.step(self)
            engine.applied()
        return result

    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        engine.abandon_step()
        close_passes(self)
        self._synchronized = False
        torch_class.zero_grad(self, set_to_none=set_to_none)
        adopt_new_parameters(self)

    def load_state_dict(self: Any, *args: Any, **kwargs: Any) -> None:
        engine.forget_residuals()
        close_passes(self)
        stock_load_state_dict(self, *args, **kwargs)

    def add_param_group(self: Any, param_group: dict[str, Any]) -> None:
        torch_class.add_param_group(self, param_group)
        group_index = len(self.param_groups) - 1
        for index, parameter in enumerate(self.param_groups[-1]["params"]):
            if parameter not in self._parameter_names:
                self._parameter_names[parameter] = f"group.{group_index}.{index}"
        adopt_new_parameters(self)

    def adopt_new_parameters(self: Any) -> None:
        """Give hooks and buckets to parameters unfrozen or added since the last look."""
        joining = [
            parameter
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.requires_grad and parameter not in self._requires_update
        ]
        if any(parameter not in self._parameter_names for parameter in joining):
            raise ConfigurationError(
                "a parameter was put into optimizer.param_groups directly: use add_param_group"
            )
        new = [(self._parameter_names[parameter], parameter) for parameter in joining]
        if not new:
            return
        names = {parameter: name for name, parameter in new}
        _claim(names, engine.exchanger.prefix)
        verify_alike(
            channel.allgather({"parameters that joined": sorted(names.values())}, "joined")
        )
        for _, parameter in new:
            self._requires_update.add(parameter)
            self._allreduce_delay[parameter] = self.backward_passes_per_step
            accumulator = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
            accumulator.register_hook(self._make_hook(parameter))
            self._grad_accs.append(accumulator)
        engine.adopt(new)

    def hetero_state_dict(self: Any) -> dict[str, Any]:
        return engine.state_dict()

    def load_hetero_state_dict(self: Any, state: Any) -> None:
        engine.load_state_dict(state, channel)

    def flush_residuals(self: Any, steps: int = 1) -> None:
        engine.flush_residuals(check_int("steps", steps, minimum=1), channel)

    hetero_state_dict.__doc__ = engine.state_dict.__doc__
    load_hetero_state_dict.__doc__ = engine.load_state_dict.__doc__
    flush_residuals.__doc__ = engine.flush_residuals.__doc__
    cls.hetero_state_dict = hetero_state_dict
    cls.load_hetero_state_dict = load_hetero_state_dict
    cls.flush_residuals = flush_residuals
    cls._allreduce_grad_async = _allreduce_grad_async
    cls.synchronize = synchronize
    cls.step = step
    cls.zero_grad = zero_grad
    cls.load_state_dict = load_state_dict
    cls.add_param_group = add_param_group
