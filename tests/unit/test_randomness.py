"""Counter-based randomness: pinned, because a seed given today must give the same text tomorrow."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from tandem.randomness import (
    Lane,
    UniformsAhead,
    gumbel_argmax,
    gumbel_noise,
    gumbel_noise_at,
    lane_uniforms,
    uniforms,
)

SEEDS = (0, 1, 2**32, 2**64 - 1)
WORD = 2**64


def philox4x64(key: list[int], counter: list[int]) -> list[int]:
    """One block of Philox4x64-10, from the paper (Salmon et al., SC 2011, section 4.3)."""
    for _ in range(10):
        high0, low0 = divmod(counter[0] * 0xD2E7470EE14C6C93, WORD)
        high1, low1 = divmod(counter[2] * 0xCA5A826395121157, WORD)
        counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0]
        key = [(key[0] + 0x9E3779B97F4A7C15) % WORD, (key[1] + 0xBB67AE8584CAA73B) % WORD]
    return counter


@pytest.mark.parametrize(
    ("seed", "position", "pinned"),
    [
        (0, 0, [0.011546754286331562, 0.24154919656271812, 0.11142585551493822, 0.5644146216071337]),
        (1, 7, [0.3458819940993094, 0.3374227940108031, 0.19629305323984014, 0.7145639857996484]),
        (2**64 - 1, 123_456, [0.2735225580154991, 0.7244493047631013, 0.5752624582183038, 0.45179399664763753]),
    ],
)
def test_uniforms_are_philox(seed: int, position: int, pinned: list[float]) -> None:
    assert uniforms(seed, position)[0].tolist() == pinned
    # numpy counts before it draws.
    block = philox4x64([seed, 0], [position + 1, 0, 0, 0])
    assert [(word >> 11) / 2**53 for word in block] == pinned


@pytest.mark.parametrize("seed", SEEDS)
def test_uniforms_ahead_are_the_same(seed: int) -> None:
    ahead = UniformsAhead(seed)
    # Forward, over the end of what is drawn, back again (a round that is repeated), far ahead, more than a chunk.
    for position, count in [(5, 6), (8, 6), (66, 3), (67, 3), (8, 1), (10_000, 6), (10_001, 200), (0, 1)]:
        drawn = uniforms(seed, position, count)[:, [Lane.ACCEPT, Lane.RESIDUAL]]
        assert ahead.at(position, count) == [tuple(pair) for pair in drawn.tolist()]


@pytest.mark.parametrize(
    ("seed", "position", "pinned"),
    [
        (0, 0, [0.81957066, -1.01388001, -0.75027031, -0.07983056]),
        (1, 7, [0.27820897, 1.44717896, -0.43975660, 4.30966520]),
        (2**64 - 1, 123_456, [0.57664174, -1.04442871, -0.33655941, 2.89350224]),
    ],
)
def test_gumbel_noise_is_philox(seed: int, position: int, pinned: list[float]) -> None:
    noise = gumbel_noise(seed, position, 4)
    assert noise == pytest.approx(pinned, abs=1e-6)
    block = np.array(philox4x64([seed, 0], [1, position, 1, 0]), dtype=np.float64) / WORD
    assert noise == pytest.approx(-np.log(-np.log(block)), abs=1e-6)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("position", [0, 5, 100_000])
def test_a_run_of_positions_is_the_positions_one_by_one(seed: int, position: int) -> None:
    together = uniforms(seed, position, 7)
    assert together.shape == (7, len(Lane))
    for i in range(7):
        assert (together[i] == uniforms(seed, position + i)[0]).all()


def test_lane_uniforms_are_those_of_each_row_alone() -> None:
    """Whether a row follows the one before, repeats it, or comes from another request."""
    seeds = [3, 3, 3, 3, 3, 2**64 - 1, 2**64 - 1, 0, 3]
    positions = [4, 5, 6, 6, 9, 10, 11, 12, 4]
    for lane in Lane:
        alone = [uniforms(seed, position)[0, lane] for seed, position in zip(seeds, positions, strict=True)]
        assert lane_uniforms(seeds, positions, lane).tolist() == alone
    assert lane_uniforms([], [], Lane.DRAFT).shape == (0,)


def test_uniforms_are_in_the_half_open_interval() -> None:
    drawn = uniforms(9, 0, 50_000)
    assert drawn.min() >= 0.0
    assert drawn.max() < 1.0


def test_lanes_and_positions_are_independent_and_uniform() -> None:
    drawn = uniforms(11, 0, 50_000)
    for lane in Lane:
        assert stats.kstest(drawn[:, lane], "uniform").pvalue > 1e-3
        assert stats.pearsonr(drawn[:-1, lane], drawn[1:, lane]).pvalue > 1e-3
        for other in Lane:
            if other > lane:
                cells = np.histogram2d(drawn[:, lane], drawn[:, other], bins=10)[0]
                assert stats.chisquare(cells.ravel()).pvalue > 1e-3


def test_seeds_are_independent() -> None:
    """Neighbouring seeds, as callers choose them, at one position."""
    drawn = lane_uniforms(list(range(50_000)), [17] * 50_000, Lane.ACCEPT)
    assert stats.kstest(drawn, "uniform").pvalue > 1e-3
    assert stats.pearsonr(drawn[:-1], drawn[1:]).pvalue > 1e-3


def test_gumbel_noise_does_not_depend_on_the_size() -> None:
    noise = gumbel_noise(5, 6, 4096)
    assert noise.dtype == np.float32
    for size in (1, 2, 3, 5, 31, 1000, 4095):
        assert (gumbel_noise(5, 6, size) == noise[:size]).all()


@pytest.mark.parametrize("count", [0, 1, 3, 8, 17, 64, 1000])
def test_gumbel_noise_of_some_ids_is_that_of_all(count: int) -> None:
    """Bit for bit, or draft and target might disagree on a winner."""
    rng = np.random.default_rng(count)
    seeds, positions = [5, 5, 2**64 - 1], [6, 7, 6]
    ids = np.stack([rng.choice(49_152, count, replace=False) for _ in seeds]).astype(np.uint32)
    some = gumbel_noise_at(seeds, positions, ids)
    assert some.shape == ids.shape
    for row, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        assert (some[row] == gumbel_noise(seed, position, 49_152)[ids[row]]).all()


@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 5.0, 100.0, 1e30])
@pytest.mark.parametrize("size", [1, 7, 3000, 49_152])
def test_the_argmax_with_noise_is_that_of_all_sums(size: int, spread: float) -> None:
    rng = np.random.default_rng(3)
    for position in range(12):
        scores = (rng.standard_normal(size) * spread).astype(np.float32)
        if position % 3 == 1:
            scores[rng.random(size) < 0.9] = -np.inf
            scores[size // 2] = 0.0
        scores -= scores.max()
        sums = scores + gumbel_noise(5, position, size)
        assert gumbel_argmax(scores, 5, position) == sums.argmax()


def test_gumbel_noise_is_gumbel() -> None:
    noise = gumbel_noise(1, 2, 200_000)
    assert np.isfinite(noise).all()
    assert stats.kstest(noise, "gumbel_r").pvalue > 1e-3


def test_gumbel_noise_differs_by_seed_and_position_and_from_the_lanes() -> None:
    noise = gumbel_noise(1, 2, 5000)
    for other in (gumbel_noise(2, 2, 5000), gumbel_noise(1, 3, 5000), gumbel_noise(1, 2, 5001)[1:]):
        assert stats.pearsonr(noise, other).pvalue > 1e-3
    lanes = uniforms(1, 0, 1250).ravel()
    assert stats.pearsonr(noise, lanes).pvalue > 1e-3
