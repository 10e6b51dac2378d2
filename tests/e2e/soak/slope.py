# SPDX-License-Identifier: Apache-2.0
"""Decides whether a series of figures grows, and whether a server's resources have returned to what they were."""

import dataclasses
import statistics

BLOCKS = 48  # a long series is reduced to the medians of so many runs of neighbours: the slopes of all pairs are compared

# Figures that must not be above the baseline by more than this once all clients of a round have ended. Threads: an
# executor makes up to 16 helpers when it first needs them (server/core/executors/thread_pool.cc), and gRPC adds some to its pools;
# both keep them.
RETURNING = {"descriptors": 0, "threads": 20, "reserved_bytes": 0, "shard_sessions": 0, "coordinator_sessions": 0,
             "job_series": 0}


def medians(values, blocks=BLOCKS):
    """The medians of `blocks` runs of neighbours, or the values themselves where there are no more than that."""
    count = min(blocks, len(values))
    edges = [len(values) * i // count for i in range(count + 1)]
    return [statistics.median(values[begin:end]) for begin, end in zip(edges, edges[1:])]


def theil_sen(xs, ys):
    """The median of the slopes between all pairs of points, which single outliers do not move."""
    slopes = [(ys[j] - ys[i]) / (xs[j] - xs[i]) for i in range(len(xs)) for j in range(i) if xs[i] != xs[j]]
    return statistics.median(slopes)


def thirds(values):
    """The medians of the first and of the last third."""
    third = max(len(values) // 3, 1)
    return statistics.median(values[:third]), statistics.median(values[-third:])


@dataclasses.dataclass(frozen=True)
class Growth:
    """How a figure grew, in its unit per thousand operations, by two estimates."""

    slope: float
    by_thirds: float
    first: float
    last: float

    def above(self, bound):
        """Both estimates have to say so: a series that jumps once and stays is no leak for the first, and noise at one
        end is none for the second."""
        return min(self.slope, self.by_thirds) > bound


def growth(operations, values):
    """`values` after so many `operations` in all, one pair a round; at least 6 rounds."""
    if len(values) < 6 or len(values) != len(operations):
        raise ValueError(f"expected 6 rounds or more, got {len(operations)} and {len(values)}")
    xs, ys = medians(operations), medians(values)
    first, last = thirds(values)
    begin, end = thirds(operations)
    return Growth(1000 * theil_sen(xs, ys), 1000 * (last - first) / (end - begin), first, last)


def not_returned(baseline, now):
    """Returns the figures above the baseline, in words; empty when everything has returned."""
    return [f"{name}: expected at most {baseline[name] + spare:g}, got {now[name]:g}"
            for name, spare in RETURNING.items() if now[name] > baseline[name] + spare]
