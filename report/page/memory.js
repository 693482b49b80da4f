// Memory of the graph's own values over its steps: the arena with its real offsets, and above it what is allocated by itself.
{
  const draw = g => {
    const at = $("memory"), memory = g.memory, n = g.steps.length;
    const known = memory ? memory.blocks.filter(b => b.bytes) : [];
    if (!known.length) { at.innerHTML = head("Memory") + `<div class="empty">${memory ? "The graph has no values in memory of its own." : "There is no plan of this graph."}</div>`; return; }
    const arena = memory.arena, own = known.filter(b => b.offset == null);
    // Places for what has none of its own: the lowest that is free for as long as it lives.
    const packed = [];
    for (const b of own) {
      const beside = packed.filter(p => p.first <= b.last && b.first <= p.last).sort((a, c) => a.place - c.place);
      let place = 0;
      for (const p of beside) { if (place + b.bytes <= p.place) break; place = Math.max(place, p.place + p.bytes); }
      b.place = place;
      packed.push(b);
    }
    const above = Math.max(0, ...own.map(b => b.place + b.bytes));
    const gap = arena && above ? Math.max(arena, above) * 0.04 : 0;
    const alive = new Array(n).fill(arena);
    for (const b of own) for (let k = b.first; k <= Math.min(b.last, n - 1); k++) alive[k] += b.bytes;
    const peak = Math.max(...alive), when = alive.indexOf(peak);
    const unknown = memory.blocks.length - known.length;
    const note = `The most at once is <b>${bytes(peak)}</b>, at step ${when}, beside inputs. ` +
      (arena ? `The arena of ${bytes(arena)} stays between calls; offsets are real. ` : "The graph has no arena. ") +
      (above ? "Other values are allocated by themselves; their height is real, their place is not." : "") + (unknown ? ` ${plural(unknown, "value")} of unknown size not shown.` : "");
    const legend = '<span class="legend"><span><i class="dot kernel"></i>arena</span><span><i class="dot other"></i>own</span><span><i class="dot library"></i>made by a library call</span></span>';
    at.innerHTML = head("Memory", note, legend) + "<svg></svg>";
    const svg = at.querySelector("svg"), width = Math.max(360, svg.clientWidth || 800), height = 320;
    const left = 74, right = 10, top = 10, bottom = 38, total = arena + gap + above;
    const X = k => left + k / (n + 0.4) * (width - left - right), Y = b => height - bottom - b / total * (height - top - bottom);
    const parts = [];
    const scale = (zero, size) => {
      const pixels = Y(zero) - Y(zero + size);
      const unit = [2 ** 30, 2 ** 20, 2 ** 10, 1].find(u => size >= u) || 1;
      for (const v of ticks(0, size / unit, Math.max(1, pixels / 44))) {
        const y = Y(zero + v * unit).toFixed(1);
        parts.push(`<line class="grid" x1="${left}" x2="${width - right}" y1="${y}" y2="${y}"/>`);
        if (pixels > 16) parts.push(`<text class="tick" x="${left - 8}" y="${Number(y) + 4}" text-anchor="end">${bytes(v * unit).replace(/\.0+ /, " ")}</text>`);
      }
    };
    if (arena) scale(0, arena);
    if (above) scale(arena + gap, above);
    for (const k of ticks(0, n, Math.min(n, width / 70)).filter(Number.isInteger)) parts.push(`<text class="tick" x="${X(k).toFixed(1)}" y="${height - bottom + 16}" text-anchor="middle">${k}</text>`);
    parts.push(`<text class="tick" x="${(left + width - right) / 2}" y="${height - 6}" text-anchor="middle">step</text>`);
    if (arena) parts.push(`<rect x="${left}" y="${Y(arena)}" width="${width - left - right}" height="${Y(0) - Y(arena)}" fill="none" class="axis" stroke-dasharray="3 3"/>`);
    for (const b of known) {
      const from = b.offset == null ? arena + gap + b.place : b.offset, h = Math.max(0.7, Y(from) - Y(from + b.bytes));
      const x = X(b.first), w = Math.max(1.5, X(Math.min(b.last, n - 1) + 1) - x), y = Y(from) - h;
      const kind = b.kind === "arena" ? "kernel" : b.kind === "extern" ? "library" : "other";
      const text = (g.buffers[b.name] || {}).text || "";
      const told = `<b>${esc(b.name)}</b> ${esc(text)}<br>${bytes(b.bytes)}, ${b.offset == null ? "allocated by itself" : `arena + ${b.offset}`}<br>steps ${b.first} to ${b.returned ? "the end: it is returned" : b.last}` +
        (b.values.length > 1 ? `<br>also holds ${esc(b.values.slice(1).join(", "))}` : "");
      parts.push(`<g class="mark ${kind}" data-step="${b.first}" data-tip="${esc(told)}"><rect x="${x.toFixed(1)}" y="${y.toFixed(1)}" width="${w.toFixed(1)}" height="${h.toFixed(1)}" fill="var(--soft)" stroke="var(--solid)" stroke-width=".8"/>` +
        (h > 15 && w > 40 ? `<text class="mono" style="font-size:10.5px" x="${(x + 5).toFixed(1)}" y="${(y + h / 2 + 4).toFixed(1)}">${esc(fitted(b.name, w - 8, 6.5))}</text>` : "") + "</g>");
    }
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.style.height = height + "px";
    svg.innerHTML = parts.join("");
  };
  const mark = step => {
    for (const one of document.querySelectorAll("#memory rect.selected")) one.classList.remove("selected");
    for (const one of document.querySelectorAll(`#memory [data-step="${step}"] rect`)) one.classList.add("selected");
  };
  view("memory", draw, mark);
}
