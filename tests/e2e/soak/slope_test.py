#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The soak test's checker finds a planted leak, and takes neither noise nor a warm start for one."""

import random
import unittest

import slope

OPERATIONS = 400  # a round
MIB = 1 << 20


def series(rounds, leak, seed, noise=MIB):
    """Resident bytes as a server has them: a level that wanders by pages, plateaus and short peaks, and the leak."""
    source = random.Random(seed)
    operations = [OPERATIONS * (i + 1) for i in range(rounds)]
    values = []
    for i in range(rounds):
        plateau = noise * ((i // 7) % 2)
        peak = 20 * noise if source.random() < 0.05 else 0
        values.append(200 * MIB + plateau + peak + source.randrange(noise) // 4096 * 4096 + leak * i)
    return operations, values


class SlopeTest(unittest.TestCase):
    def test_a_leak_each_round_is_found(self):
        bound = 64 << 10  # per thousand operations
        for rounds in (60, 300, 5000):
            for seed in range(20):
                leak = 2 * bound * OPERATIONS // 1000
                found = slope.growth(*series(rounds, leak, seed))
                self.assertTrue(found.above(bound), (rounds, seed, found))
                self.assertAlmostEqual(found.slope / (2 * bound), 1, delta=0.35)

    def test_noise_and_peaks_are_no_leak(self):
        for rounds in (60, 300, 5000):
            for seed in range(20):
                found = slope.growth(*series(rounds, 0, seed))
                self.assertFalse(found.above(64 << 10), (rounds, seed, found))

    def test_a_single_jump_is_no_leak(self):
        operations, values = series(60, 0, 1, noise=4096)
        values = [value + (8 * MIB if i >= 45 else 0) for i, value in enumerate(values)]
        self.assertFalse(slope.growth(operations, values).above(16 << 10))

    def test_a_falling_series_is_no_leak(self):
        self.assertFalse(slope.growth(*series(60, -MIB, 3)).above(0))

    def test_few_rounds_are_an_error(self):
        with self.assertRaises(ValueError):
            slope.growth([1, 2, 3], [4, 5, 6])


class NotReturnedTest(unittest.TestCase):
    def test_each_resource_that_stays_is_named(self):
        baseline = dict.fromkeys(slope.RETURNING, 10)
        self.assertEqual(slope.not_returned(baseline, dict.fromkeys(slope.RETURNING, 9)), [])
        for name, spare in slope.RETURNING.items():
            self.assertEqual(slope.not_returned(baseline, {**baseline, name: 11 + spare}),
                             [f"{name}: expected at most {10 + spare}, got {11 + spare}"])
            self.assertEqual(slope.not_returned(baseline, {**baseline, name: 10 + spare}), [])


if __name__ == "__main__":
    unittest.main()
