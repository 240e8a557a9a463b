"""Sizes of programs: few, and little padding."""

import pytest

from dflash_jax.decoding.sizes import PrefillSizes, capacity_bucket, power_of_two_at_least, power_of_two_at_most


def test_capacities_are_few():
    assert [capacity_bucket(n, 5000) for n in (1, 128, 129, 1000, 1025, 4097, 9999)] == [
        128, 128, 256, 1024, 2048, 5000, 5000,
    ]  # fmt: skip


def test_powers_of_two():
    assert [power_of_two_at_least(n) for n in (0, 1, 2, 3, 4, 5, 100)] == [1, 1, 2, 4, 4, 8, 128]
    assert [power_of_two_at_most(n) for n in (1, 2, 3, 4, 5, 100)] == [1, 2, 2, 4, 4, 64]


def test_pieces_of_a_prompt():
    on_cpu, elsewhere = PrefillSizes.of(128, on_cpu=True), PrefillSizes.of(512, on_cpu=False)
    assert on_cpu == PrefillSizes(128, 16) and elsewhere == PrefillSizes(512, 128)
    assert on_cpu.pieces(40) == [(0, 16), (16, 16), (32, 16)]
    assert on_cpu.pieces(49) == [(0, 128)]
    assert on_cpu.pieces(150) == [(0, 128), (128, 16), (144, 16)]
    assert elsewhere.pieces(150) == [(0, 128), (128, 128)]
    assert elsewhere.pieces(1000) == [(0, 512), (512, 512)]


@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("large", [1, 7, 16, 24, 64, 100, 128, 512])
def test_pieces_have_two_widths_and_little_padding(large, on_cpu):
    sizes = PrefillSizes.of(large, on_cpu)
    assert 1 <= sizes.small <= sizes.large
    for length in range(1, 3 * large + 2):
        pieces = sizes.pieces(length)
        ends = [start + width for start, width in pieces]
        assert [start for start, _ in pieces] == [0, *ends[:-1]]
        assert 0 <= ends[-1] - length < max(sizes.small, large * 5 / 8 + 1)
        assert {width for _, width in pieces} <= {sizes.large, sizes.small}


@pytest.mark.parametrize("large", [1, 7, 16, 24, 128, 512])
def test_rehearsals_go_through_the_same_programs(large):
    sizes = PrefillSizes.of(large, on_cpu=True)
    widths = lambda lengths: {width for length in lengths for _, width in sizes.pieces(length)}  # noqa: E731
    for length in range(1, 3 * large):
        rehearsals = sizes.rehearsals(length)
        assert widths(rehearsals) == widths([length]) and len(rehearsals) <= 2 and max(rehearsals) <= large
    assert widths(sizes.rehearsals()) == {sizes.large, sizes.small}
