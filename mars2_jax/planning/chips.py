"""What TPU chips can do, from Google's public documentation."""

from __future__ import annotations

import dataclasses

__all__ = ["CHIPS", "GIB", "Chip"]

GIB = 2**30
"""Bytes."""


@dataclasses.dataclass(frozen=True)
class Chip:
    """One TPU chip. Nominal figures: what a program reaches is less.

    Attributes:
      name: as in a topology's name.
      hbm: bytes of high-bandwidth memory that a program can have. A little less than what the chip carries: the
        runtime keeps the rest, and the compiler refuses a program that needs more than this.
      flops: peak bfloat16 FLOP/s of the matrix units.
      hbm_bandwidth: bytes/s.
      ici_bandwidth: bytes/s out of the chip, over all its links to neighbours together; as much comes in.
    """

    name: str
    hbm: int
    flops: float
    hbm_bandwidth: float
    ici_bandwidth: float


# Peak FLOP/s and bandwidths: https://cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e}. The pages give the bandwidth between
# chips for both directions together (1,200 GB/s of a v5p, 400 of a v5e, 800 of a v6e) or, for v4, leave it to the
# paper (arXiv 2304.01433, table 4: six links of 50 GB/s each way). Memory: what libtpu's compiler says it has to give.
CHIPS = {
    "v4": Chip("v4", hbm=int(30.75 * GIB), flops=275e12, hbm_bandwidth=1200e9, ici_bandwidth=300e9),
    "v5e": Chip("v5e", hbm=int(15.75 * GIB), flops=197e12, hbm_bandwidth=819e9, ici_bandwidth=200e9),
    "v5p": Chip("v5p", hbm=int(95.74 * GIB), flops=459e12, hbm_bandwidth=2765e9, ici_bandwidth=600e9),
    "v6e": Chip("v6e", hbm=int(31.25 * GIB), flops=918e12, hbm_bandwidth=1640e9, ici_bandwidth=400e9),
}
