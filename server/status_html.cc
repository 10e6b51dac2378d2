// SPDX-License-Identifier: Apache-2.0
#include "server/status_html.h"

namespace precondor {

const char kStatusHtml[] = R"html(<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Precondor</title>
<link rel="icon" href="data:,">
<style>
:root { color-scheme: light dark; --line: #8885; --soft: #777; --good: #1a7f37; --bad: #cf222e; --accent: #0969da; }
@media (prefers-color-scheme: dark) { :root { --soft: #aaa; --good: #3fb950; --bad: #ff7b72; --accent: #58a6ff; } }
body { font: 15px/1.45 system-ui, "DejaVu Sans", sans-serif; margin: 0 auto; max-width: 72rem; padding: 1rem; }
h1 { font-size: 1.3rem; margin: 0; }
header { display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; align-items: baseline; border-bottom: 1px solid var(--line);
  padding-bottom: .6rem; }
.soft { color: var(--soft); }
.good { color: var(--good); }
.bad { color: var(--bad); }
section { border: 1px solid var(--line); border-radius: .5rem; margin: 1rem 0; padding: 0 1rem; }
summary { cursor: pointer; padding: .6rem 0; font-weight: 600; overflow-wrap: anywhere; }
summary:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(12rem, 1fr)); gap: .6rem 1rem; margin: 0 0 1rem; }
dt { color: var(--soft); font-size: .85rem; }
dd { margin: 0; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
figure { margin: 0 1rem 1rem 0; display: inline-block; width: min(100%, 20rem); }
figcaption { color: var(--soft); font-size: .85rem; }
svg { width: 100%; height: 4rem; display: block; border-bottom: 1px solid var(--line); }
polyline { fill: none; stroke: var(--accent); stroke-width: 1.5; vector-effect: non-scaling-stroke; }
</style>
</head>
<body>
<header><h1>Precondor</h1><span id="server" class="soft"></span><span id="state" role="status">reading</span></header>
<main id="main"></main>
<p class="soft">Read only. <a href="/metrics">/metrics</a> <a href="/status">/status</a> <a href="/layers">/layers</a></p>
<script>
"use strict";
const KEPT = 120;             // points of a plot
const past = new Map();       // of each job: arrays by name
let before = null;            // the sample before this one

function element(tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}
// Samples of /metrics by name: pairs of labels and a value.
function parse(text) {
  const samples = {};
  for (const line of text.split("\n")) {
    const match = /^([a-z_]+)(?:\{(.*)\})? (\S+)$/.exec(line);
    if (!match) continue;
    const labels = {};
    for (const one of (match[2] || "").matchAll(/([a-z_]+)="((?:[^"\\]|\\.)*)"/g)) {
      labels[one[1]] = one[2].replace(/\\(.)/g, (_, c) => c === "n" ? "\n" : c);
    }
    (samples[match[1]] ||= []).push({labels, value: Number(match[3])});
  }
  return samples;
}
function value(samples, name, labels) {
  const found = (samples[name] || []).find(s => Object.entries(labels).every(([k, v]) => s.labels[k] === v));
  return found ? found.value : null;
}
function number(x, digits = 4) {
  if (x === null || x === undefined) return "none";
  if (x !== 0 && Math.abs(x) < 1e-3) return x.toExponential(2);
  return x.toLocaleString("en", {maximumSignificantDigits: digits});
}
function bytes(x) {
  if (x === null) return "none";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let i = 0;
  while (x >= 1024 && i < units.length - 1) { x /= 1024; ++i; }
  return number(x, 3) + " " + units[i];
}
function seconds(x) { return x === null ? "none" : x < 1 ? number(x * 1000, 3) + " ms" : number(x, 3) + " s"; }

function slowest(samples, job) {
  let worst = null;
  for (const {labels, value: total} of samples.precondor_job_stage_seconds_total || []) {
    if (labels.train_job !== job) continue;
    const count = value(samples, "precondor_job_stages_total", labels);
    const base = before ? [value(before.samples, "precondor_job_stage_seconds_total", labels) || 0,
                           value(before.samples, "precondor_job_stages_total", labels) || 0] : [0, 0];
    if (count <= base[1]) continue;
    const mean = (total - base[0]) / (count - base[1]);
    if (!worst || mean > worst.mean) worst = {stage: labels.stage, mean};
  }
  return worst ? worst.stage + ", " + seconds(worst.mean) + " a layer" : "none";
}
function remember(job, name, at, x) {
  const series = past.get(job) || {};
  past.set(job, series);
  if (x === null || x === undefined || !Number.isFinite(x)) return;
  (series[name] ||= []).push([at, x]);
  if (series[name].length > KEPT) series[name].shift();
}
function plot(job, name, unit) {
  const points = (past.get(job) || {})[name] || [];
  const figure = element("figure");
  const last = points.length ? number(points[points.length - 1][1]) : "none";
  figure.append(element("figcaption", name + ": " + last + " " + unit));
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", "0 0 100 30");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", name + " of " + job + ", now " + last);
  if (points.length > 1) {
    const ys = points.map(p => p[1]), low = Math.min(...ys), span = Math.max(...ys) - low || 1;
    const x0 = points[0][0], width = points[points.length - 1][0] - x0 || 1;
    const line = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
    line.setAttribute("points", points.map(([x, y]) => `${100 * (x - x0) / width},${28 - 26 * (y - low) / span}`).join(" "));
    svg.append(line);
  }
  figure.append(svg);
  return figure;
}
function facts(pairs) {
  const list = element("dl");
  for (const [name, text, className] of pairs) {
    const pair = element("div");
    pair.append(element("dt", name), element("dd", text, className));
    list.append(pair);
  }
  return list;
}
function card(id, title) {
  let section = document.getElementById(id);
  if (!section) {
    section = element("section");
    section.id = id;
    const details = element("details"), body = element("div");
    details.open = true;
    details.append(element("summary", title), body);
    section.append(details);
    document.getElementById("main").append(section);
  }
  section.querySelector("summary").textContent = title;
  return section.querySelector("div");
}

