/** Mouse, wheel, touch and keyboard. */
class Hands {
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
    canvas.addEventListener("pointerleave", () => this.leave());
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
    const extent = this.extent(), whole = this.view.to - this.view.from >= (extent.to - extent.from) * 0.99;
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
}
