#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Phases over shell scripts that stand for the programs: limits, results of each check, and the files of a killed run."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import unittest
from unittest import mock

TESTS = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "bench")]

# pylint: disable=wrong-import-position
import rows
from gpu import judge, machine, phases, profiler, report, results, run

PASSED = "[==========] 3 tests from 1 test suite ran.\n[  PASSED  ] 3 tests.\n"
MIXED = ("[ RUN      ] A.GivesTheSameBits\n[       OK ] A.GivesTheSameBits (1 ms)\n[ RUN      ] All/B.FusedIsToTheBit/3\n"
         "[  FAILED  ] All/B.FusedIsToTheBit/3, where GetParam() = 3 (2 ms)\n"
         "[  PASSED  ] 1 test.\n[  SKIPPED ] 1 test, listed below:\n[  FAILED  ] 2 tests, listed below:\n")
ALL_SKIPPED = ("a.cc:5: Skipped\n2 ranks need as many CUDA devices, there are 0\n[  PASSED  ] 0 tests.\n"
               "[  SKIPPED ] 4 tests, listed below:\n")
HANG = "exec tail -f /dev/null"
SPREAD = {"q1": 1.5, "q3": 2.5, "n": 9}


def row(name, value=2.0, unit="ms"):
    return rows.row(name, value, unit, quartiles=SPREAD)


class JudgeTest(unittest.TestCase):
    def test_counts_tests_and_names_what_failed(self):
        self.assertEqual(judge.googletest(0, PASSED, 9), {"status": "passed", "passed": 3, "failed": 0, "skipped": 0})
        found = judge.googletest(1, MIXED, 9)
        self.assertEqual((found["status"], found["reason"], found["failed"], found["skipped"]),
                         ("failed", "exit status 1", 2, 1))
        self.assertEqual(found["failures"], ["All/B.FusedIsToTheBit/3"])
        self.assertEqual(found["bits"], {"held": ["A.GivesTheSameBits"], "broken": ["B.FusedIsToTheBit"]})

    def test_a_program_that_ends_within_a_test_names_it(self):
        found = judge.googletest(-11, "[ RUN      ] A.B\n[       OK ] A.B (1 ms)\n[ RUN      ] A.C\n", 9)
        self.assertEqual((found["reason"], found["failures"]), ("killed by signal 11", ["A.C"]))

    def test_a_program_without_a_device_says_why(self):
        found = judge.googletest(77, "skipped: UNAVAILABLE: no CUDA device: no driver\n", 9)
        self.assertEqual((found["status"], found["reason"]), ("skipped", "UNAVAILABLE: no CUDA device: no driver"))

    def test_tests_that_all_skip_themselves_have_not_passed(self):
        found = judge.googletest(0, ALL_SKIPPED, 9)
        self.assertEqual((found["status"], found["reason"], found["skipped"]),
                         ("skipped", "2 ranks need as many CUDA devices, there are 0", 4))

    def test_neither_a_hang_nor_silence_is_a_pass(self):
        self.assertEqual(judge.googletest(None, "", 9)["reason"], "not done after 9 s")
        self.assertEqual(judge.googletest(0, "", 9)["status"], "skipped")

    def test_what_the_sanitizer_says(self):
        found = judge.sanitizer(99, PASSED + "========= ERROR SUMMARY: 2 errors\n", 9)
        self.assertEqual((found["status"], found["reason"]), ("failed", "ERROR SUMMARY: 2 errors"))
        refused = judge.sanitizer(1, "========= Error: Device not supported. Please refer to the documentation\n", 9)
        self.assertEqual(refused["status"], "skipped")
        self.assertEqual(judge.sanitizer(0, PASSED, 9)["status"], "passed")


