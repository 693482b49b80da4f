// The timeline of a measured call, and the roofline.
function ticks(low, high, wanted) {
  const raw = (high - low) / Math.max(1, wanted), unit = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map(f => f * unit).find(f => f >= raw * 0.999);
  const found = [];
  for (let v = Math.ceil(low / step - 1e-9) * step; v <= high + step * 1e-9; v += step) found.push(Math.abs(v) < step / 1e6 ? 0 : v);
  return found;
}
const timeAt = (s, step) => {
  const [size, unit] = [[1, "s"], [1e-3, "ms"], [1e-6, "µs"], [1e-9, "ns"]].find(([u]) => Math.max(s, step) >= u * 0.9999) || [1e-9, "ns"];
  return `${Number((s / size).toPrecision(4))} ${unit}`;
};

{
  let range = null, drawing = null;

  const draw = g => {
    range = null;
    const at = $("timeline");
    if (!g.timeline.length) {
      const why = g.measured ? "The graph calls no kernel." : `Not measured: ${esc(g.unmeasured || "unknown")}.`;
      at.innerHTML = head("Timeline") + `<div class="empty">${why}</div>`;
      drawing = null;
      return;
    }
    const tools = `<span class="tools">${LEGEND}<button class="tool" type="button" id="whole-call">Whole call</button></span>`;
    at.innerHTML = head("Timeline", `<b>Measured</b>: the fastest of ${g.measured.calls} calls with each function timed, ${time(g.measured.timed_seconds)}. The dark part of a bar is what the roofline allows. Between bars the wrapper runs. Drag to zoom.`, tools) + "<svg></svg>";
    drawing = at.querySelector("svg");
    $("whole-call").onclick = () => { range = null; bars(g); };
    let from = null;
    const place = e => (e.clientX - drawing.getBoundingClientRect().left) / drawing.getBoundingClientRect().width;
    drawing.onpointerdown = e => { from = place(e); };
    drawing.onpointerup = e => {
      if (from == null) return;
      const [a, b] = [from, place(e)].sort((x, y) => x - y), [low, high] = range || [0, g.measured.timed_seconds];
      from = null;
      if (b - a < 0.01) return;
      range = [low + (high - low) * a, low + (high - low) * b];
      bars(g);
      addEventListener("click", one => one.stopPropagation(), { capture: true, once: true });
    };
    drawing.ondblclick = () => { range = null; bars(g); };
    bars(g);
  };

  const bars = g => {
    const width = drawing.clientWidth || 800, height = 92, top = 26, tall = 40;
    const [low, high] = range || [0, g.measured.timed_seconds];
    const x = s => (s - low) / (high - low) * width;
    const marks = ticks(low, high, width / 110);
    const step = marks.length > 1 ? marks[1] - marks[0] : high - low;
    const parts = marks.map(t => `<line class="grid" x1="${x(t).toFixed(1)}" x2="${x(t).toFixed(1)}" y1="16" y2="${height}"/>` +
      `<text class="tick" x="${x(t).toFixed(1)}" y="11" text-anchor="${x(t) < 20 ? "start" : x(t) > width - 30 ? "end" : "middle"}">${timeAt(t, step)}</text>`);
    let last = -9;
    for (const e of g.timeline) {
      const a = Math.max(-2, x(e.start)), b = Math.min(width + 2, x(e.start + e.seconds));
      if (b < 0 || a > width || (b - a < 0.4 && a - last < 0.4)) continue;
      last = b;
      const s = e.step == null ? null : g.steps[e.step], w = Math.max(0.8, b - a);
      const told = s ? "+" : `<b>${esc(e.name)}</b><br>${time(e.seconds)}`;
      const at = s ? `data-step="${e.step}" class="mark ${s.kind}"` : 'class="other"';
      const ideal = s && s.predicted != null ? Math.min(1, s.predicted / e.seconds) : 0;
      const label = s && w > 34 ? fitted(s.name, w - 10, 6.9) : "";
      parts.push(`<g ${at} data-tip="${esc(told)}"><rect class="whole" x="${a.toFixed(2)}" y="${top}" width="${w.toFixed(2)}" height="${tall}" rx="${Math.min(3, w / 4).toFixed(1)}" ${w < 3 ? 'fill="var(--solid)" fill-opacity=".5"' : 'fill="var(--soft)" stroke="var(--panel)" stroke-width=".6"'}/>` +
        `<rect x="${a.toFixed(2)}" y="${top + tall - 8}" width="${(w * ideal).toFixed(2)}" height="8" rx="${Math.min(2, w / 4).toFixed(1)}" fill="var(--solid)"/>` +
        (label ? `<text class="mono" x="${(a + 5).toFixed(1)}" y="${top + 19}" style="font-size:11px">${esc(label)}</text>` : "") + "</g>");
    }
    drawing.setAttribute("viewBox", `0 0 ${width} ${height - 18}`);
    drawing.style.height = height - 18 + "px";
    drawing.innerHTML = parts.join("");
    mark(state.step);
  };

  const mark = step => {
    if (!drawing) return;
    for (const one of drawing.querySelectorAll(".whole.selected")) one.classList.remove("selected");
    for (const one of drawing.querySelectorAll(`[data-step="${step}"] .whole`)) one.classList.add("selected");
  };
  view("timeline", draw, mark);
  addEventListener("resize", () => { if (drawing) bars(graph()); });
}

