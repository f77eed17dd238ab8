"""Combinations of values in which every pair of values occurs: most faults need two values to meet, hardly any need more.

Knows names and values; not what they are for.
"""

from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations


def all_pairs(values: Mapping[str, Sequence[Hashable]]) -> list[dict[str, Hashable]]:
    """Return combinations, a value for each name, so that any two values of different names are together in one of them.

    Greedy, and always the same: each combination begins with the first pair that is still missing, then takes, name by name, the
    value that brings the most missing pairs; of several the one that was taken least, so that the values come equally often.
    """
    # A dictionary for its order: that of a set would differ from run to run.
    missing = {
        frozenset({(one, left), (other, right)}): None
        for one, other in combinations(values, 2)
        for left in values[one]
        for right in values[other]
    }
    taken = {(name, value): 0 for name in values for value in values[name]}
    combined = []
    while missing:
        chosen = dict(next(iter(missing)))
        for name in values:
            if name not in chosen:
                chosen[name] = max(
                    values[name],
                    key=lambda value: (
                        sum(frozenset({(name, value), before}) in missing for before in chosen.items()),
                        -taken[name, value],
                    ),
                )
        for both in combinations(chosen.items(), 2):
            missing.pop(frozenset(both), None)
        for one_taken in chosen.items():
            taken[one_taken] += 1
        combined.append({name: chosen[name] for name in values})
    return combined
