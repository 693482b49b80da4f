// The layered layout of a graph: makers above readers, few crossings, no edge through a box.
const BOX = { width: 208, height: 62, gap: 26, level: 104, lane: 14 };

function layered(g) {
  const n = g.steps.length;
  const edges = new Map();
  for (const [from, to, name, size, why] of g.edges) {
    if (!name) continue;
    const key = from + "," + to;
    const known = edges.get(key) || edges.set(key, { from, to, names: [], bytes: 0, why }).get(key);
    known.names.push(name);
    known.bytes = size == null || known.bytes == null ? null : known.bytes + size;
  }
  const list = [...edges.values()];
  const into = Array.from({ length: n }, () => []), out = Array.from({ length: n }, () => []);
  for (const e of list) { into[e.to].push(e); out[e.from].push(e); }
  const level = new Array(n).fill(0);
  for (let k = 0; k < n; k++) for (const e of into[k]) level[k] = Math.max(level[k], level[e.from] + 1);
  // What reads only inputs stands above its first reader.
  for (let k = n - 1; k >= 0; k--) if (!into[k].length && out[k].length) level[k] = Math.min(...out[k].map(e => level[e.to])) - 1;
  const layers = [];
  const nodes = [];
  const add = node => {
    node.id = nodes.length;
    nodes.push(node);
    (layers[node.level] || (layers[node.level] = [])).push(node);
    return node;
  };
  const boxes = level.map((l, k) => ({ step: k, level: l, width: BOX.width, up: [], down: [] }));
  const order = [...boxes.keys()];
  for (const k of order) add(boxes[k]);
  for (const e of list) {
    let before = boxes[e.from];
    e.path = [before];
    for (let l = level[e.from] + 1; l < level[e.to]; l++) {
      const lane = add({ step: null, level: l, width: BOX.lane, up: [before], down: [] });
      before.down.push(lane);
      e.path.push(lane);
      before = lane;
    }
    before.down.push(boxes[e.to]);
    boxes[e.to].up.push(before);
    e.path.push(boxes[e.to]);
  }
  for (let l = 0; l < layers.length; l++) layers[l] = layers[l] || [];
  ordered(layers);
  placed(layers);
  const size = columns(layers);
  return { boxes, edges: list, ...size };
}

// A long graph is cut into columns, each of some levels, so that the whole is about as wide as it is high. Cuts are where few edges pass.
function columns(layers) {
  const widths = layers.map(layer => layer.reduce((sum, v) => sum + v.width + BOX.gap, 0));
  const usual = [...widths].sort((a, b) => a - b)[Math.floor(widths.length * 0.8)] || BOX.width;
  const many = layers.length > 30 ? Math.max(1, Math.round(Math.sqrt(1.4 * layers.length * BOX.level / (usual + 120)))) : 1;
  const each = layers.length / many, cuts = [0];
  for (let c = 1; c < many; c++) {
    const wanted = Math.round(c * each), reach = Math.floor(each / 8);
    let best = wanted;
    for (let l = Math.max(cuts[c - 1] + 1, wanted - reach); l <= Math.min(layers.length - 1, wanted + reach); l++) if (widths[l] < widths[best]) best = l;
    cuts.push(best);
  }
  cuts.push(layers.length);
  let right = 0, height = 1;
  for (let c = 0; c < many; c++) {
    const part = layers.slice(cuts[c], cuts[c + 1]);
    let low = Infinity, high = -Infinity;
    for (const layer of part) for (const v of layer) { low = Math.min(low, v.x - v.width / 2); high = Math.max(high, v.x + v.width / 2); }
    const start = right + (c ? 90 : 0);
    part.forEach((layer, l) => {
      for (const v of layer) { v.x += start - low; v.y = l * BOX.level; v.column = c; }
    });
    right = Math.max(right, start + high - low);
    height = Math.max(height, part.length * BOX.level - (BOX.level - BOX.height));
    for (const layer of part) for (const v of layer) { v.gutter = start - 45; v.bottom = part.length * BOX.level; }
  }
  return { width: right, height };
}

function ordered(layers) {
  for (const layer of layers) layer.forEach((v, i) => { v.rank = i; });
  const sweep = (layer, side) => {
    for (const v of layer) {
      const near = v[side];
      v.key = near.length ? near.reduce((sum, u) => sum + u.rank, 0) / near.length : v.rank;
    }
    layer.sort((a, b) => a.key - b.key || a.id - b.id);
    layer.forEach((v, i) => { v.rank = i; });
  };
  for (let round = 0; round < 6; round++) {
    for (let l = 1; l < layers.length; l++) sweep(layers[l], "up");
    for (let l = layers.length - 2; l >= 0; l--) sweep(layers[l], "down");
  }
}

// Each node near its neighbours' middle, in the order of its layer: least squares with distances, by pooling.
function placed(layers) {
  for (const layer of layers) {
    let x = 0;
    for (const v of layer) { v.x = x + v.width / 2; x += v.width + BOX.gap; }
    const shift = x / 2;
    for (const v of layer) v.x -= shift;
  }
  const settle = (layer, side) => {
    const pools = [];
    let offset = 0, before = null;
    for (const v of layer) {
      if (before) offset += (before.width + v.width) / 2 + BOX.gap;
      v.offset = offset;
      before = v;
      const near = v[side].length ? v[side] : [];
      const weight = near.length ? (v.step == null ? 4 : 1) : 0.05;
      const wanted = near.length ? near.reduce((sum, u) => sum + u.x, 0) / near.length : v.x;
      pools.push({ sum: (wanted - offset) * weight, weight, members: [v] });
      while (pools.length > 1) {
        const b = pools[pools.length - 1], a = pools[pools.length - 2];
        if (a.sum / a.weight <= b.sum / b.weight) break;
        pools.pop();
        a.sum += b.sum;
        a.weight += b.weight;
        a.members.push(...b.members);
      }
    }
    for (const p of pools) for (const v of p.members) v.x = p.sum / p.weight + v.offset;
  };
  for (let round = 0; round < 8; round++) {
    for (let l = 1; l < layers.length; l++) settle(layers[l], "up");
    for (let l = layers.length - 2; l >= 0; l--) settle(layers[l], "down");
  }
}
