#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The status page of the metrics port in headless Chromium, beside a job that trains.

Usage: status_page_test.py BINARIES
"""

import base64
import itertools
import json
import pathlib
import struct
import sys
import tempfile
import unittest
import urllib.error
import urllib.request
import zlib

import deploy_tools

from cluster import Cluster, Training, free_port, wait_for
from monitoring_program import Program

deploy_tools.require("chromium", "chromedriver")

BINARIES = None
TAB, ENTER, SPACE = "\ue004", "\ue007", " "  # as WebDriver has them


# For StatusPage.fed.
FEED = """
fetch = () => new Promise(() => {});
past.clear();
let clock = Date.now();
Date.now = () => clock;
function feed(change, shown) {
  clock += 2000;
  const sessions = [], samples = {};
  const job = (name, {last_step, loss = 1, smoothed = loss && .9 * loss, mode = "SECOND_ORDER"}) => sessions.push({
    train_job: name, epoch: 1, joined: 1, world_size: 1, mode,
    coordinator: {last_step, shard_steps: [], loss, smoothed_loss: smoothed, loss_rate: null, reason: "", last_snapshot_step: null},
    shard: {last_step, lagging_ranks: [], lagging_workers: 0, reserved_bytes: 0, lacks_gradients_for_s: null, updates_lost: 0}});
  change(job, (name, labels, value) => (samples[name] ||= []).push({labels: {...labels, train_job: "a"}, value}));
  const status = {...before.status, role: "all", sessions};
  if (shown) show(status, samples);
  else for (const session of sessions) remember(session, samples, clock / 1000);
}
"""


class Browser:
    """A window of headless Chromium, through chromedriver."""

    def __init__(self, url, folder):
        self.url = url
        self.session = ""
        arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
                     "--disable-background-networking", "--disable-component-update", "--disable-sync",
                     "--disable-dev-shm-usage", f"--user-data-dir={folder}"]
        made = self.ask("POST", "", {"capabilities": {"alwaysMatch": {
            "browserName": "chrome", "goog:loggingPrefs": {"browser": "ALL"}, "goog:chromeOptions": {"args": arguments}}}})
        self.session = "/" + made["sessionId"]

    def ask(self, method, path, body=None):
        request = urllib.request.Request(f"{self.url}/session{self.session}{path}", method=method,
                                         data=None if body is None else json.dumps(body).encode(),
                                         headers={"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())["value"]

    def open(self, url):
        self.ask("POST", "/url", {"url": url})

    def run(self, script):
        return self.ask("POST", "/execute/sync", {"script": script, "args": []})

    def text(self):
        return self.run("return document.body.innerText")

    def click(self, selector):
        found = self.ask("POST", "/element", {"using": "css selector", "value": selector})
        self.ask("POST", f"/element/{next(iter(found.values()))}/click", {})

    def press(self, *keys):
        actions = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self.ask("POST", "/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": actions}]})

    def prefer(self, scheme):
        self.ask("POST", "/goog/cdp/execute", {"cmd": "Emulation.setEmulatedMedia", "params": {
            "features": [{"name": "prefers-color-scheme", "value": scheme}]}})

    def resize(self, width, height):
        self.ask("POST", "/window/rect", {"width": width, "height": height})

    def screenshot(self):
        """A PNG: its width, and the first pixel's red, green and blue, which no filter of the format changes there."""
        png = base64.b64decode(self.ask("GET", "/screenshot"))
        data = png[png.index(b"IDAT") + 4:]
        return struct.unpack(">I", png[16:20])[0], zlib.decompressobj().decompress(data, 4)[1:]

    def errors(self):
        """Returns the lines of the console, warnings and errors alike."""
        return self.ask("POST", "/se/log", {"type": "browser"})

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.ask("DELETE", "")


