"""Holds the paper's figures. [P]: printed; [R]: read off its vector plots, good to about 0.2 %."""

from dataclasses import dataclass

BUBBLES = {
    8: {"GPipe": 46.67, "DAPPLE": 46.67, "GEMS": 83.22, "Chimera": 33.33, "Hanayo W=2": 25.45, "Hanayo W=4": 13.60},
    32: {"GPipe": 49.20, "DAPPLE": 49.20, "GEMS": 95.45, "Chimera": 38.46, "Hanayo W=2": 27.80, "Hanayo W=4": 14.94},
}
"""Fig 1 [P]: P -> scheme -> bubble ratio in percent, T_C = 0, T_B = 2 T_F, B = P"""


@dataclass(frozen=True)
class Row:
    """One line of the 8-GPU comparison [R]: sequences/s of a layout on a cluster, in the order of `SCHEMES`."""

    cluster: str
    num_ranks: int
    """P; there are 8/P pipelines"""
    throughput: tuple[float, ...]


SCHEMES = ("GPipe", "DAPPLE", "Chimera-wave", "Hanayo W=2", "Hanayo W=4", "Hanayo W=8")

EIGHT_GPUS = (
    Row("A100, NVLink in pairs", 8, (1.150, 1.142, 1.439, 1.626, 1.665, 1.655)),
    Row("A100, NVLink in pairs", 4, (2.099, 2.208, 2.543, 3.048, 3.234, 3.317)),
    Row("A100, full NVLink", 8, (1.132, 1.131, 1.445, 1.645, 1.754, 1.779)),
    Row("A100, full NVLink", 4, (2.227, 2.183, 2.632, 3.082, 3.302, 3.420)),
    Row("A100, PCIe, two per node", 8, (1.089, 1.086, 1.343, 1.453, 1.367, 1.147)),
    Row("A100, PCIe, two per node", 4, (2.082, 2.142, 2.514, 2.896, 2.944, 2.751)),
    Row("V100, NVLink", 8, (0.872, 0.872, 1.104, 1.264, 1.350, 1.375)),
    Row("V100, NVLink", 4, (1.687, 1.688, 1.991, 2.327, 2.486, 2.547)),
)
"""BERT-style: 64 layers, 64 heads, hidden size 2560 [R]"""

WEAK = {1: 1.453, 2: 2.909, 4: 5.803}
"""D -> sequences/s, the batch growing with D [P]; P = 8, W = 2, on up to 32 A100 over PCIe"""

STRONG = {1: 100.0, 2: 188.4, 4: 337.5}
"""D -> speed in percent of D = 1, the batch staying as it is [P]; P = 8, W = 2"""

VARIANCE = {"GPipe": 1.33, "DAPPLE": 16.85, "Chimera": 2.86, "Hanayo": 1.44}
"""variance of the peak memory over ranks [P]"""

CUBE = {"1-D": 2.32, "2-D": 1.57}
"""the 3-D paper (arXiv 2105.14450): steps of 1-D and 2-D on 64 V100 over those of its cube [P]"""
