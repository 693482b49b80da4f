// The graph as a picture: a box for each kernel (a fusion group) and library call, edges with the bytes that pass.
{
  let camera = null, content = null, svg = null, layout = null;

  const line = path => {
    const at = path.map(v => [v.x, v.y]);
    at[0][1] += BOX.height;
    let d = `M${at[0][0].toFixed(1)},${at[0][1]}`;
    for (let i = 1; i < at.length; i++) {
      const [x0, y0] = at[i - 1], [x1, y1] = at[i];
      const mid = (y0 + y1) / 2, before = path[i - 1], after = path[i];
      if (before.column !== after.column) {
        // Down to the end of the column, and through the gutter to the head of the next.
        const side = after.gutter + (before.id % 9 - 4) * 5, low = before.bottom - 26, top = -30;
        d += `C${x0.toFixed(1)},${low} ${x0.toFixed(1)},${low} ${((x0 + side) / 2).toFixed(1)},${low}S${side},${low} ${side},${low - 60}V${top + 40}S${side},${top} ${((x1 + side) / 2).toFixed(1)},${top}S${x1.toFixed(1)},${top} ${x1.toFixed(1)},${y1}`;
      } else d += `C${x0.toFixed(1)},${mid} ${x1.toFixed(1)},${mid} ${x1.toFixed(1)},${y1}`;
      // A lane runs straight beside the boxes of its level.
      if (i < at.length - 1) { at[i][1] = y1 + BOX.height; d += `V${at[i][1]}`; }
    }
    return d;
  };

  const box = (g, b) => {
    const s = g.steps[b.step], x = (b.x - b.width / 2).toFixed(1), y = b.y;
    const inputs = s.reads.filter(([n]) => (g.buffers[n] || {}).role === "input").length;
    const results = s.writes.filter(([n]) => (g.buffers[n] || {}).role === "result").length;
    const passes = [inputs ? `${inputs} in` : "", results ? `${results} out` : ""].filter(Boolean).join(" · ");
    const sub = s.operators.join(" · ") || s.kind;
    const figures = [s.measured != null ? time(s.measured) : "", bytes(s.moved)].filter(Boolean).join(" · ");
    return `<g class="box ${s.kind}" data-step="${b.step}" data-tip="+" transform="translate(${x},${y})">` +
      `<rect class="body" width="${b.width}" height="${BOX.height}" rx="7"/><rect width="4" height="${BOX.height - 14}" y="7" x="7" rx="2" fill="var(--solid)"/>` +
      `<text class="title" x="19" y="19">${esc(fitted(s.name, b.width - 27, 6.7))}</text>` +
      `<text class="muted" x="19" y="35">${esc(fitted(sub, b.width - 27, 6.2))}</text>` +
      `<text x="19" y="51">${esc(figures)}</text>` +
      (passes ? `<text class="muted" x="${b.width - 9}" y="51" text-anchor="end">${fitted(passes, b.width - 40 - figures.length * 6.3, 6.2)}</text>` : "") + "</g>";
  };

  const aim = () => {
    content.setAttribute("transform", `translate(${camera.x},${camera.y}) scale(${camera.scale})`);
    svg.classList.toggle("far", camera.scale < 0.34);
  };
  const zoom = (by, x, y) => {
    const scale = Math.min(2.5, Math.max(0.02, camera.scale * by));
    camera.x = x - (x - camera.x) * scale / camera.scale;
    camera.y = y - (y - camera.y) * scale / camera.scale;
    camera.scale = scale;
    aim();
  };
  const whole = () => {
    const r = svg.getBoundingClientRect();
    camera.scale = Math.min(1, (r.width - 40) / layout.width, (r.height - 40) / (layout.height + 60));
    camera.x = (r.width - layout.width * camera.scale) / 2;
    camera.y = (r.height - (layout.height - 20) * camera.scale) / 2;
    aim();
  };
  const begin = () => {
    const r = svg.getBoundingClientRect();
    camera = { x: 0, y: 40, scale: Math.max(0.6, Math.min(1, (r.width - 40) / layout.width)) };
    const first = layout.boxes[0] || { x: 0 };
    const fits = layout.width * camera.scale <= r.width;
    camera.x = fits ? (r.width - layout.width * camera.scale) / 2 : Math.min(r.width / 2 - first.x * camera.scale, 40);
    aim();
  };

  const draw = g => {
    const at = $("picture");
    if (!g.steps.length) { at.innerHTML = head("Graph") + '<div class="empty">There is no plan of this graph.</div>'; return; }
    layout = layered(g);
    const tools = `<span class="tools">${LEGEND}<button class="tool" type="button" data-do="in" title="Zoom in">+</button>` +
      '<button class="tool" type="button" data-do="out" title="Zoom out">−</button><button class="tool" type="button" data-do="all">Whole graph</button></span>';
    const free = placer();
    for (const b of layout.boxes) free.take(b.x - b.width / 2, b.y, b.width, BOX.height);
    const parts = [], labels = [];
    for (const e of layout.edges) {
      const told = `<b>${esc(g.steps[e.from].name)} → ${esc(g.steps[e.to].name)}</b><br>${bytes(e.bytes)}: ${esc(e.names.join(", "))}<br>apart: ${esc(e.why)}`;
      const width = e.bytes ? Math.min(5, 1 + Math.max(0, Math.log10(e.bytes / 1024)) * 0.7) : 1;
      parts.push(`<path class="edge" data-from="${e.from}" data-to="${e.to}" d="${line(e.path)}" stroke-width="${width.toFixed(1)}" data-tip="${esc(told)}"/>`);
      const a = e.path[e.path.length - 2], b = e.path[e.path.length - 1], text = bytes(e.bytes), w = text.length * 6 + 6;
      for (const part of a.column === b.column ? [0.5, 0.68, 0.32] : []) {
        const y0 = a.y + BOX.height, y = y0 + (b.y - y0) * part, t = part;
        const x = a.x * (1 - t) ** 3 + 3 * a.x * (1 - t) ** 2 * t + 3 * b.x * (1 - t) * t * t + b.x * t ** 3;
        if (free.place(x - w / 2, y - 7, w, 13)) { labels.push(`<g class="bytes"><rect x="${(x - w / 2 + 1).toFixed(1)}" y="${(y - 7).toFixed(1)}" width="${w - 2}" height="13"/><text x="${x.toFixed(1)}" y="${(y + 3.5).toFixed(1)}" text-anchor="middle">${text}</text></g>`); break; }
      }
    }
    const unread = g.steps.length > 1 ? "" : " It is a single step.";
    at.innerHTML = head("Graph", `A box is one kernel: what was fused is inside. Edges carry what one step writes and another reads. In a box: its time, the bytes that it moves, how many inputs (in) and results (out) of the graph it touches.${unread} Drag to move, scroll with Ctrl to zoom.`, tools) +
      `<svg role="img" aria-label="Graph of ${plural(g.steps.length, "step")}"><g>${parts.join("")}${labels.join("")}${layout.boxes.map(b => box(g, b)).join("")}</g></svg>`;
    svg = at.querySelector("svg");
    content = svg.firstChild;
    begin();
    let from = null, moved = false;
    svg.onpointerdown = e => { from = [e.clientX - camera.x, e.clientY - camera.y, e.clientX, e.clientY]; moved = false; };
    svg.onpointermove = e => {
      if (!from || !e.buttons) return;
      if (Math.hypot(e.clientX - from[2], e.clientY - from[3]) > 4 && !moved) { moved = true; svg.setPointerCapture(e.pointerId); }
      if (moved) { camera.x = e.clientX - from[0]; camera.y = e.clientY - from[1]; aim(); }
    };
    svg.onpointerup = () => { from = null; };
    svg.addEventListener("click", e => { if (moved) e.stopPropagation(); }, true);
    svg.addEventListener("wheel", e => {
      if (!e.ctrlKey && !e.metaKey) return;
      e.preventDefault();
      const r = svg.getBoundingClientRect();
      zoom(Math.exp(-e.deltaY * 0.003), e.clientX - r.left, e.clientY - r.top);
    }, { passive: false });
    at.querySelector(".tools").onclick = e => {
      const r = svg.getBoundingClientRect(), what = e.target.dataset.do;
      if (what === "all") whole(); else if (what) zoom(what === "in" ? 1.35 : 1 / 1.35, r.width / 2, r.height / 2);
    };
  };

  const mark = (step, reveal) => {
    if (!svg || !svg.isConnected) return;
    for (const one of svg.querySelectorAll(".box.selected, .edge.near")) one.classList.remove("selected", "near");
    if (step == null) return;
    const found = svg.querySelector(`.box[data-step="${step}"]`);
    if (found) found.classList.add("selected");
    for (const e of svg.querySelectorAll(`.edge[data-from="${step}"], .edge[data-to="${step}"]`)) e.classList.add("near");
    const b = layout.boxes[step], r = svg.getBoundingClientRect();
    const x = b.x * camera.scale + camera.x, y = (b.y + BOX.height / 2) * camera.scale + camera.y;
    if (reveal && (x < 60 || y < 30 || x > r.width - 60 || y > r.height - 30)) {
      camera.x += r.width / 2 - x;
      camera.y += r.height / 2 - y;
      aim();
    }
  };
  view("picture", draw, mark);
}
