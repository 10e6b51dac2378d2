#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""gpu_run.py: what becomes of a program's exit status and words, and the report, with programs that need no device."""

import contextlib
import io
import json
import pathlib
import sys
import tempfile
import unittest
from unittest import mock

import gpu_run

PASSED = "[==========] 3 tests from 1 test suite ran.\n[  PASSED  ] 3 tests.\n"
MIXED = "[  PASSED  ] 1 test.\n[  SKIPPED ] 1 test, listed below:\n[  FAILED  ] 2 tests, listed below:\n"
ALL_SKIPPED = ("a.cc:5: Skipped\n2 ranks need as many CUDA devices, there are 0\n[  PASSED  ] 0 tests.\n"
               "[  SKIPPED ] 4 tests, listed below:\n")
ROW = {"name": "limit/cuda/copy", "value": 1.0, "unit": "GB/s", "limit": None, "ratio": None, "target": None, "pass": True}


class JudgeTest(unittest.TestCase):
    def test_counts_tests(self):
        self.assertEqual(gpu_run.judge(0, PASSED, 9), {"status": "passed", "passed": 3, "failed": 0, "skipped": 0})
        self.assertEqual(gpu_run.judge(1, MIXED, 9),
                         {"status": "failed", "reason": "exit status 1", "passed": 1, "failed": 2, "skipped": 1})

    def test_a_program_without_a_device_says_why(self):
        found = gpu_run.judge(77, "skipped: UNAVAILABLE: no CUDA device: no driver\n", 9)
        self.assertEqual((found["status"], found["reason"]), ("skipped", "UNAVAILABLE: no CUDA device: no driver"))

    def test_tests_that_all_skip_themselves_have_not_passed(self):
        found = gpu_run.judge(0, ALL_SKIPPED, 9)
        self.assertEqual((found["status"], found["reason"], found["skipped"]),
                         ("skipped", "2 ranks need as many CUDA devices, there are 0", 4))

    def test_neither_a_crash_nor_silence_is_a_pass(self):
        self.assertEqual(gpu_run.judge(-11, PASSED, 9)["reason"], "exit status -11")
        self.assertEqual(gpu_run.judge(None, "", 9)["reason"], "not done after 9 s")
        self.assertEqual(gpu_run.judge(0, "", 9)["status"], "skipped")


