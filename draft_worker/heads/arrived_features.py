"""Features of the target that have arrived for a session, until the entries of a draft head have taken them. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class ArrivedFeatures:
    """Features of consecutive committed positions, in the form in which they travel (`features.packed`)."""

    head: str  # fingerprint of the head that they are for
    row_bytes: int  # of one position
    first: int = 0  # position of the first that is kept
    data: bytearray = field(default_factory=bytearray)

    @property
    def num_known(self) -> int:
        """Leading positions whose features have arrived."""
        return self.first + len(self.data) // self.row_bytes

    def add(self, first: int, data: bytes, most_known: int) -> bool:
        """Takes the features of positions from `first` on; false where some before them are missing.

        What is known already, beyond `most_known` positions or no whole row is left out.
        """
        if first > self.num_known:
            return False
        count = min(len(data) // self.row_bytes, most_known - first)
        self.data += data[(self.num_known - first) * self.row_bytes : max(count, 0) * self.row_bytes]
        return True

    def rows(self, start: int, end: int) -> bytes:
        """The features of positions [start, end), which must be kept."""
        assert self.first <= start <= end <= self.num_known
        return bytes(self.data[(start - self.first) * self.row_bytes : (end - self.first) * self.row_bytes])

    def drop_before(self, position: int) -> None:
        """Forgets the features of earlier positions."""
        count = min(max(position - self.first, 0), self.num_known - self.first)
        del self.data[: count * self.row_bytes]
        self.first += count
