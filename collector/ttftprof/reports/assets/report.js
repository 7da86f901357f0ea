"use strict";
/* The timeline: lanes on one canvas, drawn from the JSON in this page. Text from the recording is
   only ever set as text. Times are nanoseconds from the recording's start. */
(() => {
  const DATA = JSON.parse(document.getElementById("data").textContent);
  const ROOT = document.documentElement;
  const MEANING = {
    queue: "the request waits behind other work",
    evict: "the old model is stopped and its memory comes back",
    launch: "the new server process starts, up to its first touch of the weights",
    load: "the weights are read, until the last is in place",
    init: "contexts, compilation, KV cache, warm-up: until it can serve",
    ready_gap: "it could serve, but the front has not noticed yet",
    prefill: "the prompt is processed",
    first_decode: "the first token is made and sent",
    unexplained: "nothing observed says what this was",
  };
  const CALL_COLOURS = ["call_a", "call_b", "call_c"];
  const DARK_INK = new Set(["evict", "launch", "init", "ready_gap", "queue", "load", "prefill"]);
  // Parts that are activities have their colour; any other is a tint of its phase.
  const PART_COLOUR = { storage: "storage_wait", fault: "fault", copy: "cpu", transfer: "transfer" };
  const PART_ROW = 15;
  const MAX_ROWS = 16;
  const PIXEL_LIMIT = 16000;

  // -- numbers, written as the tables write them -------------------------------------------------

  function scaled(value, units, digits) {
    if (!Number.isFinite(value)) return "n/a";
    if (value === 0) return `0 ${units[0][1]}`;
    for (let i = 0; i < units.length; i++) {
      const part = value / units[i][0];
      const whole = Math.abs(part) >= 1 ? String(Math.trunc(Math.abs(part))).length : 1;
      const text = part.toFixed(Math.max((i ? digits : 0) - whole, 0));
      if (Math.abs(Number(text)) < 1000 || i === units.length - 1) return `${text} ${units[i][1]}`;
    }
    return "n/a";
  }
  const TIME = [[1, "ns"], [1e3, "µs"], [1e6, "ms"], [1e9, "s"]];
  const BYTES = [[1, "B"], [1e3, "kB"], [1e6, "MB"], [1e9, "GB"], [1e12, "TB"]];
  const BLOCKS = [[1, "B"], [1024, "KiB"], [1048576, "MiB"], [1073741824, "GiB"]];
  const COUNTS = [[1, ""], [1e3, "k"], [1e6, "M"], [1e9, "G"]];
  const duration = (ns) => (ns ? scaled(ns, TIME, 4) : "0 s");
  const size = (bytes) => scaled(bytes, BYTES, 3);
  const count = (n) => Math.round(n).toLocaleString("en-US");
  const percent = (share) =>
    share > 0 && share < 0.01 ? "<1 %" : share > 0.99 && share < 1 ? ">99 %" : `${Math.round(share * 100)} %`;
  function block(bytes) {
    const unit = BLOCKS.filter((u) => u[0] <= bytes).pop() || BLOCKS[0];
    return `${bytes / unit[0]} ${unit[1]}`;
  }

  // -- small tools -------------------------------------------------------------------------------

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

  // -- painting ----------------------------------------------------------------------------------

  /** Intervals as blocks; those narrower than a pixel share it by their time, from the bottom up. */
  function paintSpans(ctx, spans, view, y, height, colourOf) {
    const { start, end, busy, code } = spans;
    const shares = new Float64Array(16);
    let pixel = -1;
    const stack = (x, width, total) => {
      let bottom = y + height;
      for (let c = 0; c < 16; c++) {
        if (!shares[c]) continue;
        const part = (height * shares[c]) / total;
        const colour = colourOf(c);
        ctx.fillStyle = colour;
        ctx.fillRect(x, bottom - part, width, part);
        if (colour === colours.unknown && width > 6) hatch(ctx, x, bottom - part, width, part);
        bottom -= part;
        shares[c] = 0;
      }
    };
    const flush = () => {
      if (pixel >= 0) stack(pixel, 1, shares.reduce((a, b) => a + b, 0) || 1);
      pixel = -1;
    };
    let i = Math.max(after(start, view.from) - 20, 0);
    while (i < start.length && start[i] < view.to) {
      let last = i + 1;
      while (last < start.length && start[last] === start[i] && end[last] === end[i]) last++;
      if (end[i] > view.from) {
        const x0 = view.x(start[i]), x1 = view.x(end[i]);
        if (x1 - x0 < 1) {
          if (Math.floor(x0) !== pixel) flush();
          pixel = Math.floor(x0);
          for (let k = i; k < last; k++) shares[code[k]] += busy[k] || 1;
        } else {
          flush();
          const left = Math.max(x0, -2), width = Math.min(x1, view.width + 2) - left;
          for (let k = i; k < last; k++) shares[code[k]] += busy[k];
          stack(left, width, end[i] - start[i]);
        }
      }
      i = last;
    }
    flush();
  }

  /** Growth per second of a running total as filled bars, or a level as a line over its shade;
      returns the peak. */
  function paintCurve(ctx, series, view, y, height, colour, full) {
    const total = isTotal(series.name);
    const values = new Float64Array(view.width);
    let peak = 0;
    let before = valueAt(series, view.ns(0));
    for (let x = 0; x < view.width; x++) {
      const now = valueAt(series, view.ns(x + 1));
      values[x] = total ? ((now - before) / (view.ns(x + 1) - view.ns(x))) * 1e9 : now;
      before = now;
      if (values[x] > peak) peak = values[x];
    }
    const top = full || peak || 1;
    ctx.fillStyle = colour;
    let last = NaN;
    for (let x = 0; x < view.width; x++) {
      if (!(values[x] > 0)) { last = NaN; continue; }
      const part = Math.max((height * Math.min(values[x], top)) / top, 1);
      if (total) ctx.fillRect(x, y + height - part, 1, part);
      else {
        ctx.globalAlpha = 0.28;
        ctx.fillRect(x, y + height - part, 1, part);
        ctx.globalAlpha = 1;
        const other = Number.isNaN(last) ? part : last; // the line also joins a step
        ctx.fillRect(x, y + height - Math.max(part, other), 1, Math.max(Math.abs(part - other), Math.min(part, 1.5)));
        last = part;
      }
    }
    return peak;
  }

  function paintSizes(ctx, sizes, view, y, height) {
    const used = sizes.classes;
    const row = height / used.length;
    for (let i = 0; i < sizes.t.length; i++) {
      const x0 = view.x(sizes.t[i]), x1 = view.x(sizes.t[i] + sizes.quantum);
      if (x1 < 0 || x0 > view.width) continue;
      const strength = 0.3 + (0.7 * Math.log1p(sizes.count[i])) / Math.log1p(sizes.most);
      ctx.fillStyle = `rgba(${colours.heat}, ${strength.toFixed(2)})`;
      const top = y + height - row * (used.indexOf(sizes.size[i]) + 1);
      ctx.fillRect(x0, top + 0.5, Math.max(x1 - x0, 1.5), Math.max(row - 1, 1));
    }
  }

  function hatch(ctx, x, y, width, height) {
    ctx.save();
    ctx.beginPath();
    ctx.rect(x, y, width, height);
    ctx.clip();
    ctx.strokeStyle = "#ffffff66";
    ctx.lineWidth = 1.5;
    for (let at = x - height - ((x - height) % 7); at < x + width; at += 7) {
      ctx.beginPath();
      ctx.moveTo(at, y + height);
      ctx.lineTo(at + height, y);
      ctx.stroke();
    }
    ctx.restore();
  }

  // -- one timeline ------------------------------------------------------------------------------

  class Timeline {
    constructor(section, recording) {
      this.section = section;
      this.rec = recording;
      this.unpack();
      this.subject = Number(section.dataset.subject);
      this.selection = null;
      this.picked = null;
      this.query = "";
      this.found = [];
      this.foundAt = -1;
      this.selecting = false;
      this.closed = new Set();
      this.view = { from: 0, to: Math.max(this.rec.length, 1000) };
      this.root = section.querySelector(".timeline");
      this.build();
      this.lanes = this.allLanes();
      this.layLanes();
      this.choose(this.subject, true);
      new ResizeObserver(() => this.resize()).observe(this.canvas.parentElement);
      this.resize();
    }

    unpack() {
      const rec = this.rec;
      for (const subject of rec.subjects) {
        subject.spans = unpackSpans(subject.activities);
        subject.parts = unpackParts(subject);
      }
      rec.series = rec.series.map(unpackSeries);
      for (const process of rec.processes) {
        process.running = unpackSeries(process.running);
        process.calls = unpackCalls(process.calls);
        process.driver_calls = unpackCalls(process.driver_calls);
        process.threadSpans = process.threads.map(unpackSpans);
      }
      for (const sizes of rec.sizes) {
        sizes.classes = [...new Set(sizes.size)].sort((a, b) => a - b);
        sizes.most = Math.max(...sizes.count);
      }
    }

    // -- what is there --

    build() {
      const button = (text, label, act) => h("button", { type: "button", title: label, "aria-label": label, onclick: act }, text);
      this.search = h("input", { type: "search", placeholder: "Search  /", "aria-label": "Search phases, models, files, threads, log lines" });
      this.search.addEventListener("input", () => this.find(this.search.value));
      this.search.addEventListener("keydown", (event) => {
        if (event.key === "Enter") this.next(event.shiftKey ? -1 : 1);
        if (event.key === "Escape") { this.search.value = ""; this.find(""); this.canvas.focus(); }
      });
      this.foundText = h("span", { class: "found", role: "status" });
      this.selectButton = button("Select range", "Drag selects a range instead of moving; Shift and drag does too", () => this.setSelecting(!this.selecting));
      this.selectButton.setAttribute("aria-pressed", "false");
      const tools = h("div", { class: "tools", role: "toolbar", "aria-label": "Timeline tools" },
        button("−", "Zoom out (key −)", () => this.zoom(1.6)),
        button("+", "Zoom in (key +)", () => this.zoom(1 / 1.6)),
        button("Request", "Show the whole request (key F)", () => this.fitSubject()),
        button("Everything", "Show the whole recording (key 0)", () => this.fitAll()),
        this.selectButton, h("span", { class: "grow" }), this.foundText, this.search);
      this.corner = h("div", { class: "corner" });
      this.rulerCanvas = h("canvas", { "aria-hidden": "true" });
      this.gutter = h("div", { class: "gutter" });
      this.canvas = h("canvas", {
        tabindex: "0", role: "application", "aria-roledescription": "timeline",
        "aria-label": "Timeline. Left and right arrow move, plus and minus zoom, up and down arrow step through phases, Enter zooms to one, S selects what is shown, F shows the request, 0 everything, Escape clears. The same is in the tables below.",
      });
      this.tip = h("div", { class: "tip", "aria-hidden": "true" });
      this.tip.hidden = true;
      this.detail = h("div", { class: "detail", "aria-live": "polite", role: "region", "aria-label": "What is chosen" });
      const board = h("div", { class: "board" }, this.corner, h("div", { class: "ruler" }, this.rulerCanvas), this.gutter, h("div", { class: "lanes" }, this.canvas));
      this.root.append(tools, board, this.tip, this.legend(), this.detail);
      this.listen();
    }

    legend() {
      const phases = new Set(), activities = new Set();
      for (const subject of this.rec.subjects) {
        for (const phase of subject.phases) phases.add(phase[0]);
        for (const code of subject.spans.code) activities.add(code);
      }
      for (const process of this.rec.processes) {
        for (const spans of process.threadSpans) for (const code of spans.code) activities.add(code);
      }
      const item = (name, first) => h("span", {}, ...(first ? [h("b", {}, first)] : []), svgSwatch(name), name);
      const items = (title, names, used) => names.filter((_, i) => used.has(i)).map((name, i) => item(name, i ? "" : title));
      const parts = this.rec.subjects.some((subject) => subject.parts.length);
      return h("div", { class: "legend" }, ...items("phases", DATA.phases, phases), ...items("activities", DATA.activities, activities),
        ...(parts ? [h("span", {}, h("b", {}, "parts"), "what a phase was spent on; filled as high as the share of its time")] : []));
    }

    allLanes() {
      const lanes = [];
      const section = (title, own) => {
        if (own.length) lanes.push({ kind: "section", key: title, label: title, height: 22 }, ...own.map((lane) => ({ section: title, ...lane })));
      };
      section("Requests", this.requestLanes());
      section("Storage", [
        ...this.curves((s) => s.name === "storage_bytes", () => "from storage"),
        ...this.curves((s) => s.name === "mount_bytes", (s) => `on ${s.path}`),
        ...this.curves((s) => s.name === "file_bytes", (s) => fileName(s.path)),
        ...this.rec.sizes.map((sizes) => ({ kind: "sizes", label: `${fileName(sizes.path)} sizes`, title: sizes.path, sizes, height: Math.max(30, 9 * sizes.classes.length) })),
      ]);
      section("Memory", [
        ...this.curves((s) => s.name === "major_faults", () => "major faults"),
        ...this.curves((s) => s.name === "minor_faults", () => "minor faults"),
        ...this.curves((s) => s.name === "cached_bytes", (s) => `cached ${fileName(s.path || "")}`),
      ]);
      section("GPU", [
        ...this.curves((s) => s.name.startsWith("gpu"), (s) => `${s.path || "GPU"} ${s.name.replace(/^gpu_|_bytes$/g, "").replaceAll("_", " ")}`),
        ...this.curves((s) => s.name === "transfer_bytes", () => "to the GPU"),
        ...this.rec.processes.filter((process) => process.driver_calls.spans.start.length)
          .map((process, _, all) => ({ kind: "calls", label: all.length > 1 ? `calls of ${process.label}` : "driver calls", title: `calls into the driver by ${process.label}`, calls: process.driver_calls, height: 20 })),
      ]);
      section("Other", this.curves((s) => !/^(storage_bytes|mount_bytes|file_bytes|major_faults|minor_faults|cached_bytes|transfer_bytes|gpu.*)$/.test(s.name), (s) => s.name.replaceAll("_", " ")));
      section("Log", this.rec.ticks.length ? [{ kind: "ticks", label: "log lines", ticks: this.rec.ticks, height: 24 }] : []);
      section("Processes", this.processLanes());
      return lanes;
    }

    curves(fits, label) {
      return this.rec.series.filter(fits).map((series) => ({ kind: "curve", label: label(series), title: series.path || "", series, height: 26 }));
    }

    requestLanes() {
      const rows = [];
      this.rec.subjects.forEach((subject, index) => {
        let row = rows.find((own) => own.end <= subject.start);
        if (!row) rows.push((row = { end: 0, members: [] }));
        row.end = Math.max(subject.end, subject.start + 1);
        row.members.push(index);
      });
      this.hiddenRows = Math.max(rows.length - MAX_ROWS, 0);
      return rows.slice(0, MAX_ROWS).flatMap((row, number) => {
        const only = row.members.length === 1 ? this.rec.subjects[row.members[0]] : null;
        const label = only ? only.title : rows.length > 1 ? `requests, row ${number + 1}` : "requests";
        const deep = Math.max(...row.members.flatMap((index) => this.rec.subjects[index].parts.map((part) => part.row + 1)), 0);
        return [
          { kind: "phases", label, title: only && only.model ? only.model : "", members: row.members, height: 30 },
          ...(deep ? [{ kind: "parts", label: "parts", members: row.members, height: deep * PART_ROW + 5, child: true }] : []),
          { kind: "activities", label: "activities", members: row.members, height: 20, child: true },
        ];
      });
    }

    processLanes() {
      return this.rec.processes.flatMap((process, number) => {
        const key = `process ${number}`;
        this.closed.add(key);
        const left = process.left_out ? ` (${process.left_out} quieter ones left out)` : "";
        const lanes = [{ kind: "process", key, label: process.label, title: `${process.argv}${left}`, process, height: 28 }];
        if (process.calls.spans.start.length) lanes.push({ kind: "calls", label: "library calls", calls: process.calls, child: true, height: 18 });
        process.threads.forEach((thread, i) => lanes.push({ kind: "thread", label: thread.label, process, spans: process.threadSpans[i], parent: key, child: true, height: 15 }));
        return lanes;
      });
    }

    layLanes() {
      this.gutter.replaceChildren();
      let y = 0;
      this.shown = this.lanes.filter((lane) => !(lane.section && this.closed.has(lane.section)) && !(lane.parent && this.closed.has(lane.parent)));
      for (const lane of this.shown) {
        lane.y = y;
        y += lane.height;
        const row = h("div", { class: `lane ${lane.kind}${lane.child ? " child" : ""}`, title: lane.title || lane.label });
        row.style.height = `${lane.height}px`;
        if (lane.key) {
          const open = !this.closed.has(lane.key);
          row.append(h("button", { type: "button", "aria-expanded": String(open), onclick: () => this.toggle(lane.key) }, lane.label));
        } else row.append(h("span", { class: "label" }, lane.label));
        lane.reading = h("span", { class: "reading" });
        row.append(lane.reading);
        this.gutter.append(row);
      }
      this.height = Math.min(y, PIXEL_LIMIT) + 4;
      this.canvas.style.height = `${this.height}px`;
    }

    toggle(key) {
      if (!this.closed.delete(key)) this.closed.add(key);
      this.layLanes();
      this.resize();
      const button = [...this.gutter.querySelectorAll("button")].find((b) => b.textContent === (this.lanes.find((l) => l.key === key) || {}).label);
      if (button) button.focus({ preventScroll: true });
    }

    // -- where we look --

    get width() { return this.canvas.clientWidth || 1; }
    x(ns) { return ((ns - this.view.from) / (this.view.to - this.view.from)) * this.width; }
    ns(x) { return this.view.from + (x / this.width) * (this.view.to - this.view.from); }

    show(from, to) {
      const whole = Math.max(this.rec.length, 1000);
      const length = Math.min(Math.max(to - from, 1000), whole * 1.04);
      const middle = (from + to) / 2;
      const start = Math.min(Math.max(middle - length / 2, -whole * 0.02), whole * 1.02 - length);
      this.view = { from: start, to: start + length };
      this.root.dataset.view = `${start},${start + length}`;
      this.draw();
    }
    zoom(factor, at = (this.view.from + this.view.to) / 2) {
      const { from, to } = this.view;
      this.show(at - (at - from) * factor, at + (to - at) * factor);
    }
    pan(share) {
      const by = (this.view.to - this.view.from) * share;
      this.show(this.view.from + by, this.view.to + by);
    }
    fitAll() { this.show(-this.rec.length * 0.02, this.rec.length * 1.02); }
    fitSubject() {
      const subject = this.rec.subjects[this.subject];
      if (!subject) return this.fitAll();
      const margin = Math.max((subject.end - subject.start) * 0.03, 1000);
      this.show(subject.start - margin, subject.end + margin);
    }

    choose(index, fit) {
      const subject = this.rec.subjects[index];
      if (subject) {
        this.subject = index;
        for (const part of this.section.querySelectorAll("article[data-subject]")) part.hidden = Number(part.dataset.subject) !== index;
        for (const row of this.section.querySelectorAll("[data-row]")) this.markRow(row, Number(row.dataset.row) === index);
        this.origin = subject.start;
        this.corner.textContent = `0 s: ${subject.title} begins`;
      } else {
        this.origin = 0;
        this.corner.textContent = "0 s: recording begins";
      }
      if (this.hiddenRows) this.corner.textContent += `; ${this.hiddenRows} rows of requests left out`;
      if (this.rec.left_out.length) this.corner.textContent += `; left out: ${this.rec.left_out.join(", ")}`;
      this.corner.title = this.corner.textContent;
      if (fit) this.fitSubject();
      this.describe();
    }

    markRow(row, chosen) {
      row.setAttribute("aria-selected", String(chosen));
      const list = row.closest(".list");
      if (chosen && (row.offsetTop < list.scrollTop || row.offsetTop > list.scrollTop + list.clientHeight - 30)) list.scrollTop = row.offsetTop - list.clientHeight / 2;
    }

    // -- drawing --

    resize() {
      const ratio = Math.min(window.devicePixelRatio || 1, 2);
      for (const [canvas, height] of [[this.canvas, this.height], [this.rulerCanvas, 57]]) {
        canvas.width = Math.max(Math.round(canvas.clientWidth * ratio), 1);
        canvas.height = Math.round(height * ratio);
        canvas.getContext("2d").setTransform(ratio, 0, 0, ratio, 0, 0);
      }
      this.paint();
    }
    draw() {
      if (this.queued) return;
      this.queued = true;
      requestAnimationFrame(() => { this.queued = false; this.paint(); });
    }
    paint() {
      const began = performance.now();
      const ctx = this.canvas.getContext("2d");
      const view = { ...this.view, width: this.width, x: (ns) => this.x(ns), ns: (x) => this.ns(x) };
      ctx.clearRect(0, 0, view.width, this.height);
      ctx.textBaseline = "middle";
      this.paintGrid(ctx, view);
      for (const lane of this.shown) this.paintLane(ctx, view, lane);
      this.paintMarks(ctx, view);
      this.paintRuler(view);
      this.root.dataset.paintMs = (performance.now() - began).toFixed(1);
    }

    ticks(view) {
      const least = ((view.to - view.from) * 84) / view.width;
      const power = 10 ** Math.floor(Math.log10(Math.max(least, 1)));
      const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= least);
      const out = [];
      for (let k = Math.ceil((view.from - this.origin) / step); k * step + this.origin <= view.to; k++) out.push([k * step + this.origin, k * step]);
      return [out, step];
    }
    paintGrid(ctx, view) {
      ctx.fillStyle = colours.grid;
      for (const [ns] of this.ticks(view)[0]) ctx.fillRect(Math.round(view.x(ns)), 0, 1, this.height);
    }

    paintLane(ctx, view, lane) {
      const { y, height } = lane;
      const activity = (code) => colours[DATA.activities[code]];
      if (lane.kind === "section") {
        ctx.fillStyle = colours.soft;
        ctx.fillRect(0, y, view.width, height);
        return;
      }
      ctx.fillStyle = colours.grid;
      ctx.fillRect(0, y + height - 1, view.width, 1);
      if (lane.kind === "phases") for (const index of lane.members) this.paintPhases(ctx, view, lane, index);
      else if (lane.kind === "parts") for (const index of lane.members) this.paintParts(ctx, view, lane, index);
      else if (lane.kind === "activities") {
        for (const index of lane.members) paintSpans(ctx, this.rec.subjects[index].spans, view, y + 1, height - 4, activity);
      } else if (lane.kind === "thread") paintSpans(ctx, lane.spans, view, y + 2, height - 5, activity);
      else if (lane.kind === "calls") this.paintCalls(ctx, view, lane);
      else if (lane.kind === "process") this.paintProcess(ctx, view, lane);
      else if (lane.kind === "sizes") this.paintSizesLane(ctx, view, lane);
      else if (lane.kind === "ticks") this.paintTicks(ctx, view, lane);
      else if (lane.kind === "curve") this.paintCurveLane(ctx, view, lane);
    }

    paintCurveLane(ctx, view, lane) {
      const { series, y, height } = lane;
      const total = isTotal(series.name);
      const faults = /faults$/.test(series.name);
      const own = { transfer_bytes: colours.transfer, gpu_busy: colours.gpu }[series.name];
      const colour = own || (faults ? colours.fault : total ? colours.load : colours.curve);
      const share = series.unit === "share";
      const full = total ? 0 : share ? 1 : series.v.reduce((a, b) => Math.max(a, b), 0);
      const peak = paintCurve(ctx, series, view, y + 3, height - 5, colour, full);
      const unit = (value) => (share ? percent(value) : faults ? scaled(value, COUNTS, 3).trim() : series.unit === "bytes" ? size(value) : series.unit === "bytes/s" ? `${size(value)}/s` : `${scaled(value, COUNTS, 3).trim()} ${series.unit}`);
      lane.unit = (value) => unit(value) + (total ? "/s" : "");
      const text = peak ? `${total ? "peak " : "max "}${lane.unit(peak)}` : "none";
      if (lane.reading.textContent !== text) lane.reading.textContent = text;
    }

    paintSizesLane(ctx, view, lane) {
      paintSizes(ctx, lane.sizes, view, lane.y + 2, lane.height - 5);
      const { classes } = lane.sizes;
      const text = classes.length > 1 ? `${block(classes[0])} to ${block(classes[classes.length - 1])}` : block(classes[0]);
      if (lane.reading.textContent !== text) lane.reading.textContent = text;
    }

    paintPhases(ctx, view, lane, index) {
      const subject = this.rec.subjects[index];
      const top = lane.y + 4, height = lane.height - 6;
      ctx.font = "600 12px system-ui, sans-serif";
      subject.phases.forEach(([code, start, end, inferred], number) => {
        const name = DATA.phases[code];
        const x0 = view.x(start), x1 = Math.max(view.x(end), x0 + 1.5);
        if (x1 < 0 || x0 > view.width) return;
        const left = Math.max(x0, -4), width = Math.min(x1, view.width + 4) - left;
        ctx.fillStyle = colours[name];
        ctx.fillRect(left, top, Math.max(width - (width > 3 ? 1 : 0), 1.5), height);
        if (name === "unexplained" && width > 6) hatch(ctx, left, top, width - 1, height);
        const room = width - 10;
        if (room > 14) {
          ctx.fillStyle = DARK_INK.has(name) ? "#14161a" : "#ffffff";
          const long = `${inferred ? "~ " : ""}${name} ${duration(end - start)}`;
          const text = ctx.measureText(long).width < room ? long : ctx.measureText(name).width < room ? name : "";
          if (text) ctx.fillText(text, left + 5, top + height / 2 + 0.5);
        }
        if (inferred && width > 4) {
          ctx.strokeStyle = colours.pick;
          ctx.setLineDash([3, 3]);
          ctx.strokeRect(left + 0.5, top + 0.5, Math.max(width - 2, 1), height - 1);
          ctx.setLineDash([]);
        }
        if (this.isPicked(index, { phase: number })) {
          ctx.strokeStyle = colours.pick;
          ctx.lineWidth = 2.5;
          ctx.strokeRect(left - 1, top - 1.5, Math.max(width, 3) + 1, height + 3);
          ctx.lineWidth = 1;
        }
      });
      if (subject.token !== null) {
        const x = Math.round(view.x(subject.token));
        ctx.fillStyle = colours.pick;
        ctx.fillRect(x, lane.y + 1, 1.5, lane.height - 2);
        ctx.beginPath();
        ctx.moveTo(x, lane.y);
        ctx.lineTo(x + 8, lane.y + 4);
        ctx.lineTo(x, lane.y + 8);
        ctx.fill();
      }
    }

    /** Each part as long as it went on; filled as high as the share of that time it took. */
    paintParts(ctx, view, lane, index) {
      const high = PART_ROW - 2;
      ctx.font = "11px system-ui, sans-serif";
      for (const part of this.rec.subjects[index].parts) {
        const x0 = view.x(part.start), x1 = Math.max(view.x(part.end), x0 + 2);
        if (x1 < 0 || x0 > view.width) continue;
        const left = Math.max(x0, -4), width = Math.max(Math.min(x1, view.width + 4) - left - 1, 1.5);
        const top = lane.y + 2 + part.row * PART_ROW;
        const filled = high * Math.min(part.spent / Math.max(part.end - part.start, 1), 1);
        ctx.fillStyle = colours[part.colour];
        ctx.globalAlpha = 0.18;
        ctx.fillRect(left, top, width, high);
        ctx.globalAlpha = 0.5;
        ctx.fillRect(left, top + high - filled, width, filled);
        ctx.globalAlpha = 1;
        ctx.fillRect(left, top, 2, high);
        const room = width - 9;
        const long = `${part.inferred ? "~ " : ""}${part.name} ${duration(part.spent)}`;
        const text = room < 20 ? "" : ctx.measureText(long).width < room ? long : ctx.measureText(part.name).width < room ? part.name : "";
        ctx.fillStyle = colours.text;
        if (text) ctx.fillText(text, Math.max(left, 0) + 6, top + high / 2 + 0.5);
        if (this.isPicked(index, part)) {
          ctx.strokeStyle = colours.pick;
          ctx.lineWidth = 2;
          ctx.strokeRect(left - 0.5, top - 0.5, width + 1, high + 1);
          ctx.lineWidth = 1;
        }
      }
    }
    isPicked(subject, part) {
      const { picked } = this;
      return picked && picked.subject === subject && picked.phase === part.phase && picked.part === part.number;
    }

    paintCalls(ctx, view, lane) {
      const { y, height } = lane;
      const { spans, names } = lane.calls;
      paintSpans(ctx, spans, view, y + 2, height - 5, (code) => colours[CALL_COLOURS[code % CALL_COLOURS.length]]);
      ctx.font = "11px system-ui, sans-serif";
      for (let i = Math.max(after(spans.start, view.from) - 2, 0); i < spans.start.length && spans.start[i] < view.to; i++) {
        const name = names[spans.code[i]];
        const left = Math.max(view.x(spans.start[i]), 0), room = Math.min(view.x(spans.end[i]), view.width) - left - 8;
        if (room > 20 && ctx.measureText(name).width < room) {
          ctx.fillStyle = colours.text;
          ctx.fillText(name, left + 4, y + height / 2);
        }
      }
    }

    paintProcess(ctx, view, lane) {
      const { process, y, height } = lane;
      const x0 = Math.max(view.x(process.start), -2), x1 = Math.min(view.x(process.end), view.width + 2);
      if (x1 > 0 && x0 < view.width) {
        ctx.strokeStyle = colours.dim;
        ctx.strokeRect(x0 + 0.5, y + 3.5, Math.max(x1 - x0 - 1, 1), height - 7);
      }
      const most = process.running.v.reduce((a, b) => Math.max(a, b), 0);
      paintCurve(ctx, process.running, view, y + 4, height - 8, colours.cpu, Math.max(most, 1));
      const text = `≤ ${Math.round(most * 10) / 10} on CPU`;
      if (lane.reading.textContent !== text) lane.reading.textContent = text;
    }

    paintTicks(ctx, view, lane) {
      ctx.font = "11px system-ui, sans-serif";
      lane.ticks.forEach(([ns, text], i) => {
        const x = view.x(ns);
        if (x < -200 || x > view.width) return;
        ctx.fillStyle = colours.text;
        ctx.fillRect(x, lane.y + 3, 1.5, lane.height - 6);
        const word = text.split(/[:,]/)[0];
        const room = Math.min(i + 1 < lane.ticks.length ? view.x(lane.ticks[i + 1][0]) : Infinity, view.width) - x;
        ctx.fillStyle = colours.dim;
        if (ctx.measureText(word).width + 8 < room) ctx.fillText(word, x + 4, lane.y + lane.height / 2);
      });
    }

    paintMarks(ctx, view) {
      const subject = this.rec.subjects[this.subject];
      ctx.fillStyle = colours.dim;
      for (const ns of subject ? [subject.start, subject.token] : []) {
        if (ns === null) continue;
        for (let y = 0; y < this.height; y += 6) ctx.fillRect(Math.round(view.x(ns)), y, 1, 3);
      }
      if (this.selection) {
        const x0 = view.x(this.selection.from), x1 = view.x(this.selection.to);
        ctx.globalAlpha = 0.16;
        ctx.fillStyle = colours.accent;
        ctx.fillRect(x0, 0, x1 - x0, this.height);
        ctx.globalAlpha = 1;
        ctx.fillRect(x0, 0, 1, this.height);
        ctx.fillRect(x1, 0, 1, this.height);
      }
      for (const hit of this.found) {
        const x = view.x(hit.from);
        ctx.fillStyle = colours.accent;
        if (x > -5 && x < view.width + 5) ctx.fillRect(x - 1, 0, 2, this.height);
      }
    }

    /** Above: the whole recording with a window on what is shown; below: round times. */
    paintRuler(view) {
      const ctx = this.rulerCanvas.getContext("2d");
      const width = view.width, whole = Math.max(this.rec.length, 1000);
      const at = (ns) => ((ns + whole * 0.02) / (whole * 1.04)) * width;
      ctx.clearRect(0, 0, width, 57);
      ctx.fillStyle = colours.soft;
      ctx.fillRect(0, 4, width, 20);
      for (const subject of this.rec.subjects) {
        for (const [code, start, end] of subject.phases) {
          ctx.fillStyle = colours[DATA.phases[code]];
          ctx.fillRect(at(start), 8, Math.max(at(end) - at(start), 0.7), 12);
        }
      }
      ctx.fillStyle = colours.card;
      ctx.globalAlpha = 0.6;
      ctx.fillRect(0, 4, at(view.from), 20);
      ctx.fillRect(at(view.to), 4, width - at(view.to), 20);
      ctx.globalAlpha = 1;
      ctx.strokeStyle = colours.accent;
      ctx.lineWidth = 1.5;
      ctx.strokeRect(at(view.from) + 0.75, 4.75, Math.max(at(view.to) - at(view.from) - 1.5, 3), 18.5);
      ctx.lineWidth = 1;
      ctx.font = "11.5px system-ui, sans-serif";
      ctx.textBaseline = "alphabetic";
      const [ticks, step] = this.ticks(view);
      const unit = TIME.filter((u) => u[0] <= step * 5).pop() || TIME[0];
      const decimals = [0, 1, 2, 3, 4].find((d) => Math.abs((step / unit[0]) * 10 ** d - Math.round((step / unit[0]) * 10 ** d)) < 1e-6) ?? 4;
      for (const [ns, rel] of ticks) {
        const x = Math.round(view.x(ns));
        ctx.fillStyle = colours.dim;
        ctx.fillRect(x, 49, 1, 8);
        ctx.fillStyle = colours.text;
        const text = `${(rel / unit[0]).toFixed(decimals)} ${unit[1]}`;
        if (x + 4 + ctx.measureText(text).width <= width) ctx.fillText(text, x + 4, 45);
      }
    }

    // -- what lies under the pointer --

    laneAt(y) { return this.shown.find((lane) => y >= lane.y && y < lane.y + lane.height); }

    phaseAt(lane, ns) {
      const slack = ((this.view.to - this.view.from) / this.width) * 3;
      let best = null;
      for (const index of lane.members) {
        this.rec.subjects[index].phases.forEach((phase, number) => {
          const far = Math.max(phase[1] - ns, ns - phase[2], 0);
          // A phase too thin to see wins over the one it lies in or beside.
          const rank = far <= slack ? (phase[2] - phase[1] < 2 * slack ? far - 2 * slack : far) : Infinity;
          if (rank < Infinity && (!best || rank < best.rank)) best = { subject: index, phase: number, rank };
        });
      }
      return best;
    }

    partAt(lane, ns, y) {
      const slack = ((this.view.to - this.view.from) / this.width) * 3;
      const row = Math.floor((y - lane.y - 2) / PART_ROW);
      let best = null;
      for (const index of lane.members) {
        for (const part of this.rec.subjects[index].parts) {
          const far = Math.max(part.start - ns, ns - part.end, 0);
          if (part.row === row && far <= slack && (!best || far < best.far)) best = { subject: index, part, far };
        }
      }
      return best;
    }

    spansAt(spans, ns, names) {
      const slack = (this.view.to - this.view.from) / this.width;
      const found = [];
      for (let i = Math.max(after(spans.start, ns) - 20, 0); i < spans.start.length && spans.start[i] <= ns; i++) {
        if (spans.end[i] + slack > ns && spans.start[i] <= ns) found.push([names[spans.code[i]], spans.start[i], spans.end[i], spans.busy[i]]);
      }
      const exact = found.filter((f) => f[2] > ns);
      return exact.length ? exact : found.slice(-1);
    }

    tipFor(lane, ns, y) {
      const when = `at ${duration(Math.max(Math.abs(Math.round(ns - this.origin)), 0))}${ns < this.origin ? " before" : ""}`;
      if (lane.kind === "phases") {
        const hit = this.phaseAt(lane, ns);
        if (!hit) return null;
        const subject = this.rec.subjects[hit.subject];
        const [code, start, end, inferred, evidence] = subject.phases[hit.phase];
        const rows = [["takes", duration(end - start)], ["begins after", duration(start - subject.start)]];
        if (subject.end > subject.start) rows.push(["share", percent((end - start) / (subject.end - subject.start))]);
        return { title: `${DATA.phases[code]} · ${subject.title}`, rows, lines: [MEANING[DATA.phases[code]], ...evidence.map((e) => `${inferred ? "inferred" : "observed"}, ${e}`)] };
      }
      if (lane.kind === "parts") {
        const hit = this.partAt(lane, ns, y);
        if (!hit) return null;
        const { part } = hit;
        const subject = this.rec.subjects[hit.subject];
        const rows = [["takes", duration(part.spent)], ["begins after", duration(part.start - subject.start)], ["ends after", duration(part.end - subject.start)]];
        return { title: `${part.name} · ${DATA.phases[subject.phases[part.phase][0]]} of ${subject.title}`, rows, lines: part.evidence.map((e) => `${part.inferred ? "inferred" : "observed"}, ${e}`) };
      }
      if (lane.kind === "activities" || lane.kind === "thread" || lane.kind === "calls") {
        const sources = lane.kind === "activities" ? lane.members.map((i) => this.rec.subjects[i].spans) : [lane.kind === "calls" ? lane.calls.spans : lane.spans];
        const names = lane.kind === "calls" ? lane.calls.names : DATA.activities;
        const found = sources.flatMap((spans) => this.spansAt(spans, ns, names));
        if (!found.length) return null;
        const [, start, end] = found[0];
        const rows = found.map(([name, , , busy]) => [name, duration(busy)]);
        return { title: lane.kind === "activities" ? "activities" : lane.label, rows, lines: [found.length > 1 || found[0][3] < end - start ? `within ${duration(end - start)}, ${when}` : when] };
      }
      if (lane.kind === "curve") {
        const step = (this.view.to - this.view.from) / this.width;
        const value = isTotal(lane.series.name) ? (growth(lane.series, ns - step, ns + step) / (2 * step)) * 1e9 : valueAt(lane.series, ns);
        return { title: lane.label, rows: Number.isFinite(value) && lane.unit ? [[when, lane.unit(value)]] : [[when, "not seen"]], lines: lane.title ? [lane.title] : [] };
      }
      if (lane.kind === "sizes") {
        const { sizes } = lane;
        const slack = (this.view.to - this.view.from) / this.width;
        const rows = sizes.t.map((t, i) => [t, i]).filter(([t]) => t <= ns + slack && t + Math.max(sizes.quantum, slack) >= ns).map(([, i]) => [`${count(sizes.count[i])} × up to ${block(sizes.size[i])}`, size(sizes.bytes[i])]);
        return rows.length ? { title: "requests to storage", rows: rows.slice(0, 8), lines: [`within ${duration(sizes.quantum)}, ${when}`, sizes.path] } : null;
      }
      if (lane.kind === "process") {
        const running = valueAt(lane.process.running, ns);
        const rows = [["lives", duration(lane.process.end - lane.process.start)]];
        if (Number.isFinite(running)) rows.push(["threads on a CPU", running.toFixed(1)]);
        return { title: lane.label, rows, lines: [lane.title] };
      }
      if (lane.kind === "ticks") {
        const slack = ((this.view.to - this.view.from) / this.width) * 5;
        const near = lane.ticks.filter(([at]) => Math.abs(at - ns) < slack).slice(0, 6);
        return near.length ? { title: "log", rows: [], lines: near.map(([at, text]) => `${duration(at - this.origin)}: ${text}`) } : null;
      }
      return null;
    }

    hover(event) {
      const box = this.canvas.getBoundingClientRect();
      const x = event.clientX - box.left, y = event.clientY - box.top;
      const lane = this.laneAt(y);
      const told = lane && this.tipFor(lane, this.ns(x), y);
      this.tip.hidden = !told;
      if (!told) return;
      this.tip.replaceChildren(h("b", {}, told.title), ...told.rows.map(([name, value]) => h("div", {}, h("i", {}, name), h("span", {}, value))), ...told.lines.map((line) => h("div", {}, h("i", {}, line))));
      const frame = this.root.getBoundingClientRect();
      const left = event.clientX - frame.left, top = event.clientY - frame.top;
      const wide = this.tip.offsetWidth, high = this.tip.offsetHeight;
      this.tip.style.left = `${Math.max(left + 16 + wide > frame.width ? left - wide - 12 : left + 16, 4)}px`;
      this.tip.style.top = `${Math.max(top + 18 + high > frame.height ? top - high - 12 : top + 18, 4)}px`;
    }

    // -- hands --

    listen() {
      const canvas = this.canvas;
      let drag = null;
      const position = (event) => event.clientX - canvas.getBoundingClientRect().left;
      canvas.addEventListener("pointerdown", (event) => {
        if (event.button) return;
        drag = { x: position(event), view: { ...this.view }, moved: false, range: event.shiftKey || this.selecting };
        canvas.setPointerCapture(event.pointerId);
      });
      canvas.addEventListener("pointermove", (event) => {
        if (!drag) return this.hover(event);
        const x = position(event);
        drag.moved ||= Math.abs(x - drag.x) > 3;
        if (!drag.moved) return undefined;
        this.tip.hidden = true;
        if (drag.range) this.select(this.ns(drag.x), this.ns(x), false);
        else {
          canvas.classList.add("panning");
          const by = ((drag.x - x) / this.width) * (drag.view.to - drag.view.from);
          this.show(drag.view.from + by, drag.view.to + by);
        }
        return undefined;
      });
      canvas.addEventListener("pointerup", (event) => {
        canvas.classList.remove("panning");
        if (drag && !drag.moved) this.click(event);
        else if (drag && drag.range) this.describe();
        drag = null;
      });
      canvas.addEventListener("pointercancel", () => { drag = null; canvas.classList.remove("panning"); });
      canvas.addEventListener("pointerleave", () => { this.tip.hidden = true; });
      canvas.addEventListener("dblclick", () => { if (this.picked) this.zoomToPicked(); });
      canvas.addEventListener("wheel", (event) => this.wheel(event, position(event)), { passive: false });
      canvas.addEventListener("keydown", (event) => this.key(event));
      this.listenRuler();
    }

    /** In the overview a drag moves the window; on the scale it selects a range. */
    listenRuler() {
      const canvas = this.rulerCanvas;
      let from = null, overview = false;
      const position = (event) => {
        const box = canvas.getBoundingClientRect();
        return [event.clientX - box.left, event.clientY - box.top];
      };
      const centre = (x) => {
        const whole = Math.max(this.rec.length, 1000), half = (this.view.to - this.view.from) / 2;
        const ns = (x / this.width) * whole * 1.04 - whole * 0.02;
        this.show(ns - half, ns + half);
      };
      canvas.addEventListener("pointerdown", (event) => {
        const [x, y] = position(event);
        canvas.setPointerCapture(event.pointerId);
        overview = y < 28;
        from = x;
        if (overview) centre(x);
      });
      canvas.addEventListener("pointermove", (event) => {
        if (from === null) return;
        const [x] = position(event);
        if (overview) centre(x);
        else this.select(this.ns(from), this.ns(x), false);
      });
      canvas.addEventListener("pointerup", () => {
        if (from !== null && !overview) this.describe();
        from = null;
      });
    }

    wheel(event, x) {
      const sideways = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
      const whole = this.view.to - this.view.from >= this.rec.length * 1.03;
      if (!sideways && whole && event.deltaY > 0) return; // nothing left to zoom out of: the page scrolls
      event.preventDefault();
      this.tip.hidden = true;
      if (sideways) this.pan((event.deltaX || event.deltaY) / this.width);
      else this.zoom(Math.exp(Math.max(Math.min(event.deltaY, 240), -240) * 0.0022), this.ns(x));
    }

    key(event) {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const acts = {
        ArrowLeft: () => (event.shiftKey ? this.stretch(-1) : this.pan(-0.12)),
        ArrowRight: () => (event.shiftKey ? this.stretch(1) : this.pan(0.12)),
        ArrowUp: () => this.step(-1), ArrowDown: () => this.step(1),
        Enter: () => this.zoomToPicked(), "+": () => this.zoom(1 / 1.6), "=": () => this.zoom(1 / 1.6),
        "-": () => this.zoom(1.6), 0: () => this.fitAll(), Home: () => this.fitAll(), f: () => this.fitSubject(),
        s: () => this.select(Math.max(this.view.from, 0), Math.min(this.view.to, this.rec.length)),
        Escape: () => this.clear(), "/": () => this.search.focus(),
      };
      const act = acts[event.key];
      if (!act) return;
      event.preventDefault();
      act();
    }

    click(event) {
      const box = this.canvas.getBoundingClientRect();
      const ns = this.ns(event.clientX - box.left);
      const y = event.clientY - box.top;
      const lane = this.laneAt(y);
      if (lane && lane.kind === "section") return this.toggle(lane.key);
      const part = lane && lane.kind === "parts" ? this.partAt(lane, ns, y) : null;
      if (part) return this.pick(part.subject, part.part.phase, part.part.number);
      const hit = lane && lane.kind === "phases" ? this.phaseAt(lane, ns) : null;
      return hit ? this.pick(hit.subject, hit.phase) : this.clear();
    }

    pick(subject, phase, part) {
      this.selection = null;
      this.picked = { subject, phase, part };
      if (subject !== this.subject) this.choose(subject, false);
      this.describe();
      this.draw();
    }
    clear() {
      this.picked = this.selection = null;
      this.describe();
      this.draw();
    }
    step(by) {
      const all = this.rec.subjects.flatMap((subject, index) => subject.phases.flatMap((_, number) => [[index, number, undefined], ...subject.parts.filter((part) => part.phase === number).map((part) => [index, number, part.number])]));
      if (!all.length) return;
      const now = all.findIndex(([s, phase, number]) => (this.picked ? this.isPicked(s, { phase, number }) : s === this.subject));
      const next = all[this.picked ? Math.min(Math.max(now + by, 0), all.length - 1) : Math.max(now, 0)];
      this.pick(...next);
      const [start, end] = this.pickedSpan();
      if (start > this.view.to || end < this.view.from) this.show(start - (this.view.to - this.view.from) / 3, start + ((this.view.to - this.view.from) * 2) / 3);
    }
    pickedPart() {
      return this.rec.subjects[this.picked.subject].parts.find((part) => this.isPicked(this.picked.subject, part));
    }
    pickedSpan() {
      const part = this.pickedPart();
      const [, start, end] = this.rec.subjects[this.picked.subject].phases[this.picked.phase];
      return part ? [part.start, part.end] : [start, end];
    }
    zoomToPicked() {
      if (!this.picked) return;
      const [start, end] = this.pickedSpan();
      const margin = Math.max((end - start) * 0.08, 500);
      this.show(start - margin, end + margin);
    }
    setSelecting(on) {
      this.selecting = on;
      this.selectButton.setAttribute("aria-pressed", String(on));
      this.canvas.classList.toggle("selecting", on);
    }
    select(one, other, done = true) {
      const low = Math.max(Math.min(one, other), 0), high = Math.min(Math.max(one, other), this.rec.length);
      this.selection = high > low ? { from: Math.round(low), to: Math.round(high) } : null;
      this.picked = null;
      if (done) this.describe();
      this.draw();
    }
    stretch(by) {
      const step = (this.view.to - this.view.from) * 0.05;
      const now = this.selection || { from: Math.max(this.view.from, 0), to: Math.max(this.view.from, 0) };
      this.select(now.from, Math.max(now.to + by * step, now.from + 1));
    }

    // -- what is said about it --

    describe() {
      const content = this.selection ? this.aboutRange() : this.picked ? (this.pickedPart() ? this.aboutPart() : this.aboutPhase()) : [this.hint()];
      this.detail.replaceChildren(...content);
    }
    hint() {
      const key = (text) => h("kbd", {}, text);
      return h("p", { class: "hint" }, "Click a phase to see what justifies it. Wheel zooms, drag moves, ", key("Shift"), " and drag sums up a range. Keys: ", key("←"), " ", key("→"), " ", key("+"), " ", key("−"), " ", key("↑"), " ", key("↓"), " phases and parts, ", key("S"), " sums, ", key("F"), " request, ", key("0"), " everything, ", key("/"), " search.");
    }
    table(caption, rows, swatches) {
      return h("table", {}, h("caption", {}, caption), h("tbody", {}, ...rows.map(([name, value, share, exact]) => {
        const cell = h("td", { class: "number" }, value);
        if (exact !== undefined) cell.dataset.ns = String(Math.round(exact));
        return h("tr", {}, h("th", { scope: "row" }, ...(swatches ? [svgSwatch(name)] : []), name), cell, h("td", { class: "number" }, share || ""));
      })));
    }
    times(caption, byName, whole, order) {
      const rows = [...byName].filter(([, ns]) => ns >= 0.5).sort((a, b) => order.indexOf(a[0]) - order.indexOf(b[0]));
      return rows.length ? [this.table(caption, rows.map(([name, ns]) => [name, duration(Math.round(ns)), whole ? percent(ns / whole) : "", ns]), true)] : [];
    }
    facts(from, to) {
      const rows = [];
      for (const series of this.rec.series) {
        if (!isTotal(series.name)) continue;
        const grown = growth(series, from, to);
        const label = series.name === "transfer_bytes" ? "to the GPU" : series.name === "storage_bytes" ? "from storage" : series.name === "mount_bytes" ? `on ${series.path}` : series.name === "file_bytes" ? fileName(series.path) : series.name.replaceAll("_", " ");
        if (grown >= 0.5) rows.push([label, series.unit === "bytes" ? size(grown) : count(grown), series.unit === "bytes" ? `${size((grown / (to - from)) * 1e9)}/s` : ""]);
      }
      let requests = 0;
      for (const sizes of this.rec.sizes) sizes.t.forEach((t, i) => { if (t >= from - sizes.quantum / 2 && t < to - sizes.quantum / 2) requests += sizes.count[i]; });
      if (requests) rows.push(["requests to storage, about", count(requests), ""]);
      for (const series of this.rec.series) {
        if (series.name !== "cached_bytes" && series.name !== "gpu_memory_bytes") continue;
        const low = valueAt(series, from), high = valueAt(series, to);
        const label = series.name === "cached_bytes" ? `cached ${fileName(series.path || "")}` : `${series.path} memory`;
        if (Number.isFinite(low) && Number.isFinite(high)) rows.push([label, `${size(low)} → ${size(high)}`, ""]);
      }
      return rows.length ? [this.table("storage and memory meanwhile", rows, false)] : [];
    }
    logLines(from, to) {
      const own = this.rec.ticks.filter(([ns]) => ns >= from && ns <= to);
      if (!own.length) return [];
      const rest = own.length > 12 ? [h("li", {}, `and ${own.length - 12} more`)] : [];
      return [h("div", {}, h("div", { class: "hint" }, "log lines meanwhile"), h("ul", {}, ...own.slice(0, 12).map(([ns, text]) => h("li", {}, `${duration(ns - this.origin)}: ${text}`)), ...rest))];
    }
    aboutPhase() {
      const subject = this.rec.subjects[this.picked.subject];
      const [code, start, end, inferred, evidence] = subject.phases[this.picked.phase];
      const name = DATA.phases[code];
      const whole = subject.end - subject.start;
      const spent = busyIn(subject.spans, start, end, new Map(), DATA.activities);
      const share = whole ? `, ${percent((end - start) / whole)} of ${duration(whole)}` : "";
      return [
        h("h3", {}, svgSwatch(name), `${name} of ${subject.title}: ${duration(end - start)}`),
        h("div", {}, `${MEANING[name]}. Begins ${duration(start - subject.start)} after the request${share}.`),
        h("div", {}, `${inferred ? "Inferred" : "Observed"}; what ends it:`),
        h("ul", {}, ...(evidence.length ? evidence : ["no fact is attached"]).map((e) => h("li", {}, e))),
        h("div", { class: "columns" }, ...this.times("activities within", spent, end - start, DATA.activities), ...this.partsOf(subject), ...this.facts(start, end), ...this.logLines(start, end)),
      ];
    }
    partsOf(subject) {
      const own = subject.parts.filter((part) => part.phase === this.picked.phase);
      return own.length ? [this.table("parts, which may overlap", own.map((part) => [part.name, duration(part.spent), "", part.spent]), false)] : [];
    }
    aboutPart() {
      const subject = this.rec.subjects[this.picked.subject];
      const part = this.pickedPart();
      const [code, start, end] = subject.phases[part.phase];
      const name = DATA.phases[code];
      return [
        h("h3", {}, svgSwatch(part.colour), `${part.name} in ${name} of ${subject.title}: ${duration(part.spent)}`),
        h("div", {}, `From ${duration(part.start - subject.start)} to ${duration(part.end - subject.start)} after the request began; ${percent(part.spent / Math.max(end - start, 1))} of ${name}. Parts may overlap.`),
        h("div", {}, `${part.inferred ? "Inferred" : "Observed"}:`),
        h("ul", {}, ...(part.evidence.length ? part.evidence : ["by the activities of its threads"]).map((e) => h("li", {}, e))),
        h("div", { class: "columns" }, ...this.times("activities meanwhile", busyIn(subject.spans, part.start, part.end, new Map(), DATA.activities), part.end - part.start, DATA.activities), ...this.facts(part.start, part.end), ...this.logLines(part.start, part.end)),
      ];
    }
    aboutRange() {
      const { from, to } = this.selection;
      const phases = new Map(), activities = new Map();
      let touched = 0;
      for (const subject of this.rec.subjects) {
        if (subject.end <= from || subject.start >= to) continue;
        touched++;
        for (const [code, start, end] of subject.phases) {
          const overlap = Math.min(end, to) - Math.max(start, from);
          if (overlap > 0) phases.set(DATA.phases[code], (phases.get(DATA.phases[code]) || 0) + overlap);
        }
        busyIn(subject.spans, from, to, activities, DATA.activities);
      }
      const sum = [...phases.values()].reduce((a, b) => a + b, 0);
      return [
        h("h3", {}, `Selected: ${duration(to - from)}`),
        h("div", {}, `from ${from < this.origin ? "−" : ""}${duration(Math.abs(from - this.origin))} to ${to < this.origin ? "−" : ""}${duration(Math.abs(to - this.origin))}; ${touched} request${touched === 1 ? "" : "s"} in it`),
        h("div", { class: "columns" }, ...this.times("phases", phases, sum, DATA.phases), ...this.times("activities", activities, sum, DATA.activities), ...this.facts(from, to), ...this.logLines(from, to)),
      ];
    }

    // -- search --

    find(text) {
      this.query = text.trim().toLowerCase();
      this.found = this.query ? this.findAll(this.query).slice(0, 500) : [];
      this.foundAt = -1;
      this.foundText.textContent = !this.query ? "" : this.found.length ? `${this.found.length} found, Enter: next` : "nothing found";
      this.draw();
    }
    findAll(query) {
      const has = (...texts) => texts.some((text) => text && text.toLowerCase().includes(query));
      const hits = [];
      this.rec.subjects.forEach((subject, index) => {
        const whole = has(subject.title, subject.model, subject.cause);
        if (whole) hits.push({ from: subject.start, to: subject.end, choose: index, words: `${subject.title} ${subject.model || ""}` });
        subject.phases.forEach(([code, start, end, , evidence], number) => {
          if (has(DATA.phases[code], ...evidence)) hits.push({ from: start, to: end, pick: [index, number], words: `${DATA.phases[code]} of ${subject.title}` });
        });
        for (const part of subject.parts) {
          if (has(part.name, ...part.evidence)) hits.push({ from: part.start, to: part.end, pick: [index, part.phase, part.number], words: `${part.name} of ${subject.title}` });
        }
      });
      for (const [ns, text] of this.rec.ticks) if (has(text)) hits.push({ from: ns, to: ns, words: text });
      for (const process of this.rec.processes) {
        if (has(process.label, process.argv)) hits.push({ from: process.start, to: process.end, words: process.label });
        for (const { names, spans } of [process.calls, process.driver_calls]) {
          names.forEach((name, code) => {
            const first = spans.code.indexOf(code);
            if (has(name) && first >= 0) hits.push({ from: spans.start[first], to: spans.end[first], words: `${name} of ${process.label}` });
          });
        }
        process.threads.forEach((thread, i) => {
          const spans = process.threadSpans[i];
          if (has(thread.label) && spans.start.length) hits.push({ from: spans.start[0], to: spans.end[spans.end.length - 1], words: thread.label, open: process });
        });
      }
      for (const series of this.rec.series) {
        if (series.path && has(series.path) && series.t.length) hits.push({ from: series.t[0], to: series.t[series.t.length - 1], words: `${series.name} ${series.path}` });
      }
      return hits.sort((a, b) => a.from - b.from);
    }
    next(by) {
      if (!this.found.length) return;
      this.foundAt = (this.foundAt + by + this.found.length) % this.found.length;
      const hit = this.found[this.foundAt];
      this.foundText.textContent = `${this.foundAt + 1} of ${this.found.length}: ${hit.words.slice(0, 60)}`;
      if (hit.open) this.closed.delete(`process ${this.rec.processes.indexOf(hit.open)}`);
      if (hit.open) { this.layLanes(); this.resize(); }
      if (hit.pick) this.pick(...hit.pick);
      else if (hit.choose !== undefined) this.choose(hit.choose, false);
      const length = hit.to - hit.from, margin = length ? length * 0.2 : (this.view.to - this.view.from) / 8;
      this.show(hit.from - margin, hit.to + margin);
    }
  }

  // -- the page ----------------------------------------------------------------------------------

  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const THEMES = ["auto", "light", "dark"];
  let theme = "auto";
  try { theme = THEMES.includes(localStorage.getItem("ttftprof-theme")) ? localStorage.getItem("ttftprof-theme") : "auto"; } catch { /* no storage for this file */ }
  const timelines = [];
  function applyTheme(print) {
    ROOT.dataset.theme = !print && (theme === "dark" || (theme === "auto" && system.matches)) ? "dark" : "light";
    readColours();
    for (const timeline of timelines) timeline.paint();
  }
  const themeButton = document.getElementById("theme");
  themeButton.hidden = false;
  const nameTheme = () => { themeButton.textContent = `theme: ${theme}`; };
  themeButton.addEventListener("click", () => {
    theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    try { localStorage.setItem("ttftprof-theme", theme); } catch { /* kept for this page only */ }
    nameTheme();
    applyTheme(false);
  });
  system.addEventListener("change", () => applyTheme(false));
  window.addEventListener("beforeprint", () => applyTheme(true));
  window.addEventListener("afterprint", () => applyTheme(false));
  nameTheme();
  applyTheme(false);
  document.querySelectorAll(".recording").forEach((section, number) => {
    const timeline = new Timeline(section, DATA.recordings[number]);
    timelines.push(timeline);
    for (const button of section.querySelectorAll("[data-choose]")) {
      button.addEventListener("click", () => {
        timeline.picked = timeline.selection = null;
        timeline.choose(Number(button.dataset.choose), true);
      });
    }
  });
  ROOT.dataset.ready = Math.round(performance.now());
})();
