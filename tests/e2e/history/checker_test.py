#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The checker finds a violation of each rule that is planted into a valid history, and nothing in that history."""

import copy
import dataclasses
import itertools
import unittest

import checker
from checker import Call, Fault, Frame, History

RANKS, LAYERS, LEASE = 2, 2, 4
SHARDS = ["a:1", "b:1"]


class Job:
    """Writes the history of a job: two ranks and layers, six steps, rank 1 replaced after three."""

    def __init__(self, exchange="DIRECT"):
        self.history, self.clock = History(), itertools.count(1)
        self.exchange, self.epoch, self.reported, self.owners = exchange, 1, -1, list(SHARDS)
        self.incarnations = [10, 20]
        self.spec = {"world_size": RANKS, "exchange": f"EXCHANGE_MODE_{exchange}"}

    def directive(self):
        modes = [{"first_step": "0", "mode": "MODE_SECOND_ORDER"}, {"first_step": "4", "mode": "MODE_FIRST_ORDER"},
                 {"first_step": "5", "mode": "MODE_SECOND_ORDER"}]
        return {"lease_through_step": str(self.reported + LEASE), "modes": modes, "epoch": str(self.epoch), "rollback_epoch": "0"}

    def call(self, process, method, request, answer):
        self.history.calls.append(Call(process, method, request, next(self.clock), next(self.clock), 0, answer))

    def holder(self, rank):
        return {"rank": rank, "incarnation": str(self.incarnations[rank])}

    def join(self, rank, process):
        assignments = [{"address": shard, "layers": [layer]} for layer, shard in enumerate(self.owners)]
        self.call(process, "JoinSession", self.holder(rank),
                  {"session_id": "1", "secret": "s", "epoch": str(self.epoch), "active": True,
                   "shard_map": {"assignments": assignments}, "directive": self.directive()})

    def frame(self, process, sent, kind, step, layer, rank, **more):
        mode = "FIRST_ORDER" if step == 4 else "SECOND_ORDER"
        self.history.frames.append(Frame(process, next(self.clock), sent, kind, step, layer, rank, self.epoch,
                                         {"mode": mode, "abstain": False, **more}))

    def step(self, step, processes):
        for layer in range(LAYERS):
            senders = range(RANKS) if self.exchange == "DIRECT" else [layer % RANKS]
            for rank in senders:
                self.frame(processes[rank], True, "GRADIENT", step, layer, rank)
            for rank in senders:
                first_order = step == 4
                self.frame(processes[rank], False, "RESULT", step, layer, rank, contribution="UNSPECIFIED", hash=step,
                           decision="IDENTITY" if first_order else "PRECONDITIONED", factor_version=0 if first_order else step % 5)
        for rank in range(RANKS):
            self.reported = step
            self.call(processes[rank], "ReportStep", {**self.holder(rank), "step": str(step)}, {"directive": self.directive()})

    def run(self):
        for process in range(RANKS):
            self.call(process, "OpenSession", {}, {"session_id": "1", "secret": "s", "spec": self.spec})
            self.join(process, process)
        for step in range(3):
            self.step(step, [0, 1])
        self.epoch, self.incarnations[1] = 2, 21
        self.join(1, 2)
        self.join(0, 0)
        for step in range(3, 7):
            self.step(step, [0, 2])
        return self.history


GOOD = Job().run()


def joins(history):
    return [call for call in history.calls if call.method == "JoinSession"]


def reports(history):
    return [call for call in history.calls if call.method == "ReportStep"]


def answers(history):
    return [frame for frame in history.frames if frame.kind == "RESULT"]


