"""The names a script uses for ``compression=``."""

from __future__ import annotations

from typing import Any

from hvd_hetero.compression.spec import Adaptive, TopK


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

    def topk(self, cf: float) -> TopK:
        """Send the largest 1/``cf`` of every bucket, with error feedback. See :class:`TopK`."""
        return TopK(cf)

    def adaptive(self, **options: Any) -> Adaptive:
        """Search the compression factor while training. See :class:`Adaptive` for the options."""
        return Adaptive(**options)


Compression = _Compression()
