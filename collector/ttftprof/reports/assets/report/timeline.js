/** One recording: its lanes on a canvas, with tools above and what is chosen below. Its methods are
    in files by concern, joined in page.js. */
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
    this.linked = DATA.linked;
    this.origin = 0;
    this.view = { from: 0, to: this.length };
    this.root = section.querySelector(".timeline");
    this.build();
    this.lanes = this.allLanes();
    this.layLanes();
    this.root.hidden = !this.lanes.length;
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
      process.python = process.python.map(unpackCalls);
      process.threadSpans = process.threads.map(unpackSpans);
    }
    for (const sizes of rec.sizes) {
      sizes.classes = [...new Set(sizes.size)].sort((a, b) => a - b);
      sizes.most = Math.max(...sizes.count);
    }
  }

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
    this.linkButton = button("Move together", "All timelines show the same stretch, counted from where their requests begin", () => this.link(!this.linked));
    this.linkButton.setAttribute("aria-pressed", String(this.linked));
    this.linkButton.hidden = !DATA.linked;
    const tools = h("div", { class: "tools", role: "toolbar", "aria-label": "Timeline tools" },
      button("−", "Zoom out (key −)", () => this.zoom(1.6)),
      button("+", "Zoom in (key +)", () => this.zoom(1 / 1.6)),
      ...(this.rec.subjects.length ? [button("Request", "Show the whole request (key F)", () => this.fitSubject())] : []),
      button("Everything", "Show the whole recording (key 0)", () => this.fitAll()),
      this.selectButton, this.linkButton, h("span", { class: "grow" }), this.foundText, this.search);
    this.corner = h("div", { class: "corner" });
    this.rulerCanvas = h("canvas", { "aria-hidden": "true" });
    this.gutter = h("div", { class: "gutter" });
    this.canvas = h("canvas", {
      tabindex: "0", role: "application", "aria-roledescription": "timeline",
      "aria-label": "Timeline. Left and right arrow move, plus and minus zoom, up and down arrow step through phases, Enter zooms to one, S selects what is shown, F shows the request, 0 everything, Escape clears. The same is in the tables below.",
    });
    this.cursor = h("div", { class: "cursor", "aria-hidden": "true" });
    this.tip = h("div", { class: "tip", "aria-hidden": "true" });
    this.tip.hidden = true;
    this.detail = h("div", { class: "detail", "aria-live": "polite", role: "region", "aria-label": "What is chosen" });
    const board = h("div", { class: "board" }, this.corner, h("div", { class: "ruler" }, this.rulerCanvas), this.gutter, h("div", { class: "lanes" }, this.canvas, this.cursor));
    this.root.append(tools, board, this.tip, this.legend(), this.detail);
    this.pointAt(null);
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
}
