# SPDX-License-Identifier: Apache-2.0
"""The verdict on a check, from a program's exit status and words."""

import re

from gpu.results import FAILED, PASSED, SKIPPED

NO_DEVICE = 77  # exit status of programs that find no device
SANITIZER_ERROR = 99  # exit status that compute-sanitizer is told to give when it has found an error


def googletest(status, text, seconds):
    """{status, reason?, passed, failed, skipped, failures?, bits?} of a GoogleTest program; the numbers are of its tests,
    `bits` are the promises of equal bits that held and that were broken."""
    counts = {}
    for key in ("PASSED", "FAILED", "SKIPPED"):
        found = re.search(rf"^\[  {key} *\] (\d+) tests?[.,]", text, re.MULTILINE)
        counts[key.lower()] = int(found[1]) if found else 0
    counts.update(_tests(text))
    if status is None:
        return {"status": FAILED, "reason": f"not done after {seconds:.4g} s", **counts}
    if status == NO_DEVICE:
        reason = re.search(r"^skipped: (.*)", text, re.MULTILINE)
        return {"status": SKIPPED, "reason": reason[1] if reason else f"exit status {NO_DEVICE}"}
    if status != 0:
        return {"status": FAILED, "reason": exit_reason(status), **counts}
    if counts["passed"] == 0:  # all skipped themselves, or a filter left none
        reason = re.search(r"Skipped\n(.*)", text)
        return {"status": SKIPPED, "reason": reason[1].strip() if reason else "no test ran", **counts}
    return {"status": PASSED, **counts}


def exit_reason(status):
    return f"killed by signal {-status}" if status < 0 else f"exit status {status}"


def _tests(text):
    """The names of failed tests, and of tests that promise equal bits, without their parameters."""
    failed = re.findall(r"^\[  FAILED  \] (\S+?\.\S+?),? .*\(\d+ ms\)", text, re.MULTILINE)
    # If the program ended within a test, that test.
    begun = re.findall(r"^\[ RUN      \] (\S+)", text, re.MULTILINE)
    ended = len(re.findall(r"^\[  (?:     OK|FAILED|SKIPPED) *\] \S+.* \(\d+ ms\)$", text, re.MULTILINE))
    if begun and ended < len(begun):
        failed.append(begun[-1])
    passed = re.findall(r"^\[       OK \] (\S+)", text, re.MULTILINE)
    facts = {"failures": list(dict.fromkeys(failed))} if failed else {}
    bits = {"held": _promises(passed), "broken": _promises(failed)}
    bits["held"] = [name for name in bits["held"] if name not in bits["broken"]]
    if bits["held"] or bits["broken"]:
        facts["bits"] = bits
    return facts


def _promises(names):
    plain = {re.sub(r"/.*$", "", re.sub(r"^[^.]*/(?=[^.]*\.)", "", name)) for name in names}
    return sorted(name for name in plain if "Bit" in name)


def sanitizer(status, text, seconds):
    """The verdict, in the form of googletest(), on a program under compute-sanitizer."""
    verdict = googletest(status, text, seconds)
    if "Device not supported" in text:
        verdict.update(status=SKIPPED, reason="compute-sanitizer does not support this device")
    elif status == SANITIZER_ERROR:
        found = re.search(r"^=+ (ERROR SUMMARY: .*)", text, re.MULTILINE)
        verdict["reason"] = found[1] if found else "compute-sanitizer has found errors"
    return verdict
