#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The same training three ways, in turns: the optimizer alone, with Precondor, and with dense MKOR in this process.

Each way has a model of its own, from the same weights, on the same batches. They take turns of ten steps, in an order that
rotates, so that whatever else the machine does meets all alike. Overhead is what a turn takes longer than the optimizer
alone in the same round; the first round, in which every step has statistics, is left out of the times.
The server is on this machine, so its work is in the times of those who wait for it. Processor time is counted too, this
process's and the server's: it says less of how long a step takes and depends less on what else the machine does.

examples:
  compare.py digits
  compare.py gpt --steps 300 --json compare.json
  compare.py gpt --dim 512 --layers 2 --heads 8 --steps 60
"""

import argparse
import contextlib
import os
import statistics
import time

import digits
import gpt
import program
import training
from job import Job

TURN = 10
WAYS = ("none", "server", "in-process")
TITLES = {"none": "alone", "server": "Precondor", "in-process": "in process"}


class Way:
    """One way to train, and what came of it. Times are a turn's; losses are after it."""

    def __init__(self, trainer):
        self.trainer = trainer
        self.seconds, self.own_cpu, self.server_cpu, self.training, self.held_out = [], [], [], [], []

    def turn(self, first, server):
        def now():
            return time.monotonic(), time.process_time(), server.cpu_seconds() if server else 0.0

        before = now()
        losses = [self.trainer.step(first + i) for i in range(TURN)]
        for times, end, begin in zip((self.seconds, self.own_cpu, self.server_cpu), now(), before):
            times.append(end - begin)
        self.training.append(statistics.mean(losses))
        self.held_out.append(self.trainer.evaluate()["loss"])


def spread(values):
    """The median and the quartiles."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": middle, "low": low, "high": high}


def report_of(arguments, ways):
    """What was measured, in milliseconds a step."""
    def over_alone(of):
        """of(way), a list a turn of seconds, beyond alone's in the same round."""
        return {name: spread([1e3 * (a - b) / TURN for a, b in zip(of(ways[name])[1:], of(ways["none"])[1:])])
                for name in WAYS[1:]}

    overheads = over_alone(lambda way: way.seconds)
    processor = over_alone(lambda way: [sum(pair) for pair in zip(way.own_cpu, way.server_cpu)])
    target = ways["none"].held_out[-1]
    report = {"example": arguments.example, "optimizer": arguments.optimizer, "steps": arguments.steps,
              "batch": arguments.batch, "seed": arguments.seed,
              "parameters": sum(p.numel() for p in ways["none"].trainer.model.parameters()), "ways": {}}
    for name, way in ways.items():
        reached = next((i for i, loss in enumerate(way.held_out) if loss <= target), None)
        report["ways"][name] = {
            "learning_rate": way.trainer.rate, "step_ms": spread([1e3 * seconds / TURN for seconds in way.seconds[1:]]),
            "overhead_ms": overheads.get(name), "processor_ms": processor.get(name),
            "server_cpu_ms": 1e3 * statistics.mean(way.server_cpu[1:]) / TURN if name == "server" else None,
            "training_loss": way.training, "held_out_loss": way.held_out, "turn_seconds": way.seconds,
            "steps_to_alones_final": None if reached is None else TURN * (reached + 1),
            "seconds_to_alones_final": None if reached is None else sum(way.seconds[:reached + 1]),
        }
    for name, of in (("overhead_ratio", overheads), ("processor_ratio", processor)):
        part, whole = of["server"]["median"], of["in-process"]["median"]
        report[name] = part / whole if part > 0 and whole > 0 else None  # else the machine's other work was more
    return report


