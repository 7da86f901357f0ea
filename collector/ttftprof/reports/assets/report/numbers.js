function scaled(value, units, digits) {
  if (!Number.isFinite(value)) return "n/a";
  if (value === 0) return `0 ${units[0][1]}`;
  for (let i = 0; i < units.length; i++) {
    const part = value / units[i][0];
    const whole = Math.abs(part) >= 1 ? String(Math.trunc(Math.abs(part))).length : 1;
    const text = part.toFixed(Math.max((i ? digits : 0) - whole, 0));
    if (Math.abs(Number(text)) < 1000 || i === units.length - 1) return `${text} ${units[i][1]}`;
  }
  return "n/a";
}
const TIME = [[1, "ns"], [1e3, "µs"], [1e6, "ms"], [1e9, "s"]];
const BYTES = [[1, "B"], [1e3, "kB"], [1e6, "MB"], [1e9, "GB"], [1e12, "TB"]];
const BLOCKS = [[1, "B"], [1024, "KiB"], [1048576, "MiB"], [1073741824, "GiB"]];
const COUNTS = [[1, ""], [1e3, "k"], [1e6, "M"], [1e9, "G"]];
const duration = (ns) => (ns ? scaled(ns, TIME, 4) : "0 s");
const size = (bytes) => scaled(bytes, BYTES, 3);
const count = (n) => Math.round(n).toLocaleString("en-US");
const percent = (share) =>
  share > 0 && share < 0.01 ? "<1 %" : share > 0.99 && share < 1 ? ">99 %" : `${Math.round(share * 100)} %`;
function block(bytes) {
  const unit = BLOCKS.filter((u) => u[0] <= bytes).pop() || BLOCKS[0];
  return `${bytes / unit[0]} ${unit[1]}`;
}