class StatusPage(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory(prefix="precondor-page-")))
        cls.folder = folder
        cls.cluster = cls.enterClassContext(Cluster(BINARIES, folder, shards=1))
        training = cls.enterClassContext(Training(BINARIES, cls.cluster, folder, ["--steps=1000000"]))
        cls.job = f"digits-{training.processes[0].pid}"
        port = free_port()
        cls.driver = f"http://127.0.0.1:{port}"
        cls.enterClassContext(Program(folder, ["chromedriver", f"--port={port}", "--allowed-ips=127.0.0.1"]))
        wait_for("chromedriver", cls.driver_ready)
        wait_for("steps", lambda: (cls.cluster.step() or 0) > 10)

    @classmethod
    def driver_ready(cls):
        try:
            with urllib.request.urlopen(f"{cls.driver}/status", timeout=5) as answer:
                return json.loads(answer.read())["value"]["ready"]
        except OSError:
            return False

    def browser(self, name):
        return self.enterContext(Browser(self.driver, self.folder / f"profile-{name}"))

    def page(self, server):
        return f"http://127.0.0.1:{server.metrics_port}/"

    def test_the_coordinator_shows_mode_loss_step_and_plots(self):
        browser = self.browser("coordinator")
        browser.open(self.page(self.cluster.coordinator))
        wait_for("plots of loss and steps", lambda: browser.run("return past.size > 0 && [...past.values()][0].size > 2"))
        self.assertEqual(self.plots(browser), ["Loss", "Steps"])
        text = browser.text()
        for expected in ("serving", "coordinator", "second order", "Ranks joined", "4 of 4", "Loss", "Steps left in the lease",
                         self.cluster.shards[0].address):
            self.assertIn(expected, text)
        self.assertRegex(text, rf"{self.cluster.shards[0].address}: \d")  # the shard's step
        self.assertNotIn("NaN", text)
        self.assertNotIn("undefined", text)
        self.look(browser, "coordinator")

    def test_the_shard_shows_stages_memory_and_snapshots(self):
        browser = self.browser("shard")
        browser.open(self.page(self.cluster.shards[0]))
        wait_for("the slowest stage", lambda: "a layer" in browser.text())
        wait_for("plots", lambda: browser.run("return [...past.values()][0].size > 2"))
        self.assertEqual(self.plots(browser), ["Steps", "Mean time of a layer in a stage", "Payload"])
        text = browser.text()
        for expected in ("Reserved", "Device cpu", "usable", "Slowest ranks", "none lags", "ago"):
            self.assertIn(expected, text)
        self.look(browser, "shard")

    def test_slow_ranks_are_listed(self):
        browser = self.browser("slow")
        browser.open(self.page(self.cluster.shards[0]))
        wait_for("a job", lambda: "none lags" in browser.text())
        for ranks, count, expected in (([3, 7], 2, "3, 7\n"), ([3, 7], 2000, "3, 7 and 1998 more\n")):
            text = browser.run(f"const status = structuredClone(before.status); status.sessions[0].shard.lagging_ranks = {ranks};"
                               f"status.sessions[0].shard.lagging_workers = {count}; show(status, before.samples);"
                               "return document.body.innerText")
            self.assertIn(f"Slowest ranks\n{expected}", text)

    def plots(self, browser):
        """The titles of the plots, each of which has a line and the labels of its axes."""
        for texts in browser.run("return [...document.querySelectorAll('svg')].map(s => [...s.querySelectorAll('text')].map(t => t.textContent))"):
            self.assertIn("time", texts)
            self.assertIn("step", texts)
            self.assertGreaterEqual(len(texts), 5, texts)
        self.assertEqual(browser.run("return [...document.querySelectorAll('figure')].filter(f => !f.querySelector('polyline')).length"), 0)
        return browser.run("return [...document.querySelectorAll('figcaption')].map(c => c.firstChild.textContent)")

    def fed(self, name, script):
        """Returns the result of `script` on a page that reads nothing more. feed(change) shows a reading 2 s after the last one, of which
        change(job, samples) makes another: job(name) has a session of that name; count(metric, labels, value) a sample."""
        browser = self.browser(name)
        browser.open(self.page(self.cluster.shards[0]))
        wait_for("readings", lambda: browser.run("return before !== null"))
        got = browser.run(FEED + script)
        self.assertEqual(browser.errors(), [])
        return got

    def test_histories_are_bounded_and_cover_the_whole_time(self):
        sizes, values, first, last, every = self.fed("long", """
            const sizes = new Set();
            for (let i = 0; i < 5000; ++i) {
              feed(job => job("a", {last_step: 10 * i}), i === 4999);
              const {size} = past.get("a");
              if (i >= 600) sizes.add(size);
            }
            const a = past.get("a");
            return [[Math.min(...sizes), Math.max(...sizes)], a.values.byteLength, a.get(0, "step"), a.last("step"), a.every];""")
        self.assertEqual(sizes, [601, 1200])
        self.assertEqual(values, 124800)
        self.assertEqual((first, every), (0, 8))
        self.assertGreater(last, 49900)

    def test_gaps_outlast_the_dropping_of_points(self):
        lines, size, every, first = self.fed("outages", """
            for (let i = 0; i < 3000; ++i) {
              if ([101, 202, 303, 404, 505].includes(i)) past.get("a").broken = true;
              feed(job => job("a", {last_step: i}), i === 2999);
            }
            const a = past.get("a");
            return [document.querySelectorAll("figure")[0].querySelectorAll("polyline.c0").length, a.size, a.every, a.get(0, "step")];""")
        self.assertEqual((lines, every, first), (6, 4, 0))
        self.assertTrue(600 < size <= 1200, size)

    def test_values_that_hardly_differ_are_drawn(self):
        pairs = [[0.7, 0.7 + 2 ** -53], [1 + 2 ** -52, 1], [-3, -3 - 2 ** -51], [1e-300, 0], [0, 0], [1e300, 1e300], [7, 7.000001]]
        drawn = self.fed("close", f"""
            return {pairs}.map(([loss, smoothed]) => {{
              past.clear();
              feed(job => job("a", {{last_step: 1, loss, smoothed}}), true);
              const figure = document.querySelector("figure");
              return [[...figure.querySelectorAll("text.end")].map(t => t.textContent),
                      [...figure.querySelectorAll("polyline")].map(p => p.getAttribute("points"))];
            }});""")
        for pair, (labels, lines) in zip(pairs, drawn):
            with self.subTest(pair=pair):
                self.assertTrue(4 <= len(labels) <= 9, labels)  # two are the names of the axis below
                self.assertEqual(len(lines), 2)
                self.assertNotRegex(" ".join(lines), "NaN|Infinity")

    def test_a_failure_of_the_page_is_not_one_of_the_server(self):
        browser = self.browser("failure")
        browser.open(self.page(self.cluster.coordinator))
        wait_for("readings", lambda: "serving" in browser.text())
        browser.run("show = () => { throw new Error('no plot'); }")
        wait_for("the failure", lambda: "this page has failed: no plot" in browser.text())
        self.assertFalse(browser.run("return [...past.values()].some(history => history.broken)"))
        self.assertIn("no plot", str(browser.errors()))

    def test_missing_values_are_gaps_and_first_order_is_marked(self):
        lines, phases, text, rates = self.fed("gaps", """
            for (let i = 0; i < 60; ++i) {
              const mode = i > 40 && i < 50 ? "FIRST_ORDER" : "SECOND_ORDER";
              feed((job, count) => {
                job("a", {last_step: 10 * i, loss: i % 20 === 10 ? null : 1 / (i + 1), mode});
                count("precondor_contribution_bytes_total", {kind: "gradient"}, i < 30 ? 1e6 * i : 1e6 * (i - 30));  // begins again
                count("precondor_job_stages_total", {stage: "update"}, mode === "FIRST_ORDER" ? 0 : i);
                count("precondor_job_stage_seconds_total", {stage: "update"}, i * .004);
                count("precondor_stage_seconds_count", {stage: "reply"}, i);
                count("precondor_stage_seconds_sum", {stage: "reply"}, 0);  // no logarithm
              }, i === 59);
            }
            const figures = [...document.querySelectorAll("figure")];
            return [figures.map(f => f.querySelectorAll("polyline.c0").length), figures.map(f => f.querySelectorAll("rect").length),
                    document.body.innerText, past.get("a").last("received")];""")
        self.assertEqual(lines, [4, 1, 0, 2], "loss, steps, receive, received")
        self.assertEqual(phases, [1, 1, 1, 1])
        self.assertEqual(rates, 5e5)
        for expected in ("first order", "received 500 kB/s", "update 4 ms", "reply 0 µs", "steps 5/s", "loss 0.01667"):
            self.assertIn(expected, text.replace("all ranks", "steps"))
        for wrong in ("NaN", "undefined", "Infinity"):
            self.assertNotIn(wrong, text)

    def test_no_job_one_and_many(self):
        none, many, open_cards, again, kept = self.fed("many", """
            const names = n => [...Array(n).keys()].map(i => `job ${i}`);
            const cards = () => document.querySelectorAll("section").length;
            document.getElementById("main").replaceChildren();
            feed(() => {}, true);
            const none = [cards(), document.body.innerText.includes("No session is open."), past.size];
            document.getElementById("no-session").remove();
            for (let i = 0; i < 3; ++i) feed(job => names(40).forEach(name => job(name, {last_step: i})), true);
            const many = [cards(), past.size], open = [...document.querySelectorAll("details")].filter(d => d.open).length;
            feed(job => job("job 3", {last_step: 0, loss: null}), true);  // and it has gone back
            return [none, many, open, [cards(), past.size], [past.get("job 3").size, document.querySelectorAll("svg").length]];""")
        self.assertEqual((none, many, open_cards, again), ([2, True, 0], [41, 40], 8, [2, 1]), "the server's is one of 8")
        self.assertEqual(kept, [4, 4])

    def look(self, browser, name):
        """Light and dark, narrow and wide: the background follows, and the page fits."""
        for scheme, width in itertools.product(("light", "dark"), (500, 1200)):
            with self.subTest(name, scheme=scheme, width=width):
                browser.prefer(scheme)
                browser.resize(width, 900)
                wait_for("the size", lambda width=width: browser.run("return innerWidth") == width)
                self.assertFalse(browser.run("const root = document.documentElement; return root.scrollWidth > root.clientWidth"),
                                 "nothing sticks out")
                shown, background = browser.screenshot()
                self.assertEqual(shown, width)
                self.assertTrue(min(background) > 230 if scheme == "light" else max(background) < 40, tuple(background))
        self.assertEqual(browser.errors(), [])

    def test_status_is_the_running_job(self):
        def read(server):
            with urllib.request.urlopen(self.page(server) + "status", timeout=10) as answer:
                self.assertEqual(answer.headers["Content-Type"], "application/json")
                return json.loads(answer.read())

        coordinator, shard = self.cluster.coordinator, self.cluster.shards[0]
        first = self.cluster.step()
        for server, role, shards in ((coordinator, "coordinator", [shard.address]), (shard, "shard", [])):
            status = read(server)
            self.assertRegex(status["version"], r"^\d+\.\d+\.\d+$")
            self.assertEqual((status["role"], status["draining"], status["shards"]), (role, False, shards))
            session, = status["sessions"]
            self.assertEqual((session["train_job"], session["mode"], session["joined"], session["world_size"], session["epoch"]),
                             (self.job, "SECOND_ORDER", Training.WORKERS, Training.WORKERS, 1))
            own = session[role]
            self.assertGreaterEqual(own["last_step"], first)
            # Each gauge is read after the page, and grows.
            self.assertLessEqual(own["last_step"], server.metric("precondor_last_step_number" if role == "coordinator" else
                                                                 "precondor_shard_step_number"))
            if role == "shard":
                self.assertEqual(own["reserved_bytes"], server.metric("precondor_job_reserved_bytes"))
            else:
                self.assertTrue(0 < own["loss"] < 10 and 0 < own["smoothed_loss"] < 10, own)
                self.assertEqual((own["rule"], own["reason"]), ("NEVER", "second order: the policy is NEVER"))
        wait_for("the next step", lambda: read(coordinator)["sessions"][0]["coordinator"]["last_step"] > first)

    def test_cards_fold_by_click_and_by_keyboard_and_stay_so(self):
        browser = self.browser("keys")
        browser.open(self.page(self.cluster.coordinator))
        wait_for("a job", lambda: browser.run("return document.querySelectorAll('section').length") == 2)

        def open_cards():
            return browser.run("return [...document.querySelectorAll('details')].map(d => d.open)")

        def await_reading():
            reads = "return performance.getEntriesByName(location.origin + '/status').length"
            before = browser.run(reads)
            wait_for("another reading", lambda: browser.run(reads) > before)

        self.assertEqual(browser.run("return document.activeElement.tagName"), "BODY")
        browser.press(TAB, TAB, ENTER)  # the second card's head
        self.assertEqual(open_cards(), [True, False])
        await_reading()
        self.assertEqual(open_cards(), [True, False], "a reading does not open it again")
        browser.press(SPACE)
        self.assertEqual(open_cards(), [True, True], "a reading leaves the focus")
        browser.click("section:nth-of-type(1) summary")
        await_reading()
        self.assertEqual(open_cards(), [False, True])
        self.assertEqual(browser.errors(), [])

    def test_the_page_needs_nothing_from_elsewhere_and_writes_nothing(self):
        browser = self.browser("assets")
        browser.open(self.page(self.cluster.shards[0]))
        wait_for("readings", lambda: "serving" in browser.text())
        origin = browser.run("return location.origin")
        for name in browser.run("return performance.getEntriesByType('resource').map(e => e.name)"):
            self.assertTrue(name.startswith((origin, "data:")), name)
        self.assertEqual(browser.run("return document.querySelectorAll('form, input, button, textarea').length"), 0)
        for path in ("", "status", "metrics"):
            request = urllib.request.Request(self.page(self.cluster.shards[0]) + path, method="POST", data=b"x")
            with self.assertRaises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(request, timeout=10)
            self.assertEqual(refused.exception.code, 405)
            refused.exception.close()

    def test_a_server_that_ends_shows_as_such(self):
        with Cluster(BINARIES, self.folder / "other", shards=1, durable=False) as other:
            browser = self.browser("gone")
            browser.open(self.page(other.coordinator))
            wait_for("readings", lambda: "No session is open." in browser.text())
            other.coordinator.kill()
            wait_for("the end", lambda: "does not answer" in browser.text())


if __name__ == "__main__":
    BINARIES = pathlib.Path(sys.argv[1])
    unittest.main(argv=[sys.argv[0], "-v"])