class ProfilerTest(unittest.TestCase):
    ANSWER = ('==PROF== Connected\n"ID","Kernel Name","dram__throughput.avg.pct_of_peak_sustained_elapsed",'
              '"gpu__time_duration.sum","sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active",'
              '"smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio",'
              '"smsp__average_warp_latency_issue_stalled_long_scoreboard.ratio"\n'
              '"","","%","ns","%","warp","warp"\n'
              '"0","void precondor::cuda::Products<float>(int)","40","1,000","60","1.5","3"\n'
              '"1","void precondor::cuda::Products<float>(int)","80","3,000","20","0.5","7"\n'
              '"2","Append(int)","90","9,000","n/a","0","1"\n==PROF== Disconnected\n')

    def test_kernels_of_one_name_are_one_and_weigh_by_their_time(self):
        append, products = profiler.kernels(self.ANSWER)
        self.assertEqual((append["kernel"], append["us"], append["tensor"]), ("Append", 9, None))
        self.assertEqual((products["kernel"], products["launches"], products["us"]), ("Products", 2, 4))
        self.assertEqual((products["dram"], products["tensor"]), (70, 30))
        self.assertEqual(products["stalls"], [["long_scoreboard", 6], ["barrier", .75]])

    def test_a_name_is_the_kernels_own(self):
        for name in ("void precondor::cuda::(anonymous namespace)::Update<float, precondor::cuda::Job>(T1, long)",
                     "precondor::cuda::<unnamed>::Update(const precondor::View &)",
                     "void unnamed>::Update<ManyJobs<Job>>(T1, long)", "Update"):
            self.assertEqual(profiler.short_name(name), "Update")

    def test_an_answer_without_kernels_has_none(self):
        self.assertEqual(profiler.kernels("==ERROR== no permission\n"), [])
        self.assertEqual(profiler.kernels('"a","b"\n"","c"\n'), [])


