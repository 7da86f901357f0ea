/** Which stretch of time is shown, and of which request. */
class View {
  get width() { return this.canvas.clientWidth || 1; }
  x(ns) { return ((ns - this.view.from) / (this.view.to - this.view.from)) * this.width; }
  ns(x) { return this.view.from + (x / this.width) * (this.view.to - this.view.from); }

  /** From when to when there is anything to see: in timelines that move together, in any of them. */
  extent() {
    const own = this.peers().map((peer) => [peer.toPeer(this, 0), peer.toPeer(this, peer.length)]);
    const from = Math.min(...own.map((ends) => ends[0])), to = Math.max(...own.map((ends) => ends[1]));
    const margin = (to - from) * MARGIN;
    return { from: from - margin, to: to + margin };
  }
  get length() { return Math.max(this.rec.length, 1000); }
  /** The timelines that move together, this one included. */
  peers() { return this.linked ? timelines.filter((other) => other.linked) : [this]; }
  /** A moment of this timeline as the other's that is as far from the beginning of its request. */
  toPeer(other, ns) { return ns - this.origin + other.origin; }

  show(from, to) {
    const whole = this.extent();
    const length = Math.min(Math.max(to - from, 1000), whole.to - whole.from);
    const start = Math.min(Math.max((from + to - length) / 2, whole.from), whole.to - length);
    for (const peer of this.peers()) peer.look(this.toPeer(peer, start), length);
  }
  look(from, length) {
    this.view = { from, to: from + length };
    this.root.dataset.view = `${from},${from + length}`;
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
  fitAll() {
    const { from, to } = this.extent();
    this.show(from, to);
  }
  /** The chosen request; of timelines that move together, the longest one. */
  fitSubject() {
    const lengths = this.peers().map((peer) => peer.rec.subjects[peer.subject]).filter(Boolean).map((s) => s.end - s.start);
    if (!lengths.length || !this.rec.subjects[this.subject]) return this.fitAll();
    const length = Math.max(...lengths), margin = Math.max(length * 0.03, 1000);
    this.show(this.origin - margin, this.origin + length + margin);
  }
  link(on) {
    this.linked = on;
    this.linkButton.setAttribute("aria-pressed", String(on));
    if (on) this.fitSubject();
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
    else if (this.linked) this.show(this.view.from, this.view.to); // the others follow
    this.describe();
  }

  markRow(row, chosen) {
    row.setAttribute("aria-selected", String(chosen));
    const list = row.closest(".list");
    if (chosen && (row.offsetTop < list.scrollTop || row.offsetTop > list.scrollTop + list.clientHeight - 30)) list.scrollTop = row.offsetTop - list.clientHeight / 2;
  }
}
