// SPDX-License-Identifier: Apache-2.0
#include "server/http/status_pages.h"

namespace precondor {

const char kStatusHtml[] = R"html(<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Precondor</title>
<link rel="icon" href="data:,">
<style>
:root { color-scheme: light dark; --line: #8885; --soft: #666; --good: #1a7f37; --bad: #cf222e; --accent: #0969da;
  --c0: #0969da; --c1: #bc4c00; --c2: #1a7f37; --c3: #8250df; --c4: #cf222e; }
@media (prefers-color-scheme: dark) { :root { --soft: #aaa; --good: #3fb950; --bad: #ff7b72; --accent: #58a6ff;
  --c0: #58a6ff; --c1: #f0883e; --c2: #3fb950; --c3: #d2a8ff; --c4: #ff7b72; } }
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
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 26rem), 1fr)); gap: .5rem 1.5rem; }
figure { margin: 0 0 1rem; }
figcaption { font-size: .85rem; font-variant-numeric: tabular-nums; }
figcaption span { color: var(--soft); margin-left: .8em; white-space: nowrap; }
.key::before { content: ""; display: inline-block; width: 1em; height: .2em; margin-right: .3em; vertical-align: middle; background: var(--key); }
.phase::before { height: .8em; opacity: .3; }
svg { width: 100%; display: block; }
svg text { font-size: 11px; fill: var(--soft); font-variant-numeric: tabular-nums; }
.grid { stroke: var(--line); stroke-width: 1; }
.end { text-anchor: end; }
.middle { text-anchor: middle; }
polyline { fill: none; stroke: var(--key); stroke-width: 1.5; stroke-linecap: round; stroke-linejoin: round; }
.c0 { --key: var(--c0); } .c1 { --key: var(--c1); } .c2 { --key: var(--c2); } .c3 { --key: var(--c3); } .c4 { --key: var(--c4); }
.phase { --key: var(--soft); fill: var(--soft); fill-opacity: .15; }
</style>
</head>
<body>
<header><h1>Precondor</h1><span id="server" class="soft"></span><span id="state" role="status">reading</span></header>
<main id="main"></main>
<p class="soft">Read only. <a href="/metrics">/metrics</a> <a href="/status">/status</a></p>
<script>
"use strict";
const STAGES = ["receive", "seal_wait", "update", "precondition", "reply"];
const FIELDS = ["time", "step", "second_order", "loss", "smoothed", "steps", "received", "sent", ...STAGES];
const KEPT = 1200;            // points of a job, of 8 bytes a field: 124,800 bytes
const MOST_OPEN = 8;          // cards that are open at first
const past = new Map();       // PointBuffer of each job
let before = null;            // the reading before this one

// The points of a job's plots. A full buffer drops every second point, and then adds one point in place of
// two. So it covers the time since the page was opened, with 600 points or more once it has had them. A point
// whose values are NaN is a gap. A gap that is dropped makes the point before it one.
class PointBuffer {
  constructor() {
    this.values = new Float64Array(KEPT * FIELDS.length);
    this.size = 0;
    this.every = 1;     // readings of a point
    this.readings = 0;  // since the last point
    this.base = null;   // counters at the last point
    this.broken = false;  // whether the server has not answered since the last point
  }
  get(i, field) { return this.values[i * FIELDS.length + FIELDS.indexOf(field)]; }
  last(field) { return this.size ? this.get(this.size - 1, field) : NaN; }
  add(point) {
    if (this.size === KEPT) {
      const width = FIELDS.length;
      for (let i = 0; i < KEPT / 2; ++i) {
        const gap = Number.isNaN(this.get(2 * i + 1, "second_order"));
        this.values.copyWithin(i * width, 2 * i * width, (2 * i + 1) * width);
        if (gap) this.values.fill(NaN, i * width + FIELDS.indexOf("step") + 1, (i + 1) * width);
      }
      this.size = KEPT / 2;
      this.every *= 2;
    }
    FIELDS.forEach((field, k) => { this.values[this.size * FIELDS.length + k] = point[field] ?? NaN; });
    ++this.size;
  }
}

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
  if (!Number.isFinite(x)) return "none";
  if (x !== 0 && Math.abs(x) < 1e-3) return x.toExponential(2);
  return x.toLocaleString("en", {maximumSignificantDigits: digits});
}
function scaled(x, step, units) {
  if (!Number.isFinite(x)) return "none";
  let i = 0;
  while (x >= step && i < units.length - 1) { x /= step; ++i; }
  return number(x, 3) + " " + units[i];
}
const bytes = x => scaled(x, 1024, ["B", "KiB", "MiB", "GiB", "TiB"]);
const rate = x => scaled(x, 1000, ["B/s", "kB/s", "MB/s", "GB/s", "TB/s"]);
function seconds(x) {
  if (!Number.isFinite(x)) return "none";
  return x < 1e-3 ? number(x * 1e6, 3) + " µs" : x < 1 ? number(x * 1000, 3) + " ms" : number(x, 3) + " s";
}