class PhasesTest(unittest.TestCase):
    """main() over a folder of programs. `check` and `other` are its suites."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.out = self.folder / "out"
        (self.folder / "bin").mkdir()
        suites = tuple(phases.Check(name, f"{name}_test", 20) for name in ("check", "other"))
        sanitized = phases.Check("memcheck/check", "check_test", 20, tests="A.*", host_tests=None, tool="memcheck")
        table = {"smoke": phases.Phase("smoke", 20, suites), "steps": phases.Phase("steps", 20, cases=True, scripts=(phases.Script("step/torch/mkor", "bench/a.py", 20, ("mkor",)),)),
                 "bench": phases.Phase("bench", 20, cases=True),
                 "profile": phases.Phase("profile", 20), "sanitize": phases.Phase("sanitize", 20, (sanitized,))}
        for patch in (mock.patch.dict(phases.PHASES, table, clear=True), mock.patch.object(phases, "PROFILED", ("step/a",)),
                      mock.patch.object(phases, "BENCH_SECONDS", {"": 20}),
                      mock.patch.object(run.machine, "find_tool", self.find_tool),
                      mock.patch.object(run.machine, "describe", lambda *_: {"device": "a device", "driver": "1"}),
                      mock.patch.object(sys, "executable", "/bin/false")):
            patch.start()
            self.addCleanup(patch.stop)
        self.suite("check", f"echo '{PASSED}'")
        self.suite("other", f"echo '{PASSED}'")
        self.bench("")

    def program(self, name, script):
        path = self.folder / "bin" / name
        path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        path.chmod(0o755)
        return path

    def suite(self, name, script):
        for suffix in ("_cuda", "_cuda_on_host"):
            self.program(f"{name}_test{suffix}", script)

    def bench(self, *cases):
        """A cuda_bench whose cases are (name, what it does); those of --only run, as in cuda_bench."""
        cases = [case for case in cases if case]
        listed = " ".join(name for name, _ in cases)
        body = "".join(f'case ",$only," in *,{name},*) echo \'{{"begin": "{name}"}}\'\n{script}\n'
                       f'echo \'{{"end": "{name}", "error": null}}\';; esac\n' for name, script in cases)
        script = (f'only=\nfor word in "$@"; do case $word in --list) echo {listed}; exit 0;; --only=*) only=${{word#--only=}};; '
                  f'esac; done\n{body}')
        self.program("cuda_bench", script)
        self.program("cuda_bench_on_host", script)

    def find_tool(self, name):
        path = self.folder / "bin" / name
        return str(path) if path.exists() else None

    def main(self, *words, phase="smoke"):
        """The exit status, the last line that is printed, and the summary."""
        command = ["run.py", "--programs", str(self.folder), "--out", str(self.out), "--phase", phase, *words]
        with mock.patch.object(sys, "argv", command), mock.patch("builtins.print") as printed:
            status = run.main()
        return status, printed.call_args[0][0], report.summarize(results.read([self.out]))

    def text(self):
        return (self.out / results.REPORT).read_text(encoding="utf-8")

    def test_one_failure_is_one_check_and_the_others_run(self):
        self.suite("check", f"echo '{MIXED}'; exit 1")
        status, last, summary = self.main()
        self.assertEqual((status, last), (1, "failed: smoke/check"))
        self.assertEqual(summary.passed, ["smoke/other"])
        self.assertIn("- **failed** smoke/check: exit status 1; All/B.FusedIsToTheBit/3", self.text())
        self.assertIn("- broken: B.FusedIsToTheBit", self.text())

    def test_all_that_a_program_prints_is_in_the_log(self):
        self.main()
        self.assertIn("[smoke/check] [  PASSED  ] 3 tests.", (self.out / results.LOG).read_text(encoding="utf-8"))

    def test_a_program_that_prints_without_end_does_not_fill_the_log(self):
        self.suite("check", f"seq 100000; echo '{PASSED}'")
        status, _, _ = self.main()
        self.assertEqual(status, 0)
        log = (self.out / results.LOG).read_text(encoding="utf-8")
        self.assertLess(len(log), 3 * results.LOG_BYTES_OF_A_CHECK)
        self.assertIn("[smoke/check] [  PASSED  ] 3 tests.", log)

    def test_a_program_that_is_missing_is_a_failure(self):
        (self.folder / "bin" / "check_test_cuda").unlink()
        status, last, _ = self.main()
        self.assertEqual((status, last), (1, "failed: smoke/check"))

    def test_without_a_device_nothing_failed(self):
        for name in ("check", "other"):
            self.suite(name, "echo 'skipped: no driver'; exit 77")
        status, last, _ = self.main()
        self.assertEqual((status, last), (0, "nothing ran on a device: all skipped"))

    def test_what_was_skipped_has_not_passed(self):
        self.suite("check", "echo 'skipped: no driver'; exit 77")
        self.assertEqual(self.main()[:2], (0, "passed on a device, but skipped: smoke/check"))
        self.suite("check", f"echo '{PASSED}'")
        self.assertEqual(self.main()[:2], (0, "all passed on a device"))

    def test_a_filter_takes_checks_by_phase_and_name(self):
        self.assertEqual(self.main("--filter", "smoke/oth")[2].passed, ["smoke/other"])

    def test_a_phase_ends_at_its_limit_and_says_what_did_not_run(self):
        self.suite("check", HANG)
        status, last, summary = self.main("--limit", "1")
        self.assertEqual(status, 1)
        self.assertEqual(summary.failed, ["smoke/check"])
        self.assertEqual(summary.unfinished, ["smoke/other"])
        self.assertIn("not finished: smoke/other", last)
        self.assertIn("- **not run** smoke/other: the phase's time was over", self.text())

    def test_a_program_that_prints_until_its_end_is_ended(self):
        self.suite("check", "exec yes")
        result = self.main("--limit", "1")[2].phases["smoke"].results["check"]
        self.assertEqual((result["status"], result["reason"][:14]), ("failed", "not done after"))

    def test_a_program_that_closes_its_output_and_goes_on_is_ended(self):
        self.suite("check", "exec tail -f /dev/null >/dev/null 2>&1")
        self.assertEqual(self.main("--limit", "1")[2].failed, ["smoke/check"])

    def test_rows_come_one_by_one_and_a_failed_case_is_one_row_less(self):
        texts = {name: json.dumps(row(name)) for name in "abcd"}
        self.bench(("a", f"echo '{texts['a']}'"), ("b", "echo 'PRECONDOR_CHECK failed'; kill -ABRT $$"),
                   ("c", f"echo '{texts['c']}'; echo '{{\"end\": \"c\", \"error\": \"wrong result\"}}'; exit 3"),
                   ("d", f"echo '{texts['d']}'"))
        status, last, summary = self.main("--filter", "bench/.$", phase="bench")
        self.assertEqual((status, last), (1, "failed: bench/b, bench/c"))
        self.assertEqual(list(summary.rows), ["a", "c", "d"])
        self.assertEqual(summary.phases["bench"].results["b"]["reason"], "killed by signal 6: PRECONDOR_CHECK failed")
        self.assertIn("| a | 2 | ms | 1.5 ... 2.5 of 9 |", self.text())

    def test_a_case_that_hangs_is_ended_and_the_next_is_measured(self):
        self.bench(("a", HANG), ("b", f"echo '{json.dumps(row('b'))}'"))
        with mock.patch.object(phases, "BENCH_SECONDS", {"": 20, "a": .5}):
            _, _, summary = self.main("--filter", "bench/.$", phase="bench")
        self.assertEqual((summary.failed, list(summary.rows)), (["bench/a"], ["b"]))

    def test_a_benchmark_that_does_not_start_fails_case_by_case(self):
        self.program("cuda_bench", "case $1 in --list) echo a b;; *) exit 127;; esac")
        self.assertEqual(self.main("--filter", "bench/.$", phase="bench")[2].failed, ["bench/a", "bench/b"])
        self.program("cuda_bench", "exit 1")
        self.assertIn("bench/cuda_bench", self.main("--filter", "bench/cuda_b", phase="bench")[2].failed)

    def python(self, script):
        """A program in the place of Python."""
        return mock.patch.object(sys, "executable", str(self.program("python", script)))

    def test_our_steps_are_held_against_their_peer(self):
        steps = [f"step/cuda/{name}" for name in ("low_rank_64", "dense_bf16", "muon")]
        self.bench(*((name, f"echo '{json.dumps(row(name, place + 1.0))}'") for place, name in enumerate(steps)))
        (self.folder / "python").mkdir()  # a pack's packages
        with self.python(f"echo $* $PYTHONPATH >{self.folder}/words; echo '{json.dumps(row('step/torch/mkor', 1.6))}'"):
            status, _, summary = self.main(phase="steps")
        self.assertEqual(status, 0)
        self.assertEqual((self.folder / "words").read_text(encoding="utf-8").split(),
                         ["-B", str(TESTS / "bench/a.py"), "mkor", "--device", "cuda", str(self.folder / "python")])
        ratios = {name: (r["value"], r["pass"]) for name, r in summary.rows.items() if name.endswith("/to_torch")}
        self.assertEqual(ratios, {"step/cuda/low_rank_64/to_torch": (1 / 1.6, True), "step/cuda/dense_bf16/to_torch": (2 / 1.6, False)})

    def test_steps_of_another_model_have_another_peer(self):
        self.bench(*((name, f"echo '{json.dumps(row(name, 1.0))}'") for name in ("step/cuda/muon", "step/cuda/muon_llama_1b")))
        for peer, took in (("muon", 2.0), ("muon_llama_1b", 4.0)):
            with self.python(f"echo '{json.dumps(row(f'step/torch/{peer}', took))}'"):
                summary = self.main(phase="steps")[2]
        self.assertEqual({name: r["value"] for name, r in summary.rows.items() if name.endswith("/to_torch")},
                         {"step/cuda/muon/to_torch": .5, "step/cuda/muon_llama_1b/to_torch": .25})

    def test_a_script_can_miss_something_or_fail(self):
        ours = json.dumps(row("step/torch/mkor"))
        for script, status, reason in (("echo 'no device'", "skipped", "no device"), (f"echo '{ours}'; echo Why; exit 9", "failed", "exit status 9: Why"),
                                       ("true", "failed", "it wrote no row"), ("exec tail -f /dev/null", "failed", "not done after 1 s")):
            with self.python(script), mock.patch.dict(phases.PHASES, {"steps": phases.Phase(
                    "steps", 20, scripts=(phases.Script("step/torch/mkor", "bench/a.py", 1),))}):
                result = self.main(phase="steps")[2].phases["steps"].results["step/torch/mkor"]
            self.assertEqual((result["status"], result["reason"]), (status, reason))

    def test_over_the_imitation_a_script_runs_in_short_on_the_cpu(self):
        with self.python(f"echo $* >{self.folder}/words; echo '{json.dumps(row('step/torch/mkor'))}'"):
            self.assertEqual(self.main("--imitation", "--filter", "torch", phase="steps")[2].passed, ["steps/step/torch/mkor"])
        self.assertEqual((self.folder / "words").read_text(encoding="utf-8").split()[-4:], ["mkor", "--device", "cpu", "--short"])

    def test_tools_that_are_not_found_are_skipped(self):
        for phase, check in (("profile", "step/a"), ("sanitize", "memcheck/check")):
            result = self.main(phase=phase)[2].phases[phase].results[check]
            self.assertEqual(result["status"], "skipped")
            self.assertIn("not found", result["reason"])

    def test_tools_get_their_commands(self):
        self.program("compute-sanitizer", f"echo \"$*\" >{self.folder}/words; echo '{PASSED}'")
        self.assertEqual(self.main(phase="sanitize")[2].passed, ["sanitize/memcheck/check"])
        self.assertEqual((self.folder / "words").read_text(encoding="utf-8").split(),
                         ["--tool", "memcheck", "--error-exitcode", "99", f"{self.folder}/bin/check_test_cuda",
                          "--gtest_filter=A.*"])
        self.program("ncu", f"echo \"$*\" >{self.folder}/words; echo '{ProfilerTest.ANSWER}'")
        self.assertEqual(self.main(phase="profile")[2].passed, ["sanitize/memcheck/check", "profile/step/a"][::-1])
        words = (self.folder / "words").read_text(encoding="utf-8").split()
        self.assertEqual(words[-6:-4] + words[-3:], ["timeout", "--foreground", f"{self.folder}/bin/cuda_bench", "--profile", "--only=step/a"])
        self.assertIn("| Append | step/a | 1 | 9 | 90 |  | long_scoreboard 1, barrier 0 |", self.text())
        self.program("ncu", "echo '==ERROR== ERR_NVGPUCTRPERM - no permission'; exit 1")
        result = self.main(phase="profile")[2].phases["profile"].results["step/a"]
        self.assertEqual((result["status"], result["reason"]), ("failed", "ncu: ERR_NVGPUCTRPERM - no permission"))

    def test_over_the_imitation_the_tools_of_a_device_are_skipped(self):
        self.program("compute-sanitizer", "exit 1")
        self.program("ncu", "exit 1")
        self.bench(("a", f"echo '{json.dumps(row('a'))}'"))
        for phase in ("smoke", "bench", "profile", "sanitize"):
            status, _, summary = self.main("--imitation", phase=phase)
            self.assertEqual(status, 0)
        for phase, check in (("profile", "step/a"), ("sanitize", "memcheck/check")):
            self.assertEqual(summary.phases[phase].results[check]["reason"], phases.IMITATED)
        self.assertEqual(summary.passed, ["smoke/check", "smoke/other", "bench/a"])

    def test_calls_of_several_phases_are_one_report(self):
        self.main("--filter", "check")
        first, self.out = self.out, self.folder / "second"
        self.main("--filter", "other")
        status, _, _ = self.main("--results", str(first), phase="report")
        self.assertEqual(status, 0)
        self.assertIn("| smoke | finished | 2 | 0 | 0 | 0 |", self.text())
        self.assertIn("| bench | not begun | 0 |", self.text())

    def test_a_claim_is_held_against_what_was_measured(self):
        limited = {**row("a", 3.0), "limit": 2.0}
        self.bench(("a", f"echo '{json.dumps(limited)}'\necho '{json.dumps(row('n', 9, ''))}'"))
        claims = [{"name": "a", "claim": "a step", "unit": "ms", "limit": {"H100 SXM": 1.0, "H200 SXM": .5}, "factor": 1.2,
                   "target": {"H100 SXM": 1.2, "H200 SXM": .6}, "at_most": True},
                  {"name": "n", "claim": "launches", "target": {"H100 SXM": 10, "H200 SXM": 10}, "at_most": True},
                  {"name": "z", "claim": "nothing yet", "unit": "x", "target": 2}]
        h200 = {"device": "NVIDIA H200", "driver": "1"}
        with mock.patch.dict(sys.modules, {"gpu_targets": mock.Mock(ROWS=claims)}), \
                mock.patch.object(run.machine, "describe", lambda *_: h200):
            self.main("--filter", "bench/a", phase="bench")
        self.assertIn("| a step | a | ms | 0.5 | 2.4 | 3 | 1.5 ... 2.5 of 9 | 2 | **missed** |", self.text())
        self.assertIn("| launches | n |  |  | 10 | 9 | 1.5 ... 2.5 of 9 |  | met |", self.text())
        self.assertIn("| nothing yet | z | x |  | 2 | not measured |", self.text())

    def test_a_page_gets_the_table_between_its_marks(self):
        self.bench(("a", f"echo '{json.dumps(row('a'))}'"))
        self.main("--filter", "bench/a", phase="bench")
        page = self.folder / "page.md"
        page.write_text("before\n<b>\nold\n<e>\nafter\n", encoding="utf-8")
        targets = mock.Mock(ROWS=[], BEGIN="<b>\n", END="<e>", markdown=lambda measured: f"a is {measured['a']:g}\n")
        with mock.patch.dict(sys.modules, {"gpu_targets": targets}):
            self.main("--docs", str(page), phase="report")
            self.assertEqual(page.read_text(encoding="utf-8"), "before\n<b>\na is 2\n<e>\nafter\n")
            page.write_text("no marks", encoding="utf-8")
            with self.assertRaisesRegex(SystemExit, "expected the lines <b> and <e>"):
                self.main("--docs", str(page), phase="report")
            self.main("--filter", "smoke", "--imitation")
            with self.assertRaisesRegex(SystemExit, "expected results of a device"):
                self.main("--docs", str(page), phase="report")
        with mock.patch.dict(sys.modules, {"gpu_targets": None}), self.assertRaisesRegex(SystemExit, "gpu_targets.py"):
            self.main("--docs", str(page), phase="report")

    def test_half_a_line_is_left_out_and_ended(self):
        self.main()
        with open(self.out / results.RESULTS, "a", encoding="utf-8") as file:
            file.write('{"record": "che')
        self.assertEqual(self.main("--filter", "check")[2].passed, ["smoke/check", "smoke/other"])

    def test_programs_that_do_not_start_are_told(self):
        for name in phases.programs(False):
            self.program(name, "exit 0")
        self.assertIsNone(run.start_up(self.folder, False))
        self.program("check_test_cuda", "echo 'libcublas.so.13: cannot open shared object file' >&2; exit 127")
        self.assertEqual(run.start_up(self.folder, False),
                         "check_test_cuda: libcublas.so.13: cannot open shared object file")


class KilledTest(unittest.TestCase):
    """The real table, in a process of its own that is killed while its second program runs."""

    def test_a_killed_run_leaves_a_report_of_what_came(self):
        for number in (signal.SIGKILL, signal.SIGTERM):
            with tempfile.TemporaryDirectory() as name:
                self.kill(pathlib.Path(name), number)

    def kill(self, folder, number):
        (folder / "bin").mkdir()
        names = [phases.program_name(check, "_cuda") for check in phases.CONFORMANCE.checks]
        for program in names:
            script = f"echo '{PASSED}'" if program == names[0] else "exec timeout 120 tail -f /dev/null"
            (folder / "bin" / program).write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
            (folder / "bin" / program).chmod(0o755)
        out = folder / "out"
        command = [sys.executable, "-B", run.__file__, "--programs", str(folder), "--out", str(out), "--phase"]
        with subprocess.Popen([*command, "conformance"], stdout=subprocess.PIPE, text=True) as runner:
            # The first check has ended, and its result is on the disk.
            line = next(line for line in runner.stdout if line.startswith("passed"))
            self.assertIn("conformance/device_memory", line)
            runner.send_signal(number)
            runner.wait()
        text = (out / results.REPORT).read_text(encoding="utf-8")
        self.assertIn("**unfinished**", text)
        done = subprocess.run([*command, "report"], capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 1)
        text = (out / results.REPORT).read_text(encoding="utf-8")
        left = [check.name for check in phases.CONFORMANCE.checks[1:]]
        self.assertIn(f"| conformance | **unfinished** | 1 | 0 | 0 | {len(left)} |", text)
        self.assertIn(f"- **not run** conformance/{', '.join(left)}: the run ended before it", text)
        self.assertIn("| smoke | not begun |", text)


class MachineTest(unittest.TestCase):
    def test_libraries_are_found_once_and_in_wheels_first(self):
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            for path in ("cuda/lib64/libcublas.so.13", "cuda/lib64/libcusparse.so.12",
                         "site/nvidia/cu13/lib/libcublas.so.13", "site/nvidia/cu13/lib/libcusolver.so.12", "site/nvidia/nvjitlink/lib/libnvJitLink.so.13",
                         "site/nvidia/other/lib/libother.so"):
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / path).touch()
            with mock.patch.object(machine, "LIBRARY_FOLDERS", [f"{name}/cuda/lib64"]), \
                    mock.patch.object(machine, "ENVIRONMENTS", [f"{name}/si*"]), \
                    mock.patch.object(machine.site, "getsitepackages", return_value=[]), \
                    mock.patch.object(machine.site, "getusersitepackages", return_value=""), \
                    mock.patch.dict(os.environ, {"LD_LIBRARY_PATH": "/given"}):
                expected = [f"{name}/site/nvidia/nvjitlink/lib", f"{name}/site/nvidia/cu13/lib", f"{name}/cuda/lib64"]
                self.assertEqual(machine.library_folders(), expected)
                self.assertEqual(machine.environment()["LD_LIBRARY_PATH"], ":".join(["/given", *expected]))

    def test_without_a_device_its_facts_are_unknown(self):
        with mock.patch.object(machine, "output_of", return_value=None):
            self.assertIsNone(machine.describe(pathlib.Path("."), imitation=False)["device"])
        listed = "NVIDIA H100, 580.1, 81559 MiB, 9.0, 1980 MHz, 2619 MHz, 700.00 W"
        with mock.patch.object(machine, "output_of", return_value=listed):
            facts = machine.describe(pathlib.Path("."), imitation=False)
        self.assertEqual((facts["device"], facts["driver"], facts["power limit"]), ("NVIDIA H100", "580.1", "700.00 W"))


class CallTest(unittest.TestCase):
    """tests/gpu.sh itself, in a folder like that of an unpacked pack."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        for name in ("tests", "bin", "tools"):
            (self.folder / name).mkdir()
        for name in ("gpu", "bench", "deploy", "gpu.sh"):
            (self.folder / "tests" / name).symlink_to(TESTS / name)
        (self.folder / "tests/gpu.sh").unlink()
        shutil.copy(TESTS / "gpu.sh", self.folder / "tests")  # which goes to its own folder
        (self.folder / "revision").touch()

    def program(self, name, script):
        (self.folder / name).write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        (self.folder / name).chmod(0o755)

    def gpu_sh(self, *words):
        """The exit status and what is printed."""
        environment = {"PATH": f"{self.folder}/tools:{os.environ['PATH']}"}
        done = subprocess.run(["tests/gpu.sh", *words], cwd=self.folder, check=False, stdin=subprocess.DEVNULL, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment)
        return done.returncode, done.stdout

    def test_a_phase_that_does_not_end_is_ended_and_the_next_one_runs(self):
        for name in phases.programs(False):
            self.program(f"bin/{name}", f"echo '{PASSED}'")
        # One program prints a line without an end. In the first phase the driver's tool holds the process, so that none of
        # its own limits counts.
        self.program("bin/device_memory_test_cuda", f"head -c 100000000 /dev/zero | tr '\\0' x; echo; echo '{PASSED}'")
        self.program("tools/nvidia-smi", f"if mkdir {self.folder}/held 2>/dev/null; then exec tail -f /dev/null; fi")
        status, said = self.gpu_sh("--phase", "smoke,conformance", "--out", "out", "--limit", "10", "--filter",
                                   "smoke/|conformance/(device|low_rank)")
        self.assertEqual(status, 1, said)
        out = self.folder / "out"
        summary = report.summarize(results.read([out]))
        self.assertCountEqual(summary.passed, ["conformance/device_memory", "conformance/low_rank"], said)
        self.assertIn("ended by signal 15", said)
        self.assertEqual(said.splitlines()[-1], "not finished: smoke")
        sizes = {path.name: path.stat().st_size for path in out.iterdir()}
        self.assertTrue(len(sizes) <= 8 and max(sizes.values()) < 1 << 20, sizes)

    def test_a_list_of_phases_fits_into_a_command(self):
        seconds = phases.START_SECONDS + sum(seconds for _, seconds in phases.choose("lease"))
        self.assertEqual(seconds, phases.CALL_SECONDS)
        self.assertEqual([phase.name for phase, _ in phases.choose("conformance,sanitize")], ["conformance", "sanitize"])
        for words, message in ((["lease,sanitize"], "at most 450 s together, with 30 s before the first, got 650 s"),
                               (["smoke,tests"], "expected smoke, .*, lease or report, got 'tests'")):
            status, said = self.gpu_sh("--phase", *words)
            self.assertEqual(status, 2)
            self.assertRegex(said, message)
        self.assertFalse((self.folder / "build").exists())
        self.assertEqual(len(phases.choose("lease,sanitize", limit=9)), 5)

    def test_a_pack_that_is_missing_or_lacks_python_is_an_error_at_once(self):
        (self.folder / "revision").unlink()
        self.program("tools/g++", "exit 1")
        status, said = self.gpu_sh("--phase", "smoke", "--out", "out")
        self.assertEqual(status, 1)
        self.assertIn(f"expected {self.folder.resolve()}/build/gpu-pack/programs.tar.gz", said)
        self.program("tools/python3.12", "echo 'command not found' >&2; exit 127")
        status, said = self.gpu_sh("--pack", "--python", "python3.12")
        self.assertEqual(status, 1)
        self.assertIn("got python3.12: command not found", said)

    def test_weighs_what_travels(self):
        subprocess.run(["git", "init", "--quiet", str(self.folder)], check=True)
        status, said = self.gpu_sh("--weigh")
        self.assertEqual(status, 0, said)
        self.assertRegex(said, r"^tree 0\.\d MiB \+ build/gpu-pack 0\.0 MiB = 0\.\d of 64 MiB\n$")
        (self.folder / ".git/info/exclude").write_text("/build/\n", encoding="utf-8")
        for name, status, weight in (("build/gpu-pack/programs.tar.gz", 0, "build/gpu-pack 40.0 MiB"),
                                     ("build/else", 0, "build/gpu-pack 40.0 MiB"), ("untracked", 1, "= 80.[0-9] of 64 MiB")):
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            with open(self.folder / name, "wb") as file:
                file.truncate(40 << 20)
            got, said = self.gpu_sh("--weigh")
            self.assertEqual(got, status, said)
            self.assertRegex(said, weight)


class TableTest(unittest.TestCase):
    def test_names_of_checks_are_told_apart(self):
        for phase in phases.PHASES.values():
            self.assertEqual(len({check.name for check in phase.checks}), len(phase.checks))

    def test_every_program_of_the_label_gpu_is_in_a_phase(self):
        build = os.environ.get("PRECONDOR_BUILD_DIR")
        if not build:
            self.skipTest("PRECONDOR_BUILD_DIR names no build folder")
        listed = subprocess.run(["ctest", "--test-dir", build, "-L", "^gpu$", "--show-only=json-v1"], capture_output=True,
                                text=True, check=True).stdout
        names = {test["name"] for test in json.loads(listed)["tests"]}
        if not names:
            self.skipTest("this build has no test with the label gpu: it found no CUDA toolkit")
        self.assertEqual(names, set(phases.programs(imitation=False)) - {"cuda_bench"})


if __name__ == "__main__":
    unittest.main()
