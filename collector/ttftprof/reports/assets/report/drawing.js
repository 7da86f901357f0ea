/** Everything on the two canvases. */
class Drawing {
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
    const ctx = this.canvas.getContext("2d");
    const view = { ...this.view, width: this.width, x: (ns) => this.x(ns), ns: (x) => this.ns(x) };
    ctx.clearRect(0, 0, view.width, this.height);
    ctx.textBaseline = "middle";
    this.paintGrid(ctx, view);
    for (const lane of this.shown) this.paintLane(ctx, view, lane);
    this.paintMarks(ctx, view);
    this.paintRuler(view);
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
    for (const index of this.visible(this.rec.subjects.keys(), { x: at, width })) {
      for (const [code, start, end] of this.rec.subjects[index].phases) {
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
}
