"use strict";
// Shared by all drawings: data, numbers as text, elements, the tooltip and what is selected.
const DATA = JSON.parse(document.getElementById("data").textContent);
const $ = id => document.getElementById(id);
const esc = text => String(text).replace(/[&<>"']/g, c => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" })[c]);
const UNKNOWN = '<span class="unknown">unknown</span>';

function scaled(value, steps) {
  const [size, unit] = steps.find(([s]) => Math.abs(value) >= s) || steps[steps.length - 1];
  const shown = value / size;
  const digits = shown >= 99.95 || (size === 1 && Number.isInteger(value)) ? 0 : shown >= 9.95 ? 1 : 2;
  return (shown.toFixed(digits) + " " + unit).trim();
}
const time = s => s == null ? "unknown" : s === 0 ? "0 s" : scaled(s * 1e9, [[1e9, "s"], [1e6, "ms"], [1e3, "µs"], [1, "ns"]]);
const bytes = n => n == null ? "unknown" : scaled(n, [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"], [1, "B"]]);
const count = n => n == null ? "unknown" : scaled(n, [[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"], [1, ""]]);
const percent = p => p == null || !isFinite(p) ? "unknown" : p > 0 && p < 0.0005 ? "< 0.1 %" : p >= 0.0995 || p === 0 ? Math.round(100 * p) + " %" : (100 * p).toFixed(1) + " %";
const plural = (n, what) => `${n} ${what}${n === 1 ? "" : "s"}`;
const shown = text => text === "unknown" ? UNKNOWN : esc(text);

// Tooltips: any element with data-tip (HTML, escaped where it was made); what begins with + follows what is known of its step.
const tip = $("tip");
addEventListener("pointermove", event => {
  const at = event.target.closest ? event.target.closest("[data-tip]") : null;
  if (!at) { tip.hidden = true; return; }
  if (tip.at !== at) {
    const { tip: text, step } = at.dataset;
    tip.innerHTML = text.startsWith("+") ? stepTip(graph(), Number(step)) + text.slice(1) : text;
    tip.at = at;
  }
  tip.hidden = false;
  const x = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8);
  const below = event.clientY + 18;
  tip.style.left = Math.max(8, x) + "px";
  tip.style.top = (below + tip.offsetHeight > innerHeight - 8 ? event.clientY - tip.offsetHeight - 12 : below) + "px";
});
addEventListener("scroll", () => { tip.hidden = true; }, { passive: true, capture: true });

// What is shown: one graph, and one of its steps or none.
const state = { graph: 0, step: null };
const graph = () => DATA.graphs[state.graph];
const views = [];  // of {id, draw(graph), select(step)}; drawn when they come into sight

function view(id, draw, select = () => {}) {
  views.push({ id, draw, select, drawn: -1 });
}
function drawn(v) {
  if (v.drawn === state.graph) return;
  v.drawn = state.graph;
  v.draw(graph());
  v.select(state.step);
  $(v.id).dataset.drawn = state.graph;
}
const sight = new IntersectionObserver(entries => {
  for (const e of entries) {
    const v = views.find(one => one.id === e.target.id);
    if (v) { v.near = e.isIntersecting; if (e.isIntersecting) drawn(v); }
  }
}, { rootMargin: "300px" });

function select(step, reveal = false) {
  state.step = step;
  for (const v of views) if (v.drawn === state.graph) v.select(step, reveal);
  remember();
}
function show(number) {
  state.graph = number;
  state.step = null;
  for (const v of views) if (v.near || v.eager) drawn(v);
  for (const b of $("graphs").children) b.toggleAttribute("aria-current", Number(b.dataset.graph) === number);
  remember();
}
function remember() {
  const at = `#graph=${state.graph}` + (state.step == null ? "" : `&step=${state.step}`);
  try { history.replaceState(null, "", at); } catch { /* a page without an address */ }
}

// A mark of a step in a drawing: clicked, it selects.
addEventListener("click", event => {
  const at = event.target.closest("[data-step]");
  if (at && !at.closest("#detail .code-head")) select(Number(at.dataset.step), at.dataset.reveal != null || !at.closest("#steps"));
});

function stepTip(g, k) {
  const s = g.steps[k];
  const rows = [`<b>${esc(s.name)}</b>`];
  if (s.lines.length) rows.push(esc(s.lines[0]) + (s.lines.length > 1 ? ` and ${s.lines.length - 1} more` : ""));
  rows.push(`measured ${time(s.measured)}, roofline ${time(s.predicted)}`);
  rows.push(`moves ${bytes(s.moved)}, ${count(s.operations)} operations (estimates)`);
  return rows.join("<br>");
}
const inside = g => g.timeline.reduce((sum, e) => sum + e.seconds, 0);
const head = (title, note = "", tools = "") => `<div class="head"><h2>${title}</h2><span class="note">${note}</span>${tools}</div>`;
const LEGEND = '<span class="legend"><span><i class="dot kernel"></i>kernel</span><span><i class="dot library"></i>library call</span></span>';

// Labels that do not overlap: `place` tells whether a rectangle is free, and takes it.
function placer() {
  const cells = new Map();
  const keys = (x, y, w, h) => {
    const found = [];
    for (let i = Math.floor(x / 80); i <= Math.floor((x + w) / 80); i++)
      for (let j = Math.floor(y / 40); j <= Math.floor((y + h) / 40); j++) found.push(i * 100003 + j);
    return found;
  };
  return {
    take(x, y, w, h) { for (const k of keys(x, y, w, h)) (cells.get(k) || cells.set(k, []).get(k)).push([x, y, w, h]); },
    place(x, y, w, h) {
      for (const k of keys(x, y, w, h))
        for (const [a, b, c, d] of cells.get(k) || []) if (x < a + c && a < x + w && y < b + d && b < y + h) return false;
      this.take(x, y, w, h);
      return true;
    },
  };
}
const fitted = (text, width, each = 6.4) => {
  const n = Math.floor(width / each);
  return text.length <= n ? text : n < 4 ? "" : text.slice(0, n - 1) + "…";
};
