"""Philox against the known answers of its authors (Random123, kat_vectors)."""

import pytest
import torch

from executor.philox import philox4x32

KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def _words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_known_answers(counter: str, key: str, answer: str) -> None:
    c0, c1, c2, c3 = (torch.tensor([word]) for word in _words(counter))
    k0, k1 = (torch.tensor([word]) for word in _words(key))
    assert [int(word) for word in philox4x32((c0, c1, c2, c3), (k0, k1))] == _words(answer)


def test_all_known_answers_at_once_and_broadcast() -> None:
    """Elements don't disturb one another, and shapes that broadcast give what full ones do."""
    counters = torch.tensor([_words(counter) for counter, _, _ in KNOWN_ANSWERS]).T
    keys = torch.tensor([_words(key) for _, key, _ in KNOWN_ANSWERS]).T
    answers = torch.tensor([_words(answer) for _, _, answer in KNOWN_ANSWERS]).T
    found = torch.stack(philox4x32((counters[0], counters[1], counters[2], counters[3]), (keys[0], keys[1])))
    assert torch.equal(found, answers)

    row, column = torch.arange(3)[:, None], torch.arange(5)[None]
    narrow = philox4x32((column, row, row + 7, torch.tensor(9)), (row + 1, row + 2))
    full = torch.zeros(3, 5, dtype=torch.int64)
    wide = philox4x32((column + full, row + full, row + 7 + full, full + 9), (row + 1 + full, row + 2 + full))
    assert all(torch.equal(a, b) for a, b in zip(narrow, wide, strict=True))
