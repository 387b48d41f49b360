"""A difficulty curriculum: problems that the team sometimes solves come more often than those it always or never does.

The order stays that of `mars2_jax.tasks.order`; the curriculum only passes problems over. One that was never tried, or
whose running pass rate lies in the band, comes once an epoch, as without a curriculum. One outside the band comes in a
fixed share of the epochs, the `floor`, spread evenly over them: no problem starves, and one that has become easier, or
was forgotten, is found again.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping

import numpy as np
from ml_collections import ConfigDict, FrozenConfigDict

from mars2_jax.tasks.order import problem_order

__all__ = ["Curriculum", "PassRates", "next_problems"]


@dataclasses.dataclass(frozen=True)
class Curriculum:
    """Which problems are passed over.

    Attributes:
      low: the band of pass rates, its ends within.
      high: likewise.
      floor: share of the epochs in which a problem outside the band comes, in (0, 1].
      decay: weight of the running pass rate against that of a new tree, in [0, 1).
    """

    low: float
    high: float
    floor: float
    decay: float

    @classmethod
    def from_config(cls, data: ConfigDict | FrozenConfigDict) -> Curriculum | None:
        """That of the section `data`; None where it asks for none."""
        if data.curriculum == "none":
            return None
        return cls(data.curriculum_low, data.curriculum_high, data.curriculum_floor, data.curriculum_decay)

    def in_band(self, rate: float) -> bool:
        """Whether a problem of this pass rate is one to learn from."""
        return self.low <= rate <= self.high

    def takes(self, index: int, seed: int, epoch: int, rate: float | None) -> bool:
        """Whether a problem comes in an epoch.

        Outside the band it comes when ⌊floor · epoch + phase⌋ is about to grow, so once in any ⌈1 / floor⌉ epochs. The
        phase is the problem's own: those outside the band do not all come in the same epoch.
        """
        if rate is None or self.in_band(rate):
            return True
        digest = hashlib.blake2b(f"{seed}/phase/{index}".encode(), digest_size=6).digest()
        phase = int.from_bytes(digest, "big") / 2**48
        return int(self.floor * (epoch + 1) + phase) > int(self.floor * epoch + phase)


class PassRates:
    """Running pass rates of the problems that were tried, by their index in the set."""

    def __init__(self) -> None:
        self._rates: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self._rates)

    def __getitem__(self, index: int) -> float | None:
        """The rate of a problem; None where it was never tried."""
        return self._rates.get(index)

    def observe(self, index: int, rate: float, decay: float) -> None:
        """Takes in the pass rate of one more tree: rate ← decay · rate + (1 - decay) · new; the first as it is."""
        known = self._rates.get(index)
        self._rates[index] = rate if known is None else decay * known + (1 - decay) * rate

    def share(self, curriculum: Curriculum) -> float:
        """Of the problems that were tried, those in the band; 0 where there are none."""
        return sum(map(curriculum.in_band, self._rates.values())) / max(len(self._rates), 1)

    def to_arrays(self) -> dict[str, np.ndarray]:
        """As arrays for a checkpoint, of the problems that were tried."""
        index = np.asarray(sorted(self._rates), np.int64)
        return {"index": index, "rate": np.asarray([self._rates[i] for i in index.tolist()], np.float64)}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> PassRates:
        """The rates that `to_arrays` was called on."""
        rates = cls()
        rates._rates = dict(zip(arrays["index"].tolist(), arrays["rate"].tolist(), strict=True))
        return rates


def next_problems(
    num_problems: int, seed: int, position: int, count: int, curriculum: Curriculum, rates: PassRates
) -> tuple[list[int], int]:
    """The next problems in the order of the epochs that the curriculum takes.

    Args:
      num_problems: in the set, at least one.
      seed: of the order.
      position: place in the order, over all epochs, to look from.
      count: problems wanted.
      curriculum: which it takes.
      rates: what is known of the problems.

    Returns:
      Their indices, and the place after the last of them.
    """
    found: list[int] = []
    # Every problem comes within 1 / floor epochs, so this ends.
    while len(found) < count:
        epoch, place = divmod(position, num_problems)
        index = problem_order(num_problems, seed, epoch)[place]
        if curriculum.takes(index, seed, epoch, rates[index]):
            found.append(index)
        position += 1
    return found, position