{
  const points = g => g.steps.map((s, k) => ({ s, k })).filter(({ s }) => s.measured && s.moved && s.operations != null);

  const draw = g => {
    const at = $("roofline"), all = points(g), roof = g.ceilings;
    if (!roof || !all.length) { at.innerHTML = head("Roofline") + '<div class="empty">No step has a measured time and a known amount of work.</div>'; return; }
    const hidden = g.steps.length - all.length;
    const note = `Operations a second against operations for each byte that must be moved. <b>Measured here</b>: both roofs and the height of each point. <b>Estimated</b>: its bytes and operations (weighted: an addition counts 1). The area is the share of the time.` +
      (hidden ? ` ${plural(hidden, "step")} not shown: work or time unknown.` : "");
    at.innerHTML = head("Roofline", note, LEGEND) + "<svg></svg>";
    const svg = at.querySelector("svg"), width = Math.max(360, svg.clientWidth || 800), height = 400;
    const left = 64, right = 18, top = 14, bottom = 44;
    // The flat roof: of the fastest products that the graph has; scalar arithmetic has its own.
    const rates = Object.entries(roof.products).filter(([, rate]) => rate > roof.operations * 1.2).sort((a, b) => b[1] - a[1]);
    const peak = rates.length ? rates[0][1] : roof.operations, best = Math.max(roof.best, roof.bandwidth), wide = roof.best > roof.bandwidth * 1.25;
    const known = all.filter(({ s }) => s.operations > 0);
    const lowX = Math.min(0.05, ...known.map(({ s }) => s.operations / s.moved)) / 1.6;
    const highX = Math.max(peak / roof.bandwidth * 4, ...known.map(({ s }) => s.operations / s.moved * 1.6));
    const at_x = s => Math.max(lowX * 1.15, s.operations / s.moved);
    const at_y = s => Math.max(s.operations, s.moved * lowX * 1.15) / s.measured;
    const lowY = Math.min(peak / 1e4, ...all.map(({ s }) => at_y(s))) / 1.8, highY = Math.max(peak, ...all.map(({ s }) => at_y(s))) * 2.2;
    const lx = Math.log10(lowX), hx = Math.log10(highX), ly = Math.log10(lowY), hy = Math.log10(highY);
    const X = v => left + (Math.log10(v) - lx) / (hx - lx) * (width - left - right);
    const Y = v => height - bottom - (Math.log10(v) - ly) / (hy - ly) * (height - top - bottom);
    const parts = [];
    for (let p = Math.ceil(lx); p <= hx; p++) {
      const x = X(10 ** p).toFixed(1);
      parts.push(`<line class="grid" x1="${x}" x2="${x}" y1="${top}" y2="${height - bottom}"/><text class="tick" x="${x}" y="${height - bottom + 17}" text-anchor="middle">${p < 0 ? (10 ** p).toFixed(-p) : count(10 ** p)}</text>`);
    }
    for (let p = Math.ceil(ly); p <= hy; p++) {
      const y = Y(10 ** p).toFixed(1);
      parts.push(`<line class="grid" x1="${left}" x2="${width - right}" y1="${y}" y2="${y}"/><text class="tick" x="${left - 8}" y="${Number(y) + 4}" text-anchor="end">${count(10 ** p)}/s</text>`);
    }
    parts.push(`<text class="tick" x="${(left + width - right) / 2}" y="${height - 8}" text-anchor="middle">operations for each byte</text>`);
    const free = placer();
    const names = [];
    const roofLine = (bandwidth, dash, label, where) => {
      const knee = Math.min(highX, peak / bandwidth);
      const points = [[Math.max(lowX, lowY / bandwidth), Math.max(lowX * bandwidth, lowY)], [knee, knee * bandwidth]];
      parts.push(`<path d="M${points.map(([a, b]) => `${X(a).toFixed(1)},${Y(b).toFixed(1)}`).join("L")}" fill="none" stroke="var(--ink)" stroke-width="1.5" ${dash ? 'stroke-dasharray="5 4"' : ""}/>`);
      for (let i = 0; i <= 60; i++) free.take(X(points[0][0]) + (X(points[1][0]) - X(points[0][0])) * i / 60 - 3, Y(points[0][1]) + (Y(points[1][1]) - Y(points[0][1])) * i / 60 - 3, 6, 6);
      const a = points[0], b = points[1], slope = Math.atan2(Y(b[1]) - Y(a[1]), X(b[0]) - X(a[0])) * 180 / Math.PI;
      const px = X(a[0]) + (X(b[0]) - X(a[0])) * where, py = Y(a[1]) + (Y(b[1]) - Y(a[1])) * where;
      names.push(`<text class="muted halo" pointer-events="none" transform="translate(${px.toFixed(1)},${(py + (dash ? -7 : 15)).toFixed(1)}) rotate(${slope.toFixed(1)})" text-anchor="middle">${label} ${bytes(bandwidth)}/s</text>`);
    };
    roofLine(roof.bandwidth, false, "memory", 0.2);
    if (wide) roofLine(best, true, "caches", 0.35);
    const knee = peak / (wide ? best : roof.bandwidth);
    parts.push(`<line x1="${X(Math.max(lowX, knee)).toFixed(1)}" x2="${width - right}" y1="${Y(peak).toFixed(1)}" y2="${Y(peak).toFixed(1)}" stroke="var(--ink)" stroke-width="1.5"/>`);
    free.take(X(Math.max(lowX, knee)), Y(peak) - 3, width, 6);
    const peakText = `${rates.length ? rates[0][0] : "float32"} product ${count(peak)}/s`;
    for (const [what, rate] of [...rates.slice(1).map(([dtype, r]) => [`${dtype} product`, r]), ...(rates.length ? [["scalar arithmetic, float32", roof.operations]] : [])]) {
      const from = X(Math.max(lowX, rate / (wide ? best : roof.bandwidth))), y = Y(rate), text = `${what} ${count(rate)}/s`;
      parts.push(`<line x1="${from.toFixed(1)}" x2="${width - right}" y1="${y.toFixed(1)}" y2="${y.toFixed(1)}" stroke="var(--muted)" stroke-dasharray="2 4"/><text class="muted halo" x="${width - right - 2}" y="${(y - 6).toFixed(1)}" text-anchor="end">${text}</text>`);
      free.take(width - right - text.length * 6.3, y - 19, text.length * 6.3, 22);
    }
    parts.push(`<text class="muted halo" x="${width - right - 2}" y="${(Y(peak) - 7).toFixed(1)}" text-anchor="end">${peakText}</text>`);
    free.take(width - right - peakText.length * 6.3, Y(peak) - 20, peakText.length * 6.3, 16);
    const total = all.reduce((sum, { s }) => sum + s.measured, 0);
    all.sort((a, b) => b.s.measured - a.s.measured);
    const radius = s => Math.max(3.5, 22 * Math.sqrt(s.measured / total));
    for (const { s } of all) { const r = radius(s); free.take(X(at_x(s)) - r * 0.7, Y(at_y(s)) - r * 0.7, 1.4 * r, 1.4 * r); }
    const labels = [], named = new Set();
    for (const { s, k } of all) {
      const x = X(at_x(s)), y = Y(at_y(s)), r = radius(s);
      parts.push(`<circle class="mark ${s.kind}" data-step="${k}" data-tip="${esc(`+<br>${percent(s.predicted / s.measured)} of the roofline${s.operations ? "" : "<br>no arithmetic: shown at the left edge"}`)}" cx="${x.toFixed(1)}" cy="${y.toFixed(1)}" r="${r.toFixed(1)}" fill="var(--solid)" fill-opacity=".55" stroke="var(--solid)"/>`);
      if (labels.length >= 14 || named.has(s.name)) continue;
      const text = s.name.length > 30 ? s.name.slice(0, 29) + "…" : s.name, w = text.length * 6.6 + 4;
      for (const [lx0, ly0, anchor] of [[x + r + 4, y + 4, "start"], [x - r - 4, y + 4, "end"], [x, y - r - 6, "middle"], [x, y + r + 14, "middle"]]) {
        const x0 = anchor === "start" ? lx0 : anchor === "end" ? lx0 - w : lx0 - w / 2;
        if (x0 < left || x0 + w > width - right || ly0 < top + 10 || ly0 > height - bottom - 4 || !free.place(x0, ly0 - 11, w, 14)) continue;
        named.add(s.name);
        labels.push(`<text class="mono halo" pointer-events="none" style="font-size:11px" x="${lx0.toFixed(1)}" y="${ly0.toFixed(1)}" text-anchor="${anchor}">${esc(text)}</text>`);
        break;
      }
    }
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.style.height = height + "px";
    svg.innerHTML = [...parts, ...names, ...labels].join("");
  };

  const mark = step => {
    for (const one of document.querySelectorAll("#roofline circle.selected")) one.classList.remove("selected");
    const found = document.querySelector(`#roofline circle[data-step="${step}"]`);
    if (found) found.classList.add("selected");
  };
  view("roofline", draw, mark);
}
