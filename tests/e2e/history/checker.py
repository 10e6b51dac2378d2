#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Holds what workers have told a service, and what it has told them, against the rules of docs/develop/protocol.md.

Usage: checker.py HISTORY... [--lease-steps N]     (of one session; recorder.cc has the format)

A history is valid if there is one order of its calls, each at an instant between its beginning and its end, in which the
coordinator is one process with one memory: an epoch and a lease that never go back, modes that never change, a rank that has
one holder. Because each of these can only grow or stay, it is enough to compare what a call was answered with to what had been
answered before it began. Of the shards' answers: all ranks have one for each step of a layer, also after repetitions, and
none before all have begun to send theirs; a layer has fewer updates than before only if a rank is told that they are lost, and
either all ranks end with STATE_LOST or none does. The model has no code of the product.
"""

import argparse
import collections
import dataclasses
import json
import pathlib
import sys
from typing import Any, Optional


COORDINATOR = "coordinator"


@dataclasses.dataclass
class Call:
    """One of SessionService; `ended` None: its process was killed first, and nothing is known of its effect."""

    process: int
    method: str
    request: dict
    began: int
    ended: Optional[int] = None
    code: Optional[int] = None
    answer: Optional[dict] = None

    @property
    def ok(self):
        return self.code == 0

    @property
    def directive(self):
        return (self.answer or {}).get("directive") if self.ok else None

    @property
    def holder(self):
        """The rank and its incarnation, of JoinSession and ReportStep."""
        return int(self.request["rank"]), int(self.request["incarnation"])


@dataclasses.dataclass
class Frame:
    """A contribution that was sent, or what a shard said of one."""

    process: int
    at: int
    sent: bool
    kind: str
    step: int
    layer: int
    rank: int
    epoch: int
    more: Any  # the other fields


@dataclasses.dataclass
class Fault:
    """A time in which a server was not healthy: ended, stopped or cut off, or unable to write."""

    server: str  # a shard's address, or COORDINATOR
    began: int
    ended: int


class History:
    """The events of all processes of a job, in the order of time."""

    def __init__(self):
        self.calls = []
        self.frames = []

    @classmethod
    def read(cls, paths):
        history, process = cls(), -1
        for path in paths:
            unanswered = {}
            for line in filter(None, pathlib.Path(path).read_text(encoding="utf-8").splitlines()):
                try:
                    event = json.loads(line)
                except json.JSONDecodeError:  # the last one of a process that was killed
                    continue
                if event["event"] == "begin":
                    process, unanswered = process + 1, {}
                else:
                    history.add(process, event, unanswered)
        history.sort()
        return history

    def add(self, process, event, unanswered):
        if event["event"] == "call":
            call = Call(process, event["method"], event["body"], event["t"])
            unanswered[event["id"]] = call
            self.calls.append(call)
        elif event["event"] == "return":
            call = unanswered.pop(event["id"])
            call.ended, call.code, call.answer = event["t"], event["code"], event["body"]
        else:
            self.frames.append(Frame(process, event["t"], event["event"] == "send", event["kind"], event["step"], event["layer"],
                                     event["rank"], event["epoch"], event))

    def sort(self):
        self.calls.sort(key=lambda call: call.began)
        self.frames.sort(key=lambda frame: frame.at)

    def answered(self, *methods):
        return [call for call in self.calls if call.ok and call.method in methods]

    def spec(self):
        return self.answered("OpenSession")[0].answer["spec"]


def active(call):
    return call.method == "JoinSession" and call.ok and call.answer["active"]


def modes_of(directive):
    """The mode of each step that the directive grants."""
    through = int(directive["lease_through_step"])
    firsts = [int(one["first_step"]) for one in directive["modes"]] + [through + 1]
    for one, first, end in zip(directive["modes"], firsts, firsts[1:]):
        for step in range(first, end):
            yield step, one["mode"].removeprefix("MODE_")


# --- the coordinator ---------------------------------------------------------------------------------------------------
def one_session(history):
    seen = {(call.answer["session_id"], call.answer["secret"]) for call in history.answered("OpenSession", "JoinSession")}
    if len(seen) > 1:
        yield f"equal names and descriptions have {len(seen)} sessions"


def never_decreases(history, name, value):
    """`value(call)` is what an answer says of a number that only grows, None if nothing."""
    said = [(call, value(call)) for call in history.calls if call.ok and value(call) is not None]
    by_end = sorted(said, key=lambda pair: pair[0].ended)
    greatest, i = 0, 0
    for call, number in said:
        while i < len(by_end) and by_end[i][0].ended < call.began:
            greatest, i = max(greatest, by_end[i][1]), i + 1
        if number < greatest:
            yield f"{name}: {call.method} was told {number} after another call had been told {greatest}"


def epochs_grow(history):
    def epoch(call):
        return int(call.answer["epoch"]) if active(call) else int(call.directive["epoch"]) if call.method == "ReportStep" else None

    return never_decreases(history, "epoch", epoch)


def leases_grow(history):
    return never_decreases(history, "lease", lambda call: int(call.directive["lease_through_step"]) if call.directive else None)


def ranks_have_one_holder(history):
    holders = {}
    for call in history.calls:
        if active(call):
            rank, incarnation = call.holder
            held = holders.setdefault((int(call.answer["epoch"]), rank), incarnation)
            if held != incarnation:
                yield f"rank {rank} has two holders in epoch {call.answer['epoch']}: incarnations {held} and {incarnation}"


def replaced_processes_are_refused(history):
    replaced = sorted((call for call in history.calls if active(call)), key=lambda call: call.ended)
    for call in history.answered("JoinSession", "ReportStep"):
        rank, incarnation = call.holder
        for later in replaced:
            if later.ended >= call.began:
                break
            if later.holder[0] == rank and later.holder[1] > incarnation:
                yield f"{call.method} of rank {rank} was taken although incarnation {later.holder[1]} had taken the place of {incarnation}"
                break


def epochs_have_a_cause(history):
    """Another process has taken a rank."""
    takers = collections.defaultdict(set)
    for call in history.calls:
        if call.method == "JoinSession":
            rank, incarnation = call.holder
            takers[rank].add(incarnation)
    replaced = sum(len(incarnations) - 1 for incarnations in takers.values())
    last = max([int(call.answer["epoch"]) for call in history.calls if active(call)], default=1)
    first = min([int(call.answer["epoch"]) for call in history.calls if active(call)], default=1)
    if last - first > replaced:
        yield f"epochs {first} to {last}, but {replaced} processes replaced another"


def modes_never_change(history):
    modes = {}
    for call in history.calls:
        for step, mode in modes_of(call.directive) if call.directive else ():
            if modes.setdefault(step, mode) != mode:
                yield f"step {step} was {modes[step]} and is {mode} for {call.method}"
    for frame in history.frames:
        if frame.sent and frame.kind in ("STATISTICS", "GRADIENT", "PULL") and frame.more["mode"] != modes.get(frame.step):
            yield f"rank {frame.rank} sent step {frame.step} as {frame.more['mode']}, which is {modes.get(frame.step)}"


def steps_begin_within_the_lease(history):
    granted = collections.defaultdict(list)  # by process and rank: when, and through which step
    for call in history.calls:
        if call.directive:
            granted[(call.process, call.holder[0])].append((call.ended, int(call.directive["lease_through_step"])))
    for frame in history.frames:
        if frame.sent and frame.kind in ("STATISTICS", "GRADIENT", "PULL"):
            lease = max((through for at, through in granted[(frame.process, frame.rank)] if at <= frame.at), default=-1)
            if frame.step > lease:
                yield f"rank {frame.rank} began step {frame.step} with a lease through {lease}"


def reports_extend_the_lease(history, faults, lease_steps):
    """In the end: an answer can come before the coordinator has written down what it grants."""
    reports = history.answered("ReportStep")
    if not reports:
        return
    last = max(reports, key=lambda call: int(call.request["step"]))
    through = max(int(call.directive["lease_through_step"]) for call in reports)
    excused = any(one.server == COORDINATOR and one.ended > last.began for one in faults)
    if through < int(last.request["step"]) + lease_steps and not excused:
        yield f"step {last.request['step']} was reported, and the lease reaches to {through}, not {lease_steps} steps more"


# --- the shards --------------------------------------------------------------------------------------------------------
def rollbacks(history):
    return sorted({int(call.directive["rollback_epoch"]) for call in history.calls if call.directive})


def turn(frame, rollback_epochs):
    """A layer's step, and how often the job had gone back before: it is done once in each turn."""
    return sum(epoch <= frame.epoch for epoch in rollback_epochs), frame.layer, frame.step


