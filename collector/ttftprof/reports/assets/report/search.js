/** Finds by text, and goes there. */
class Search {
  find(text) {
    this.query = text.trim().toLowerCase();
    const all = this.query ? this.findAll(this.query) : [];
    this.found = all.slice(0, 500);
    this.foundAt = -1;
    const first = all.length > this.found.length ? `, the first ${this.found.length} are shown` : "";
    this.foundText.textContent = !this.query ? "" : all.length ? `${all.length} found${first}, Enter: next` : "nothing found";
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
      for (const { names, spans } of [process.calls, process.driver_calls, ...process.python]) {
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