function show(status, samples) {
  const now = Date.now() / 1000;
  const server = document.getElementById("server");
  server.textContent = `${status.role} ${status.version}`;
  const state = document.getElementById("state");
  state.textContent = status.draining ? "draining" : "serving";
  state.className = status.draining ? "bad" : "good";
  const memory = [];
  if (status.role !== "coordinator") {
    memory.push(["Reserved", bytes(value(samples, "precondor_reserved_bytes", {})) + " of " + bytes(value(samples, "precondor_capacity_bytes", {}))]);
    for (const {labels, value: usable} of samples.precondor_device_status || []) {
      memory.push([`Device ${labels.device}`, usable ? "usable" : "lost", usable ? "good" : "bad"]);
    }
    memory.push(["Log on the disk", bytes(value(samples, "precondor_log_size_bytes", {}))]);
  }
  memory.push(["Resident memory", bytes(value(samples, "precondor_resident_memory_bytes", {}))]);
  if (status.shards.length) memory.push(["Shards", status.shards.join(", ")]);
  card("server-card", "Server").replaceChildren(facts(memory));
  const kept = new Set(["server-card"]);
  status.sessions.forEach(session => {
    const job = session.train_job, labels = {train_job: job}, id = "job-" + encodeURIComponent(job);
    kept.add(id);
    const body = card(id, job);
    const age = value(samples, "precondor_last_snapshot_timestamp_seconds", labels);
    const lost = value(samples, "precondor_log_stale_status", labels);
    const pairs = [["Mode", session.mode.replace("_", " ").toLowerCase(), session.mode === "SECOND_ORDER" ? "good" : "bad"],
                   ["Ranks joined", `${session.joined} of ${session.world_size}`, session.joined < session.world_size ? "bad" : ""],
                   ["Epoch", number(session.epoch, 9)]];
    if (session.coordinator) {
      const c = session.coordinator;
      const by_shard = c.shard_steps.map(s => `${s.shard}: ${number(s.last_step, 15)}`);
      pairs.push(["Why", c.reason || "no step has ended yet"], ["Step", number(c.last_step, 15)],
                 ["Greatest steps of the shards, when last asked", by_shard.join("; ") || "not asked yet"],
                 ["Steps left in the lease", number((value(samples, "precondor_lease_step_number", labels) || 0) - c.last_step, 9)],
                 ["Loss", number(c.loss)], ["Smoothed loss", number(c.smoothed_loss)],
                 ["Decrease in a step", number(c.loss_rate)],
                 ["Last snapshot of the session", c.last_snapshot_step === null ? "none" : "step " + c.last_snapshot_step]);
      remember(job, "Loss", now, c.loss);
    }
    if (session.shard) {
      const lagging = session.shard.lagging_ranks, more = session.shard.lagging_workers - lagging.length;
      pairs.push(["Step on this shard", number(session.shard.last_step, 15)], ["Slowest stage", slowest(samples, job)],
                 ["Slowest ranks", lagging.length ? lagging.join(", ") + (more ? ` and ${more} more` : "") : "none lags", lagging.length ? "bad" : ""],
                 ["Reserved here", bytes(session.shard.reserved_bytes)],
                 ["Last snapshot here", age ? seconds(Math.max(0, now - age)) + " ago" : "none"],
                 ["Comes back after a crash", lost ? "not before the next snapshot" : "yes, with a data directory", lost ? "bad" : ""]);
      const gap = session.shard.lacks_gradients_for_s, updates = session.shard.updates_lost;
      if (gap !== null) pairs.push(["Gradients are not in the journal", `for ${seconds(gap)}`, "bad"]);
      if (updates > 0) pairs.push(["Updates lost", number(updates, 9), "bad"]);
    }
    const step = session.coordinator ? session.coordinator.last_step : session.shard.last_step;
    const old = before && before.status.sessions.find(s => s.train_job === job);
    if (old && now > before.now) {
      const was = old.coordinator ? old.coordinator.last_step : old.shard.last_step;
      remember(job, "Steps", now, Math.max(0, (step - was) / (now - before.now)));
    }
    const plots = session.coordinator ? [plot(job, "Loss", "")] : [];
    plots.push(plot(job, "Steps", "a second"));
    body.replaceChildren(facts(pairs), ...plots);
  });
  if (!status.sessions.length) {
    card("no-session", "Sessions").replaceChildren(element("p", "No session is open.", "soft"));
    kept.add("no-session");
  }
  for (const section of document.querySelectorAll("section")) if (!kept.has(section.id)) section.remove();
  before = {status, samples, now};
}
async function read() {
  try {
    const [status, metrics] = await Promise.all([fetch("/status"), fetch("/metrics")]);
    show(await status.json(), parse(await metrics.text()));
  } catch (error) {
    const state = document.getElementById("state");
    state.textContent = "does not answer";
    state.className = "bad";
  }
  setTimeout(read, 2000);
}
read();
</script>
</body>
</html>
)html";

}  // namespace precondor
