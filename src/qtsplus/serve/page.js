// Runs once in Gradio's HTML component and draws what `props.value` says: text from outside is never read as HTML.
const make = (tag, name, parent, text = "", more = {}) => {
  const node = Object.assign(document.createElement(tag), { className: name, textContent: text }, more);
  return parent.appendChild(node);
};
const clock = (s) => `${Math.floor(s / 60)}:${(s % 60).toFixed(1).padStart(4, "0").replace(".0", "")}`;
const percent = (part) => `${(100 * part).toFixed(part < 0.1 ? 1 : 0)}%`;

class Pane {
  constructor(parent, videos, answer, which) {
    Object.assign(this, { videos, answer, which, evidence: answer?.evidence ?? [] });
    this.root = make("section", "pane", parent);
    if (answer) make("div", "question", this.root, answer.question);
    if (answer) make("div", "answer", this.root, answer.answer || "(an empty answer)");
    this.screen = make("div", "screen", this.root);
    this.line = make("div", "timeline", this.root, "", { tabIndex: 0, role: "slider", ariaValueMin: 0 });
    const row = make("div", "row", this.root);
    make("button", "play", row, "Play", { onclick: play });
    this.time = make("span", "time", row);
    for (const { video, start, end, weight } of this.evidence.slice(0, 6)) {
      const text = `${clock(start)} to ${clock(end)} · ${percent(weight)}`;
      make("button", "chip", row, text, { ariaLabel: text + which, onclick: () => this.open(video, start) });
    }
    if (answer) make("div", "small", this.root, answer.facts);
    this.open(this.evidence[0]?.video ?? Object.keys(videos)[0], this.evidence[0]?.start ?? 0);
  }

  open(name, seconds) {
    if (this.name !== name) this.change(name);
    this.video.currentTime = seconds + 0.01; // some browsers draw nothing at 0
  }

  change(name) {
    Object.assign(this, { name, drawn: null, map: this.answer?.maps[name] });
    this.screen.replaceChildren();
    this.line.ariaLabel = `Position in ${name}${this.which}`;
    const more = { ariaLabel: `Video ${name}${this.which}`, playsInline: true, onclick: play };
    this.video = make("video", "", this.screen, "", { src: this.videos[name].url, ...more });
    this.video.onloadedmetadata = () => {
      this.root.style.maxWidth = `${(62 * this.video.videoWidth) / this.video.videoHeight}vh`;
      this.scale();
    };
    this.video.onerror = () => {
      this.screen.replaceChildren();
      make("div", "note", this.screen, `${name} cannot be played here. The times hold all the same.`);
    };
    const [steps, height, width] = this.map?.grid ?? [0, 1, 1];
    this.canvas = make("canvas", "", this.screen, "", { width, height, hidden: !this.map });
    this.box = make("div", "box", this.screen);
    this.kept = Array.from({ length: steps }, () => new Set());
    this.map?.kept.forEach((token) => this.kept[Math.floor(token / (width * height))].add(token % (width * height)));
    this.scale();
  }

  scale() {
    const { edges, end } = this.map ?? { end: this.video.duration };
    const add = (name, from, to, more) => {
      make("i", name, this.line).style.cssText = `left:${(100 * from) / end}%;width:${(100 * (to - from)) / end}%;${more}`;
    };
    this.line.replaceChildren();
    for (const { video, start, end, weight } of this.evidence) if (video === this.name) add("span", start, end, `opacity:${0.4 + 0.6 * weight}`);
    const most = Math.max(...this.kept.map((tokens) => tokens.size), 1);
    this.kept.forEach(({ size }, index) => add("bar", edges[index], edges[index + 1], `height:${(75 * size) / most}%`));
    this.head = make("b", "head", this.line);
    this.line.onpointerdown = this.line.onpointermove = ({ buttons, clientX }) => {
      const { left, width } = this.line.getBoundingClientRect();
      if (buttons) this.video.currentTime = Math.max(0, (end * (clientX - left)) / width);
    };
    this.line.onkeydown = (event) => {
      const by = { ArrowLeft: -1, ArrowDown: -1, PageDown: -10, Home: -Infinity, ArrowRight: 1, ArrowUp: 1, PageUp: 10, End: Infinity }[event.key];
      if (!by || !(end > 0)) return; // a video that is not loaded yet has no end
      event.preventDefault();
      this.video.currentTime = Math.min(Math.max(this.video.currentTime + by * (edges ? edges[1] - edges[0] : 1), 0), end);
    };
    this.line.ariaValueMax = this.length = end;
  }