function stageName(stage, jobs) {
  return stage.replace("seal_wait", "wait") + (jobs > 1 && (stage === "receive" || stage === "reply") ? " (all jobs)" : "");
}
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
// The sum of a job's samples of a counter, or null without one.
function total(samples, name, job) {
  const found = (samples[name] || []).filter(s => s.labels.train_job === job);
  return found.length ? found.reduce((sum, s) => sum + s.value, 0) : null;
}
function counters(session, samples) {
  const job = session.train_job, labels = stage => ({train_job: job, stage});
  const made = {step: (session.coordinator || session.shard).last_step,
                received: total(samples, "precondor_contribution_bytes_total", job),
                sent: total(samples, "precondor_result_bytes_total", job)};
  const fetched = total(samples, "precondor_fetched_bytes_total", job);
  if (made.sent !== null) made.sent += fetched || 0;
  for (const stage of STAGES) {  // a job has no counters of receive and reply, the server has
    made[stage] = value(samples, "precondor_job_stage_seconds_total", labels(stage)) ?? value(samples, "precondor_stage_seconds_sum", {stage});
    made[stage + "_count"] = value(samples, "precondor_job_stages_total", labels(stage)) ?? value(samples, "precondor_stage_seconds_count", {stage});
  }
  return made;
}
// Adds a point for a job. A value that is missing, or a counter that has begun again, is NaN: a gap.
function remember(session, samples, now) {
  const job = session.train_job, history = past.get(job) || new PointBuffer();
  past.set(job, history);
  if (++history.readings < history.every && history.size) return;
  history.readings = 0;
  const is = counters(session, samples), was = history.broken ? null : history.base;
  if (history.broken) history.add({time: now, step: is.step});
  history.broken = false;
  const growth = name => !was || is[name] === null || was[name] === null || is[name] < was[name] ? NaN : is[name] - was[name];
  const perSecond = name => now > was?.now ? growth(name) / (now - was.now) : NaN;
  const point = {time: now, step: is.step, second_order: session.mode === "SECOND_ORDER" ? 1 : 0, loss: session.coordinator?.loss,
                 smoothed: session.coordinator?.smoothed_loss, steps: perSecond("step"), received: perSecond("received"), sent: perSecond("sent")};
  for (const stage of STAGES) {
    const count = growth(stage + "_count");
    point[stage] = count > 0 ? growth(stage) / count : NaN;
  }
  history.base = {...is, now};
  history.add(point);
}

