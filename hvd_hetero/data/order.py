"""The order of an epoch, as a sampler of the user's gives it.

The sampler runs on every rank and gives the order of all ranks together, which must come out the
same: what it draws from torch's default generator does, as that is seeded for it alike.
"""

from __future__ import annotations

import itertools
import operator
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

from hvd_hetero.data.partition import mixed_seed
from hvd_hetero.errors import ConfigurationError

ONE_ORDER = (
    "Let the sampler draw from torch's default generator, which is seeded for it by the Balancer's "
    "seed and the epoch, or give its own generator one seed on all ranks"
)


class SamplerOrder:
    """Draws an epoch's indices from a sampler with a length.

    sampler: gives ``len(sampler)`` indices of the data set; a subset, repeats and weights are fine.
    dataset_samples: of the data set. seed: of torch's default generator, together with the epoch.

    Raises ConfigurationError for a sampler without length, and for one that divides among ranks.
    """

    def __init__(self, sampler: Iterable[Any], dataset_samples: int, seed: int) -> None:
        self.kind = type(sampler).__name__
        if hasattr(sampler, "num_replicas"):  # as DistributedSampler has, and its kind
            raise ConfigurationError(
                f"sampler={self.kind}: it already divides the data among ranks, which the Balancer "
                "does: give the sampler of the whole epoch, or leave it out and set shuffle=True"
            )
        try:
            self.samples = len(sampler)  # type: ignore[arg-type]
            if not hasattr(sampler, "__iter__"):
                raise TypeError("it has no __iter__")
        except (TypeError, NotImplementedError) as error:
            raise ConfigurationError(
                f"sampler={sampler!r}: an object with __len__ and __iter__ is needed, as "
                f"torch.utils.data.Sampler has them ({error}): the number of steps of an epoch "
                "must be known to all ranks"
            ) from error
        self._sampler = sampler
        self._dataset_samples = dataset_samples
        self._seed = seed

    def draw(self, epoch: int) -> torch.Tensor:
        """Return the indices of ``epoch``: int64 [samples].

        Leaves the random state of the script as it was. Raises ConfigurationError for what are no
        indices of the data set, and for another number of them than announced.
        """
        set_epoch = getattr(self._sampler, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
        with torch.random.fork_rng(devices=[]):
            # Not torch.manual_seed, which would seed the generators of all devices.
            torch.default_generator.manual_seed(mixed_seed(self._seed, epoch))
            drawn = itertools.islice(self._sampler, self.samples + 1)
            order = np.fromiter(self._indices(drawn), dtype=np.int64)
        if len(order) != self.samples:
            count = f"more than {self.samples}" if len(order) > self.samples else str(len(order))
            raise ConfigurationError(
                f"sampler={self.kind}: it gave {count} indices in epoch {epoch}, and its length "
                f"was {self.samples} when the loader was made: the number must stay the same"
            )
        return torch.from_numpy(order)

    def _indices(self, drawn: Iterator[Any]) -> Iterator[int]:
        for number in drawn:
            try:
                if isinstance(number, bool):
                    raise TypeError("a bool is no index")
                index = operator.index(number)
            except TypeError as error:
                raise ConfigurationError(
                    f"sampler={self.kind}: it gave {number!r}: expected whole numbers, indices of "
                    "the data set (a sampler of batches has the sampler to give inside)"
                ) from error
            if not 0 <= index < self._dataset_samples:
                raise ConfigurationError(
                    f"sampler={self.kind}: it gave index {index}, the data set has "
                    f"{self._dataset_samples} samples: make both from the same data set"
                )
            yield index


def checksum(order: torch.Tensor) -> int:
    """A number that differs where orders do, but for one chance in four billion."""
    return zlib.crc32(order.numpy().data)