def is_answer(frame):
    """Whether a frame answers a gradient or a pull."""
    return not frame.sent and frame.kind == "RESULT" and frame.more["contribution"] != "FETCH"


def steps_have_one_answer(history):
    back, answers = rollbacks(history), {}
    for frame in filter(is_answer, history.frames):
        key, answer = turn(frame, back), (frame.more["decision"], frame.more["hash"])
        if answers.setdefault(key, answer) != answer:
            yield f"layer {frame.layer} has two answers at step {frame.step}: {answers[key]}, and for rank {frame.rank} {answer}"


def answers_wait_for_all(history):
    back, world = rollbacks(history), int(history.spec()["world_size"])
    delegate = history.spec()["exchange"].endswith("DELEGATE")
    sent, begun = collections.defaultdict(set), {}
    for frame in history.frames:
        if frame.sent and frame.kind in ("GRADIENT", "PULL"):
            sent[turn(frame, back)].add(frame.rank)
        elif frame.sent and frame.kind == "RESUME" and frame.more["abstain"]:
            begun[(turn(frame, back)[0], frame.layer, frame.rank)] = frame.step
        elif is_answer(frame):
            waits_for = [frame.layer % world] if delegate else range(world)
            missing = [rank for rank in waits_for
                       if rank not in sent[turn(frame, back)] and begun.get((turn(frame, back)[0], frame.layer, rank), 0) <= frame.step]
            if missing:
                yield f"rank {frame.rank} has an answer of layer {frame.layer} at step {frame.step} without ranks {missing}"


