"""The floors that are assumed from dtypes alone."""

from __future__ import annotations

import pytest

from graftlab.diffs.rounding import assumed_floor, cast_dtypes, is_quantised, quantised_roundoff

FP8 = "float8_e4m3fn"


def test_values_that_both_sides_quantise_differ_where_rounding_crosses_a_middle() -> None:
    """A share of 2^-23 / 2^-3 of the numbers moves by 2^-3, relative to themselves."""
    assert assumed_floor(["float32", FP8]) == (pytest.approx(2.0**-13, rel=0.2), FP8)
    assert assumed_floor(["bfloat16", FP8]) == (pytest.approx(2.0**-5, rel=0.2), FP8)
    assert assumed_floor(["float8_e5m2"]) == assumed_floor(["bfloat16", "float8_e5m2"])


def test_a_side_that_quantises_alone_differs_by_the_whole_rounding_of_8_bits() -> None:
    assert assumed_floor(["float32"], [f"float32 -> {FP8}"]) == (0.3, FP8)
    assert assumed_floor(["float32", FP8], [f"cpu -> cuda:0, {FP8} -> bfloat16"]) == (0.3, FP8)
    assert assumed_floor(["float32"], ["bfloat16 -> float32", None]) == (0.02, "bfloat16")


def test_the_floor_of_unquantised_values_is_that_of_their_coarsest_dtype() -> None:
    assert assumed_floor(["float32"]) == assumed_floor(["float32", "float64", "int64"]) == (1e-5, "float32")
    assert assumed_floor(["int64"]) == assumed_floor([]) == (1e-5, "float32")
    assert assumed_floor(["float64"]) == (2e-14, "float64")
    assert assumed_floor(["bfloat16", "float32"]) == (0.02, "bfloat16")
    assert assumed_floor(["float16"]) == (0.002, "float16")


def test_only_floats_of_8_bits_count_as_quantised() -> None:
    assert [name for name in ("int8", "float16", FP8, "float32", "no dtype") if is_quantised(name)] == [FP8]
    assert quantised_roundoff(FP8, ["int64"]) == quantised_roundoff(FP8, ["bfloat16"])


def test_a_cast_gives_its_pairs_of_dtypes() -> None:
    assert cast_dtypes("cpu -> meta, float32 -> bfloat16") == [("float32", "bfloat16")]
    assert cast_dtypes("cuda:0 -> cpu") == []
    assert cast_dtypes(None) == []
