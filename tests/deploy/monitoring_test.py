#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Rules, alerts, runbooks and dashboards on a real Prometheus that scrapes real servers with a job that trains.

Usage: monitoring_test.py BINARIES [--full]   (--full: the alarm chain alone: a killed shard, an alert, Alertmanager, a
webhook, and the commands of the runbook)
"""

import http.server
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import unittest
import urllib.parse
import urllib.request

import deploy_tools
from deploy_tools import ROOT, run

from cluster import Cluster, Server, Training, free_port, wait_for
from monitoring_program import Program

deploy_tools.require("prometheus", "promtool", "prometheus-alertmanager", "amtool", "curl")
import jsonschema  # noqa: E402
import yaml  # noqa: E402

RULES = ROOT / "deploy/prometheus/precondor.rules.yaml"
ALERT_TESTS = ROOT / "tests/deploy/alerts.yaml"
RUNBOOKS = ROOT / "docs/operate/runbooks.md"
DASHBOARDS = sorted((ROOT / "deploy/grafana").glob("*.json"))
METRIC = re.compile(r"(?<![\w:])precondor_[a-z0-9_]+")
SAMPLE = re.compile(r"_(bucket|sum|count)$")
COMMAND = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
BINARIES = None  # the build folder


def catalog():
    text = (ROOT / "server/metrics/catalog.h").read_text()
    return set(re.findall(r'"(precondor_[a-z0-9_]+)"', text))


def alerts(rules):
    return [rule for group in rules["groups"] for rule in group["rules"] if "alert" in rule]


def panels(dashboard):
    return [panel for panel in dashboard["panels"] if panel.get("targets")]


def expressions(dashboard):
    """Pairs of where an expression stands and the expression."""
    for panel in panels(dashboard):
        for target in panel["targets"]:
            yield f"{dashboard['uid']}, panel \"{panel['title']}\"", target["expr"]


def sections(runbooks):
    return {match.lower(): text for match, text in re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", runbooks, re.MULTILINE | re.DOTALL)}


def findings(rules, dashboards, runbooks, metrics, tests):
    """Returns the faults of names and references, a line each."""
    wrong = []
    written = [(f"rule {rule.get('alert', rule.get('record'))}", rule["expr"])
               for group in rules["groups"] for rule in group["rules"]]
    written += [pair for dashboard in dashboards for pair in expressions(dashboard)]
    records = {rule["record"] for group in rules["groups"] for rule in group["rules"] if "record" in rule}
    for where, expression in written:
        for name in METRIC.findall(expression):
            if name not in metrics and SAMPLE.sub("", name) not in metrics:
                wrong.append(f"{where}: no metric {name}")
        for name in re.findall(r"\w+:precondor_\w+(?::\w+)?", expression):
            if name not in records:
                wrong.append(f"{where}: no recording rule {name}")
    there, tested = sections(runbooks), {test["alertname"] for case in tests["tests"] for test in case.get("alert_rule_test", [])}
    valued = {test["expr"] for case in tests["tests"] for test in case.get("promql_expr_test", []) if test.get("exp_samples")}
    wrong += [f"{name}: no case in {ALERT_TESTS.name}" for name in sorted(records - valued)]
    for alert in alerts(rules):
        name = alert["alert"]
        if alert["labels"].get("severity") not in ("critical", "warning", "info"):
            wrong.append(f"{name}: no severity")
        for key in ("summary", "description"):
            if not alert["annotations"].get(key):
                wrong.append(f"{name}: no {key}")
        page, _, anchor = alert["annotations"].get("runbook_url", "").partition("#")
        if page != "docs/operate/runbooks.md" or anchor != name.lower() or anchor not in there:
            wrong.append(f"{name}: no runbook")
        if name not in tested:
            wrong.append(f"{name}: no case in {ALERT_TESTS.name}")
    wrong += [f"runbook {name} has no alert" for name in there if name not in {a["alert"].lower() for a in alerts(rules)}]
    return wrong


def load():
    return [yaml.safe_load(RULES.read_text()), [json.loads(path.read_text()) for path in DASHBOARDS],
            RUNBOOKS.read_text(), catalog(), yaml.safe_load(ALERT_TESTS.read_text())]


def get(url):
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read().decode()


class Prometheus(Program):
    """Scrapes the servers every second; `rules` is the text of the rules."""

    def __init__(self, folder, servers, rules, alertmanager=None):
        folder = pathlib.Path(folder)
        (folder / "precondor.rules.yaml").write_text(rules)
        config = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yaml").read_text())
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config["alerting"]["alertmanagers"][0]["static_configs"][0]["targets"] = [alertmanager] if alertmanager else []
        config["scrape_configs"][0]["static_configs"][0]["targets"] = [f"127.0.0.1:{s.metrics_port}" for s in servers]
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
        self.url = f"http://127.0.0.1:{free_port()}"
        super().__init__(folder, ["prometheus", f"--config.file={folder}/prometheus.yaml",
                                  f"--storage.tsdb.path={folder}/tsdb", f"--web.listen-address={self.url[7:]}"])

    def ask(self, path, **parameters):
        answer = json.loads(get(f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"))
        if answer["status"] != "success":
            raise AssertionError(answer)
        return answer["data"]

    def query(self, expression):
        """The samples of an instant query: pairs of labels and a value."""
        data = self.ask("query", query=expression)
        if data["resultType"] == "scalar":
            return [({}, float(data["result"][1]))]
        return [(one["metric"], float(one["value"][1])) for one in data["result"]]

    def ready(self):
        try:
            return get(f"{self.url}/-/ready")
        except OSError:
            return False


def values(prometheus, variable):
    """Returns the values that a dashboard's variable offers."""
    metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]).groups()
    return prometheus.ask(f"label/{label}/values", **{"match[]": metric})