def factor_versions_grow(history):
    """The factors of a later step's answer have as many updates or more, on one shard, between times of first order, but for
    updates of whose loss a rank is told."""
    back, owners, versions = rollbacks(history), owners_by_epoch(history), collections.defaultdict(dict)
    told = collections.defaultdict(set)  # the first steps without the lost updates
    for frame in history.frames:
        turns, layer, step = turn(frame, back)
        key = turns, layer, owners.get(frame.epoch, {}).get(layer)
        if is_answer(frame):
            versions[key][step] = (frame.more["factor_version"], frame.more["decision"])
        elif frame.more.get("updates_lost", 0) > 0:
            told[key].add(step)
    for key, by_step in versions.items():
        layer, greatest, before = key[1], 0, -1
        for step in sorted(by_step):
            if any(before < first <= step for first in told[key]):
                greatest = 0
            before = step
            version, decision = by_step[step]
            if decision == "IDENTITY":  # also all of first order, in which a restarted shard tells no rank what it lost
                greatest = 0
            elif version < greatest:
                yield f"layer {layer} has factors of version {version} at step {step}, of {greatest} before"
            else:
                greatest = version


def ranks_are_lost_together(history):
    """A shard that has told a rank STATE_LOST answers no other rank of the layer before all have joined again. An answer is of the
    process that lost the factors, or of a later one, if its rank has sent a RESUME since the lost rank's last news of the one before."""
    back = rollbacks(history)
    frames = collections.defaultdict(list)
    for frame in history.frames:
        frames[turn(frame, back)[:2]].append(frame)
    for of_layer in frames.values():
        news, resumed, lost = {}, {}, {}  # by rank: times
        for frame in of_layer:
            if frame.sent:
                if frame.kind == "RESUME":
                    resumed[frame.rank] = frame.at
            elif frame.more.get("reason", "").endswith("STATE_LOST"):
                lost.setdefault(frame.rank, news.get(frame.rank, 0))
            elif frame.rank not in lost:
                news[frame.rank] = frame.at
            if is_answer(frame) and any(resumed.get(frame.rank, 0) > at for rank, at in lost.items()):
                yield f"rank {frame.rank} has an answer of layer {frame.layer} at step {frame.step} although ranks {sorted(lost)} have STATE_LOST"


def owners_by_epoch(history):
    owners = {}
    for call in history.calls:
        if active(call):
            owners[int(call.answer["epoch"])] = {layer: one["address"] for one in call.answer["shard_map"]["assignments"]
                                                 for layer in one["layers"]}
    return owners


def layers_stay(history):
    owners = owners_by_epoch(history)
    epochs = sorted(owners)
    for before, after in zip(epochs, epochs[1:]):
        for layer, shard in owners[before].items():
            if owners[after].get(layer) != shard:
                yield f"layer {layer} has left {shard} in epoch {after}"


def findings(history, faults=(), lease_steps=1):
    """Returns the violations of the rules; empty if there are none."""
    for rule in (one_session, epochs_grow, leases_grow, ranks_have_one_holder, replaced_processes_are_refused,
                 epochs_have_a_cause, modes_never_change, steps_begin_within_the_lease, steps_have_one_answer,
                 answers_wait_for_all, factor_versions_grow, ranks_are_lost_together, layers_stay):
        yield from rule(history)
    yield from reports_extend_the_lease(history, faults, lease_steps)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("histories", nargs="+", type=pathlib.Path, metavar="HISTORY")
    parser.add_argument("--lease-steps", type=int, default=1)
    options = parser.parse_args()
    history = History.read(options.histories)
    wrong = list(findings(history, lease_steps=options.lease_steps))
    for one in wrong:
        print(one)
    print(f"checker.py: {len(history.calls)} calls, {len(history.frames)} frames, {len(wrong)} finding(s)", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
