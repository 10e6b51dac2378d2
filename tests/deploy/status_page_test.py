#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The status page of the metrics port in headless Chromium, beside a job that trains.

Usage: status_page_test.py BINARIES [--screenshots=DIR]   (keeps the pictures that it takes)
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
SCREENSHOTS = None
TAB, ENTER, SPACE = "\ue004", "\ue007", " "  # as WebDriver has them


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

    def screenshot(self, name):
        """A PNG: its width, and the first pixel's red, green and blue, which no filter of the format changes there."""
        png = base64.b64decode(self.ask("GET", "/screenshot"))
        if SCREENSHOTS is not None:
            (SCREENSHOTS / f"{name}.png").write_bytes(png)
        data = png[png.index(b"IDAT") + 4:]
        return struct.unpack(">I", png[16:20])[0], zlib.decompressobj().decompress(data, 4)[1:]

    def errors(self):
        """What the console shows, warnings and errors alike."""
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
        wait_for("a plot of the loss", lambda: browser.run("return document.querySelectorAll('polyline').length") >= 2)
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

    def look(self, browser, name):
        """Light and dark, narrow and wide: the background follows, and the page fits."""
        for scheme, (size, width) in itertools.product(("light", "dark"), (("narrow", 500), ("wide", 1200))):
            with self.subTest(name, scheme=scheme, size=size):
                browser.prefer(scheme)
                browser.resize(width, 900)
                wait_for("the size", lambda width=width: browser.run("return innerWidth") == width)
                self.assertFalse(browser.run("const root = document.documentElement; return root.scrollWidth > root.clientWidth"),
                                 "nothing sticks out")
                shown, background = browser.screenshot(f"{name}-{size}-{scheme}")
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
        for path in ("", "status", "layers", "metrics"):
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
    for argument in sys.argv[1:]:
        if argument.startswith("--screenshots="):
            SCREENSHOTS = pathlib.Path(argument.partition("=")[2])
        elif not argument.startswith("-"):
            BINARIES = pathlib.Path(argument)
    unittest.main(argv=[sys.argv[0], "-v"])