def filled(expression, chosen):
    """An expression as Grafana asks it; `chosen`: a regular expression for each variable."""
    for name, value in {**chosen, "__rate_interval": "15s"}.items():
        expression = expression.replace(f"${name}", value)
    return expression


def numbers(samples):
    """Returns whether there are samples, all of them numbers."""
    return samples and all(value == value for _, value in samples)


def train(cluster, folder):
    """A job that goes on until it is ended."""
    return Training(BINARIES, cluster, folder, ["--steps=1000000"])


class Files(unittest.TestCase):
    """The tests that need no server."""

    def test_the_tools_accept_rules_configurations_and_unit_tests(self):
        folder = ROOT / "deploy/prometheus"
        for command in (["promtool", "check", "rules", RULES], ["promtool", "check", "config", folder / "prometheus.yaml"],
                        ["promtool", "test", "rules", ALERT_TESTS],
                        ["amtool", "check-config", folder / "alertmanager.yaml"]):
            run(*command, timeout=60)

    def test_names_runbooks_and_unit_tests_are_there(self):
        self.assertEqual(findings(*load()), [])
        self.assertGreaterEqual(len(alerts(yaml.safe_load(RULES.read_text()))), 14)

    def test_planted_faults_are_found(self):
        rules, boards, runbooks, metrics, tests = load()
        panels(boards[0])[0]["targets"][0]["expr"] = "precondor_step_total"
        self.assertIn("no metric precondor_step_total", "\n".join(findings(rules, boards, runbooks, metrics, tests)))
        rules, boards, runbooks, metrics, tests = load()
        alerts(rules)[1]["expr"] = "train_job:precondor_stepz:rate1m < precondor_draining_statuses"
        found = "\n".join(findings(rules, boards, runbooks, metrics, tests))
        self.assertIn("no metric precondor_draining_statuses", found)
        self.assertIn("no recording rule train_job:precondor_stepz:rate1m", found)
        rules, boards, runbooks, metrics, tests = load()
        name = alerts(rules)[0]["alert"]
        found = findings(rules, boards, runbooks.replace(f"## {name}\n", "## PrecondorOther\n"), metrics, tests)
        self.assertIn(f"{name}: no runbook", found)
        self.assertIn("runbook precondorother has no alert", found)
        tests["tests"] = [case for case in tests["tests"]
                          if name not in {test["alertname"] for test in case.get("alert_rule_test", [])}]
        values, = [case["promql_expr_test"] for case in tests["tests"] if "promql_expr_test" in case]
        del values[0]["exp_samples"]
        found = findings(rules, boards, runbooks, metrics, tests)
        for untested in (name, values[0]["expr"]):
            self.assertIn(f"{untested}: no case in alerts.yaml", found)

    def test_dashboards_are_what_the_generator_makes_and_follow_the_schema(self):
        run(sys.executable, "-B", ROOT / "deploy/grafana/dashboards.py", "--check", timeout=60)
        schema = json.loads((pathlib.Path(__file__).parent / "grafana-dashboard.schema.json").read_text())
        validator = jsonschema.Draft7Validator(schema)
        for path in DASHBOARDS:
            board = json.loads(path.read_text())
            self.assertEqual([f"{list(e.absolute_path)}: {e.message}" for e in validator.iter_errors(board)], [], path.name)
            ids = [panel["id"] for panel in board["panels"]]
            self.assertEqual(len(ids), len(set(ids)))
            for panel in panels(board):
                self.assertTrue(panel["fieldConfig"]["defaults"].get("unit"), panel["title"])
        board["panels"][1]["gridPoss"] = {}
        self.assertTrue(list(validator.iter_errors(board)), "a misspelt field")

    def test_provisioning_of_grafana_names_what_is_there(self):
        folder = ROOT / "deploy/grafana/provisioning"
        source = yaml.safe_load((folder / "datasources/prometheus.yaml").read_text())["datasources"][0]
        self.assertEqual((source["type"], source["url"]), ("prometheus", "http://prometheus:9090"))
        provider = yaml.safe_load((folder / "dashboards/precondor.yaml").read_text())["providers"][0]
        self.assertEqual(provider["options"]["path"], "/etc/grafana/dashboards")


