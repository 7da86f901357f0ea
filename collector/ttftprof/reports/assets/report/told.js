/** What is said below of what was chosen. */
class Told {
  describe() {
    const content = this.selection ? this.aboutRange() : this.picked ? (this.pickedPart() ? this.aboutPart() : this.aboutPhase()) : [this.hint()];
    this.detail.replaceChildren(...content);
  }
  hint() {
    const key = (text) => h("kbd", {}, text);
    const first = this.rec.subjects.length ? "Click a phase to see what justifies it. " : "";
    return h("p", { class: "hint" }, first, "Wheel zooms, drag moves, ", key("Shift"), " and drag sums up a range. Keys: ", key("←"), " ", key("→"), " ", key("+"), " ", key("−"), " ", key("↑"), " ", key("↓"), " phases and parts, ", key("S"), " sums, ", key("F"), " request, ", key("0"), " everything, ", key("/"), " search.");
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
}
