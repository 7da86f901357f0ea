/** Which lanes there are, their order and their labels. */
class Lanes {
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
      ...this.curves((s) => s.name === "cached_bytes", (s) => `${fileName(s.path || "")} cached`),
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
      process.python.forEach((calls, i) => lanes.push({ kind: "calls", label: i ? calls.label : "Python code", title: `${calls.label}, by samples`, calls, meaning: DATA.python, parent: i ? key : undefined, child: true, height: 18 }));
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
}
