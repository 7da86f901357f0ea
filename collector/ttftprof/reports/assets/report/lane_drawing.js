/** Each kind of lane, painted. */
class LaneDrawing {
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
    if (lane.kind === "phases") for (const index of this.visible(lane.members, view)) this.paintPhases(ctx, view, lane, index);
    else if (lane.kind === "parts") for (const index of this.visible(lane.members, view)) this.paintParts(ctx, view, lane, index);
    else if (lane.kind === "activities") {
      for (const index of this.visible(lane.members, view)) paintSpans(ctx, this.rec.subjects[index].spans, view, y + 1, height - 4, activity);
    } else if (lane.kind === "thread") paintSpans(ctx, lane.spans, view, y + 2, height - 5, activity);
    else if (lane.kind === "calls") this.paintCalls(ctx, view, lane);
    else if (lane.kind === "process") this.paintProcess(ctx, view, lane);
    else if (lane.kind === "sizes") this.paintSizesLane(ctx, view, lane);
    else if (lane.kind === "ticks") this.paintTicks(ctx, view, lane);
    else if (lane.kind === "curve") this.paintCurveLane(ctx, view, lane);
  }

  /** Which requests of a lane are to be painted: of those narrower than a pixel one a pixel, and the
      one that was picked. */
  *visible(members, view) {
    let pixel = NaN;
    for (const index of members) {
      const { start, end } = this.rec.subjects[index];
      const x0 = view.x(start), x1 = view.x(end);
      if (x1 < -10 || x0 > view.width) continue;
      const thin = x1 - x0 < 1 && !(this.picked && this.picked.subject === index);
      if (thin && Math.floor(x0) === pixel) continue;
      pixel = Math.floor(x0);
      yield index;
    }
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
}
