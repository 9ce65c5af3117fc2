"""The names a script uses for ``compression=``."""

from __future__ import annotations

from typing import Any

from hvd_hetero.compression.spec import Adaptive
from hvd_hetero.errors import check_float


class _Compression:
    """``none`` and ``fp16`` are Horovod's own; ``topk`` and ``adaptive`` are ours."""

    @property
    def none(self) -> Any:
        """Horovod's ``Compression.none``."""
        from hvd_hetero.runtime.collectives import hvd

        return hvd.Compression.none

    @property
    def fp16(self) -> Any:
        """Horovod's ``Compression.fp16``: gradients travel as half floats."""
        from hvd_hetero.runtime.collectives import hvd

        return hvd.Compression.fp16

    def topk(self, cf: float, **options: Any) -> Adaptive:
        """Send about the largest 1/``cf`` of the gradient at every step, with error feedback.

        ``options`` as of :class:`Adaptive`, for example ``dense_steps``, ``values``, ``exchange``.
        """
        cf = check_float("cf", cf, minimum=1.0)
        return Adaptive(policy="fixed", min_cf=cf, max_cf=cf, **options)

    def adaptive(self, **options: Any) -> Adaptive:
        """Choose the compression factor while training. See :class:`Adaptive` for the options."""
        return Adaptive(**options)


Compression = _Compression()
