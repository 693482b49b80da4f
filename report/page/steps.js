// The table of steps, and everything about the one that is selected.
let order = [];  // steps as the table shows them
{
  const COLUMNS = [
    ["step", s => s.k, "left"], ["measured", s => s.measured], ["", s => s.measured, "left"], ["roofline", s => s.predicted],
    ["reached", s => s.measured ? s.predicted / s.measured : null], ["moved", s => s.moved], ["limit", s => s.bound],
  ];
  const SOON = 60;  // rows that are there at once; the others follow when the page can be used
  let sorted = [0, false], rows = new Map(), round = 0;

  const row = (g, s, k, longest) => {
    const share = s.measured != null && longest ? s.measured / longest : null;
    const ideal = s.measured ? Math.min(100, 100 * s.predicted / s.measured) : 0;
    const line = s.lines.length ? s.lines[0].replace(/ in [^:]*: .*/, "") : "";
    return `<tr data-step="${k}" class="${s.kind}" ${s.kind === "kernel" ? `data-kernel="${esc(s.name)}"` : ""}>` +
      `<td class="name"><i class="dot"></i><span class="mono">${esc(s.name)}</span><span class="place">${esc(line)}</span></td><td>${s.with == null || s.measured != null ? shown(time(s.measured)) : `<span class="unknown">with step ${s.with}</span>`}</td>` +
      `<td class="bar">${share == null ? "" : `<span class="meter" style="width:${Math.max(1, 100 * share).toFixed(1)}%"><i style="width:${ideal.toFixed(0)}%"></i></span>`}</td>` +
      `<td>${shown(time(s.predicted))}</td><td>${shown(percent(s.measured ? s.predicted / s.measured : null))}</td><td>${shown(bytes(s.moved))}</td><td>${s.bound ? esc(s.bound) : UNKNOWN}</td></tr>`;
  };

  const draw = g => {
    const at = $("steps");
    sorted = [0, false];
    const note = "In the order in which they run. <b>measured</b> is timed; <b>roofline</b>, <b>moved</b> and <b>limit</b> are estimates of a model: every value read once and written once.";
    const tools = '<span class="tools"><input id="filter" type="search" placeholder="Filter: name, operator, line ( / )" aria-label="Filter the steps" autocomplete="off" spellcheck="false"></span>';
    at.innerHTML = head(`Kernels and calls <span class="note" id="counted"></span>`, note, tools) +
      `<div class="table-wrap" tabindex="0"><table class="steps"><colgroup><col><col style="width:92px"><col style="width:120px"><col style="width:92px"><col style="width:84px"><col style="width:92px"><col style="width:96px"></colgroup><thead><tr>${COLUMNS.map(([name, , side], i) => `<th class="${side || ""}" ${name ? "" : 'aria-label="measured, as a bar" data-tip="measured; the dark part is what the roofline allows"'} data-column="${i}" tabindex="0">${name}</th>`).join("")}</tr></thead><tbody></tbody></table></div>`;
    const longest = Math.max(0, ...g.steps.map(s => s.measured || 0));
    const body = at.querySelector("tbody");
    const made = document.createElement("template");
    made.innerHTML = `<table><tbody>${g.steps.map((s, k) => row(g, s, k, longest)).join("")}</tbody></table>`;
    rows = new Map([...made.content.querySelectorAll("tr")].map(r => [Number(r.dataset.step), r]));
    const words = g.steps.map(s => [s.name, ...s.operators, ...s.lines, s.bound, s.kind, ...s.reads.map(r => r[0]), ...s.writes.map(r => r[0])].join(" ").toLowerCase());
    const arrange = () => {
      const asked = $("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
      const key = COLUMNS[sorted[0]][1];
      order = g.steps.map((s, k) => ({ ...s, k })).filter(s => asked.every(w => words[s.k].includes(w)));
      const of = s => key(s) ?? (sorted[1] ? -Infinity : Infinity);
      order.sort((a, b) => (of(a) < of(b) ? -1 : of(a) > of(b) ? 1 : a.k - b.k) * (sorted[1] ? -1 : 1));
      order = order.map(s => s.k);
      body.replaceChildren(...order.slice(0, SOON).map(k => rows.get(k)));
      const now = ++round;
      if (order.length > SOON) setTimeout(() => { if (now === round) body.append(...order.slice(SOON).map(k => rows.get(k))); }, 80);
      $("counted").textContent = order.length === g.steps.length ? String(g.steps.length) : `${order.length} of ${g.steps.length}`;
      for (const th of at.querySelectorAll("th")) th.toggleAttribute("aria-sort", false);
      at.querySelector(`th[data-column="${sorted[0]}"]`).setAttribute("aria-sort", sorted[1] ? "descending" : "ascending");
    };
    $("filter").oninput = arrange;
    const sort = e => {
      const th = e.target.closest("th");
      if (!th) return;
      const i = Number(th.dataset.column);
      sorted = [i, sorted[0] === i ? !sorted[1] : i > 0];
      arrange();
    };
    at.querySelector("thead").onclick = sort;
    at.querySelector("thead").onkeydown = e => { if (e.key === "Enter") sort(e); };
    arrange();
  };

  const mark = (step, reveal) => {
    for (const r of document.querySelectorAll("#steps tr.selected")) r.classList.remove("selected");
    const r = rows.get(step);
    if (!r) return;
    r.classList.add("selected");
    const box = document.querySelector("#steps .table-wrap");
    const above = r.offsetTop - 34 - box.scrollTop, below = r.offsetTop + r.offsetHeight - box.clientHeight - box.scrollTop;
    if (reveal && (above < 0 || below > 0)) box.scrollTop += above < 0 ? above : below;
  };
  view("steps", draw, mark);
  views[views.length - 1].eager = true;
}

{
  const WORDS = /(\/\/[^\n]*|#(?!include|pragma)[^\n]*)|("(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')|\b(for|if|else|const|auto|float|double|int|int64_t|bool|void|return|static|inline|template|typename|alignas|extern|def|in|not|and|or|is|None|True|False|while|assert|import)\b|\b(0x[\da-fA-Fp.+-]+|\d[\d.]*(?:e[+-]?\d+)?f?)\b|\b([A-Za-z_]\w*)(?=\()/g;
  const coloured = code => {
    let text = "", last = 0;
    for (const m of code.matchAll(WORDS)) {
      const kind = m[1] ? "c" : m[2] ? "n" : m[3] ? "k" : m[4] ? "n" : "f";
      text += esc(code.slice(last, m.index)) + `<span class="${kind}">${esc(m[0])}</span>`;
      last = m.index + m[0].length;
    }
    return text + esc(code.slice(last));
  };
  const link = (g, k) => `<a class="step" data-step="${k}" data-reveal="">${esc(g.steps[k].name)}</a>`;
  const table = (g, list) => `<table class="buffers">${list.map(([name, size]) => {
    const b = g.buffers[name] || {}, where = b.role || (b.step != null ? `of ${link(g, b.step)}` : "");
    return `<tr><td><span class="mono">${esc(name)}</span> <span class="type">${esc(b.text || "")} ${where}</span></td><td>${shown(bytes(size))}</td></tr>`;
  }).join("")}</table>`;

  const about = (g, k) => {
    const s = g.steps[k], parts = [];
    const kind = { kernel: "Kernel", library: "Library call", copy: "Copy into an input", sizes: "Sizes from data" }[s.kind];
    parts.push(`<p class="detail-title ${s.kind}"><i class="dot"></i>${esc(s.name)}</p><div class="kind">${kind}, step ${k} of ${esc(g.name)}${s.function ? `, run by <span class="mono">${esc(s.function)}</span> as one with others${s.with == null ? ", whose time is in that of this one" : `: its time is in that of ${link(g, s.with)}`}` : ""}</div>`);
    const share = s.measured != null && g.measured ? ` (${percent(s.measured / inside(g))})` : "";
    const facts = [["Measured", time(s.measured) + share], ["Roofline, estimate", time(s.predicted)], ["Reached", percent(s.measured ? s.predicted / s.measured : null)], ["Limit", s.bound || "unknown"],
      ["Bytes, estimate", bytes(s.moved)], ["Bandwidth", s.measured && s.moved != null ? bytes(s.moved / s.measured) + "/s" : "unknown"],
      ["Operations, estimate", count(s.operations)], ["Rate", s.measured && s.operations != null ? count(s.operations / s.measured) + "/s" : "unknown"]];
    parts.push(`<dl class="facts">${facts.map(([a, b]) => `<dt>${a}</dt><dd>${shown(b)}</dd>`).join("")}</dl>`);
    if (s.why_library.length) parts.push(`<h3>Why it is a library call</h3>${s.why_library.map(esc).join("<br>")}`);
    parts.push(`<h3>Lines of the program</h3>${s.lines.length ? `<ul class="plain">${s.lines.map(l => `<li class="mono">${esc(l)}</li>`).join("")}</ul>` : UNKNOWN}`);
    const beside = g.edges.filter(([a, b]) => a === k || b === k), seen = new Map();
    for (const [a, b, name, size, why] of beside) {
      const other = a === k ? b : a, known = seen.get(other) || seen.set(other, { before: other < k, names: [], bytes: 0, why }).get(other);
      if (name) { known.names.push(name); known.bytes = size == null || known.bytes == null ? null : known.bytes + size; }
    }
    if (seen.size) {
      const list = [...seen].sort((a, b) => a[0] - b[0]).slice(0, 60).map(([other, e]) =>
        `<li>${e.names.length ? (e.before ? "reads " : "feeds ") : "reads the same as "}${link(g, other)}${e.names.length ? `, ${bytes(e.bytes)}` : ""}<span class="why">${esc(e.why)}</span></li>`);
      parts.push(`<h3>Why it is not fused with its neighbours</h3><ul class="plain">${list.join("")}</ul>`);
    }
    parts.push(`<h3>Reads</h3>${s.reads.length ? table(g, s.reads) : "nothing"}<h3>Writes</h3>${s.writes.length ? table(g, s.writes) : "nothing"}`);
    if (s.code) parts.push(`<div class="code-head"><h3>Code</h3><button type="button" id="copy-code">copy</button></div><pre><code>${coloured(s.code)}</code></pre>`);
    return parts.join("");
  };

  const mark = step => {
    const at = $("detail"), g = graph();
    if (step == null || !g.steps[step]) {
      at.innerHTML = '<div class="empty">Select a kernel or call, in the table or in a drawing: its times, its code, the lines of the program that it comes from, and why it is not fused with its neighbours are shown here.<br><br><kbd>j</kbd> <kbd>k</kbd> go through the table, <kbd>?</kbd> shows all keys.</div>';
      return;
    }
    at.innerHTML = about(g, step);
    at.scrollTop = 0;
    const copy = $("copy-code");
    if (copy) copy.onclick = () => { navigator.clipboard.writeText(g.steps[step].code).then(() => { copy.textContent = "copied"; }, () => { copy.textContent = "not allowed here"; }); };
  };
  view("detail", () => {}, mark);
  views[views.length - 1].eager = true;
}
