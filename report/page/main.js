// Overview, texts, keyboard, and the start.
{
  const figure = (what, value, how) => `<div class="figure"><div class="what">${what}</div><div class="value">${shown(value)}</div><div class="how">${how}</div></div>`;

  const said = g => {
    const top = g.steps.map((s, k) => ({ s, k })).filter(({ s }) => s.measured != null).sort((a, b) => b.s.measured - a.s.measured)[0];
    if (!g.measured) return g.unmeasured ? `Not measured: ${esc(g.unmeasured)}.` : "";
    const reach = g.predicted ? g.predicted / g.measured.seconds : null;
    const begin = `A call takes ${time(g.measured.seconds)}` + (reach == null ? "." : reach >= 1 ? ", no more than the roofline allows." : `, ${reach > 0.1 ? (1 / reach).toFixed(1) : Math.round(1 / reach).toLocaleString("en")} times what the roofline allows.`);
    return top ? `${begin} ${percent(top.s.measured / inside(g))} of what its steps take is <a class="step" style="font-size:.9em" data-step="${top.k}" data-reveal="">${esc(top.s.name)}</a>.` : begin;
  };

  view("overview", g => {
    const parts = [];
    if (DATA.error) parts.push(`<div class="eager bad"><b>The program raised</b> ${esc(DATA.error)}<br>What was compiled until then is shown.</div>`);
    if (DATA.eager.length) parts.push(`<div class="eager"><b>Ran eagerly</b><ul>${DATA.eager.map(e => `<li>${plural(e.count, "graph")}: ${esc(e.why)}</li>`).join("")}</ul></div>`);
    if (DATA.breaks.length) parts.push(`<div class="eager"><b>Python ran between graphs</b><ul>${DATA.breaks.map(e => `<li>${plural(e.count, "time")}: ${esc(e.why)}</li>`).join("")}</ul></div>`);
    const m = g.measured, missing = n => n ? `; ${plural(n, "step")} unknown` : "";
    const share = m && g.predicted != null ? g.predicted / m.seconds : null;
    const figures = [
      figure("Measured", time(m && m.seconds), m ? `fastest of ${m.calls} calls${g.recorded ? ", no CUDA graph" : ""}` : esc(g.unmeasured || "unknown")),
      figure("Roofline", time(g.predicted), "estimate" + missing(g.unpredicted)),
      figure("Reached", percent(share), "roofline ÷ measured"),
      figure("Bytes moved", bytes(g.moved), "estimate, all steps"),
      figure("Least possible", bytes(g.least), g.moved && g.least ? `inputs and results; ${(g.moved / g.least).toFixed(1)} × is moved` : "inputs and results"),
      figure("Kernels", String(g.kernels), g.cached ? "from the cache" : g.compile_seconds ? `compiled in ${time(g.compile_seconds)}` : "compiled"),
      figure("Library calls", String(g.library), Object.keys(g.externs).length ? plural(Object.keys(g.externs).length, "operator") : "none"),
      figure("Arena", bytes(g.arena), g.device ? esc(g.device) : "device unknown"),
    ];
    $("overview").innerHTML = `<p class="said">${said(g)}</p><div class="figures">${figures.join("")}</div>${parts.join("")}`;
  });
  views[views.length - 1].eager = true;

  view("texts", g => {
    const at = $("texts");
    at.innerHTML = head("Texts", "Every stage of this graph.") + Object.entries(g.texts).filter(([, t]) => t).map(([name, text]) => `<details data-text="${esc(name)}"><summary>${esc(name)} <span class="note">${plural(text.split("\n").length, "line")}</span></summary></details>`).join("");
    for (const one of at.querySelectorAll("details")) one.ontoggle = () => {
      if (!one.open || one.lastChild.tagName === "PRE") return;
      const pre = document.createElement("pre");
      pre.textContent = g.texts[one.dataset.text];
      one.append(pre);
    };
  });

  const KEYS = [["/", "filter the steps"], ["j k", "next and previous step of the table"], ["g", "next graph"], ["1 – 6", "timeline, steps, graph, roofline, memory, texts"], ["Esc", "select nothing"], ["?", "this list"]];
  $("help").innerHTML = `<h2>Keyboard</h2><dl>${KEYS.map(([k, what]) => `<dt>${k.split(" ").map(x => x === "–" ? x : `<kbd>${x}</kbd>`).join(" ")}</dt><dd>${what}</dd>`).join("")}</dl>`;
  $("help").onclick = () => $("help").close();
  $("help-button").onclick = () => $("help").showModal();

  const move = by => {
    if (!order.length) return;
    const at = order.indexOf(state.step);
    select(order[at < 0 ? (by > 0 ? 0 : order.length - 1) : Math.min(order.length - 1, Math.max(0, at + by))], true);
  };
  addEventListener("keydown", e => {
    if (e.ctrlKey || e.metaKey || e.altKey) return;
    const typing = /INPUT|TEXTAREA/.test(document.activeElement.tagName);
    if (e.key === "Escape") { if (typing) document.activeElement.blur(); else if (!$("help").open) select(null); return; }
    if (typing) { if (e.key === "Enter" && order.length) { document.activeElement.blur(); select(order[0], true); } return; }
    if (e.key === "/") { e.preventDefault(); $("steps").scrollIntoView(); $("filter").focus(); }
    else if (e.key === "j") move(1);
    else if (e.key === "k") move(-1);
    else if (e.key === "g" && DATA.graphs.length) show((state.graph + 1) % DATA.graphs.length);
    else if (e.key === "?") $("help").showModal();
    else if (/^[1-6]$/.test(e.key)) $(["timeline", "steps", "picture", "roofline", "memory", "texts"][e.key - 1]).scrollIntoView();
  });

  const start = () => {
    $("title").textContent = DATA.title;
    $("graphs").innerHTML = DATA.graphs.map((g, k) => `<button type="button" data-graph="${k}" data-tip="${esc(`${plural(g.kernels, "kernel")}, ${plural(g.library, "library call")}`)}">${esc(g.name)}</button>`).join("");
    $("graphs").onclick = e => { const b = e.target.closest("button"); if (b) show(Number(b.dataset.graph)); };
    if (!DATA.graphs.length) {
      const why = [...(DATA.error ? [`The program raised ${DATA.error}`] : []), ...DATA.eager.map(e => `${plural(e.count, "graph")} ran eagerly: ${e.why}`)];
      document.querySelector("main").innerHTML = `<section><p class="said">Nothing was compiled.</p>${why.map(w => `<div class="eager">${esc(w)}</div>`).join("")}</section>`;
      $("detail").remove();
      return;
    }
    const asked = new URLSearchParams(location.hash.slice(1));
    const number = Number(asked.get("graph") || 0), step = asked.get("step");
    show(number < DATA.graphs.length ? number : 0);
    if (step != null && graph().steps[Number(step)]) select(Number(step), true);
    for (const v of views) if ($(v.id)) sight.observe($(v.id));
    document.documentElement.dataset.ready = "yes";
  };
  start();
}