class Live(unittest.TestCase):
    """Two shards, a coordinator, a job that trains, and Prometheus."""

    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.mkdtemp(prefix="precondor-monitoring-")
        cls.addClassCleanup(shutil.rmtree, cls.folder, ignore_errors=True)
        cls.cluster = cls.enterClassContext(Cluster(BINARIES, cls.folder, shard_arguments=["--snapshot-interval-steps=500"]))
        cls.enterClassContext(train(cls.cluster, cls.folder))
        cls.prometheus = cls.enterClassContext(Prometheus(cls.folder, cls.cluster.servers(), RULES.read_text()))
        wait_for("Prometheus", cls.prometheus.ready)
        wait_for("snapshots, and rates from two scrapes",
                 lambda: len(cls.prometheus.query("precondor_last_snapshot_timestamp_seconds > 0")) == 2 and
                 cls.prometheus.query("train_job:precondor_steps:rate1m > 0"))

    def test_every_query_of_a_dashboard_has_an_answer(self):
        for path in DASHBOARDS:
            board = json.loads(path.read_text())
            offered = {v["name"]: values(self.prometheus, v) for v in board["templating"]["list"] if v["type"] == "query"}
            self.assertEqual({name: len(found) for name, found in offered.items()}, {"train_job": 1, "shard": 2})
            chosen = {name: "|".join(map(re.escape, found)).replace("\\", "\\\\") for name, found in offered.items()}
            for where, expression in expressions(board):
                with self.subTest(where, expression=expression):
                    # Rates of what happens now and then need a few seconds. A disk that is busy takes as long for a sync, and the
                    # quantile of none is no number.
                    wait_for(f"{where}: {expression}", lambda: numbers(self.prometheus.query(filled(expression, chosen))))
            for annotation in board["annotations"]["list"]:
                self.prometheus.query(filled(annotation["expr"], chosen))

    def test_every_rule_works_and_every_metric_is_scraped(self):
        rules, boards, runbooks, _, tests = load()
        scraped = set(self.prometheus.ask("label/__name__/values"))
        families = {SAMPLE.sub("", name) if SAMPLE.sub("", name) in catalog() else name for name in scraped}
        self.assertEqual({name for name in catalog() if name not in families}, set())
        self.assertEqual(findings(rules, boards, runbooks, families, tests), [])
        for group in rules["groups"]:
            for rule in group["rules"]:
                with self.subTest(rule=rule.get("record") or rule["alert"]):
                    samples = self.prometheus.query(rule["expr"])
                    if "record" in rule and "rejected" not in rule["record"]:
                        self.assertTrue(samples)
        running = [rule for group in self.prometheus.ask("rules")["groups"] for rule in group["rules"]]
        self.assertEqual([rule["name"] for rule in running if rule["health"] != "ok"], [])
        # An alert that waits for its `for` counts as well, unless what it waits for passes by.
        wait_for("no alert, pending or firing: nothing is wrong with this service", lambda: not self.prometheus.ask("alerts")["alerts"])

    def test_what_happens_is_counted(self):
        for series in ('precondor_stage_seconds_count{stage="receive"}', 'precondor_stage_seconds_count{stage="seal_wait"}',
                       'precondor_stage_seconds_count{stage="update"}', 'precondor_stage_seconds_count{stage="precondition"}',
                       'precondor_stage_seconds_count{stage="reply"}', 'precondor_job_stages_total{stage="update"}',
                       'precondor_transfer_bytes_total{direction="received",path="stream",kind="statistics"}',
                       'precondor_transfer_bytes_total{direction="received",path="stream",kind="gradient"}',
                       'precondor_transfer_bytes_total{direction="sent",path="stream",kind="answer"}',
                       'precondor_contributions_total{kind="gradient",result="accepted"}',
                       'precondor_admissions_total{result="admitted"}', 'precondor_job_reserved_bytes',
                       "precondor_shard_step_number",
                       "precondor_last_snapshot_bytes", "precondor_log_size_bytes", "precondor_log_sync_seconds_count",
                       "precondor_snapshot_seconds_count", "precondor_lease_step_number - precondor_last_step_number",
                       'precondor_mode_step_seconds{mode="second_order"}'):
            with self.subTest(series):
                wait_for(series, lambda series=series: self.prometheus.query(f"sum({series}) > 0"))
        for time in ("last_snapshot", "last_log_sync", "start"):
            ages = self.prometheus.query(f"abs(time() - (precondor_{time}_timestamp_seconds > 0))")
            self.assertTrue(ages and all(age < 3600 for _, age in ages), ages)

    def test_log_lines_that_nothing_takes_are_counted(self):
        server = Server(BINARIES, self.folder, "full", ["--role=shard"], prefix=["bash", "-c", 'exec "$@" 2>/dev/full', "-"])
        self.addCleanup(server.close)
        server.start()
        wait_for("a lost line", lambda: server.metric("precondor_dropped_log_lines_total"))

    def test_a_job_costs_few_series(self):
        jobs = self.prometheus.ask("label/train_job/values")
        self.assertEqual(len(jobs), 1)
        shard = self.cluster.shards[0]
        own = self.prometheus.query(f'count({{train_job="{jobs[0]}",instance="127.0.0.1:{shard.metrics_port}",__name__!~".*:.*"}})')
        self.assertLessEqual(own[0][1], 60)
        for server in self.cluster.servers():
            counted = run("bash", "-c", "curl -sf http://$0/metrics | grep '^precondor_' | grep -vc train_job=",
                          f"127.0.0.1:{server.metrics_port}", timeout=60).stdout
            self.assertLessEqual(int(counted), 600)

    def test_the_commands_of_the_runbooks_run(self):
        environment = runbook_environment(self.cluster, self.prometheus.ask("label/train_job/values")[0])
        lines = {line for block in COMMAND.findall(RUNBOOKS.read_text()) for line in block.splitlines()}
        self.assertTrue(any("snapshot" in line for line in lines))
        for line in sorted(lines):
            if line.startswith("precondor-server ") or " drain" in line:
                continue  # the alarm chain runs the one, tests of drains the other
            with self.subTest(line=line):
                run("bash", "-euc", line, env=environment, timeout=60)