def table(report):
    ways = report["ways"]

    def row(title, cell):
        return f"{title:<34}" + "".join(f"{cell(ways[name]):>28}" for name in WAYS)

    def times(value):
        return f"{value['median']:.2f} ({value['low']:.2f} - {value['high']:.2f})" if value else "-"

    def seconds(way):
        return f"{way['seconds_to_alones_final']:.1f}" if way["seconds_to_alones_final"] is not None else "never"

    lines = [f"{report['example']}, {report['parameters']} parameters, {report['optimizer']}, {report['steps']} steps",
             f"{'':<34}" + "".join(f"{TITLES[name]:>28}" for name in WAYS),
             row("learning rate", lambda way: f"{way['learning_rate']:g}"),
             row("training loss at the end", lambda way: f"{way['training_loss'][-1]:.4f}"),
             row("held-out loss at the end", lambda way: f"{way['held_out_loss'][-1]:.4f}"),
             row("steps to alone's held-out loss", lambda way: str(way["steps_to_alones_final"] or "never")),
             row("seconds to it", seconds),
             row("ms a step: median (quartiles)", lambda way: times(way["step_ms"])),
             row("overhead, ms a step", lambda way: times(way["overhead_ms"])),
             row("the same in processor time", lambda way: times(way["processor_ms"])),
             row("of it the server's",
                 lambda way: "-" if way["server_cpu_ms"] is None else f"{way['server_cpu_ms']:.2f}")]
    by_clock, by_processor = ("lost in noise" if ratio is None else f"{ratio:.2f} of that in process"
                              for ratio in (report["overhead_ratio"], report["processor_ratio"]))
    lines.append(f"Precondor's overhead is {by_clock} by the clock, {by_processor} in processor time")
    return "\n".join(lines)


def compare(parser, arguments):
    if arguments.steps % TURN or arguments.steps < 4 * TURN:
        parser.error(f"--steps: expected a multiple of {TURN}, at least {4 * TURN}, got {arguments.steps}")
    with contextlib.ExitStack() as stack:
        only = stack.enter_context(Job())
        if only.world_size > 1:
            parser.error(f"expected one process, got {only.world_size}")
        training.check_arguments(parser, arguments, only)
        program.open_json(arguments.json)
        task = {"digits": digits, "gpt": gpt}[arguments.example].make_task(arguments)
        server = None
        if not arguments.server:
            server = stack.enter_context(program.OwnServer(arguments.server_binary or program.find_server_binary()))
        session = f"compare-{os.getpid()}-{time.time_ns()}"
        ways = {}
        for name in WAYS:
            address = server.address if server else arguments.server
            ways[name] = Way(stack.enter_context(training.Trainer(task, arguments, only, name, address, session)))
        rounds = arguments.steps // TURN
        progress = training.Progress("compare", arguments.steps, not arguments.quiet)
        for number in range(rounds):
            for place in range(len(WAYS)):
                ways[WAYS[(number + place) % len(WAYS)]].turn(number * TURN, server)
            if (number + 1) % max(1, rounds // 10) == 0:
                progress.show((number + 1) * TURN, "held-out " + ", ".join(
                    f"{TITLES[name]} {way.held_out[-1]:.4f}" for name, way in ways.items()))
        progress.end()
        report = report_of(arguments, ways)
    if arguments.json:
        program.write_json(arguments.json, report)
    if arguments.json != "-":
        print(table(report))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    examples = parser.add_subparsers(dest="example", required=True, metavar="digits|gpt")
    for name, module, steps, batch in (("digits", digits, 600, 128), ("gpt", gpt, 300, 16)):
        one = examples.add_parser(name, help=f"see {name}.py")
        module.add_model_arguments(one)
        training.add_run_arguments(one, steps, batch)
        training.add_method_arguments(one.add_argument_group("Precondor"))
        one.add_argument("--json", metavar="FILE", help="write curves and times; - is standard output")
        program.add_server_arguments(one)
    arguments = parser.parse_args()
    if arguments.example == "gpt":
        gpt.check_model_arguments(parser, arguments)
    compare(parser, arguments)


if __name__ == "__main__":
    program.run(main)
