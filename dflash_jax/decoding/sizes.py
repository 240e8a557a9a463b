"""The sizes that decode programs are compiled for. They are few, so that lengths and limits compile nothing new."""

from __future__ import annotations

import dataclasses

CAPACITY_BUCKETS = (128, 256, 512, 1024)  # then multiples of 1024


def capacity_bucket(length: int, max_positions: int) -> int:
    """The smallest bucket that holds `length` rows: cache sizes, and so programs, are few."""
    for bucket in CAPACITY_BUCKETS:
        if length <= bucket:
            return min(bucket, max_positions)
    return min(-(-length // 1024) * 1024, max_positions)


def power_of_two_at_least(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def power_of_two_at_most(n: int) -> int:
    return 1 << n.bit_length() - 1


@dataclasses.dataclass(frozen=True)
class PrefillSizes:
    """Two widths of prefill calls, in tokens of a row: most of a prompt goes in large pieces, its end in small ones.

    With one width alone a short prompt, or the end of a long one, is mostly padding.

    Attributes:
      large: tokens of a whole piece.
      small: tokens of a piece of what is left, where that is up to three eighths of `large`. On CPU an eighth: 16
        tokens of a row are a product of few rows. On accelerators a quarter: the piece then takes about as long as
        reading the weights.
    """

    large: int
    small: int

    @classmethod
    def of(cls, large: int, on_cpu: bool) -> PrefillSizes:
        """Small pieces have 16 tokens at least, unless `large` has fewer."""
        return cls(large, max(min(large, 16), large // (8 if on_cpu else 4)))

    def pieces(self, length: int) -> list[tuple[int, int]]:
        """(start, width) of the calls that take in a prompt of `length` tokens."""
        pieces, start = [], 0
        while start < length:
            width = self.small if length - start <= self._most_small else self.large
            pieces.append((start, width))
            start += width
        return pieces

    def rehearsals(self, length: int | None = None) -> list[int]:
        """Lengths of short prompts that go through every program that one of `length` tokens goes through, the first
        time it is compiled; None: that any does."""
        each = {self.small: 1, self.large: self._most_small + 1}
        widths = each if length is None else {width for _, width in self.pieces(length)}
        return sorted(each[width] for width in widths)

    @property
    def _most_small(self) -> int:
        return 3 * self.large // 8
