/** What lies under the pointer, and says so. */
class Pointer {
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
      const meaning = lane.meaning ? found.map(([name]) => lane.meaning[name]) : [];
      return { title: lane.kind === "activities" ? "activities" : lane.label, rows, lines: [...meaning, found.length > 1 || found[0][3] < end - start ? `within ${duration(end - start)}, ${when}` : when] };
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

  /** A line at a moment, through all lanes; null takes it away. */
  pointAt(ns) {
    this.cursor.hidden = ns === null;
    if (ns !== null) this.cursor.style.transform = `translateX(${this.x(ns)}px)`;
  }
  leave() {
    this.tip.hidden = true;
    for (const peer of this.peers()) peer.pointAt(null);
  }

  hover(event) {
    const box = this.canvas.getBoundingClientRect();
    const x = event.clientX - box.left, y = event.clientY - box.top;
    for (const peer of this.peers()) peer.pointAt(this.toPeer(peer, this.ns(x)));
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
}
