for (const part of [Lanes, View, Drawing, LaneDrawing, Pointer, Hands, Told, Search]) {
  const { constructor, ...own } = Object.getOwnPropertyDescriptors(part.prototype);
  Object.defineProperties(Timeline.prototype, own);
}

const PRINTED_HEIGHT = 900; // a canvas cannot break between pages: it has to fit one
const system = window.matchMedia("(prefers-color-scheme: dark)");
const THEMES = ["auto", "light", "dark"];
let theme = "auto";
try { theme = THEMES.includes(localStorage.getItem("ttftprof-theme")) ? localStorage.getItem("ttftprof-theme") : "auto"; } catch { /* no storage for this file */ }
const timelines = [];
function applyTheme(print) {
  ROOT.dataset.theme = !print && (theme === "dark" || (theme === "auto" && system.matches)) ? "dark" : "light";
  readColours();
  for (const timeline of timelines) timeline.paint();
}
const themeButton = document.getElementById("theme");
themeButton.hidden = false;
const nameTheme = () => { themeButton.textContent = `theme: ${theme}`; };
themeButton.addEventListener("click", () => {
  theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
  try { localStorage.setItem("ttftprof-theme", theme); } catch { /* kept for this page only */ }
  nameTheme();
  applyTheme(false);
});
system.addEventListener("change", () => applyTheme(false));
window.addEventListener("beforeprint", () => {
  for (const folded of document.querySelectorAll("details")) folded.open = true;
  applyTheme(true);
  for (const { root } of timelines) root.style.zoom = Math.min(PRINTED_HEIGHT / root.offsetHeight, 1);
});
window.addEventListener("afterprint", () => {
  for (const { root } of timelines) root.style.zoom = "";
  applyTheme(false);
});
nameTheme();
applyTheme(false);
document.querySelectorAll(".recording").forEach((section, number) => {
  const timeline = new Timeline(section, DATA.recordings[number]);
  timelines.push(timeline);
  timeline.choose(timeline.subject, false);
  for (const button of section.querySelectorAll("[data-choose]")) {
    button.addEventListener("click", () => {
      timeline.picked = timeline.selection = null;
      timeline.choose(Number(button.dataset.choose), true);
    });
  }
});
for (const timeline of DATA.linked ? timelines.slice(0, 1) : timelines) timeline.fitSubject();
ROOT.dataset.ready = Math.round(performance.now());