class CheckerTest(unittest.TestCase):
    def findings(self, plant=lambda history: None, faults=(), good=GOOD):
        history = copy.deepcopy(good)
        plant(history)
        return list(checker.findings(history, faults, LEASE))

    def expect(self, text, plant, **more):
        """The planted violation is found, and only by its rule."""
        found = self.findings(plant, **more)
        self.assertTrue(found, "nothing is found")
        for one in found:
            self.assertRegex(one, text)

    def test_valid_histories(self):
        self.assertEqual(self.findings(), [])
        self.assertEqual(self.findings(good=Job("DELEGATE").run()), [])

    def test_two_sessions_of_one_name(self):
        def plant(history):
            history.calls[2].answer["session_id"] = "2"
        self.expect("have 2 sessions", plant)

    def test_an_epoch_goes_back(self):
        def plant(history):
            reports(history)[-1].answer["directive"]["epoch"] = "1"
        self.expect("epoch: ReportStep was told 1 after another call had been told 2", plant)

    def test_a_lease_goes_back(self):
        def plant(history):
            joins(history)[-1].answer["directive"]["lease_through_step"] = "5"
        self.expect("lease: JoinSession was told 5 after another call had been told 6", plant)

    def test_what_goes_on_at_one_time_may_be_told_either(self):
        def plant(history):
            late = joins(history)[-1]
            late.began = next(call.began for call in history.calls if call.answer.get("directive", {}).get("lease_through_step") == "6")
            late.answer["directive"]["lease_through_step"] = "5"
            history.sort()
        self.assertEqual(self.findings(plant), [])

    def test_a_rank_has_two_holders(self):
        def plant(history):
            double = copy.deepcopy(joins(history)[2])
            double.request["incarnation"] = "22"
            history.calls.append(double)
            history.sort()
        self.expect("rank 1 has two holders in epoch 2: incarnations 21 and 22|although incarnation 22", plant)

    def test_a_replaced_process_is_heard(self):
        def plant(history):
            reports(history)[-1].request["incarnation"] = "20"
        self.expect("ReportStep of rank 1 was taken although incarnation 21 had taken the place of 20", plant)

    def test_an_epoch_without_a_cause(self):
        def plant(history):
            for call in history.calls:
                if call.request.get("incarnation") == "21":
                    call.request["incarnation"] = "20"
        self.expect("epochs 1 to 2, but 0 processes replaced another", plant)

    def test_a_mode_changes(self):
        def plant(history):
            reports(history)[3].answer["directive"]["modes"][1]["mode"] = "MODE_SECOND_ORDER"
        self.expect("step 4 was ", plant)

    def test_a_frame_of_another_mode(self):
        def plant(history):
            next(frame for frame in history.frames if frame.step == 4).more["mode"] = "SECOND_ORDER"
        self.expect("rank 0 sent step 4 as SECOND_ORDER, which is FIRST_ORDER", plant)

    def test_a_step_beyond_the_lease(self):
        def plant(history):
            early = copy.deepcopy(next(frame for frame in history.frames if frame.sent and frame.step == 6))
            early.at = history.frames[5].at
            history.frames.append(early)
            history.sort()
        self.expect("rank 0 began step 6 with a lease through", plant)

    def test_a_report_that_does_not_extend_the_lease(self):
        def plant(history):
            for call in history.calls:
                if call.directive and int(call.directive["lease_through_step"]) > 8:
                    call.directive["lease_through_step"] = "8"
        self.expect("step 6 was reported, and the lease reaches to 8, not 4 steps more", plant)
        self.assertEqual(self.findings(plant, [Fault(checker.COORDINATOR, 80, 1000)]), [])

    def test_two_answers_of_a_step(self):
        for field, value in (("hash", 99), ("decision", "SKIP")):
            def plant(history, field=field, value=value):
                answers(history)[-1].more[field] = value
            self.expect("layer 1 has two answers at step 6", plant)

    def test_a_step_is_done_again_after_a_rollback_alone(self):
        def again(history, rollback_epoch):
            frames = [copy.deepcopy(frame) for frame in history.frames if frame.step == 2]
            for frame in frames:
                frame.epoch, frame.at = 2, frame.at + 1000
                if frame.kind == "RESULT":
                    frame.more["hash"] = 99
            history.frames += frames
            for call in joins(history)[2:] + reports(history)[6:]:
                call.answer["directive"]["rollback_epoch"] = rollback_epoch
        self.expect("two answers at step 2", lambda history: again(history, "0"))
        self.assertEqual(self.findings(lambda history: again(history, "2")), [])

    def test_an_answer_before_all_have_sent(self):
        def plant(history):
            history.frames.remove(next(frame for frame in history.frames if frame.sent and frame.rank == 1 and frame.step == 1))
        self.expect(r"has an answer of layer 0 at step 1 without ranks \[1\]", plant)

    def test_a_rank_that_begins_later_is_not_waited_for(self):
        def plant(history):
            history.frames = [frame for frame in history.frames if frame.rank != 1 or frame.step > 1]
            for layer in range(LAYERS):
                history.frames.append(Frame(1, 0, True, "RESUME", 2, layer, 1, 1, {"abstain": True}))
            history.sort()
        self.assertEqual(self.findings(plant), [])

    def test_an_answer_of_a_delegate_waits_for_it_alone(self):
        def plant(history):
            history.frames.remove(next(frame for frame in history.frames if frame.sent and frame.layer == 1 and frame.step == 1))
        self.expect(r"has an answer of layer 1 at step 1 without ranks \[1\]", plant, good=Job("DELEGATE").run())

    def version_of_layer_0_falls(self, history):
        for frame in answers(history):
            if frame.step == 2 and frame.layer == 0:
                frame.more["factor_version"] = 0

    def test_factors_of_an_earlier_version(self):
        self.expect("layer 0 has factors of version 0 at step 2, of 1 before", self.version_of_layer_0_falls)

    def test_factors_of_an_earlier_version_after_a_loss_that_is_told(self):
        def plant(history, told_at):
            self.version_of_layer_0_falls(history)
            first = next(frame for frame in history.frames if frame.step == 2)
            history.frames.append(dataclasses.replace(first, sent=False, kind="ACK", step=told_at, more={"updates_lost": 1}))
            history.sort()

        self.assertEqual(self.findings(lambda history: plant(history, 2)), [])
        self.expect("layer 0 has factors of version 0 at step 2, of 1 before", lambda history: plant(history, 1))

    def test_an_answer_beside_a_lost_rank(self):
        def plant(history, resumed_at):
            at = next(frame.at for frame in answers(history) if frame.step == 6)
            history.frames.append(Frame(0, at - 0.3, False, "ERROR", 6, 0, 0, 2, {"reason": "ERROR_REASON_STATE_LOST"}))
            history.frames.append(Frame(2, resumed_at, True, "RESUME", 6, 0, 1, 2, {"abstain": False}))
            history.frames = [frame for frame in history.frames if (frame.kind, frame.rank, frame.layer, frame.step) != ("RESULT", 0, 0, 6)]
            history.sort()

        heard = max(frame.at for frame in answers(GOOD) if frame.step < 6)
        self.expect(r"rank 1 has an answer of layer 0 at step 6 although ranks \[0\] have STATE_LOST", lambda history: plant(history, heard + 0.5))
        # An answer of the process before may be on its way for long.
        self.assertEqual(self.findings(lambda history: plant(history, 1)), [])

    def test_a_layer_leaves_its_shard(self):
        def plant(history):
            joins(history)[-1].answer["shard_map"]["assignments"][1]["address"] = "a:1"
        self.expect("layer 1 has left b:1 in epoch 2", plant)


if __name__ == "__main__":
    unittest.main()
