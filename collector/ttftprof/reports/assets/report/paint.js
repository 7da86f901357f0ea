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
    returns the peak of what is shown. */
function paintCurve(ctx, series, view, y, height, colour, full) {
  const total = isTotal(series.name);
  const values = new Float64Array(view.width);
  let highest = 0;
  let before = valueAt(series, view.ns(0));
  for (let x = 0; x < view.width; x++) {
    const now = valueAt(series, view.ns(x + 1));
    values[x] = total ? ((now - before) / (view.ns(x + 1) - view.ns(x))) * 1e9 : now;
    before = now;
    if (values[x] > highest) highest = values[x];
  }
  const most = full || highest || 1, bottom = y + height;
  ctx.fillStyle = ctx.strokeStyle = colour;
  for (let x = 0; x < view.width; x++) {
    if (!(values[x] > 0)) continue;
    const first = x, line = new Path2D();
    for (; values[x] > 0; x++) {
      const top = bottom - Math.max((height * Math.min(values[x], most)) / most, 1);
      line.lineTo(x, top);
      line.lineTo(x + 1, top);
    }
    const area = new Path2D(line);
    area.lineTo(x, bottom);
    area.lineTo(first, bottom);
    ctx.globalAlpha = total ? 1 : 0.28;
    ctx.fill(area);
    ctx.globalAlpha = 1;
    ctx.lineWidth = 1.5;
    if (!total) ctx.stroke(line);
  }
  ctx.lineWidth = 1;
  return total ? steepest(series, view.from, view.to) : highest;
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
