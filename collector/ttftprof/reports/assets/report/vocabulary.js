/* The timeline: lanes on one canvas, drawn from the JSON in this page. Text from the recording is
   only ever set as text. Times are nanoseconds from the recording's start. */
const DATA = JSON.parse(document.getElementById("data").textContent);
const ROOT = document.documentElement;
const MEANING = {
  queue: "the request waits behind other work",
  evict: "the old model is stopped and its memory comes back",
  launch: "the new server process starts, up to its first touch of the weights",
  load: "the weights are read, until the last is in place",
  init: "contexts, compilation, KV cache, warm-up: until it can serve",
  ready_gap: "it could serve, but the front has not noticed yet",
  prefill: "the prompt is processed",
  first_decode: "the first token is made and sent",
  unexplained: "nothing observed says what this was",
};
const MARGIN = 0.02; // on both sides of everything
const CALL_COLOURS = ["call_a", "call_b", "call_c"];
const DARK_INK = new Set(["evict", "launch", "init", "ready_gap", "queue", "load", "prefill"]);
// Parts that are activities have their colour; any other is a tint of its phase.
const PART_COLOUR = { storage: "storage_wait", fault: "fault", copy: "cpu", transfer: "transfer" };
const PART_ROW = 15;
const MAX_ROWS = 16;
const PIXEL_LIMIT = 16000;