def runbook_environment(cluster, job, config=""):
    """The variables that docs/operate/runbooks.md explains."""
    programs = [BINARIES / folder for folder in ("server", "client/cpp/tools")]
    return {"PATH": ":".join([*map(str, programs), os.environ["PATH"]]), "COORDINATOR": cluster.coordinator.address,
            "SHARD": cluster.shards[0].address, "METRICS": f"127.0.0.1:{cluster.shards[0].metrics_port}", "JOB": job,
            "CONFIG": str(config)}


class Webhook(http.server.BaseHTTPRequestHandler):
    def do_POST(self):  # noqa: N802
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.received += json.loads(body)["alerts"]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


class AlarmChain(unittest.TestCase):
    def test_a_killed_shard_alarms_and_its_runbook_brings_it_back(self):
        folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory(prefix="precondor-alarm-")))
        webhook = self.enterContext(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Webhook))
        webhook.received = []
        threading.Thread(target=webhook.serve_forever, daemon=True).start()
        self.addCleanup(webhook.shutdown)
        config = yaml.safe_load((ROOT / "deploy/prometheus/alertmanager.yaml").read_text())
        config["route"].update(group_wait="1s", group_interval="1s")
        config["receivers"][0]["webhook_configs"][0]["url"] = f"http://127.0.0.1:{webhook.server_address[1]}/"
        (folder / "alertmanager.yaml").write_text(yaml.safe_dump(config))
        address = f"127.0.0.1:{free_port()}"
        self.enterContext(Program(folder, [
            "prometheus-alertmanager", f"--config.file={folder}/alertmanager.yaml", f"--storage.path={folder}/alertmanager",
            f"--web.listen-address={address}", "--cluster.listen-address="]))

        cluster = self.enterContext(Cluster(BINARIES, folder))
        self.enterContext(train(cluster, folder))
        rules = re.sub(r"^( +for:) \d+[sm]$", r"\1 2s", RULES.read_text(), flags=re.MULTILINE)
        prometheus = self.enterContext(Prometheus(folder, cluster.servers(), rules, address))
        wait_for("steps", lambda: (cluster.step() or 0) > 20)
        wait_for("Prometheus", prometheus.ready)
        shard = cluster.shards[0]
        instance = f"127.0.0.1:{shard.metrics_port}"
        wait_for("a scrape of the shard", lambda: prometheus.query(f'up{{instance="{instance}"}} == 1'))
        job = prometheus.ask("label/train_job/values")[0]

        configuration = folder / "shard.yaml"
        configuration.write_text(run(shard.program, f"--listen={shard.address}", f"--metrics-listen={instance}",
                                     *shard.arguments, "--print-config", timeout=60, env={}).stdout)
        shard.kill()
        received = wait_for("the alert at the webhook", lambda: [
            a for a in webhook.received if a["labels"]["alertname"] == "PrecondorServerDown" and a["status"] == "firing"])
        self.assertEqual(received[0]["labels"]["instance"], instance)
        self.assertEqual(received[0]["labels"]["severity"], "critical")
        stopped = cluster.step()
        for path in DASHBOARDS:
            for where, expression in expressions(json.loads(path.read_text())):
                with self.subTest(where):  # it may be empty, but a fault makes none an error
                    prometheus.query(filled(expression, {"train_job": ".*", "shard": ".*"}))
        missing = [e for w, e in expressions(json.loads((ROOT / "deploy/grafana/overview.json").read_text())) if "that do not" in w]
        self.assertEqual([value for _, value in prometheus.query(missing[0])], [1.0])

        page, _, anchor = received[0]["annotations"]["runbook_url"].partition("#")
        section = sections((ROOT / page).read_text())[anchor]
        lines = [line for block in COMMAND.findall(section) for line in block.splitlines()]
        environment = runbook_environment(cluster, job, configuration)
        started = [line for line in lines if line.startswith("precondor-server ")]
        self.assertEqual(len(started), 1)
        for line in lines[:lines.index(started[0])]:  # they look, and may find that the shard does not answer
            subprocess.run(["bash", "-euc", line], env=environment, capture_output=True, stdin=subprocess.DEVNULL,
                           timeout=60, check=False)
        self.enterContext(Program(folder, ["bash", "-euc", f"exec {started[0]}"], environment))
        for line in lines[lines.index(started[0]) + 1:]:
            wait_for(line, lambda line=line: subprocess.run(
                ["bash", "-euc", line], env=environment, capture_output=True, stdin=subprocess.DEVNULL, timeout=60,
                check=False).returncode == 0)
        wait_for("the job to go on", lambda: (cluster.step() or 0) > stopped + 20)
        wait_for("the end of the alert at the webhook", lambda: [
            a for a in webhook.received if a["labels"]["alertname"] == "PrecondorServerDown" and a["status"] == "resolved"])


if __name__ == "__main__":
    full = "--full" in sys.argv
    BINARIES = pathlib.Path([a for a in sys.argv[1:] if not a.startswith("-")][0])
    names = ["AlarmChain"] if full else ["Files", "Live"]
    unittest.main(argv=[sys.argv[0], "-v", *names])