class ReportTest(unittest.TestCase):
    """Runs of main() over a build folder in which shell scripts stand for the programs."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.build = pathlib.Path(folder.name)
        (self.build / "tests/bench").mkdir(parents=True)
        self.bench("exit 77")
        nvcc = self.program("nvcc", "echo 'Cuda compilation tools, release 13.0, V13.0.88'")
        (self.build / "CMakeCache.txt").write_text(f"CUDAToolkit_NVCC_EXECUTABLE:FILEPATH={nvcc}\n")

    def program(self, name, script):
        path = self.build / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return path

    def bench(self, script):
        self.program(f"tests/bench/{gpu_run.BENCH}", script)

    def run_main(self, *scripts, seconds=20, torch=(None, "no torch"), short=True):
        """The exit status, the last line and the report of a run over suites that are `scripts`."""
        suites = {f"suite{i}": (["sh", "-c", script], seconds) for i, script in enumerate(scripts)}
        report = self.build / "report.json"
        arguments = ["gpu_run.py", "--build-dir", str(self.build), "--json", str(report)] + ["--short"] * short
        out = io.StringIO()
        status = 0
        with mock.patch.object(gpu_run, "gpu_suites", return_value=suites), mock.patch.object(sys, "argv", arguments), \
                mock.patch.object(gpu_run.step_rows, "start_torch", return_value=torch), \
                mock.patch.object(gpu_run.shutil, "which", return_value=None), contextlib.redirect_stdout(out):
            try:
                gpu_run.main()
            except SystemExit as end:
                status = end.code
        return status, out.getvalue().splitlines()[-1], json.loads(report.read_text())

    def test_without_a_device_nothing_failed(self):
        status, last, report = self.run_main("echo 'skipped: no driver'; exit 77")
        self.assertEqual((status, last), (0, "nothing ran on a device"))
        self.assertIsNone(report["device"])
        self.assertEqual(report["suites"][0]["reason"], "no driver")
        self.assertEqual(report["bench"]["status"], "skipped")

    def test_suites_and_rows_are_in_the_report(self):
        self.bench(f"echo '{json.dumps({'rows': [ROW]})}' >\"${{1#--json=}}\"")
        status, last, report = self.run_main(f"echo '{PASSED}'")
        self.assertEqual(status, 0)
        self.assertTrue(last.startswith("all passed on "), last)
        self.assertIsNotNone(report["device"])
        self.assertEqual(report["cuda"], "13.0.88")
        self.assertEqual(report["suites"][0]["passed"], 3)
        self.assertEqual(report["rows"], [ROW])

    def test_a_step_in_torch_is_held_against_each_of_ours(self):
        ours = {**ROW, "name": "step/cuda/low_rank_64", "value": 2.0, "unit": "ms"}
        self.bench(f"echo '{json.dumps({'rows': [ROW, ours, {**ours, 'name': ours['name'] + '/launches', 'unit': ''}]})}' "
                   ">\"${1#--json=}\"")
        child = mock.Mock()
        child.ask.side_effect = lambda command, _: {"make": "1", "step": ".03"}[command]
        status, last, report = self.run_main(f"echo '{PASSED}'", torch=(child, "2.9.0"), short=False)
        self.assertEqual((status, report["torch"]["version"]), (0, "2.9.0"), last)
        rows = {row["name"]: row for row in report["rows"][3:]}
        self.assertEqual(list(rows), ["step/cuda/torch", "step/cuda/torch_to_low_rank_64"])
        self.assertAlmostEqual(rows["step/cuda/torch"]["value"], 30)
        self.assertAlmostEqual(rows["step/cuda/torch_to_low_rank_64"]["value"], 15)
        self.assertTrue(rows["step/cuda/torch_to_low_rank_64"]["pass"])

    def test_torch_that_ends_is_a_failure(self):
        self.bench(f"echo '{json.dumps({'rows': [ROW]})}' >\"${{1#--json=}}\"")
        child = mock.Mock()
        child.ask.side_effect = SystemExit("python3 ended with -9")
        status, _, report = self.run_main(f"echo '{PASSED}'", torch=(child, "2.9.0"))
        self.assertEqual((status, report["torch"]["reason"]), ("failed: torch", "python3 ended with -9"))

    def test_one_failure_is_one_of_the_whole(self):
        status, _, report = self.run_main(f"echo '{PASSED}'", f"echo '{MIXED}'; exit 1")
        self.assertEqual(status, "failed: suite1")
        self.assertEqual([s["status"] for s in report["suites"]], ["passed", "failed"])

    def test_a_wrong_result_of_the_benchmark_is_a_failure(self):
        self.bench("echo 'PRECONDOR_CHECK failed'; kill -ABRT $$")
        status, _, report = self.run_main(f"echo '{PASSED}'")
        self.assertEqual(status, "failed: cuda_bench")
        self.assertEqual(report["rows"], [])

    def sanitize(self, script):
        """What becomes of one suite under a compute-sanitizer that is `script`."""
        tool = self.program("compute-sanitizer", script)
        with mock.patch.object(gpu_run, "gpu_suites", return_value={"suite0": (["suite0"], 20)}), \
                mock.patch.object(gpu_run, "SANITIZED", [("racecheck", "suite0", "A.*")]), \
                mock.patch.object(gpu_run.shutil, "which", return_value=str(tool)), \
                contextlib.redirect_stdout(io.StringIO()):
            return gpu_run.Runner(self.build, short=False).run_sanitizers()[0]

    def test_what_the_sanitizer_finds_is_a_failure(self):
        found = self.sanitize(f"test \"$*\" = '--tool racecheck --error-exitcode 99 suite0 --gtest_filter=A.*' || exit 1\n"
                              f"echo '{PASSED}'; exit 99")
        self.assertEqual((found["name"], found["status"], found["reason"]), ("racecheck.suite0", "failed", "exit status 99"))
        self.assertEqual(self.sanitize(f"echo '{PASSED}'")["status"], "passed")

    def test_a_sanitizer_that_refuses_the_device_is_skipped(self):
        found = self.sanitize("echo '========= Error: Device not supported. Please refer to the documentation'; exit 1")
        self.assertEqual(found["status"], "skipped")

    def test_a_suite_that_hangs_is_ended(self):
        status, _, report = self.run_main("exec tail -f /dev/null", seconds=.2)
        self.assertEqual(status, "failed: suite0")
        self.assertEqual(report["suites"][0]["reason"], "not done after 0.2 s")


if __name__ == "__main__":
    unittest.main()
