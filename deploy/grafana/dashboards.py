#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the Grafana dashboards beside it: overview.json, training-job.json, shard.json.

Usage: deploy/grafana/dashboards.py [--check]   (--check writes nothing and fails if a file differs)
"""

import copy
import json
import pathlib
import sys

FOLDER = pathlib.Path(__file__).parent
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
JOB = 'train_job=~"$train_job"'
SHARD = 'instance=~"$shard"'
JOB_SHARD = f"{JOB},{SHARD}"
LINKS = [{"title": "Dashboards", "type": "dashboards", "icon": "external link", "tooltip": "", "url": "", "tags": ["precondor"],
          "asDropdown": True, "targetBlank": False, "includeVars": True, "keepTime": True}]
RUNBOOKS = {"type": "text", "title": "Runbooks", "gridPos": {"h": 4, "w": 24, "x": 0, "y": 0},
            "options": {"mode": "markdown", "content": "`docs/operate/runbooks.md` has a section for each alert; the annotation "
                        "`runbook_url` of the alert names it. Metrics: `docs/operate/monitoring.md`."}}


def panel(title, unit, *queries, kind="timeseries", width=8, height=7, description="", decimals=None):
    """`queries`: pairs of an expression and its legend."""
    defaults = {"unit": unit}
    if decimals is not None:
        defaults["decimals"] = decimals
    return {"type": kind, "title": title, "description": description, "datasource": SOURCE,
            "gridPos": {"h": height, "w": width, "x": 0, "y": 0},
            "fieldConfig": {"defaults": defaults, "overrides": []},
            "targets": [{"refId": chr(ord("A") + i), "datasource": SOURCE, "expr": expr, "legendFormat": legend,
                         **({"instant": True} if kind in ("stat", "table") else {})}
                        for i, (expr, legend) in enumerate(queries)]}


def stat(title, unit, expr, legend="", **more):
    return panel(title, unit, (expr, legend), kind="stat", width=4, height=4, **more)


def variable(name, label, metric):
    query = f"label_values({metric})" if "," in metric else metric
    return {"name": name, "label": label, "type": "query", "datasource": SOURCE, "query": query, "definition": query,
            "refresh": 2, "sort": 1, "multi": True, "includeAll": True,
            "current": {"text": "All", "value": "$__all"}, "options": [], "hide": 0}


def dashboard(uid, title, variables, rows):
    """`rows`: pairs of a title and its panels, which are laid out from left to right."""
    panels, y = [], 0
    for row, members in rows:
        panels.append({"type": "row", "title": row, "collapsed": False, "panels": [],
                       "gridPos": {"h": 1, "w": 24, "x": 0, "y": y}})
        x, y, height = 0, y + 1, 0
        for member in copy.deepcopy(members):
            place = member["gridPos"]
            if x + place["w"] > 24:
                x, y, height = 0, y + height, 0
            place.update(x=x, y=y)
            x, height = x + place["w"], max(height, place["h"])
            panels.append(member)
        y += height
    for number, member in enumerate(panels, 1):
        member["id"] = number
    source = {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "refresh": 1,
              "current": {"text": "Prometheus", "value": "prometheus"}, "options": [], "hide": 0, "multi": False, "includeAll": False}
    mode = {"name": "Changes of mode", "datasource": SOURCE, "enable": True, "iconColor": "orange", "hide": False,
            "expr": f"changes(precondor_second_order_mode{{{JOB}}}[1m]) > 0", "titleFormat": "{{train_job}} changes its mode"}
    return {"uid": uid, "title": title, "tags": ["precondor"], "schemaVersion": 39, "version": 1, "editable": True,
            "timezone": "", "refresh": "30s", "time": {"from": "now-1h", "to": "now"}, "graphTooltip": 1,
            "links": LINKS, "templating": {"list": [source, *variables]}, "annotations": {"list": [mode]},
            "panels": panels}


TRAIN_JOB = variable("train_job", "Training job", "precondor_steps_total, train_job")
SHARDS = variable("shard", "Shard", "precondor_device_status, instance")

STEPS = panel("Steps a second", "ops", (f"sum by (train_job) (rate(precondor_steps_total{{{JOB}}}[$__rate_interval]))", "{{train_job}}"))
LOSS = panel("Loss", "none", (f"precondor_training_loss{{{JOB}}}", "{{train_job}}"),
             (f"precondor_smoothed_loss{{{JOB}}}", "{{train_job}} smoothed"))
MODE = panel("Mode", "bool_yes_no", (f"precondor_second_order_mode{{{JOB}}}", "{{train_job}} second order"),
             description="1: second order, 0: first order after a fallback. precondorctl mode tells why.")
MEMORY = panel("Memory reserved", "bytes", (f"precondor_reserved_bytes{{{SHARD}}}", "{{instance}}"),
               (f"precondor_capacity_bytes{{{SHARD}}}", "{{instance}} capacity"))
STAGES_P99 = panel(
    "Stages of a layer, 99th percentile", "s",
    (f"histogram_quantile(0.99, sum by (stage, le) (rate(precondor_stage_seconds_bucket{{{SHARD}}}[$__rate_interval])))", "{{stage}}"),
    width=12, description="receive: frames of a contribution. seal_wait: first contribution to the last. reply: an answer waits for the network.")
STAGES_JOB = panel(
    "Mean time in a stage", "s",
    (f"sum by (train_job, stage) (rate(precondor_job_stage_seconds_total{{{JOB}}}[$__rate_interval])) / "
     f"sum by (train_job, stage) (rate(precondor_job_stages_total{{{JOB}}}[$__rate_interval]))", "{{train_job}} {{stage}}"), width=12)
LAG = panel("Step of each shard", "none", (f"precondor_shard_step_number{{{JOB}}}", "{{train_job}} {{instance}}"),
            (f"precondor_last_step_number{{{JOB}}}", "{{train_job}} reported"),
            (f"precondor_lease_step_number{{{JOB}}}", "{{train_job}} lease"))
RPCS = panel("RPCs a second", "ops", ("sum by (method, code) (rate(precondor_rpcs_total[$__rate_interval]))", "{{method}} {{code}}"), width=12)

OVERVIEW = dashboard("precondor-overview", "Precondor: overview", [TRAIN_JOB, SHARDS], [
    ("Service", [
        stat("Servers that answer", "none", 'sum(up{job=~".*precondor.*"})'),
        stat("Servers that do not", "none", 'sum(1 - up{job=~".*precondor.*"})'),
        stat("Sessions", "none", "sum(precondor_coordinator_sessions)"),
        stat("Steps a second", "ops", "sum(rate(precondor_steps_total[5m]))", decimals=1),
        stat("Ranks that lag", "none", "sum(precondor_lagging_workers)"),
        stat("Alerts", "none", 'count(ALERTS{alertname=~"Precondor.*",alertstate="firing"}) or vector(0)')]),
    ("Training", [MODE, LOSS, STEPS]),
    ("RPCs", [RPCS, panel("Contributions refused", "ops", (
        "sum by (reason) (rate(precondor_rejected_total[$__rate_interval])) > 0 or sum(rate(precondor_rejected_total[$__rate_interval]))",
        "{{reason}}"), width=12)]),
    ("Pipeline stages", [STAGES_P99, STAGES_JOB]),
    ("Device and memory", [MEMORY, panel("Memory", "bytes", ("precondor_resident_memory_bytes", "{{instance}} resident"),
                                           ("precondor_allocated_bytes", "{{instance}} in use")),
                           panel("Devices", "bool_on_off", (f"precondor_device_status{{{SHARD}}}", "{{instance}} {{device}}"))]),
    ("Builds", [panel("Versions", "none", ("precondor_build_info", "{{instance}} {{role}} {{version}}"), kind="table", width=24), RUNBOOKS]),
])

TRAINING_JOB = dashboard("precondor-training-job", "Precondor: training job", [TRAIN_JOB, SHARDS], [
    ("Training", [
        stat("Mode", "bool_yes_no", f"min(precondor_second_order_mode{{{JOB}}})", description="Whether it is second order"),
        stat("Step", "none", f"max(precondor_last_step_number{{{JOB}}})"),
        stat("Steps left in the lease", "none", f"min(precondor_lease_step_number{{{JOB}}} - precondor_last_step_number{{{JOB}}})"),
        stat("Ranks joined", "none", f"sum(precondor_joined_workers{{{JOB}}})"),
        stat("Ranks expected", "none", f"sum(precondor_expected_workers{{{JOB}}})"),
        stat("Epoch", "none", f"max(precondor_epoch_number{{{JOB}}})"),
        LOSS,
        panel("Decrease of the loss in a step", "none", (f"precondor_loss_rate{{{JOB}}}", "{{train_job}}"),
              (f"precondor_fallback_threshold_rate{{{JOB}}}", "{{train_job}} threshold of the fallback")),
        STEPS, LAG, MODE,
        panel("Time of a step by mode", "s", (f"precondor_mode_step_seconds{{{JOB}}}", "{{train_job}} {{mode}}"))]),
    ("Contributions and answers", [
        panel("Contributions a second", "ops", (
            f"sum by (kind, result) (rate(precondor_contributions_total{{{JOB_SHARD}}}[$__rate_interval]))", "{{kind}} {{result}}")),
        panel("Answers a second", "ops", (
            f"sum by (decision) (rate(precondor_results_total{{{JOB_SHARD}}}[$__rate_interval]))", "{{decision}}")),
        panel("Payload", "Bps", (f"sum by (kind) (rate(precondor_contribution_bytes_total{{{JOB_SHARD}}}[$__rate_interval]))", "{{kind}}"),
              (f"sum(rate(precondor_result_bytes_total{{{JOB_SHARD}}}[$__rate_interval]))", "answers"),
              (f"sum(rate(precondor_fetched_bytes_total{{{JOB_SHARD}}}[$__rate_interval]))", "factors"))]),
    ("Pipeline stages", [STAGES_JOB, panel(
        "Updates a second", "ops", (f"sum(rate(precondor_updates_total{{{JOB_SHARD}}}[$__rate_interval]))", "attempted"),
        (f"sum(rate(precondor_update_failures_total{{{JOB_SHARD}}}[$__rate_interval]))", "failed"),
        (f"sum(rate(precondor_fetches_total{{{JOB_SHARD}}}[$__rate_interval]))", "factors fetched"), width=12)]),
    ("Device and memory", [panel("Memory reserved", "bytes", (
        f"precondor_job_reserved_bytes{{{JOB_SHARD}}}", "{{instance}}"), width=12),
        panel("Ranks that lag", "none", (f"precondor_lagging_workers{{{JOB_SHARD}}}", "{{instance}} ranks"),
              (f"precondor_lagging_rank_number{{{JOB_SHARD}}}", "{{instance}} lowest rank, -1: none"), width=12)]),
    ("Recovery", [panel("Recovery", "none", (f"sum(precondor_updates_lost_total{{{JOB_SHARD}}})", "updates lost"),
                        (f"sum(precondor_mode_changes_total{{{JOB}}})", "changes of mode"), width=24)]),
    ("Snapshots", [
        panel("Age of the last snapshot", "s", (
            f"time() - (precondor_last_snapshot_timestamp_seconds{{{JOB_SHARD}}} > 0)", "{{instance}}")),
        panel("Size of the last snapshot", "bytes", (f"precondor_last_snapshot_bytes{{{JOB_SHARD}}}", "{{instance}}")),
        panel("Snapshots", "none", (f"sum by (outcome) (precondor_snapshots_total{{{JOB_SHARD}}})", "of shards: {{outcome}}"),
              (f"sum by (outcome) (precondor_session_snapshots_total{{{JOB}}})", "of the session: {{outcome}}"),
              (f"max(precondor_last_session_snapshot_step_number{{{JOB}}})", "step of the last one, -1: none"),
              (f"sum(precondor_log_stale_status{{{JOB_SHARD}}})", "logs that are stale"))]),
])

SHARD_BOARD = dashboard("precondor-shard", "Precondor: shard", [TRAIN_JOB, SHARDS], [
    ("Server", [
        stat("Up for", "s", f"time() - min(precondor_start_timestamp_seconds{{{SHARD}}})"),
        stat("Sessions", "none", f"sum(precondor_shard_sessions{{{SHARD}}})"),
        stat("Draining", "bool_yes_no", f"max(precondor_draining_status{{{SHARD}}})"),
        stat("Log lines lost", "none", f"sum(precondor_dropped_log_lines_total{{{SHARD}}})"),
        stat("Journal fails", "bool_yes_no", "max(precondor_journal_failing_status)"),
        stat("Journal failures", "none", "sum(precondor_journal_failures_total)")]),
    ("Training", [LAG, panel("Ranks that lag", "none", (f"precondor_lagging_workers{{{JOB_SHARD}}}", "{{train_job}}"))]),
    ("RPCs", [panel("Calls a second", "ops", (
        f"sum by (method, code) (rate(precondor_rpcs_total{{{SHARD}}}[$__rate_interval]))", "{{method}} {{code}}")),
        panel("Time of a call, 99th percentile", "s", (
            f"histogram_quantile(0.99, sum by (method, le) (rate(precondor_rpc_seconds_bucket{{{SHARD}}}[$__rate_interval])) > 0)", "{{method}}")),
        panel("Refusals a second", "ops", (f"sum(rate(precondor_rejected_total{{{SHARD}}}[$__rate_interval]))", "contributions"),
              (f'sum(rate(precondor_admissions_total{{{SHARD},result="refused"}}[$__rate_interval]))', "reservations of memory"))]),
    ("Pipeline stages", [STAGES_P99, panel("Layers a second through a stage", "ops", (
        f"sum by (stage) (rate(precondor_stage_seconds_count{{{SHARD}}}[$__rate_interval]))", "{{stage}}"), width=12),
        panel("Layers a second by answer", "ops", (
            f"sum by (decision, reason) (rate(precondor_plans_total{{{SHARD}}}[$__rate_interval])) > 0", "{{decision}} {{reason}}"),
            width=12)]),
    ("Device and memory", [MEMORY,
        panel("Memory", "bytes", (f"precondor_resident_memory_bytes{{{SHARD}}}", "{{instance}} resident"),
              (f"precondor_allocated_bytes{{{SHARD}}}", "{{instance}} in use"))]),
    ("Transport", [panel("Payload", "Bps", (
        f"sum by (direction, path, kind) (rate(precondor_transfer_bytes_total{{{SHARD}}}[$__rate_interval]))",
        "{{direction}} {{path}} {{kind}}"), width=24)]),
    ("Log and snapshots", [
        panel("Log written", "Bps", (f"rate(precondor_log_bytes_total{{{SHARD}}}[$__rate_interval])", "{{instance}}")),
        panel("Log on the disk", "bytes", (f"precondor_log_size_bytes{{{SHARD}}}", "{{instance}}")),
        panel("Since the last sync of the log", "s", (f"time() - (precondor_last_log_sync_timestamp_seconds{{{SHARD}}} > 0)", "{{instance}}")),
        panel("Sync of the log, 99th percentile", "s", (
            f"histogram_quantile(0.99, sum by (instance, le) (rate(precondor_log_sync_seconds_bucket{{{SHARD}}}[$__rate_interval])))", "{{instance}}")),
        panel("Mean time of a snapshot", "s", (
            f"precondor_snapshot_seconds_sum{{{SHARD}}} / (precondor_snapshot_seconds_count{{{SHARD}}} > 0)", "{{instance}}")),
        panel("Failed writes of the log", "none", (f"precondor_log_failures_total{{{SHARD}}}", "{{instance}}"))]),
])

DASHBOARDS = {"overview.json": OVERVIEW, "training-job.json": TRAINING_JOB, "shard.json": SHARD_BOARD}


def main():
    differing = 0
    for name, made in DASHBOARDS.items():
        # A panel a line: a change shows the panels that it changes.
        text = json.dumps(made | {"panels": []})[:-2] + "\n" + ",\n".join(map(json.dumps, made["panels"])) + "]}\n"
        path = FOLDER / name
        if sys.argv[1:] == ["--check"]:
            if not path.is_file() or path.read_text() != text:
                print(f"{path.name} is not what dashboards.py makes: run deploy/grafana/dashboards.py")
                differing = 1
        elif not sys.argv[1:]:
            path.write_text(text)
        else:
            sys.exit(__doc__)
    sys.exit(differing)


if __name__ == "__main__":
    main()
