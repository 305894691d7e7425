"""Noise from counters: SplitMix64 to the bit, normal by every moment that matters, the same in any batch."""

from __future__ import annotations

import numpy as np
import torch
from conftest import off
from machine import ROUNDING
from scipy import stats

from vitreous._support.noise import STRIDE, mixed, normal

ALL = 2**64 - 1


def splitmix(z: int) -> int:
    """The published steps, on whole numbers of any size."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & ALL
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & ALL
    return z ^ (z >> 31)


def test_bits_are_those_of_splitmix64() -> None:
    keys = [0, 1, 5, -7, 2**63 - 1, -(2**63), 123456789012345]
    assert [z & ALL for z in mixed(torch.tensor(keys)).tolist()] == [splitmix(key & ALL) for key in keys]
    assert STRIDE & ALL == 0x9E3779B97F4A7C15
    assert splitmix(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF  # the first number of the sequence that starts at 0


def test_numbers_are_standard_normal_and_unrelated() -> None:
    drawn = torch.cat([normal(torch.tensor([3, 4]), 100_001, turn) for turn in (0, 1)]).numpy()  # [4 100001]
    assert drawn.shape == (4, 100_001) and np.isfinite(drawn).all()
    for row in drawn:
        assert stats.kstest(row, "norm").pvalue > 1e-3
        assert abs(stats.kurtosis(row)) < 0.1 and abs(row).max() > 4
        assert abs(np.corrcoef(row[:-1], row[1:])[0, 1]) < 0.02
        half = 50_001
        assert abs(np.corrcoef(row[: half - 1], row[half:])[0, 1]) < 0.02  # cosines and sines of the same angles
    assert np.abs(np.corrcoef(drawn) - np.eye(4)).max() < 0.02


def test_numbers_depend_on_their_key_and_turn_alone() -> None:
    keys = torch.tensor([8, 9, 10])
    both = normal(keys, 7, 5)
    assert off(both[1:2], normal(torch.tensor([9]), 7, 5)) <= ROUNDING and both.dtype == torch.float32
    assert off(both, normal(keys, 7, 6)) > 0.1
