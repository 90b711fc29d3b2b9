"""Histograms and samples of a pair compared with numpy's, for all block boundaries."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from kit.values import assert_values

from graftlab.diffs.kernel import Kernel
from graftlab.diffs.maps import DifferenceMap, difference_map, max_downsample
from graftlab.diffs.samples import Distributions, Sample, distributions, sample
from graftlab.diffs.statistics import DiffStats

INF, NAN = math.inf, math.nan


@pytest.fixture(params=[3, 64, 1 << 20])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graftlab.diffs.maps.BLOCK", request.param)


def pair() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20, 15, generator=generator)
    y = x + torch.randn(20, 15, generator=generator) * 0.1
    y[:4] = x[:4]
    return x, y


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("bins", [2, 8, 120])
def test_histograms_cover_finite_values_and_sizes_of_differences(bins: int) -> None:
    x, y = pair()
    x[5, 0], x[5, 1], y[5, 1], y[5, 2] = NAN, INF, INF, -INF
    found = distributions(x, y, bins=bins)
    a, b = x.numpy().ravel(), y.numpy().ravel()
    both = np.isfinite(a) & np.isfinite(b)
    values = [each[np.isfinite(each)].astype(np.float64) for each in (a, b)]
    difference = (y - x).numpy().ravel()[both]
    assert (found.pairs, found.equal) == (297, int((difference == 0).sum())) == (297, 60)
    assert (found.nonfinite_baseline, found.nonfinite_target) == (2, 2)
    assert found.mean == pytest.approx(difference.mean(dtype=np.float64), rel=1e-6)
    assert found.std == pytest.approx(difference.std(dtype=np.float64), rel=1e-6)
    assert len(found.edges) == bins + 1
    assert (found.edges[0], found.edges[-1]) == (min(map(np.min, values)), max(map(np.max, values)))
    logs = [np.log10(difference[difference > 0]), np.log10(-difference[difference < 0])]
    assert len(found.magnitude_edges) == bins // 2 + 1
    assert found.magnitude_edges[0] == pytest.approx(min(map(np.min, logs)))
    assert found.magnitude_edges[-1] == pytest.approx(max(map(np.max, logs)))
    for counts, of, edges in (
        (found.baseline, values[0], found.edges),
        (found.target, values[1], found.edges),
        (found.above, logs[0], found.magnitude_edges),
        (found.below, logs[1], found.magnitude_edges),
    ):
        assert counts.sum() == len(of)
        # A value at the edge of a bin may be rounded into its neighbour.
        assert np.abs(counts - np.histogram(np.clip(of, edges[0], edges[-1]), edges)[0]).sum() <= 2


def test_histograms_of_constant_and_empty_pairs_have_bins() -> None:
    for value, low, high in ((4.0, 2.0, 6.0), (-4.0, -6.0, -2.0), (0.0, -0.5, 0.5)):
        found = distributions(torch.full((3,), value), torch.full((3,), value), bins=4)
        assert (found.edges[0], found.edges[-1], found.baseline.sum(), found.equal) == (low, high, 3, 3)
        assert (found.mean, found.std, found.above.sum(), found.below.sum()) == (0.0, 0.0, 0, 0)
    nothing = distributions(torch.full((3,), NAN), torch.ones(3), bins=4)
    assert (nothing.pairs, nothing.nonfinite_baseline, nothing.target.sum()) == (0, 3, 3)
    assert math.isnan(nothing.mean)
    assert math.isnan(nothing.std)
    empty = distributions(torch.ones(0), torch.ones(0), bins=4)
    assert (empty.edges[0], empty.edges[-1], empty.pairs) == (-0.5, 0.5, 0)


def test_values_that_are_not_finite_differ_unless_they_are_the_same() -> None:
    x, y = torch.tensor([NAN, NAN, INF, -INF, 1.0, 2.0, INF]), torch.tensor([NAN, 1.0, INF, INF, NAN, 3.0, NAN])
    found = distributions(x, y, bins=4)
    assert (found.nonfinite_baseline, found.nonfinite_target, found.nonfinite_differ) == (5, 5, 4)
    of_points = sample(x, y)
    assert (of_points.nonfinite, of_points.nonfinite_differ) == (6, 4)


def test_equal_differences_have_no_spread() -> None:
    x = torch.zeros(3, dtype=torch.float64)
    found = distributions(x, x + 0.1, bins=4)
    assert (found.mean, found.std) == (pytest.approx(0.1), pytest.approx(0.0, abs=1e-8))


def test_complex_values_count_by_magnitude_and_huge_values_in_the_last_bin() -> None:
    found = distributions(torch.tensor([3 + 4j, 1j]), torch.tensor([3 - 4j, 1j]), bins=4)
    assert (found.edges[0], found.edges[-1], found.below.sum(), found.above.sum()) == (1.0, 5.0, 0, 1)
    assert found.mean == 4.0
    huge = distributions(torch.tensor([3e38, 0.0]), torch.tensor([-3e38, 0.0]), bins=4)
    assert huge.edges[-1] == torch.finfo(torch.float32).max / 4
    assert huge.baseline.sum() == 2
    assert (huge.edges[0], huge.target.tolist()) == (-huge.edges[-1], [1, 0, 1, 0])


@pytest.mark.usefixtures("blocks")
def test_small_pair_is_sampled_whole_with_the_worst_tenth_last() -> None:
    x, y = pair()
    x[7, 3] = INF
    found = sample(x, y, points=300)
    a, b = x.double().numpy().ravel(), y.double().numpy().ravel()
    keep = 30
    size = np.where(np.isfinite(a), np.abs((x - y).numpy().ravel()), -1)
    worst = np.argsort(-size, kind="stable")[:keep]
    assert found.worst == keep
    np.testing.assert_array_equal(found.baseline[-keep:], a[worst])
    np.testing.assert_array_equal(found.target[-keep:], b[worst])
    assert found.worst_index == tuple(int(i) for i in np.unravel_index(worst[0], x.shape))
    assert (found.numel, found.nonfinite, len(found.baseline)) == (300, 1, 299)
    assert sorted(found.baseline) == sorted(a[np.isfinite(a)])


@pytest.mark.usefixtures("blocks")
def test_large_pair_keeps_the_worst_and_samples_the_rest_reproducibly() -> None:
    x, y = pair()
    state = torch.get_rng_state(), np.random.get_state()[1].tolist()
    found, again = sample(x, y, points=50), sample(x, y, points=50)
    assert (torch.get_rng_state().equal(state[0]), np.random.get_state()[1].tolist()) == (True, state[1])
    worst = (x - y).abs().flatten().topk(5).indices
    assert found.worst == 5
    assert found.baseline[-5:].tolist() == x.flatten()[worst].tolist()
    assert 20 < len(found.baseline) <= 50
    assert found.baseline.tolist() == again.baseline.tolist()
    assert len(sample(torch.arange(9000.0), torch.arange(9000.0) % 7, points=50).baseline) <= 50
    pairs = set(zip(x.flatten().tolist(), y.flatten().tolist(), strict=True))
    assert set(zip(found.baseline.tolist(), found.target.tolist(), strict=True)) <= pairs


def test_pairs_that_are_equal_or_of_one_number_have_no_worst_or_that_one() -> None:
    same = sample(torch.ones(9), torch.ones(9))
    assert (same.worst, same.worst_index, len(same.baseline), same.nonfinite) == (0, None, 9, 0)
    alone = sample(torch.tensor(2.0), torch.tensor(1.0))
    assert (alone.worst, alone.worst_index, alone.baseline.tolist(), alone.numel) == (1, (), [2.0], 1)


def test_values_of_the_room_cannot_be_changed() -> None:
    assert_values(Distributions, Sample, DiffStats, DifferenceMap, Kernel)


def test_default_numbers_of_bins_points_and_cells() -> None:
    x, y = torch.linspace(-1, 1, 20_001), torch.linspace(-1, 1.5, 20_001)
    found = distributions(x, y)
    assert (len(found.baseline), len(found.target), len(found.above), len(found.below)) == (120, 120, 60, 60)
    # Kept whole up to this number; larger ones are sampled.
    assert len(sample(x[1:], y[1:]).baseline) == 20_000
    assert len(sample(x, y).baseline) < 20_000
    wide = torch.zeros(2, 1024)
    assert max_downsample(wide)[0].shape == (2, 512)
    assert difference_map(wide, wide).grid.shape == (2, 512)