  draw(lit) {
    const now = this.video.currentTime;
    this.head.style.left = percent(now / this.length);
    this.line.ariaValueNow = now;
    this.line.ariaValueText = clock(now);
    this.time.textContent = `${clock(now)} / ${clock(this.length || 0)}`;
    const verb = this.video.paused ? "Play" : "Pause";
    Object.assign(this.root.querySelector(".play"), { textContent: verb, ariaLabel: verb + this.which });
    const seen = lit && this.evidence.find(({ video, start, end }) => video === this.name && start <= now && now < end);
    const [left, top, right, bottom] = (seen?.box ?? []).map((part) => 100 * part);
    this.box.style.cssText = seen ? `left:${left}%;top:${top}%;width:${right - left}%;height:${bottom - top}%` : "display:none";
    if (this.map) this.dim(lit, Math.max(this.map.edges.slice(0, -1).findLastIndex((edge) => edge <= now), 0));
  }

  // One pixel of the canvas is one visual token; the browser stretches it over the video.
  dim(lit, step) {
    if (this.drawn === `${step} ${lit}`) return;
    this.drawn = `${step} ${lit}`;
    const { width, height } = this.canvas, pixels = new ImageData(width, height);
    for (let token = 0; token < width * height; token++) {
      pixels.data.set([8, 10, 24, lit && !this.kept[step].has(token) ? 205 : 0], 4 * token);
    }
    this.canvas.getContext("2d").putImageData(pixels, 0, 0);
  }
}

let panes = [], asked = [], about = "";
const play = () => {
  const videos = panes.map(({ video }) => video).filter(({ error }) => !error);
  const plays = videos.some(({ paused }) => !paused);
  videos.forEach((video, index) => ((video.muted = index > 0), plays ? video.pause() : video.play().catch(() => {})));
};

const show = (value) => {
  const { videos, facts, warnings, answers, error } = value, stage = element.querySelector(".stage");
  stage.replaceChildren();
  if (error) make("div", "note", stage, error);
  const row = make("div", "panes", stage), which = (index) => (answers?.[1] ? `, answer ${index + 1}` : "");
  panes = Object.keys(videos).length ? (answers ?? [null]).map((answer, index) => new Pane(row, videos, answer, which(index))) : [];
  if (!panes.length) return error || make("div", "empty", stage, facts);
  for (const warning of warnings) make("div", "note", stage, warning);
  if (answers) make("label", "small", stage, "Dim the rest of the video").prepend(make("input", "lit", stage, "", { type: "checkbox", checked: true }));
  make("div", "small", stage, facts + (answers ? " On the timeline grey is how many tokens were kept, amber what the answer rests on." : ""));
  for (const earlier of asked.filter((one) => one.answers !== answers)) {
    const text = earlier.answers.map(({ question, answer }) => `${question} ${answer}`).join(" | ");
    make("button", "earlier", stage, text, { onclick: () => show(earlier) });
  }
};

const update = () => {
  const { value } = props;
  if (value.about !== about) asked = [];
  about = value.about;
  if (value.answers) asked.unshift(value);
  show({ ...(asked[0] ?? value), error: value.error });
  const said = value.answers?.map(({ question, answer }) => `${question} ${answer || "(an empty answer)"}`).join(" ");
  element.querySelector(".said").textContent = value.error ?? said ?? value.facts; // its place stays: screen readers watch it
};
watch("value", update);
update();

const tick = () => {
  if (!element.isConnected) return;
  panes.forEach((pane) => pane.draw(element.querySelector(".lit")?.checked ?? false));
  requestAnimationFrame(tick);
};
tick();
