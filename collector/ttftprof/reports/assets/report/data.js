function h(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name === "class") node.className = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}
function svgSwatch(name) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("class", "swatch");
  svg.setAttribute("viewBox", "0 0 12 12");
  svg.setAttribute("aria-hidden", "true");
  const rect = document.createElementNS("http://www.w3.org/2000/svg", "rect");
  rect.setAttribute("class", `fill-${name}`);
  rect.setAttribute("width", "12");
  rect.setAttribute("height", "12");
  rect.setAttribute("rx", "2");
  svg.append(rect);
  return svg;
}
/** Index of the first item that is greater than `value`. */
function after(sorted, value) {
  let low = 0, high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] <= value) low = middle + 1;
    else high = middle;
  }
  return low;
}
function sums(deltas) {
  const out = new Float64Array(deltas.length);
  let at = 0;
  for (let i = 0; i < out.length; i++) out[i] = at += deltas[i];
  return out;
}
function unpackSpans(packed) {
  const start = sums(packed.s);
  const end = start.map((s, i) => s + packed.d[i]);
  const busy = Float64Array.from(packed.b || packed.d);
  const code = Uint8Array.from(packed.c, (c) => parseInt(c, 16));
  return { start, end, busy, code };
}
const unpackCalls = (packed) => ({ label: packed.label, names: packed.names, spans: unpackSpans(packed) });
/** The parts of all phases, each in the first row where its phase has room. */
function unpackParts(subject) {
  return subject.phases.flatMap(([code, , , , , parts], phase) => {
    const ends = [];
    const byStart = parts.map((part, number) => [part, number]).sort((a, b) => a[0][1] - b[0][1]);
    return byStart.map(([[name, start, end, spent, inferred, evidence], number]) => {
      let row = ends.findIndex((until) => until <= start);
      if (row < 0) row = ends.length;
      ends[row] = end;
      return { name, start, end, spent, inferred, evidence, phase, number, row, colour: PART_COLOUR[name] || DATA.phases[code] };
    });
  });
}
const unpackSeries = (packed) => ({ ...packed, t: sums(packed.t), v: Float64Array.from(packed.v) });
/** A curve at a moment, linear between its points; NaN outside them. */
function valueAt(series, ns) {
  const { t, v } = series;
  const next = after(t, ns);
  if (!next || (next === t.length && ns > t[next - 1])) return NaN;
  if (next === t.length) return v[next - 1];
  const part = (ns - t[next - 1]) / (t[next] - t[next - 1]);
  return v[next - 1] + part * (v[next] - v[next - 1]);
}
/** Growth of a running total in a range, as far as it was seen. */
function growth(series, from, to) {
  const { t } = series;
  if (!t.length) return 0;
  const low = Math.max(from, t[0]), high = Math.min(to, t[t.length - 1]);
  return high > low ? Math.max(valueAt(series, high) - valueAt(series, low), 0) : 0;
}
const PEAK_NS = 1e7;
/** The fastest growth of a running total, per second, over 10 ms or from one look to the next: the
    terminal report's figure (`lanes.peak_rate`), however far one has zoomed. */
function steepest(series, from, to) {
  const { t, v } = series;
  const first = Math.max(after(t, from) - 1, 0), last = Math.min(after(t, to), t.length - 1);
  let peak = 0;
  for (let i = first, j = first; i < last; i++) {
    while (j < last && t[j] - t[i] < PEAK_NS) j++;
    peak = Math.max(peak, ((v[j] - v[i]) / Math.max(t[j] - t[i], PEAK_NS)) * 1e9);
  }
  return peak;
}
function busyIn(spans, from, to, into, names) {
  for (let i = 0; i < spans.start.length && spans.start[i] < to; i++) {
    const length = spans.end[i] - spans.start[i];
    const overlap = Math.min(spans.end[i], to) - Math.max(spans.start[i], from);
    if (overlap > 0 && length > 0) {
      const name = names[spans.code[i]];
      into.set(name, (into.get(name) || 0) + (spans.busy[i] * overlap) / length);
    }
  }
  return into;
}
const isTotal = (name) => /(_bytes|_faults)$/.test(name) && !/(cached|memory|process)_bytes$/.test(name);
const fileName = (path) => path.split("/").pop() || path;

let colours = {};
function readColours() {
  const style = getComputedStyle(ROOT);
  const names = [...DATA.phases, ...DATA.activities, "card", "line", "soft", "text", "dim", "accent", "curve", "grid", "pick", "heat", ...CALL_COLOURS];
  colours = Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
}