const WIDTH = 480, HEIGHT = 200, LEFT = 64, RIGHT = 12, TOP = 8, BOTTOM = 36;  // of a plot and its margins
function drawn(parent, tag, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, is] of Object.entries(attributes)) made.setAttribute(name, is);
  if (text !== undefined) made.textContent = text;
  parent.append(made);
}
// An axis of values: its ends, its ticks and the place of a value in 0 ... 1.
function scale(values, logarithmic, fromZero) {
  let low = fromZero ? 0 : Infinity, high = -Infinity;
  for (const x of values) { low = Math.min(low, x); high = Math.max(high, x); }
  const ticks = [];
  if (logarithmic) {
    const marks = [];  // 1, 2 and 5 times the powers of ten
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); ++power) marks.push(...[1, 2, 5].map(m => m * 10 ** power));
    const first = marks.findLastIndex(m => m <= low * (1 + 1e-9)), end = Math.max(first + 1, marks.findIndex(m => m >= high * (1 - 1e-9)));
    const few = end - first < 7, span = Math.log10(marks[end] / marks[first]), every = Math.ceil(span / 6);
    for (let i = first; i <= end; ++i) if (few || (i % 3 === 0 && i / 3 % every === 0)) ticks.push(marks[i]);
    return {ticks, place: x => Math.log10(x / marks[first]) / span};
  }
  if (high - low <= 1e-9 * Math.max(Math.abs(low), Math.abs(high))) { low -= Math.abs(low) / 10 || 0; high += Math.abs(high) / 10 || 1; }
  const rough = (high - low) / 4, unit = 10 ** Math.floor(Math.log10(rough)), step = [1, 2, 5, 10].find(s => s * unit >= rough) * unit;
  const first = Math.floor(low / step + 1e-9), end = Math.ceil(high / step - 1e-9);
  for (let i = 0; i <= Math.min(end - first, 6); ++i) ticks.push((first + i) * step);
  return {ticks, place: x => (x / step - first) / (end - first)};
}
const SPANS = [5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400];
function timeTicks(from, to) {
  const span = SPANS.find(s => (to - from) / s <= 5) || Math.ceil((to - from) / 5 / 86400) * 86400;
  const shift = new Date(to * 1000).getTimezoneOffset() * 60, ticks = [];
  for (let at = Math.ceil((from - shift) / span) * span + shift; at <= to; at += span) ticks.push(at);
  const form = span < 60 ? {hour: "2-digit", minute: "2-digit", second: "2-digit"} : {hour: "2-digit", minute: "2-digit"};
  if (span >= 86400) Object.assign(form, {month: "short", day: "numeric"});
  return ticks.map(at => [at, new Date(at * 1000).toLocaleString("en", {...form, hourCycle: "h23"})]);
}
// series: fields and their names. shown(x) is a value with its unit. The axis is logarithmic if `logarithmic` says so, or
// by itself if the values are above 0 and differ much. A logarithmic axis leaves out zeros.
function plot(job, title, series, shown, {logarithmic, fromZero = false} = {}) {
  const history = past.get(job), figure = element("figure"), caption = element("figcaption", title);
  figure.append(caption);
  series.forEach(([field, name], i) => caption.append(element("span", `${name} ${shown(history.last(field))}`, `key c${i}`)));
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", `${title} of ${job}: ${series.map(([field, name]) => `${name} ${shown(history.last(field))}`).join(", ")}`);
  figure.append(svg);
  let values = [];
  for (let i = 0; i < history.size; ++i) for (const [field] of series) values.push(history.get(i, field));
  values = values.filter(Number.isFinite);
  const least = values.reduce((a, b) => Math.min(a, b), Infinity), most = values.reduce((a, b) => Math.max(a, b), -Infinity);
  if (logarithmic === undefined) logarithmic = least > 0 && most > 8 * least;
  const has = x => Number.isFinite(x) && (!logarithmic || x > 0);
  values = values.filter(has);
  const bottom = HEIGHT - BOTTOM, right = WIDTH - RIGHT;
  drawn(svg, "line", {class: "grid", x1: LEFT, x2: right, y1: bottom, y2: bottom});
  if (!values.length) {
    drawn(svg, "text", {class: "middle", x: (LEFT + right) / 2, y: HEIGHT / 2}, "no value yet");
    return figure;
  }
  const from = history.get(0, "time"), to = Math.max(history.last("time"), from + 10);
  const axis = scale(values, logarithmic, fromZero), x = at => LEFT + (right - LEFT) * (at - from) / (to - from);
  const y = at => bottom - (bottom - TOP) * axis.place(at);
  let phase = null, phases = 0;  // the x at which first order began
  for (let i = 0; i <= history.size; ++i) {
    const first = i < history.size && history.get(i, "second_order") === 0;
    if (first && phase === null) phase = x(history.get(i, "time"));
    if (first || phase === null) continue;
    const end = x(history.get(Math.min(i, history.size - 1), "time"));
    drawn(svg, "rect", {class: "phase", x: phase, y: TOP, width: Math.max(1, end - phase), height: bottom - TOP});
    phase = null;
    ++phases;
  }
  if (phases) caption.append(element("span", "first order", "key phase"));
  for (const tick of axis.ticks) {
    drawn(svg, "line", {class: "grid", x1: LEFT, x2: right, y1: y(tick), y2: y(tick)});
    drawn(svg, "text", {class: "end", x: LEFT - 6, y: y(tick) + 4}, shown(tick));
  }
  drawn(svg, "text", {class: "end", x: LEFT - 6, y: bottom + 17}, "time");
  drawn(svg, "text", {class: "end", x: LEFT - 6, y: bottom + 31}, "step");
  let i = 0;
  for (const [at, text] of timeTicks(from, to)) {
    while (i + 1 < history.size && history.get(i, "time") < at) ++i;
    const place = Math.min(Math.max(x(at), LEFT + 20), right - 20);
    drawn(svg, "line", {class: "grid", x1: x(at), x2: x(at), y1: TOP, y2: bottom + 4});
    drawn(svg, "text", {class: "middle", x: place, y: bottom + 17}, text);
    if (history.last("time") >= at) drawn(svg, "text", {class: "middle", x: place, y: bottom + 31}, number(history.get(i, "step"), 15));
  }
  series.forEach(([field], k) => {
    let line = [];
    for (let i = 0; i <= history.size; ++i) {
      const at = i < history.size ? history.get(i, field) : NaN;
      if (has(at)) line.push(`${x(history.get(i, "time")).toFixed(1)},${y(at).toFixed(1)}`);
      else if (line.length) {
        drawn(svg, "polyline", {class: `c${k}`, points: line.length > 1 ? line.join(" ") : `${line[0]} ${line[0]}`});
        line = [];
      }
    }
  });
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
    details.open = document.getElementsByTagName("section").length < MOST_OPEN;
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
    remember(session, samples, now);
    const plots = element("div", undefined, "plots");
    if (body.parentElement.open) {
      if (session.coordinator) plots.append(plot(job, "Loss", [["loss", "loss"], ["smoothed", "smoothed"]], number));
      plots.append(plot(job, "Steps", [["steps", "all ranks"]], x => number(x) + "/s", {logarithmic: false, fromZero: true}));
      if (session.shard) {
        plots.append(plot(job, "Mean time of a layer in a stage", STAGES.map(stage => [stage, stageName(stage, status.sessions.length)]), seconds, {logarithmic: true}),
                     plot(job, "Payload", [["received", "received"], ["sent", "sent"]], rate, {logarithmic: false, fromZero: true}));
      }
    }
    body.replaceChildren(facts(pairs), plots);
  });
  for (const job of past.keys()) if (!status.sessions.some(session => session.train_job === job)) past.delete(job);
  if (!status.sessions.length) {
    card("no-session", "Sessions").replaceChildren(element("p", "No session is open.", "soft"));
    kept.add("no-session");
  }
  for (const section of document.querySelectorAll("section")) if (!kept.has(section.id)) section.remove();
  before = {status, samples, now};
}
function showFailure(text) {
  const state = document.getElementById("state");
  state.textContent = text;
  state.className = "bad";
}
async function read() {
  let answers = null;
  try {
    const [status, metrics] = await Promise.all([fetch("/status"), fetch("/metrics")]);
    answers = [await status.json(), await metrics.text()];
  } catch (error) {
    showFailure("does not answer");
    for (const history of past.values()) history.broken = true;
  }
  try {
    if (answers) show(answers[0], parse(answers[1]));
  } catch (error) {
    showFailure(`this page has failed: ${error.message}`);
    console.error(error);
  }
  setTimeout(read, 2000);
}
read();
</script>
</body>
</html>
)html";

}  // namespace precondor
