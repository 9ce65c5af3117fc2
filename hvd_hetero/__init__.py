"""Horovod + PyTorch training that is fast on mixed clusters and slow networks.

Local batch sizes that let all ranks finish together (Cannikin, arXiv 2402.05302), and top-k
gradient compression whose factor is searched while training (GraVAC, arXiv 2305.12201)::

    import horovod.torch as hvd
    import hvd_hetero as het

    hvd.init()
    balancer = het.Balancer(global_batch_size=512)
    loader = balancer.data_loader(train_set, shuffle=True)
    optimizer = het.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(),
        compression=het.Compression.adaptive(), balancer=balancer)

Importing this package needs neither Horovod nor MPI; using ``Balancer``, ``DistributedOptimizer``
or ``Compression`` does.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hvd_hetero.errors import (
    BatchAccountingError,
    ConfigurationError,
    ExchangeFailedError,
    ExchangeTimeoutError,
    HeteroError,
    HorovodUnavailableError,
    RankMismatchError,
    UnsupportedError,
)

if TYPE_CHECKING:
    from hvd_hetero.planning.plan import Plan
    from hvd_hetero.runtime.balancer import Balancer
    from hvd_hetero.runtime.batchnorm import merge_batchnorm_statistics
    from hvd_hetero.runtime.compression import Compression
    from hvd_hetero.runtime.evaluation import SampleMean, evaluation_loader
    from hvd_hetero.runtime.optimizer import DistributedOptimizer

__version__ = "0.1.0"

__all__ = [
    "Balancer",
    "BatchAccountingError",
    "Compression",
    "ConfigurationError",
    "DistributedOptimizer",
    "ExchangeFailedError",
    "ExchangeTimeoutError",
    "HeteroError",
    "HorovodUnavailableError",
    "Plan",
    "RankMismatchError",
    "SampleMean",
    "UnsupportedError",
    "__version__",
    "evaluation_loader",
    "merge_batchnorm_statistics",
]

_LAZY = {
    "Balancer": "hvd_hetero.runtime.balancer",
    "Compression": "hvd_hetero.runtime.compression",
    "DistributedOptimizer": "hvd_hetero.runtime.optimizer",
    "Plan": "hvd_hetero.planning.plan",
    "SampleMean": "hvd_hetero.runtime.evaluation",
    "evaluation_loader": "hvd_hetero.runtime.evaluation",
    "merge_batchnorm_statistics": "hvd_hetero.runtime.batchnorm",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
