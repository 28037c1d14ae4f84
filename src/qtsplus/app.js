// Runs once in Gradio's HTML component and draws what `props.value` says: text from outside is never read as HTML.
const make = (tag, name, parent, text = "", more = {}) => {
  const node = Object.assign(document.createElement(tag), { className: name, textContent: text }, more);
  return parent.appendChild(node);
};
const clock = (s) => `${Math.floor(s / 60)}:${(s % 60).toFixed(1).padStart(4, "0")}`;
const percent = (part) => `${(100 * part).toFixed(part < 0.1 ? 1 : 0)}%`;
const across = (from, to, length) => `left:${(100 * from) / length}%;width:${(100 * (to - from)) / length}%;`;

class Pane {
  constructor(parent, source, answer) {
    this.answer = answer;
    const root = make("section", "pane", parent);
    if (answer) {
      make("div", "question", root, answer.question);
      make("div", "answer", root, answer.answer || "(an empty answer)");
    }
    const screen = make("div", "screen", root);
    this.video = make("video", "", screen, "", { src: source, playsInline: true, preload: "auto", onclick: play });
    this.video.onloadedmetadata = () => (root.style.maxWidth = `${(64 * this.video.videoWidth) / this.video.videoHeight}vh`);
    this.video.onerror = () => make("div", "note", screen, "This browser cannot play the film. The times below hold all the same.");
    if (answer) this.addEvidence(root, screen);
  }

  addEvidence(root, screen) {
    const { grid, kept, evidence, kept_tokens, visual_tokens, timings, seconds_of_video } = this.answer;
    this.steps = Array.from({ length: grid[0] }, () => new Set());
    for (const token of kept) this.steps[Math.floor(token / (grid[1] * grid[2]))].add(token % (grid[1] * grid[2]));
    // One pixel is one visual token; the browser stretches it over the film.
    this.canvas = make("canvas", "", screen, "", { height: grid[1], width: grid[2] });
    this.box = make("div", "box", screen);
    this.length = seconds_of_video + this.answer.start;
    this.line = this.addTimeline(root);
    const chips = make("div", "chips", root);
    for (const { start, end, weight } of evidence.slice(0, 6)) {
      make("button", "chip", chips, `${clock(start)} to ${clock(end)} · ${percent(weight)}`, { onclick: () => seek(start) });
    }
    const facts = `kept ${kept_tokens.toLocaleString()} of ${visual_tokens.toLocaleString()} tokens (${percent(kept_tokens / visual_tokens)})`;
    make("div", "small", root, `${facts} · first word after ${timings.first_token.toFixed(2)} s, all after ${timings.generate.toFixed(2)} s`);
  }

  addTimeline(root) {
    const line = make("div", "timeline", root, "", { tabIndex: 0, role: "slider", ariaLabel: "Position", ariaValueMin: 0, ariaValueMax: this.length });
    const { start, seconds_per_step, evidence } = this.answer;
    for (const { start, end, weight } of evidence) {
      make("i", "span", line).style.cssText = across(start, end, this.length) + `opacity:${0.4 + 0.6 * weight}`;
    }
    const most = Math.max(...this.steps.map((step) => step.size), 1);
    this.steps.forEach((step, index) => {
      const from = start + index * seconds_per_step;
      make("i", "bar", line).style.cssText = across(from, from + seconds_per_step, this.length) + `height:${(75 * step.size) / most}%`;
    });
    this.head = make("b", "head", line);
    line.onpointerdown = line.onpointermove = ({ buttons, clientX }) => {
      const { left, width } = line.getBoundingClientRect();
      if (buttons) seek((this.length * (clientX - left)) / width);
    };
    line.onkeydown = ({ key }) => {
      const way = { ArrowLeft: -1, ArrowRight: 1 }[key];
      if (way) seek(this.video.currentTime + way * seconds_per_step);
    };
    return line;
  }

  draw(lit) {
    if (!this.answer) return;
    const { start, seconds_per_step, grid, evidence } = this.answer;
    const now = this.video.currentTime;
    this.head.style.left = percent(now / this.length);
    this.line.ariaValueNow = now;
    const seen = evidence.find((one) => one.start <= now && now < one.end);
    this.box.hidden = !seen || !lit;
    if (seen) {
      const [left, top, right, bottom] = seen.box.map((part) => 100 * part);
      this.box.style.cssText = `left:${left}%;top:${top}%;width:${right - left}%;height:${bottom - top}%`;
    }
    const step = Math.min(Math.max(Math.floor((now - start) / seconds_per_step), 0), grid[0] - 1);
    if (this.drawn === `${step} ${lit}`) return;
    this.drawn = `${step} ${lit}`;
    const pixels = new ImageData(grid[2], grid[1]);
    for (let token = 0; token < grid[1] * grid[2]; token++) {
      pixels.data.set([8, 10, 24, lit && !this.steps[step].has(token) ? 205 : 0], 4 * token);
    }
    this.canvas.getContext("2d").putImageData(pixels, 0, 0);
  }
}

let panes = [], asked = [], film = null;
const seek = (seconds) => panes.forEach(({ video }) => (video.currentTime = Math.max(0, seconds)));
const play = () => {
  const paused = panes[0].video.paused;
  panes.forEach(({ video }, index) => ((video.muted = index > 0), paused ? video.play() : video.pause()));
};

const show = (value, answers) => {
  const stage = element.querySelector(".stage");
  const now = panes[0]?.video.currentTime ?? 0;
  stage.replaceChildren();
  panes = [];
  if (value.error) make("div", "note", stage, value.error, { role: "alert" });
  if (!value.film) return value.error || make("div", "empty", stage, "Drop a film to begin.");
  const row = make("div", "panes", stage);
  panes = (answers.length ? answers : [null]).map((answer) => new Pane(row, value.film.url, answer));
  if (film === value.film.url) seek(answers[0]?.evidence[0]?.start ?? now);
  film = value.film.url;
  const bar = make("div", "controls", stage);
  make("button", "play", bar, "Play", { onclick: play });
  make("span", "time", bar);
  if (answers.length) make("label", "", bar, "only the kept tokens").prepend(make("input", "lit", bar, "", { type: "checkbox", checked: true }));
  const legend = answers.length ? " · on the timeline, grey: tokens kept; amber: what the answer rests on" : "";
  make("div", "small", stage, value.facts + legend);
  for (const warning of value.warnings) make("div", "note", stage, warning);
  if (asked.length > 1) make("div", "small", stage, "Asked before");
  for (const earlier of asked.filter((one) => one !== answers)) {
    const text = earlier.map(({ question, answer }) => `${question} ${answer}`).join(" | ");
    make("button", "earlier", stage, text, { onclick: () => show({ ...value, error: null }, earlier) });
  }
};

const update = () => {
  const value = props.value ?? {};
  if (value.film?.url !== film) asked = [];
  if (value.answers) asked.unshift(value.answers);
  show(value, asked[0] ?? []);
};
watch("value", update);
update();

const tick = () => {
  if (!element.isConnected) return;
  const lit = element.querySelector(".lit")?.checked ?? false;
  panes.forEach((pane) => pane.draw(lit));
  if (panes.length) {
    const { video } = panes[0];
    element.querySelector(".time").textContent = `${clock(video.currentTime)} / ${clock(video.duration || 0)}`;
    element.querySelector(".play").textContent = video.paused ? "Play" : "Pause";
  }
  requestAnimationFrame(tick);
};
tick();
